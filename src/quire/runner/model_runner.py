"""Computes a step: from a plan through the model and the sampler to the result.

A step has two halves. `launch` queues all work on the device, and does not wait: the sampled tokens stay there for the
next step. `LaunchedStep.wait` waits, and makes the result. On a CPU everything is done when `launch` returns. If tokens
are drafted on the host (see `drafter`), a step is launched once the previous one's tokens are known; if on the device
(see `device_drafter`), it need not wait for them.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.pooling import PoolingParams
from quire.core.step import Span, SpanResult, StepPlan, StepResult, TokenLogprobs
from quire.grammar.grammars import Grammars
from quire.models.model import Model
from quire.ops import KVCache
from quire.runner.device import Device, Mark, is_lost, is_out_of_memory
from quire.runner.device_drafter import DeviceDrafter
from quire.runner.device_forward import DeviceForward
from quire.runner.draft_context import DeviceContext, DraftContext
from quire.runner.draft_passes import passes_of
from quire.runner.drafter import Drafter, Outcome, accepted_path, branch_of
from quire.runner.drafts import Branch, Drafts
from quire.runner.expert_mover import ExpertMover
from quire.runner.host_forward import Forwarded, HostForward
from quire.runner.pooling import Pooled, launch_labels, launch_sum
from quire.runner.proposer import DeviceProposer, Speculation
from quire.runner.sampler import Sampled, SampledRow, Sampler
from quire.runner.scores import Scored

if TYPE_CHECKING:  # there may be no tiers
    from quire.kv.mover import Mover

logger = logging.getLogger(__name__)

IntArray = NDArray[np.int64]

NOT_FINITE = "the model's logits or hidden states are not finite (NaN or infinity)"
STEP_FAILED = "the step that computed this request failed; the engine's log says why"
FAILED_BEFORE = "an earlier step of this request failed"
OUT_OF_MEMORY = (
    "the device ran out of memory while it computed this request alone; lower max_num_batched_tokens or "
    "gpu_memory_utilization, or ask for fewer tokens"
)


class ModelRunner:
    """Runs plans, in order, on a model and its KV caches.

    Args:
        model: the loaded model.
        kv: its blocks, one cache per KV group.
        logit_rows: most rows whose logits are computed at once for prompt log-probabilities.
        threads: number of threads of a step. torch has one number per process, so it is set for each step and restored
            after it, and does not affect other engines or the rest of the program.
        device: the model's device.
        forward: runs spans through the model; by default for kernels that read a step's shape on the host.
        speculation: the proposer; None if there are no drafts.
        host: moves blocks to and from where else they are, such as the host tier; None if that is nowhere.
        grammars: see `Sampler`.
        halves: whether a step that fails is retried in halves; otherwise `launch` raises the error.

    Attributes:
        num_halved: how often a step, or a part of one, failed and was halved.
        mover: moves experts to and from other ranks; None if ranks have no experts of their own.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[KVCache],
        logit_rows: int,
        threads: int,
        device: Device | None = None,
        forward: HostForward | DeviceForward | None = None,
        speculation: Speculation | None = None,
        halves: bool = True,
        host: Mover | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.host = host
        self.num_halved = 0
        self.device = device or Device()
        self._forward = forward or HostForward(model, kv, speculation.aux_layers if speculation else ())
        self._logit_rows = logit_rows
        self._threads = threads
        self._halves = halves
        self._speculation = speculation
        self.grammars = grammars
        self._requests: dict[int, _Request] = {}
        self._drafter: Drafter | DeviceDrafter | None = None
        self.mover = ExpertMover(model.expert_layers, model.kernels) if model.expert_slots else None
        self._next_number: int | None = 0  # None: the last step could not be launched
        self._forget()

    def _forget(self) -> None:
        """Forget all requests, also after a step that failed halfway."""
        for request in self._requests:
            if self._drafter is not None:
                self._drafter.end(request)
        self._requests = {}
        self.sampler = Sampler(self.model.vocab_size, self.model.kernels, self.device, self.grammars)
        self._drafter = None if self._speculation is None else self._make_drafter(self._speculation)
        self._free_rows: list[int] = []  # of the block tables
        self._failed: set[int] = set()  # requests whose later steps, planned already, are not computed
        self._unsettled: deque[LaunchedStep] = deque()  # whose tokens the drafter does not have yet
        self._unchecked: deque[LaunchedStep] = deque()  # not compared among ranks

    def _make_drafter(self, speculation: Speculation) -> Drafter | DeviceDrafter:
        """Make the drafter for drafts on the host, or on the device."""
        requests = self._requests  # not `self`: a cycle would keep the runner's memory allocated

        def row_of(request: int) -> int:
            return requests[request].row

        proposer, forward = speculation.proposer, self._forward
        passes = passes_of(forward, self.kv, speculation.model, speculation.needs_next_token)
        rest = (row_of, self.device, passes)
        if not isinstance(proposer, DeviceProposer):
            context = DraftContext(self.model, self.kv, self.sampler, forward, *rest)
            return Drafter(proposer, context, speculation.rejection)
        if not isinstance(forward, DeviceForward):
            raise ValueError("these drafts stay on the device, but the forward pass keeps its tables on the host")
        return DeviceDrafter(proposer, DeviceContext(self.model, self.kv, self.sampler, forward, *rest))

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and wait for it: see `launch`."""
        return self.launch(plan).wait()

    def drain(self) -> None:
        """See `PipelineRunner.drain`; does nothing here."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step. If that fails, the next plan's number must leave a gap, see `StepPlan.number`.

        Raises:
            RuntimeError: it leaves a gap, but does not send all state again.
        """
        try:
            return self._launch(plan)
        except BaseException:
            for group in self.model.rank_groups:
                group.give_up(plan.number)
            raise

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        next_number, self._next_number = self._next_number, None
        with torch.inference_mode(), self.device.active(), self.model.kernels.threads(self._threads):
            begin = self.device.mark()
            self.kv[0].pulse[0] += 1  # replaying a graph does not
            if plan.number != next_number:
                check_complete(plan, next_number)
                for group in self.model.rank_groups:
                    group.resume(plan.number)
                self._forget()
            self._settle()
            moved = self._move_blocks(plan)
            self._take_in(plan)
            failed = self._failed
            spans = [span for span in plan.spans if span.request not in failed] if failed else plan.spans
            drafts: Mapping[int, Drafts] = {}
            drafter = self._drafter if self._drafter is not None and self._drafter.following else None
            if drafter is not None:
                spans, drafts = drafter.resolve(spans)
            drafted = begin if drafter is None else self.device.mark()
            if not spans:
                self.model.without_rows()
            step = LaunchedStep(plan, self._compute(spans, drafts) if spans else [], begin, drafted, self.device.mark())
            step.moved = moved
            if drafter is not None:
                self._unsettled.append(step)
                if not self.device.asynchronous:
                    self._settle()
                    step.settled = self.device.mark()
            if self.model.ranks.size > 1:  # last: before this, a failure of one rank fails the step
                self._check(step)
            self._next_number = plan.number + 1
            return step

    def _check(self, step: LaunchedStep) -> None:
        """Check that all ranks have computed the same tokens; of the previous step, on an asynchronous device."""
        self._unchecked.append(step)
        if len(self._unchecked) > int(self.device.asynchronous):
            step = self._unchecked.popleft()
            self.model.stage.check(step.digest())
            if self.model.replicas > 1:  # replicas have different tokens
                self.model.ranks.check(step.number)

    def _settle(self) -> None:
        """Give the drafter the results of earlier steps; waits for the last one only if necessary."""
        while self._drafter is not None and self._unsettled:
            if not (self._drafter.waits or len(self._unsettled) > 1 or self._unsettled[0].known):
                break
            step = self._unsettled.popleft()
            for part, results in zip(step.parts, step.results(), strict=True):
                pairs = zip(part.spans, results, strict=True)
                self._failed.update(span.request for span, result in pairs if result.error is not None)
                self._drafter.settle(part.outcome(results))

    def _move_blocks(self, plan: StepPlan) -> Moved:
        """Save blocks, before anything is overwritten, and load others. Until the step is committed, nobody reads what
        it saves."""
        if self.host is None:
            return Moved([])
        pools, begin = [each.memory for each in self.kv], time.monotonic()
        saved = self.host.save(pools, plan.saves)
        if plan.saves and self.model.ranks.size > 1:  # only the first rank waits for its steps
            self.device.mark().wait()
            saved()
            saved = _nothing
        between = time.monotonic()
        bad_loads = self.host.load(pools, plan.loads)
        end = time.monotonic()
        return Moved(self._bad_for_any(plan, bad_loads), end - between, between - begin, saved)

    def _bad_for_any(self, plan: StepPlan, bad_loads: list[int]) -> list[int]:
        """The slots whose loads are bad on any rank of the plan."""
        if not plan.loads or self.model.ranks.size == 1:
            return bad_loads
        group = self.model.stage if self.model.replicas > 1 else self.model.ranks
        found = group.exchange([torch.tensor(bad_loads, dtype=torch.int64)], plan.number)
        return sorted({slot for part in found for slot in part.clone().view(torch.int64).tolist()})

    def _take_in(self, plan: StepPlan) -> None:
        """Apply the plan's changes of requests and block tables, before computing."""
        self._drafting_ends(plan)
        self._take_in_ends(plan)
        self._take_in_starts(plan)
        self._take_in_blocks(plan)

    def _drafting_ends(self, plan: StepPlan) -> None:
        if self._drafter is not None:
            if plan.drop_drafting:
                self._drafter.drop_drafting(plan.drop_drafting)
            for number in plan.ended:
                self._drafter.end(number)

    def _take_in_ends(self, plan: StepPlan) -> None:
        if self.mover is not None:
            self.mover.follow(plan)
        self._failed.difference_update(plan.ended)
        for number in plan.ended:
            request = self._requests.pop(number, None)
            if request is not None:
                self._free_rows.append(request.row)
            self.sampler.end(number)

    def _take_in_starts(self, plan: StepPlan) -> None:
        for info in plan.started:
            row = self._free_rows.pop() if self._free_rows else len(self._requests)
            self._requests[info.request] = _Request(row, info.params.prompt_logprobs or 0, info.pooling)
            self.sampler.start(info)
            if self._drafter is not None:
                self._drafter.start(info)

    def _take_in_blocks(self, plan: StepPlan) -> None:
        grown = [span for span in plan.spans if span.blocks]
        if grown:
            rows = [self._requests[span.request].row for span in grown]
            self._forward.set_blocks(rows, [span.table_start for span in grown], [span.blocks for span in grown])
        for number, kv in enumerate(self.kv):
            copies = [(source, into, n) for span in grown for group, source, into, n in span.copies if group == number]
            if copies:  # into new blocks
                self.model.kernels.copy_blocks(kv, copies)

    def _compute(self, spans: list[Span], drafts: Mapping[int, Drafts], halvings: int = 0) -> list[Part]:
        """Compute all spans at once; if that fails, usually for lack of memory, in two halves."""
        try:
            return [self._compute_at_once(spans, drafts, whole=not halvings)]
        except Exception as error:
            if is_lost(error) or not self._halves:
                raise
            failed = self._fail(spans, error, halvings)
        self.device.release()
        if failed is not None:
            return [failed]
        half, halvings = len(spans) // 2, halvings + 1
        return self._compute(spans[:half], drafts, halvings) + self._compute(spans[half:], drafts, halvings)

    def _fail(self, spans: list[Span], error: Exception, halvings: int) -> Part | None:
        """Handle a failure: with a single span, returns a part with its error; with more, None, to retry in halves."""
        self.num_halved += 1
        scarce = is_out_of_memory(error)
        why = "out of memory" if scarce else f"{type(error).__name__}: {error}"
        if len(spans) > 1:
            logger.warning("%s in a step of %d requests: it is computed in two halves", why, len(spans))
            return None
        [span] = spans
        logger.error(
            "%s: request %d ends, of which %d tokens from position %d on were computed alone (halvings: %d)",
            *(why, span.request, len(span.tokens), span.start, halvings),
            exc_info=error,
        )
        self._failed.add(span.request)
        return Part(spans, error=OUT_OF_MEMORY if scarce else STEP_FAILED)

    def _compute_at_once(self, spans: list[Span], drafts: Mapping[int, Drafts], whole: bool = True) -> Part:
        """Launch the forward pass, the scoring of prompts, and sampling; `whole`: the step has no other parts."""
        rows = np.array([self._requests[span.request].row for span in spans])
        row_starts = np.cumsum([0, *(len(span.tokens) for span in spans)])
        made = self._forward(spans, rows, row_starts, branches_of(spans, drafts))
        return self._finish(spans, rows, row_starts, made, drafts, whole)

    def _finish(
        self,
        spans: list[Span],
        rows: IntArray,
        row_starts: IntArray,
        made: Forwarded,
        drafts: Mapping[int, Drafts],
        whole: bool = True,
    ) -> Part:
        """Launch everything after the forward pass."""
        hidden, finite, features = made
        part = Part(spans, row_starts=row_starts.tolist())
        for index in [index for index, span in enumerate(spans) if span.targets]:
            part.scored[index] = self._score_prompt(spans[index], hidden[row_starts[index] :])
        for index in [index for index, span in enumerate(spans) if span.num_pooled]:
            end = row_starts[index + 1]
            part.pooled[index] = self._pool(spans[index], hidden[end - spans[index].num_pooled : end])
        part.chosen = [index for index, span in enumerate(spans) if span.num_sampled]
        # Sampling comes last: if memory runs out before it, no request has advanced yet.
        [part.finite] = self.device.download(finite)
        drafter, part.drafts = self._drafter, drafts
        if drafter is not None and drafter.waits:  # otherwise `sample` launches what needs the features
            part.features = features if whole else features.clone()  # another part may be the same graph
        if drafter is not None and (drafts or not drafter.waits):
            part.sampled, part.ahead = drafter.sample(spans, part.row_starts, made, drafts, self.model.logits)
        elif part.chosen:
            part.sampled = self._sample(part, hidden, rows)
        return part

    def _score_prompt(self, span: Span, hidden: Tensor) -> list[Scored]:
        """Launch prompt log-probabilities, in slices of rows, since logits are large."""
        top = self._requests[span.request].prompt_logprobs
        return [
            self.sampler.launch_score(self.model.logits(hidden[start:stop]), list(span.targets[start:stop]), top)
            for start, stop in _slices(len(span.targets), self._logit_rows)
        ]

    def _pool(self, span: Span, hidden: Tensor) -> Pooled:
        """Launch the pooling of these rows, see `PoolingParams`."""
        pooling = self._requests[span.request].pooling
        if pooling is not None and pooling.label_token_ids:
            return launch_labels(self.model.kernels, self.device, self.model.logits(hidden), pooling.label_token_ids)
        return launch_sum(self.device, hidden)

    def _sample(self, part: Part, hidden: Tensor, rows: IntArray) -> Sampled:
        """Launch the sampling of one token for each span that reaches its request's last known token."""
        chosen, spans = np.array(part.chosen), [part.spans[index] for index in part.chosen]
        places = [(span.request, span.start + len(span.tokens)) for span in spans]
        forward, drawn, decodes = self._forward, None, len(chosen) == part.row_starts[-1]
        if decodes and isinstance(forward, DeviceForward) and forward.samples:
            drawn = self.sampler.launch_plain(functools.partial(forward.sample, hidden), places, rows)
        if drawn is not None:
            sampled, table_rows = drawn
        elif decodes:
            [table_rows] = self.device.upload(rows)
            sampled = self.sampler.launch(self.model.logits(hidden[: len(chosen)]), places)
        else:
            last, table_rows = self.device.upload(np.array(part.row_starts)[chosen + 1] - 1, rows[chosen])
            sampled = self.sampler.launch(self.model.logits(hidden.index_select(0, last)), places)
        # Last: a step that runs out of memory before this is computed again, from the tokens that are replaced here.
        forward.last_tokens.index_copy_(0, table_rows, sampled.tokens)
        return sampled


def _nothing() -> None:
    """There is nothing to do."""


class Moved(NamedTuple):
    """What was moved between the pools and the host tier.

    Attributes:
        bad_loads, loading, saving: see `StepResult`.
        saved: called once the step has run, see `Mover.save`.
    """

    bad_loads: list[int]
    loading: float = 0.0
    saving: float = 0.0
    saved: Callable[[], None] = _nothing


class LaunchedStep:
    """A step that was launched.

    Attributes:
        parts: the parts in which it was computed.
        settled: the end of the step; with a drafter that was told immediately, the end of that.
        moved: between the pools and the host tier.
    """

    def __init__(self, plan: StepPlan, parts: list[Part], begin: Mark, drafted: Mark, end: Mark) -> None:
        self._plan, self.parts, self._begin, self._drafted, self._end = plan, parts, begin, drafted, end
        self.settled = end
        self.moved = Moved([])
        self._results: list[list[SpanResult]] | None = None

    @property
    def known(self) -> bool:
        """Whether its results are on the host."""
        return self._results is not None

    @property
    def number(self) -> int:
        """The number of its plan."""
        return self._plan.number

    def digest(self) -> int:
        """A digest of the results, to compare among ranks; waits for the device."""
        self._end.wait()
        return functools.reduce(lambda digest, part: part.digest(digest), self.parts, 0)

    def results(self) -> list[list[SpanResult]]:
        """The results of each part, one per span; waits for the device."""
        if self._results is None:
            self._end.wait()
            self._results = [part.results() for part in self.parts]
        return self._results

    def wait(self) -> StepResult:
        """The result; waits for the device."""
        self.settled.wait()
        self.moved.saved()
        results = self.results()
        began, drafted, computed = self._begin.time(), self._drafted.time(), self._end.time()
        ended = computed if self.settled is self._end else self.settled.time()
        if len(self.parts) == 1 and len(self.parts[0].spans) == len(self._plan.spans):
            [spans] = results
        else:  # computed in parts, or without requests that failed before
            found = {
                span.request: r
                for part, own in zip(self.parts, results, strict=True)
                for span, r in zip(part.spans, own, strict=True)
            }
            spans = [found.get(span.request) or SpanResult([], error=FAILED_BEFORE) for span in self._plan.spans]
        bad_loads, loading, saving, _ = self.moved
        drafting = max(0.0, drafted - began - loading - saving) + ended - computed
        return StepResult(self._plan.number, spans, ended - began, began, drafting, bad_loads, loading, saving)


class Part:
    """Spans that were computed at once, and their results.

    Attributes:
        row_starts: first row of each span, and the end of the last one.
        finite: [tokens] whether each row's hidden state is finite.
        scored: by span index, the slices of its prompt's scores. pooled: by span index, see `SpanResult`.
        chosen: indices of the spans that sample, in the order of `sampled`.
        drafts: by request, the drafts that its span verifies.
        ahead: [sampled spans, most] drafts that were known on the device only, in the order of `chosen`.
        features: see `Forwarded`; empty if they are no longer needed.
        error: why no span has a result.
    """

    def __init__(self, spans: list[Span], row_starts: list[int] | None = None, error: str | None = None) -> None:
        self.spans, self.row_starts, self.error = spans, row_starts or [0], error
        self.finite = torch.empty(0, dtype=torch.bool)
        self.scored: dict[int, list[Scored]] = {}
        self.pooled: dict[int, Pooled] = {}
        self.chosen: list[int] = []
        self.sampled: Sampled | None = None
        self.drafts: Mapping[int, Drafts] = {}
        self.ahead = torch.empty(0, 0)
        self.features = torch.empty(0)
        self._paths: dict[int, list[int]] = {}  # see `Outcome`

    def digest(self, before: int) -> int:
        """A digest of the results, continuing the one `before`."""
        sampled = b"" if self.sampled is None else self.sampled.on_host.numpy().tobytes()
        return zlib.crc32(self.finite.numpy().tobytes(), zlib.crc32(sampled, before))

    def results(self) -> list[SpanResult]:
        """One result per span."""
        if self.error is not None:
            return [SpanResult([], error=self.error) for _ in self.spans]
        results = self._finite_results()
        for index, slices in self.scored.items():
            entries = [entry for scored in slices for entry in scored.finish()]
            _take_scores(results[index], entries)
        for index, pooled in self.pooled.items():
            if results[index].error is None:
                results[index].pooled, results[index].error = pooled.finish()
        if self.ahead.numel():
            spans = [self.spans[index] for index in self.chosen]
            lines = zip(spans, self.ahead.tolist(), strict=True)
            self.drafts = {
                span.request: Drafts(line[: span.num_sampled - 1]) for span, line in lines if span.num_sampled > 1
            }
        rows = iter(self.sampled.finish() if self.sampled else ())
        for index in self.chosen:
            result, drafts = results[index], self.drafts.get(self.spans[index].request)
            row = next(rows)
            if drafts is not None:
                self._take_verified(index, result, drafts, [row, *islice(rows, len(drafts.tokens))])
                continue
            result.error = result.error or row.error
            if result.error is None:
                result.tokens = [row.token]
                result.logprobs = None if row.logprobs is None else [row.logprobs]
        return results

    def _take_verified(self, index: int, result: SpanResult, drafts: Drafts, rows: list[SampledRow]) -> None:
        """Take the accepted drafts, and one more token.

        A row that failed after drafts is ignored: the next step computes it again, as it would without drafts. So is a
        first row that failed, since drafts may have caused that: 0 times a non-finite value is not finite.
        """
        first = self.row_starts[index + 1] - len(rows)
        finite = self.finite[first : first + len(rows)].tolist()
        path = accepted_path([row.token for row in rows], drafts)
        path = path[: next((i for i, row in enumerate(path) if rows[row].error or not finite[row]), len(path))]
        result.num_drafted = len(drafts.tokens) if path else 0
        result.error = None
        result.tokens = [rows[row].token for row in path]
        result.logprobs = [entry for row in path if (entry := rows[row].logprobs) is not None] or None
        known = len(self.spans[index].tokens) - len(rows) if path else 0
        self._paths[index] = [*range(known), *(known + row for row in path)]

    def outcome(self, results: list[SpanResult]) -> Outcome:
        """What the drafter needs, given this part's `results`."""
        return Outcome(self.spans, results, self.row_starts, self.features, self.drafts, self._paths)

    def _finite_results(self) -> list[SpanResult]:
        """An empty result per span, or an error if one of its rows is not finite.

        A non-finite key or value makes its own row non-finite, since each token attends to itself. So rows without
        logits are checked, too; otherwise a bad block could be shared.
        """
        finite = self.finite[: self.row_starts[-1]]
        if bool(finite.all()):
            return [SpanResult([]) for _ in self.spans]
        pairs = zip(self.row_starts, self.row_starts[1:], strict=False)
        return [SpanResult([], error=None if bool(finite[a:b].all()) else NOT_FINITE) for a, b in pairs]


def _take_scores(result: SpanResult, entries: list[TokenLogprobs]) -> None:
    if any(math.isnan(entry.values[0]) for entry in entries):
        result.error = result.error or NOT_FINITE
    elif result.error is None:
        result.prompt_logprobs = entries


@dataclass(slots=True)
class _Request:
    """The runner's state of a request; `row` is its row in the block tables."""

    row: int
    prompt_logprobs: int
    pooling: PoolingParams | None


def check_complete(plan: StepPlan, next_number: int | None) -> None:
    """Raises RuntimeError if a plan after a gap lacks state that it needs."""
    started = {info.request for info in plan.started}
    lacking = [span.request for span in plan.spans if span.request not in started]
    if lacking:
        expected = "a gap" if next_number is None else f"plan {next_number}"
        raise RuntimeError(
            f"plan {plan.number} came where {expected} was next, and it does not start request {lacking[0]}: "
            "full state must be sent again"
        )


def branches_of(spans: Sequence[Span], drafts: Mapping[int, Drafts]) -> dict[int, Branch]:
    """By request, the trees of drafts that spans verify."""
    trees = {span.request: branch_of(span, drafts[span.request]) for span in spans if span.request in drafts}
    return {request: branch for request, branch in trees.items() if branch is not None}


def _slices(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(start + size, length)
