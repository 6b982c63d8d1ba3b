"""Draft lengths on simulated machines: what they gain where drafts pay, and what they lose where drafts do not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from quire.core.draft_length import Average, DraftLengths, DraftState, Pool
from quire.core.step import SpanResult, StepResult

MOST = 8
PLAIN = 0.05


def step_seconds(rows: int) -> float:
    """Up to 24 rows the weights' way through memory is all that counts."""
    return PLAIN * max(1.0, rows / 24)


@dataclass
class Machine:
    """Requests whose drafts are accepted with given chances, on a machine with a given cost of steps and drafts.

    Attributes:
        drafting: seconds for drafts of this depth.
        noise: a step takes up to this much longer, as a share.
    """

    chances: list[float]
    whole: bool = False
    drafting: Callable[[int], float] = lambda depth: 0.0
    noise: float = 0.05
    seed: int = 0
    made: list[int] = field(init=False)
    history: list[list[int]] = field(init=False, default_factory=list)
    times: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.lengths = DraftLengths(MOST, tree_mode=self.whole)
        self.states = [DraftState() for _ in self.chances]
        for state in self.states:
            self.lengths.start(state, True, len(self.states))
        self.made = [0] * len(self.chances)
        self.random = random.Random(self.seed)

    def run(self, steps: int = 0, tokens: int = 0, slow: float = 1.0) -> float:
        """So many steps, or until every request has made so many more tokens: seconds of it all."""
        goal, before = min(self.made) + tokens, sum(self.times)
        while steps > 0 or min(self.made) < goal:
            self.step(slow)
            steps -= 1
        return sum(self.times) - before

    def step(self, slow: float) -> None:
        count = len(self.chances)
        lengths = self.lengths.choose(self.states, [MOST] * count, 10_000, count)
        rows, depth = count + sum(lengths), max(lengths)
        drafting = self.drafting(depth) if depth else 0.0
        seconds = slow * step_seconds(rows) * (1 + self.noise * self.random.random()) + drafting
        self.history.append(lengths)
        self.times.append(seconds)
        accepted = [self.accepted(chance, length) for chance, length in zip(self.chances, lengths, strict=True)]
        self.lengths.observe(count, seconds, drafting, depth, sum(lengths), sum(accepted))
        for i, length in enumerate(lengths):
            if length:
                self.lengths.accepted(self.states[i], length, accepted[i])
            self.made[i] += 1 + accepted[i]

    def accepted(self, chance: float, length: int) -> int:
        if self.whole:  # four levels
            length = min(length, 4)
        count = 0
        while count < length and self.random.random() < chance:
            count += 1
        return count

    def plain(self, tokens: int) -> float:
        """Seconds for so many tokens without drafts."""
        return tokens * step_seconds(len(self.chances)) * (1 + self.noise / 2)


def known(first: int, later: int, idle: int = 0) -> DraftState:
    """A request whose chances are known: see `DraftState.chances`."""
    state = DraftState(Average(first / 20, 1e9), Pool(later=Average(later / 20)), idle=idle)
    state.rate()
    return state


def mean(lengths: Sequence[int]) -> float:
    return sum(lengths) / len(lengths)


# --- where drafts pay -------------------------------------------------------------------------------------


def test_a_request_alone_whose_drafts_are_accepted_soon_gets_many() -> None:
    machine = Machine([0.8])
    machine.run(steps=60)
    assert all(length >= 4 or length == 0 for (length,) in machine.history[8:])
    assert sum(machine.made) > 3 * 60


def test_drafts_fill_the_rows_that_cost_nothing_and_hardly_more() -> None:
    machine = Machine([0.7] * 8)
    machine.run(steps=150)
    late = [8 + sum(lengths) for lengths in machine.history[50:] if any(lengths)]
    assert 20 <= mean(late) <= 32  # at 24 rows the cost begins
    assert machine.run(tokens=200) < 0.65 * machine.plain(200)


def test_drafting_goes_less_deep_where_drafts_are_dear() -> None:
    depths = []
    for each in (0.0, 0.1, 0.3):
        machine = Machine([0.8], drafting=lambda depth, each=each: each * PLAIN * depth)  # type: ignore[misc]
        machine.run(steps=200)
        depths.append(mean([length for (length,) in machine.history[20:] if length]))
        assert sum(machine.made) / sum(machine.times) > 1.2 / PLAIN
    assert depths[0] > depths[1] > depths[2]
    assert depths[0] > 7 and 3 < depths[1] < 8 and depths[2] < 3.5


def test_of_mixed_requests_those_get_drafts_whose_drafts_are_accepted() -> None:
    machine = Machine([0.9] * 8 + [0.0] * 8)
    machine.run(steps=200)
    good = mean([mean(lengths[:8]) for lengths in machine.history[20:]])
    bad = mean([mean(lengths[8:]) for lengths in machine.history[20:]])
    assert good > 0.8 and bad < 0.05


def test_acceptance_that_comes_late_is_found() -> None:
    machine = Machine([0.0], drafting=lambda depth: 0.1 * PLAIN * depth)
    assert machine.run(steps=700) < 1.03 * machine.plain(700)
    machine.chances = [0.9]
    machine.run(steps=300)
    assert mean([length for (length,) in machine.history[-30:]]) > 4


def test_acceptance_that_goes_is_noticed() -> None:
    machine = Machine([0.9], drafting=lambda depth: 0.1 * PLAIN * depth)
    machine.run(steps=200)
    machine.chances = [0.0]
    machine.run(steps=120)
    assert sum(length for (length,) in machine.history[-30:]) <= 8


# --- where they do not ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("each", [0.0, 0.2])
def test_drafts_that_are_never_accepted_cost_a_request_alone_little(seed: int, each: float) -> None:
    machine = Machine([0.0], seed=seed, drafting=lambda depth: each * PLAIN * depth)
    assert machine.run(tokens=500) <= 1.03 * machine.plain(500)


@pytest.mark.scale
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
def test_where_each_row_costs_its_share_drafts_cost_little(seed: int, chance: float) -> None:
    machine = Machine([chance] * 32, seed=seed)
    seconds = machine.run(steps=500)
    assert seconds <= 1.03 * machine.plain(1) * sum(machine.made) / 32


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_that_takes_half_a_step_costs_little_at_even_chances(seed: int) -> None:
    machine = Machine([0.5], seed=seed, drafting=lambda depth: PLAIN / 2 * depth)
    assert machine.run(tokens=600) <= 1.04 * machine.plain(600)


def test_exploring_goes_on_at_a_bounded_cost_while_it_fails() -> None:
    machine = Machine([0.0], drafting=lambda depth: 0.2 * PLAIN * depth)
    machine.run(steps=200)
    assert machine.run(steps=2000) < 1.02 * machine.plain(2000)
    drafted = [i for i, (length,) in enumerate(machine.history) if length]
    assert max(b - a for a, b in itertools.pairwise(drafted)) < 400


def test_a_try_that_takes_the_time_of_many_steps_is_paid_for_before_the_next() -> None:
    machine = Machine([0.3], whole=True, drafting=lambda depth: 12 * PLAIN)
    machine.run(tokens=500)
    assert machine.run(tokens=6000) < 1.015 * machine.plain(6000)
    assert any(length for (length,) in machine.history[-3000:])


def test_drafts_that_seem_not_to_pay_go_on_while_there_is_credit() -> None:
    """A text that repeats nothing comes after many that did: the next passage may be like those."""
    lengths, state = DraftLengths(4), DraftState()
    lengths.start(state, True, 1)
    given = []
    for step in range(1500):
        given += lengths.choose([state], [4], 100, 1)
        accepted = given[-1] if step < 200 or step % 3 else 0
        lengths.observe(1, PLAIN * (1 + 0.7 * given[-1]), 0.7 * PLAIN * given[-1], given[-1], given[-1], accepted)
        if given[-1]:
            lengths.accepted(state, given[-1], accepted)
    assert mean(list(map(bool, given[100:230]))) > 0.9
    assert mean(list(map(bool, given[-100:]))) < 0.5  # until it is used up


def test_where_there_are_seldom_drafts_they_are_worth_less_than_their_making() -> None:
    lengths, state = DraftLengths(4), DraftState()
    lengths.start(state, True, 1)
    given = []
    for step in range(600):  # to ask for drafts takes a quarter of a step, and one time in ten there are some
        given += lengths.choose([state], [4], 100, 1)
        there = given[-1] if step % 10 == 0 else 0
        lengths.observe(1, PLAIN * (1.25 if given[-1] else 1.0), PLAIN / 4 * bool(given[-1]), there, there, there // 3)
        if given[-1]:
            lengths.accepted(state, there, there // 3)
    assert mean(list(map(bool, given[-300:]))) < 0.15


# --- measuring --------------------------------------------------------------------------------------------


def test_steps_without_drafts_are_measured_first_and_now_and_then() -> None:
    machine = Machine([0.9])
    machine.run(steps=2000)
    plain = [i for i, (length,) in enumerate(machine.history) if not length]
    assert plain[0] == 0
    assert 6 <= len(plain) <= 30 and plain[1] == 1


@pytest.mark.parametrize("hiccups", [[0], [1], [2], [3], [4, 40], [50, 51, 52]])
def test_one_slow_step_does_not_count_for_long(hiccups: list[int]) -> None:
    machine = Machine([0.8])
    for step in range(100):
        machine.run(steps=1, slow=10.0 if step in hiccups else 1.0)
    assert mean([length for (length,) in machine.history[70:]]) > 5


@pytest.mark.parametrize("hiccup", [0, 1, 2, 50])
def test_one_slow_step_does_not_make_drafts_look_free(hiccup: int) -> None:
    machine = Machine([0.5] * 32)
    for step in range(150):
        machine.run(steps=1, slow=10.0 if step == hiccup else 1.0)
    assert mean([sum(lengths) for lengths in machine.history[hiccup + 20 :]]) < 6


@pytest.mark.parametrize(("gap", "counted"), [(0.5 * PLAIN, 1.5 * PLAIN), (50 * PLAIN, PLAIN)])
def test_the_gap_before_a_step_is_part_of_it_unless_it_was_a_pause(gap: float, counted: float) -> None:
    lengths = DraftLengths(MOST)
    for i in range(10):
        began = 100.0 + i * (PLAIN + gap)
        lengths.observe_step(StepResult(i, [SpanResult([5])], PLAIN, began), tuned=True)
    lengths.choose([DraftState()], [4], 100, 1)
    assert lengths._verifying.at(1) == pytest.approx(counted)


def test_a_machine_that_becomes_slower_for_good_is_learned() -> None:
    machine = Machine([0.8], drafting=lambda depth: 0.1 * PLAIN * depth)
    machine.run(steps=100)
    machine.run(steps=800, slow=8.0)  # drafting is next to nothing now
    assert mean([length for (length,) in machine.history[-60:] if length]) > 6.5


@pytest.mark.parametrize("few", [1, 2])
def test_a_hiccup_of_larger_steps_says_nothing_of_smaller_ones(few: int) -> None:
    """Of a size that was not seen more than once, the curve's first piece is followed down: never to nothing."""
    lengths = DraftLengths(4)
    for _ in range(3):
        lengths.observe(8, PLAIN, 0.0, 0)
        lengths.observe(10, 3 * PLAIN, 0.0, 0)
    lengths.start(DraftState(), True, few)
    lengths.observe(few, PLAIN, 0.0, 0)
    assert len(lengths.choose([DraftState()] * few, [4] * few, 100, few)) == few
    assert PLAIN * few / 8 <= lengths._verifying.at(few) <= PLAIN


def test_a_clock_that_sees_no_time_go_by_does_no_harm() -> None:
    lengths, state = DraftLengths(4), DraftState()
    lengths.start(state, True, 1)
    for seconds in [0.0] * 20 + [0.015, 0.0, 0.0] * 20:
        [length] = lengths.choose([state], [4], 100, 1)
        assert 0 <= length <= 4
        lengths.observe(1, seconds, seconds, length, length, length)
        if length:
            lengths.accepted(state, length, length)
        lengths.drop_drafting([state])


# --- following --------------------------------------------------------------------------------------------


class Traffic:
    """Requests that come and go, where following one takes a tenth of a step and drafting a token half of one."""

    def __init__(self, chance: float, together: int = 1, following: float = 0.1, drafting: float = 0.5) -> None:
        self.lengths = DraftLengths(MOST)
        self.chance, self.together = chance, together
        self.random = random.Random(1)
        self._following, self._drafting = following * PLAIN, drafting * PLAIN
        self.followed = 0  # steps of requests

    def run(self, groups: int, tokens: int = 150) -> float:
        """So many tokens of each request, in groups: the time it takes as a share of that without drafts."""
        seconds = made = 0.0
        for _ in range(groups):
            states = [DraftState() for _ in range(self.together)]
            for state in states:
                self.lengths.start(state, True, self.together)
            left = [tokens] * self.together
            while max(left) > 0:
                seconds += self.step(states, left)
            made += self.together * tokens - sum(left)
        return seconds / (made / self.together * step_seconds(self.together))

    def step(self, states: list[DraftState], left: list[int]) -> float:
        followed = [i for i, state in enumerate(states) if state.drafting_enabled]
        self.followed += len(followed)
        counts = [0] * len(states)
        if followed:
            own = [states[i] for i in followed]
            given = self.lengths.choose(own, [MOST] * len(own), 10_000, len(states))
            vain = self.lengths.drop_drafting(own)
            assert vain is None or (given[vain] == 0 and not own[vain].drafting_enabled)
            for i, count in zip(followed, given, strict=True):
                counts[i] = count
        rows, depth = len(states) + sum(counts), max(counts)
        drafting = self._following * len(followed) + self._drafting * depth
        seconds = step_seconds(rows) + drafting
        accepted = [next((j for j in range(k) if self.random.random() >= self.chance), k) for k in counts]
        if followed:
            self.lengths.observe(len(states), seconds, drafting, depth, sum(counts), sum(accepted))
        else:
            self.lengths.account(seconds, drafting)
        for i, count in enumerate(counts):
            if count:
                self.lengths.accepted(states[i], count, accepted[i])
            left[i] -= 1 + accepted[i]
        return seconds


@pytest.mark.scale
@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_following_and_trying_in_vain_take_little_time(chance: float, together: int) -> None:
    traffic = Traffic(chance, together)
    assert traffic.run(40) < 1.025
    assert traffic.followed < 0.1 * 40 * together * 150


def test_following_that_costs_next_to_nothing_goes_on() -> None:
    traffic = Traffic(0.0, following=0.001, drafting=0.01)
    assert traffic.run(10) < 1.02
    assert traffic.followed == 10 * 150


def test_where_drafts_pay_all_are_followed() -> None:
    traffic = Traffic(0.95, drafting=0.2)
    assert traffic.run(20) < 0.7
    states = [DraftState() for _ in range(10)]
    for state in states:
        traffic.lengths.account(0.0, 10.0)  # whatever a long prompt took
        traffic.lengths.start(state, True, 1)
    assert all(state.drafting_enabled for state in states)


def test_drafts_that_begin_to_be_accepted_are_found_by_new_requests() -> None:
    traffic = Traffic(0.0, drafting=0.2)
    traffic.run(30)
    traffic.chance = 0.95
    traffic.run(30)
    assert traffic.run(10) < 0.7


def test_a_new_request_is_supposed_to_be_like_those_before_it_of_its_kind() -> None:
    traffic = Traffic(0.95, drafting=0.2)
    traffic.run(5)
    greedy, sampled = DraftState(), DraftState()
    traffic.lengths.start(greedy, True, 1)
    traffic.lengths.start(sampled, False, 1)
    assert greedy.chances[1] >= 17 and sampled.chances == (20, 16, 16)


def test_of_those_followed_in_vain_the_worst_is_let_go_first() -> None:
    lengths = DraftLengths(MOST)
    for _ in range(200):
        lengths.choose([DraftState()], [0], 100, 3)
        lengths.observe(3, PLAIN, 0.1 * PLAIN, 0)
    states = [known(first, 9, idle) for first, idle in ((9, 10), (3, 10), (1, 0))]
    assert lengths.drop_drafting(states) == 1  # the last one has drafts
    assert [state.drafting_enabled for state in states] == [True, False, True]


# --- limits -----------------------------------------------------------------------------------------------


@pytest.mark.scale
def test_no_length_is_beyond_its_room_the_most_or_the_budget() -> None:
    draw = random.Random(3)
    for whole in (False, True):
        lengths = DraftLengths(MOST, tree_mode=whole)
        for _ in range(2000):
            count = draw.randrange(0, 12)
            states = [known(draw.randrange(21), draw.randrange(21)) for _ in range(count)]
            room = [draw.choice([0, 1, 3, 8, 50]) for _ in states]
            budget = draw.choice([0, 1, 7, 16, 1000])
            chosen = lengths.choose(states, room, budget, max(1, count))
            assert len(chosen) == count and sum(chosen) <= budget
            assert all(0 <= c <= min(r, MOST) for c, r in zip(chosen, room, strict=True))
            if whole:
                assert set(chosen) <= {0, MOST}
            seconds = 0.05 + draw.random() * 0.01
            lengths.observe(max(1, count), seconds, 0.0, max(chosen, default=0), sum(chosen))


def test_the_choice_is_the_best_of_all_where_the_times_are_known() -> None:
    """Against every choice of lengths for three requests, on a measured curve."""
    draw = random.Random(5)
    for _ in range(20):
        most, knee, each = 3, draw.choice([4, 6, 7]), draw.choice([0.0, 0.05, 0.2])
        lengths = DraftLengths(most)
        for _ in range(4):
            for rows in range(1, 13):
                depth = (rows - 1) % 4
                lengths.observe(rows - depth, max(1.0, rows / knee) + each * depth, each * depth, depth, depth)
        levels = [(draw.randrange(0, 20), draw.randrange(0, 20)) for _ in range(3)]
        states = [known(*each) for each in levels]

        def rate(
            chosen: Sequence[int], levels: list[tuple[int, int]] = levels, knee: int = knee, each: float = each
        ) -> float:
            tokens = 3.0
            for (first, later), count in zip(levels, chosen, strict=True):
                tokens += sum(first / 20 * (later / 20) ** j for j in range(count))
            return tokens / (max(1.0, (3 + sum(chosen)) / knee) + each * max(chosen))

        best = max(rate((a, b, c)) for a in range(4) for b in range(4) for c in range(4))
        chosen = lengths.choose(states, [most] * 3, 100, 3)
        assert rate(chosen) >= best / 1.035


@pytest.mark.parametrize(("chance", "drafts"), [(19, 2), (18, 2), (14, 1), (12, 0)])
def test_drafting_goes_no_deeper_for_less_than_what_was_measured_may_be_wrong_by(chance: int, drafts: int) -> None:
    """At 19 of 20, one to four drafts make 1.22, 1.30, 1.33 and 1.33 times the tokens a second of none."""
    lengths = DraftLengths(4)
    for _ in range(4):
        for depth in range(5):
            lengths.observe(1, 1.0 + 0.6 * depth, 0.6 * depth, depth, depth)
    lengths.choose([known(chance, chance)], [4], 100, 1)
    lengths.account(0.0, 1000.0)  # nothing is hoped for
    assert lengths.choose([known(chance, chance)], [4], 100, 1) == [drafts]


def test_a_tree_is_drafted_whole_and_only_where_it_pays() -> None:
    good = Machine([0.8], whole=True)
    good.run(steps=100)
    assert mean([length for (length,) in good.history]) > 0.9 * MOST
    bad = Machine([0.1], whole=True, drafting=lambda depth: 0.5 * PLAIN)
    assert bad.run(tokens=300) < 1.05 * bad.plain(300)


def test_most_must_be_at_least_one() -> None:
    with pytest.raises(ValueError, match="most is 0; it must be at least 1"):
        DraftLengths(0)
