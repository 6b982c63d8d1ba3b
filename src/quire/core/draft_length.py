"""How many tokens to draft for each decoding request: as many as make the most tokens a second.

A draft costs its row of the step that verifies it, and its own making. What both take is measured as steps go by; how
often a request's drafts are accepted, too. What has not been measured is taken to be cheap, so that it is tried and
then known. Nothing here changes a token, only the time it takes.

Two things cost time without making any: to follow a request that gets no drafts, so that it can be drafted later; and
to explore, now and then, what is not the best as far as is known. Both are paid from an account to which a share of all
time is credited. Where it is overdrawn, there is no exploring, requests that get no drafts are let go, and new ones are
followed only where drafts are expected to pay.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.step import StepResult

_FORGET = 0.95
"""Weight that a draft's verdict keeps with each newer one: some 20 count."""

_POOL_FORGET = 0.98
"""As `_FORGET`, of what all requests of a kind have shown: some 50 verdicts count."""

_PRIOR = 8.0
"""Trials of other requests that count beside a request's own."""

_OPTIMISM = 0.8
"""The chances of drafts as long as none has been seen."""

_TREE = 2.0
"""So many drafts of a tree are supposed to be accepted as long as none has been seen."""

_LEVELS = 20
"""Chances are rounded to one of so many, and requests of equal chance are decided together."""

_Chances = tuple[int, int]
"""Of a first draft, and of each later one, to be accepted, in parts of `_LEVELS`."""

_RECENT = 8
"""Steps of about one size whose times are kept: the context grows, and others load the machine."""

_FREE_ROWS = 1.5
"""So many times the most rows ever seen may cost nothing more, as far as is known; more rows cost in proportion."""

_MARGIN = 1.03
"""Drafts must make this many times the tokens a second of none, and deeper ones that of less deep ones: less is within
the error of what was measured."""

_SHORTEST = 1e-6
"""Seconds that a step takes at least: a coarse clock may see none of it."""

_TURN = 8
"""Steps from one look at what was measured to the next, at most."""

_EXPLORE = 32
"""Steps from one exploring to the next, where drafts pay."""

_SHARE = 0.01
"""Of all time, so much may be lost by following and exploring."""

_MOST_CREDIT = 3.0
"""The account's most, with which it begins: the time of so many steps."""

_MOST_DEBT = 16.0
"""The account's least, in steps: a tree of a small model takes as long. More was a hiccup, or a long prompt's."""


@dataclass(slots=True)
class Average:
    """A mean that forgets: how many of some trials succeeded.

    Attributes:
        value: from 0 to 1 (for trees: to as many as one has).
        weight: trials that back it.
    """

    value: float = _OPTIMISM
    weight: float = _PRIOR

    def learn(self, trials: int, successes: int, forget: float) -> None:
        """Of so many trials, some succeeded."""
        if trials:
            kept = self.weight * forget**trials
            self.weight = kept + trials
            self.value = (kept * self.value + successes) / self.weight


@dataclass(slots=True)
class Pool:
    """What the drafts of all requests of a kind have shown lately.

    Attributes:
        first: how many first drafts are accepted; of trees: how many drafts of one.
        later: how many others, of those before which all were accepted.
    """

    first: Average = field(default_factory=Average)
    later: Average = field(default_factory=Average)


@dataclass(slots=True)
class DraftState:
    """What is known of a request's drafts.

    Attributes:
        first: how many first drafts were accepted; of trees: how many drafts of one.
        pool: what is known of all requests of its kind.
        chances: of the first draft and of each later one to be accepted, in parts of `_LEVELS`, by what this request
            and others of its kind have shown.
        idle: steps since it was given drafts.
        empty: the proposer had none when it was.
        drafting_enabled: whether it can be drafted; once that was dropped, it never can.
    """

    first: Average = field(default_factory=lambda: Average(weight=0.0))
    pool: Pool = field(default_factory=Pool)
    chances: _Chances = (round(_LEVELS * _OPTIMISM), round(_LEVELS * _OPTIMISM))
    idle: int = 0
    empty: bool = False
    drafting_enabled: bool = True

    def learn(self, accepted: int, proposed: int, tree_mode: bool) -> None:
        """So many of its drafts, or of its tree, were accepted."""
        success = accepted if tree_mode else min(1, accepted)
        self.first.learn(1, success, _FORGET)
        self.pool.first.learn(1, success, _POOL_FORGET)
        if accepted and not tree_mode:
            self.pool.later.learn(min(accepted, proposed - 1), accepted - 1, _POOL_FORGET)
        self.rate()

    def rate(self) -> None:
        """Makes the chances of what is known."""
        own, pool = self.first, self.pool
        weight = own.weight + _PRIOR
        first, later = (own.weight * own.value + _PRIOR * pool.first.value) / weight, pool.later.value
        self.chances = round(_LEVELS * first), round(_LEVELS * later)


class _Times:
    """Seconds by size, measured in cells (1, 2, ... 16, 18, 20, ... 32, 36, ...) and interpolated between them.

    A cell is believed once it was seen twice: the first time may be slow for being the first. Larger sizes take no less
    time, and no more than their proportion. Beyond the largest, the curve's last piece goes on (of one known size, no
    size takes more: so it is tried), but from `_FREE_ROWS` times the largest on at least their proportion of that.

    Args:
        once: sizes up to so much beyond the largest may take no more, however small that is.
    """

    def __init__(self, once: float) -> None:
        self._once = once
        self._cells: dict[int, deque[tuple[float, int]]] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def observe(self, size: int, seconds: float) -> bool:
        """A step of this size took so long; returns whether little was known of such steps."""
        cell = self._cells.setdefault(_cell_of(size), deque(maxlen=_RECENT))
        cell.append((seconds, size))
        return len(cell) < _RECENT

    def refresh(self) -> None:
        """Makes the curve. What is usual is the lower third: hiccups do not show."""
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
        """Whether steps of half as much more, or less, were seen: larger ones say little of it."""
        return bool(self._sizes) and self._sizes[0] <= 2 * size

    def at(self, size: int) -> float:
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
    """The number of the cell: up to 16 a size has its own, then there are eight to every doubling."""
    shift = max(0, size.bit_length() - 4)
    return 8 * shift + (size >> shift)


class DraftLengths:
    """Decides how many tokens to draft for each decoding request.

    A request of which a draft is accepted with chance a makes (1 - a^(k+1)) / (1 - a) tokens of k drafts (Leviathan et
    al. 2023): its j-th draft is worth a^j. The best n drafts of all requests are those worth the most; n, and the
    depth that drafting goes to, are chosen for the most tokens a second.

    Args:
        most: drafts of one request.
        tree_mode: a request gets `most` drafts (a tree) or none; the mean number accepted is what they are worth.

    Raises:
        ValueError: `most` is less than 1.
    """

    def __init__(self, most: int, *, tree_mode: bool = False) -> None:
        if most < 1:
            raise ValueError(f"most is {most}; it must be at least 1 (without drafts there is nothing to decide)")
        self._most = most
        self._tree_mode = tree_mode
        self._depths = (most,) if tree_mode else range(1, most + 1)
        self._verifying = _Times(once=most)  # by rows
        self._drafting = _Times(once=math.inf)  # by depth; 0: following alone
        self._steps = self._explored = 0
        self._again = False  # more was accepted than expected, or none proposed: if that was exploring, it goes on
        self._trial = False  # a request is followed to see, and has not been drafted
        self._ended = 0.0  # when the last step did
        self._chosen: dict[tuple[object, ...], list[int]] = {}  # since the last look at what was measured
        self._pools: dict[bool, Pool] = {}
        self._step_seconds = 0.0
        self._credit = math.inf  # seconds that may be lost

    # -- learning ------------------------------------------------------------------------------------------

    def observe_step(self, result: StepResult, tuned: bool) -> None:
        """Learn from a step; `tuned`: no request had more than one token beside drafts, and some could be drafted.

        The gap before it is part of what a step takes: fewer steps have fewer gaps. A longer one was no work.
        """
        gap = result.began - self._ended
        self._ended = result.began + result.seconds
        seconds = result.seconds + (gap if 0 < gap < result.seconds else 0.0)
        if not tuned:
            self.account(seconds, result.drafting)
            return
        drafted, base = [span.num_drafted for span in result.spans], len(result.spans)
        accepted = sum(max(0, len(span.tokens) - 1) for span in result.spans)
        self.observe(base, seconds, result.drafting, max(drafted), sum(drafted), accepted)

    def observe(
        self, base: int, seconds: float, drafting: float, depth: int, drafts: int = 0, accepted: int = 0
    ) -> None:
        """Learn from a step of decodes and their drafts, without prompts.

        Args:
            base: requests, each of which had a row beside its drafts.
            seconds: of the step.
            drafting: how many of those went by in following requests and drafting.
            depth: the most drafts of one request; 0: none had any.
            drafts, accepted: of all requests.
        """
        rows = base + drafts
        new = self._verifying.observe(rows, max(_SHORTEST, seconds - drafting))
        new |= self._drafting.observe(self._most if self._tree_mode and depth else depth, drafting)
        if new or self._steps % _TURN == 0:
            self._verifying.refresh()
            self._drafting.refresh()
            self._chosen.clear()
        plain = self._verifying.at(base)
        self.account(seconds, self._verifying.at(rows) + self._drafting.at(depth) - plain * (1 + accepted / base))

    def account(self, seconds: float, lost: float) -> None:
        """So much time went by, and so much of it was lost by following and drafting; negative: it was gained."""
        if not self._step_seconds:
            return
        most, least = _MOST_CREDIT * self._step_seconds, -_MOST_DEBT * self._step_seconds
        self._credit = min(most, max(least, self._credit + _SHARE * seconds - lost))

    def accepted(self, state: DraftState, proposed: int, accepted: int) -> None:
        """Of `proposed` drafts that were verified, so many were accepted."""
        state.empty = not proposed
        # That there were none says nothing of those that there will be.
        self._again |= not proposed or accepted > self._expected(state.chances, proposed)
        if proposed:
            state.learn(accepted, proposed, self._tree_mode)

    # -- following -----------------------------------------------------------------------------------------

    def start(self, state: DraftState, greedy: bool, running: int) -> None:
        """A new request, beside others: decides whether it is followed, and supposes that it is like those before it.

        Args:
            greedy: requests are of two kinds.
            running: requests that decode beside it, itself included.
        """
        state.pool = self._pools.setdefault(greedy, Pool(Average(_TREE if self._tree_mode else _OPTIMISM)))
        state.rate()
        if not self._verifying.knows(running):  # the first ones are
            return
        if not any(self._best([state.chances] * running, [self._most] * running, self._most * running, running)):
            state.drafting_enabled = self._credit > 0 or self._cheap
            if state.drafting_enabled and not self._cheap:  # one is enough to see, and it may be a short one
                self._credit, self._trial = 0.0, True

    def drop_drafting(self, states: Sequence[DraftState]) -> int | None:
        """Which of these requests is followed without a gain, and loses its drafting; None: none."""
        if self._credit >= 0 or self._cheap:
            return None
        idle = [(state.chances, i) for i, state in enumerate(states) if state.idle]
        if not idle:
            return None
        states[min(idle)[1]].drafting_enabled = False
        return min(idle)[1]

    @property
    def _cheap(self) -> bool:
        """Whether following takes less than may be lost anyway."""
        return self._drafting.at(0) <= _SHARE * self._step_seconds

    # -- choosing ------------------------------------------------------------------------------------------

    def choose(self, states: Sequence[DraftState], room: Sequence[int], budget: int, base_rows: int) -> list[int]:
        """How many drafts each request gets in a step.

        Args:
            states: of the step's decoding requests.
            room: drafts that each may have at most.
            budget: drafts that all may have together.
            base_rows: rows that the step computes without drafts.
        """
        self._steps += 1
        if self._steps % _TURN == 0:
            for state in states:  # others have learned
                state.rate()
        lengths = [0] * len(states)
        if states and budget > 0 and self._verifying.knows(base_rows):
            self._step_seconds = self._verifying.at(base_rows)
            overdrawn = self._credit < 0 and not self._cheap
            room = [
                0 if overdrawn and state.empty else min(drafts, self._most)
                for state, drafts in zip(states, room, strict=True)
            ]
            lengths = self._best([state.chances for state in states], room, budget, base_rows)
            pause = _EXPLORE if any(lengths) else 0 if self._again or self._trial else _TURN
            self._again = False
            if self._steps - self._explored >= pause:
                lengths = self._explore(lengths, states, room, budget, base_rows)
        for state, length in zip(states, lengths, strict=True):
            state.idle = 0 if length else state.idle + 1
        return list(lengths)

    def _best(self, kinds: Sequence[_Chances], room: Sequence[int], budget: int, base: int) -> list[int]:
        """The drafts of each request that make the most tokens a second."""
        key = *kinds, *room, min(budget, self._most * len(kinds)), base
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self._search(kinds, room, budget, base)
        return found

    def _search(self, kinds: Sequence[_Chances], room: Sequence[int], budget: int, base: int) -> list[int]:
        """Those worth the most first, down to each depth: how many of them make the most tokens a second."""
        alike = Counter(zip(kinds, room, strict=True))
        best, depth, least = base / self._verifying.at(base), 0, 2.0
        for deepest in self._depths:
            enough = _MARGIN * best
            counts: Counter[float] = Counter()
            for (chances, drafts), count in alike.items():
                for worth in self._worth(chances, min(drafts, deepest)):
                    counts[worth] += count
            rows, tokens, drafting = base, float(base), self._drafting.at(deepest)
            for worth, count in sorted(counts.items(), reverse=True):
                rows += count
                tokens += count * worth
                if rows > base + budget:
                    break
                rate = tokens / (self._verifying.at(rows) + drafting)
                if rate > enough:
                    enough = best = rate
                    depth, least = deepest, worth
        return [
            sum(worth >= least for worth in self._worth(chances, min(drafts, depth)))
            for chances, drafts in zip(kinds, room, strict=True)
        ]

    def _worth(self, chances: _Chances, count: int) -> list[float]:
        """How likely each of so many drafts of a request is to be accepted; of a tree, of each draft the same."""
        first, later = chances[0] / _LEVELS, chances[1] / _LEVELS
        if self._tree_mode:
            return [first / count] * count if count == self._most and first else []
        worth: list[float] = []
        while len(worth) < count and first >= 1 / _LEVELS:
            worth.append(first)
            first *= later
        return worth

    def _expected(self, chances: _Chances, count: int) -> float:
        """How many of so many drafts of a request are supposed to be accepted."""
        return chances[0] / _LEVELS if self._tree_mode else sum(self._worth(chances, count))

    def _explore(
        self, best: list[int], states: Sequence[DraftState], room: Sequence[int], budget: int, base: int
    ) -> list[int]:
        """Something else than what is best as far as is known, to see what it brings.

        Where drafts pay: none, more or fewer of them, in turns. Else, while there is credit, those requests that have
        had none for longest get as many as would pay if nothing were known of drafts.
        """
        if not any(best):
            if self._credit <= 0 and not self._trial:
                return best
            self._trial = False
            wanted = max(self._best([DraftState().chances] * len(states), room, budget, base)) or 1
            longest = sorted(range(len(states)), key=lambda i: -states[i].idle)[: len(states) // 8 + 1]
            other = [min(room[i], wanted) if i in longest else 0 for i in range(len(states))]
        else:
            kind = self._steps % 3
            other = [(0, min(most, 2 * n), n // 2)[kind] for n, most in zip(best, room, strict=True)]
        if self._tree_mode:
            other = [self._most if n and most == self._most else 0 for n, most in zip(other, room, strict=True)]
        self._explored = self._steps
        return other if sum(other) <= budget else best
