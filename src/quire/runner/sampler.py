"""The sampler: from logits to tokens and log-probabilities.

What happens to a request's logits, from top to bottom, and where to read it:

    penalties          repetition, then frequency and presence   penalties.py        ops/logit_edits.py
    bias               logit_bias is added                       edits.py            ops/logit_edits.py
    allowed tokens     allowed_token_ids: all others go          edits.py            ops/logit_edits.py
    banned tokens      bad_words; stop tokens before min_tokens  edits.py            ops/logit_edits.py
    grammar            structured_outputs: all others go;        edits.py            ops/logit_edits.py
                       thinking_token_budget: all but a marker
    temperature        logits are divided; 0 takes the best      sampling_table.py   ops/sampling.py
    min-p              of what is left after each                sampling_table.py   ops/sampling.py
    top-k                                                        sampling_table.py   ops/sampling.py
    top-p                                                        sampling_table.py   ops/sampling.py
    Gumbel noise       the largest score wins                    sampling_table.py   ops/sampling.py

The first file prepares a step's numbers, the second one computes (as do the kernels that override it): `_sample` is the
chain. Noise is keyed by (seed, choice, purpose, position, token id). So no state of a generator exists that the order
of requests could disturb, and a request gets the same tokens in any company. Reported log-probabilities are those of
the raw logits (scores.py).

To verify drafts, a request has several rows: each is sampled as if the drafts before it were its tokens, and how far
it has gone is told afterwards (`take`). Rejection sampling then decides about them (verify.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import RequestInfo, TokenLogprobs
from quire.ops import Kernels, choose_kernels, rejection
from quire.ops import sampling as ops
from quire.ops.logit_edits import Edits
from quire.runner.device import Device, Mark
from quire.runner.edits import AllowedTokens, EditedRequest, append, edit_arrays, edited_request, make_edits
from quire.runner.penalties import DevicePenalties, ListedPenalties
from quire.runner.proposer import Ahead, Row
from quire.runner.sampling_table import NUM_FILTER_ARRAYS, STATE, SamplingTable, filter_arrays
from quire.runner.scores import Scored, launch_prompt_scores, launch_scores
from quire.runner.verify import Verified, verify

if TYPE_CHECKING:
    from quire.grammar.grammars import Grammars, Matcher

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"

CANDIDATES = 64
"""Tokens among which a tree's branches are chosen."""


@dataclass(slots=True)
class SampledRow:
    """One sampled token; `error` says why there is none (`token` is -1 then)."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(slots=True)
class Sampled:
    """A token a row, on which the device may still be working.

    Attributes:
        tokens: [rows] int64 on the device; -1 where there is none. on_host: the same, once the device has come so far.
    """

    tokens: Tensor
    on_host: Tensor
    _finite: Tensor  # [edited rows] bool, on the host: whether each was finite before its edits
    _edited: list[tuple[int, EditedRequest]]  # which rows were, and whose they are
    _told: list[tuple[int, EditedRequest]]  # rows whose requests must know their token on the host
    _asked: NDArray[np.int64]  # rows that want log-probabilities
    _scored: Scored | None  # of these

    @property
    def is_to_tell(self) -> bool:
        """Whether some request must still know its token."""
        return bool(self._told)

    def tell(self) -> None:
        """Lets the requests know their tokens, once; the device has come past the launch."""
        tokens = self.on_host.tolist() if self._told else []
        append([(request, tokens[row]) for row, request in self._told])
        self._told = []

    def finish(self) -> list[SampledRow]:
        """One entry a row; to be called once the device has come past the launch (`Device.mark`)."""
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

    A step has two halves, so that the host may prepare the next one in between: `launch` queues the work, and
    `Sampled.finish` reads what came of it once the device is done.

    Args:
        vocab_size: width of the logits.
        kernels: what computes; the best that this machine has, unless said.
        device: where the logits are; the CPU, unless said.
        grammars: compiles what requests ask for; None: they may not.
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
        self._untold: list[tuple[Mark, Sampled]] = []  # launches of which requests must know their tokens
        self._greedy: dict[int, ops.Filters] = {}  # by the number of rows
        self._penalties = DevicePenalties(vocab_size, self._device) if self._kernels.reads_spans else ListedPenalties()
        self._allowed = AllowedTokens(vocab_size, self._device)

    def start(self, info: RequestInfo) -> None:
        """Takes up a request.

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
        """Forgets a request; one that is not known is ignored."""
        state = self._table.end(request)
        if state is not None:
            self._penalties.end(int(state["history"]))
            self._allowed.end(int(state["mask"]))
            self._edited.pop(request, None)

    # -- a step --------------------------------------------------------------------------------------------

    def launch(self, logits: Tensor, rows: Sequence[tuple[int, int]]) -> Sampled:
        """Queues the sampling of one token a row, and remembers that each row's request has gone on.

        The next launch need not wait until this one is finished. Where a request has `bad_words` or a grammar, what
        they mask depends on tokens that the host must know: it waits for those here, while the device computes what it
        has been told before.

        Args:
            logits: [rows, vocab] fp32, contiguous. They may be overwritten.
            rows: per row, the request and the absolute position that the sampled token will take. A
                request has at most one row.

        Returns:
            What will have one entry a row. A row whose logits are not finite, or whose masks leave no token, has
            an error; the other rows are as they would be without it.

        Raises:
            ValueError: a position that does not follow from the request's prompt and output so far.
        """
        slots, state = self._table.next(rows)
        self._tell(request for request, _ in rows)
        sampled, edits = self._launch(logits, rows, state, None, ())
        # Requests go on only now, so that a step for which the memory did not suffice can be tried again.
        if edits is not None:
            self._penalties.count(state["history"][state["edited"]], sampled.tokens[edits.rows][:, None])
        self._table.rows["next"][slots] += 1
        self.goes_on(sampled)
        return sampled

    def goes_on(self, sampled: Sampled) -> None:
        """These are the next tokens: requests whose masks depend on them will know them."""
        if not self._device.asynchronous:
            sampled.tell()
        elif sampled.is_to_tell:
            self._untold = [(mark, each) for mark, each in self._untold if each.is_to_tell]
            self._untold.append((self._device.mark(), sampled))

    def _tell(self, requests: Iterable[int]) -> None:
        """Lets some requests know the tokens of the launches before, where what is masked depends on them."""
        if self._untold and any(map(self.follows, requests)):
            for mark, sampled in self._untold:
                mark.wait()
                sampled.tell()
            self._untold = []

    def launch_with_drafts(self, logits: Tensor, places: Sequence[Row], verified: Sequence[Verified] = ()) -> Sampled:
        """Queues the sampling of one token a place, any number of which may be a request's.

        The requests go on when `take` says which tokens are theirs; everything before must have been told.

        Args:
            logits: [places, vocab] fp32, contiguous. They may be overwritten.
            verified: rows whose drafts are accepted by rejection sampling: they get the draft where it is accepted,
                else what was drawn in its place.

        Returns, raises: as `launch`.
        """
        rows = [(place.request, place.position) for place in places]
        state, ahead = self._table.with_drafts(places), [place.ahead for place in places]
        return self._launch(logits, rows, state, ahead, verified)[0]

    def launch_ahead(self, logits: Tensor, rows: Sequence[tuple[int, int]], ahead: Ahead) -> Sampled:
        """The same for rows of which the host knows no more than a bound, so that nothing need be finished before.

        The requests go on when `count`, `goes_on` and `take` say which tokens are theirs.

        Args:
            rows: per row, the request and at most the position that the token will take: the very one, and alone,
                where `needs_host`.
        """
        self._tell(request for request, _ in rows)
        return self._launch(logits, rows, self._table.at(rows), ahead, ())[0]

    def draw_ahead(self, logits: Tensor, rows: Sequence[tuple[int, int]], ahead: Ahead) -> Tensor:
        """The tokens [rows] that `launch_ahead` would sample."""
        filters, edits, _ = self._prepare(self._table.at(rows), ahead, [request for request, _ in rows])
        return self._sample(logits, filters, edits)[0]

    def follows(self, request: int) -> bool:
        """Whether what is masked depends on which the tokens before are."""
        edited = self._edited.get(request)
        return edited is not None and edited.follows

    def needs_host(self, request: int, length: int) -> bool:
        """Whether what is masked after `length` tokens or more depends on what these are, or how many."""
        edited = self._edited.get(request)
        return edited is not None and edited.needs_host(length)

    def forced(self, request: int) -> list[int]:
        """The tokens that must come next, as far as the request's grammar has one way on."""
        edited = self._edited.get(request)
        return edited.matcher.forced() if edited is not None and edited.matcher is not None else []

    def count(self, requests: Sequence[int], tokens: Tensor) -> None:
        """The next tokens [requests, most] of requests' outputs, -1 where there are fewer, for their penalties.

        What the host must know of them, `take` says.
        """
        self._penalties.count(self._table.rows["history"][self._table.slots(requests)], tokens)

    def draw(self, logits: Tensor, places: Sequence[Row]) -> Tensor:
        """The tokens [places] that would be sampled there: see `launch_with_drafts`. No request goes on by it."""
        filters, edits = self._prepare_with_drafts(places)
        return self._sample(logits, filters, edits)[0]

    def filters_ahead(
        self, requests: Sequence[int], positions: Sequence[int], counts: Sequence[int]
    ) -> list[ops.Filters] | None:
        """How `draw` samples the requests' next tokens, from `positions` on: one entry for each position.

        None where some request's logits are edited: that depends on the tokens.

        Args:
            counts: for each entry, how many of the requests it is for, the first ones; never more than in the one
                before.
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
        """Of so many rows that are greedy: whatever else their requests ask for, and wherever they are, is all one."""
        if count not in self._greedy:
            state = np.zeros(count, STATE)
            state["log_min_p"], state["top_k"], state["top_p"] = -math.inf, self._vocab_size, math.inf
            self._greedy[count] = self._filters(state, self._device.upload(*filter_arrays(state, state["next"])))
        return self._greedy[count]

    def distributions(self, logits: Tensor, places: Sequence[Row]) -> Tensor:
        """What `draw` draws from: probabilities [places, vocab]. The logits may be overwritten."""
        filters, edits = self._prepare_with_drafts(places)
        if edits is not None:
            self._kernels.edit_logits(logits, edits)
        probabilities: Tensor = rejection.probabilities(logits, filters)
        return probabilities

    def candidates(self, logits: Tensor, places: Sequence[Row], width: int) -> tuple[Tensor, Tensor]:
        """The tokens that are likeliest to be sampled: ids and log-confidences [places, width].

        The confidence is the softmax of logits over temperature plus the noise with which they will be sampled, among
        the best `CANDIDATES`; greedy requests have neither. Filters are left out: their survivors come first anyway.
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
        """These are the request's next tokens; `counted` where `count` and `goes_on` were told of them."""
        [slot] = self._table.slots([request])
        self._table.rows["next"][slot] += len(tokens)
        if not counted:
            self._penalties.add(int(self._table.rows["history"][slot]), tokens)
            for token in tokens if request in self._edited else ():
                self._edited[request].append(token)

    def sample(self, logits: Tensor, rows: list[tuple[int, int]]) -> list[SampledRow]:
        """`launch`, and wait for what comes of it."""
        sampled = self.launch(logits, rows)
        self._device.mark().wait()
        return sampled.finish()

    def launch_score(self, logits: Tensor, targets: list[int], top: int) -> Scored:
        """See `scores.launch_prompt_scores`."""
        return launch_prompt_scores(self._kernels, self._device, logits, targets, top)

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
        """What `launch` and `launch_with_drafts` share; `ahead` is None where no request has more than one row."""
        requests = [request for request, _ in rows]
        asked, edited = (state["logprobs"] >= 0).nonzero()[0], state["edited"].nonzero()[0]
        filters, edits, [asked_rows] = self._prepare(state, ahead, requests, asked)
        raw, raw_rows = logits, asked_rows
        if state["edited"][asked].any():  # then keep copies, since what follows changes them
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
        """Filters and edits of some rows, and whatever else is to be sent to the device with them."""
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
        if on_device is not None and state["temperature"].any():  # else they are not used
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
        """The chain, from penalties to noise: tokens [rows], and whether each edited row was finite before."""
        finite = torch.empty(0, dtype=torch.bool, device=logits.device)
        if edits is not None:
            finite = self._kernels.edit_logits(logits, edits)
        tokens = self._kernels.sample(logits, filters)
        if edits is not None:  # a mask may have hidden what is not finite
            tokens[edits.rows] = torch.where(finite, tokens[edits.rows], -1)
        return tokens, finite
