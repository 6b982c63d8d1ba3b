"""Which rank has which experts, so that all have about as much to do: DeepSeek's expert-parallel load balancer (EPLB,
https://github.com/deepseek-ai/EPLB, https://arxiv.org/abs/2412.19437, section 3.4).

The busiest experts get more than one slot, among which their tokens are dealt out; then slots are packed onto ranks,
the heaviest first, each where least has been packed. Which pack goes to which rank makes no difference to the balance:
it goes where most of its experts are already.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction


def balance(
    loads: Sequence[int], num_slots: int, ranks: int, groups: int = 1, nodes: int = 1, before: Sequence[int] = ()
) -> tuple[int, ...]:
    """The expert in each slot; every rank has as many slots, one rank's after another's.

    Args:
        loads: tokens of each expert, lately.
        num_slots: of all ranks; at least one an expert.
        groups: experts lie in so many (`n_group`), of which a token goes to a few; the experts of one stay on one node.
        nodes: the ranks lie on so many; where that does not divide the groups, both count as one.
        before: the experts in the slots as they are now.

    Raises:
        ValueError: there are fewer slots than experts, or they cannot be shared out evenly.
    """
    if num_slots < len(loads) or num_slots % ranks or ranks % nodes:
        raise ValueError(f"{num_slots} slots for {len(loads)} experts, {ranks} ranks, {nodes} nodes")
    if nodes == 1 or groups % nodes or len(loads) % groups:
        groups = nodes = 1
    size = len(loads) // groups
    of_groups = [sum(loads[group * size : (group + 1) * size]) for group in range(groups)]
    packs: list[list[int]] = []
    for own in _packed([Fraction(load) for load in of_groups], nodes):
        experts = [group * size + expert for group in sorted(own) for expert in range(size)]
        slots = _replicated(experts, loads, num_slots // nodes)
        replicas = Counter(slots)
        weights = [Fraction(loads[expert], replicas[expert]) for expert in slots]
        packs += [[slots[index] for index in pack] for pack in _packed(weights, ranks // nodes)]
    named = packs if nodes > 1 or not before else _named_as(packs, before)
    return tuple(expert for pack in named for expert in sorted(pack))


def imbalance(loads: Sequence[int], slots: Sequence[int], ranks: int) -> float:
    """The most that a rank has to do, over the mean: 1 is even."""
    total = sum(loads)
    if not total:
        return 1.0
    replicas, each = Counter(slots), len(slots) // ranks
    shares = [Fraction(loads[expert], replicas[expert]) for expert in slots]
    return float(max(sum(shares[rank * each : (rank + 1) * each]) for rank in range(ranks)) * ranks / total)


def _replicated(experts: Sequence[int], loads: Sequence[int], num_slots: int) -> list[int]:
    """One slot for each, and then one more, again and again, for that which has most to do in each of its own."""
    slots = [*experts]
    busiest = [(-Fraction(loads[expert]), place, 1) for place, expert in enumerate(experts)]
    heapq.heapify(busiest)
    while len(slots) < num_slots:
        _, place, replicas = busiest[0]
        slots.append(experts[place])
        heapq.heapreplace(busiest, (Fraction(-loads[experts[place]], replicas + 1), place, replicas + 1))
    return slots


def _packed(weights: Sequence[Fraction], packs: int) -> list[list[int]]:
    """Indices of `weights` in so many packs of one size: the heaviest first, each into the lightest that has room."""
    room, made, sums = len(weights) // packs, [[] for _ in range(packs)], [Fraction(0)] * packs  # type: ignore[var-annotated]
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        lightest = min((pack for pack in range(packs) if len(made[pack]) < room), key=lambda pack: (sums[pack], pack))
        made[lightest].append(index)
        sums[lightest] += weights[index]
    return made


def _named_as(packs: list[list[int]], before: Sequence[int]) -> list[list[int]]:
    """The packs in such an order that ranks keep what they have, those that can keep most first."""
    each, left, named = len(before) // len(packs), [Counter(pack) for pack in packs], {}
    old = {rank: Counter(before[rank * each : (rank + 1) * each]) for rank in range(len(packs))}
    pairs = sorted((-(old[rank] & pack).total(), rank, number) for rank in old for number, pack in enumerate(left))
    taken: set[int] = set()
    for _, rank, number in pairs:
        if rank not in named and number not in taken:
            named[rank] = packs[number]
            taken.add(number)
    return [named[rank] for rank in sorted(named)]
