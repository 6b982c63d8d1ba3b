"""What KV groups hold, share, find and give up: each by itself, and a match where all of them have what is seen."""

from __future__ import annotations

import pytest

from quire.core.block_hash import part_name
from quire.core.block_pool import NULL_BLOCK
from quire.core.invariants import check
from quire.core.kv_group import Retention
from quire.core.kv_manager import Handle
from quire.errors import RequestTooLargeError
from tests.core.fake_runner import (
    expected_output,
    make_request,
    make_scheduler,
    matched,
    outputs,
    published_of,
    run_all,
    run_prompts,
)
from tests.core.policies import Policies

WINDOWS = (None, 9)
"""The last group sees nine tokens: of a position that begins a block of four, the two blocks before it."""

PROMPT = [n * 7 % 23 for n in range(48)]


def cached(windows=WINDOWS, prompts=(PROMPT,), **options):
    return run_prompts(prompts, **{"windows": windows, "num_blocks": 200, "max_num_batched_tokens": 16} | options)


def path(scheduler, prompt=PROMPT):
    """The nodes of a prompt's full blocks."""
    kv, nodes = scheduler.kv, [scheduler.kv.cache.roots[""]]
    for key in make_request(0, list(prompt)).block_keys(0, len(prompt) // kv.block_size, kv.block_size):
        if key not in nodes[-1].children:
            break
        nodes.append(nodes[-1].children[key])
    return nodes[1:]


def evict_parts(scheduler, group, places, prompt=PROMPT):
    """Those of some blocks of a prompt, whatever was used before."""
    idle = scheduler.kv.groups[group].idle
    for place in places:
        idle.move_to_end(path(scheduler, prompt)[place].blocks[group], last=False)
        scheduler.kv.cache.evict(group, 1)
    check(scheduler)


def test_a_group_gives_back_what_its_window_has_passed_and_the_other_keeps_all():
    scheduler, runner = make_scheduler([60, 60], 4, WINDOWS, max_num_batched_tokens=16)
    request = make_request(0, PROMPT, max_tokens=60)
    scheduler.add(request)
    policies, most = Policies(scheduler, 0), 0
    while not scheduler.idle:
        policies.before()
        plan = scheduler.schedule(0.0)
        policies.after(plan)
        if request.num_computed > len(PROMPT):
            full, windowed = request.tables
            most = max(most, sum(block != NULL_BLOCK for block in windowed))
            assert NULL_BLOCK not in full and len(full) == len(windowed)
        scheduler.commit(plan, runner.run(plan), 0.0)
    assert most == 3, "eight tokens before the one that is computed, and that one"


def test_a_match_ends_where_all_groups_have_what_the_next_token_sees():
    scheduler, _ = cached()
    assert matched(scheduler, PROMPT) == 47
    evict_parts(scheduler, 1, [9])  # positions 36 to 39, seen from 37 up to 47
    assert matched(scheduler, PROMPT) == 36
    assert matched(scheduler, [*PROMPT, 1, 2]) == 48, "who goes on at 48 sees 40 to 47 alone"
    assert matched(scheduler, PROMPT[:36]) == 35
    evict_parts(scheduler, 1, [7])
    assert matched(scheduler, PROMPT[:36]) == 28
    assert matched(scheduler, [*PROMPT, 1]) == 48
    assert all(node.blocks[0] != NULL_BLOCK for node in path(scheduler)), "the other group's are there"


def test_each_group_need_have_no_more_than_its_own_window():
    """At 48 one sees 36 to 47, the other 44 to 47."""
    scheduler, runner = cached((13, 5))
    evict_parts(scheduler, 1, range(11))
    assert matched(scheduler, [*PROMPT, 1]) == 48
    scheduler.add(make_request(1, [*PROMPT, 1], max_tokens=5))
    assert outputs(run_all(scheduler, runner))[1] == expected_output([*PROMPT, 1], 5, (13, 5))
    evict_parts(scheduler, 0, [9])
    assert matched(scheduler, [*PROMPT, 2]) == 0


def test_a_block_is_found_by_its_name_as_long_as_its_own_group_has_it():
    scheduler, _ = cached((None, 9))
    cache, node = scheduler.kv.cache, path(scheduler)[-1]
    names = [part_name(node.hash, number) for number in range(2)]
    assert [cache.part(name) for name in names] == [(node, 0), (node, 1)]
    assert cache.part(part_name(node.hash, 2)) is None
    cache.evict(1, 100)
    assert [cache.part(name) for name in names] == [(node, 0), None]


def test_what_a_group_without_a_window_loses_ends_all_that_follows():
    scheduler, _ = cached()
    evict_parts(scheduler, 0, [5])
    assert len(path(scheduler)) == 5 and matched(scheduler, [*PROMPT, 1]) == 20
    assert len(scheduler.kv.groups[1].cached) == 5, "parts that no match can reach are given up"


@pytest.mark.parametrize("windows", [(9,), (None, 9), (None, 9, 5), (12, 9)])
def test_a_prompt_is_found_after_the_blocks_that_its_windows_passed_were_evicted(windows):
    scheduler, runner = cached(windows)
    for number, window in enumerate(windows):
        if window is not None:
            evict_parts(scheduler, number, range(8))
    second = [*PROMPT, 1, 2, 3]
    scheduler.add(make_request(7, second, max_tokens=20))
    updates = run_all(scheduler, runner)
    assert outputs(updates)[7] == expected_output(second, 20, windows)
    assert updates[-1].cached_tokens == 48
    check(scheduler)


def test_a_match_holds_no_more_of_a_windowed_group_than_is_seen():
    scheduler, _ = cached()
    scheduler.add(make_request(1, [*PROMPT, 1, 2, 3], max_tokens=2))
    scheduler.schedule(0.0)
    [request] = scheduler.running
    full, windowed = request.tables
    assert windowed[:10] == [NULL_BLOCK] * 10 and NULL_BLOCK not in windowed[10:]
    assert full[:12] == [node.blocks[0] for node in path(scheduler)]
    assert windowed[10:12] == [node.blocks[1] for node in path(scheduler)[10:]]
    assert len(scheduler.kv.groups[1].idle) == 10, "the others may go"
    check(scheduler)


def test_parts_that_were_evicted_come_back_when_somebody_computes_them_again():
    scheduler, runner = cached()
    whole = [list(node.blocks) for node in path(scheduler)]
    evict_parts(scheduler, 1, range(12))
    assert matched(scheduler, [*PROMPT, 1]) == 0 and len(path(scheduler)) == 12
    used = scheduler.kv.groups[0].pool.num_free
    scheduler.add(make_request(1, [*PROMPT, 1], max_tokens=1))
    run_all(scheduler, runner)
    assert matched(scheduler, [*PROMPT, 2]) == 48
    assert [node.blocks[0] for node in path(scheduler)] == [blocks[0] for blocks in whole], "nothing is kept twice"
    assert used - scheduler.kv.groups[0].pool.num_free == 1, "the last token's"
    check(scheduler)


@pytest.mark.parametrize("lost", [[], [0], [1]])
def test_a_partly_equal_block_is_copied_in_all_groups_or_in_none(lost):
    scheduler, runner = cached()
    for group in lost:
        evict_parts(scheduler, group, [11])
    second = [*PROMPT[:46], 22, 22]
    assert matched(scheduler, second) == (44 if lost else 46)
    scheduler.add(make_request(1, second, max_tokens=5))
    plan = scheduler.schedule(0.0)
    copies = plan.spans[0].copies
    assert [(group, tokens) for group, _, _, tokens in copies] == ([] if lost else [(0, 2), (1, 2)])
    assert all(scheduler.kv.groups[group].pool.ref_counts[source] == 1 for group, source, _, _ in copies)
    updates = scheduler.commit(plan, runner.run(plan), 0.0) + run_all(scheduler, runner)
    assert outputs(updates)[1] == expected_output(second, 5, WINDOWS)


def test_a_partly_filled_leaf_goes_as_a_whole():
    scheduler, _ = cached(prompts=[[*PROMPT, 1, 2]])
    assert matched(scheduler, [*PROMPT, 1, 2, 3]) == 50
    [leaf] = path(scheduler)[-1].children.values()
    for group in (1, 0):
        assert scheduler.kv.groups[group].cached[leaf.blocks[group]] is leaf
    scheduler.kv.groups[1].idle.move_to_end(leaf.blocks[1], last=False)
    assert scheduler.kv.cache.evict(1, 1) == 1
    assert not leaf.attached and leaf not in scheduler.kv.groups[0].cached.values()
    assert matched(scheduler, [*PROMPT, 1, 2, 3]) == 48
    check(scheduler)


def test_where_the_last_token_is_computed_again_the_windows_see_one_further_back():
    """At 48 a window of nine sees 40 to 47; of 47, one block more."""
    scheduler, runner = cached(needs_next_token=True)
    assert matched(scheduler, [*PROMPT, 1, 2]) == 47
    evict_parts(scheduler, 1, range(9))
    assert matched(scheduler, [*PROMPT, 1, 2]) == 47
    evict_parts(scheduler, 1, [9])
    assert matched(scheduler, [*PROMPT, 1, 2]) < 47
    scheduler.add(make_request(1, [*PROMPT, 1, 2], max_tokens=4))
    assert outputs(run_all(scheduler, runner))[1] == expected_output([*PROMPT, 1, 2], 4, WINDOWS)


def test_nodes_that_stand_for_nothing_stay_while_something_follows_them():
    scheduler, _ = cached((9,))
    evict_parts(scheduler, 0, range(10))
    assert len(path(scheduler)) == 12 and matched(scheduler, [*PROMPT, 1]) == 48
    evict_parts(scheduler, 0, [11])
    assert len(path(scheduler)) == 11 and matched(scheduler, [*PROMPT, 1]) == 0
    evict_parts(scheduler, 0, [10])
    assert not scheduler.kv.cache.roots, "the last one takes the empty ones before it along"


def test_what_is_published_of_a_block_comes_and_goes_part_by_part():
    scheduler, runner = make_scheduler(windows=WINDOWS)
    published = published_of([scheduler.kv])
    scheduler.add(make_request(0, PROMPT[:12], max_tokens=1))
    run_all(scheduler, runner)
    names = [[part_name(node.hash, group) for group in (0, 1)] for node in path(scheduler)]
    assert told(published, scheduler) == ({name for both in names for name in both}, set())
    evict_parts(scheduler, 1, [1])
    assert told(published, scheduler) == (set(), {names[1][1]})
    evict_parts(scheduler, 0, [0])
    assert names[0][0] in told(published, scheduler)[1]
    assert not published.blocks and not scheduler.kv.cache.roots


def told(published, scheduler):
    came, went = published.changes([scheduler.kv.cache])
    return set(came), set(went)


def test_a_pool_that_runs_out_preempts_whatever_the_others_have_left():
    for sizes in ([16, 200], [200, 8]):
        scheduler, runner = make_scheduler(sizes, 4, WINDOWS, max_num_batched_tokens=12, prefix_cache="off")
        prompts = [[id, 2, 3, 4, 5, 6, 7] for id in range(3)]
        for id, prompt in enumerate(prompts):
            scheduler.add(make_request(id, prompt, max_tokens=40))
        made = outputs(run_all(scheduler, runner))
        assert made == {id: expected_output(prompt, 40, WINDOWS) for id, prompt in enumerate(prompts)}
        assert scheduler.num_preemptions > 0


def test_a_request_that_no_pool_but_one_could_hold_is_refused_when_it_comes():
    scheduler, _ = make_scheduler([200, 6], 4, WINDOWS, max_num_batched_tokens=16)
    with pytest.raises(RequestTooLargeError, match="need 8 KV blocks of 4 tokens, but the pool has 5"):
        scheduler.add(make_request(0, PROMPT))
    scheduler, _ = make_scheduler([10, 200], 4, WINDOWS, max_num_batched_tokens=16)
    with pytest.raises(RequestTooLargeError, match="need 13 KV blocks of 4 tokens, but the pool has 9"):
        scheduler.add(make_request(0, PROMPT))


@pytest.mark.parametrize("sizes", [[13, 9], [13, 200], [200, 9]])
def test_a_request_that_just_fits_runs_cold_and_warm(sizes):
    scheduler, runner = make_scheduler(sizes, 4, WINDOWS, max_num_batched_tokens=16)
    for id in range(3):
        prompt = [*PROMPT[: 44 - id], *[id] * id]
        scheduler.add(make_request(id, prompt, max_tokens=4))
        assert outputs(run_all(scheduler, runner))[id] == expected_output(prompt, 4, WINDOWS)
        check(scheduler)


def test_a_handle_holds_what_it_names_of_each_group():
    scheduler, _ = cached()
    kv, handle, node = scheduler.kv, Handle("transfer", 1), path(scheduler)[-1]
    kv.hold(handle, [(1, node.blocks[1])])
    kv.cache.clear()
    assert not kv.groups[0].cached and not kv.groups[1].cached and kv.num_held == {"transfer": 1}
    assert kv.groups[1].num_available == kv.groups[1].num_usable - 1
    kv.release(handle)
    assert kv.num_available == kv.num_usable
    check(scheduler)


def test_most_blocks_of_a_request_are_bounded_by_window_and_chunk():
    assert Retention().peak_blocks(1000, 64, 16) == 63
    assert Retention(100).peak_blocks(1000, 64, 16) == 12 and Retention(100).peak_blocks(100, 64, 16) == 7
