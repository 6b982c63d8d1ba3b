"""Recurrent layers' blocks: which of them are there, where a prompt is found, and that nothing changes a token."""

from __future__ import annotations

import random

import pytest

from quire.core.block_pool import NULL_BLOCK
from quire.core.invariants import check
from quire.core.kv_group import Retention, States
from quire.core.prefix_cache import Match
from tests.core.fake_runner import (
    INTERVAL,
    STATE,
    expected_output,
    make_request,
    make_scheduler,
    matched,
    outputs,
    run_all,
)

WINDOWS = (None, STATE)
SIZE = 4


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(1000), k=length)


def started(num_blocks=(400, 60), **options):
    return make_scheduler(list(num_blocks), SIZE, WINDOWS, **{"max_num_batched_tokens": 64, **options})


def complete(scheduler, runner, id, prompt, max_tokens=3):
    scheduler.add(make_request(id, prompt, max_tokens=max_tokens))
    updates = run_all(scheduler, runner)
    check(scheduler)
    assert outputs(updates)[id] == expected_output(prompt, max_tokens, WINDOWS)
    return updates[-1].cached_tokens


def test_a_step_takes_blocks_only_where_another_may_go_on_and_at_marks():
    scheduler, _ = started(max_num_batched_tokens=50)
    scheduler.add(make_request(0, prompt_of(99)))
    scheduler.schedule(0.0)
    [request] = scheduler.running
    there = [index for index, block in enumerate(request.tables[1]) if block != NULL_BLOCK]
    assert NULL_BLOCK not in request.tables[0] and len(request.tables[1]) == 13
    assert there == [INTERVAL - 1, 2 * INTERVAL - 1, 3 * INTERVAL - 1, 11, 12]
    check(scheduler)


def test_a_prompt_is_found_where_an_equal_one_could_go_on():
    scheduler, runner = started()
    prompt = prompt_of(42)
    assert complete(scheduler, runner, 0, prompt) == 0
    assert matched(scheduler, prompt) == 41, "its state is that of 40 tokens, and a row follows"
    assert complete(scheduler, runner, 1, prompt) == 41


@pytest.mark.parametrize("length", range(41, 51))
def test_an_equal_prompt_goes_on_in_its_last_block_however_long_the_reply_was(length):
    scheduler, runner = started()
    first, second = (complete(scheduler, runner, id, prompt_of(length), max_tokens=9) for id in range(2))
    assert first == 0 and (length - 1) // SIZE * SIZE <= second < length


def test_whoever_continues_a_reply_goes_on_at_its_end():
    scheduler, runner = started()
    prompt = prompt_of(21)
    complete(scheduler, runner, 0, prompt, max_tokens=12)
    text = prompt + expected_output(prompt, 12, WINDOWS)
    assert matched(scheduler, [*text, 1, 2]) == 32, "of the last token nothing is known but that it was sampled"


def test_the_third_request_of_a_shared_prefix_is_found_at_the_branch():
    scheduler, runner = started()
    shared = prompt_of(42)
    found = [complete(scheduler, runner, id, [*shared, *prompt_of(9, seed=id + 1)]) for id in range(4)]
    assert found == [0, 36, 40, 40]


def test_where_a_state_was_evicted_a_match_ends_at_the_one_before_it():
    scheduler, runner = started()
    prompt = prompt_of(50)
    complete(scheduler, runner, 0, prompt, max_tokens=1)
    group, places = scheduler.kv.groups[1], [matched(scheduler, [*prompt, 1])]
    by_depth = {len(list(Match(node).nodes())): block for block, node in group.idle.items()}
    for _, block in sorted(by_depth.items(), reverse=True):
        group.idle.move_to_end(block, last=False)
        scheduler.kv.cache.evict(1, 1)
        places.append(matched(scheduler, [*prompt, 1]))
    assert places == [50, 48, 36, 24, 12, 0], "the prompt's end, with rows after it and without, and every third block"
    check(scheduler)


def test_a_pool_without_room_for_marks_serves_requests_all_the_same():
    scheduler, runner = started((400, 1 + 2 * 3), max_num_seqs=3, max_num_batched_tokens=40)
    prompts = [prompt_of(70, seed) for seed in range(6)]
    for id, prompt in enumerate(prompts):
        scheduler.add(make_request(id, prompt, max_tokens=9))
    made = outputs(run_all(scheduler, runner))
    assert made == {id: expected_output(prompt, 9, WINDOWS) for id, prompt in enumerate(prompts)}
    check(scheduler)


def test_a_request_that_gives_way_goes_on_from_where_it_was():
    scheduler, runner = started((30, 40), max_num_seqs=3, max_num_batched_tokens=64)
    prompts = [prompt_of(30, seed) for seed in range(3)]
    for id, prompt in enumerate(prompts):
        scheduler.add(make_request(id, prompt, max_tokens=20))
    made = outputs(run_all(scheduler, runner))
    assert made == {id: expected_output(prompt, 20, WINDOWS) for id, prompt in enumerate(prompts)}
    assert scheduler.num_preemptions > 0


def test_most_blocks_of_a_request_are_few_whatever_its_length():
    assert Retention(17, States(96)).peak_blocks(100_000, 2048, 16) == 4
    assert Retention(17, States(96, uncertain=6)).peak_blocks(100_000, 2048, 16) == 5
    assert Retention(17, States(96)).peak_blocks(20, 2048, 16) == 2


def test_token_by_token_a_request_needs_two_states_and_no_more():
    assert Retention(17, States(96)).peak_blocks(100, 1, 16) == 2
    assert Retention(17, States(96)).peak_blocks(100, 2, 16) == 4
    scheduler, runner = started((400, 1 + 2), long_prefill_token_threshold=1, min_chunk=1)
    complete(scheduler, runner, 0, prompt_of(30), max_tokens=9)


@pytest.mark.scale
@pytest.mark.parametrize("seed", range(60))
def test_nothing_around_a_request_changes_its_tokens(seed):
    rnd = random.Random(seed)
    size, depth, drafts = rnd.choice([1, 2, 4, 8]), rnd.choice([0, 1, 2]), rnd.choice([0, 0, 1, 3, 8])
    windows = rnd.choice([(None, STATE), (None, STATE), (None, 9, STATE)])
    pools = [rnd.choice([60, 160]) // size + 4 for _ in windows]
    pools[-1] = min(pools[-1], rnd.choice([8, 12, 30, 200]) + -(-drafts // size))
    scheduler, runner = make_scheduler(
        pools,
        size,
        windows,
        prefix_cache=rnd.choice(["radix", "radix", "hash", "off"]),
        max_num_seqs=rnd.choice([2, 8]),
        max_num_batched_tokens=rnd.choice([12, 20, 64]),
        max_num_partial_prefills=rnd.choice([1, 2]),
        drafts=drafts,
    )
    prompts: list[list[int]] = []
    flying, updates = [], []
    for step in range(4000):
        if len(prompts) < 25 and rnd.random() < 0.3:
            base = rnd.choice(prompts)[: rnd.randrange(1, 40)] if prompts and rnd.random() < 0.7 else []
            prompts.append(base + [rnd.randrange(3) for _ in range(rnd.randrange(1, 12))])
            scheduler.add(make_request(len(prompts) - 1, prompts[-1], rnd.randrange(1, 15)))
        for number, group in enumerate(scheduler.kv.groups):
            if group.idle and rnd.random() < 0.2:
                group.idle.move_to_end(rnd.choice(list(group.idle)), last=False)
                scheduler.kv.cache.evict(number, 1)
        plan = scheduler.schedule(float(step))
        if plan:
            flying.append((plan, runner.run(plan)))
        if not plan and not flying and len(prompts) == 25:
            break
        if flying and (not plan or len(flying) > depth):
            updates += scheduler.commit(*flying.pop(0), float(step))
            check(scheduler)
    assert scheduler.idle
    made = outputs(updates)
    assert made == {id: expected_output(prompt, len(made[id]), windows) for id, prompt in enumerate(prompts)}
    assert max(update.stats.preemptions for update in updates if update.stats) <= 8
