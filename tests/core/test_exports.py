"""Two engines: what one computes, the other reads from its host tier, and no token shows it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.core.invariants import check
from quire.core.request import Status
from quire.core.scheduler import Scheduler
from quire.core.step_state import PendingStep
from quire.kv.tiers.cost import Costs, Spare
from quire.kv.tiers.fetch import PATIENCE
from quire.kv.tiers.orders import Gone, Have, Prefill
from quire.kv.tiers.tier import DISK, HOST, PEER
from tests.core.fake_runner import (
    ALL,
    STATE,
    FakeDisk,
    FakeRunner,
    Windows,
    expected_output,
    make_request,
    make_scheduler,
    outputs,
    run_all,
)
from tests.core.schedules import run_seeds

PROMPT = list(range(20, 43))
"""Five blocks of 4 tokens, and three more."""


class Prefiller:
    """An engine that computes the prompts of another one, and what carries blocks between the two."""

    def __init__(self, **options) -> None:
        self.scheduler, self.runner = make_scheduler(**({"num_slots": 40, "num_blocks": 60} | options))
        self.orders: dict[int, Prefill] = {}
        self.requests: dict[int, int] = {}  # by the request that computes them, the order
        self.news: list[Have | Gone] = []
        self.read: Counter[int] = Counter()
        self.now, self._next = 0.0, 0

    def take(self, scheduler: Scheduler) -> None:
        """What was ordered."""
        orders = scheduler.kv.external.sources.orders
        for order in [each for each in orders if isinstance(each, Prefill)]:
            orders.remove(order)
            self.begin(order)

    def begin(self, order: Prefill) -> None:
        kv = self.scheduler.kv
        hashes = [name for _, name in order.blocks]
        self.orders[order.number] = order
        computing = kv.external.sources.exports.missing(hashes, [kv.external])
        kv.external.sources.exports.begin(order.number, hashes, computing)
        if computing:
            self._next += 1
            self.requests[self._next] = order.number
            self.scheduler.add(make_request(self._next, order.tokens, 0, scope=order.scope))

    def step(self) -> bool:
        """A step of the engine, and what it tells; False: nothing has changed."""
        self.now += 1
        self.news += self.scheduler.kv.external.sources.exports.advance([self.scheduler.kv.external])
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.scheduler.commit(plan, self.runner.run(plan), self.now)
        over = [each for each in self.requests if each not in self.scheduler.requests]
        for request in over:
            self.scheduler.kv.external.sources.exports.computed(self.requests.pop(request))
        check(self.scheduler)
        return plan is not None or bool(over)

    def carry(self, scheduler: Scheduler, runner: FakeRunner) -> bool:
        """The oldest news go to the other engine, which reads the blocks."""
        if not self.news:
            return False
        news = self.news.pop(0)
        order = self.orders.get(news.number)
        if order is None:
            return True
        if isinstance(news, Have):
            for slot, (target, name) in zip(news.slots, order.blocks[news.first :], strict=False):
                assert self.runner.slots[slot][0] == name, "a slot that is told of stays as it is"
                runner.slots[target] = self.runner.slots[slot]
            self.read[news.number] = news.first + len(news.slots)
            scheduler.kv.external.sources.progressed(news.number, self.now)
            self.scheduler.kv.external.sources.exports.release(news.number, self.read[news.number])
        if isinstance(news, Gone) or self.read[news.number] == len(order.blocks):
            self.end(scheduler, news.number)
        return True

    def end(self, scheduler: Scheduler, number: int) -> None:
        del self.orders[number]
        scheduler.kv.external.sources.read_ended(number, self.read[number], 0.01)
        self.scheduler.kv.external.sources.exports.end(number)


def decoder(**options) -> tuple[Scheduler, FakeRunner]:
    scheduler, runner = make_scheduler(**({"num_slots": 40, "num_blocks": 60} | options))
    scheduler.kv.external.sources.prefill_tokens = 12
    return scheduler, runner


def test_an_impossible_number_of_blocks_that_were_read_unpins_none_twice():
    scheduler, _ = make_scheduler(num_slots=4)
    sources, names = scheduler.kv.external.sources, [bytes([number]) * 32 for number in range(3)]
    for name in names:
        sources.tier.filled(sources.tier.take(name))
    sources.exports.begin(1, names, computing=False)
    [have] = sources.exports.advance([scheduler.kv.external])
    for count in (-1, -3, 2, 1, -2, 99):
        sources.exports.release(1, count)
        check(scheduler)
    assert len(have.slots) == 3 and not sources.exports.under_way and not sources.tier.pins


def test_a_long_prompt_is_computed_elsewhere_but_for_its_tail():
    peer, (scheduler, runner) = Prefiller(), decoder()
    scheduler.add(make_request(1, PROMPT, 3))
    assert scheduler.schedule(0.0) is None and scheduler.expects_others
    assert scheduler.requests[1].status is Status.AWAITING
    peer.take(scheduler)
    while peer.step() or peer.news:
        peer.carry(scheduler, runner)
    updates = run_all(scheduler, runner)
    assert outputs(updates)[1] == expected_output(PROMPT, 3) and updates[0].cached_tokens == 20
    assert (
        scheduler.kv.external.sources.num_moved(PEER, "loaded")
        == 5
        == peer.scheduler.kv.external.sources.num_moved(PEER, "stored")
    )
    assert not peer.scheduler.kv.external.sources.exports.under_way and not peer.scheduler.kv.external.tier.pins


def test_what_another_engine_computed_is_on_the_disk_once_it_was_used_twice():
    disk = FakeDisk()
    peer, (scheduler, runner) = Prefiller(), decoder(disk=disk)
    for number in range(4):
        scheduler.add(make_request(number, PROMPT, 1))
        while scheduler.requests or peer.news or disk.orders:
            peer.take(scheduler)
            peer.step()
            peer.carry(scheduler, runner)
            if plan := scheduler.schedule(float(number)):
                scheduler.commit(plan, runner.run(plan), float(number))
            check(scheduler)
            disk.take(scheduler)
            if disk.orders:
                disk.work(scheduler, runner)
        assert len(disk.blocks) == (5 if number else 0)
    assert (
        scheduler.kv.external.sources.num_moved(PEER, "loaded")
        == scheduler.kv.external.sources.num_moved(DISK, "stored")
        == 5
    )


def test_requests_that_are_tried_in_halves_compute_their_prompts_so_no_slow_engine_holds_up_the_others():
    scheduler, runner = decoder()
    scheduler.kv.external.sources.prefill_tokens = None
    for number in (1, 2):
        scheduler.add(make_request(number, [number, *PROMPT], 3))
    assert len(scheduler.schedule(0.0).spans) == 2
    scheduler.kv.external.sources.prefill_tokens = 12
    assert scheduler.restart(failed=True, whole=False) is None and scheduler.trials.on
    scheduler.add(make_request(3, PROMPT[:5], 3))
    updates = run_all(scheduler, runner)  # nobody computes for it elsewhere
    assert {number: outputs(updates)[number] for number in (1, 2, 3)} == {
        1: expected_output([1, *PROMPT], 3), 2: expected_output([2, *PROMPT], 3), 3: expected_output(PROMPT[:5], 3)
    }  # fmt: skip
    assert not scheduler.kv.external.sources.orders and not scheduler.trials.on
    scheduler.add(make_request(4, [4, *PROMPT], 3))
    assert scheduler.schedule(0.0) is None and scheduler.expects_others, "afterwards others compute again"


def test_a_short_one_is_computed_here():
    scheduler, runner = decoder()
    scheduler.add(make_request(1, PROMPT[:12], 3))  # its last block holds the token that is computed anyway
    assert outputs(run_all(scheduler, runner))[1] == expected_output(PROMPT[:12], 3)
    assert not scheduler.kv.external.sources.orders


def test_what_is_cached_here_does_not_count_as_long():
    scheduler, runner = decoder()
    scheduler.kv.external.sources.prefill_tokens = None
    scheduler.add(make_request(1, PROMPT[:14], 1))
    run_all(scheduler, runner)
    scheduler.kv.external.sources.prefill_tokens = 12
    scheduler.add(make_request(2, PROMPT, 3))  # 11 tokens more
    assert scheduler.schedule(0.0) is not None and not scheduler.kv.external.sources.orders


def beside(scheduler: Scheduler, runner: FakeRunner, prompt: list[int]) -> list[int]:
    """Tokens that the steps compute of a prompt which comes while a request decodes."""
    scheduler.add(make_request(1, PROMPT[:3], 30))
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, runner.run(plan), 0.0)
    scheduler.add(make_request(2, prompt, 1))
    counts = []
    while 2 in scheduler.requests:
        plan = scheduler.schedule(0.0)
        counts += [len(span.tokens) for span in plan.spans if span.request == 2]
        scheduler.commit(plan, runner.run(plan), 0.0)
    return counts


def test_what_is_computed_here_takes_little_of_a_step_in_which_others_decode():
    scheduler, runner = decoder(min_chunk=3)
    assert beside(scheduler, runner, PROMPT[12:]) == [3, 3, 3, 2]
    scheduler, runner = decoder(min_chunk=3)
    scheduler.kv.external.sources.costs.tokens_beside_decodes = lambda: 7
    assert beside(scheduler, runner, PROMPT[12:]) == [7, 4], "more where that takes no longer"
    scheduler, runner = decoder(min_chunk=3, enable_chunked_prefill=False)
    assert beside(scheduler, runner, PROMPT[12:]) == [11]
    scheduler, runner = decoder(min_chunk=3)
    scheduler.kv.external.sources.prefill_tokens = None  # long prompts are computed here too
    assert beside(scheduler, runner, PROMPT) == [23]
    scheduler, runner = decoder(min_chunk=3, kv_role="both", prefill_url="http://a")  # others' long prompts are
    assert beside(scheduler, runner, PROMPT[12:]) == [11]


def test_the_end_of_a_long_prompt_takes_no_more_of_a_step_than_the_beginning_of_a_short_one():
    scheduler, runner = decoder(min_chunk=6, block_size=16)
    scheduler.kv.external.sources.costs = Costs(pair=0.1)
    assert beside(scheduler, runner, PROMPT[12:]) == [6, 3, 2], "after six tokens others take 1.6 times as long"
    scheduler, runner = decoder(min_chunk=6, block_size=16)
    scheduler.kv.external.sources.costs = Costs(pair=10.0)
    assert beside(scheduler, runner, PROMPT[12:]) == [6, 1, 1, 1, 2], (
        "and at least one token is computed, but none is left alone"
    )
    scheduler, runner = decoder(min_chunk=5, block_size=4)
    scheduler.kv.external.sources.costs = Costs(pair=10.0)
    assert beside(scheduler, runner, PROMPT[12:]) == [5, 6], (
        "before its last block it takes as many as any, and none is left alone"
    )
    scheduler, runner = decoder(min_chunk=7, block_size=4)
    scheduler.kv.external.sources.costs = Costs(pair=10.0)
    assert beside(scheduler, runner, PROMPT[12:]) == [7, 1, 1, 2], "a whole block is the last one, too"


def test_what_a_prompt_gets_after_the_head_of_the_queue_comes_after_its_first_tokens_of_the_same_step():
    scheduler, runner = decoder(min_chunk=4, block_size=64, scheduling_policy="priority")
    scheduler.kv.external.sources.costs = costs = Costs(pair=0.1)
    costs.tokens_beside_decodes = lambda: 30
    scheduler.kv.external.sources.prefill_tokens = 100
    scheduler.add(make_request(1, PROMPT[:3], 30))
    scheduler.commit(plan := scheduler.schedule(0.0), runner.run(plan), 0.0)
    scheduler.add(make_request(2, [*range(60)], 1, priority=9))
    scheduler.commit(plan := scheduler.schedule(0.0), runner.run(plan), 0.0)
    assert [len(span.tokens) for span in plan.spans if span.request == 2] == [30]
    scheduler.add(make_request(3, [70, 71], 1))
    plan = scheduler.schedule(0.0)
    assert {span.request: len(span.tokens) for span in plan.spans} == {1: 1, 2: 4 + 2, 3: 2}, (
        "4 * 4 for its least chunk, 2 for the head, and of the 12 left, 4.4 for each token after 34 others"
    )


def test_no_prompt_begins_in_a_step_that_has_the_end_of_another_one_which_takes_it_all():
    scheduler, runner = decoder(min_chunk=6, block_size=16)
    scheduler.kv.external.sources.costs = Costs(pair=10.0)
    scheduler.add(make_request(1, PROMPT[:3], 30))
    scheduler.commit(plan := scheduler.schedule(0.0), runner.run(plan), 0.0)
    scheduler.add(make_request(2, PROMPT[12:], 1))
    scheduler.add(make_request(3, [60, 61, 62, 63], 1))
    steps = []
    while {2, 3} & set(scheduler.requests):
        plan = scheduler.schedule(0.0)
        steps.append({span.request: len(span.tokens) for span in plan.spans if span.request > 1})
        scheduler.commit(plan, runner.run(plan), 0.0)
    assert steps == [{2: 6}, *[{2: 1}] * 3, {2: 2}, {3: 4}]


def test_a_prompts_last_token_takes_some_of_the_time_that_prompts_have_beside_decodes():
    last, decode = make_request(1, PROMPT, 4), make_request(2, PROMPT, 4)
    last.num_computed, decode.num_computed = len(PROMPT) - 1, len(PROMPT)
    step = PendingStep(0.0, 100)
    step.choose(last, 1)
    step.choose(decode, 1)
    step.keep_pace(Spare(Costs(pair=1.0), 30.0 + len(PROMPT)))
    assert step.room(0) == 30, "it sees all those before it, which count as much as itself; a decode counts nothing"


def test_what_is_loaded_beside_decodes_is_left_out_of_what_prompts_may_take():
    scheduler, runner = decoder(min_chunk=6)
    fetches = scheduler.kv.external
    fetches.sources.costs.tokens_per_load, fetches.sources.prefill_tokens = lambda source: 3.0, 40
    scheduler.add(make_request(1, PROMPT[:3], 30))
    scheduler.commit(plan := scheduler.schedule(0.0), runner.run(plan), 0.0)
    head = [*range(30, 46)]
    for last in range(3):  # used often enough to be worth a place in the tier
        scheduler.add(make_request(10 + last, [*head, last], 1))
        while 10 + last in scheduler.requests:
            scheduler.commit(plan := scheduler.schedule(0.0), runner.run(plan), 0.0)
    scheduler.kv.cache.clear()
    scheduler.commit(plan := scheduler.schedule(0.0), runner.run(plan), 0.0)
    scheduler.add(make_request(2, [*head, 9], 1))
    scheduler.add(make_request(3, PROMPT[13:], 1))
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        assert len(plan.loads) == 2 and [span.request for span in plan.spans] == [1], "nothing is left for another one"
        scheduler.commit(plan, runner.run(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert not plan.loads and {span.request: len(span.tokens) for span in plan.spans} == {1: 1, 2: 1, 3: 5}


def test_as_many_long_prompts_as_may_run_at_once_do_not_keep_short_ones_waiting():
    scheduler, runner = decoder(max_num_seqs=2)
    for number in (1, 2, 3):
        scheduler.add(make_request(number, [number, *PROMPT], 2))
    scheduler.add(make_request(4, PROMPT[:3], 2))
    plan = scheduler.schedule(0.0)
    assert plan is not None and [span.request for span in plan.spans] == [4]
    assert sum(isinstance(order, Prefill) for order in scheduler.kv.external.sources.orders) == 3
    updates = scheduler.commit(plan, runner.run(plan), 0.0)
    scheduler.kv.external.sources.prefill_tokens = None
    for order in list(scheduler.kv.external.sources.orders):
        scheduler.kv.external.sources.read_ended(order.number, 0, 0.01)
        check(scheduler)
    made = outputs(updates + run_all(scheduler, runner))
    assert made == {n: expected_output([n, *PROMPT], 2) for n in (1, 2, 3)} | {4: expected_output(PROMPT[:3], 2)}


def test_drafts_have_what_prompts_may_not_take():
    scheduler, runner = decoder(min_chunk=1, drafts=4)
    scheduler.add(make_request(1, PROMPT[:3], 30))
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, runner.run(plan), 0.0)
    scheduler.add(make_request(2, PROMPT[5:9], 1))
    plan = scheduler.schedule(0.0)
    assert [len(span.tokens) for span in plan.spans] == [5, 1]


def test_blocks_are_told_chunk_by_chunk_while_the_prompt_is_computed():
    peer, (scheduler, runner) = Prefiller(max_num_batched_tokens=8, max_num_seqs=2), decoder()
    scheduler.add(make_request(1, [*PROMPT, *PROMPT], 1))
    scheduler.schedule(0.0)
    peer.take(scheduler)
    told = []
    while peer.step() or peer.news:
        told += [(news.first, len(news.slots), bool(peer.requests)) for news in peer.news]
        peer.carry(scheduler, runner)
    assert told == [*((first, 2, True) for first in (0, 2, 4)), (6, 2, False), (8, 2, False), (10, 1, False)]


def test_what_the_prefiller_has_cached_is_not_computed_again():
    peer = Prefiller()
    for _ in range(2):
        scheduler, runner = decoder()
        scheduler.add(make_request(1, PROMPT, 2))
        scheduler.schedule(0.0)
        peer.take(scheduler)
        while peer.step() or peer.news:
            peer.carry(scheduler, runner)
        assert outputs(run_all(scheduler, runner))[1] == expected_output(PROMPT, 2)
    assert peer._next == 1, "one request computed it"


def test_a_prefiller_whose_request_ends_says_that_nothing_more_comes_and_the_rest_is_computed_here():
    peer, (scheduler, runner) = Prefiller(max_num_batched_tokens=12, max_num_seqs=2), decoder()
    scheduler.add(make_request(1, PROMPT, 2))
    scheduler.schedule(0.0)
    peer.take(scheduler)
    peer.step()
    peer.scheduler.abort(1)
    while peer.step() or peer.news:
        peer.carry(scheduler, runner)
    scheduler.kv.external.sources.prefill_tokens = None  # as while a peer that failed is left alone
    updates = run_all(scheduler, runner)
    assert outputs(updates)[1] == expected_output(PROMPT, 2) and updates[0].cached_tokens == 12


def test_a_prefiller_that_says_nothing_is_waited_for_until_the_deadline_which_progress_moves():
    scheduler, _ = decoder()
    scheduler.add(make_request(1, PROMPT, 2))
    assert scheduler.schedule(0.0) is None
    [order] = scheduler.kv.external.sources.orders
    scheduler.kv.external.sources.progressed(order.number, 100.0)
    scheduler.kv.external.sources.prefill_tokens = None
    assert scheduler.schedule(PATIENCE[PEER] + 1) is None
    assert scheduler.schedule(PATIENCE[PEER] + 101) is not None
    assert scheduler.kv.external.tier.counts["quarantined"] == 5
    scheduler.kv.external.sources.read_ended(order.number, 0, 1.0)
    assert scheduler.kv.external.tier.counts["quarantined"] == 0


def test_a_tier_full_of_what_others_read_exports_nothing_more():
    peer = Prefiller(num_slots=5)
    scheduler, runner = decoder()
    scheduler.add(make_request(1, PROMPT, 2))
    scheduler.schedule(0.0)
    peer.take(scheduler)
    while peer.step():
        pass  # five blocks are pinned, and are not read
    peer.begin(Prefill(99, tuple((0, name) for name in [b"other"]), PROMPT[::-1], 0, "", ""))
    while peer.step():
        pass
    assert Gone(99) in peer.news
    while peer.carry(scheduler, runner):
        pass
    assert outputs(run_all(scheduler, runner))[1] == expected_output(PROMPT, 2)


class Run:
    """One seeded schedule of two engines: requests, steps, blocks carried, and whatever goes wrong, in any order."""

    def __init__(self, seed: int) -> None:
        self.rnd = rnd = random.Random(seed)
        size = rnd.choice([2, 4])
        self.windows: Windows = rnd.choice([ALL, ALL, (None, 9), (None, STATE), (9,), (None, 9, STATE)])
        both = {"block_size": size, "needs_next_token": rnd.random() < 0.3, "windows": self.windows}
        budgets = {"max_num_seqs": rnd.choice([2, 6]), "max_num_batched_tokens": rnd.choice([12, 64])}
        blocks = [rnd.choice([60, 100]) // size + 2 for _ in range(2)]
        self.peer = Prefiller(num_blocks=blocks[0], num_slots=rnd.choice([3, 40]), **both, **budgets)
        self.scheduler, self.runner = decoder(num_blocks=blocks[1], num_slots=rnd.choice([3, 40]), **both, **budgets)
        self.heads = [[rnd.randrange(5) for _ in range(rnd.randrange(14, 30))] for _ in range(3)]
        self.prompts: dict[int, list[int]] = {}
        self.updates: list = []
        self.now = 0.0

    def step(self) -> bool:
        self.now += 1
        self.peer.take(self.scheduler)
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.updates += self.scheduler.commit(plan, self.runner.run(plan), self.now)
        check(self.scheduler)
        return plan is not None

    def add(self) -> None:
        id, head = len(self.prompts), self.rnd.choice(self.heads)
        prompt = self.prompts[id] = head + [self.rnd.randrange(5) for _ in range(self.rnd.randrange(4))]
        most = min(self.rnd.randrange(1, 8), 38 - len(prompt))
        self.scheduler.add(make_request(id, prompt, most, scope=self.rnd.choice(["", "tenant"])))

    def event(self) -> None:
        rnd, kv, peer = self.rnd, self.scheduler.kv, self.peer
        names = [
            "add",
            "step",
            "peer",
            "carry",
            "abort",
            "evict",
            "flip",
            "lose",
            "restart",
            "late",
            "cut",
            "stall",
            "stop",
            "back",
        ]
        [what] = rnd.choices(names, [15, 40, 40, 30, 3, 6, 2, 2, 1, 0.5, 3, 2, 2, 4])
        if what == "add" and len(self.prompts) < 20:
            self.add()
        elif what == "step":
            self.step()
        elif what == "peer":
            peer.step()
        elif what == "carry":
            peer.carry(self.scheduler, self.runner)
        elif what == "abort" and self.prompts:
            self.scheduler.abort(rnd.randrange(len(self.prompts)))
        elif what == "evict":
            rnd.choice([kv, peer.scheduler.kv]).cache.evict(rnd.randrange(len(self.windows)), rnd.randrange(1, 6))
        elif what == "flip" and kv.external.tier.kept:
            self.runner.flip(rnd.choice(sorted(kv.external.tier.kept.values())))
        elif what == "lose":
            rnd.choice([self, peer]).scheduler.restart()
        elif what == "restart":
            for number in list(peer.orders):
                peer.end(self.scheduler, number)
            rnd.choice([self, peer]).scheduler.restart(whole=False)
            peer.news.clear()
        elif what == "late":
            self.now += 200
        elif what == "cut" and peer.orders:
            peer.end(self.scheduler, rnd.choice(sorted(peer.orders)))
        elif what == "stall" and peer.orders:
            kv.external.sources.stalled(rnd.choice(sorted(peer.orders)))
        elif what == "stop" and peer.requests:
            peer.scheduler.abort(rnd.choice(sorted(peer.requests)))
        elif what in ("stop", "back"):
            kv.external.sources.prefill_tokens = 12 if what == "back" else None

    def end(self) -> Counter[str]:
        for _ in range(5000):
            moved = [self.step(), self.peer.step(), self.peer.carry(self.scheduler, self.runner)]
            if not any(moved) and not self.scheduler.kv.external.sources.orders:
                break
        self.updates += self.scheduler.take_updates()
        for scheduler in (self.scheduler, self.peer.scheduler):
            assert scheduler.idle and scheduler.kv.num_available == scheduler.kv.num_usable
            assert not scheduler.kv.external.tier.pins and not scheduler.kv.external.tier.counts["filling"]
        for id, tokens in outputs(self.updates).items():
            assert tokens == expected_output(self.prompts[id], len(tokens), self.windows)
        assert sorted(update.request for update in self.updates if update.finish_reason) == sorted(self.prompts)
        fetches = self.scheduler.kv.external
        return Counter(
            read=fetches.sources.num_moved(PEER, "loaded"),
            exported=self.peer.scheduler.kv.external.sources.num_moved(PEER, "stored"),
            bad=fetches.sources.num_moved(HOST, "bad"),
        )


def schedule(seed: int, events: int) -> Counter[str]:
    run = Run(seed)
    for _ in range(events):
        run.event()
    return run.end()


def run_schedules(seeds: range) -> Counter[str]:
    return run_seeds(schedule, seeds, 150)


@pytest.mark.scale
def test_whatever_happens_to_either_engine_no_token_changes_and_no_block_or_slot_is_lost():
    total = run_schedules(range(35))
    assert total["read"] > 130 and total["exported"] > 170 and total["bad"] > 1, total


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_schedules_of_two_engines():
    run_schedules(range(10_000))
