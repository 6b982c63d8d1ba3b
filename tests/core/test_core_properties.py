"""The invariants of blocks, prefix caches, scheduler and requests (`quire.core.invariants`) under random operations, on
core alone with its fake runner."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.core.block_hash import part_name
from quire.core.invariants import check
from quire.core.kv_manager import Handle
from quire.core.prefix_cache import KEY_BYTES
from quire.core.request import Event
from quire.core.scheduler import Scheduler
from quire.errors import RequestTooLargeError
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.tier import HOST
from tests.core.fake_runner import (
    ALL,
    STATE,
    StepFailed,
    expected_output,
    interrupted,
    make_request,
    make_scheduler,
    outputs,
    published_of,
    run_all,
)
from tests.core.policies import Policies

MIXED = [(9,), (None, 9), (None, 9), (None, 3, 12), (16, 5), (1, None), (None, STATE), (None, STATE), (None, 9, STATE)]
"""KV groups' windows of models that have some."""

EVENTS = [Event("grammar", 0), Event("grammar", 1), Event("adapter", 0)]


def kept_elsewhere(scheduler: Scheduler) -> dict[bytes, int]:
    """The slots of the host tier's blocks, by name."""
    return scheduler.kv.external.tier.kept if isinstance(scheduler.kv.external, TierConnector) else {}


class SchedulerMachine(RuleBasedStateMachine):
    """Add, abort, break, schedule, commit and lose steps in any order; at the end all must have ended, and rightly."""

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        self.block_size = draw(st.sampled_from([1, 2, 4, 8]))
        self.windows = draw(st.sampled_from([ALL, ALL, *MIXED]))
        self.depth = draw(st.integers(0, 2))
        self.scheduler, self.runner = make_scheduler(
            num_blocks=[draw(st.integers(64, 200)) // self.block_size + 2 for _ in self.windows],
            block_size=self.block_size,
            windows=self.windows,
            prefix_cache=draw(st.sampled_from(["radix", "hash", "off"])),
            max_num_seqs=draw(st.sampled_from([1, 3, 8])),
            max_num_batched_tokens=draw(st.sampled_from([12, 20, 64])),
            max_num_partial_prefills=draw(st.integers(1, 2)),
            long_prefill_token_threshold=draw(st.sampled_from([0, 5])),
            scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
            target_itl_ms=draw(st.sampled_from([None, 1.0])),
            drafts=draw(st.sampled_from([0, 0, 1, 3, 8])),
            needs_next_token=draw(st.booleans()),
            num_slots=draw(st.sampled_from([0, 3, 10, 40])),
        )
        luck, spoilt = random.Random(draw(st.integers(0, 99))), draw(st.sampled_from([0.0, 0.0, 0.3]))
        self.runner.spoils = lambda: luck.random() < spoilt
        self.fails_late = draw(st.booleans())  # that a step has failed is seen when it is waited for
        self.prompts: dict[int, list[int]] = {}
        self.max_tokens: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.scoring: set[int] = set()
        self.updates = []
        self.flying = []
        self.now = 0.0
        self.policies = Policies(self.scheduler, self.depth)
        self.failed: set[int] = set()  # what they waited for did not come
        self.handles: list[Handle] = []
        self.published = published_of([self.scheduler.kv])

    @rule(
        head=st.integers(0, 40),
        tail=st.lists(st.integers(0, 2), max_size=8),
        like=st.integers(0, 100),
        max_tokens=st.integers(0, 15),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        scope=st.sampled_from(["", "", "tenant"]),
        owner=st.sampled_from(["", "", "a", "b"]),
        awaits=st.sampled_from([None, None, None, *EVENTS]),
    )
    def add(self, head, tail, like, max_tokens, priority, prompt_logprobs, scope, owner, awaits):
        base = self.prompts.get(like % (len(self.prompts) or 1), [])
        prompt = (base + tail)[: head + 1] or [1]
        id = len(self.prompts)
        fields = {"priority": priority, "prompt_logprobs": prompt_logprobs, "scope": scope, "owner": owner}
        request = make_request(id, prompt, max_tokens, awaits=awaits, **fields)
        try:
            self.scheduler.add(request)
        except RequestTooLargeError:
            return
        self.prompts[id], self.max_tokens[id] = prompt, max_tokens
        if prompt_logprobs is not None and len(prompt) > 1:
            self.scoring.add(id)

    @rule(which=st.integers(0, 1000), reason=st.sampled_from(["abort", "abort", "stop"]))
    def abort(self, which, reason):
        if self.prompts:
            id = which % len(self.prompts)
            if id in self.scheduler.requests:
                self.aborted.add(id)
            self.scheduler.abort(id, reason, self.now)

    @rule(which=st.integers(0, 1000))
    def break_logits(self, which):
        if self.prompts:
            self.runner.broken.add(which % len(self.prompts))

    @rule(which=st.integers(0, 1000))
    def make_fatal(self, which):
        """Whatever step this request is in fails from now on."""
        if self.prompts:
            self.runner.fatal.add(which % len(self.prompts))

    @rule()
    def lose_steps(self):
        """What is in flight has run, and nobody will know what came of it."""
        self.flying.clear()
        self.scheduler.restart()

    @rule(lines=st.integers(1, 400))
    def interrupt_scheduling(self, lines):
        """Memory runs out, say, while a step is planned."""
        self.now += 1
        if interrupted(lambda: self.scheduler.schedule(self.now), lines):
            self.flying.clear()
            self.scheduler.restart(whole=False)
        else:
            self.lose_steps()

    @rule(event=st.sampled_from(EVENTS), how=st.sampled_from(["arrived", "failed", "error"]))
    def bring(self, event, how):
        """What some requests wait for is there, or will never be."""
        if how == "arrived":
            self.scheduler.arrived(event)
        else:
            if how == "error":
                self.failed |= {each.id for each in self.scheduler.requests.values() if each.awaits == event}
            self.scheduler.failed(event, self.now, "it did not come" if how == "error" else None)

    @rule(which=st.integers(0, 1000))
    def hold(self, which):
        """Somebody outside reads a cached block and those before it, such as a transfer."""
        cached = self.scheduler.kv.groups[which % len(self.windows)].cached
        if cached and len(self.handles) < 2:
            node, blocks = cached[sorted(cached)[which % len(cached)]], []
            while node.parent is not None:
                blocks += [(number, block) for number, block in enumerate(node.blocks) if block]
                node = node.parent
            handle = Handle("transfer", which)
            self.scheduler.kv.hold(handle, blocks)
            self.handles += [handle] if handle not in self.handles else []

    @rule(which=st.integers(0, 1000))
    def release(self, which):
        """One of them ends, the newest or an older one; some end twice."""
        if self.handles:
            handle = self.handles.pop(which % len(self.handles))
            self.scheduler.kv.release(handle)
            self.scheduler.kv.release(handle)

    @rule(which=st.integers(0, 1000))
    def flip(self, which):
        """Bytes of a slot of the host tier change."""
        kept = sorted(kept_elsewhere(self.scheduler).values())
        if kept:
            self.runner.flip(kept[which % len(kept)])

    @rule()
    def evict_all(self):
        self.scheduler.kv.cache.clear()

    @rule(which=st.integers(0, 1000), count=st.integers(1, 5))
    def evict_some(self, which, count):
        """Of one group, the least recently used."""
        number = which % len(self.windows)
        group = self.scheduler.kv.groups[number]
        first = list(group.idle)[:count]
        assert self.scheduler.kv.cache.evict(number, count) >= len(first)
        assert not group.cached.keys() & set(first)

    @rule(which=st.integers(0, 1000), place=st.integers(0, 1000))
    def evict_any(self, which, place):
        """A part that nobody holds, whatever was used before it."""
        number = which % len(self.windows)
        group = self.scheduler.kv.groups[number]
        if group.idle:
            block = list(group.idle)[place % len(group.idle)]
            group.idle.move_to_end(block, last=False)
            assert self.scheduler.kv.cache.evict(number, 1) >= 1
            assert block not in group.cached

    @rule(like=st.integers(0, 100), length=st.integers(0, 40), back=st.booleans())
    def match(self, like, length, back):
        """A match ends as late as every group has all that the next token will see."""
        kv = self.scheduler.kv
        if not self.prompts or not kv.cache.caching:
            return
        request = make_request(10**6, self.prompts[like % len(self.prompts)][:length] or [1])
        count, node = 0, kv.cache.roots.get("")
        path: list[list[int]] = []
        kv.match(request)  # makes its hashes
        for key in request.block_keys(0, len(request.hashes), kv.block_size):
            node = node and node.children.get(key)
            if node is None:
                break
            path.append(node.blocks)
            firsts = [
                group.retention.first_seen(len(path) * kv.block_size - back) // kv.block_size for group in kv.groups
            ]
            if all(all(blocks[number] for blocks in path[first:]) for number, first in enumerate(firsts)):
                count = len(path)
        assert kv.cache.match(request.hashes, 10**6, int(back)).num_blocks == count

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self._step()

    def _step(self) -> bool:
        self.now += 1
        self.policies.before()
        plan = self.scheduler.schedule(self.now)
        check(self.scheduler)
        self.policies.after(plan)
        if plan:
            self._check_plan(plan)
            try:
                failed = any(result is None for _, result in self.flying)
                self.flying.append((plan, None if failed else self.runner.run(plan)))
            except StepFailed:
                if not self.fails_late:
                    return self._fail()
                self.flying.append((plan, None))
        if not plan and not self.flying:
            return False
        if not plan or len(self.flying) > (0 if self.scheduler.trials.on else self.depth):
            first, result = self.flying.pop(0)
            if result is None:
                return self._fail()
            self.updates += self.scheduler.commit(first, result, self.now)
        return True

    def _fail(self) -> bool:
        self.flying.clear()
        culprit = self.scheduler.restart(failed=True)
        if culprit is not None:
            assert culprit.id in self.runner.fatal, "only who makes steps fail is blamed"
            self.scheduler.fail(culprit.id, "its step failed", self.now)
        return True

    def _check_plan(self, plan):
        config = self.scheduler.config
        assert plan.num_tokens == sum(len(span.tokens) for span in plan.spans)
        assert plan.spans or plan.loads or plan.saves
        assert len(plan.spans) <= plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.spans) <= config.max_num_seqs
        assert len({span.request for span in plan.spans}) == len(plan.spans)
        assert not any(span.num_sampled for span in plan.spans if not self.max_tokens[span.request])

    @invariant()
    def books_agree(self):
        if hasattr(self, "scheduler"):
            check(self.scheduler)
            self._check_published()

    def _check_published(self):
        """Whoever follows it knows what is cached here."""
        kv = self.scheduler.kv
        self.published.changes([kv.cache])
        nodes = [(number, node) for number, group in enumerate(kv.groups) for node in group.cached.values()]
        full = kv.block_size * KEY_BYTES
        cached = {part_name(node.hash, number) for number, node in nodes if len(node.key) == full}
        assert self.published.blocks == cached | kept_elsewhere(self.scheduler).keys()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for handle in self.handles:
            self.scheduler.kv.release(handle)
        for event in EVENTS:
            self.scheduler.arrived(event)
        for _ in range(20_000):
            if not self._step():
                break
        self.updates += self.scheduler.take_updates()
        assert self.scheduler.idle, "runnable work is left, and nothing happens"
        kv = self.scheduler.kv
        assert kv.num_available == kv.num_usable and not list(kv.held)
        self._check_outputs()

    def _check_outputs(self):
        ends = [update.request for update in self.updates if update.finish_reason]
        assert sorted(ends) == sorted(self.prompts), "each request ends exactly once"
        made = outputs(self.updates)
        reasons = {update.request: update.finish_reason for update in self.updates if update.finish_reason}
        scored: dict[int, list] = {}
        for update in self.updates:
            scored.setdefault(update.request, []).extend(update.prompt_logprobs or [])
        for id, prompt in self.prompts.items():
            tokens = made.get(id, [])
            assert tokens == expected_output(prompt, len(tokens), self.windows)
            if reasons[id] == "length":
                assert len(tokens) == self.max_tokens[id]
                if id in self.scoring:
                    assert [entry.ids[0] for entry in scored[id]] == prompt[1:]
            else:
                bad = self.runner.broken | self.runner.fatal
                assert id in self.aborted or (reasons[id] == "error" and id in bad | self.failed)


SchedulerMachine.TestCase.settings = settings(
    max_examples=max(80, settings().max_examples),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.scale
class TestSchedulerMachine(SchedulerMachine.TestCase):
    pass


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestSchedulerMachineForLong(SchedulerMachine.TestCase):
    """The same, many times more often."""

    settings = settings(
        SchedulerMachine.TestCase.settings, max_examples=4000, stateful_step_count=80, derandomize=False
    )


def test_what_is_evicted_while_nothing_runs_is_saved_by_a_plan_of_its_own():
    scheduler, runner = make_scheduler(num_slots=20)
    for id in range(3):
        scheduler.add(make_request(id, [*range(20), id], max_tokens=1))
        run_all(scheduler, runner)
    scheduler.kv.cache.clear()
    plan = scheduler.schedule(0.0)
    assert len(plan.saves) == 5 and not plan.spans and not plan.loads and scheduler.idle
    scheduler.commit(plan, runner.run(plan), 0.0)
    check(scheduler)
    assert scheduler.kv.external.sources.num_moved(HOST, "stored") == 5 and scheduler.schedule(0.0) is None


@pytest.mark.scale
@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 200))])
def test_crowded_pools_finish_every_request_with_its_own_tokens(seed):
    rnd = random.Random(seed)
    block_size, depth = rnd.choice([1, 2, 4, 8]), rnd.choice([0, 0, 1, 2])
    windows = rnd.choice([ALL, ALL, *MIXED])
    scheduler, runner = make_scheduler(
        num_blocks=[rnd.choice([60, 80, 160]) // block_size + 2 for _ in windows],
        block_size=block_size,
        windows=windows,
        prefix_cache=rnd.choice(["radix", "hash", "off"]),
        max_num_seqs=rnd.choice([3, 8]),
        max_num_batched_tokens=rnd.choice([12, 20, 64]),
        max_num_partial_prefills=rnd.choice([1, 2]),
        scheduling_policy=rnd.choice(["fcfs", "priority"]),
        drafts=rnd.choice([0, 2, 8]),
        needs_next_token=rnd.choice([False, True]),
    )
    policies = Policies(scheduler, depth)
    prompts: list[list[int]] = []
    for id in range(25):
        if prompts and rnd.random() < 0.5:
            prompt = rnd.choice(prompts)[: rnd.randrange(1, 30)] + [rnd.randrange(3) for _ in range(rnd.randrange(8))]
        else:
            prompt = [rnd.randrange(3) for _ in range(rnd.randrange(1, 30))]
        prompts.append(prompt)
        owner = rnd.choice(["", "", "other"])
        scheduler.add(make_request(id, prompt, rnd.randrange(1, 15), priority=rnd.randrange(3), owner=owner))
    flying, updates = [], []
    for step in range(5000):
        policies.before()
        plan = scheduler.schedule(float(step))
        policies.after(plan)
        if plan:
            flying.append((plan, runner.run(plan)))
        if not plan and not flying:
            break
        if not plan or len(flying) > depth:
            updates += scheduler.commit(*flying.pop(0), float(step))
            check(scheduler)
    assert scheduler.idle
    made = outputs(updates)
    for id, prompt in enumerate(prompts):
        assert made[id] == expected_output(prompt, len(made[id]), windows)
    most = max(update.stats.preemptions for update in updates if update.stats)
    assert most <= 6, f"one request was preempted {most} times"
