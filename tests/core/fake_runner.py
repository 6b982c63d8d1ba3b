"""A runner without a model: its blocks hold token ids, and its next token is a hash of what it reads.

Whatever is wrong with sharing, copying, tables or order changes what is read, and so the tokens.
"""

from __future__ import annotations

import zlib
from array import array

from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.kv_manager import KVManager
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.step import FROM_PREVIOUS, SpanResult, StepPlan, StepResult, TokenLogprobs

VOCAB = 50
POISON = -7


def next_token(context: list[int], window: int | None = None) -> int:
    """The fake model: a hash of the tokens that the last position attends to."""
    seen = context if window is None else context[-window:]
    return zlib.crc32(array("q", seen).tobytes()) % VOCAB


def expected_output(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    """What a request must yield whatever happens around it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, window))
    return tokens[len(prompt) :]


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.memory = [[POISON] * block_size for _ in range(num_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.next_number = 0
        self.broken: set[int] = set()  # requests whose logits are not finite

    def run(self, plan: StepPlan) -> StepResult:
        if plan.number != self.next_number:
            raise RuntimeError(f"plan {plan.number} came, {self.next_number} was next")
        self.next_number += 1
        for request in plan.ended:
            del self.tables[request]
            self.last.pop(request, None)
        for info in plan.started:
            self.tables[info.request] = []
        for span in plan.spans:
            for source, target, tokens in span.copies:
                self.memory[target][:tokens] = self.memory[source][:tokens]
                self.memory[target][tokens:] = [POISON] * (self.block_size - tokens)
        return StepResult(plan.number, [self._run_span(span) for span in plan.spans], seconds=0.001)

    def _run_span(self, span) -> SpanResult:
        table = self.tables[span.request]
        if span.blocks:
            if len(table) < span.table_start:
                raise RuntimeError("the table has a gap")
            table[span.table_start :] = span.blocks
        if len(span.tokens) == 0:
            raise RuntimeError("an empty span")
        for offset, token in enumerate(span.tokens):
            if token == FROM_PREVIOUS:
                token = self.last.get(span.request, 0)  # 0: the previous step failed
            position = span.start + offset
            block = table[position // self.block_size]
            if block == 0:
                raise RuntimeError("a span writes the null block")
            self.memory[block][position % self.block_size] = token
        if span.request in self.broken:
            return SpanResult([], error="logits are not finite")
        tokens = []
        end = span.start + len(span.tokens)
        if span.num_sampled:
            tokens = [next_token(self._read(table, end), self.window)]
            self.last[span.request] = tokens[0]
        scored = None
        if span.targets:
            scored = [TokenLogprobs([target], [float(span.start + i)], [1]) for i, target in enumerate(span.targets)]
        return SpanResult(tokens, prompt_logprobs=scored)

    def _read(self, table: list[int], end: int) -> list[int]:
        first = 0 if self.window is None else max(0, end - self.window)
        seen = [self.memory[table[p // self.block_size]][p % self.block_size] for p in range(first, end)]
        return [POISON] * first + seen


def make_scheduler(
    num_blocks: int = 64, block_size: int = 4, window: int | None = None, max_model_len: int = 10_000, **options
) -> tuple[Scheduler, FakeRunner]:
    """A scheduler and the runner that goes with it; options are `EngineConfig`'s."""
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "min_chunk": 4}
    config = EngineConfig(model="fake", **(defaults | options))
    kv = KVManager(num_blocks, block_size, config.prefix_cache, BlockHasher(bytes(32), "fake"), window)
    return Scheduler(config, kv, max_model_len), FakeRunner(num_blocks, block_size, window)


def make_request(id: int, prompt: list[int], max_tokens: int = 4, **fields) -> Request:
    names = ("stop_token_ids", "scope", "arrived")
    own = {name: fields.pop(name) for name in names if name in fields}
    return Request(id, prompt, SamplingParams(**fields), max_tokens=max_tokens, **own)


def run_all(scheduler: Scheduler, runner: FakeRunner, depth: int = 0, limit: int = 10_000) -> list[RequestUpdate]:
    """Run until nothing is left, with `depth` extra steps in flight."""
    updates: list[RequestUpdate] = []
    flying: list[tuple[StepPlan, StepResult]] = []
    for step in range(limit):
        plan = scheduler.schedule(float(step))
        if plan:
            flying.append((plan, runner.run(plan)))
        if not plan and not flying:
            updates += scheduler.take_updates()
            return updates
        if flying and (not plan or len(flying) > depth):
            updates += scheduler.commit(*flying.pop(0), float(step))
    raise RuntimeError(f"not done after {limit} steps")


def outputs(updates: list[RequestUpdate]) -> dict[int, list[int]]:
    """The tokens of each request."""
    result: dict[int, list[int]] = {}
    for update in updates:
        result.setdefault(update.request, []).extend(update.tokens)
    return result
