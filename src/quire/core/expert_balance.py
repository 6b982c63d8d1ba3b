"""Placement of experts on ranks for an even load: the global policy of DeepSeek's expert-parallel load balancer (EPLB,
https://github.com/deepseek-ai/EPLB, https://arxiv.org/abs/2412.19437, section 3.4).

The busiest experts are replicated over several slots, which share their tokens. Then slots are packed onto ranks,
heaviest first, each onto the least loaded rank. Which pack goes to which rank does not affect the balance, so each goes
to the rank that has most of its experts already.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction


def balance(loads: Sequence[int], num_slots: int, ranks: int, before: Sequence[int] = ()) -> tuple[int, ...]:
    """The expert in each slot; every rank has as many slots, one rank's after another's.

    Args:
        loads: recent tokens of each expert.
        num_slots: slots of all ranks together; at least one per expert.
        before: the expert in each slot now.

    Raises:
        ValueError: there are fewer slots than experts, or they cannot be divided evenly.
    """
    if num_slots < len(loads) or num_slots % ranks:
        raise ValueError(f"{num_slots} slots for {len(loads)} experts on {ranks} ranks")
    slots = _replicated(loads, num_slots)
    replicas = Counter(slots)
    weights = [Fraction(loads[expert], replicas[expert]) for expert in slots]
    packs = [[slots[index] for index in pack] for pack in _packed(weights, ranks)]
    return tuple(expert for pack in (_named_as(packs, before) if before else packs) for expert in sorted(pack))


def imbalance(loads: Sequence[int], slots: Sequence[int], ranks: int) -> float:
    """The highest load of a rank over the mean load: 1 is perfectly even."""
    total = sum(loads)
    if not total:
        return 1.0
    replicas, each = Counter(slots), len(slots) // ranks
    shares = [Fraction(loads[expert], replicas[expert]) for expert in slots]
    return float(max(sum(shares[rank * each : (rank + 1) * each]) for rank in range(ranks)) * ranks / total)


def _replicated(loads: Sequence[int], num_slots: int) -> list[int]:
    """Give each expert a slot, then repeatedly one more to the expert with the highest load per slot."""
    slots = [*range(len(loads))]
    busiest = [(-Fraction(load), expert, 1) for expert, load in enumerate(loads)]
    heapq.heapify(busiest)
    while len(slots) < num_slots:
        _, expert, replicas = busiest[0]
        slots.append(expert)
        heapq.heapreplace(busiest, (Fraction(-loads[expert], replicas + 1), expert, replicas + 1))
    return slots


def _packed(weights: Sequence[Fraction], packs: int) -> list[list[int]]:
    """Distribute indices of `weights` over packs of equal size: heaviest first, each into the lightest with room."""
    room, made, sums = len(weights) // packs, [[] for _ in range(packs)], [Fraction(0)] * packs  # type: ignore[var-annotated]
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        lightest = min((pack for pack in range(packs) if len(made[pack]) < room), key=lambda pack: (sums[pack], pack))
        made[lightest].append(index)
        sums[lightest] += weights[index]
    return made


def _named_as(packs: list[list[int]], before: Sequence[int]) -> list[list[int]]:
    """Order the packs so that ranks keep the experts they have; pairs with the largest overlap are matched first."""
    each, left, named = len(before) // len(packs), [Counter(pack) for pack in packs], {}
    old = {rank: Counter(before[rank * each : (rank + 1) * each]) for rank in range(len(packs))}
    pairs = sorted((-(old[rank] & pack).total(), rank, number) for rank in old for number, pack in enumerate(left))
    taken: set[int] = set()
    for _, rank, number in pairs:
        if rank not in named and number not in taken:
            named[rank] = packs[number]
            taken.add(number)
    return [named[rank] for rank in sorted(named)]
