"""Computes a step: from a plan to a ragged batch, through the model and the sampler, to the result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import torch
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
        self.sampler = Sampler(model.vocab_size)
        self._logit_rows = logit_rows
        self._threads = threads
        self._requests: dict[int, _Request] = {}
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
        for request in plan.ended:
            self._requests.pop(request, None)
            self.sampler.end(request)
        for info in plan.started:
            self._requests[info.request] = _Request(info.params.prompt_logprobs)
            self.sampler.start(info)
        for span in plan.spans:
            self._requests[span.request].set_blocks(span)
            if span.copies:
                self.kv.copy(list(span.copies))

    def _batch(self, spans: list[Span]) -> RaggedBatch:
        """All spans one after the other."""
        size = self.kv.block_size
        tokens: list[int] = []
        row_starts, context_lens, positions, slots = [0], [], [], []
        width = max(-(-(span.start + len(span.tokens)) // size) for span in spans)
        tables = np.zeros((len(spans), width), dtype=np.int64)
        for index, span in enumerate(spans):
            request, end = self._requests[span.request], span.start + len(span.tokens)
            tokens += [request.last_token if token == FROM_PREVIOUS else token for token in span.tokens]
            at = np.arange(span.start, end)
            positions.append(at)
            slots.append(request.table[at // size] * size + at % size)
            row_starts.append(len(tokens))
            context_lens.append(end)
            tables[index, : -(-end // size)] = request.table[: -(-end // size)]
        return RaggedBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.from_numpy(np.concatenate(positions)),
            slots=torch.from_numpy(np.concatenate(slots)),
            row_starts=row_starts,
            context_lens=context_lens,
            block_tables=torch.from_numpy(tables),
            block_size=size,
        )

    # -- results -------------------------------------------------------------------------------------------

    def _finite_results(self, hidden: Tensor, batch: RaggedBatch) -> list[SpanResult]:
        """An empty result a span, or an error for each span with a row that is not finite.

        A key or value that is not finite makes its own row so, since each token attends to itself: rows
        without logits are checked too, or a bad block could be shared.
        """
        finite = torch.isfinite(hidden).all(dim=-1)
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
        rows = hidden if len(last_rows) == len(hidden) else hidden[last_rows]
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


class _Request:
    """What the runner keeps of a request: its block table and its last token."""

    __slots__ = ("failed", "last_token", "prompt_logprobs", "table")

    def __init__(self, prompt_logprobs: int | None) -> None:
        self.table = np.zeros(64, dtype=np.int64)
        self.last_token = 0
        self.failed = False
        self.prompt_logprobs = prompt_logprobs or 0

    def set_blocks(self, span: Span) -> None:
        """Entries of the table from `span.table_start` on."""
        end = span.table_start + len(span.blocks)
        if end > len(self.table):
            self.table = np.concatenate([self.table, np.zeros(max(end, len(self.table)), dtype=np.int64)])
        self.table[span.table_start : end] = span.blocks


def _slices(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(start + size, length)
