"""Drafts in a pipeline: every rank computes what drafts whole, and so all have the same, which change no bit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.test_speculation import run
from tests.test_speculation_methods import METHODS, alone, engine_of, folders, target_of

__all__ = ["alone", "folders"]  # fixtures

TWO = {"pipeline_parallel_size": 2}
FOUR = TWO | {"tensor_parallel_size": 2}
FAST = ("eagle3, trees",)
"""It is fed what enters layers of either stage; `make test-slow` adds the rest."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        pytest.param(method, sizes, marks=() if method in FAST and sizes is TWO else pytest.mark.slow)
        for method in METHODS
        for sizes in (TWO, FOUR)
    ],
)
def test_drafts_change_nothing(folders: Any, alone: Any, method: str, sizes: dict[str, int]) -> None:
    outcomes, more = alone[target_of(method)], {"num_kv_blocks": 20, "max_num_batched_tokens": 40, **sizes}
    with contextlib.closing(engine_of(folders, method, async_scheduling=True, **more)) as engine:
        assert run(engine, range(8)) == outcomes[:8]
        assert run(engine, range(7, -1, -1), first_id=100, stagger=2) == outcomes[:8], "warm"
        assert engine.stats.drafted > engine.stats.accepted > 0 and engine.stats.preemptions > 0


def test_as_many_drafts_are_accepted_as_with_one_rank() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    found = []
    for stages in (1, 2):
        spec = {"method": "eagle", "adaptive": False}
        with LLM("demo", pipeline_parallel_size=stages, threads=1, speculative_config=spec) as llm:
            llm.generate(["def fib(n):\n", "# A list\nx = ["], params)
            found.append((llm.stats.drafted, llm.stats.accepted))
    assert found[0] == found[1] and found[0][1] > 20
