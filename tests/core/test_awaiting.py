"""Requests that wait for events: they are not in line, and nobody waits for them."""

from __future__ import annotations

import pytest

from quire.core.invariants import check
from quire.core.request import Event, Status
from tests.core.fake_runner import expected_output, make_request, make_scheduler, outputs, run_all
from tests.core.test_scheduler import lengths, run_step

GRAMMAR = Event("grammar", "a|b")


def test_a_request_that_awaits_an_event_is_passed_and_comes_back_to_its_place():
    scheduler, runner = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(0, [1, 2, 3], max_tokens=2, awaits=GRAMMAR))
    scheduler.add(make_request(1, [4, 5, 6], max_tokens=2))
    scheduler.add(make_request(2, [7, 8, 9], max_tokens=2))
    plan, _ = run_step(scheduler, runner)
    assert lengths(plan) == {1: 3}
    assert scheduler.requests[0].status is Status.AWAITING and scheduler.num_waiting == 2
    scheduler.arrived(GRAMMAR)
    updates = run_all(scheduler, runner)
    assert [update.request for update in updates if update.finish_reason] == [1, 0, 2]
    assert outputs(updates)[0] == expected_output([1, 2, 3], 2)


def test_where_all_requests_await_events_nothing_runs_and_nothing_ends():
    scheduler, runner = make_scheduler()
    for id in range(3):
        scheduler.add(make_request(id, [id] * 5, awaits=Event("grammar", id % 2)))
    assert scheduler.schedule(0.0) is None and scheduler.expects_others and not scheduler.idle
    check(scheduler)
    scheduler.arrived(Event("grammar", 1))
    updates = run_all(scheduler, runner)
    assert set(outputs(updates)) == {1} and scheduler.expects_others
    scheduler.arrived(Event("grammar", 0))
    assert set(outputs(run_all(scheduler, runner))) == {0, 2}
    assert scheduler.idle and not scheduler.expects_others


@pytest.mark.parametrize("error", [None, "the grammar has no rule 'root'"])
def test_what_fails_to_come_is_done_without_or_ends_who_needs_it(error):
    scheduler, runner = make_scheduler()
    scheduler.add(make_request(0, [1, 2, 3], max_tokens=2, awaits=GRAMMAR))
    scheduler.add(make_request(1, [4, 5, 6], max_tokens=2))
    scheduler.failed(GRAMMAR, 1.0, error)
    updates = scheduler.take_updates() + run_all(scheduler, runner)
    [end] = [update for update in updates if update.request == 0 and update.finish_reason]
    assert (end.finish_reason, end.error) == (("error", error) if error else ("length", None))
    assert outputs(updates)[1] == expected_output([4, 5, 6], 2)
    assert scheduler.idle


def test_an_event_that_nobody_awaits_changes_nothing():
    scheduler, runner = make_scheduler()
    scheduler.add(make_request(0, [1, 2, 3], awaits=GRAMMAR))
    scheduler.abort(0)
    scheduler.arrived(GRAMMAR)
    scheduler.failed(GRAMMAR, 1.0, "too late")
    [update] = scheduler.take_updates()
    assert update.finish_reason == "abort" and scheduler.idle and not scheduler.expects_others
    scheduler.add(make_request(1, [1, 2, 3]))
    assert len(outputs(run_all(scheduler, runner))[1]) == 4


def test_requests_that_await_other_events_take_no_place_of_those_that_await_a_prefix():
    scheduler, runner = make_scheduler(num_blocks=100, block_size=4, max_num_batched_tokens=200, max_num_seqs=2)
    for id in range(5):
        scheduler.add(make_request(id, [id] * 9, awaits=GRAMMAR))
    for id in range(5, 8):
        scheduler.add(make_request(id, [*range(20), id], max_tokens=2))
    plan = scheduler.schedule(0.0)
    assert lengths(plan) == {5: 21}
    assert [scheduler.requests[id].awaits.kind for id in (6, 7)] == ["block", "block"]
    scheduler.commit(plan, runner.run(plan), 0.0)
    assert set(outputs(run_all(scheduler, runner))) == {5, 6, 7}


@pytest.mark.parametrize("failed", [False, True])
def test_when_steps_are_given_up_events_are_awaited_still_and_prefixes_no_longer(failed):
    scheduler, runner = make_scheduler(num_blocks=100, block_size=4, max_num_batched_tokens=200)
    scheduler.add(make_request(0, [9] * 9, max_tokens=2, awaits=GRAMMAR))
    for id in (1, 2):
        scheduler.add(make_request(id, [*range(20), id], max_tokens=2))
    scheduler.schedule(0.0)
    scheduler.restart(failed=failed)
    assert [scheduler.requests[id].awaits for id in (0, 1, 2)] == [GRAMMAR, None, None]
    scheduler.arrived(GRAMMAR)
    ended = outputs(run_all(scheduler, runner))
    assert ended[0] == expected_output([9] * 9, 2) and ended[2] == expected_output([*range(20), 2], 2)


def test_one_of_the_same_turn_that_waited_for_an_event_preempts_nobody():
    scheduler, runner = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(0, [1, 2, 3], max_tokens=2, owner="a", awaits=GRAMMAR))
    scheduler.add(make_request(1, [4, 5, 6], max_tokens=4, owner="b"))
    run_step(scheduler, runner)
    scheduler.arrived(GRAMMAR)
    assert [update.request for update in run_all(scheduler, runner) if update.finish_reason] == [1, 0]
    assert scheduler.num_preemptions == 0


def test_nobody_waits_for_the_prefix_of_one_that_was_preempted():
    scheduler, runner = make_scheduler(
        num_blocks=16, scheduling_policy="priority", max_num_batched_tokens=16, long_prefill_token_threshold=8
    )
    prompt = list(range(40))
    for id in (0, 1):
        scheduler.add(make_request(id, [*prompt, id], max_tokens=2, priority=9))
    run_step(scheduler, runner)
    assert scheduler.requests[1].status is Status.AWAITING
    scheduler.add(make_request(2, [7] * 45, max_tokens=2, priority=0))
    while not scheduler.num_preemptions:
        run_step(scheduler, runner)
    assert scheduler.requests[1].status is Status.WAITING
    scheduler.abort(0)
    assert outputs(run_all(scheduler, runner))[1] == expected_output([*prompt, 1], 2)
