"""How long an engine may show no sign of life: longer than any honest step takes, and no longer than need be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.core.step import Span, StepPlan
from quire.ipc.patience import COMPILING_SECONDS, Patience


def model(parameters: float, layers: int, hidden: int, heads: int, width: int, vocab: int) -> Any:
    layer = SimpleNamespace(hidden_size=hidden, num_heads=heads)
    return SimpleNamespace(
        config=SimpleNamespace(layer=layer),
        active_parameters=parameters,
        num_layers=layers,
        attention_width=width,
        vocab_size=vocab,
    )


DEMO = model(4e6, 6, 256, 4, 128, 8192)
LARGE = model(8e9, 32, 4096, 32, 256, 128_256)


def plan(*spans: tuple[int, int, int]) -> StepPlan:
    """Each span's start, length, and rows whose log-probabilities are asked for."""
    made = [Span(index, start, [5] * length, 1, [5] * rows) for index, (start, length, rows) in enumerate(spans)]
    return StepPlan(0, made, num_tokens=sum(length for _, length, _ in spans))


def seconds(which: Any, asynchronous: bool, *spans: tuple[int, int, int]) -> float:
    return Patience(cast(Any, which), asynchronous).seconds(plan(*spans))


def test_decoding_gets_little_more_than_any_process() -> None:
    assert seconds(DEMO, False, *[(500, 1, 0)] * 64) < 1
    assert seconds(LARGE, False, (8000, 1, 0)) < 2


@pytest.mark.parametrize(
    ("spans", "operations"),
    [
        ([(0, 2048, 0)], 2048 * 2 * 8e9 / 32),  # a layer's products
        ([(100_000, 2048, 0)], 2048 * 100_000 * 32 * 256 * 2),  # a layer's attention, far into a long context
        ([(0, 2048, 2048)], 2048 * 2 * 4096 * 128_256),  # the head, of a prompt that is scored
    ],
)
def test_a_large_step_on_a_slow_processor_gets_what_it_takes(
    spans: list[tuple[int, int, int]], operations: float
) -> None:
    slow = 2e9  # operations a second of a core that others use, too
    assert operations / slow < seconds(LARGE, False, *spans) < 2 * 60 * 60


def test_a_device_that_computes_all_layers_before_it_is_heard_of_gets_the_time_of_all() -> None:
    assert 8192 * 2 * 8e9 / 2e12 < seconds(LARGE, True, (0, 8192, 0)) - COMPILING_SECONDS < 60 * 60


def test_where_kernels_are_compiled_at_their_first_use_any_step_may_be_the_one() -> None:
    assert COMPILING_SECONDS <= seconds(LARGE, True, *[(8000, 1, 0)] * 256) < COMPILING_SECONDS + 10
