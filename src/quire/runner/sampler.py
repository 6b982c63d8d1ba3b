"""The sampler: from logits to tokens and log-probabilities, and what it must remember of each request.

For a request the order is: penalties, bias and masks, temperature, min-p, top-k, top-p, then Gumbel noise
keyed by (seed, choice, purpose, position, token id); the largest score wins. So no state of a generator
exists that the order of requests could disturb, and a request gets the same tokens in any company.
Reported log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import RequestInfo, TokenLogprobs
from quire.ops import Kernels, choose_kernels
from quire.ops import sampling as ops
from quire.ops.logit_edits import Edits, Lists

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOTHING_LEFT = "no token is left: allowed_token_ids, bad_words, logit_bias and min_tokens mask all"

_NO_IDS = np.zeros(0, np.int64)
_NO_VALUES = np.zeros(0, np.float32)

_STATE = np.dtype(
    [
        ("next", np.int64),  # the position that the next token takes
        ("stream", np.uint64),  # `noise_stream`
        ("temperature", np.float32),  # 0: greedy
        ("log_min_p", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("logprobs", np.int64),  # how many to report beside the token's; -1: none at all
        ("edited", np.bool_),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ]
)
"""What a request's row of the sampler's table says, so that a step is prepared for all requests at once."""


@dataclass(slots=True)
class SampledRow:
    """One sampled token; `error` says why there is none (`token` is -1 then)."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class TokenCounts:
    """The different tokens of one request, and how often each stands in the output: for penalties.

    Kept as arrays that grow, so that a step does not convert a long history again.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        counts = Counter(output)
        distinct = list(dict.fromkeys([*prompt, *output]))
        self._place = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, np.int64)
        self._counts = np.array([counts[token] for token in distinct], np.float32)

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            room = max(64, place)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each different token of prompt and output once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `ids` stands in the output."""
        return self._counts[: len(self._place)]


@dataclass(slots=True)
class _Edited:
    """What the sampler keeps of a request whose logits are edited, beside its row of the table.

    Attributes:
        prompt_length: tokens before the output.
        output: tokens so far; kept only for `bad_words`.
        counts: for penalties; None: there are none.
        allowed: no id: all are.
        stop_ids: banned before `min_tokens`.
    """

    prompt_length: int
    output: list[int]
    counts: TokenCounts | None
    bias_ids: NDArray[np.int64]
    biases: NDArray[np.float32]
    allowed: NDArray[np.int64]
    stop_ids: list[int]
    min_tokens: int
    bad_words: list[list[int]]

    def append(self, token: int) -> None:
        if self.bad_words:
            self.output.append(token)
        if self.counts is not None:
            self.counts.add(token)

    def banned(self, position: int) -> NDArray[np.int64]:
        """Ids that must not come next: stop ids before `min_tokens`, ends of bad words."""
        ids = self.stop_ids if position - self.prompt_length < self.min_tokens else []
        if not self.bad_words and not ids:
            return _NO_IDS
        found = set(ids)
        for word in self.bad_words:
            before = len(word) - 1
            if before <= len(self.output) and self.output[len(self.output) - before :] == word[:-1]:
                found.add(word[-1])
        return np.array(sorted(found), np.int64)


class Sampler:
    """Samples the rows of each step. One per model runner; not thread-safe.

    Args:
        vocab_size: width of the logits.
        kernels: what computes; the best that this machine has, unless said.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, kernels: Kernels | None = None, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels or choose_kernels()
        self._device = torch.device(device)
        self._table = np.zeros(64, _STATE)
        self._free = list(range(len(self._table)))
        self._slots: dict[int, int] = {}
        self._edited: dict[int, _Edited] = {}

    def start(self, info: RequestInfo) -> None:
        """Takes up a request.

        Raises:
            ValueError: its parameters have no seed, or a token id is not one of the vocabulary's.
        """
        params = info.params.resolved()
        if params.seed is None and not params.greedy:
            raise ValueError(f"request {info.request} has no seed; the engine sets one at admission")
        edited = self._edited_state(info)
        vocab = self._vocab_size
        state = {
            "next": len(info.prompt_token_ids) + len(info.output_token_ids),
            "stream": ops.noise_stream(params.seed or 0, info.choice, ops.Purpose.SAMPLE),
            "temperature": 0.0 if params.greedy else params.temperature,
            "log_min_p": math.log(params.min_p) if params.min_p else -math.inf,
            "top_k": min(params.top_k or vocab, vocab),
            "top_p": params.top_p if params.top_p and params.top_p < 1 else math.inf,
            "logprobs": -1 if params.logprobs is None else params.logprobs,
            "edited": edited is not None,
            "repetition": params.repetition_penalty or 1.0,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
        }
        if not self._free:
            self._free = list(range(len(self._table), 2 * len(self._table)))
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        slot = self._slots[info.request] = self._free.pop()
        self._table[slot] = tuple(state[name] for name in _STATE.names or ())
        if edited is not None:
            self._edited[info.request] = edited

    def _edited_state(self, info: RequestInfo) -> _Edited | None:
        """None where nothing changes the request's logits."""
        params, vocab = info.params, self._vocab_size
        repetition = params.repetition_penalty or 1.0
        penalized = params.presence_penalty != 0 or params.frequency_penalty != 0 or repetition != 1
        bias, allowed = params.logit_bias or {}, set(params.allowed_token_ids or ())
        # What cannot be sampled need not be banned, and a word cannot be completed that holds such a token.
        bad_words = [word for word in info.bad_words if word and max(word) < vocab]
        if not (penalized or bias or allowed or bad_words or params.min_tokens > 0):
            return None
        if penalized:
            self._check_ids(info, "prompt_token_ids", info.prompt_token_ids)
            self._check_ids(info, "output_token_ids", info.output_token_ids)
        self._check_ids(info, "logit_bias", bias)
        self._check_ids(info, "allowed_token_ids", allowed)
        return _Edited(
            prompt_length=len(info.prompt_token_ids),
            output=list(info.output_token_ids) if bad_words else [],
            counts=TokenCounts(info.prompt_token_ids, info.output_token_ids) if penalized else None,
            bias_ids=np.array(list(bias), np.int64),
            biases=np.array(list(bias.values()), np.float32),
            allowed=np.array(sorted(allowed), np.int64),
            stop_ids=sorted(token for token in info.stop_token_ids if 0 <= token < vocab),
            min_tokens=params.min_tokens,
            bad_words=bad_words,
        )

    def _check_ids(self, info: RequestInfo, name: str, ids: Iterable[int]) -> None:
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self._vocab_size:
            raise ValueError(
                f"request {info.request}: {name} has the token id {low if low < 0 else high}; "
                f"it must be from 0 to {self._vocab_size - 1}"
            )

    def end(self, request: int) -> None:
        """Forgets a request; one that is not known is ignored."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
            self._edited.pop(request, None)

    def sample(self, logits: Tensor, rows: list[tuple[int, int]]) -> list[SampledRow]:
        """Samples one token a row, and remembers that its request has gone on.

        Args:
            logits: [rows, vocab] fp32, contiguous. They may be overwritten.
            rows: per row, the request and the absolute position that the sampled token will take. A
                request has at most one row.

        Returns:
            One entry a row. A row whose logits are not finite, or whose masks leave no token, has an error
            and leaves its request as it was; the other rows are as they would be without it.

        Raises:
            ValueError: a position that does not follow from the request's prompt and output so far.
        """
        if not rows:
            return []
        slots = np.array([self._slots[request] for request, _ in rows])
        state = self._table[slots]
        self._check_positions(state["next"], rows)
        asked, edited = (state["logprobs"] >= 0).nonzero()[0], state["edited"].nonzero()[0]
        raw, raw_rows = logits, asked
        if len(asked) and state["edited"][asked].any():  # then keep copies, since what follows changes them
            raw, raw_rows = logits[torch.from_numpy(asked)], np.arange(len(asked))
        finite = np.ones(len(rows), np.bool_)
        if len(edited):
            finite[edited] = self._edit(logits, state, edited, [rows[i][0] for i in edited.tolist()])
        tokens = self._kernels.sample(logits, self._filters(state)).cpu().numpy()
        good = finite & (tokens >= 0)
        self._table["next"][slots[good]] += 1
        for i in edited.tolist():
            if good[i]:
                self._edited[rows[i][0]].append(int(tokens[i]))
        told = good[asked]
        logprobs = self._logprobs(raw, raw_rows[told], tokens[asked[told]], state["logprobs"][asked[told]])
        return _sampled_rows(tokens, good, finite & state["edited"], asked[told], logprobs)

    def score(self, logits: Tensor, targets: list[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens, for prompts.

        Args:
            logits: [rows, vocab] fp32, contiguous; not changed.
            targets: the token that follows each row's.
            top: how many of the best tokens to report beside it.

        Returns:
            One entry a row. A row whose logits are not finite has NaN as the value of its target, alone.
        """
        count = len(targets)
        return self._logprobs(logits, np.arange(count), np.array(targets, np.int64), np.full(count, top))

    # -- parts ---------------------------------------------------------------------------------------------

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.copy()).to(self._device)

    def _check_positions(self, expected: NDArray[np.int64], rows: list[tuple[int, int]]) -> None:
        wrong = (expected != [position for _, position in rows]).nonzero()[0]
        if len(wrong):
            request, position = rows[wrong[0]]
            raise ValueError(f"request {request} samples position {position}, but its next is {expected[wrong[0]]}")

    def _edit(self, logits: Tensor, state: NDArray[Any], index: NDArray[np.int64], requests: list[int]) -> NDArray[Any]:
        """Edits the rows `index`; says which of them were finite before."""
        held, state, none = [self._edited[request] for request in requests], state[index], (_NO_IDS, _NO_VALUES)
        seen = [(e.counts.ids, e.counts.counts) if e.counts else none for e in held]
        banned = [e.banned(position) for e, position in zip(held, state["next"].tolist(), strict=True)]
        edits = Edits(
            rows=self._tensor(index),
            repetition=self._tensor(state["repetition"]),
            frequency=self._tensor(state["frequency"]),
            presence=self._tensor(state["presence"]),
            seen=Lists.of([ids for ids, _ in seen], [counts for _, counts in seen], self._device),
            bias=Lists.of([e.bias_ids for e in held], [e.biases for e in held], self._device),
            allowed=Lists.of([e.allowed for e in held], device=self._device),
            banned=Lists.of(banned, device=self._device),
        )
        finite: NDArray[Any] = self._kernels.edit_logits(logits, edits).cpu().numpy()
        return finite

    def _filters(self, state: NDArray[Any]) -> ops.Filters:
        return ops.Filters(
            temperature=self._tensor(state["temperature"]),
            log_min_p=self._tensor(state["log_min_p"]),
            top_k=self._tensor(state["top_k"]),
            top_p=self._tensor(state["top_p"]),
            keys=self._tensor(ops.noise_keys(state["stream"], state["next"])),
        )

    def _logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], tops: NDArray[np.int64]
    ) -> list[TokenLogprobs]:
        """Raw log-probabilities of some rows: each row's token, then its best ones."""
        if not len(rows):
            return []
        scores = self._kernels.token_scores(logits, self._tensor(rows), self._tensor(tokens), int(tops.max()))
        table = zip(scores.ids.tolist(), scores.values.tolist(), scores.ranks.tolist(), tops.tolist(), strict=True)
        return [_token_logprobs(ids, values, rank, top) for ids, values, rank, top in table]


def _token_logprobs(ids: list[int], values: list[float], rank: int, top: int) -> TokenLogprobs:
    """`top` is how many of the best to report, fewer where the vocabulary ends, and none for a row not finite."""
    count = 0 if math.isnan(values[0]) else min(top, len(ids) - 1)
    return TokenLogprobs(ids[: 1 + count], values[: 1 + count], [rank, *range(1, 1 + count)])


def _sampled_rows(
    tokens: NDArray[np.int64],
    good: NDArray[np.bool_],
    masked: NDArray[np.bool_],
    told: NDArray[np.int64],
    logprobs: list[TokenLogprobs],
) -> list[SampledRow]:
    """`masked`: rows that failed for their edits, if they did; `told`: to which rows `logprobs` belong."""
    sampled = [SampledRow(token) for token in tokens.tolist()]
    for i in (~good).nonzero()[0].tolist():
        sampled[i] = SampledRow(-1, error=NOTHING_LEFT if masked[i] else NOT_FINITE)
    for i, entry in zip(told.tolist(), logprobs, strict=True):
        sampled[i].logprobs = entry
    return sampled
