"""The sampler: from logits to tokens and log-probabilities, and what it must remember of each request.

For a request the order is: penalties, bias and masks, temperature, min-p, top-k, top-p, then Gumbel noise
keyed by (seed, choice, purpose, position, token id); the largest score wins. So no state of a generator
exists that the order of requests could disturb, and a request gets the same tokens in any company.
Reported log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo, TokenLogprobs
from quire.ops import sampling as ops


@dataclass(slots=True)
class SampledRow:
    """One sampled token; `error` says why there is none (`token` is -1 then)."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class TokenCounts:
    """The different tokens of one request, and how often each stands in the output: for penalties.

    Kept as tensors that grow, so that a step does not convert a long history again.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], device: torch.device) -> None:
        counts = Counter(output)
        distinct = list(dict.fromkeys([*prompt, *output]))
        self._place = {token: i for i, token in enumerate(distinct)}
        self._ids = torch.tensor(distinct, dtype=torch.int64, device=device)
        self._counts = torch.tensor([counts[token] for token in distinct], device=device).float()

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            room = max(64, place)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(room)])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(room)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> Tensor:
        """Each different token of prompt and output once: int64."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Tensor:
        """How often each of `ids` stands in the output: fp32."""
        return self._counts[: len(self._place)]


@dataclass(slots=True)
class _Request:
    """What the sampler keeps of a request between steps."""

    params: SamplingParams
    choice: int
    prompt_length: int
    output: list[int]
    counts: TokenCounts | None
    bias_ids: list[int]
    biases: list[float]
    allowed: Tensor | None
    stop_ids: list[int]
    bad_words: list[list[int]]
    edits: bool = field(init=False)

    def __post_init__(self) -> None:
        masked = self.allowed is not None or bool(self.bias_ids) or bool(self.bad_words)
        self.edits = self.counts is not None or masked or self.params.min_tokens > 0

    def append(self, token: int) -> None:
        self.output.append(token)
        if self.counts is not None:
            self.counts.add(token)

    def banned(self) -> list[int]:
        """Ids that must not come next: stop ids before `min_tokens`, ends of bad words."""
        ids = list(self.stop_ids) if len(self.output) < self.params.min_tokens else []
        for word in self.bad_words:
            before = len(word) - 1
            if before <= len(self.output) and self.output[len(self.output) - before :] == word[:-1]:
                ids.append(word[-1])
        return ids


class Sampler:
    """Samples the rows of each step. One per model runner; not thread-safe.

    Args:
        vocab_size: width of the logits.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._requests: dict[int, _Request] = {}

    def start(self, info: RequestInfo) -> None:
        """Takes up a request. Raises `ValueError` when its parameters have no seed."""
        params = info.params.resolved()
        if params.seed is None and not params.greedy:
            raise ValueError(f"request {info.request} has no seed; the engine sets one at admission")
        penalized = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        bias = params.logit_bias or {}
        self._requests[info.request] = _Request(
            params=params,
            choice=info.choice,
            prompt_length=len(info.prompt_token_ids),
            output=list(info.output_token_ids),
            counts=TokenCounts(info.prompt_token_ids, info.output_token_ids, self._device) if penalized else None,
            bias_ids=list(bias),
            biases=list(bias.values()),
            allowed=self._ids(sorted(set(params.allowed_token_ids))) if params.allowed_token_ids else None,
            stop_ids=sorted(info.stop_token_ids),
            bad_words=[word for word in info.bad_words if word],
        )

    def end(self, request: int) -> None:
        """Forgets a request; one that is not known is ignored."""
        self._requests.pop(request, None)

    def sample(self, logits: Tensor, rows: list[tuple[int, int]]) -> list[SampledRow]:
        """Samples one token a row, and appends it to its request's output.

        Args:
            logits: [rows, vocab] fp32, contiguous. They are overwritten.
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
        requests = [self._request_at(request, position) for request, position in rows]
        maxima = ops.chunk_maxima(logits)
        errors = [
            None if fine else "the model's logits are not finite (NaN or infinity)"
            for fine in torch.isfinite(maxima.amax(-1)).tolist()
        ]
        asked = [i for i, r in enumerate(requests) if r.params.logprobs is not None and errors[i] is None]
        raw, raw_maxima, raw_rows = logits, maxima, asked
        if any(requests[i].edits for i in asked):  # then keep copies, since what follows changes them
            raw, raw_maxima, raw_rows = logits[asked], maxima[asked], list(range(len(asked)))
        self._edit(logits, maxima, requests)
        for i, fine in enumerate(torch.isfinite(maxima.amax(-1)).tolist()):
            if not fine and errors[i] is None:
                errors[i] = "no token is left: allowed_token_ids, bad_words, logit_bias and min_tokens mask all"
        good = [i for i, error in enumerate(errors) if error is None]
        tokens = self._choose(logits, maxima, requests, good, [position for _, position in rows])
        for i in good:
            requests[i].append(tokens[i])
        told = [(i, row) for i, row in zip(asked, raw_rows, strict=True) if errors[i] is None]
        logprobs = _token_logprobs(
            raw,
            raw_maxima,
            [row for _, row in told],
            [tokens[i] for i, _ in told],
            [requests[i].params.logprobs or 0 for i, _ in told],
        )
        by_row = {i: entry for (i, _), entry in zip(told, logprobs, strict=True)}
        return [SampledRow(tokens.get(i, -1), by_row.get(i), errors[i]) for i in range(len(rows))]

    def score(self, logits: Tensor, targets: list[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens, for prompts.

        Args:
            logits: [rows, vocab] fp32, contiguous; not changed.
            targets: the token that follows each row's.
            top: how many of the best tokens to report beside it.

        Returns:
            One entry a row. A row whose logits are not finite has NaN as the value of its target, alone.
        """
        if not targets:
            return []
        maxima = ops.chunk_maxima(logits)
        good: list[int] = torch.isfinite(maxima.amax(-1)).nonzero().flatten().tolist()
        scored = _token_logprobs(logits, maxima, good, [targets[i] for i in good], [top] * len(good))
        by_row = dict(zip(good, scored, strict=True))
        return [by_row.get(i, TokenLogprobs([target], [math.nan], [1])) for i, target in enumerate(targets)]

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def _numbers(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _request_at(self, request: int, position: int) -> _Request:
        state = self._requests[request]
        expected = state.prompt_length + len(state.output)
        if position != expected:
            raise ValueError(f"request {request} samples position {position}, but its next is {expected}")
        return state

    def _edit(self, logits: Tensor, maxima: Tensor, requests: list[_Request]) -> None:
        """Applies penalties, bias and masks to logits, in place, and brings `maxima` up to date."""
        edited = [i for i, request in enumerate(requests) if request.edits]
        if not edited:
            return
        self._penalize(logits, [(i, requests[i]) for i in edited])
        flat = logits.view(-1)
        bias_at = [i * self._vocab_size + token for i in edited for token in requests[i].bias_ids]
        if bias_at:
            at = self._ids(bias_at)
            flat[at] += self._numbers([bias for i in edited for bias in requests[i].biases])
        for i in edited:
            allowed = requests[i].allowed
            if allowed is not None:
                kept = logits[i, allowed]
                logits[i].fill_(-math.inf)
                logits[i, allowed] = kept
        banned = [i * self._vocab_size + token for i in edited for token in requests[i].banned()]
        if banned:
            flat[self._ids(banned)] = -math.inf
        for i in edited:
            maxima[i : i + 1] = ops.chunk_maxima(logits[i : i + 1])

    def _penalize(self, logits: Tensor, requests: list[tuple[int, _Request]]) -> None:
        """Repetition, frequency and presence penalties of all rows at once."""
        held = [(i, request.params, request.counts) for i, request in requests if request.counts is not None]
        if not held:
            return
        lengths = torch.tensor([len(counts.ids) for _, _, counts in held], device=self._device)

        def spread(values: Sequence[float]) -> Tensor:
            return self._numbers(values).repeat_interleave(lengths)

        counts = torch.cat([counts.counts for _, _, counts in held])
        at = torch.cat([counts.ids + i * self._vocab_size for i, _, counts in held])
        flat = logits.view(-1)
        values = flat[at]
        repetition = spread([p.repetition_penalty or 1.0 for _, p, _ in held])
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= spread([p.frequency_penalty for _, p, _ in held]) * counts
        values -= spread([p.presence_penalty for _, p, _ in held]) * (counts > 0)
        flat[at] = values

    def _choose(
        self, logits: Tensor, maxima: Tensor, requests: list[_Request], good: list[int], positions: list[int]
    ) -> dict[int, int]:
        """The token of each good row: greedy, filtered and open rows are done a kind at a time."""
        greedy = [i for i in good if requests[i].params.greedy]
        noisy = [i for i in good if not requests[i].params.greedy]
        filtered = [i for i in noisy if self._has_order(requests[i].params)]
        free = [i for i in noisy if not self._has_order(requests[i].params)]
        chosen: dict[int, int] = {}
        if greedy:
            picked = ops.argmax(logits, maxima, self._ids(greedy))
            chosen.update(zip(greedy, picked.tolist(), strict=True))
        for rows, kernel in ((filtered, ops.sample_filtered), (free, ops.sample_open)):
            if rows:
                filters = self._filters([requests[i] for i in rows], [positions[i] for i in rows])
                chosen.update(zip(rows, kernel(logits, maxima, self._ids(rows), filters).tolist(), strict=True))
        return chosen

    def _has_order(self, params: SamplingParams) -> bool:
        """Whether a filter needs the tokens in order."""
        return 0 < (params.top_k or 0) < self._vocab_size or (params.top_p or 1.0) < 1.0

    def _filters(self, requests: list[_Request], positions: list[int]) -> ops.Filters:
        params = [request.params for request in requests]
        keys = [
            ops.noise_key(request.params.seed or 0, request.choice, ops.Purpose.SAMPLE, position)
            for request, position in zip(requests, positions, strict=True)
        ]
        top_p = [p.top_p if p.top_p and p.top_p < 1 else math.inf for p in params]
        return ops.Filters(
            temperature=self._numbers([p.temperature or 1.0 for p in params]),
            log_min_p=self._numbers([math.log(p.min_p) if p.min_p else -math.inf for p in params]),
            top_k=self._ids([min(p.top_k or self._vocab_size, self._vocab_size) for p in params]),
            top_p=self._numbers(top_p, torch.float64),
            keys=self._ids(keys),
        )


def _token_logprobs(
    logits: Tensor, maxima: Tensor, rows: list[int], tokens: list[int], tops: list[int]
) -> list[TokenLogprobs]:
    """Raw log-probabilities of some rows: each row's token, then its best ones."""
    if not rows:
        return []
    index, ids = torch.tensor([rows, tokens], dtype=torch.int64, device=logits.device)
    best = maxima[index].amax(-1)
    log_sums = ops.exp_sums(logits, maxima, index, torch.ones_like(best)).log()
    values = logits[index, ids][:, None]
    ranks = ops.ranks(logits, maxima, index, ids)
    top_values, top_ids = ops.top(logits, maxima, index, max(tops))

    def logprobs(of: Tensor) -> Tensor:
        return (of - best[:, None]).double() - log_sums[:, None]

    table = zip(
        tokens,
        logprobs(values).flatten().tolist(),
        ranks.tolist(),
        logprobs(top_values).tolist(),
        top_ids.tolist(),
        tops,
        strict=True,
    )
    return [
        TokenLogprobs([token, *best_ids[:n]], [value, *others[:n]], [rank, *range(1, len(best_ids[:n]) + 1)])
        for token, value, rank, others, best_ids, n in table
    ]
