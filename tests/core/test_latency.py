"""The prompt share of a step under a latency target, on steps whose time is known exactly."""

from __future__ import annotations

import random

import pytest

from quire.core.latency import LatencyTarget

BASE, EACH = 0.010, 0.0005


def seconds(tokens):
    return BASE + EACH * tokens


def test_before_anything_is_known_a_step_takes_the_least():
    assert LatencyTarget(0.050, 8).budget(512) == 8
    assert LatencyTarget(0.050, 8).budget(3) == 3


def test_while_all_shares_are_equal_a_little_more_is_tried():
    target = LatencyTarget(0.050, 8)
    for _ in range(20):
        target.observe(40, seconds(40))
    assert 46 <= target.budget(512) <= 48
    assert target.budget(30) == 30


@pytest.mark.parametrize("seed", range(5))
def test_the_share_is_what_takes_the_step_to_its_target(seed):
    rnd = random.Random(seed)
    for aim, share in ((0.050, 80), (0.035, 50), (0.0601, 100)):
        target = LatencyTarget(aim, 8)
        for _ in range(rnd.randrange(3, 60)):
            tokens = rnd.randrange(1, 300)
            target.observe(tokens, seconds(tokens))
        target.observe(7, seconds(7))  # two different ones at least
        target.observe(90, seconds(90))
        assert abs(target.budget(512) - share) <= 1
        assert target.budget(40) == 40


def test_a_target_that_cannot_be_met_leaves_the_least():
    target = LatencyTarget(0.005, 8)
    for tokens in (8, 100, 50, 8):
        target.observe(tokens, seconds(tokens))
    assert target.budget(512) == 8


def test_where_more_tokens_took_less_time_a_little_more_is_tried():
    target = LatencyTarget(0.050, 8)
    for tokens in (10, 20, 30):
        target.observe(tokens, 0.05 - 0.001 * tokens)
    assert 20 <= target.budget(512) <= 30


def test_a_machine_that_became_slower_is_learned_within_a_hundred_steps():
    target, rnd = LatencyTarget(0.050, 8), random.Random(0)
    for _ in range(300):
        tokens = rnd.randrange(1, 200)
        target.observe(tokens, seconds(tokens))
    for _ in range(100):
        tokens = rnd.randrange(1, 200)
        target.observe(tokens, 2 * seconds(tokens))
    assert abs(target.budget(512) - 30) <= 3


def test_steps_without_prompt_tokens_say_what_decodes_take():
    target = LatencyTarget(0.050, 8)
    for tokens in (0, 0, 60, 0):
        target.observe(tokens, seconds(tokens))
    assert abs(target.budget(512) - 80) <= 1
