"""Computes a step: from a plan to a ragged batch, through the model and the sampler, to the result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import FROM_PREVIOUS, Span, SpanResult, StepPlan, StepResult, TokenLogprobs
from quire.models.model import Model
from quire.ops import KVCache, RaggedBatch
from quire.runner.sampler import Sampler

NOT_FINITE = "the model's logits or hidden states are not finite (NaN or infinity)"


class ModelRunner:
    """Runs plans, in their order, on one model and one KV cache.

    Args:
        model: the loaded model.
        kv: its blocks.
        logit_rows: most rows whose logits are made at once for prompt log-probabilities.
        threads: how many a step may use. torch keeps that number for the whole process, so it is set for each
            step and put back after it: engines side by side, and the program around them, keep their own.
    """

    def __init__(self, model: Model, kv: KVCache, logit_rows: int, threads: int) -> None:
        self.model = model
        self.kv = kv
        self.sampler = Sampler(model.vocab_size, model.kernels)
        self._logit_rows = logit_rows
        self._threads = threads
        self._requests: dict[int, _Request] = {}
        self._tables = _BlockTables()
        self._next_number = 0

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        Raises:
            RuntimeError: a plan is missing, so this runner may lack state; full state must be sent again.
        """
        begin = time.perf_counter()
        if plan.number != self._next_number:
            raise RuntimeError(f"plan {plan.number} came where {self._next_number} was next; send full state again")
        self._next_number += 1
        threads_before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            results = self._compute(plan)
        finally:
            torch.set_num_threads(threads_before)
        return StepResult(plan.number, results, time.perf_counter() - begin)

    def _compute(self, plan: StepPlan) -> list[SpanResult]:
        self._take_in(plan)
        batch = self._batch(plan.spans)
        hidden = self.model.forward(batch, self.kv)  # [tokens, hidden]
        results = self._finite_results(hidden, batch)
        self._score_prompts(plan.spans, results, hidden, batch)
        self._sample(plan.spans, results, hidden, batch)
        return results

    # -- state ---------------------------------------------------------------------------------------------

    def _take_in(self, plan: StepPlan) -> None:
        """What the plan says of requests and blocks, before anything is computed."""
        for number in plan.ended:
            request = self._requests.pop(number, None)
            if request is not None:
                self._tables.give_back(request.table)
            self.sampler.end(number)
        for info in plan.started:
            self._requests[info.request] = _Request(self._tables.take(), info.params.prompt_logprobs or 0)
            self.sampler.start(info)
        for span in plan.spans:
            if span.blocks:
                self._tables.set(self._requests[span.request].table, span.table_start, span.blocks)
            if span.copies:
                self.kv.copy(list(span.copies))

    def _batch(self, spans: list[Span]) -> RaggedBatch:
        """All spans one after the other."""
        size = self.kv.block_size
        requests = [self._requests[span.request] for span in spans]
        tables = np.array([request.table for request in requests])
        starts = np.array([span.start for span in spans])
        lengths = np.array([len(span.tokens) for span in spans])
        row_starts = np.zeros(len(spans) + 1, np.int64)
        np.cumsum(lengths, out=row_starts[1:])
        tokens = np.array(list(chain.from_iterable(span.tokens for span in spans)), np.int64)
        span_of_row = np.repeat(np.arange(len(spans)), lengths)  # [tokens]
        previous = (tokens == FROM_PREVIOUS).nonzero()[0]
        tokens[previous] = [requests[i].last_token for i in span_of_row[previous].tolist()]
        positions = np.arange(len(tokens)) + (starts - row_starts[:-1])[span_of_row]
        blocks, offsets = np.divmod(positions, size)
        return RaggedBatch(
            token_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(self._tables.at(tables[span_of_row], blocks) * size + offsets),
            row_starts=row_starts.tolist(),
            context_lens=(starts + lengths).tolist(),
            block_tables=torch.from_numpy(self._tables.heads(tables, -(-(starts + lengths) // size))),
            block_size=size,
        )

    # -- results -------------------------------------------------------------------------------------------

    def _finite_results(self, hidden: Tensor, batch: RaggedBatch) -> list[SpanResult]:
        """An empty result a span, or an error for each span with a row that is not finite.

        A key or value that is not finite makes its own row so, since each token attends to itself: rows
        without logits are checked too, or a bad block could be shared.
        """
        finite = self.model.kernels.finite_rows(hidden)
        if bool(finite.all()):
            return [SpanResult([]) for _ in batch.context_lens]
        pairs = zip(batch.row_starts, batch.row_starts[1:], strict=False)
        return [SpanResult([], error=None if bool(finite[a:b].all()) else NOT_FINITE) for a, b in pairs]

    def _score_prompts(self, spans: list[Span], results: list[SpanResult], hidden: Tensor, batch: RaggedBatch) -> None:
        """Prompt log-probabilities, a slice of rows at a time, since logits are wide."""
        for index, (span, result) in enumerate(zip(spans, results, strict=True)):
            if not span.targets or result.error is not None:
                continue
            top = self._requests[span.request].prompt_logprobs
            first = batch.row_starts[index]
            scored: list[TokenLogprobs] = []
            for start, stop in _slices(len(span.targets), self._logit_rows):
                logits = self.model.logits(hidden[first + start : first + stop])
                scored += self.sampler.score(logits, list(span.targets[start:stop]), top)
            if any(math.isnan(entry.values[0]) for entry in scored):
                result.error = NOT_FINITE
            else:
                result.prompt_logprobs = scored

    def _sample(self, spans: list[Span], results: list[SpanResult], hidden: Tensor, batch: RaggedBatch) -> None:
        """One token for each span that ends at the last known one."""
        chosen = [i for i, span in enumerate(spans) if span.num_sampled and self._may_sample(span, results[i])]
        if not chosen:
            return
        last_rows = [batch.row_starts[i + 1] - 1 for i in chosen]
        rows = hidden if len(last_rows) == len(hidden) else hidden.index_select(0, torch.tensor(last_rows))
        places = [(spans[i].request, batch.context_lens[i]) for i in chosen]
        for i, row in zip(chosen, self.sampler.sample(self.model.logits(rows), places), strict=True):
            request = self._requests[spans[i].request]
            results[i].error = row.error
            if row.error is not None:
                request.failed = True
                continue
            results[i].tokens = [row.token]
            results[i].logprobs = None if row.logprobs is None else [row.logprobs]
            request.last_token = row.token

    def _may_sample(self, span: Span, result: SpanResult) -> bool:
        """Not after an error: a step planned before the error was known carries no meaning."""
        request = self._requests[span.request]
        request.failed = request.failed or result.error is not None
        if request.failed and result.error is None:
            result.error = "an earlier step of this request failed"
        return not request.failed


@dataclass(slots=True)
class _Request:
    """What the runner keeps of a request; `table` is its row in the block tables."""

    table: int
    prompt_logprobs: int
    last_token: int = 0
    failed: bool = False


class _BlockTables:
    """The block tables of all requests: rows of one matrix that grows, so that a step gathers them at once."""

    def __init__(self) -> None:
        self._blocks = np.zeros((16, 64), np.int64)
        self._free = list(range(len(self._blocks)))

    def take(self) -> int:
        """A row of zeros, for a new request."""
        if not self._free:
            rows = len(self._blocks)
            self._free = list(range(rows, 2 * rows))
            self._blocks = np.concatenate([self._blocks, np.zeros_like(self._blocks)])
        row = self._free.pop()
        self._blocks[row] = 0
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def set(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Entries of a row from `start` on."""
        end, width = start + len(blocks), self._blocks.shape[1]
        if end > width:
            self._blocks = np.pad(self._blocks, ((0, 0), (0, max(end - width, width))))
        self._blocks[row, start:end] = blocks

    def at(self, rows: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Single entries."""
        found: NDArray[np.int64] = self._blocks[rows, indices]
        return found

    def heads(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first `lengths` entries of some rows, [rows, longest], with zeros behind them."""
        width = lengths.max()
        heads: NDArray[np.int64] = self._blocks[:, :width][rows]
        heads *= np.arange(width) < lengths[:, None]
        return heads


def _slices(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(start + size, length)
