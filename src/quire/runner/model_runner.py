"""Computes a step: from a plan through the model and the sampler to the result.

A step has two halves. `launch` tells the device all that there is to do, and does not wait: the sampled tokens stay
there, where the next step finds them. `LaunchedStep.wait` waits, and makes the result of what came back. On a CPU
everything is done when `launch` returns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Span, SpanResult, StepPlan, StepResult, TokenLogprobs
from quire.models.model import Model
from quire.ops import KVCache
from quire.runner.device import Device, Mark
from quire.runner.device_forward import DeviceForward
from quire.runner.host_forward import HostForward
from quire.runner.sampler import Sampled, Sampler, Scored

logger = logging.getLogger(__name__)

NOT_FINITE = "the model's logits or hidden states are not finite (NaN or infinity)"
FAILED_BEFORE = "an earlier step of this request failed"
OUT_OF_MEMORY = (
    "the device ran out of memory while it computed this request alone; lower max_num_batched_tokens or "
    "gpu_memory_utilization, or ask for fewer tokens"
)


class ModelRunner:
    """Runs plans, in their order, on one model and one KV cache.

    Args:
        model: the loaded model.
        kv: its blocks.
        logit_rows: most rows whose logits are made at once for prompt log-probabilities.
        threads: how many a step may use. torch keeps that number for the whole process, so it is set for each
            step and put back after it: engines side by side, and the program around them, keep their own.
        device: where the model lies.
        forward: how spans get through the model; what suits the kernels, unless said.

    Attributes:
        num_halved: how often memory did not suffice for all spans at once.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        logit_rows: int,
        threads: int,
        device: Device | None = None,
        forward: HostForward | DeviceForward | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.num_halved = 0
        self.device = device or Device()
        self.sampler = Sampler(model.vocab_size, model.kernels, self.device)
        self._forward = forward or HostForward(model, kv)
        self._logit_rows = logit_rows
        self._threads = threads
        self._requests: dict[int, _Request] = {}
        self._free_rows: list[int] = []  # of the block tables
        self._failed: set[int] = set()  # their later steps, planned before the engine could know, are not computed
        self._next_number = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and wait for it: see `launch`."""
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start one step.

        Raises:
            RuntimeError: a plan is missing, so this runner may lack state; full state must be sent again.
        """
        if plan.number != self._next_number:
            raise RuntimeError(f"plan {plan.number} came where {self._next_number} was next; send full state again")
        self._next_number += 1
        with torch.inference_mode(), self.device.active(), _threads(self._threads):
            begin = self.device.mark()
            self.kv.pulse[0] += 1  # a replay passes no layer
            try:
                self._take_in(plan)
                failed = self._failed
                spans = [span for span in plan.spans if span.request not in failed] if failed else plan.spans
                parts = self._compute(spans) if spans else []
            except Exception:
                self._failed.update(span.request for span in plan.spans)
                raise
            return LaunchedStep(plan, parts, begin, self.device.mark())

    def _take_in(self, plan: StepPlan) -> None:
        """What the plan says of requests and blocks, before anything is computed."""
        self._failed.difference_update(plan.ended)
        for number in plan.ended:
            request = self._requests.pop(number, None)
            if request is not None:
                self._free_rows.append(request.row)
            self.sampler.end(number)
        for info in plan.started:
            row = self._free_rows.pop() if self._free_rows else len(self._requests)
            self._requests[info.request] = _Request(row, info.params.prompt_logprobs or 0)
        for info in plan.started:
            self.sampler.start(info)
        grown = [span for span in plan.spans if span.blocks]
        if grown:
            rows = [self._requests[span.request].row for span in grown]
            self._forward.set_blocks(rows, [span.table_start for span in grown], [span.blocks for span in grown])
        copies = [copy for span in grown for copy in span.copies]  # into new blocks
        if copies:
            self.model.kernels.copy_blocks(self.kv, copies)

    def _compute(self, spans: list[Span]) -> list[_Part]:
        """All spans at once; where the device's memory does not suffice, one half after the other."""
        try:
            return [self._compute_at_once(spans)]
        except torch.OutOfMemoryError:
            self.device.release()
            self.num_halved += 1
            if len(spans) == 1:
                logger.error("out of memory: request %d (%d tokens) ends", spans[0].request, len(spans[0].tokens))
                self._failed.add(spans[0].request)
                return [_Part(spans, error=OUT_OF_MEMORY)]
            logger.warning("out of memory in a step of %d spans: it is computed in two halves", len(spans))
        half = len(spans) // 2
        return self._compute(spans[:half]) + self._compute(spans[half:])

    def _compute_at_once(self, spans: list[Span]) -> _Part:
        """Launch the forward pass, the scores of prompts, and sampling; what comes back, in an order that is kept."""
        rows = np.array([self._requests[span.request].row for span in spans])
        row_starts = np.cumsum([0, *(len(span.tokens) for span in spans)])
        hidden, finite = self._forward(spans, rows, row_starts)
        part = _Part(spans, row_starts=row_starts.tolist())
        for index in [index for index, span in enumerate(spans) if span.targets]:
            part.scored[index] = self._score_prompt(spans[index], hidden[row_starts[index] :])
        part.chosen = [index for index, span in enumerate(spans) if span.num_sampled]
        if part.chosen:
            part.sampled = self._sample(part, hidden, rows)
        [part.finite] = self.device.download(finite)
        return part

    def _score_prompt(self, span: Span, hidden: Tensor) -> list[Scored]:
        """Prompt log-probabilities, a slice of rows at a time, since logits are wide."""
        top = self._requests[span.request].prompt_logprobs
        return [
            self.sampler.launch_score(self.model.logits(hidden[start:stop]), list(span.targets[start:stop]), top)
            for start, stop in _slices(len(span.targets), self._logit_rows)
        ]

    def _sample(self, part: _Part, hidden: Tensor, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Sampled:
        """One token for each span that ends at the last known one."""
        chosen, spans = np.array(part.chosen), [part.spans[index] for index in part.chosen]
        places = [(span.request, span.start + len(span.tokens)) for span in spans]
        if len(chosen) == part.row_starts[-1]:  # every row: decodes alone
            [table_rows] = self.device.upload(rows)
            logits = self.model.logits(hidden[: len(chosen)])
        else:
            last, table_rows = self.device.upload(np.array(part.row_starts)[chosen + 1] - 1, rows[chosen])
            logits = self.model.logits(hidden.index_select(0, last))
        sampled = self.sampler.launch(logits, places)
        self._forward.last_tokens.index_copy_(0, table_rows, sampled.tokens)
        return sampled


class LaunchedStep:
    """A step that the device was told to compute."""

    def __init__(self, plan: StepPlan, parts: list[_Part], begin: Mark, end: Mark) -> None:
        self._plan, self._parts, self._begin, self._end = plan, parts, begin, end

    def wait(self) -> StepResult:
        """Its result, once the device has computed it."""
        self._end.wait()
        began, ended = self._begin.time(), self._end.time()
        if len(self._parts) == 1 and self._parts[0].spans is self._plan.spans:
            results = self._parts[0].results()
        else:  # computed in parts, or without those that failed before
            found = {
                span.request: r for part in self._parts for span, r in zip(part.spans, part.results(), strict=True)
            }
            results = [found.get(span.request) or SpanResult([], error=FAILED_BEFORE) for span in self._plan.spans]
        return StepResult(self._plan.number, results, ended - began, began)


class _Part:
    """Spans that were computed at once, and what comes back of them.

    Attributes:
        row_starts: first row of each span, and one entry more.
        finite: [tokens] whether each row's hidden state is.
        scored: by index of the span, the slices of its prompt's scores.
        chosen: indices of the spans that sample, in the order of `sampled`.
        error: why none of them has a result.
    """

    def __init__(self, spans: list[Span], row_starts: list[int] | None = None, error: str | None = None) -> None:
        self.spans, self.row_starts, self.error = spans, row_starts or [0], error
        self.finite = torch.empty(0, dtype=torch.bool)
        self.scored: dict[int, list[Scored]] = {}
        self.chosen: list[int] = []
        self.sampled: Sampled | None = None

    def results(self) -> list[SpanResult]:
        """One a span."""
        if self.error is not None:
            return [SpanResult([], error=self.error) for _ in self.spans]
        results = self._finite_results()
        for index, slices in self.scored.items():
            entries = [entry for scored in slices for entry in scored.finish()]
            _take_scores(results[index], entries)
        for index, row in zip(self.chosen, self.sampled.finish() if self.sampled else (), strict=True):
            result = results[index]
            result.error = result.error or row.error
            if result.error is None:
                result.tokens = [row.token]
                result.logprobs = None if row.logprobs is None else [row.logprobs]
        return results

    def _finite_results(self) -> list[SpanResult]:
        """An empty result a span, or an error for each span with a row that is not finite.

        A key or value that is not finite makes its own row so, since each token attends to itself: rows
        without logits are checked too, or a bad block could be shared.
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
    """What the runner keeps of a request; `row` is its row in the block tables."""

    row: int
    prompt_logprobs: int


def _slices(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(start + size, length)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """For a while, torch uses this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
