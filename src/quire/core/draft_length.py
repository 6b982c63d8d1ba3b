"""How many tokens to draft for each decoding request: the number that gives the most tokens per second.

A draft costs its row of the step that verifies it, and its own making. What both take is measured as steps go by; how
often drafts are accepted, too. What has not been measured is taken to be cheap, so that it is tried and then known.
Nothing here changes a token, only the time it takes.

Acceptance comes in bursts, and one text is not like the next, so that what was seen last says too little of whether
drafts pay. Therefore there is an account of what drafting has gained and lost, in seconds. As long as it is not
overdrawn, drafts that do not seem to pay get the benefit of the doubt (`_hoped`), and now and then some are tried that
cannot pay as far as is known. Where it is overdrawn, requests without drafts are let go, since to follow one, so that
it can be drafted later, takes time, too; and new ones are followed only where drafts are expected to pay.

Deciding takes time as well, which shows where a step takes half a millisecond. So a choice is kept for some steps, and
what is learned meanwhile is only noted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter

from quire.core.step import StepResult

_FORGET = 0.95
"""Factor by which a verdict's weight decays with each newer one: about 20 verdicts count."""

_POOL_FORGET = 0.99
"""As `_FORGET`, of what all requests of a kind have shown: some 100 verdicts count."""

_PRIOR = 8.0
"""How many trials of other requests count besides a request's own (the weight of the prior)."""

_OPTIMISM = 0.8
"""Acceptance rates assumed before any draft has been verified."""

_TREE = 2.0
"""Accepted drafts per tree assumed before any has been verified."""

_LEVELS = 20
"""Acceptance rates are rounded to one of this many levels; requests of equal level are decided together."""

_Chances = tuple[int, int, int]
"""Of drafts to be there where they are wanted, of a first one to be accepted, and of each later one, in parts of
`_LEVELS`."""

_ALL = (_LEVELS, _LEVELS, _LEVELS)

_RECENT = 8
"""How many recent times are kept per step size: contexts grow, and the machine's load varies."""

_FREE_ROWS = 1.5
"""Up to this multiple of the largest size seen, rows are assumed to cost no more; beyond that, in proportion."""

_MARGIN = 1.03
"""Drafts must give at least this factor more tokens per second than no drafts, and deeper ones than shallower ones: a
smaller gain is within the error of measurement."""

_SHORTEST = 1e-6
"""Least duration assumed for a step, in case the clock is too coarse to measure it."""

_TURN = 12
"""Steps for which a choice is kept, as long as the same requests are decoded and no size of step is new."""

_EXPLORE = 32
"""Steps between explorations while drafts pay off."""

_PAUSE = 8
"""Steps between explorations while they do not."""

_SHARE = 0.01
"""Of all time, so much may be lost."""

_WORTH = 1.06
"""Drafts must make this many times the tokens a second of none to have gained anything. Less is within the error of
what was measured, and requests that get ahead leave the last ones of a batch alone, in steps hardly shorter."""

_FIRST_CREDIT = 6.0
"""What the account begins with: the time of so many steps."""

_MOST_CREDIT = 40.0
"""The account's most."""


@dataclass(slots=True)
class Average:
    """An exponentially weighted success rate.

    Attributes:
        value: from 0 to 1 (for trees: up to the number of drafts in one).
        weight: effective number of trials.
    """

    value: float = _OPTIMISM
    weight: float = _PRIOR

    def learn(self, trials: int, successes: float, forget: float) -> None:
        """Of so many trials, some succeeded."""
        if trials:
            kept = self.weight * forget**trials
            self.weight = kept + trials
            self.value = (kept * self.value + successes) / self.weight


@dataclass(slots=True)
class Pool:
    """Recent acceptance rates over all requests of a kind.

    Attributes:
        first: how many first drafts are accepted; of trees: how many drafts of one.
        later: how many others, of those before which all were accepted.
        there: how often there are drafts where they are wanted: where there were none the last time, and where some.
    """

    first: Average = field(default_factory=Average)
    later: Average = field(default_factory=Average)
    there: tuple[Average, Average] = field(default_factory=lambda: (Average(1.0), Average(1.0)))


@dataclass(slots=True, eq=False)
class DraftState:
    """Statistics about one request's drafts.

    Attributes:
        first: how many first drafts were accepted; of trees: how many drafts of one.
        pool: what is known of all requests of its kind.
        chances: by what this request and others of its kind have shown.
        there: whether there were any when they were wanted last.
        idle: steps since it was given drafts.
        drafting_enabled: whether it can be drafted; once that was dropped, it never can.
    """

    first: Average = field(default_factory=lambda: Average(weight=0.0))
    pool: Pool = field(default_factory=Pool)
    chances: _Chances = (_LEVELS, round(_LEVELS * _OPTIMISM), round(_LEVELS * _OPTIMISM))
    there: bool = True
    idle: int = 0
    drafting_enabled: bool = True

    def learn(self, accepted: int, proposed: int, tree_mode: bool) -> None:
        """So many of its drafts, or of its tree, were accepted; it may have had none to be verified."""
        self.pool.there[self.there].learn(1, proposed > 0, _POOL_FORGET)
        self.there = proposed > 0
        if proposed:
            success = accepted if tree_mode else min(1, accepted)
            self.first.learn(1, success, _FORGET)
            self.pool.first.learn(1, success, _POOL_FORGET)
        if accepted and not tree_mode:
            self.pool.later.learn(min(accepted, proposed - 1), accepted - 1, _POOL_FORGET)

    def rate(self) -> None:
        """Update `chances` from the statistics."""
        own, pool = self.first, self.pool
        first = (own.weight * own.value + _PRIOR * pool.first.value) / (own.weight + _PRIOR)
        there, later = pool.there[self.there].value, pool.later.value
        self.chances = round(_LEVELS * there), round(_LEVELS * first), round(_LEVELS * later)


def _hoped(chances: _Chances) -> _Chances:
    """Halfway to certain, on a scale of ratios: what was never accepted is not hoped for."""
    there, first, later = chances
    return there, round(math.sqrt(first * _LEVELS)), round(math.sqrt(later * _LEVELS))


class _Times:
    """Seconds by size, measured in buckets (1, 2, ... 16, 18, 20, ... 32, 36, ...) and interpolated between them.

    A bucket counts once it has two measurements, since the first may include warm-up. Larger sizes are assumed to take
    no less time, and at most proportionally more. Beyond the largest, the last segment is extrapolated (with only one
    known size, larger ones are assumed to take no more, so that they are tried); from `_FREE_ROWS` times the largest
    on, the time is at least proportional.

    Args:
        once: sizes up to this much beyond the largest may take no more, even if that is over `_FREE_ROWS` times it.
    """

    def __init__(self, once: float) -> None:
        self._once = once
        self._cells: defaultdict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def observe(self, size: int, seconds: float) -> bool:
        """Record a step's time; returns whether its bucket counts from now on."""
        cell = self._cells[_cell_of(size)]
        cell.append((seconds, size))
        return len(cell) == 2

    def refresh(self) -> None:
        """Recompute the curve. Each bucket counts with its lower third, so that hiccups do not matter."""
        known = [sorted(cell)[(len(cell) - 1) // 3] for cell in self._cells.values() if len(cell) > 1]
        known.sort(key=lambda pair: pair[1])
        self._sizes = [size for _, size in known]
        self._seconds = [seconds for seconds, _ in known]
        for i in range(1, len(known)):
            if self._sizes[i - 1]:
                self._seconds[i] = min(self._seconds[i], self._seconds[i - 1] * self._sizes[i] / self._sizes[i - 1])
        for i in range(len(known) - 2, -1, -1):
            self._seconds[i] = min(self._seconds[i], self._seconds[i + 1])

    def knows(self, size: int) -> bool:
        """Whether steps of up to 1.5 times this size have been measured; larger ones say little about it."""
        return bool(self._sizes) and self._sizes[0] <= 2 * size

    def at(self, size: float) -> float:
        """Seconds at this size; 0 where nothing is known."""
        sizes, seconds = self._sizes, self._seconds
        i = bisect_left(sizes, size)
        if i < len(sizes):
            if i == 0 or sizes[i] == size:
                return seconds[i]
            part = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
            return seconds[i - 1] + part * (seconds[i] - seconds[i - 1])
        if not sizes:
            return 0.0
        last = sizes[-1]
        slope = (seconds[-1] - seconds[-2]) / (last - sizes[-2]) if len(sizes) > 1 else 0.0
        most = seconds[-1] * size / last if last else math.inf
        least = seconds[-1] * size / max(_FREE_ROWS * last, last + self._once)
        return max(min(seconds[-1] + slope * (size - last), most), least)


def _cell_of(size: int) -> int:
    """The bucket's number: each size up to 16 has its own, then there are eight per doubling."""
    shift = max(0, size.bit_length() - 4)
    return 8 * shift + (size >> shift)


class DraftLengths:
    """Decides how many tokens to draft for each decoding request.

    With an acceptance rate of a, a request with k drafts yields (1 - a^(k+1)) / (1 - a) tokens per step (Leviathan et
    al. 2023), so its j-th draft is worth a^j tokens. The n most valuable drafts of all requests are chosen; n, and the
    drafting depth, are chosen for the most tokens per second.

    Args:
        most: most drafts of one request.
        tree_mode: a request gets `most` drafts (a tree) or none; they are worth the mean number accepted.

    Raises:
        ValueError: `most` is less than 1.
    """

    def __init__(self, most: int, *, tree_mode: bool = False) -> None:
        if most < 1:
            raise ValueError(f"most is {most}; it must be at least 1")
        self._most = most
        self._tree_mode = tree_mode
        self._depths = (most,) if tree_mode else range(1, most + 1)
        self._unit = most if tree_mode else 1  # drafts that a request gets together
        self._verifying = _Times(once=most)  # by rows
        self._drafting = _Times(once=math.inf)  # by depth; 0 is following without drafting
        self._steps = self._explored = 0
        self._ended = 0.0  # when the last step did
        self._states: Sequence[DraftState] = []  # for which drafts were chosen last
        self._lengths: list[int] = []  # the choice
        self._hoping = False  # it is not expected to pay
        self._due = False  # it must be made anew
        self._age = 0  # steps since then
        self._verdicts: list[tuple[DraftState, int, int]] = []  # since then, see `accepted`
        self._pools: dict[bool, Pool] = {}
        self._plain = 0.0  # seconds of the last step without drafts, as far as is known; 0: nothing is known
        self._credit = 0.0  # seconds that may be lost

    # -- learning ------------------------------------------------------------------------------------------

    def observe_step(self, result: StepResult, tuned: bool) -> None:
        """Learn from a step; `tuned`: no request had more than one token besides drafts, and some could be drafted.

        The gap before a step counts as part of it, since fewer steps have fewer gaps, unless it is so long that the
        engine was idle.
        """
        gap = result.began - self._ended
        self._ended = result.began + result.seconds
        seconds = result.seconds + (gap if 0 < gap < result.seconds else 0.0)
        if not tuned:
            self.account(seconds, result.drafting)
            return
        drafts = accepted = depth = 0
        for span in result.spans:
            drafts += span.num_drafted
            depth = max(depth, span.num_drafted)
            accepted += max(0, len(span.tokens) - 1)
        self.observe(len(result.spans), seconds, result.drafting, depth, drafts, accepted)

    def observe(
        self, base: int, seconds: float, drafting: float, depth: int, drafts: int = 0, accepted: int = 0
    ) -> None:
        """Learn from a step of decodes and their drafts, without prompts.

        Args:
            base: number of requests, each of which had one row besides its drafts.
            seconds: the step's duration.
            drafting: the part of it spent on following requests and drafting.
            depth: most drafts of one request; 0 if none had any.
            drafts, accepted: totals over all requests.
        """
        new = self._verifying.observe(base + drafts, max(_SHORTEST, seconds - drafting))
        new |= self._drafting.observe(self._most if self._tree_mode and depth else depth, drafting)
        worth = self._verifying.at(base) * (1 + accepted / base)  # of its tokens, at the rate without drafts
        spent = self._verifying.at(base + drafts) + self._drafting.at(depth)
        self.account(seconds, spent - (worth / _WORTH if drafts else worth))
        self._age += 1
        self._due |= new or self._age >= _TURN or (self._hoping and self._credit <= 0)

    def accepted(self, state: DraftState, proposed: int, accepted: int) -> None:
        """Of `proposed` drafts that were verified, so many were accepted."""
        self._verdicts.append((state, proposed, accepted))

    def _learn(self) -> None:
        """Take in what was noted since drafts were chosen last."""
        self._verifying.refresh()
        self._drafting.refresh()
        for state, proposed, accepted in self._verdicts:
            state.learn(accepted, proposed, self._tree_mode)
        self._verdicts.clear()
        self._age, self._due = 0, False

    def account(self, seconds: float, lost: float) -> None:
        """So much time went by, and so much of it was lost by following and drafting; negative: it was gained."""
        if self._plain:
            self._credit = min(_MOST_CREDIT * self._plain, self._credit + _SHARE * seconds - lost)

    # -- following -----------------------------------------------------------------------------------------

    def start(self, state: DraftState, greedy: bool, running: int) -> None:
        """Make a new request's state: decide whether it is followed, and assume that it is like earlier requests.

        Args:
            greedy: its kind: greedy and sampled requests have separate statistics.
            running: number of decoding requests, including this one.
        """
        state.pool = self._pools.setdefault(greedy, Pool(Average(_TREE if self._tree_mode else _OPTIMISM)))
        state.rate()
        if self._overdrawn and self._verifying.knows(running):
            rooms = [self._most] * running
            state.drafting_enabled = any(self._search([state.chances] * running, rooms, sum(rooms), running))

    def drop_drafting(self, states: Sequence[DraftState]) -> int | None:
        """Which of these requests is followed without a gain, and loses its drafting; None: none."""
        if not self._overdrawn:
            return None
        idle = [(state.chances, i) for i, state in enumerate(states) if state.idle]
        if not idle:
            return None
        states[min(idle)[1]].drafting_enabled = False
        return min(idle)[1]

    @property
    def _overdrawn(self) -> bool:
        """Whether following must end: it takes more than may be lost anyway, and nothing is left for it."""
        return self._credit < 0 and self._drafting.at(0) > _SHARE * self._plain

    # -- choosing ------------------------------------------------------------------------------------------

    def choose(self, states: Sequence[DraftState], room: Sequence[int], budget: int, base_rows: int) -> list[int]:
        """How many drafts each request gets in a step.

        Args:
            states: the step's decoding requests.
            room: most drafts for each of them.
            budget: most drafts for all of them together.
            base_rows: rows of the step without drafts.
        """
        self._steps += 1
        if self._due or states != self._states or sum(self._lengths) > budget:
            self._learn()
            self._states, self._lengths = states, self._choose(states, room, budget, base_rows)
        lengths = self._fitting(self._lengths, room)
        if self._steps - self._explored >= (_EXPLORE if any(lengths) else _PAUSE) and self._verifying.knows(base_rows):
            lengths = self._explore(lengths, states, room, budget, base_rows)
        for state, length in zip(states, lengths, strict=True):
            state.idle = 0 if length else state.idle + 1
        return lengths

    def _choose(self, states: Sequence[DraftState], room: Sequence[int], budget: int, base: int) -> list[int]:
        """By what is known now; as many as pay, or might while there is credit."""
        if not self._verifying.knows(base):
            return [0] * len(states)
        if not self._plain:
            self._credit = _FIRST_CREDIT * self._verifying.at(base)
        self._plain = self._verifying.at(base)
        for state in states:
            state.rate()
        lengths = self._search([state.chances for state in states], room, budget, base)
        self._hoping = not any(lengths) and self._credit > 0 and not self._tree_mode
        if self._hoping:
            lengths = self._search([_hoped(state.chances) for state in states], room, budget, base)
        return lengths

    def _fitting(self, lengths: Sequence[int], room: Sequence[int]) -> list[int]:
        """As many of these drafts as there is room for; a tree's all or none."""
        if self._tree_mode:
            return [self._most if n and most >= self._most else 0 for n, most in zip(lengths, room, strict=True)]
        return list(map(min, lengths, room))

    def _search(self, chances: Sequence[_Chances], room: Sequence[int], budget: int, base: int) -> list[int]:
        """Add drafts in order of value, for each depth limit, and keep the number with the most tokens per second."""
        kinds = [(each, min(drafts, self._most)) for each, drafts in zip(chances, room, strict=True)]
        alike = Counter(kinds)
        ranked = [(worth, place, each) for each in alike for place, worth in enumerate(self._worths(*each), 1)]
        ranked.sort(key=itemgetter(0), reverse=True)
        seconds = cache(self._verifying.at)  # depths share most of their sizes
        best, depth, count = base / seconds(base), 0, 0
        for deepest in self._depths:
            enough, drafting = _MARGIN * best, self._drafting.at(deepest)
            given, rows, tokens = 0, float(base), float(base)
            for taken, (worth, _, each) in enumerate([one for one in ranked if one[1] <= deepest], 1):
                given += alike[each] * self._unit
                if given > budget:
                    break
                there = alike[each] * self._unit * each[0][0] / _LEVELS
                rows += there
                tokens += there * worth
                rate = tokens / (seconds(rows) + drafting)
                if rate > enough:
                    enough = best = rate
                    depth, count = deepest, taken
        lengths = Counter([each for _, place, each in ranked if place <= depth][:count])
        return [lengths[each] * self._unit for each in kinds]

    def _worths(self, chances: _Chances, count: int) -> list[float]:
        """How likely each of so many drafts of a request is to be accepted; the mean of a whole tree's."""
        first, later = chances[1] / _LEVELS, chances[2] / _LEVELS
        if self._tree_mode:
            return [first / count] if count == self._most and first else []
        worth: list[float] = []
        while len(worth) < count and first >= 1 / _LEVELS:
            worth.append(first)
            first *= later
        return worth

    def _explore(
        self, best: list[int], states: Sequence[DraftState], room: Sequence[int], budget: int, base: int
    ) -> list[int]:
        """Try something other than the best known choice.

        Where drafts pay: none, more or fewer of them, in turns. Else, while there is credit, those requests that have
        had none for longest get as many as would pay if all were accepted.
        """
        if any(best):
            kind = self._steps % 3
            other = [(0, min(2 * n, self._most), (n + 1) // 2)[kind] for n in best]
        elif self._credit <= 0 or not states:
            return best
        else:
            wanted = max(self._search([_ALL] * len(states), room, budget, base)) or 1
            longest = sorted(range(len(states)), key=lambda i: -states[i].idle)[: len(states) // 8 + 1]
            other = [wanted if i in longest else 0 for i in range(len(states))]
        other = self._fitting(other, room)
        self._explored = self._steps
        return other if sum(other) <= budget else best
