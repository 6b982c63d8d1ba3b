"""Policies by name: in which order requests are served, who gives way, what a cache keeps, how much anybody holds.

All through the scheduler's doors, and by what comes out of them; `policies.py` checks some of them after every step
of the property tests, too.
"""

from __future__ import annotations

import itertools
import random

import pytest

from quire.core.block_hash import BlockHasher
from quire.core.draft_length import DraftLengths, DraftState
from quire.core.step import DRAFT
from quire.core.waiting_queue import WaitingQueue
from tests.core.fake_runner import StepFailed, expected_output, make_request, make_scheduler, matched, outputs, run_all
from tests.core.policies import Policies, decodes, drafts, sizes


def run_step(scheduler, runner, now=0.0):
    plan = scheduler.schedule(now)
    return plan, scheduler.commit(plan, runner.run(plan), now)


def run_one(scheduler, runner, id, prompt, max_tokens=1, **fields):
    """Run a request alone; how many of its prompt's tokens were cached."""
    scheduler.add(make_request(id, list(prompt), max_tokens, **fields))
    updates = run_all(scheduler, runner)
    assert updates[-1].request == id and updates[-1].finish_reason == "length"
    return updates[-1].cached_tokens


def ends(updates):
    return [update.request for update in updates if update.finish_reason]


# -- order of service ----------------------------------------------------------------------------------------


@pytest.mark.scale
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_order_of_service_survives_many_aborts(policy, seed):
    """The queue is made anew when most of it is dead, and must be in order then, too."""
    rnd = random.Random(seed)
    scheduler, runner = make_scheduler(scheduling_policy=policy, max_num_seqs=1, prefix_cache="off")
    priorities = [rnd.randrange(1000) for _ in range(300)]
    for id, priority in enumerate(priorities):
        scheduler.add(make_request(id, [1, id % 50], max_tokens=1, priority=priority))
    aborted = set(rnd.sample(range(300), 250))
    for id in aborted:
        scheduler.abort(id)
    scheduler.take_updates()
    alive = [id for id in range(300) if id not in aborted]
    served = ends(run_all(scheduler, runner))
    assert served == sorted(alive, key=lambda id: (priorities[id] if policy == "priority" else 0, id))


def test_all_that_fit_begin_in_one_step():
    scheduler, _ = make_scheduler(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    for id in range(10):
        scheduler.add(make_request(id, [id] * 5, max_tokens=4))
    assert [span.request for span in scheduler.schedule(0.0).spans] == list(range(8)), "eight seats, eight requests"


def test_a_preempted_request_keeps_its_place_before_those_that_came_later():
    scheduler, runner = make_scheduler(num_blocks=9, block_size=4, prefix_cache="off")
    for id, max_tokens in ((0, 20), (1, 16)):
        scheduler.add(make_request(id, [id] * 8, max_tokens))
    while not scheduler.num_preemptions:
        run_step(scheduler, runner)
    scheduler.add(make_request(2, [2] * 4, max_tokens=4))
    began = []
    while not scheduler.idle:
        plan, _ = run_step(scheduler, runner)
        began += [span.request for span in plan.spans if span.start == 0]
    assert began == [1, 2], "request 2 would fit at once, but request 1 is before it"


def test_under_priority_the_lowest_gives_way_and_the_latest_among_equals():
    scheduler, runner = make_scheduler(num_blocks=16, block_size=4, scheduling_policy="priority", prefix_cache="off")
    for id, priority in ((0, 5), (1, 9), (2, 9), (3, 1)):
        scheduler.add(make_request(id, [id] * 12, max_tokens=12, priority=priority))
    before = {}
    for step in range(100):
        plan = scheduler.schedule(float(step))
        if plan is None:
            break
        for request in scheduler.requests.values():
            if request.stats.preemptions:
                before.setdefault(request.id, len(before))
        scheduler.commit(plan, runner.run(plan), float(step))
    assert list(before) == [2, 1] or list(before) == [2], before


@pytest.mark.parametrize(
    ("num_blocks", "requests"),
    [
        (117, [(11, 50), (18, 39), (16, 16), (6, 24), (15, 58)]),
        (125, [(9, 17), (29, 59), (13, 55), (8, 36), (28, 29)]),
    ],
)
def test_a_request_that_recomputes_is_the_last_victim(num_blocks, requests):
    """Preempting it again would throw away what was just made twice; who never gave way loses less."""
    scheduler, runner = make_scheduler(num_blocks + 1, block_size=1, prefix_cache="off", max_num_batched_tokens=12)
    for id, (prompt, max_tokens) in enumerate(requests):
        scheduler.add(make_request(id, [id] * prompt, max_tokens))
    assert last_victims(scheduler, runner) == []
    assert scheduler.num_preemptions > 3


def last_victims(scheduler, runner):
    """Runs all; the requests that were preempted while they recomputed although two before them did not recompute.

    One of the two needed the block, and the other one was behind it.
    """
    policies, wrong = Policies(scheduler, 0), []
    for step in range(2000):
        running = list(scheduler.running)
        at_it = {each.id for each in running if policies.recomputing(each)}
        counts = {each.id: each.stats.preemptions for each in running}
        policies.before()
        plan = scheduler.schedule(float(step))
        victims = [each for each in running if each.stats.preemptions > counts[each.id]]
        policies.after(plan)
        if plan is None:
            break
        kept = [each for each in running if each not in victims and each.id not in at_it]
        wrong += [each.id for each in victims if each.id in at_it and len(kept) > 1]
        scheduler.commit(plan, runner.run(plan), float(step))
    assert scheduler.idle
    return wrong


def test_a_request_that_is_held_for_anothers_prefix_may_be_aborted():
    scheduler, runner = make_scheduler(num_blocks=100, block_size=4, max_num_batched_tokens=20)
    for id in range(3):
        scheduler.add(make_request(id, [*range(40), id], max_tokens=2))
    plan, _ = run_step(scheduler, runner)
    assert [span.request for span in plan.spans] == [0], "the others wait for what it computes"
    scheduler.abort(1)
    updates = run_all(scheduler, runner)
    assert sorted(ends(updates)) == [0, 1, 2]
    made = outputs(updates)
    assert made[1] == [] and made[2] == expected_output([*range(40), 2], 2)
    assert updates[-1].cached_tokens == 40


def test_without_drafts_no_span_depends_on_what_a_step_in_flight_accepts():
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(0, [1, 2, 3], max_tokens=5))
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    assert [plan.spans[0].start_follows for plan in plans] == [False] * 3
    assert [plan.spans[0].start for plan in plans] == [0, 3, 4]


# -- what a cache keeps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["", "tenant"])
@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_a_scope_is_cached_again_after_all_of_it_was_evicted(kind, scope):
    scheduler, runner = make_scheduler(block_size=4, prefix_cache=kind)
    prompt = list(range(13))
    assert run_one(scheduler, runner, 0, prompt, scope=scope) == 0
    assert run_one(scheduler, runner, 1, prompt, scope=scope) == 12
    assert scheduler.kv.cache.clear() > 0
    assert run_one(scheduler, runner, 2, prompt, scope=scope) == 0, "all was evicted"
    assert run_one(scheduler, runner, 3, prompt, scope=scope) == 12, "and is cached anew"


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_a_scope_is_cached_again_after_others_pushed_it_out(kind):
    scheduler, runner = make_scheduler(num_blocks=9, block_size=4, prefix_cache=kind)
    prompt = list(range(13))
    run_one(scheduler, runner, 0, prompt, scope="a")
    run_one(scheduler, runner, 1, range(100, 130), scope="b")
    assert run_one(scheduler, runner, 2, prompt, scope="a") == 0, "the pool has room for one of them"
    assert run_one(scheduler, runner, 3, prompt, scope="a") == 12


@pytest.mark.scale
@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("seed", range(4))
def test_what_was_used_longest_ago_is_evicted_first(kind, seed):
    """Prompts of one full block, used in random order."""
    rnd = random.Random(seed)
    scheduler, runner = make_scheduler(num_blocks=40, block_size=4, prefix_cache=kind)
    used: list[int] = []
    for id in range(200):
        which = rnd.randrange(14)
        cached = run_one(scheduler, runner, id, [which] * 4 + [99])
        assert cached == (4 if which in used else 0)
        used = [each for each in used if each != which] + [which]
    assert set(used) == set(range(14))
    whole = scheduler.kv.cache
    for oldest in used[:10]:
        while survives(scheduler, oldest):
            assert whole.evict(0, 1) == 1
            later = used[used.index(oldest) + 1 :]
            assert all(survives(scheduler, each) for each in later), f"{oldest} was used before {later}"


def survives(scheduler, which):
    """Whether the prompt's full block is still cached; looking does not count as use."""
    return matched(scheduler, [which] * 4 + [98]) >= 4


def test_tails_go_before_heads_and_heads_are_found_afterwards():
    scheduler, runner = make_scheduler(block_size=2)
    prompt = list(range(9))
    run_one(scheduler, runner, 0, prompt)
    for left in (6, 4, 2, 0):
        scheduler.kv.cache.evict(0, 2 if left == 6 else 1)
        assert matched(scheduler, prompt) == left


@pytest.mark.scale
@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_a_cache_used_over_and_over_keeps_books_in_proportion_to_its_blocks(kind):
    """Every use of a leaf is noted; the notes are thinned out, and the order of use is not lost."""
    scheduler, runner = make_scheduler(num_blocks=32, block_size=4, prefix_cache=kind)
    for id in range(600):
        run_one(scheduler, runner, id, [id % 7] * 4 + [9] * (2 if kind == "radix" else 1))
    assert sizes(scheduler.kv.cache) < 250
    order = [id % 7 for id in range(593, 600)]
    for place, which in enumerate(order):
        while survives(scheduler, which):
            assert scheduler.kv.cache.evict(0, 1) == 1
        assert all(survives(scheduler, later) for later in order[place + 1 :])


def test_a_queue_of_aborted_requests_keeps_books_in_proportion_to_the_living():
    scheduler, _ = make_scheduler()
    for id in range(2000):
        scheduler.add(make_request(id, [1, 2, 3]))
        if id >= 10:
            scheduler.abort(id)
            scheduler.take_updates()
    assert sizes(scheduler) < 200


@pytest.mark.parametrize(("kind", "whole", "one"), [("radix", 12, 1), ("hash", 12, 0)])
def test_where_the_next_token_matters_the_last_one_of_a_cached_prefix_is_computed_again(kind, whole, one):
    """And no other: of 12 tokens 11 remain, of one none, and of nothing nothing."""
    for needs_next_token in (False, True):
        scheduler, runner = make_scheduler(block_size=4, prefix_cache=kind, needs_next_token=needs_next_token)
        run_one(scheduler, runner, 0, range(13))
        found = [matched(scheduler, prompt) for prompt in (range(13), [0, 50, 51], [60, 61])]
        assert found == ([whole - 1, 0, 0] if needs_next_token else [whole, one, 0])


@pytest.mark.parametrize(("reason", "found"), [("stop", 6), ("abort", 4)])
def test_of_a_request_that_ended_well_the_last_partly_filled_block_is_kept_and_of_an_aborted_one_full_ones(
    reason, found
):
    scheduler, runner = make_scheduler(block_size=4)
    scheduler.add(make_request(0, [1, 2, 3, 4, 5, 6], max_tokens=9))
    run_step(scheduler, runner)
    scheduler.abort(0, reason)
    assert matched(scheduler, [1, 2, 3, 4, 5, 6, 7]) == found


def test_heads_that_windows_have_passed_are_evicted_where_blocks_are_needed():
    """They are idle and cached, with held blocks behind them in the tree: no leaves, and yet available."""
    scheduler, runner = make_scheduler(num_blocks=23, block_size=4, windows=(9,), max_num_batched_tokens=16)
    scheduler.add(make_request(0, [n % 7 for n in range(48)], max_tokens=20))
    for _ in range(6):
        run_step(scheduler, runner)
    kv = scheduler.kv
    [group] = kv.groups
    assert len(group.idle) > 6, "most of its prompt is idle"
    free = group.pool.num_free
    scheduler.add(make_request(1, [n % 5 for n in range(4 * free + 20)], max_tokens=8))
    updates = run_all(scheduler, runner)
    assert scheduler.num_preemptions == 0
    made = outputs(updates)
    assert made[1] == expected_output([n % 5 for n in range(4 * free + 20)], 8, windows=(9,))
    assert updates[-1].finish_reason


def test_of_the_heads_that_windows_have_passed_the_oldest_goes_first():
    scheduler, runner = make_scheduler(num_blocks=64, block_size=4, windows=(9,), max_num_batched_tokens=16)
    scheduler.add(make_request(0, list(range(48)), max_tokens=20))
    scheduler.add(make_request(1, list(range(100, 148)), max_tokens=20))
    for _ in range(9):
        run_step(scheduler, runner)
    kv = scheduler.kv

    def found(length):
        return [matched(scheduler, range(start, start + length)) for start in (0, 100)]

    heads, whole = found(13), found(48)
    assert heads == [12, 12] and min(whole) >= 44
    assert kv.cache.evict(0, 1) == 1
    assert found(13) == [4, 12], "the window of the first request passed its second block first"
    assert found(48) == whole, "who goes on after 47 tokens sees nothing of it"


# -- how much anybody holds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["radix", "hash", "off"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_window_bounds_the_blocks_a_request_holds(block_size, cache):
    scheduler, runner = make_scheduler(
        num_blocks=200, block_size=block_size, windows=(9,), max_num_batched_tokens=16, prefix_cache=cache
    )
    request = make_request(0, [n % 7 for n in range(60)], max_tokens=40)
    scheduler.add(request)
    policies = Policies(scheduler, 0)
    most_decoding = 0
    while not scheduler.idle:
        policies.before()
        plan = scheduler.schedule(0.0)
        policies.after(plan)
        if decodes(plan):
            most_decoding = max(most_decoding, sum(block != 0 for block in request.tables[0]))
        scheduler.commit(plan, runner.run(plan), 0.0)
    assert most_decoding == (9 if block_size == 1 else 3), "eight tokens before the one that is computed, and that one"


@pytest.mark.parametrize("most", [2, 8])
def test_beyond_its_window_a_request_that_decodes_holds_its_drafts_too_however_short_chunks_are(most):
    """A step of it is a chunk of the prompt, or one token and its drafts, which may be more."""
    scheduler, runner = make_scheduler(
        num_blocks=200, block_size=1, windows=(None, 9), drafts=most, long_prefill_token_threshold=5
    )
    request = make_request(0, [n % 7 for n in range(60)], max_tokens=40)
    scheduler.add(request)
    policies, held = Policies(scheduler, 0), {}
    while not scheduler.idle:
        policies.before()
        plan = scheduler.schedule(0.0)
        policies.after(plan)
        if decodes(plan):
            held[drafts(plan)[0]] = sum(block != 0 for block in request.tables[1])
        scheduler.commit(plan, runner.run(plan), 0.0)
    assert held[most] == 9 + most and all(blocks == 9 + count for count, blocks in held.items())


@pytest.mark.parametrize("most", [0, 8])
def test_a_request_that_fits_its_window_into_a_small_pool_is_accepted_and_runs(most):
    scheduler, runner = make_scheduler(num_blocks=9, block_size=4, windows=(9,), max_num_batched_tokens=12, drafts=most)
    prompt = [n % 7 for n in range(300)]
    scheduler.add(make_request(0, prompt, max_tokens=10))
    assert outputs(run_all(scheduler, runner))[0] == expected_output(prompt, 10, windows=(9,))


# -- drafts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 4])
def test_each_decode_gets_all_its_drafts_where_there_is_room(most):
    scheduler, runner = make_scheduler(num_blocks=200, block_size=4, drafts=most, drafter=lambda *_: [])
    for id in range(3):
        scheduler.add(make_request(id, [id] * 5, max_tokens=12))
    run_step(scheduler, runner)
    for made in range(1, 12):
        plan, _ = run_step(scheduler, runner)
        left = 12 - made - 1  # the last token is never a draft
        assert drafts(plan) == {id: min(most, left) for id in range(3)}


def test_drafts_share_what_the_budget_leaves():
    scheduler, runner = make_scheduler(
        num_blocks=200, drafts=8, max_num_batched_tokens=12, max_num_seqs=3, drafter=lambda *_: []
    )
    for id in range(3):
        scheduler.add(make_request(id, [id, 7], max_tokens=40))
    run_step(scheduler, runner)
    plan, _ = run_step(scheduler, runner)
    assert plan.num_tokens == 12 and sum(drafts(plan).values()) == 9


@pytest.mark.parametrize("fatal", [0, 1])
def test_of_two_requests_whose_step_failed_only_the_one_that_makes_steps_fail_is_blamed(fatal):
    scheduler, runner = make_scheduler()
    runner.fatal.add(fatal)
    for id in range(2):
        scheduler.add(make_request(id, [id] * 6, max_tokens=3))
    blamed, updates = [], []
    while plan := scheduler.schedule(0.0):
        try:
            updates += scheduler.commit(plan, runner.run(plan), 0.0)
        except StepFailed:
            culprit = scheduler.restart(failed=True)
            if culprit is not None:
                blamed.append(culprit.id)
                scheduler.fail(culprit.id, "its step failed", 0.0)
    assert blamed == [fatal] and outputs(updates)[1 - fatal] == expected_output([1 - fatal] * 6, 3)


def test_each_block_of_a_table_is_sent_to_the_runner_once():
    scheduler, runner = make_scheduler(num_blocks=40, block_size=4, max_num_batched_tokens=16)
    scheduler.add(make_request(0, list(range(30)), max_tokens=40))
    sent = []
    while plan := scheduler.schedule(0.0):
        sent += [block for span in plan.spans for blocks in span.blocks for block in blocks]
        scheduler.commit(plan, runner.run(plan), 0.0)
    assert len(sent) == len(set(sent)) == -(-69 // 4)


def test_groups_that_are_still_to_be_tried_wait_for_their_turn():
    scheduler, runner = make_scheduler()
    runner.fatal.add(0)
    for id in range(4):
        scheduler.add(make_request(id, [id] * 6, max_tokens=3))
    tried, updates = [], []
    while plan := scheduler.schedule(0.0):
        tried.append({span.request for span in plan.spans})
        try:
            updates += scheduler.commit(plan, runner.run(plan), 0.0)
        except StepFailed:
            culprit = scheduler.restart(failed=True)
            if culprit is not None:
                scheduler.fail(culprit.id, "its step failed", 0.0)
    assert tried[:4] == [{0, 1, 2, 3}, {0, 1}, {0}, {1}] and tried[4] == {2, 3}
    assert {id: tokens for id, tokens in outputs(updates).items() if id} == {
        id: expected_output([id] * 6, 3) for id in (1, 2, 3)
    }


def test_a_group_whose_requests_were_aborted_before_its_turn_holds_nobody_up():
    scheduler, runner = make_scheduler(max_num_seqs=4)
    for id in range(6):
        scheduler.add(make_request(id, [id] * 6, max_tokens=3))
    scheduler.schedule(0.0)
    assert scheduler.restart(failed=True) is None
    run_step(scheduler, runner)
    for id in (2, 3):
        scheduler.abort(id)
    made = outputs(run_all(scheduler, runner))
    assert scheduler.idle and made[5] == expected_output([5] * 6, 3)


def test_a_prompt_that_fits_whole_is_no_partial_prefill():
    scheduler, runner = make_scheduler(
        num_blocks=200, max_num_batched_tokens=40, long_prefill_token_threshold=20, prefix_cache="off"
    )
    scheduler.add(make_request(0, [1] * 60, max_tokens=1))
    scheduler.add(make_request(1, [2] * 30, max_tokens=1))
    scheduler.add(make_request(2, [3] * 9, max_tokens=1))
    plan, _ = run_step(scheduler, runner)
    assert [span.request for span in plan.spans] == [0], "one partial prefill at a time, and nobody is bypassed"
    scheduler.abort(1)
    plan, _ = run_step(scheduler, runner)
    assert {span.request: len(span.tokens) for span in plan.spans} == {0: 20, 2: 9}


def test_the_end_of_a_prompt_is_computed_in_one_piece_and_nothing_is_dropped():
    scheduler, runner = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request(0, list(range(18)), max_tokens=2))
    plans = [run_step(scheduler, runner)[0] for _ in range(3)]
    assert [[len(span.tokens) for span in plan.spans] for plan in plans] == [[16], [2], [1]]
    assert [plan.drop_drafting for plan in plans] == [[], [], []]


def test_a_queue_forgets_the_dead_whoever_finds_them():
    queue = WaitingQueue()
    requests = iter([make_request(id, [1]) for id in range(2000)])

    def push(count):
        pushed = list(itertools.islice(requests, count))
        for request in pushed:
            request.order = (0, request.id, request.id)
            queue.push(request)
        return pushed

    for _ in range(500):
        for request in push(1):
            queue.remove(request)
        assert queue.head() is None
    for request in push(600):
        queue.remove(request)
    assert sizes(queue) < 100


def test_a_partial_prefill_behind_the_head_of_the_queue_gets_a_least_chunk_and_leaves_it_the_rest():
    scheduler, runner = make_scheduler(
        num_blocks=200, max_num_batched_tokens=40, min_chunk=4, scheduling_policy="priority", prefix_cache="off"
    )
    scheduler.add(make_request(0, [1] * 200, max_tokens=1, priority=5))
    run_step(scheduler, runner)
    scheduler.add(make_request(1, [2] * 100, max_tokens=1, priority=0))
    plan, _ = run_step(scheduler, runner)
    assert {span.request: len(span.tokens) for span in plan.spans} == {0: 4, 1: 36}


def test_the_use_of_the_cache_is_that_of_its_fullest_group_between_0_and_1():
    scheduler, runner = make_scheduler([21, 11], 4, (None, 9))
    assert scheduler.kv.use == 0
    scheduler.add(make_request(0, [1] * 18, max_tokens=10))
    run_step(scheduler, runner)
    held = [group.num_usable - group.num_available for group in scheduler.kv.groups]
    assert held[0] == 5 and 0 < held[1] <= 5
    assert scheduler.kv.use == pytest.approx(max(held[0] / 20, held[1] / 10))


def test_self_tuning_drafts_nothing_beside_a_prompt():
    scheduler, runner = make_scheduler(num_blocks=400, drafts=4, adaptive=True, drafter=expected_output)
    scheduler.add(make_request(0, [1, 2, 3], max_tokens=200))
    plan, _ = run_step(scheduler, runner)
    while not drafts(plan)[0]:
        plan, _ = run_step(scheduler, runner)
    scheduler.add(make_request(1, [4] * 9, max_tokens=50))
    plan, _ = run_step(scheduler, runner)
    assert drafts(plan) == {0: 0, 1: 0} and [len(span.tokens) for span in plan.spans] == [1, 9]
    while not drafts(plan)[0]:
        plan, _ = run_step(scheduler, runner)


def test_self_tuning_drafts_where_drafts_are_right_and_hardly_where_they_are_wrong():
    """Each step of the fake runner takes the same time, so that right drafts are pure gain."""

    def steps_and_drafts(drafter):
        scheduler, runner = make_scheduler(num_blocks=400, drafts=4, adaptive=True, drafter=drafter)
        for id in range(3):
            scheduler.add(make_request(id, [id, 1, 2], max_tokens=200))
        made = outputs(run_all(scheduler, runner))
        assert made == {id: expected_output([id, 1, 2], 200) for id in range(3)}
        return runner.next_number, runner.num_drafted

    steps, _ = steps_and_drafts(expected_output)
    assert steps < 120, "of 200 tokens, five a step at best"
    _, drafted = steps_and_drafts(lambda text, count, windows: [99] * count)
    assert drafted < 350, "of some 2400 that always four would be"


def test_without_free_blocks_drafts_fill_the_last_block():
    """Nobody is preempted for a draft; what is left of a request's last block costs nothing."""
    scheduler, runner = make_scheduler(num_blocks=5, block_size=8, drafts=6, prefix_cache="off", drafter=lambda *_: [])
    for id, length in ((0, 10), (1, 11)):
        scheduler.add(make_request(id, [id] * length, max_tokens=5))
    run_step(scheduler, runner)
    assert scheduler.kv.num_available == 0
    plan, _ = run_step(scheduler, runner)
    assert drafts(plan) == {0: 3, 1: 3}, "tokens that are left of five, less the last"
    scheduler, runner = make_scheduler(num_blocks=5, block_size=8, drafts=6, prefix_cache="off", drafter=lambda *_: [])
    for id, length in ((0, 10), (1, 12)):
        scheduler.add(make_request(id, [id] * length, max_tokens=min(20, 32 - length)))
    run_step(scheduler, runner)
    plan, _ = run_step(scheduler, runner)
    assert drafts(plan) == {0: 5, 1: 3}, "up to position 16"
    assert scheduler.num_preemptions == 0


def test_of_equal_requests_those_with_less_room_get_what_they_have_room_for():
    lengths = DraftLengths(8)
    for _ in range(4):
        for requests in range(1, 33):
            lengths.observe(requests, 0.05, 0.0, 0)  # rows cost nothing
    states = [DraftState() for _ in range(3)]
    for state in states:
        lengths.start(state, True, 3)
        for _ in range(40):
            lengths.accepted(state, 8, 8)
    chosen = [lengths.choose(states, [8, 3, 1], 100, 3) for _ in range(20)]
    assert chosen.count([8, 3, 1]) > 10


# -- identity of blocks --------------------------------------------------------------------------------------


def test_no_two_pairs_of_fingerprint_and_scope_have_one_root():
    """Lengths are part of what is hashed: an empty fingerprint, or one that spells another's length, is its own."""
    pieces = ["", "a", "b", "ab", "\x01", "\0" * 8, "\x01" + "\0" * 7, "\x01" + "\0" * 7 + "a", "a" * 256, "a" * 257]
    roots = {
        (fingerprint, scope): BlockHasher(bytes(32), fingerprint).root(scope)
        for fingerprint in pieces
        for scope in pieces
    }
    assert len(set(roots.values())) == len(roots)


def test_a_block_is_another_one_behind_another_head():
    """The chain is over all that comes before: equal blocks at other places, or behind other heads, differ."""
    hasher = BlockHasher(bytes(32), "f")
    block, other = b"\1" * 32, b"\2" * 32
    chain = hasher.chain(hasher.root(""), [block, block, other, block])
    assert len({hasher.root(""), *chain}) == 5
    assert hasher.chain(chain[1], [other, block]) == chain[2:]
    assert BlockHasher(b"k" * 32, "f").chain(chain[1], [other])[0] != chain[2], (
        "who lacks the key cannot go on from a hash"
    )


def test_names_that_are_no_text_have_roots_too():
    """A path may hold any bytes, which Python shows as lone surrogates."""
    assert BlockHasher(bytes(32), "\udcff").root("\udc80") != BlockHasher(bytes(32), "\udcfe").root("\udc80")


def test_drafting_is_dropped_only_where_no_step_in_flight_verifies_drafts(monkeypatch):
    """The runner stops following the request at once, and could not say where it stands."""
    scheduler, runner = make_scheduler(num_blocks=400, drafts=4, adaptive=True, drafter=expected_output)
    turns, asked = itertools.cycle([4, 0]), []

    def drop(lengths, states):
        asked.append(len(states))
        return 0 if states else None

    monkeypatch.setattr(DraftLengths, "choose", lambda lengths, states, room, *rest: [next(turns)] * len(states))
    monkeypatch.setattr(DraftLengths, "drop_drafting", drop)
    scheduler.add(make_request(0, [1, 2, 3], max_tokens=40))
    drafted, flights = set(), []
    for _ in range(8):
        plan = scheduler.schedule(0.0)
        if plan is not None:
            assert not drafted.intersection(plan.drop_drafting), "drafts of a request that is dropped are in flight"
            drafted |= {span.request for span in plan.spans if DRAFT in span.tokens}
            flights.append(plan)
        if len(flights) == 2 or plan is None:
            oldest = flights.pop(0)
            scheduler.commit(oldest, runner.run(oldest), 0.0)
            drafted = {span.request for flight in flights for span in flight.spans if DRAFT in span.tokens}
    assert 0 in asked and 1 in asked
