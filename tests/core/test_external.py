"""A connector, as the scheduler sees it: what can be had is waited for, loaded or computed, and no token changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.external import Found, Loadable
from quire.core.invariants import check
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import KVManager
from quire.core.prefix import Part, Prefix
from quire.core.request import Status
from quire.core.scheduler import MOST_WAITS, Scheduler
from quire.core.step import Move
from quire.kv.connector import Connector
from tests.core.fake_runner import FakeRunner, expected_output, make_request, outputs, run_all

PROMPT = [*range(20, 41)]


class Shelf(Connector):
    """Keeps everything; with `late`, a prefix has to be asked for first."""

    def __init__(self, late: bool = False) -> None:
        self.late, self.slots, self.asked = late, {}, []  # type: ignore[var-annotated]
        self.known: set[bytes] = set()
        self.over: list[Found] = []
        self.ended: list[tuple[int, int]] = []

    def poll(self, now: float) -> list[Found]:
        over, self.over = self.over, []
        return over

    @property
    def waits(self) -> bool:
        return bool(self.asked)

    def answer(self) -> None:
        """What was asked for is known now."""
        self.known |= self.slots.keys()
        self.over, self.asked = [*self.over, *self.asked], []

    def lookup(self, prefix: Prefix, decoding: bool) -> Found | None:
        known = self.known if self.late else self.slots
        parts = prefix.missing(end := prefix.reach(known.__contains__))
        if parts:
            return Loadable(prefix.hashes[prefix.first : end], prefix, parts, end)
        if self.late and prefix.hashes[prefix.first] not in self.known and len(self.slots) > len(self.known):
            self.asked.append(Found([b"question"]))
            return self.asked[-1]
        return None

    def slot(self, part: Part) -> int:
        return self.slots[part.name]

    def evicted(self, name: bytes, group: int, block: int) -> None:
        if name not in self.slots:
            self.slots[name] = len(self.slots)
            self.save(block, name, group, self.slots[name])

    def loaded(self, found: Loadable, bad: Sequence[Move], seconds: float) -> None:
        self.ended.append((found.num_published, len(bad)))


def shelved(late: bool = False) -> tuple[Scheduler, FakeRunner, Shelf]:
    """A scheduler in which a prompt was served, and whose pool is empty again."""
    shelf = Shelf(late)
    config = EngineConfig(model="fake", max_num_seqs=8, max_num_batched_tokens=64, min_chunk=4)
    kv = KVManager([KVGroup(30)], 4, "radix", BlockHasher(bytes(32), "fake"), external=shelf)
    scheduler, runner = Scheduler(config, kv, 1000), FakeRunner([30], 4)
    for id, prompt in enumerate((PROMPT, [1, 2])):
        scheduler.add(make_request(id, prompt, 2))
        run_all(scheduler, runner)
        kv.cache.clear()
    run_step(scheduler, runner)
    assert len(shelf.slots) == 5
    return scheduler, runner, shelf


def run_step(scheduler: Scheduler, runner: FakeRunner) -> bool:
    plan = scheduler.schedule(0.0)
    if plan is not None:
        scheduler.commit(plan, runner.run(plan), 0.0)
    check(scheduler)
    return plan is not None


def test_what_a_connector_has_is_loaded_and_not_computed():
    scheduler, runner, shelf = shelved()
    for id in (7, 8):
        scheduler.add(make_request(id, [*PROMPT, id], 2))
    plan = scheduler.schedule(0.0)
    assert len(plan.loads) == 5 and not plan.spans
    check(scheduler)
    scheduler.commit(plan, runner.run(plan), 0.0)
    updates = run_all(scheduler, runner)
    assert outputs(updates) == {id: expected_output([*PROMPT, id], 2) for id in (7, 8)}
    assert {update.cached_tokens for update in updates} == {20} and shelf.ended == [(5, 0)]


@pytest.mark.parametrize("aborted", [False, True])
def test_what_is_only_being_found_out_is_waited_for_while_others_run(aborted: bool):
    scheduler, runner, shelf = shelved(late=True)
    scheduler.add(make_request(7, [*PROMPT, 7], 2))
    assert not run_step(scheduler, runner) and scheduler.expects_others
    assert scheduler.requests[7].status is Status.AWAITING
    if aborted:
        scheduler.abort(7)
    shelf.answer()
    updates = run_all(scheduler, runner)
    assert not scheduler.expects_others
    assert aborted or (outputs(updates)[7] == expected_output([*PROMPT, 7], 2) and updates[-1].cached_tokens == 20)


def test_other_bytes_are_computed_and_the_connector_is_told():
    scheduler, runner, shelf = shelved()
    runner.flip(2)
    scheduler.add(make_request(7, [*PROMPT, 7], 2))
    assert run_step(scheduler, runner) and shelf.ended == [(2, 1)]
    shelf.slots = {name: slot for name, slot in shelf.slots.items() if slot != 2}
    updates = run_all(scheduler, runner)
    assert outputs(updates)[7] == expected_output([*PROMPT, 7], 2) and updates[-1].cached_tokens == 8


def test_a_connector_that_always_promises_and_never_brings_is_waited_for_a_limited_number_of_times():
    scheduler, runner, shelf = shelved()
    for slot in range(5):
        runner.flip(slot)  # and it goes on offering them
    scheduler.add(make_request(7, [*PROMPT, 7], 2))
    updates = run_all(scheduler, runner)
    assert outputs(updates)[7] == expected_output([*PROMPT, 7], 2) and updates[-1].cached_tokens == 0
    assert shelf.ended == [(0, 5)] * MOST_WAITS


def test_a_step_that_is_given_up_loads_nothing_and_keeps_nothing():
    scheduler, runner, shelf = shelved()
    scheduler.add(make_request(7, [*PROMPT, 7], 2))
    assert len(scheduler.schedule(0.0).loads) == 5
    scheduler.restart()
    assert not shelf.under_way and scheduler.kv.num_available == scheduler.kv.num_usable
    assert outputs(run_all(scheduler, runner))[7] == expected_output([*PROMPT, 7], 2) and shelf.ended == [(5, 0)]


def test_where_the_pool_has_no_room_it_is_not_loaded():
    scheduler, runner, _ = shelved()
    scheduler.add(make_request(6, [9] * 80, 30))
    assert run_step(scheduler, runner)
    scheduler.add(make_request(7, [*PROMPT, *[9] * 30], 2))
    plan = scheduler.schedule(0.0)
    assert plan.spans and not plan.loads and scheduler.kv.promised == [0]
