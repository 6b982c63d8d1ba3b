"""A runner without a model: its blocks hold token ids, and its next token is a hash of what it reads.

Whatever is wrong with sharing, copying, tables or order changes what is read, and so the tokens.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.cache_events import CacheEvents
from quire.core.kv_manager import KVManager
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.step import DRAFT, FROM_PREVIOUS, SpanResult, StepPlan, StepResult, TokenLogprobs

TraceFunction = Callable[[FrameType, str, Any], Any]

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


def often_right(context: list[int], count: int, window: int | None = None) -> list[int]:
    """Drafts as a proposer might give them: fewer than asked at times, and wrong from some place on."""
    luck = zlib.crc32(array("q", [len(context), *context[-3:]]).tobytes())
    drafts = expected_output(context, min(count, luck % 8), window)
    wrong = luck // 8 % (count + 2)
    return [token if i < wrong else token + 1 for i, token in enumerate(drafts)]


class StepFailed(Exception):
    """The step came to nothing."""


class FakeRunner:
    """With a `drafter`, drafts are verified as a real runner does: given tokens so far and how many are wanted."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int | None = None,
        drafter: Callable[[list[int], int, int | None], list[int]] | None = None,
    ) -> None:
        self.drafter = drafter
        self.texts: dict[int, list[int]] = {}  # all tokens of each request
        self.num_drafted = self.num_accepted = 0
        self.block_size = block_size
        self.window = window
        self.memory = [[POISON] * block_size for _ in range(num_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.next_number = 0
        self.broken: set[int] = set()  # requests whose logits are not finite
        self.fatal: set[int] = set()  # requests whose steps fail
        self.spoils: Callable[[], bool] = lambda: False  # whether drafts make the row before them fail

    def run(self, plan: StepPlan) -> StepResult:
        if plan.number != self.next_number:
            self.tables, self.texts = {}, {}
            started = {info.request for info in plan.started}
            if not started.issuperset(span.request for span in plan.spans):
                raise RuntimeError(
                    f"plan {plan.number} came, {self.next_number} was next; not all state was sent again"
                )
        self.next_number = plan.number + 1
        if any(span.request in self.fatal for span in plan.spans):
            raise StepFailed
        for request in plan.ended:
            del self.tables[request]
            del self.texts[request]
        for info in plan.started:
            self.tables[info.request] = []
            self.texts[info.request] = [*info.prompt_token_ids, *info.output_token_ids]
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
        if span.request in self.broken:
            return SpanResult([], error="logits are not finite")
        text = self.texts[span.request]
        follows = FROM_PREVIOUS in span.tokens
        assert follows or not span.start_follows
        start = len(text) - 1 if span.start_follows else span.start
        assert start <= span.start
        if follows:
            assert start + span.tokens.index(FROM_PREVIOUS) == len(text) - 1
        tokens = [text[-1] if token == FROM_PREVIOUS else token for token in span.tokens if token != DRAFT]
        wanted = len(span.tokens) - len(tokens)
        drafts = self.drafter(text, wanted, self.window) if wanted and self.drafter else []
        for offset, token in enumerate([*tokens, *drafts]):
            position = start + offset
            block = table[position // self.block_size]
            if block == 0:
                raise RuntimeError("a span writes the null block")
            self.memory[block][position % self.block_size] = token
        sampled = []
        if drafts and self.spoils():
            return SpanResult([])
        if span.num_sampled:
            end = start + len(tokens)
            sampled = [next_token(self._read(table, end), self.window)]
            for draft in drafts:
                if draft != sampled[-1]:
                    break
                end += 1
                sampled.append(next_token(self._read(table, end), self.window))
            text += sampled
            self.num_drafted += len(drafts)
            self.num_accepted += len(sampled) - 1
        scored = None
        if span.targets:
            scored = [TokenLogprobs([target], [float(span.start + i)], [1]) for i, target in enumerate(span.targets)]
        return SpanResult(sampled, prompt_logprobs=scored, num_drafted=len(drafts))

    def _read(self, table: list[int], end: int) -> list[int]:
        first = 0 if self.window is None else max(0, end - self.window)
        seen = [self.memory[table[p // self.block_size]][p % self.block_size] for p in range(first, end)]
        return [POISON] * first + seen


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    window: int | None = None,
    max_model_len: int = 10_000,
    drafts: int = 0,
    drafter: Callable[[list[int], int, int | None], list[int]] = often_right,
    adaptive: bool = False,
    needs_next_token: bool = False,
    events: CacheEvents | None = None,
    **options,
) -> tuple[Scheduler, FakeRunner]:
    """A scheduler and the runner that goes with it; options are `EngineConfig`'s."""
    if drafts:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "adaptive": adaptive}
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "min_chunk": 4}
    config = EngineConfig(model="fake", **(defaults | options))
    hasher = BlockHasher(bytes(32), "fake")
    kv = KVManager(num_blocks, block_size, config.prefix_cache, hasher, window, needs_next_token, events)
    return Scheduler(config, kv, max_model_len), FakeRunner(num_blocks, block_size, window, drafter if drafts else None)


def make_request(id: int, prompt: list[int], max_tokens: int = 4, **fields) -> Request:
    names = ("stop_token_ids", "scope", "owner", "arrived", "awaits")
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


def interrupted(call: Callable[[], object], lines: int) -> bool:
    """Whether `call` came to no end, because it was to run more than so many lines of `quire.core`."""
    left = lines

    def trace(frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        nonlocal left
        if not frame.f_globals["__name__"].startswith("quire.core."):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise MemoryError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except MemoryError:
        return True
    finally:
        sys.settrace(before)
    return False
