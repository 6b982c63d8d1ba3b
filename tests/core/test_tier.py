"""The index of a tier: what is found, what gives way, and that no slot is lost."""

from __future__ import annotations

import random

import pytest

from quire.kv.tiers.tier import Tier


def named(number: int) -> bytes:
    return number.to_bytes(4, "big")


def filled(tier: Tier, *numbers: int) -> list[int]:
    slots = []
    for number in numbers:
        slot = tier.take(named(number))
        assert slot is not None
        tier.filled(slot)
        slots.append(slot)
    return slots


def kept(tier: Tier) -> set[int]:
    return {int.from_bytes(name, "big") for name in tier.kept}


def test_a_block_is_found_once_it_is_filled():
    tier = Tier(4)
    slot = tier.take(named(1))
    assert tier.slot(named(1)) is None and tier.counts["filling"] == 1
    tier.filled(slot)
    [third] = filled(tier, 3)
    assert [tier.slot(named(number)) for number in (1, 2, 3)] == [slot, None, third]
    assert [named(number) in tier for number in (1, 2, 3)] == [True, False, True]


def test_the_least_recently_used_block_gives_way_and_none_that_is_read_or_on_its_way():
    tier = Tier(3)
    first, second, _ = filled(tier, 1, 2, 3)
    tier.pin(first)
    filled(tier, 4)
    assert kept(tier) == {1, 3, 4}
    tier.unpin(first)  # used just now
    assert tier.take(named(3)) is None  # here already: that is a use
    filled(tier, 5)
    assert kept(tier) == {1, 3, 5}
    for slot in (tier.kept[named(1)], tier.kept[named(3)]):
        tier.pin(slot)
    assert tier.take(named(6)) == second, "the only one that nobody reads: 4 was there, and 5"
    assert tier.take(named(7)) is None, "that one is on its way"


def test_a_block_that_is_not_worth_keeping_gives_way_first_unless_it_is_read():
    tier = Tier(1, 3)
    filled(tier, 9)
    slots = [tier.take(named(number), 1) for number in (1, 2, 3)]
    for slot in slots:
        tier.filled(slot)
    tier.cool(slots[2])
    tier.pin(slots[1])
    tier.cool(slots[1])
    assert tier.idle_slots == [0, slots[2], slots[0]]
    tier.unpin(slots[1])
    assert tier.idle_slots == [0, slots[2], slots[0], slots[1]]
    assert tier.take(named(4), 1) == slots[2] and kept(tier) == {9, 1, 2}


def test_a_groups_room_is_its_slots_that_are_free_and_those_that_can_give_way():
    tier = Tier(2, 3)
    assert [tier.group(slot) for slot in range(5)] == [0, 0, 1, 1, 1]
    slot = tier.take(named(1), 1)
    assert tier.group(slot) == 1 and tier.is_filling(named(1)) and not tier.is_filling(named(2))
    assert [tier.room(0), tier.room(1)] == [2, 2]
    tier.filled(slot)
    assert [tier.room(0), tier.room(1)] == [2, 3] and not tier.is_filling(named(1))
    tier.pin(slot)
    assert [tier.room(0), tier.room(1)] == [2, 2]


def test_a_block_that_is_on_its_way_gets_no_second_slot():
    tier = Tier(2)
    slot = tier.take(named(1))
    assert tier.take(named(1)) is None
    tier.dropped(slot)
    assert tier.counts == {"free": 2, "filling": 0, "kept": 0, "quarantined": 0}
    assert tier.take(named(1)) is not None


def test_what_is_withdrawn_while_it_is_read_is_not_found_and_not_given_away_before_it_was_read():
    tier = Tier(1)
    [slot] = filled(tier, 1)
    tier.pin(slot)
    tier.pin(slot)
    tier.withdraw(slot)
    tier.withdraw(slot)  # both found out
    assert tier.slot(named(1)) is None and tier.counts["quarantined"] == 1
    tier.unpin(slot)
    assert tier.take(named(2)) is None
    tier.unpin(slot)
    assert tier.take(named(2)) == slot


def test_what_is_withdrawn_while_nobody_reads_it_gives_its_slot_back_at_once():
    tier = Tier(2)
    for slot in filled(tier, 1, 2):
        if slot:
            tier.pin(slot)
            tier.unpin(slot)  # read before, and no more
        tier.withdraw(slot)
    assert tier.counts == {"free": 2, "filling": 0, "kept": 0, "quarantined": 0}


def test_whoever_follows_a_tier_is_told_of_each_block_that_comes_and_goes():
    tier, told = Tier(2), []
    tier.changed = lambda name: told.append((name, name in tier))
    slot = tier.take(named(1))
    assert told == [], "it is on its way"
    tier.filled(slot)
    filled(tier, 2, 3)
    tier.withdraw(tier.kept[named(3)])
    tier.withdraw(slot)  # both found out
    came = [(named(number), True) for number in (1, 2)]
    assert told == [*came, (named(1), False), (named(3), True), (named(3), False)]


def test_a_slot_in_quarantine_is_given_away_once_it_is_released():
    tier = Tier(1)
    slot = tier.take(named(1))
    tier.quarantine(slot)
    assert tier.take(named(1)) is None and tier.counts["quarantined"] == 1
    tier.released(slot)
    assert tier.take(named(1)) == slot


def test_a_tier_without_slots_keeps_nothing():
    tier = Tier()
    assert tier.take(named(1)) is None and tier.slot(named(1)) is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_slot_is_in_one_state_and_what_was_used_last_stays(seed):
    rnd, tier = random.Random(seed), Tier(6)
    filling: list[int] = []
    pinned: list[int] = []
    quarantined: list[int] = []
    for _ in range(400):
        what = rnd.choice(["take", "take", "filled", "dropped", "pin", "unpin", "withdraw", "quarantine", "release"])
        keeps = sorted(tier.kept.values())
        if what == "take":
            newest = tier.idle_slots[-1:] if len(tier.idle_slots) > 1 else []
            slot = tier.take(named(rnd.randrange(12)))
            filling += [] if slot is None else [slot]
            assert set(newest) <= set(tier.kept.values())
        elif what in ("filled", "dropped", "quarantine") and filling:
            slot = filling.pop(rnd.randrange(len(filling)))
            {"filled": tier.filled, "dropped": tier.dropped, "quarantine": tier.quarantine}[what](slot)
            quarantined += [slot] if what == "quarantine" else []
        elif what == "pin" and keeps:
            pinned.append(rnd.choice(keeps))
            tier.pin(pinned[-1])
        elif what == "unpin" and pinned:
            tier.unpin(pinned.pop(rnd.randrange(len(pinned))))
        elif what == "withdraw" and keeps:
            tier.withdraw(rnd.choice(keeps))
        elif what == "release" and quarantined:
            tier.released(quarantined.pop())
        assert sum(tier.counts.values()) == 6 and tier.counts["filling"] == len(filling)
        assert sorted(_spread(tier.pins)) == sorted(pinned)
        assert not set(tier.idle_slots) & set(pinned)


def _spread(pins: dict[int, int]) -> list[int]:
    return [slot for slot, count in pins.items() for _ in range(count)]
