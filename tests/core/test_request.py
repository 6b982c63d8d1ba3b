"""What a request knows of itself, and tells the runner."""

from __future__ import annotations

from array import array

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from tests.core.fake_runner import expected_output, make_request, make_scheduler, outputs, run_all


def test_the_runner_is_told_all_that_sampling_needs():
    params = SamplingParams(seed=5, speculate=False)
    request = Request(
        7,
        [1, 2, 3],
        params,
        max_tokens=9,
        choice=2,
        stop_token_ids=frozenset([4]),
        bad_words=[[5, 6]],
        output_token_ids=[8, 9],
    )
    assert request.info() == RequestInfo(
        request=7,
        params=params,
        choice=2,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[8, 9],
        stop_token_ids=frozenset([4]),
        bad_words=[[5, 6]],
        drafting_enabled=False,
    )
    assert make_request(0, [1]).info().drafting_enabled and make_request(0, [1]).info().bad_words == []


def test_a_request_that_is_resumed_goes_on_behind_its_tokens():
    whole = expected_output([1, 2, 3], 6)
    scheduler, runner = make_scheduler()
    scheduler.add(Request(0, [1, 2, 3], SamplingParams(), max_tokens=6, output_token_ids=whole[:4]))
    updates = []
    while not scheduler.idle:
        plan = scheduler.schedule(0.0)
        updates += scheduler.commit(plan, runner.run(plan), 0.0)
    assert outputs(updates)[0] == whole[4:]


def test_key_ids_are_the_tokens_as_64_bit_integers_a_block_at_a_time():
    request = make_request(0, [1, 2, 3, 4, 5, 6, 7, 2**40])
    assert request.key_bytes(2, 4) == array("q", [3, 4]).tobytes()
    assert request.block_keys(1, 4, 2) == [array("q", pair).tobytes() for pair in ([3, 4], [5, 6], [7, 2**40])]
    request.append([9, 10])
    assert request.tokens[8:] == [9, 10] and request.block_keys(4, 5, 2) == [array("q", [9, 10]).tobytes()]


def test_a_request_with_bad_words_is_planned_ahead_as_others_are():
    """The sampler waits for the token that its mask depends on; the schedule does not."""
    scheduler, runner = make_scheduler()
    scheduler.add(Request(0, [1, 2, 3], SamplingParams(), max_tokens=4, bad_words=[[99]]))
    scheduler.add(make_request(1, [4, 5], max_tokens=4))
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    assert [[span.request for span in plan.spans] for plan in plans] == [[0, 1], [0, 1]]
    updates = [update for plan in plans for update in scheduler.commit(plan, runner.run(plan), 0.0)]
    assert outputs(updates)[0] == expected_output([1, 2, 3], 2)


def test_only_a_request_that_is_followed_is_drafted_for():
    request = make_request(0, [1, 2], max_tokens=5)
    assert request.num_draftable == 4, "the last token is never a draft"
    request.append([3])
    assert request.num_draftable == 3
    request.draft_state.drafting_enabled = False
    assert request.num_draftable == 0
    assert make_request(1, [1, 2], max_tokens=5, speculate=False).num_draftable == 0


def test_its_stats_say_when_everything_happened_and_how_long_it_took():
    """A prompt of three chunks, then two decoded tokens; each step takes a millisecond, and the clock counts steps."""
    scheduler, runner = make_scheduler(max_num_batched_tokens=12, max_num_seqs=1)
    scheduler.add(make_request(0, list(range(30)), max_tokens=3, arrived=5.0))
    updates, now = [], 10.0
    while not scheduler.idle:
        plan = scheduler.schedule(now)
        updates += scheduler.commit(plan, runner.run(plan), now + 0.5)
        now += 1.0
    stats = updates[-1].stats
    assert (stats.arrived, stats.admitted, stats.first_token, stats.finished) == (5.0, 10.0, 12.5, 14.5)
    assert (stats.steps, stats.preemptions, stats.drafted, stats.accepted) == (5, 0, 0, 0)
    assert abs(stats.prefill_seconds - 0.003) < 1e-9 and abs(stats.decode_seconds - 0.002) < 1e-9


def test_its_stats_come_with_an_end_that_no_step_brings():
    scheduler, runner = make_scheduler(block_size=4)
    for id in range(2):
        scheduler.add(make_request(id, [5] * 8, max_tokens=3, arrived=1.0))
        plan = scheduler.schedule(2.0)
        scheduler.commit(plan, runner.run(plan), 3.0)
        if id == 0:
            scheduler.abort(id, now=4.0)
        else:
            scheduler.fail(id, "wrong", 4.0)
        [update] = scheduler.take_updates()
        assert (update.stats.arrived, update.stats.first_token, update.stats.finished) == (1.0, 3.0, 4.0)
        assert update.cached_tokens == (7 if id else 0)


def test_its_stats_count_every_time_that_it_began_anew_and_say_when_it_failed():
    scheduler, runner = make_scheduler()
    scheduler.add(make_request(0, [5] * 8, max_tokens=3))
    for _ in range(3):
        scheduler.schedule(1.0)
        scheduler.restart()
    runner.broken.add(0)
    plan = scheduler.schedule(2.0)
    [update] = scheduler.commit(plan, runner.run(plan), 6.0)
    assert update.error and (update.stats.preemptions, update.stats.finished) == (3, 6.0)


def test_its_stats_count_drafts_and_those_accepted():
    prompt = [1, 2, 3]
    whole = [*prompt, *expected_output(prompt, 20)]
    half = {"drafter": lambda text, count, windows: [*whole[len(text) : len(text) + 2], 77, 77][:count]}
    scheduler, runner = make_scheduler(drafts=4, **half)
    scheduler.add(make_request(0, prompt, max_tokens=8))
    stats = run_all(scheduler, runner)[-1].stats
    assert (stats.steps, stats.drafted, stats.accepted) == (4, 4 + 3 + 0, 2 + 2 + 0)
    assert (runner.num_drafted, runner.num_accepted) == (7, 4)


def test_the_reason_for_a_stop_is_a_token_that_the_user_named_and_no_other():
    first = expected_output([5, 6, 7], 1)[0]
    for named, reason in (([first], first), (None, None)):
        scheduler, runner = make_scheduler()
        stops = frozenset([first])
        scheduler.add(make_request(0, [5, 6, 7], 9, stop_token_ids=stops))
        request = scheduler.requests[0]
        request.params = SamplingParams(stop_token_ids=named)
        update = run_all(scheduler, runner)[-1]
        assert (update.finish_reason, update.stop_reason, update.tokens) == ("stop", reason, [first])


def test_the_last_token_may_be_a_stop_token_and_ends_for_its_length_otherwise():
    second = expected_output([5, 6, 7], 2)[1]
    for stops, reason in (([second], "stop"), ([], "length")):
        scheduler, runner = make_scheduler()
        scheduler.add(make_request(0, [5, 6, 7], 2, stop_token_ids=frozenset(stops)))
        update = run_all(scheduler, runner)[-1]
        assert (update.finish_reason, update.tokens) == (reason, [second])
