"""Load or compute: by what steps have taken."""

from __future__ import annotations

import random

import pytest

from quire.core.step import Move, Span, StepPlan, StepResult
from quire.kv.tiers.cost import Costs

SIZE = 16


def computed(costs: Costs, tokens: int, context: int, seconds: float) -> None:
    plan = StepPlan(0, [Span(0, context, [1] * tokens)], num_tokens=tokens)
    costs.observe(plan, StepResult(0, [], seconds))


def loaded(costs: Costs, blocks: int, seconds: float) -> None:
    plan = StepPlan(0, [], loads=[Move(block, block, b"") for block in range(blocks)])
    costs.observe(plan, StepResult(0, [], seconds, loading=seconds), len(plan.loads))


@pytest.mark.parametrize(("a", "b"), [(1e-3, 0.0), (1e-3, 1e-6), (1e-5, 1e-6)])
def test_what_a_chunk_takes_is_learnt_from_chunks_of_other_lengths_and_contexts(a: float, b: float) -> None:
    rnd, costs = random.Random(1), Costs()
    for _ in range(60):
        tokens, context = rnd.randrange(16, 2048), rnd.randrange(8192)
        noise = rnd.uniform(0.95, 1.05)
        computed(costs, tokens, context, noise * tokens * (a + b * (context + tokens / 2)))
    expected = 1024 * (a + b * (4096 + 512))
    assert costs.compute_seconds(1024, 4096) == pytest.approx(expected, rel=0.15)


def test_chunks_that_are_all_alike_are_extrapolated_by_their_tokens() -> None:
    costs = Costs()
    for _ in range(10):
        computed(costs, 64, 0, 0.064)
    assert costs.compute_seconds(640, 0) == pytest.approx(0.64)


def test_the_cheaper_way_is_chosen_and_what_is_not_known_is_tried() -> None:
    costs = Costs()
    assert costs.prefers_load("host", 2, 2 * SIZE, 0)
    computed(costs, 64, 0, 0.064)  # 1 ms a token
    assert costs.prefers_load("host", 2, 2 * SIZE, 0)
    loaded(costs, 10, 10 * SIZE * 0.0007)
    assert costs.prefers_load("host", 10, 10 * SIZE, 0)
    for _ in range(30):
        loaded(costs, 10, 10 * SIZE * 0.0009)
    assert not costs.prefers_load("host", 10, 10 * SIZE, 0)


def test_a_block_is_saved_if_loading_it_later_would_gain_more_than_that_costs() -> None:
    costs = Costs()
    assert costs.worth_saving(0.1, SIZE) and not costs.worth_saving(0.01, SIZE), "nothing is known"
    computed(costs, 64, 0, 0.064)
    plan = StepPlan(0, [], saves=[Move(block, block, b"") for block in range(10)])
    costs.observe(plan, StepResult(0, [], 0.1, saving=10 * 0.002), saved=10)  # an eighth of what computing takes
    assert costs.worth_saving(0.15, SIZE) and not costs.worth_saving(0.13, SIZE), "a seventh of what is gained"
    loaded(costs, 10, 10 * 0.012)
    assert costs.worth_saving(0.55, SIZE) and not costs.worth_saving(0.45, SIZE), "loads gain a quarter"
    loaded(costs, 10, 10 * 0.05)
    assert not costs.worth_saving(1.0, SIZE), "loading is slower"


def test_a_source_that_was_slow_is_tried_again() -> None:
    costs = Costs()
    computed(costs, 64, 0, 0.064)
    loaded(costs, 4, 4 * SIZE * 0.002)
    tries = next(count for count in range(1000) if costs.prefers_load("host", 4, 4 * SIZE, 0))
    assert 10 < tries < 100


def test_decodes_and_steps_that_save_teach_nothing_about_prompts() -> None:
    costs = Costs()
    costs.observe(StepPlan(0, [Span(0, 9, [1])], num_tokens=1), StepResult(0, [], 0.1))
    plan = StepPlan(0, [Span(0, 0, [1] * 64)], num_tokens=64, saves=[Move(1, 1, b"")])
    costs.observe(plan, StepResult(0, [], 0.1))
    assert costs.compute_seconds(64, 0) is None


def test_of_a_step_that_also_decodes_the_prompt_has_what_is_more_than_a_step_that_only_decodes_takes() -> None:
    costs = Costs()
    for _ in range(30):
        computed(costs, 1, 100, 0.05)
    for _ in range(60):
        spans = [Span(0, 0, [1] * 16), *(Span(number, 100, [1], num_sampled=1) for number in range(1, 8))]
        costs.observe(StepPlan(0, spans, num_tokens=23), StepResult(0, [], 0.09))
    assert costs.compute_seconds(16, 0) == pytest.approx(0.04)
    costs.observe(StepPlan(0, [Span(0, 0, [1] * 12)], num_tokens=12), StepResult(0, [], 9.0))
    assert costs.tokens_beside_decodes() == pytest.approx(5, abs=1), "a short chunk is neither"


def test_a_token_after_many_others_takes_longer_by_what_it_sees_and_its_chunk_by_reading_them() -> None:
    costs = Costs(pair=1 / 4000, read=1 / 10_000)
    assert (costs.in_tokens(3, 0), costs.in_tokens(3, 4000)) == (3.0, 6.0), "how long reading takes is not known yet"
    computed(costs, 1, 100, 0.05)
    computed(costs, 20, 0, 0.05)
    assert costs.in_tokens(3, 4000) == pytest.approx(4000 / 10_000 * 0.05 / 0.0025 + 6.0)
    assert [costs.most_tokens(spare, 4000) for spare in (0.9, 13.9, 14.0, 18.0, 18.1)] == [0, 2, 3, 5, 5]
    assert [costs.most_tokens(spare, 0) for spare in (1.0, 18.0)] == [1, 18]


def test_where_little_time_is_left_a_chunk_takes_as_many_tokens_as_little_more_than_one_takes() -> None:
    costs = Costs(pair=1 / 4000, read=1 / 10_000)
    computed(costs, 1, 100, 0.05)
    computed(costs, 20, 0, 0.05)
    assert costs.in_tokens(1, 40_000) == pytest.approx(80 + 11)
    assert costs.most_tokens(1.0, 40_000) == 1, "91 and a tenth of it are not enough for two of 11"
    costs = Costs(pair=1 / 40_000, read=1 / 10_000)
    computed(costs, 1, 100, 0.05)
    computed(costs, 20, 0, 0.05)
    assert costs.most_tokens(1.0, 40_000) == 5, "82 and a tenth of it are enough for five of 2"
    assert costs.most_tokens(1.0, 4000) == 1
    assert costs.most_tokens(1.0, 400) == 1, "there is nothing much to read"


def test_a_load_is_weighed_against_the_tokens_that_are_computed_in_its_time() -> None:
    costs = Costs()
    assert costs.tokens_per_load("host") == 0.0, "not known yet"
    computed(costs, 200, 0, 0.2)
    assert costs.tokens_per_load("host") == 0.0
    loaded(costs, 4, 0.02)
    assert costs.tokens_per_load("host") == pytest.approx(5.0)


def test_prompts_take_beside_decodes_what_a_quarter_of_a_step_that_decodes_takes() -> None:
    costs = Costs()
    assert costs.tokens_beside_decodes() == 0, "not known yet"
    for _ in range(30):
        computed(costs, 1, 100, 0.1)
        computed(costs, 200, 0, 0.2)
    assert costs.tokens_beside_decodes() == pytest.approx(25, abs=1)
