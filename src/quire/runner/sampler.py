"""The sampler: from logits to tokens and log-probabilities, and what it must remember of each request.

For a request the order is: penalties, bias and masks, temperature, min-p, top-k, top-p, then Gumbel noise
keyed by (seed, choice, purpose, position, token id); the largest score wins. So no state of a generator
exists that the order of requests could disturb, and a request gets the same tokens in any company.
Reported log-probabilities are those of the raw logits.

To verify drafts, a request has several rows: each is sampled as if the drafts before it were its tokens, and how far
it has gone is told afterwards (`take`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import RequestInfo, TokenLogprobs
from quire.ops import Kernels, choose_kernels, rejection
from quire.ops import sampling as ops
from quire.ops.logit_edits import Edits, History, Lists, Masks, count_tokens, list_arrays
from quire.runner.device import Device
from quire.runner.edited import Edited, has_penalties
from quire.runner.proposer import Ahead, Row
from quire.runner.token_counts import DeviceCounts, DeviceMasks, TokenCounts, padded

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOTHING_LEFT = "no token is left: allowed_token_ids, bad_words, logit_bias and min_tokens mask all"

_STATE = np.dtype(
    [
        ("next", np.int64),  # the position that the next token takes
        ("stream", np.uint64),  # `noise_stream`
        ("accept", np.uint64),  # those of the classic rule
        ("resample", np.uint64),
        ("temperature", np.float32),  # 0: greedy
        ("log_min_p", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("logprobs", np.int64),  # how many to report beside the token's; -1: none at all
        ("edited", np.bool_),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("history", np.int64),  # row of `DeviceCounts`; 0: none
        ("mask", np.int64),  # row of `DeviceMasks`; 0: none
    ]
)
"""What a request's row of the sampler's table says, so that a step is prepared for all requests at once."""

_STREAMS = {"stream": ops.Purpose.SAMPLE, "accept": ops.Purpose.ACCEPT, "resample": ops.Purpose.RESAMPLE}

_FILTERS = 5
"""Arrays that `_filter_arrays` makes."""

CANDIDATES = 64
"""Tokens among which a tree's branches are chosen."""


@dataclass(slots=True)
class SampledRow:
    """One sampled token; `error` says why there is none (`token` is -1 then)."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Verified(NamedTuple):
    """Rows of one request that verify drafts by the classic rule: see `rejection.verify`.

    Attributes:
        first: its first row; each of the drafts has one, and there is one more.
        distributions: [drafts, vocabulary], what they were drawn from; None: each was certain.
    """

    first: int
    drafts: list[int]
    distributions: Tensor | None


@dataclass(slots=True)
class Scored:
    """Log-probabilities that the device may still be working on."""

    _scores: ops.TokenScores
    _tops: NDArray[np.int64]

    def finish(self) -> list[TokenLogprobs]:
        """One entry a row; to be called once the device has come past the launch (`Device.mark`)."""
        scores = self._scores
        table = zip(
            scores.ids.tolist(), scores.values.tolist(), scores.ranks.tolist(), self._tops.tolist(), strict=True
        )
        return [_token_logprobs(ids, values, rank, top) for ids, values, rank, top in table]


@dataclass(slots=True)
class Sampled:
    """A token a row, on which the device may still be working.

    Attributes:
        tokens: [rows] int64 on the device; -1 where there is none.
    """

    tokens: Tensor
    _on_host: Tensor  # the same
    _finite: Tensor  # [edited rows] bool, on the host: whether each was finite before its edits
    _edited: NDArray[np.int64]  # which rows were
    _told: list[tuple[int, Edited]]  # rows whose requests must know their token on the host
    _asked: NDArray[np.int64]  # rows that want log-probabilities
    _scored: Scored | None  # of these

    def tell(self) -> None:
        """Lets the requests know their tokens, once."""
        tokens = self._on_host.tolist() if self._told else []
        for row, request in self._told:
            request.append(tokens[row])
        self._told = []

    def finish(self) -> list[SampledRow]:
        """One entry a row; to be called once the device has come past the launch (`Device.mark`)."""
        self.tell()
        sampled = [SampledRow(token, error=None if token >= 0 else NOT_FINITE) for token in self._on_host.tolist()]
        for i, finite in zip(self._edited.tolist(), self._finite.tolist(), strict=True):
            if finite and sampled[i].error is not None:
                sampled[i].error = NOTHING_LEFT
        for i, entry in zip(self._asked.tolist(), self._scored.finish() if self._scored else (), strict=True):
            if sampled[i].error is None:
                sampled[i].logprobs = entry
        return sampled


class Sampler:
    """Samples the rows of each step. One per model runner; not thread-safe.

    A step has two halves, so that the host may prepare the next one in between: `launch` queues the work, and
    `Sampled.finish` reads what came of it once the device is done.

    Args:
        vocab_size: width of the logits.
        kernels: what computes; the best that this machine has, unless said.
        device: where the logits are; the CPU, unless said.
    """

    def __init__(self, vocab_size: int, kernels: Kernels | None = None, device: Device | None = None) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels or choose_kernels()
        self._device = device or Device()
        self._table = np.zeros(64, _STATE)
        self._free = list(range(len(self._table)))
        self._slots: dict[int, int] = {}
        self._edited: dict[int, Edited] = {}
        self._greedy: dict[int, ops.Filters] = {}  # by the number of rows
        self._history = DeviceCounts(vocab_size, self._device) if self._kernels.reads_spans else None
        self._masks = DeviceMasks(vocab_size, self._device)

    def start(self, info: RequestInfo) -> None:
        """Takes up a request.

        Raises:
            ValueError: its parameters have no seed, or a token id is not one of the vocabulary's.
        """
        params = info.params.resolved()
        if params.seed is None and not params.greedy:
            raise ValueError(f"request {info.request} has no seed; the engine sets one at admission")
        penalized = has_penalties(info)
        edited = self._edited_state(info, penalized)
        counted = self._history if penalized else None
        state = {
            "next": len(info.prompt_token_ids) + len(info.output_token_ids),
            **{name: ops.noise_stream(params.seed or 0, info.choice, purpose) for name, purpose in _STREAMS.items()},
            "temperature": 0.0 if params.greedy else params.temperature,
            "log_min_p": math.log(params.min_p) if params.min_p else -math.inf,
            "top_k": min(params.top_k or self._vocab_size, self._vocab_size),
            "top_p": params.top_p if params.top_p and params.top_p < 1 else math.inf,
            "logprobs": -1 if params.logprobs is None else params.logprobs,
            "edited": edited is not None,
            "repetition": params.repetition_penalty or 1.0,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
            "history": counted.take(info.prompt_token_ids, info.output_token_ids) if counted else 0,
            "mask": self._masks.take(params.allowed_token_ids or ()),
        }
        if not self._free:
            self._free = list(range(len(self._table), 2 * len(self._table)))
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        slot = self._slots[info.request] = self._free.pop()
        self._table[slot] = tuple(state[name] for name in _STATE.names or ())
        if edited is not None:
            self._edited[info.request] = edited

    def _edited_state(self, info: RequestInfo, penalized: bool) -> Edited | None:
        """None where nothing changes the request's logits."""
        params, vocab = info.params, self._vocab_size
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
        # What cannot be sampled need not be banned, and a word cannot be completed that holds such a token.
        bad_words = [word for word in info.bad_words if word and max(word) < vocab]
        if not (penalized or bias or allowed or bad_words or params.min_tokens > 0):
            return None
        if penalized:
            self._check_ids(info, "prompt_token_ids", info.prompt_token_ids)
            self._check_ids(info, "output_token_ids", info.output_token_ids)
        self._check_ids(info, "logit_bias", bias)
        self._check_ids(info, "allowed_token_ids", allowed)
        on_host = penalized and self._history is None
        return Edited(
            prompt_length=len(info.prompt_token_ids),
            known=len(info.prompt_token_ids) + len(info.output_token_ids),
            output=list(info.output_token_ids) if bad_words else [],
            counts=TokenCounts(info.prompt_token_ids, info.output_token_ids) if on_host else None,
            bias_ids=np.array(list(bias), np.int64),
            biases=np.array(list(bias.values()), np.float32),
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
            self._masks.give_back(int(self._table["mask"][slot]))
            if self._history:
                self._history.give_back(int(self._table["history"][slot]))
            self._edited.pop(request, None)

    # -- a step --------------------------------------------------------------------------------------------

    def launch(self, logits: Tensor, rows: Sequence[tuple[int, int]]) -> Sampled:
        """Queues the sampling of one token a row, and remembers that each row's request has gone on.

        The next launch need not wait until this one is finished, but where a request has `bad_words`: what they
        mask depends on tokens that the host must know. (So do penalties on a CPU, where nothing is ever late.)

        Args:
            logits: [rows, vocab] fp32, contiguous. They may be overwritten.
            rows: per row, the request and the absolute position that the sampled token will take. A
                request has at most one row.

        Returns:
            What will have one entry a row. A row whose logits are not finite, or whose masks leave no token, has
            an error; the other rows are as they would be without it.

        Raises:
            ValueError: a position that does not follow from the request's prompt and output so far.
            RuntimeError: a request needs tokens on the host, and its last launch was not finished.
        """
        slots = np.array([self._slots[request] for request, _ in rows], np.int64)
        state = self._table[slots]
        self._check_positions(state["next"], rows)
        sampled, edits = self._launch(logits, rows, state, None, ())
        # Requests go on only now, so that a step for which the memory did not suffice can be tried again.
        if edits is not None and isinstance(edits.seen, History):
            count_tokens(edits.seen, sampled.tokens[edits.rows])
        self._table["next"][slots] += 1
        if not self._device.asynchronous:
            sampled.tell()
        return sampled

    def launch_behind(self, logits: Tensor, places: Sequence[Row], verified: Sequence[Verified] = ()) -> Sampled:
        """Queues the sampling of one token a place, any number of which may be a request's.

        The requests go on when `take` says which tokens are theirs; everything before must have been told.

        Args:
            logits: [places, vocab] fp32, contiguous. They may be overwritten.
            verified: rows whose drafts are accepted by the classic rule: they get the draft where it is accepted, else
                what was drawn in its place.

        Returns, raises: as `launch`.
        """
        rows = [(place.request, place.position) for place in places]
        state, ahead = self._state_behind(places)
        return self._launch(logits, rows, state, ahead, verified)[0]

    def launch_ahead(self, logits: Tensor, rows: Sequence[tuple[int, int]], ahead: Ahead) -> Sampled:
        """The same for rows of which the host knows no more than a bound, so that nothing need be finished before.

        The requests go on when `count` and `take` say which tokens are theirs.

        Args:
            rows: per row, the request and at most the position that the token will take: the very one, and alone,
                where `needs_host`.
        """
        return self._launch(logits, rows, self._state_at(rows), ahead, ())[0]

    def draw_ahead(self, logits: Tensor, rows: Sequence[tuple[int, int]], ahead: Ahead) -> Tensor:
        """The tokens [rows] that `launch_ahead` would sample."""
        filters, edits, _ = self._prepare(self._state_at(rows), ahead, [request for request, _ in rows])
        return self._draw(logits, filters, edits)[0]

    def needs_host(self, request: int, length: int) -> bool:
        """Whether what is masked behind `length` tokens or more depends on what these are, or how many."""
        edited = self._edited.get(request)
        return edited is not None and edited.needs_host(length)

    def count(self, requests: Sequence[int], tokens: Tensor) -> None:
        """The next tokens [requests, most] of requests' outputs, -1 where there are fewer, for their penalties.

        What the host must know of them, `take` says.
        """
        history = self._table["history"][[self._slots[request] for request in requests]]
        if self._history is not None and history.any():
            [places] = self._device.upload(history)
            places = places.repeat_interleave(tokens.shape[1])
            count_tokens(History(self._history.counts, places), tokens.flatten())

    def draw(self, logits: Tensor, places: Sequence[Row]) -> Tensor:
        """The tokens [places] that would be sampled there: see `launch_behind`. Nobody goes on by it."""
        filters, edits = self._prepare_behind(places)
        return self._draw(logits, filters, edits)[0]

    def filters_ahead(
        self, requests: Sequence[int], positions: Sequence[int], counts: Sequence[int]
    ) -> list[ops.Filters] | None:
        """How `draw` samples the requests' next tokens, from `positions` on: one entry for each position.

        None where some request's logits are edited: that depends on the tokens.

        Args:
            counts: for each entry, how many of the requests it is for, the first ones; never more than in the one
                before.
        """
        slots = [self._slots[request] for request in requests]
        self._check_positions(self._table["next"][slots], list(zip(requests, positions, strict=True)))
        if any(request in self._edited for request in requests):
            return None
        state = self._table[slots]
        if not state["temperature"].any():
            return [self._greedy_filters(count) for count in counts]
        ahead = np.array(positions) + np.arange(len(counts))[:, None]  # [entries, requests]
        *sent, keys = self._device.upload(*_filter_arrays(state, ahead))
        every = self._filters(state, [*sent, keys])
        made = []
        for count, row in zip(counts, keys, strict=True):
            if count < len(row):
                sent, row = [tensor[:count] for tensor in sent], row[:count]
            made.append(ops.Filters(sent[0], sent[1], sent[2], sent[3], row, every.some_top_k, every.some_top_p))
        return made

    def _greedy_filters(self, count: int) -> ops.Filters:
        """Of so many rows that are greedy: whatever else their requests ask for, and wherever they are, is all one."""
        if count not in self._greedy:
            state = np.zeros(count, _STATE)
            state["log_min_p"], state["top_k"], state["top_p"] = -math.inf, self._vocab_size, math.inf
            self._greedy[count] = self._filters(state, self._device.upload(*_filter_arrays(state, state["next"])))
        return self._greedy[count]

    def distributions(self, logits: Tensor, places: Sequence[Row]) -> Tensor:
        """What `draw` draws from: probabilities [places, vocab]. The logits may be overwritten."""
        filters, edits = self._prepare_behind(places)
        if edits is not None:
            self._kernels.edit_logits(logits, edits)
        probabilities: Tensor = rejection.probabilities(logits, filters)
        return probabilities

    def candidates(self, logits: Tensor, places: Sequence[Row], width: int) -> tuple[Tensor, Tensor]:
        """The tokens that are likeliest to be sampled: ids and log-confidences [places, width].

        The confidence is the softmax of logits over temperature plus the noise with which they will be sampled, among
        the best `CANDIDATES`; greedy requests have neither. Filters are left out: their survivors come first anyway.
        """
        filters, edits = self._prepare_behind(places)
        if edits is not None:
            self._kernels.edit_logits(logits, edits)
        values, ids = logits.topk(min(CANDIDATES, logits.shape[1]), -1)
        noisy = filters.temperature > 0
        scores = values.double() / torch.where(noisy, filters.temperature, 1.0)[:, None]
        noise = ops.gumbel(ops.noise_bits(filters.keys[:, None], ids))
        scores = (scores + torch.where(noisy[:, None], noise, 0.0)).log_softmax(-1)
        best = scores.topk(min(width, scores.shape[1]), -1)
        return ids.gather(1, best.indices), best.values

    def take(self, request: int, tokens: Sequence[int], counted: bool = False) -> None:
        """These are the request's next tokens; `counted` where `count` was told of them."""
        slot = self._slots[request]
        self._table["next"][slot] += len(tokens)
        history = int(self._table["history"][slot])
        if history > 0 and self._history is not None and not counted:
            self._history.add(history, tokens)
        edited = self._edited.get(request)
        if edited is not None:
            for token in tokens:
                edited.append(token)

    def sample(self, logits: Tensor, rows: list[tuple[int, int]]) -> list[SampledRow]:
        """`launch`, and wait for what comes of it."""
        sampled = self.launch(logits, rows)
        self._device.mark().wait()
        return sampled.finish()

    def launch_score(self, logits: Tensor, targets: list[int], top: int) -> Scored:
        """Queues the log-probabilities of given tokens, for prompts.

        Args:
            logits: [rows, vocab] fp32, contiguous; not changed.
            targets: the token that follows each row's.
            top: how many of the best tokens to report beside it.

        Returns:
            What will have one entry a row. A row whose logits are not finite has NaN as the value of its target,
            alone.
        """
        rows, ids = self._device.upload(np.arange(len(targets)), np.array(targets, np.int64))
        return self._launch_scores(logits, rows, ids, np.full(len(targets), top))

    def score(self, logits: Tensor, targets: list[int], top: int) -> list[TokenLogprobs]:
        """`launch_score`, and wait for what comes of it."""
        scored = self.launch_score(logits, targets, top)
        self._device.mark().wait()
        return scored.finish()

    # -- parts ---------------------------------------------------------------------------------------------

    def _launch(
        self,
        logits: Tensor,
        rows: Sequence[tuple[int, int]],
        state: NDArray[Any],
        ahead: Sequence[Sequence[int]] | Ahead | None,
        verified: Sequence[Verified],
    ) -> tuple[Sampled, Edits | None]:
        """What `launch` and `launch_behind` share; `ahead` is None where no request has more than one row."""
        requests = [request for request, _ in rows]
        asked, edited = (state["logprobs"] >= 0).nonzero()[0], state["edited"].nonzero()[0]
        filters, edits, [asked_rows] = self._prepare(state, ahead, requests, asked)
        raw, raw_rows = logits, asked_rows
        if state["edited"][asked].any():  # then keep copies, since what follows changes them
            raw, raw_rows = logits[asked_rows], torch.arange(len(asked), device=logits.device)
        tokens, finite = self._draw(logits, filters, edits)
        if verified:
            self._verify(logits, filters, state, tokens, verified)
        scored = None
        if len(asked):
            scored = self._launch_scores(raw, raw_rows, tokens[asked_rows].clamp_(min=0), state["logprobs"][asked])
        told = []
        if ahead is None:
            held = [(i, self._edited[requests[i]]) for i in edited.tolist()]
            told = [(i, request) for i, request in held if request.needs_tokens]
        on_host, finite = self._device.download(tokens, finite)
        return Sampled(tokens, on_host, finite, edited, told, asked, scored), edits

    def _state_at(self, rows: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Rows of the table for these requests, with these positions in `next`."""
        state = self._table[[self._slots[request] for request, _ in rows]]
        state["next"] = [position for _, position in rows]
        return state

    def _prepare_behind(self, places: Sequence[Row]) -> tuple[ops.Filters, Edits | None]:
        state, ahead = self._state_behind(places)
        filters, edits, _ = self._prepare(state, ahead, [place.request for place in places])
        return filters, edits

    def _state_behind(self, places: Sequence[Row]) -> tuple[NDArray[Any], list[Sequence[int]]]:
        """Rows of the table for these places, with their positions in `next`; and their drafts."""
        known = self._table["next"][[self._slots[place.request] for place in places]]
        self._check_positions(known, [(place.request, place.position - len(place.ahead)) for place in places])
        return self._state_at([(place.request, place.position) for place in places]), [place.ahead for place in places]

    def _prepare(
        self,
        state: NDArray[Any],
        ahead: Sequence[Sequence[int]] | Ahead | None,
        requests: Sequence[int],
        *arrays: NDArray[Any],
    ) -> tuple[ops.Filters, Edits | None, list[Tensor]]:
        """Filters and edits of some rows, and whatever else is to be sent to the device with them."""
        edited = state["edited"].nonzero()[0]
        held = [self._edited[requests[i]] for i in edited.tolist()]
        on_host = () if isinstance(ahead, Ahead) else ahead
        behind: list[Sequence[int]] = [on_host[i] if on_host else () for i in edited.tolist()]
        edit_arrays = self._edit_arrays(state[edited], edited, held, behind) if held else []
        positions = None if isinstance(ahead, Ahead) else state["next"]
        sent = self._device.upload(*arrays, *_filter_arrays(state, positions), *edit_arrays)
        others, sent = sent[: len(arrays)], sent[len(arrays) :]
        filters = self._filters(state, sent[:_FILTERS])
        if isinstance(ahead, Ahead) and state["temperature"].any():  # else nobody looks at them
            filters.keys = ops.keys_at(filters.keys, ahead.positions)
        edits = self._edits(sent[_FILTERS:]) if held else None
        if edits is not None and isinstance(edits.seen, History) and self._history is not None:
            if isinstance(ahead, Ahead):
                edits.seen = self._history.behind(edits.seen, ahead.drafts.index_select(0, edits.rows))
            elif any(behind):
                [drafts] = self._device.upload(padded(behind))
                edits.seen = self._history.behind(edits.seen, drafts)
        return filters, edits, others

    def _verify(
        self, logits: Tensor, filters: ops.Filters, state: NDArray[Any], tokens: Tensor, verified: Sequence[Verified]
    ) -> None:
        """Put into `tokens` what the classic rule makes of drafts."""
        accept = ops.noise_keys(state["accept"], state["next"]).tolist()
        resample = ops.noise_keys(state["resample"], state["next"]).tolist()
        for first, drafts, distributions in verified:
            rows = torch.arange(first, first + len(drafts), device=logits.device)
            if bool((tokens[rows] < 0).any()):
                continue  # not finite: the drafts that are sampled by chance count, and the request ends there
            place = slice(first, first + len(drafts))
            target = rejection.probabilities(logits[rows], filters.of(rows))
            accepted, drawn = rejection.verify(target, drafts, distributions, accept[place], resample[place])
            tokens[rows[:accepted]] = torch.tensor(drafts[:accepted], dtype=torch.int64, device=tokens.device)
            if drawn is not None:
                tokens[first + accepted] = drawn

    def _check_positions(self, expected: NDArray[np.int64], rows: Sequence[tuple[int, int]]) -> None:
        if expected.tolist() != [position for _, position in rows]:
            request, position, right = next((*row, at) for row, at in zip(rows, expected, strict=True) if row[1] != at)
            raise ValueError(f"request {request} samples position {position}, but its next is {right}")

    def _edit_arrays(
        self, state: NDArray[Any], rows: NDArray[np.int64], requests: list[Edited], ahead: list[Sequence[int]]
    ) -> list[NDArray[Any]]:
        """What `_edits` takes, for some of a step's rows, the requests that they belong to, and drafts before them."""
        positions = state["next"].tolist()
        banned = [r.banned(position, drafts) for r, position, drafts in zip(requests, positions, ahead, strict=True)]
        arrays = [
            *(rows, state["repetition"], state["frequency"], state["presence"], state["mask"]),
            *list_arrays([r.bias_ids for r in requests], [r.biases for r in requests]),
            *list_arrays(banned),
        ]
        if self._history is not None:
            return [*arrays, state["history"]]
        seen = [request.seen(drafts) for request, drafts in zip(requests, ahead, strict=True)]
        return [*arrays, *list_arrays([ids for ids, _ in seen], [counts for _, counts in seen])]

    def _edits(self, sent: list[Tensor]) -> Edits:
        """From the tensors of `_edit_arrays`."""
        rows, repetition, frequency, presence = sent[:4]
        masks, bias, banned = Masks(self._masks.masks, sent[4]), Lists(*sent[5:8]), Lists(*sent[8:11])
        seen = Lists(*sent[11:]) if self._history is None else History(self._history.counts, *sent[11:])
        return Edits(rows, repetition, frequency, presence, seen, bias, masks, banned)

    def _filters(self, state: NDArray[Any], sent: list[Tensor]) -> ops.Filters:
        """From the tensors of `_filter_arrays`."""
        temperature, log_min_p, top_k, top_p, keys = sent
        some_top_k, some_top_p = bool((state["top_k"] < self._vocab_size).any()), bool((state["top_p"] < 1).any())
        return ops.Filters(temperature, log_min_p, top_k, top_p, keys, some_top_k, some_top_p)

    def _draw(self, logits: Tensor, filters: ops.Filters, edits: Edits | None) -> tuple[Tensor, Tensor]:
        """Edits logits and samples: tokens [rows], and whether each edited row was finite before."""
        if edits is None:
            return self._kernels.sample(logits, filters), torch.empty(0, dtype=torch.bool, device=logits.device)
        finite = self._kernels.edit_logits(logits, edits)
        tokens = self._kernels.sample(logits, filters)
        tokens[edits.rows] = torch.where(finite, tokens[edits.rows], -1)  # a mask may have hidden what is not finite
        return tokens, finite

    def _launch_scores(self, logits: Tensor, rows: Tensor, tokens: Tensor, tops: NDArray[np.int64]) -> Scored:
        """Raw log-probabilities of some rows: each row's token, then its best ones."""
        scores = self._kernels.token_scores(logits, rows, tokens, int(tops.max(initial=0)))
        return Scored(ops.TokenScores(*self._device.download(*scores)), tops)


def _filter_arrays(state: NDArray[Any], positions: NDArray[np.int64] | None) -> list[NDArray[Any]]:
    """What `Sampler._filters` takes; the last one, of the noise, in the shape of `positions` [..., rows].

    Without positions, that is not the keys, but the streams of which they are made.
    """
    temperature = state["temperature"]
    if positions is None:
        keys = state["stream"].view(np.int64)
    elif temperature.any():
        keys = ops.noise_keys(state["stream"], positions)
    else:  # nobody looks at them
        keys = np.zeros(positions.shape, np.int64)
    return [temperature, state["log_min_p"], state["top_k"], state["top_p"], keys]


def _token_logprobs(ids: list[int], values: list[float], rank: int, top: int) -> TokenLogprobs:
    """`top` is how many of the best to report, fewer where the vocabulary ends, and none for a row not finite."""
    count = 0 if math.isnan(values[0]) else min(top, len(ids) - 1)
    return TokenLogprobs(ids[: 1 + count], values[: 1 + count], [rank, *range(1, 1 + count)])
