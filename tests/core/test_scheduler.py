"""What the scheduler decides, in small cases with known answers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.prefix_cache import longest_run
from quire.core.request import Status
from quire.core.stages import share_of_prompts
from quire.core.step import DRAFT, FROM_PREVIOUS
from quire.core.step_state import LOOKUP_TOKENS
from quire.errors import ConfigError, RequestError, RequestTooLargeError
from tests.core.fake_runner import expected_output, make_request, make_scheduler, outputs, run_all


def run_step(scheduler, runner, now=0.0):
    plan = scheduler.schedule(now)
    return plan, scheduler.commit(plan, runner.run(plan), now)


def lengths(plan):
    return {span.request: len(span.tokens) for span in plan.spans}


@pytest.mark.scale
def test_prompts_are_filled_in_order_into_every_step():
    scheduler, runner = make_scheduler(
        num_blocks=4000, block_size=16, max_num_batched_tokens=4096, max_model_len=60_000
    )
    for id, length in enumerate((10_000, 1_000, 50_000)):
        scheduler.add(make_request(id, list(range(id, id + length)), max_tokens=1))
    plans = []
    while (plan := scheduler.schedule(0.0)) is not None:
        plans.append(plan)
        scheduler.commit(plan, runner.run(plan), 0.0)
    assert len(plans) == 15
    assert all(plan.num_tokens == 4096 for plan in plans[:-1])
    assert lengths(plans[2]) == {0: 1808, 1: 1000, 2: 1288}


def test_decodes_ride_along_with_a_long_prompt():
    scheduler, runner = make_scheduler(num_blocks=400)
    scheduler.add(make_request(0, [1, 2], max_tokens=10))
    run_step(scheduler, runner)
    scheduler.add(make_request(1, list(range(200)), max_tokens=1))
    plan, _ = run_step(scheduler, runner)
    assert lengths(plan) == {0: 1, 1: 63}


def test_a_lone_prompt_is_one_span_and_samples_once():
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(0, [5, 6, 7]))
    plan = scheduler.schedule(0.0)
    [span] = plan.spans
    assert (span.start, list(span.tokens), span.num_sampled) == (0, [5, 6, 7], 1)
    assert [info.request for info in plan.started] == [0]


def test_the_next_step_is_planned_before_the_token_is_known():
    scheduler, runner = make_scheduler()
    scheduler.add(make_request(0, [5, 6, 7], max_tokens=3))
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert second.spans[0].tokens == [FROM_PREVIOUS] and second.spans[0].start == 3
    third = scheduler.schedule(0.0)
    assert third.spans[0].start == 4
    assert scheduler.schedule(0.0) is None, "max_tokens=3 leaves nothing to plan"
    updates = []
    for plan in (first, second, third):
        updates += scheduler.commit(plan, runner.run(plan), 0.0)
    assert outputs(updates)[0] == expected_output([5, 6, 7], 3)


def pipeline(stages, **options):
    return make_scheduler(pipeline_parallel_size=stages, async_scheduling=False, **options)


def decoding(stages, count):
    """A scheduler of a pipeline with so many requests, whose prompts are computed."""
    scheduler, runner = pipeline(stages, max_num_seqs=16, num_blocks=400)
    for id in range(count):
        scheduler.add(make_request(id, [id, 7], max_tokens=40))
    run_step(scheduler, runner)
    return scheduler, runner


def test_a_pipeline_deals_decodes_out_over_its_stages():
    for stages, count in ((2, 6), (2, 7), (3, 7), (4, 3)):
        scheduler, runner = decoding(stages, count)
        in_flight, tokens, sizes = [], Counter(), []
        for _ in range(60):
            plan = scheduler.schedule(0.0)
            if plan is not None:
                ids = [span.request for span in plan.spans]
                assert not {*ids} & {span.request for other in in_flight for span in other.spans}, (
                    "its token is not known"
                )
                assert all(FROM_PREVIOUS not in span.tokens for span in plan.spans)
                in_flight.append(plan)
                sizes.append(len(ids))
            if len(in_flight) == stages or plan is None:
                done = in_flight.pop(0)
                tokens.update(span.request for span in done.spans)
                scheduler.commit(done, runner.run(done), 0.0)
        assert max(tokens.values()) - min(tokens.values()) <= 1, "all wait equally long"
        assert max(sizes) <= -(-count // stages)
        assert len(sizes) == 60 or count < stages, "there is something for every stage"


def test_with_overlap_a_pipelines_step_is_planned_before_its_tokens_are_known_and_begins_with_them():
    for stages, count in ((2, 6), (3, 7)):
        scheduler, runner = make_scheduler(pipeline_parallel_size=stages, max_num_seqs=16, num_blocks=400)
        for id in range(count):
            scheduler.add(make_request(id, [id, 7], max_tokens=40))
        run_step(scheduler, runner)
        in_flight, newest = [], dict.fromkeys(range(count), -stages)
        for _ in range(60):
            plan = scheduler.schedule(0.0)
            assert plan is not None, "there is one for every slot"
            assert len(plan.spans) <= -(-count // stages), "no more of them than without"
            for span in plan.spans:
                assert plan.number - newest[span.request] >= stages, "its last one is through when this one begins"
                newest[span.request] = plan.number
            in_flight.append(plan)
            if len(in_flight) > stages:
                done = in_flight.pop(0)
                scheduler.commit(done, runner.run(done), 0.0)
        assert all(FROM_PREVIOUS in span.tokens for span in in_flight[-1].spans)


def test_a_pipeline_goes_on_with_a_prompt_before_its_last_chunk_is_through():
    scheduler, runner = pipeline(2, num_blocks=400)
    scheduler.add(make_request(0, list(range(200)), max_tokens=2))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert [plan.spans[0].start for plan in (first, second)] == [0, 64]
    for plan in (first, second):
        scheduler.commit(plan, runner.run(plan), 0.0)


@pytest.mark.parametrize(
    ("prompts", "share", "options"),
    [
        ([1000], 125, {}),
        ([100, 200, 300], 75, {}),
        ([300], 64, {}),  # of fewer tokens, reading the weights takes too much of a step
        ([3000] * 9, 2048, {}),
        ([1000], 1000, {"enable_chunked_prefill": False}),
        ([1000], 50, {"max_num_batched_tokens": 50}),
    ],
)
def test_a_pipelines_prompts_are_dealt_out_over_four_steps_a_stage(prompts, share, options):
    scheduler, _ = pipeline(2, num_blocks=4000, **{"max_num_batched_tokens": 2048, **options})
    for id, length in enumerate(prompts):
        scheduler.add(make_request(id, [id, *range(length - 1)], max_tokens=1))
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    assert [plan.num_tokens for plan in plans if plan] == [share, share][: sum(prompts) // share]


def test_drafts_in_a_pipeline_have_all_of_the_budget_where_there_are_no_prompts():
    assert share_of_prompts([], 2, 2048) == 2048
    assert share_of_prompts([make_request(0, [5])], 2, 2048) == 2048


def test_in_a_pipeline_the_oldest_partial_prefill_goes_first():
    scheduler, runner = pipeline(2, num_blocks=400, max_num_partial_prefills=2)
    for id in (0, 1):
        scheduler.add(make_request(id, list(range(200 * id, 200 * id + 100)), max_tokens=2))
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    assert lengths(plans[1]) == {0: 36, 1: 28}
    for plan in plans:
        scheduler.commit(plan, runner.run(plan), 0.0)


def test_steps_must_commit_in_order():
    scheduler, runner = make_scheduler()
    scheduler.add(make_request(0, [5, 6, 7]))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    results = [runner.run(first), runner.run(second)]
    with pytest.raises(RuntimeError, match="must commit next"):
        scheduler.commit(second, results[1], 0.0)


def test_a_stop_token_ends_a_request_and_drops_the_surplus_step():
    first = expected_output([5, 6, 7], 1)[0]
    scheduler, runner = make_scheduler()
    scheduler.add(make_request(0, [5, 6, 7], max_tokens=9, stop_token_ids=frozenset([first])))
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    updates = [u for plan in plans for u in scheduler.commit(plan, runner.run(plan), 0.0)]
    assert outputs(updates)[0] == [first]
    assert [update.finish_reason for update in updates] == ["stop"]
    assert scheduler.idle and scheduler.kv.num_available == scheduler.kv.num_usable


def test_min_tokens_lets_a_stop_token_pass():
    first, second = expected_output([5, 6, 7], 2)
    scheduler, runner = make_scheduler()
    request = make_request(0, [5, 6, 7], 9, min_tokens=2, stop_token_ids=frozenset([first, second]))
    scheduler.add(request)
    assert outputs(run_all(scheduler, runner))[0] == [first, second]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    scheduler, _ = make_scheduler(num_blocks=5, block_size=4)
    with pytest.raises(RequestTooLargeError, match=r"10 tokens and max_tokens=8 need 5 KV blocks.*pool has 4"):
        scheduler.add(make_request(0, list(range(10)), max_tokens=8))
    scheduler.add(make_request(1, list(range(10)), max_tokens=7))


def test_a_request_longer_than_a_context_is_refused():
    """As an engine that computes prompts for one with longer contexts may be asked: its block tables end there."""
    scheduler, _ = make_scheduler(max_model_len=10)
    with pytest.raises(RequestTooLargeError, match="11 tokens and max_tokens=0 do not fit into a context of 10 tokens"):
        scheduler.add(make_request(0, list(range(11)), max_tokens=0))
    scheduler.add(make_request(1, list(range(10)), max_tokens=0))
    scheduler.add(make_request(2, list(range(6)), max_tokens=5))


@pytest.mark.scale
@pytest.mark.parametrize("length", [1, 7, 8, 9])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("drafts", [0, 4])
def test_a_request_runs_in_a_pool_that_holds_all_its_tokens_but_the_last(length, max_tokens, drafts):
    needed = -(-(length + max(0, max_tokens - 1)) // 4)
    prompt = list(range(length))
    scheduler, runner = make_scheduler(num_blocks=1 + needed, block_size=4, drafts=drafts)
    scheduler.add(make_request(0, prompt, max_tokens=max_tokens))
    updates = run_all(scheduler, runner, depth=1)
    assert outputs(updates)[0] == expected_output(prompt, max_tokens)
    assert updates[-1].finish_reason == "length"
    scheduler, _ = make_scheduler(num_blocks=needed, block_size=4)
    with pytest.raises(RequestTooLargeError, match=f"need {needed} KV blocks"):
        scheduler.add(make_request(0, prompt, max_tokens=max_tokens))


def test_max_tokens_0_samples_nothing_and_ends_with_the_prompts_last_row():
    scheduler, runner = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2, drafts=4)
    scheduler.add(make_request(0, list(range(20)), max_tokens=0, prompt_logprobs=0))
    spans, updates = [], []
    for number in range(3):
        plan, got = run_step(scheduler, runner, float(number))
        spans += [(span.start, len(span.tokens), span.num_sampled) for span in plan.spans]
        updates += got
    assert spans == [(0, 8, 0), (8, 8, 0), (16, 4, 0)] and scheduler.idle
    assert [update.finish_reason for update in updates] == [None, None, "length"]
    assert sum(len(update.prompt_logprobs) for update in updates) == 19
    assert updates[-1].stats.first_token is None


def test_an_id_in_use_is_refused():
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(0, [1]))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request(0, [2]))


def test_the_latest_arrival_is_preempted_and_finishes_with_the_same_tokens():
    scheduler, runner = make_scheduler(num_blocks=9, block_size=4)
    for id in range(2):
        scheduler.add(make_request(id, [id] * 8, max_tokens=20 if id == 0 else 16))
    updates = run_all(scheduler, runner)
    assert scheduler.num_preemptions > 0
    stats = {update.request: update.stats for update in updates if update.stats}
    assert stats[0].preemptions == 0 and stats[1].preemptions > 0
    assert outputs(updates) == {0: expected_output([0] * 8, 20), 1: expected_output([1] * 8, 16)}


def test_under_fcfs_admission_never_preempts():
    scheduler, runner = make_scheduler(num_blocks=5, block_size=4)
    scheduler.add(make_request(0, [1] * 12, max_tokens=4, priority=5))
    run_step(scheduler, runner)
    scheduler.add(make_request(1, [2] * 12, max_tokens=4, priority=0))
    run_step(scheduler, runner)
    assert scheduler.num_preemptions == 0 and scheduler.requests[1].status is Status.WAITING


def test_under_priority_a_waiting_request_preempts_a_lower_one_for_blocks_and_for_a_seat():
    for limits in ({"num_blocks": 5}, {"max_num_seqs": 1}):
        scheduler, runner = make_scheduler(block_size=4, scheduling_policy="priority", **limits)
        scheduler.add(make_request(0, [1] * 12, max_tokens=4, priority=5))
        run_step(scheduler, runner)
        scheduler.add(make_request(1, [2] * 12, max_tokens=4, priority=0))
        plan, _ = run_step(scheduler, runner)
        assert lengths(plan) == {1: 12}
        updates = run_all(scheduler, runner)
        assert [update.request for update in updates if update.finish_reason] == [1, 0]


def test_the_head_of_the_queue_is_not_bypassed_for_blocks():
    scheduler, runner = make_scheduler(num_blocks=9, block_size=4, prefix_cache="off")
    scheduler.add(make_request(0, [1] * 20, max_tokens=4))
    run_step(scheduler, runner)
    scheduler.add(make_request(1, [2] * 24, max_tokens=4))
    scheduler.add(make_request(2, [3] * 4, max_tokens=4))
    plan, _ = run_step(scheduler, runner)
    assert lengths(plan) == {0: 1}, "request 2 would fit, but request 1 came first"


def test_requests_with_a_common_prefix_wait_for_the_one_that_computes_it():
    scheduler, runner = make_scheduler(num_blocks=100, block_size=4, max_num_batched_tokens=200)
    common = list(range(40))
    for id in range(4):
        scheduler.add(make_request(id, [*common, id, id], max_tokens=2))
    plan = scheduler.schedule(0.0)
    assert lengths(plan) == {0: 42}
    assert [scheduler.requests[id].status for id in (1, 2, 3)] == [Status.AWAITING] * 3
    scheduler.commit(plan, runner.run(plan), 0.0)
    plan, _ = run_step(scheduler, runner)
    assert lengths(plan) == {0: 1, 1: 2, 2: 2, 3: 2}


def test_when_the_leader_ends_its_followers_compute_for_themselves():
    for end in ("abort", "break"):
        scheduler, runner = make_scheduler(num_blocks=100, block_size=4, max_num_batched_tokens=200)
        for id in range(2):
            scheduler.add(make_request(id, [*range(40), id], max_tokens=2))
        if end == "break":
            runner.broken.add(0)
        plan = scheduler.schedule(0.0)
        assert scheduler.requests[1].status is Status.AWAITING
        if end == "abort":
            scheduler.abort(0)
        updates = scheduler.commit(plan, runner.run(plan), 0.0) + run_all(scheduler, runner)
        assert outputs(updates)[1] == expected_output([*range(40), 1], 2)


def test_nobody_waits_for_a_prefix_that_one_behind_him_computes():
    scheduler, runner = make_scheduler(
        num_blocks=400, block_size=4, max_num_batched_tokens=16, scheduling_policy="priority"
    )
    prompt = list(range(100))
    scheduler.add(make_request(0, prompt, max_tokens=1, priority=9))
    run_step(scheduler, runner)
    for id in range(1, 20):
        scheduler.add(make_request(id, [id] * 30, max_tokens=1, priority=5))
    scheduler.add(make_request(20, prompt, max_tokens=1, priority=0))
    scheduler.add(make_request(21, prompt, max_tokens=1, priority=0))
    run_step(scheduler, runner)
    assert scheduler.requests[20].status is Status.RUNNING
    updates = run_all(scheduler, runner)
    assert [update.request for update in updates if update.finish_reason][:2] == [20, 21]
    assert outputs(updates)[0] == expected_output(prompt, 1)


def test_an_aborted_request_is_over_at_once_and_its_late_result_does_nothing():
    scheduler, runner = make_scheduler()
    scheduler.add(make_request(0, [1, 2, 3]))
    plan = scheduler.schedule(0.0)
    scheduler.abort(0)
    assert scheduler.kv.num_deferred > 0, "the step in flight still writes its blocks"
    [update] = scheduler.commit(plan, runner.run(plan), 0.0)
    assert (update.finish_reason, update.tokens) == ("abort", [])
    assert scheduler.kv.num_available == scheduler.kv.num_usable


@pytest.mark.scale
def test_aborts_in_a_long_queue_leave_nothing_behind():
    scheduler, runner = make_scheduler()
    for id in range(5000):
        scheduler.add(make_request(id, [1, 2, 3]))
    for id in range(1, 5000):
        scheduler.abort(id)
    assert len(scheduler._waiting._heap) < 200
    assert len(outputs(run_all(scheduler, runner))[0]) == 4


def test_non_finite_logits_end_that_request_alone_and_its_blocks_are_not_shared():
    scheduler, runner = make_scheduler()
    runner.broken.add(0)
    scheduler.add(make_request(0, [1] * 12))
    scheduler.add(make_request(1, [2] * 12))
    updates = run_all(scheduler, runner)
    ends = {update.request: (update.finish_reason, update.error) for update in updates if update.finish_reason}
    assert ends == {0: ("error", "logits are not finite"), 1: ("length", None)}
    scheduler.add(make_request(2, [1] * 12))
    assert run_all(scheduler, runner)[-1].cached_tokens == 0


def test_without_chunking_a_prompt_waits_until_a_step_holds_all_of_it():
    scheduler, runner = make_scheduler(num_blocks=100, enable_chunked_prefill=False)
    scheduler.add(make_request(0, [1] * 40, max_tokens=2))
    scheduler.add(make_request(1, [2] * 40, max_tokens=2))
    assert lengths(run_step(scheduler, runner)[0]) == {0: 40}
    assert lengths(run_step(scheduler, runner)[0]) == {0: 1, 1: 40}


def test_a_threshold_and_partial_prefills_let_prompts_share_a_step():
    scheduler, runner = make_scheduler(
        num_blocks=200, long_prefill_token_threshold=20, max_num_partial_prefills=2, prefix_cache="off"
    )
    for id in range(3):
        scheduler.add(make_request(id, [id] * 100, max_tokens=1))
    assert lengths(run_step(scheduler, runner)[0]) == {0: 20, 1: 20}
    scheduler, runner = make_scheduler(num_blocks=200, long_prefill_token_threshold=20, prefix_cache="off")
    for id in range(3):
        scheduler.add(make_request(id, [id] * 100, max_tokens=1))
    assert lengths(run_step(scheduler, runner)[0]) == {0: 20}


def test_a_partial_prefill_leaves_room_for_one_of_higher_priority():
    scheduler, runner = make_scheduler(num_blocks=400, scheduling_policy="priority")
    scheduler.add(make_request(0, list(range(1000)), max_tokens=1, priority=9))
    run_step(scheduler, runner)
    scheduler.add(make_request(1, [1, 2, 3], max_tokens=1, priority=0))
    plan, _ = run_step(scheduler, runner)
    assert lengths(plan) == {0: 61, 1: 3}, "it goes first, and what it leaves is used"


def test_nobody_is_preempted_for_one_who_would_not_fit_all_the_same():
    scheduler, runner = make_scheduler(num_blocks=21, block_size=4, scheduling_policy="priority", prefix_cache="off")
    for id, priority, blocks in ((0, 0, 9), (1, 9, 9)):
        scheduler.add(make_request(id, [id] * (4 * blocks - 3), max_tokens=3, priority=priority))
        run_step(scheduler, runner)
    scheduler.add(make_request(2, [2] * 58, max_tokens=2, priority=5))
    run_step(scheduler, runner)
    assert scheduler.num_preemptions == 0


def test_nobody_is_preempted_for_blocks_that_a_step_in_flight_will_free():
    scheduler, runner = make_scheduler(num_blocks=9, block_size=4, scheduling_policy="priority", prefix_cache="off")
    for id in (0, 1):
        scheduler.add(make_request(id, [id] * 12, max_tokens=3, priority=9))
    plan = scheduler.schedule(0.0)
    scheduler.abort(1)
    scheduler.add(make_request(2, [2] * 16, max_tokens=1, priority=0))
    later = scheduler.schedule(0.0)
    assert lengths(later) == {0: 1}
    for each, result in [(each, runner.run(each)) for each in (plan, later)]:
        scheduler.commit(each, result, 0.0)
    assert lengths(run_step(scheduler, runner)[0]) == {0: 1, 2: 16} and scheduler.num_preemptions == 0


def test_nobody_is_preempted_for_blocks_that_others_hold_too():
    scheduler, runner = make_scheduler(num_blocks=27, block_size=4, scheduling_policy="priority")
    common = list(range(40))
    for id, priority in ((0, 0), (1, 9), (2, 9), (3, 9), (4, 9)):
        scheduler.add(make_request(id, [*common, id, id, id], max_tokens=30, priority=priority))
        run_step(scheduler, runner)
    assert len(scheduler.running) == 5
    counts = scheduler.kv.groups[0].pool.ref_counts
    own = sum(counts[block] == 1 for request in scheduler.running[1:] for block in request.tables[0])
    assert 0 < own < sum(len(request.tables[0]) for request in scheduler.running[1:]) / 2
    room = scheduler.kv.num_available + own
    assert room < 15, "it would be computed in one step"
    scheduler.add(make_request(5, [77] * (4 * room + 1), max_tokens=1, priority=5))
    run_step(scheduler, runner)
    assert scheduler.num_preemptions == 0, "one block too many would be needed"


# -- a step's scheduling does not take longer for a long queue ----------------------------------------------


@pytest.fixture
def hashed(monkeypatch):
    """How many blocks have been hashed so far, as a list of one number."""
    count, chain = [0], BlockHasher.chain

    def counting(self, parent, keys):
        keys = list(keys)
        count[0] += len(keys)
        return chain(self, parent, keys)

    monkeypatch.setattr(BlockHasher, "chain", counting)
    return count


@pytest.mark.scale
def test_a_prompt_that_many_requests_share_is_hashed_once_and_few_are_held_at_a_time(hashed):
    scheduler, runner = make_scheduler(num_blocks=2000, block_size=4, long_prefill_token_threshold=20)
    prompt = list(range(1000))
    for id in range(3000):
        scheduler.add(make_request(id, prompt, max_tokens=1))
    for _ in range(3):
        run_step(scheduler, runner)
        assert hashed == [250]
        held = [request for request in scheduler.requests.values() if request.status is Status.AWAITING]
        assert len(held) == scheduler.config.max_num_seqs
    for id in range(20, 3000):
        scheduler.abort(id)
    made = outputs(run_all(scheduler, runner))
    assert [made[id] for id in range(20)] == [expected_output(prompt, 1)] * 20


def test_those_who_are_not_held_pass_by_those_who_are():
    scheduler, runner = make_scheduler(num_blocks=2000, block_size=4, max_num_seqs=8)
    for id in range(7):
        scheduler.add(make_request(id, list(range(100)), max_tokens=1))
    scheduler.add(make_request(7, [1, 2, 3], max_tokens=1))
    run_step(scheduler, runner)
    plan, _ = run_step(scheduler, runner)
    assert set(lengths(plan)) >= {0, 7}


def test_a_step_looks_up_a_bounded_number_of_prompt_tokens(hashed):
    limits = {"max_num_seqs": 16, "long_prefill_token_threshold": 4, "max_num_partial_prefills": 2}
    scheduler, runner = make_scheduler(num_blocks=9_000, block_size=16, max_model_len=2**18, **limits)
    common = list(range(2**15))
    for id in range(12):  # each begins otherwise than the one before, with which it would share hashes
        scheduler.add(make_request(id, [id % 2, *common, *[id] * 19], max_tokens=1))
    run_step(scheduler, runner)
    assert 0 < hashed[0] * 16 <= LOOKUP_TOKENS + 2**16
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    assert hashed[0] == 12 * (2**15 // 16 + 1), "the others' turn comes in the next steps"


@pytest.mark.scale
def test_prompts_that_were_hashed_while_they_waited_for_a_prefix_fill_the_next_step(hashed):
    scheduler, runner = make_scheduler(
        num_blocks=9_000, block_size=16, max_num_seqs=64, max_num_batched_tokens=2**13, max_model_len=2**13
    )
    for id in range(64):
        scheduler.add(make_request(id, [*range(2**12), *[id] * 256], max_tokens=1))
    first = scheduler.schedule(0.0)
    assert lengths(first) == {0: 2**12 + 256}
    assert scheduler.schedule(0.0) is None, "but it has looked up some more prompts"
    scheduler.commit(first, runner.run(first), 0.0)
    plan, _ = run_step(scheduler, runner)
    assert len(plan.spans) == 32 and plan.num_tokens == 2**13
    run_all(scheduler, runner)
    assert hashed[0] == 64 * 16 + 2**12 // 16, "the prefix was hashed once"


def test_a_cached_prefix_is_found_in_few_lookups():
    for length in (0, 1, 2, 1000, 8192):
        for cached in {0, 1, length // 3, length - 1, length} & set(range(length + 1)):
            asked = []

            def found(each, cached=cached, asked=asked):
                asked.append(each)
                return int.from_bytes(each, "big") < cached

            assert longest_run([i.to_bytes(4, "big") for i in range(length)], length, found) == cached
            assert len(asked) <= 15


# -- owners take turns --------------------------------------------------------------------------------------


def flood(scheduler, owner, ids, **fields):
    for id in ids:
        scheduler.add(make_request(id, list(range(id, id + 6)), owner=owner, **fields))


@pytest.mark.scale
def test_an_owner_who_floods_the_queue_does_not_keep_others_from_running():
    scheduler, runner = make_scheduler(num_blocks=2000)
    flood(scheduler, "a", range(300), max_tokens=50)
    for _ in range(3):
        run_step(scheduler, runner)
    assert {request.owner for request in scheduler.running} == {"a"} and len(scheduler.running) == 8
    flood(scheduler, "b", [300], max_tokens=50)
    plan, _ = run_step(scheduler, runner)
    assert lengths(plan)[300] == 6, "it gets the seat of the last one that runs"
    assert scheduler.num_preemptions == 1
    again = {update.request: update for update in run_all(scheduler, runner) if update.finish_reason}
    assert len(again) == 301 and all(update.finish_reason == "length" for update in again.values())


def test_owners_share_the_seats_and_one_alone_has_them_all():
    scheduler, runner = make_scheduler(num_blocks=2000)
    for owner, first in (("a", 0), ("b", 100), ("c", 200)):
        flood(scheduler, owner, range(first, first + 40), max_tokens=30)
        run_step(scheduler, runner)
        run_step(scheduler, runner)
    seats = Counter()
    for _ in range(150):
        plan, _ = run_step(scheduler, runner)
        seats.update("abc"[span.request // 100] for span in plan.spans)
    assert all(360 <= seats[owner] <= 440 for owner in "abc"), seats
    for id in range(100, 300):
        scheduler.abort(id)
    plan, _ = run_step(scheduler, runner)
    assert len(plan.spans) == 8 and all(span.request < 100 for span in plan.spans)


def test_an_owner_who_keeps_coming_does_not_starve_one_who_was_there():
    scheduler, runner = make_scheduler(num_blocks=2000)
    flood(scheduler, "a", range(16), max_tokens=8)
    ends = []
    for step in range(150):
        flood(scheduler, "b", range(100 + 10 * step, 105 + 10 * step), max_tokens=8)
        _, updates = run_step(scheduler, runner)
        ends += [update.request for update in updates if update.finish_reason]
    assert ends.index(15) < 45, "a had 16 of the first 32, or nearly so"
    assert [id for id in ends if id < 16] == sorted(id for id in ends if id < 16), "in the order of arrival"


def test_an_owner_who_comes_later_begins_among_those_that_run_and_makes_up_for_nothing():
    scheduler, runner = make_scheduler(num_blocks=2000)
    flood(scheduler, "a", range(100), max_tokens=5)
    ends = []
    while len(ends) < 50:
        ends += [update.request for update in run_step(scheduler, runner)[1] if update.finish_reason]
    flood(scheduler, "b", range(100, 140), max_tokens=5)
    later = [update.request for update in run_all(scheduler, runner) if update.finish_reason]
    assert 15 <= sum(id >= 100 for id in later[:40]) <= 25


def test_one_owner_alone_is_served_by_arrival_and_never_preempted_for_turns():
    scheduler, runner = make_scheduler(num_blocks=2000)
    flood(scheduler, "a", range(40), max_tokens=5)
    ends = [update.request for update in run_all(scheduler, runner) if update.finish_reason]
    assert ends == list(range(40)) and scheduler.num_preemptions == 0


def test_service_is_by_arrival_whatever_the_numbers_of_requests():
    """Each HTTP process numbers its own requests, with its index in the high bits."""
    scheduler, runner = make_scheduler(num_blocks=2000, max_num_seqs=1)
    numbers = [(worker << 40) + count for count in range(3) for worker in (2, 0, 1)]
    for number in numbers:
        scheduler.add(make_request(number, [number % 50] * 6, max_tokens=2))
    assert [update.request for update in run_all(scheduler, runner) if update.finish_reason] == numbers


def test_priority_goes_before_turns():
    scheduler, runner = make_scheduler(num_blocks=2000, scheduling_policy="priority")
    flood(scheduler, "a", range(20), max_tokens=5, priority=0)
    flood(scheduler, "b", range(20, 22), max_tokens=5, priority=1)
    ends = [update.request for update in run_all(scheduler, runner) if update.finish_reason]
    assert ends[-2:] == [20, 21]


def test_in_a_tight_pool_a_partial_match_is_not_copied():
    scheduler, runner = make_scheduler(num_blocks=5, block_size=4)
    scheduler.add(make_request(0, [1, 2], max_tokens=1))
    run_all(scheduler, runner)
    scheduler.add(make_request(1, [1, 2] + [9] * 13, max_tokens=1))
    assert outputs(run_all(scheduler, runner))[1] == expected_output([1, 2] + [9] * 13, 1)


def test_a_match_that_holds_more_than_a_window_needs_does_not_stall_a_lone_request():
    scheduler, runner = make_scheduler(num_blocks=12, block_size=4, windows=(9,), max_num_batched_tokens=16)
    first = [n % 7 for n in range(43)]
    scheduler.add(make_request(0, first, max_tokens=1))
    run_all(scheduler, runner)
    second = first[:40] + [5] * 40
    scheduler.add(make_request(1, second, max_tokens=2))
    assert outputs(run_all(scheduler, runner))[1] == expected_output(second, 2, windows=(9,))


def test_a_preempted_request_keeps_the_tokens_of_a_step_that_was_in_flight():
    scheduler, runner = make_scheduler(num_blocks=9, block_size=4)
    for id in range(2):
        scheduler.add(make_request(id, [id] * 8, max_tokens=16))
    updates = run_all(scheduler, runner, depth=1)
    assert scheduler.num_preemptions > 0
    assert outputs(updates) == {id: expected_output([id] * 8, 16) for id in range(2)}


def test_prompt_logprobs_are_given_once_for_each_token_after_the_first():
    scheduler, runner = make_scheduler(num_blocks=100, max_num_batched_tokens=13)
    prompt = list(range(30))
    scheduler.add(make_request(0, prompt, max_tokens=1))
    run_all(scheduler, runner)
    scheduler.add(make_request(1, prompt, max_tokens=1, prompt_logprobs=0))
    updates = run_all(scheduler, runner)
    scored = [entry for update in updates for entry in update.prompt_logprobs or []]
    assert [entry.ids[0] for entry in scored] == prompt[1:]
    assert [entry.values[0] for entry in scored] == [float(p) for p in range(29)]


def test_budgets_that_could_starve_a_prompt_are_refused():
    with pytest.raises(ConfigError, match="could starve a prompt"):
        EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=64)


def test_a_sliding_window_frees_the_blocks_it_has_passed():
    scheduler, runner = make_scheduler(num_blocks=12, block_size=4, windows=(9,), max_num_batched_tokens=16)
    prompt = [n % 7 for n in range(100)]
    scheduler.add(make_request(0, prompt, max_tokens=60))
    updates = run_all(scheduler, runner)
    assert outputs(updates)[0] == expected_output(prompt, 60, windows=(9,))
    assert scheduler.num_preemptions == 0


@pytest.mark.scale
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 2])
@pytest.mark.parametrize("room", [60, 160])
def test_a_row_that_drafts_spoil_is_computed_again_with_all_that_it_sees(room, block_size, depth):
    """Steps in flight are planned before anybody knows that it failed: its window must not have passed meanwhile."""
    for seed in range(10):
        rnd = random.Random(seed)
        scheduler, runner = make_scheduler(
            room // block_size + 2, block_size, windows=(9,), drafts=3, prefix_cache="off"
        )
        runner.spoils = lambda rnd=rnd: rnd.random() < 0.3
        prompts = [[rnd.randrange(3) for _ in range(rnd.randrange(1, 20))] for _ in range(6)]
        for id, prompt in enumerate(prompts):
            scheduler.add(make_request(id, prompt, max_tokens=40))
        made = outputs(run_all(scheduler, runner, depth))
        assert [made[id] for id in range(6)] == [expected_output(prompt, 40, (9,)) for prompt in prompts]


def test_self_tuning_learns_of_steps_without_parts_of_prompts_and_of_no_others():
    scheduler, runner = make_scheduler(num_blocks=17, block_size=4, drafts=3, adaptive=True)
    assert scheduler._lengths is not None
    told: list[bool] = []
    scheduler._lengths.observe_step = lambda result, tuned: told.append(tuned)  # type: ignore[method-assign]
    for id in range(4):
        scheduler.add(make_request(id, [id // 2, 1, 2, 3, 4], max_tokens=30))  # of every other one, 4 are cached
    plans = []
    for step in range(1000):
        plan = scheduler.schedule(float(step))
        if plan is None:
            break
        plans.append([[token for token in span.tokens if token != DRAFT] for span in plan.spans])
        scheduler.commit(plan, runner.run(plan), float(step))
    assert scheduler.idle and scheduler.num_preemptions > 0  # what was made before is computed again, as a prompt is
    assert told == [all(len(tokens) == 1 for tokens in spans) for spans in plans]
    assert True in told and told.count(False) > 1
