"""Replicas whose steps go together: each request's tokens are those of one scheduler, whatever happens to others."""

from __future__ import annotations

import random

import pytest

from quire.core import invariants
from quire.core.lockstep import DECODING, Lockstep, LockstepPlan, joined
from quire.core.step import StepResult
from quire.errors import RequestError
from quire.kv.tiers.fetch import PATIENCE
from quire.kv.tiers.tier import DISK, HOST
from tests.core.fake_runner import (
    ALL,
    STATE,
    FakeDisk,
    FakeRunner,
    StepFailed,
    Windows,
    expected_output,
    make_request,
    make_scheduler,
    make_sources,
    published_of,
)

Replicas = tuple[Lockstep, list[FakeRunner]]


def make(count: int = 2, **options: object) -> Replicas:
    pairs = [make_scheduler(**options) for _ in range(count)]
    return Lockstep([scheduler for scheduler, _ in pairs]), [runner for _, runner in pairs]


def run_plan(plan: LockstepPlan, runners: list[FakeRunner]) -> StepResult:
    """All compute it, also those after one that fails."""
    results: list[StepResult] = []
    error = None
    for runner, part in zip(runners, plan.of_replicas(), strict=True):
        try:
            results.append(runner.run(part))
        except StepFailed as failure:
            error = failure
    if error is not None:
        raise error
    return joined(results)


def run_step(both: Lockstep, runners: list[FakeRunner]) -> LockstepPlan | None:
    plan = both.schedule(0.0)
    if plan is not None:
        both.commit(plan, run_plan(plan, runners), 0.0)
    return plan


def test_a_replica_without_requests_has_an_empty_plan_of_the_same_number() -> None:
    both, runners = make()
    both.add(make_request(0, [1, 2, 3], max_tokens=3))
    assert [len(each.requests) for each in both.schedulers] == [1, 0]
    for number in range(3):
        plan = run_step(both, runners)
        assert plan is not None
        assert [part.number for part in plan.plans] == [number, number]
        assert [len(part.spans) for part in plan.plans] == [1, 0] and plan.spans == plan.plans[0].spans
        assert plan.num_tokens == (3 if number == 0 else 1)
    assert both.idle and both.schedule(0.0) is None


def test_a_request_goes_where_least_is_left_to_do_and_cached_prompts_count_as_done() -> None:
    both, runners = make(num_blocks=400, max_model_len=2000)
    sizes = [600, 10, 10, 10]
    for number, size in enumerate(sizes):
        both.add(make_request(number, [number] * size, max_tokens=2))
    assert [[*each.requests] for each in both.schedulers] == [[0], [1, 2, 3]]  # 600 are more than two of DECODING
    assert 2 * DECODING < 600
    while run_step(both, runners):
        pass
    both.add(make_request(4, [1] * 5, max_tokens=2))
    both.add(make_request(5, [0] * 610, max_tokens=2))
    both.add(make_request(6, [7] * 5, max_tokens=2))
    assert [[*each.requests] for each in both.schedulers] == [[5], [4, 6]]


def test_ids_are_unique_over_all_replicas() -> None:
    both, _ = make()
    both.add(make_request(3, [1]))
    both.add(make_request(4, [1]))
    for number in (3, 4):
        with pytest.raises(RequestError, match=f"request id {number} is in use"):
            both.add(make_request(number, [2]))
    both.abort(3)
    both.abort(99)
    assert [*both.requests] == [4] and [update.finish_reason for update in both.take_updates()] == ["abort"]


@pytest.mark.parametrize("count", [2, 3])
def test_who_makes_steps_fail_ends_alone(count: int) -> None:
    """All replicas give the step up; requests of each are tried in halves, as if there were one scheduler."""
    for culprit in range(7):
        both, runners = make(count)
        for number in range(7):
            both.add(make_request(number, [number, 1], max_tokens=4))
        ended, found = [], {number: [] for number in range(7)}
        for runner in runners:
            runner.fatal = {culprit}
        for _ in range(200):
            plan = both.schedule(0.0)
            if plan is None:
                break
            try:
                updates = both.commit(plan, run_plan(plan, runners), 0.0)
            except StepFailed:
                blamed = both.restart(failed=True)
                if blamed is not None:
                    ended.append(blamed.id)
                    both.fail(blamed.id, "failed", 0.0)
                continue
            for update in updates:
                found[update.request] += update.tokens
        assert ended == [culprit] and both.idle
        assert all(found[n] == expected_output([n, 1], 4) for n in range(7) if n != culprit)


@pytest.mark.scale
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200))])
def test_nothing_that_happens_changes_a_token(seed: int) -> None:
    """Requests come and are aborted, steps are lost, pools are small; up to two steps in flight."""
    rnd = random.Random(seed)
    both, runners = make(rnd.choice([2, 3]), num_blocks=rnd.choice([19, 60]), max_model_len=120)
    prompts: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    aborted, flights, steps = set(), [], 0
    while steps < 400 or not both.idle:
        steps += 1
        assert steps < 3000
        if steps < 400 and rnd.random() < 0.3:
            number = len(prompts)
            prompts[number] = [rnd.randrange(3) for _ in range(rnd.randrange(1, 60))]
            found[number] = []
            both.add(make_request(number, prompts[number], max_tokens=8))
        if prompts and rnd.random() < 0.02:
            victim = rnd.randrange(len(prompts))
            aborted.add(victim)
            both.abort(victim)
        if rnd.random() < 0.02:
            both.restart(whole=rnd.random() < 0.7)
            flights.clear()
        plan = both.schedule(0.0)
        if plan is not None:
            assert len({part.number for part in plan.plans}) == 1
            flights.append((plan, run_plan(plan, runners)))
        while flights and (plan is None or len(flights) > 1):
            for update in both.commit(*flights.pop(0), 0.0):
                found[update.request] += update.tokens
            plan = plan or flights
        invariants.check(both)
    for number, prompt in prompts.items():
        expected = expected_output(prompt, 8)
        assert found[number] == expected[: len(found[number])]
        assert number in aborted or found[number] == expected
    for scheduler in both.schedulers:
        assert scheduler.kv.num_available == scheduler.kv.num_usable
    both.take_updates()  # of those that were aborted
    assert both._work == [0] * len(runners)


def with_one_tier(windows: Windows = ALL, disk: FakeDisk | None = None, slots: int = 30, **options: object) -> Replicas:
    both, runners = make(sources=make_sources(windows, slots, disk), windows=windows, **options)
    runners[1].slots = runners[0].slots
    return both, runners


def serve(both: Lockstep, runners: list[FakeRunner], replica: int, id: int, prompt: list[int]) -> None:
    """A request of one replica, to its end."""
    both.schedulers[replica].add(make_request(id, prompt, 2))
    while both.requests:
        run_step(both, runners)


def test_what_one_replica_gave_to_the_host_tier_another_one_loads() -> None:
    both, runners = with_one_tier()
    first, second = both.kvs
    both.schedulers[0].add(make_request(0, list(range(40)), 2))
    while both.requests:
        run_step(both, runners)
    first.cache.clear()
    run_step(both, runners)
    assert first.external.sources.num_moved(HOST, "stored") == 10 and not second.external.tier.pins
    both.schedulers[1].add(make_request(9, list(range(40)), 2))
    updates = []
    while both.requests:
        plan = both.schedule(0.0)
        updates += both.commit(plan, run_plan(plan, runners), 0.0)
    assert second.external.sources.num_moved(HOST, "loaded") == 9 and updates[0].cached_tokens == 36
    assert [token for update in updates for token in update.tokens] == expected_output(list(range(40)), 2)


def test_what_one_replica_reads_from_the_disk_another_one_waits_for_and_has_too() -> None:
    disk = FakeDisk()
    both, runners = with_one_tier(disk=disk)
    for number in range(3):
        serve(both, runners, 0, number, list(range(40)))
        work(disk, both, runners)
    assert len(disk.blocks) == 9
    for kv in both.kvs:
        kv.reset()
    for number, replica in ((8, 0), (9, 1)):
        both.schedulers[replica].add(make_request(number, [*range(40), number], 2))
    assert both.schedule(0.0) is None and both.expects_others
    disk.take(both.schedulers[0])
    assert len(disk.orders) == 1, "it is read once"
    work(disk, both, runners)
    updates = []
    while both.requests:
        plan = both.schedule(1.0)
        updates += both.commit(plan, run_plan(plan, runners), 1.0)
    assert {update.request: update.cached_tokens for update in updates} == {8: 40 - 4, 9: 40 - 4}
    sources = both.kvs[0].external.sources
    assert (sources.num_moved(DISK, "loaded"), sources.num_moved(HOST, "loaded")) == (9, 18), "from there, by each"
    for number in (8, 9):
        found = [token for update in updates if update.request == number for token in update.tokens]
        assert found == expected_output([*range(40), number], 2)


def test_a_disk_that_does_not_answer_is_waited_for_by_no_replica() -> None:
    disk = FakeDisk()
    both, runners = with_one_tier(disk=disk)
    for number in range(3):
        serve(both, runners, 0, number, list(range(40)))
        work(disk, both, runners)
    for kv in both.kvs:
        kv.reset()
    for number, replica in ((8, 0), (9, 1)):
        both.schedulers[replica].add(make_request(number, [*range(40), number], 2))
    assert both.schedule(0.0) is None
    plan = both.schedule(PATIENCE[DISK] + 1)
    assert plan is not None and len(plan.spans) == 2
    both.commit(plan, run_plan(plan, runners), 0.0)
    invariants.check(both)
    assert both.kvs[0].external.sources.tier.counts["quarantined"] == 9
    work(disk, both, runners)
    assert both.kvs[1].external.sources.tier.counts["quarantined"] == 0


def test_other_engines_read_what_any_replica_has() -> None:
    both, runners = with_one_tier()
    serve(both, runners, 0, 0, list(range(20)))
    serve(both, runners, 1, 1, list(range(40)))
    both.kvs[1].cache.evict(0, 3)  # tails
    wanted = make_request(2, list(range(40)))
    both.kvs[0].match(wanted)
    exports, pools = both.kvs[0].external.sources.exports, both.kvs[0].external.sources.pools
    assert exports is not None and exports.missing(wanted.hashes, pools)
    names = wanted.hashes[:7]
    assert not exports.missing(names, pools) and exports.missing(names, pools[:1])
    exports.begin(1, names, False)
    assert exports.advance(pools) == [] and run_step(both, runners) is not None
    [have] = exports.advance(pools)
    assert [runners[0].slots[slot][0] for slot in have.slots] == names
    invariants.check(both)
    exports.release(1, 7)
    assert not both.kvs[0].external.sources.tier.pins


def work(disk: FakeDisk, both: Lockstep, runners: list[FakeRunner]) -> None:
    """The disk does all that was ordered."""
    disk.take(both.schedulers[0])
    while disk.orders:
        disk.work(both.schedulers[0], runners[0])


@pytest.mark.scale
@pytest.mark.parametrize("seeds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_tier_and_a_disk_of_two_replicas_lose_no_slot_whatever_happens(seeds: int) -> None:
    kinds: list[Windows] = [ALL, (None, 9), (None, STATE), (9,)]
    assert sum(read_from_the_disk(seed, windows) for windows in kinds for seed in range(seeds)) > 3 * seeds


def read_from_the_disk(seed: int, windows: Windows) -> int:
    """Blocks, in a schedule in which anything happens."""
    rnd, disk = random.Random(seed), FakeDisk()
    both, runners = with_one_tier(windows, disk, 12, num_blocks=22, max_num_seqs=4)
    tier = both.kvs[0].external.tier
    heads = [[rnd.randrange(40) for _ in range(24)] for _ in range(3)]
    prompts = [[*rnd.choice(heads), *(rnd.randrange(40) for _ in range(rnd.randrange(1, 12)))] for _ in range(30)]
    ended: dict[int, list[int]] = {}
    published, told, seen = published_of(both.kvs), set[bytes](), set[bytes]()
    for step in range(2000):
        if rnd.random() < 0.3:  # somebody looks what there is
            came, went = published.changes([kv.cache for kv in both.kvs])
            told, seen = (told - set(went)) | set(came), seen | set(came)
            there = {each for each in seen if each in tier or any(kv.cache.part(each) for kv in both.kvs)}
            assert told == there == published.blocks
            for request in both.running:
                assert windows[0] or told.issuperset(request.hashes[: request.num_published])
        if len(ended) < len(prompts) and rnd.random() < 0.8:
            both.add(make_request(len(ended), prompts[len(ended)], max_tokens=rnd.randrange(1, 30)))
            ended[len(ended)] = []
        if rnd.random() < 0.05 and tier.kept:
            runners[0].flip(rnd.choice(sorted(tier.kept.values())))
        if rnd.random() < 0.02:
            whole = rnd.random() < 0.7
            if not whole:  # the disk does nothing any more of what it was asked for
                disk.orders.clear()
            both.restart(whole=whole)
        if rnd.random() < 0.02:
            disk.fails = not disk.fails
        plan = both.schedule(float(step))
        disk.take(both.schedulers[0])
        if disk.orders and rnd.random() < 0.5:
            disk.work(both.schedulers[0], runners[0])
        for update in both.commit(plan, run_plan(plan, runners), float(step)) if plan else both.take_updates():
            ended[update.request] += update.tokens
        invariants.check(both)
    work(disk, both, runners)
    assert both.idle and not tier.pins and both.kvs[0].external.sources.num_moved(HOST, "loaded")
    for number, tokens in ended.items():
        assert tokens and tokens == expected_output(prompts[number], len(tokens), windows)
    return both.kvs[0].external.sources.num_moved(DISK, "loaded")
