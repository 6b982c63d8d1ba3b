"""A runner without a model: its blocks hold token ids, and its next token is a hash of what it reads.

Whatever is wrong with sharing, copying, tables or order changes what is read, and so the tokens.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.kv_group import KVGroup, Retention, States
from quire.core.kv_manager import KVManager
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.step import DRAFT, FROM_PREVIOUS, SpanResult, StepPlan, StepResult, TokenLogprobs
from quire.kv.published import Published
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.orders import Forget, Prefill, Read, Write
from quire.kv.tiers.sources import Sources
from quire.kv.tiers.tier import Tier

TraceFunction = Callable[[FrameType, str, Any], Any]
Windows = tuple[int | None, ...]
"""Of each KV group, how many of the latest tokens each token sees; None: all of them; `STATE`: a state of all."""
Drafter = Callable[[list[int], int, Windows], list[int]]

VOCAB = 50
POISON = -7


STATE = 0
"""In place of a window: the group's layers are recurrent."""
INTERVAL = 3
"""So many blocks lie between marks in prompts."""

ALL = (None,)
"""The windows of a model with one KV group that keeps all positions."""


def next_token(context: list[int], windows: Windows = ALL) -> int:
    """The fake model: a hash of the tokens that the last position sees in each KV group."""
    return hashed([token for window in windows for token in seen_of(context, window)])


def seen_of(context: list[int], window: int | None) -> list[int]:
    """What one group has of a context."""
    if window == STATE:
        return [advanced(0, context)]
    return context if window is None else context[-window:]


def advanced(state: int, tokens: list[int]) -> int:
    """A recurrent layer's state, so many tokens later."""
    for token in tokens:
        state = zlib.crc32(array("q", [state, token]).tobytes())
    return state


def hashed(seen: list[int]) -> int:
    return zlib.crc32(array("q", seen).tobytes()) % VOCAB


def expected_output(prompt: list[int], count: int, windows: Windows = ALL) -> list[int]:
    """What a request must yield whatever happens around it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, windows))
    return tokens[len(prompt) :]


def often_right(context: list[int], count: int, windows: Windows = ALL) -> list[int]:
    """Drafts as a proposer might give them: fewer than asked at times, and wrong from some place on."""
    luck = zlib.crc32(array("q", [len(context), *context[-3:]]).tobytes())
    drafts = expected_output(context, min(count, luck % 8), windows)
    wrong = luck // 8 % (count + 2)
    return [token if i < wrong else token + 1 for i, token in enumerate(drafts)]


class StepFailed(Exception):
    """The step came to nothing."""


class FakeDisk:
    """Carries out a scheduler's orders for the disk, one a call of `work`; what it has is `blocks`, by name."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[list[int], list[int]]] = {}  # tokens, and their check
        self.orders: list[Write | Read | Forget] = []
        self.fails = False

    def take(self, scheduler: Scheduler) -> None:
        """What was ordered."""
        orders = scheduler.kv.external.sources.orders
        for order in [each for each in orders if not isinstance(each, Prefill)]:
            orders.remove(order)
            if isinstance(order, Forget):
                self.blocks.pop(order.hash, None)
            else:
                self.orders.append(order)

    def work(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        """Carry out the oldest order."""
        order = self.orders.pop(0)
        if isinstance(order, Write):
            name, tokens, check = runner.slots[order.slot]
            assert name == order.hash, "a slot that is written stays as it is"
            if not self.fails:
                self.blocks[order.hash] = tokens, check
            scheduler.kv.external.sources.written(order.slot, not self.fails)
        elif isinstance(order, Read):
            count = 0
            for slot, name in order.blocks:
                if self.fails or name not in self.blocks:
                    break
                runner.slots[slot] = name, *self.blocks[name]
                count += 1
            scheduler.kv.external.sources.read_ended(order.number, count, 0.001 * count)


class FakeRunner:
    """With a `drafter`, drafts are verified as a real runner does: given tokens so far and how many are wanted."""

    def __init__(
        self,
        num_blocks: list[int],
        block_size: int,
        windows: Windows = ALL,
        drafter: Drafter | None = None,
    ) -> None:
        self.drafter = drafter
        self.texts: dict[int, list[int]] = {}  # all tokens of each request
        self.num_drafted = self.num_accepted = 0
        self.block_size = block_size
        self.windows = windows
        # Of each group; a block of a recurrent one has a token more, the state after all others.
        sizes = [block_size + (window == STATE) for window in windows]
        self.memory = [[[POISON] * size for _ in range(count)] for size, count in zip(sizes, num_blocks, strict=True)]
        self.slots: dict[int, tuple[bytes, list[int], list[int]]] = {}  # the host tier: name, tokens, and their check
        self.tables: dict[int, list[list[int]]] = {}
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
            self.tables[info.request] = [[] for _ in self.windows]
            self.texts[info.request] = [*info.prompt_token_ids, *info.output_token_ids]
        for block, slot, name, group in plan.saves:
            tokens = list(self.memory[group][block])
            assert POISON not in tokens, "what is saved is full"
            self.slots[slot] = name, tokens, tokens
        bad_loads = [move.slot for move in plan.loads if not self._load(*move)]
        for span in plan.spans:
            for group, source, target, tokens in span.copies:
                memory = self.memory[group]
                memory[target] = memory[source][:tokens] + [POISON] * (len(memory[source]) - tokens)
        spans = [self._run_span(span) for span in plan.spans]
        return StepResult(
            plan.number,
            spans,
            seconds=0.001,
            bad_loads=bad_loads,
            loading=1e-5 * len(plan.loads),
            saving=1e-5 * len(plan.saves),
        )

    def _load(self, block: int, slot: int, name: bytes, group: int) -> bool:
        """Whether the bytes are those that were saved."""
        saved, tokens, check = self.slots[slot]
        assert len(tokens) == len(self.memory[group][block]), "slots of a group hold blocks of that group"
        self.memory[group][block] = list(tokens)
        return saved == name and check == tokens

    def flip(self, slot: int) -> None:
        """Something else stands in a slot from now on."""
        name, tokens, check = self.slots[slot]
        self.slots[slot] = name, [token + 1 for token in tokens], check

    def _run_span(self, span) -> SpanResult:
        tables = self.tables[span.request]
        for table, blocks in zip(tables, span.blocks, strict=bool(span.blocks)):
            if len(table) < span.table_start:
                raise RuntimeError("the table has a gap")
            table[span.table_start :] = blocks
        if len({len(table) for table in tables}) != 1:
            raise RuntimeError("the groups' tables differ in length")
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
        drafts = self.drafter(text, wanted, self.windows) if wanted and self.drafter else []
        written = [*tokens, *drafts]
        for memory, table, window in zip(self.memory, tables, self.windows, strict=True):
            state = self._state(memory, table, start) if window == STATE else 0
            for position, token in enumerate(written, start=start):
                block = table[position // self.block_size]
                if block == 0 and window != STATE:
                    raise RuntimeError("a span writes the null block")
                state = advanced(state, [token])
                if block != 0:
                    memory[block][position % self.block_size] = token
                if block != 0 and window == STATE and (position + 1) % self.block_size == 0:
                    memory[block][-1] = state
        sampled = []
        if drafts and self.spoils():
            return SpanResult([])
        if span.num_sampled:
            end = start + len(tokens)
            sampled = [hashed(self._read(tables, end))]
            for draft in drafts:
                if draft != sampled[-1]:
                    break
                end += 1
                sampled.append(hashed(self._read(tables, end)))
            text += sampled
            self.num_drafted += len(drafts)
            self.num_accepted += len(sampled) - 1
        scored = None
        if span.targets:
            scored = [TokenLogprobs([target], [float(span.start + i)], [1]) for i, target in enumerate(span.targets)]
        return SpanResult(sampled, prompt_logprobs=scored, num_drafted=len(drafts))

    def _read(self, tables: list[list[int]], end: int) -> list[int]:
        seen = []
        for memory, table, window in zip(self.memory, tables, self.windows, strict=True):
            if window == STATE:
                seen.append(self._state(memory, table, end))
                continue
            first = 0 if window is None else max(0, end - window)
            seen += [memory[table[p // self.block_size]][p % self.block_size] for p in range(first, end)]
        return seen

    def _state(self, memory: list[list[int]], table: list[int], end: int) -> int:
        """A recurrent group's after `end` positions, from what is stored."""
        full, rest = divmod(end, self.block_size)
        state = memory[table[full - 1]][-1] if full else 0
        assert full == 0 or table[full - 1] != 0, "a state that is read is there"
        return advanced(state, memory[table[full]][:rest] if rest else [])


def make_scheduler(
    num_blocks: int | list[int] = 64,
    block_size: int = 4,
    windows: Windows = ALL,
    max_model_len: int = 10_000,
    drafts: int = 0,
    drafter: Drafter = often_right,
    adaptive: bool = False,
    needs_next_token: bool = False,
    num_slots: int | list[int] = 0,
    disk: FakeDisk | None = None,
    sources: Sources | None = None,
    pair_share: float = 0.0,
    **options,
) -> tuple[Scheduler, FakeRunner]:
    """A scheduler and the runner that goes with it; options are `EngineConfig`'s.

    Args:
        num_blocks: of each KV group, or of all of them the same.
        windows: of each group.
        num_slots: of the host tier, for each group, or for all of them the same.
        disk: behind it. sources: a tier that others have, too.
    """
    if drafts:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "adaptive": adaptive}
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "min_chunk": 4}
    config = EngineConfig(model="fake", **(defaults | options))
    hasher = BlockHasher(bytes(32), "fake")
    sizes = [num_blocks] * len(windows) if isinstance(num_blocks, int) else num_blocks
    states = States(INTERVAL, 1 + drafts if drafts else 0)
    groups = [
        KVGroup(count, Retention(block_size + 1, states) if window == STATE else Retention(window))
        for count, window in zip(sizes, windows, strict=True)
    ]
    sources = sources or (make_sources(windows, num_slots, disk) if num_slots else None)
    kv = KVManager(
        groups,
        block_size,
        config.prefix_cache,
        hasher,
        needs_next_token,
        None if sources is None else TierConnector(sources, keeps_pace=not config.prefills),
    )
    return Scheduler(config, kv, max_model_len, pair_share), FakeRunner(
        sizes, block_size, windows, drafter if drafts else None
    )


def make_sources(windows: Windows = ALL, num_slots: int | list[int] = 0, disk: FakeDisk | None = None) -> Sources:
    """A host tier and what is behind it."""
    slots = [num_slots] * len(windows) if isinstance(num_slots, int) else num_slots
    return Sources(Tier(*slots), None if disk is None else disk.blocks, [1.0] * len(windows))


def published_of(kvs: Sequence[KVManager]) -> Published:
    """What others can read of these pools and of the tier that they share."""
    connectors = [kv.external for kv in kvs if isinstance(kv.external, TierConnector)]
    published = Published(connectors[0].tier if connectors else None)
    for each in connectors:
        each.sources.shared = True
    for kv in kvs:
        kv.listen(published)
    return published


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


def run_prompts(prompts: Iterable[Sequence[int]], **options) -> tuple[Scheduler, FakeRunner]:
    """A scheduler in which the prompts have run, one after the other; `max_tokens=1`, so exactly they are cached."""
    scheduler, runner = make_scheduler(**options)
    for id, prompt in enumerate(prompts):
        scheduler.add(make_request(id, list(prompt), max_tokens=1))
        run_all(scheduler, runner)
    return scheduler, runner


def matched(scheduler: Scheduler, prompt: Sequence[int], **fields) -> int:
    """So many tokens of a prompt are found in the cache."""
    match = scheduler.kv.match(make_request(1000, list(prompt), **fields))
    return match.num_blocks * scheduler.kv.block_size + match.partial_tokens


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
        if not frame.f_globals["__name__"].startswith(("quire.core.", "quire.kv.")):
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
