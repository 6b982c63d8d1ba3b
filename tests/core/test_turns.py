"""Who gives way to whom, by name: to one that runs and needs a block, and to one that waits for a place."""

from __future__ import annotations

from quire.core.turns import MOST_OWNERS, Turns, first_to_yield, outranked
from tests.core.fake_runner import make_request


def standing(*places, preempted=()):
    """Requests in order of (priority, turn, owner), numbered from 0; of those preempted, (computed, high water)."""
    requests = []
    for id, (priority, turn, owner) in enumerate(places):
        request = make_request(id, [1, 2, 3], owner=owner)
        request.order = priority, turn, id
        if id in preempted:
            request.num_computed, request.high_water = preempted[id]
            request.stats.preemptions = 1
        requests.append(request)
    assert sorted(requests, key=lambda each: each.order) == requests
    return requests


def test_who_needs_a_block_has_that_of_the_last_one_behind_it():
    running = standing((0, 0, "a"), (0, 1, "a"), (0, 2, "b"), (3, 0, "a"))
    assert [first_to_yield(running, each) for each in running] == [running[3]] * 3 + [None]


def test_whoever_recomputes_gives_way_after_all_others_behind_and_of_several_the_last_one():
    """It recomputes until it is further than it was."""
    for computed, spared in ((0, True), (7, True), (8, True), (9, False)):
        running = standing(*[(0, turn, "a") for turn in range(4)], preempted={3: (computed, 8)})
        assert first_to_yield(running, running[0]) is running[2 if spared else 3]
        assert first_to_yield(running, running[2]) is running[3], "who is before the requester keeps what it has"
    running = standing(*[(0, turn, "a") for turn in range(4)], preempted=dict.fromkeys(range(4), (1, 8)))
    assert first_to_yield(running, running[0]) is running[3]


def test_who_waits_may_take_the_place_of_lower_priority_and_of_other_owners_later_turns_the_last_first():
    running = standing((0, 0, "a"), (1, 4, "a"), (1, 5, "b"), (1, 6, "a"), (1, 7, "b"), (2, 0, "b"), (2, 9, "a"))
    ids = {each: each.id for each in running}

    def taken_by(priority, turn, owner, id=100):
        request = make_request(id, [1], owner=owner)
        request.order = priority, turn, id
        return [ids[each] for each in outranked(running, request)]

    assert taken_by(0, 9, "b") == [6, 5, 4, 3, 2, 1]
    assert taken_by(1, 4, "b") == [6, 5, 3], "its own requests stay"
    assert taken_by(1, 5, "c", id=0) == [6, 5, 4, 3], "and whose turn is the same, though it came later"
    assert taken_by(1, 3, "a") == [6, 5, 4, 2]
    assert taken_by(1, 6, "c") == [6, 5, 4], "turn 6 was there first"
    assert taken_by(1, 7, "b") == [6, 5] and taken_by(2, 8, "b") == [6] and taken_by(2, 8, "a") == []


def test_turns_of_an_owner_follow_one_another_and_one_who_comes_later_begins_among_those_that_run():
    turns = Turns()
    assert [turns.deal("a", 0) for _ in range(4)] == [0, 1, 2, 3]
    assert turns.deal("b", 0) == 0, "nobody was admitted yet"
    for turn in (2, 3, 1):
        turns.admitted(turn)
    assert [turns.deal("c", 2), turns.deal("c", 2)] == [2, 3], "two run: those of turns 2 and 3"
    assert turns.deal("a", 2) == 4 and turns.deal("b", 2) == 2
    assert turns.deal("d", 9) == 0, "nobody begins before all others, however many owners' first ones run"
    turns.reset()
    assert [turns.deal(owner, 0) for owner in "cab"] == [0, 0, 0]


def test_owners_that_have_nothing_in_line_are_forgotten_and_begin_where_they_would_have():
    turns = Turns()
    for number in range(10 * MOST_OWNERS):
        turn = turns.deal(f"{number}", 1)
        turns.admitted(turn)
        assert turns.deal("flood", 1) == number, "who has many in line keeps its place"
    assert len(turns._last) <= MOST_OWNERS + 1
