"""How experts are spread over ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.expert_balance import balance, imbalance


def packs(slots: tuple[int, ...], ranks: int) -> list[list[int]]:
    each = len(slots) // ranks
    return [sorted(slots[rank * each : (rank + 1) * each]) for rank in range(ranks)]


@st.composite
def loads_and_slots(draw: st.DrawFn) -> tuple[list[int], int, int]:
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(1, 24))
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return loads, ranks * draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 4)), ranks


@pytest.mark.scale
@given(loads_and_slots())
def test_every_expert_has_a_slot_and_every_rank_as_many(given: tuple[list[int], int, int]) -> None:
    loads, num_slots, ranks = given
    slots = balance(loads, num_slots, ranks)
    assert len(slots) == num_slots
    assert {*slots} == {*range(len(loads))}


@pytest.mark.scale
@given(loads_and_slots())
def test_the_balance_is_within_what_greedy_packing_promises(given: tuple[list[int], int, int]) -> None:
    """The busiest rank exceeds the mean by no more than the heaviest slot (Graham 1969)."""
    loads, num_slots, ranks = given
    slots = balance(loads, num_slots, ranks)
    mean, replicas = sum(loads) / ranks, Counter(slots)
    heaviest = max(load / replicas[expert] for expert, load in enumerate(loads))
    if num_slots == len(loads) == ranks:
        return  # one each: there is nothing to pack
    assert imbalance(loads, slots, ranks) * mean <= max(mean, 1e-9) + len(slots) // ranks * heaviest + 1e-6


@pytest.mark.scale
@given(loads_and_slots(), st.randoms(use_true_random=False))
def test_a_balance_that_is_there_already_moves_nothing(given: tuple[list[int], int, int], rnd: object) -> None:
    loads, num_slots, ranks = given
    slots = balance(loads, num_slots, ranks)
    own = packs(slots, ranks)
    rnd.shuffle(own)  # type: ignore[attr-defined]
    before = [expert for pack in own for expert in pack]
    assert balance(loads, num_slots, ranks, before=before) == tuple(before)


def test_the_busiest_experts_get_the_slots_that_are_left() -> None:
    slots = balance([10, 100, 10, 300, 10, 10], 8, 2)
    assert Counter(slots) == {0: 1, 1: 1, 2: 1, 3: 3, 4: 1, 5: 1}


def test_two_of_thirty_two_experts_with_most_of_the_tokens() -> None:
    loads = [300, 300, *[400 // 30] * 30]
    before = [*range(32)]
    assert imbalance(loads, before, 2) > 1.4
    after = balance(loads, 32, 2, before=before)
    assert imbalance(loads, after, 2) < 1.05
    assert imbalance(loads, balance(loads, 40, 4), 4) < 1.2


def test_nothing_to_do_is_even() -> None:
    assert imbalance([0, 0, 0, 0], [0, 1, 2, 3], 2) == 1.0
    assert {*balance([0, 0, 0, 0], 4, 2)} == {0, 1, 2, 3}


@pytest.mark.parametrize(("slots", "ranks"), [(3, 1), (6, 4)])
def test_slots_that_cannot_be_shared_out(slots: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="slots for 4 experts"):
        balance([1, 2, 3, 4], slots, ranks)
