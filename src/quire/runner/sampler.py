"""The sampler: from logits to tokens and log-probabilities.

What is done to a request's logits, in this order, and where:

    penalties          repetition, then frequency and presence   penalties.py        ops/logit_edits.py
    bias               logit_bias is added                       edits.py            ops/logit_edits.py
    allowed tokens     allowed_token_ids: others are masked      edits.py            ops/logit_edits.py
    banned tokens      bad_words; stop tokens before min_tokens  edits.py            ops/logit_edits.py
    grammar            structured_outputs: a mask;               edits.py            ops/logit_edits.py
                       thinking_token_budget: the end marker
    temperature        logits are divided; 0 is greedy           sampling_table.py   ops/sampling.py
    min-p              each filters what the last one has left   sampling_table.py   ops/sampling.py
    top-k                                                        sampling_table.py   ops/sampling.py
    top-p                                                        sampling_table.py   ops/sampling.py
    Gumbel noise       is added; the highest score is sampled    sampling_table.py   ops/sampling.py

The first file prepares a step's parameters, the second one computes (or a kernel that overrides it); `_sample` calls
them. Noise is keyed by (seed, choice, purpose, position, token id). So there is no generator state that the order of
requests could affect, and a request gets the same tokens in any batch. Reported log-probabilities are those of the raw
logits (scores.py).

To verify drafts, a request has several rows: each is sampled as if the drafts before it were its tokens, and `take`
says afterwards which of them are. Rejection sampling changes that decision (verify.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import RequestInfo, TokenLogprobs
from quire.grammar.grammars import Grammars, Matcher
from quire.ops import Kernels, choose_kernels, rejection
from quire.ops import sampling as ops
from quire.ops.logit_edits import Edits
from quire.runner.device import Device, Mark
from quire.runner.drafts import Ahead, Row
from quire.runner.edits import AllowedTokens, EditedRequest, append, edit_arrays, edited_request, make_edits
from quire.runner.penalties import DevicePenalties, ListedPenalties
from quire.runner.sampling_table import NUM_FILTER_ARRAYS, STATE, SamplingTable, filter_arrays
from quire.runner.scores import Scored, launch_prompt_scores, launch_scores
from quire.runner.verify import Verified, verify

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"

CANDIDATES = 64
"""Number of the most likely tokens among which a tree's branches are chosen."""


@dataclass(slots=True)
class SampledRow:
    """One sampled token, or -1 and an `error`."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(slots=True)
class Sampled:
    """One token per row, which the device may still be computing.

    Attributes:
        tokens: [rows] int64 on the device; -1 if a row has none. on_host: the same, valid once the device is done.
    """

    tokens: Tensor
    on_host: Tensor
    _finite: Tensor  # [edited rows] bool, on the host: whether each was finite before its edits
    _edited: list[tuple[int, EditedRequest]]  # rows with edits, and their requests
    _told: list[tuple[int, EditedRequest]]  # rows whose requests need their token on the host
    _asked: NDArray[np.int64]  # rows that want log-probabilities
    _scored: Scored | None  # of these rows

    @property
    def is_to_tell(self) -> bool:
        """Whether a request still needs its token."""
        return bool(self._told)

    def tell(self) -> None:
        """Give requests the tokens that they need, once; to be called when the device is done."""
        tokens = self.on_host.tolist() if self._told else []
        append([(request, tokens[row]) for row, request in self._told])
        self._told = []

    def finish(self) -> list[SampledRow]:
        """One entry per row; to be called when the device is done (`Device.mark`)."""
        self.tell()
        sampled = [SampledRow(token, error=None if token >= 0 else NOT_FINITE) for token in self.on_host.tolist()]
        for (i, request), finite in zip(self._edited, self._finite.tolist(), strict=True):
            if finite and sampled[i].error is not None:
                sampled[i].error = request.why_nothing_is_left()
        for i, entry in zip(self._asked.tolist(), self._scored.finish() if self._scored else (), strict=True):
            if sampled[i].error is None:
                sampled[i].logprobs = entry
        return sampled


class Sampler:
    """Samples the rows of each step. One per model runner; not thread-safe.

    A step has two halves, so that the host can prepare the next step in between: `launch` queues the work, and
    `Sampled.finish` reads the results when the device is done.

    Args:
        vocab_size: width of the logits.
        kernels: by default, the best ones for this machine.
        device: the logits' device, by default the CPU.
        grammars: compiles requests' grammars; None: requests with grammars are refused.
    """

    def __init__(
        self,
        vocab_size: int,
        kernels: Kernels | None = None,
        device: Device | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._kernels = kernels or choose_kernels()
        self._device = device or Device()
        self._table = SamplingTable(vocab_size)
        self._edited: dict[int, EditedRequest] = {}
        self._untold: list[tuple[Mark, Sampled]] = []  # launches whose tokens some requests still need
        self._greedy: dict[int, ops.Filters] = {}  # by the number of rows
        self._penalties = DevicePenalties(vocab_size, self._device) if self._kernels.reads_spans else ListedPenalties()
        self._allowed = AllowedTokens(vocab_size, self._device)

    def start(self, info: RequestInfo) -> None:
        """Add a request.

        Raises:
            ValueError: its parameters have no seed, or a token id is not one of the vocabulary's.
        """
        params = info.params.resolved()
        if params.seed is None and not params.greedy:
            raise ValueError(f"request {info.request} has no seed; the engine sets one at admission")
        edited = edited_request(info, self._vocab_size, self._matcher(info))
        history, mask = self._penalties.start(info), self._allowed.start(params.allowed_token_ids or ())
        self._table.start(info, edited is not None, history, mask)
        if edited is not None:
            self._edited[info.request] = edited

    def _matcher(self, info: RequestInfo) -> Matcher | None:
        wanted, budget = info.params.structured_outputs, info.reasoning
        if wanted is None and budget is None:
            return None
        if self._grammars is None:
            raise ValueError(f"request {info.request} has structured_outputs, and there is nothing that compiles them")
        return self._grammars.matcher(wanted, info.stop_token_ids, info.output_token_ids, budget)

    def end(self, request: int) -> None:
        """Remove a request; an unknown one is ignored."""
        state = self._table.end(request)
        if state is not None:
            self._penalties.end(int(state["history"]))
            self._allowed.end(int(state["mask"]))
            self._edited.pop(request, None)

    # -- a step --------------------------------------------------------------------------------------------

    def launch(self, logits: Tensor, rows: Sequence[tuple[int, int]]) -> Sampled:
        """Queue the sampling of one token per row, and advance each row's request by one token.

        The next launch may come before this one is finished. The masks of `bad_words` and grammars depend on tokens
        that the host must know: it waits for them here, while the device computes earlier work.

        Args:
            logits: [rows, vocab] fp32, contiguous. They may be overwritten.
            rows: per row, the request and the position of the token to sample. A request has at most one row.

        Returns:
            One entry per row. A row whose logits are not finite, or whose masks leave no token, has an error; this does
            not affect other rows.

        Raises:
            ValueError: a position does not follow from the request's prompt and output so far.
        """
        slots, state = self._table.next(rows)
        self._tell(request for request, _ in rows)
        sampled, edits = self._launch(logits, rows, state, None, ())
        # Requests advance only now, so that a step that ran out of memory can be retried.
        if edits is not None:
            self._penalties.count(state["history"][state["edited"]], sampled.tokens[edits.rows][:, None])
        self._table.rows["next"][slots] += 1
        self.goes_on(sampled)
        return sampled

    def launch_plain(
        self,
        sample: Callable[..., tuple[Tensor, Tensor]],
        rows: Sequence[tuple[int, int]],
        table_rows: NDArray[np.int64],
    ) -> tuple[Sampled, Tensor] | None:
        """`launch` where the logits are not needed here; None if a row asks for more than temperature and min-p.

        Args:
            sample: returns tokens [rows] and `table_rows` on the device, given each row's state, key and row of the
                block tables.

        Returns:
            What was sampled, and `table_rows` on the device.
        """
        slots, state = self._table.next(rows)
        if not state["plain"].all():
            return None
        tokens, on_device = sample(state, filter_arrays(state, state["next"])[-1], table_rows)
        [on_host] = self._device.download(tokens)
        self._table.rows["next"][slots] += 1
        none = torch.empty(0, dtype=torch.bool)
        return Sampled(tokens, on_host, none, [], [], np.empty(0, np.int64), None), on_device

    def goes_on(self, sampled: Sampled) -> None:
        """The sampled tokens are the requests' next ones: give them to requests whose masks depend on them."""
        if not self._device.asynchronous:
            sampled.tell()
        elif sampled.is_to_tell:
            self._untold = [(mark, each) for mark, each in self._untold if each.is_to_tell]
            self._untold.append((self._device.mark(), sampled))

    def _tell(self, requests: Iterable[int]) -> None:
        """Give requests whose masks depend on them the tokens of earlier launches."""
        if self._untold and any(map(self.follows, requests)):
            for mark, sampled in self._untold:
                mark.wait()
                sampled.tell()
            self._untold = []

    def launch_with_drafts(self, logits: Tensor, places: Sequence[Row], verified: Sequence[Verified] = ()) -> Sampled:
        """Queue the sampling of one token per place; a request may have several places.

        Requests advance when `take` says which tokens are theirs; earlier tokens must have been taken.

        Args:
            logits: [places, vocab] fp32, contiguous. They may be overwritten.
            verified: rows whose drafts are accepted by rejection sampling: they get the draft if it is accepted,
                otherwise a token sampled instead.

        Returns, raises: as `launch`.
        """
        rows = [(place.request, place.position) for place in places]
        state, ahead = self._table.with_drafts(places), [place.ahead for place in places]
        return self._launch(logits, rows, state, ahead, verified)[0]

    def launch_ahead(self, logits: Tensor, rows: Sequence[tuple[int, int]], ahead: Ahead) -> Sampled:
        """The same for rows of which the host knows only an upper bound of the position, so it need not wait.

        Requests advance when `count`, `goes_on` and `take` say which tokens are theirs.

        Args:
            rows: per row, the request and an upper bound of the token's position; if it `needs_host`, the exact
                position, and only one row.
        """
        self._tell(request for request, _ in rows)
        return self._launch(logits, rows, self._table.at(rows), ahead, ())[0]

    def draw_ahead(self, logits: Tensor, rows: Sequence[tuple[int, int]], ahead: Ahead) -> Tensor:
        """The tokens [rows] that `launch_ahead` would sample."""
        filters, edits, _ = self._prepare(self._table.at(rows), ahead, [request for request, _ in rows])
        return self._sample(logits, filters, edits)[0]

    def follows(self, request: int) -> bool:
        """Whether the request's masks depend on its tokens."""
        edited = self._edited.get(request)
        return edited is not None and edited.follows

    def needs_host(self, request: int, length: int) -> bool:
        """Whether the request's masks after at least `length` tokens depend on these tokens or their number."""
        edited = self._edited.get(request)
        return edited is not None and edited.needs_host(length)

    def forced(self, request: int) -> list[int]:
        """The next tokens, as far as the request's grammar allows only one at a time."""
        edited = self._edited.get(request)
        return edited.matcher.forced() if edited is not None and edited.matcher is not None else []

    def count(self, requests: Sequence[int], tokens: Tensor) -> None:
        """Count the next tokens [requests, most] of requests' outputs, padded with -1, for penalties on the device.

        `take` gives them to the host.
        """
        self._penalties.count(self._table.rows["history"][self._table.slots(requests)], tokens)

    def draw(self, logits: Tensor, places: Sequence[Row]) -> Tensor:
        """The tokens [places] that `launch_with_drafts` would sample. Does not advance any request."""
        filters, edits = self._prepare_with_drafts(places)
        return self._sample(logits, filters, edits)[0]

    def unedited(self, requests: Sequence[int]) -> NDArray[Any] | None:
        """The requests' rows of the table; None if one has edits."""
        state = self._table.rows[self._table.slots(requests)]
        return None if state["edited"].any() else state

    def filters_ahead(
        self, requests: Sequence[int], positions: Sequence[int], counts: Sequence[int]
    ) -> list[ops.Filters] | None:
        """The filters with which `draw` samples the requests' next tokens, from `positions` on, one entry per position.

        None if a request has edits, since these depend on the tokens.

        Args:
            counts: for each entry, the number of requests, the first ones; never more than in the entry before.
        """
        _, state = self._table.next(list(zip(requests, positions, strict=True)))
        if any(request in self._edited for request in requests):
            return None
        if not state["temperature"].any():
            return [self._greedy_filters(count) for count in counts]
        ahead = np.array(positions) + np.arange(len(counts))[:, None]  # [entries, requests]
        *sent, keys = self._device.upload(*filter_arrays(state, ahead))
        every = self._filters(state, [*sent, keys])
        made = []
        for count, row in zip(counts, keys, strict=True):
            if count < len(row):
                sent, row = [tensor[:count] for tensor in sent], row[:count]
            made.append(ops.Filters(sent[0], sent[1], sent[2], sent[3], row, every.some_top_k, every.some_top_p))
        return made

    def _greedy_filters(self, count: int) -> ops.Filters:
        """Filters for this many greedy rows, which do not depend on other parameters or positions."""
        if count not in self._greedy:
            state = np.zeros(count, STATE)
            state["log_min_p"], state["top_k"], state["top_p"] = -math.inf, self._vocab_size, math.inf
            self._greedy[count] = self._filters(state, self._device.upload(*filter_arrays(state, state["next"])))
        return self._greedy[count]

    def distributions(self, logits: Tensor, places: Sequence[Row]) -> Tensor:
        """The distributions from which `draw` samples: [places, vocab]. The logits may be overwritten."""
        filters, edits = self._prepare_with_drafts(places)
        if edits is not None:
            self._kernels.edit_logits(logits, edits)
        probabilities: Tensor = rejection.probabilities(logits, filters)
        return probabilities

    def candidates(self, logits: Tensor, places: Sequence[Row], width: int) -> tuple[Tensor, Tensor]:
        """The tokens that are most likely to be sampled: ids and log-confidences [places, width].

        The confidence is the softmax of logits / temperature + noise among the best `CANDIDATES`, with the noise of the
        later sampling; greedy requests have neither temperature nor noise. Filters are ignored, since they keep the
        first tokens anyway.
        """
        filters, edits = self._prepare_with_drafts(places)
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
        """Advance a request by its next tokens; `counted`: `count` and `goes_on` were called with them already."""
        [slot] = self._table.slots([request])
        self._table.rows["next"][slot] += len(tokens)
        if not counted:
            self._penalties.add(int(self._table.rows["history"][slot]), tokens)
            for token in tokens if request in self._edited else ():
                self._edited[request].append(token)

    def sample(self, logits: Tensor, rows: list[tuple[int, int]]) -> list[SampledRow]:
        """`launch`, and wait for the result."""
        sampled = self.launch(logits, rows)
        self._device.mark().wait()
        return sampled.finish()

    def launch_score(self, logits: Tensor, targets: list[int], top: int) -> Scored:
        """See `scores.launch_prompt_scores`."""
        return launch_prompt_scores(self._kernels, self._device, logits, targets, top)

    def score(self, logits: Tensor, targets: list[int], top: int) -> list[TokenLogprobs]:
        """`launch_score`, and wait for the result."""
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
        """The common part of `launch`, `launch_with_drafts` and `launch_ahead`; `ahead` is None without drafts."""
        requests = [request for request, _ in rows]
        asked, edited = (state["logprobs"] >= 0).nonzero()[0], state["edited"].nonzero()[0]
        filters, edits, [asked_rows] = self._prepare(state, ahead, requests, asked)
        raw, raw_rows = logits, asked_rows
        if state["edited"][asked].any():  # then keep copies, since edits overwrite them
            raw, raw_rows = logits[asked_rows], torch.arange(len(asked), device=logits.device)
        tokens, finite = self._sample(logits, filters, edits)
        if verified:
            verify(logits, filters, state, tokens, verified)
        scored = None
        if len(asked):
            of_rows = tokens[asked_rows].clamp_(min=0)
            scored = launch_scores(self._kernels, self._device, raw, raw_rows, of_rows, state["logprobs"][asked])
        held = [(i, self._edited[requests[i]]) for i in edited.tolist()]
        alone = ahead is None or isinstance(ahead, Ahead)
        told = [(i, request) for i, request in held if request.follows] if alone else []
        on_host, finite = self._device.download(tokens, finite)
        return Sampled(tokens, on_host, finite, held, told, asked, scored), edits

    def _prepare_with_drafts(self, places: Sequence[Row]) -> tuple[ops.Filters, Edits | None]:
        ahead, requests = [place.ahead for place in places], [place.request for place in places]
        filters, edits, _ = self._prepare(self._table.with_drafts(places), ahead, requests)
        return filters, edits

    def _prepare(
        self,
        state: NDArray[Any],
        ahead: Sequence[Sequence[int]] | Ahead | None,
        requests: Sequence[int],
        *arrays: NDArray[Any],
    ) -> tuple[ops.Filters, Edits | None, list[Tensor]]:
        """Filters and edits of some rows, and other arrays that are sent to the device with them."""
        on_device, on_host = (ahead, None) if isinstance(ahead, Ahead) else (None, ahead)
        sent = filter_arrays(state, state["next"] if on_device is None else None)
        edited = state["edited"].nonzero()[0]
        if len(edited):
            held = [self._edited[requests[i]] for i in edited.tolist()]
            before: list[Sequence[int]] = [on_host[i] if on_host else () for i in edited.tolist()]
            sent += edit_arrays(state[edited], edited, held, before)
            sent += self._penalties.arrays(state["history"][edited], before)
        made = self._device.upload(*arrays, *sent)
        others, made = made[: len(arrays)], made[len(arrays) :]
        filters, edits = self._filters(state, made[:NUM_FILTER_ARRAYS]), None
        if on_device is not None and state["temperature"].any():  # otherwise they are not used
            filters.keys = ops.keys_at(filters.keys, on_device.positions)
        if len(edited):
            drafts = None if on_device is None else on_device.drafts
            edits = make_edits(made[NUM_FILTER_ARRAYS:], self._allowed, self._penalties, drafts)
        return filters, edits, others

    def _filters(self, state: NDArray[Any], sent: list[Tensor]) -> ops.Filters:
        """From the tensors of `filter_arrays`."""
        temperature, log_min_p, top_k, top_p, keys = sent
        some_top_k, some_top_p = bool((state["top_k"] < self._vocab_size).any()), bool((state["top_p"] < 1).any())
        return ops.Filters(temperature, log_min_p, top_k, top_p, keys, some_top_k, some_top_p)

    def _sample(self, logits: Tensor, filters: ops.Filters, edits: Edits | None) -> tuple[Tensor, Tensor]:
        """All steps from penalties to noise: tokens [rows], and whether each edited row was finite before its edits."""
        finite = torch.empty(0, dtype=torch.bool, device=logits.device)
        if edits is not None:
            finite = self._kernels.edit_logits(logits, edits)
        tokens = self._kernels.sample(logits, filters)
        if edits is not None:  # a mask may have hidden non-finite values
            tokens[edits.rows] = torch.where(finite, tokens[edits.rows], -1)
        return tokens, finite
