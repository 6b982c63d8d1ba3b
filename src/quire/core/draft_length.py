"""How many tokens to draft for each decoding request: as many as make the most tokens a second.

A draft costs its row of the step that verifies it, and its own making. What both cost is measured as steps go by; how
often a request's drafts are accepted, too. What is not known, or has not been seen for long, is taken to be cheap, so
that it is tried and then known. Nothing here changes a token, only the time it takes.

Whoever drafts must follow a request from its start, which costs a little of every step. An account is kept of what that
and drafting have cost, and what drafts have gained. Where it is overdrawn, requests that get no drafts are let go, and
new ones are only followed where drafts are expected to pay; a share of all time is credited to it, so that now and then
one is tried.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.step import StepResult

_FORGET = 0.95
"""Weight that a draft's verdict keeps with each newer one of its request, or with each idle step: some 20 count."""

_SUPPOSED = 4.0
"""Trials that a request begins with, though they never were: three in four accepted, or as many as of others."""

_RECENT = 5
"""Steps of about one size whose times are kept: the context grows, and others load the machine."""

_FREE_ROWS = 1.5
"""So many times the most rows ever seen may cost nothing more, as far as is known; more rows cost in proportion."""

_SHORTEST = 1e-6
"""Seconds that a step takes at least: a coarse clock may see none of it."""

_MARGIN = 1.05
"""Drafts must make this many times the tokens a second of none: less is within the error of what was measured."""

_SMALLEST_CHANCE = 0.05
"""A draft that is less likely to be accepted is not worth looking at."""

_LEVELS = 20
"""Chances are rounded to one of so many, and requests of equal chance are decided together."""

_LIFE, _LONGEST_LIFE = 40, 400
"""Steps for which a time is believed that was seen once, and most often."""

_FIRST_LOOK = 8
"""Steps after which the time without drafts is measured again at first: all is compared with it, and the first steps
of a process are slow ones. Then after twice as many, and so on."""

_PROBE, _LONGEST_PROBE = 32, 256
"""Steps after which a request that gets no drafts is given one, to see whether they are accepted by now."""

_SURE = 3.0
"""A probe that was accepted is followed by another one until so many trials back the estimate."""

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Depths that are looked at, beside the deepest."""

_DEEP = 4
"""Drafts of a probe where nothing is known of a request itself: more costs little beside that it is probed at all."""

_PROBED_SHARE = 4
"""One in so many requests is probed in a step at most."""

_REFRESH = 8
"""Steps after which what was measured is looked at again, at the latest."""

_POOL_FORGET = 0.98
"""As `_FORGET`, of what all requests of a kind have shown: some 50 verdicts count."""

_TRIAL_SHARE = 0.01
"""Of the time of all steps, so much may be lost by following requests and drafting."""

_TRIAL_STEPS = 8
"""The account's most and least: the time of so many steps."""

_PATIENCE = 4
"""Steps without drafts after which a request may be let go."""


@dataclass(slots=True)
class DraftState:
    """What is known of a request's drafts.

    Attributes:
        tried: forgotten count of drafts that were decided on: those accepted, and the first one that was not. For
            trees: of verifications.
        accepted: forgotten count of those accepted.
        level: their quotient, the chance to be accepted (for trees: what is accepted of one), in parts of `_LEVELS`.
        idle: steps since it was given drafts.
        wait: idle steps until it is probed.
        again: probe it at once.
        empty: verifications in a row for which nothing was proposed.
        followed: whether it can be drafted; once it was let go, it never can.
        pool: what is known of all requests of its kind.
    """

    tried: float = _SUPPOSED
    accepted: float = 0.75 * _SUPPOSED
    level: int = 15
    idle: int = 0
    wait: int = _PROBE
    again: bool = False
    empty: int = 0
    followed: bool = True
    pool: DraftState | None = None

    def resume(self) -> None:
        """It gets drafts after idle steps: what was known counts less, but never less than one trial."""
        keep = max(_FORGET**self.idle, min(1.0, 1.0 / self.tried))
        self.tried *= keep
        self.accepted *= keep
        self.idle = 0

    def learn(self, trials: int, accepted: int, forget: float = _FORGET) -> None:
        """Of so many trials, some were accepted."""
        keep = forget**trials
        self.tried = keep * self.tried + trials
        self.accepted = keep * self.accepted + accepted
        self.level = int(_LEVELS * self.accepted / self.tried + 0.5)
        self.again = accepted > 0 and self.tried < _SURE


@dataclass(slots=True)
class _Cell:
    """Steps of about as many rows, or of as many drafts: the last few, how many there were, and when the last was."""

    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))  # seconds, size
    count: int = 0
    last: int = 0

    @property
    def life(self) -> int:
        """Steps for which it is believed without a new one."""
        return min(_LONGEST_LIFE, _LIFE * self.count)

    @property
    def usual(self) -> tuple[float, int]:
        """The lower median of the last ones: one hiccup among two or more does not show."""
        return sorted(self.recent)[(len(self.recent) - 1) // 2]


class _Times:
    """Seconds by size, measured in cells (1, 2, ... 8, 10, 12, 14, 16, 20, ...) and interpolated between them.

    A cell is believed once it was seen twice (the first time may be slow for being the first), for a while, longer the
    more often it was. Larger steps take no less time.

    Args:
        free: sizes beyond the largest known one cost what the curve's last piece says (of one known size: no more), and
            at least their proportion of this many times the largest.
        once: or of so much more than it.
        origin: size 0 takes no time; a size that was seen once is as good as unknown.
    """

    def __init__(self, free: float, once: int = 0, origin: bool = False) -> None:
        self._free = free
        self._once = once
        self._origin = origin
        self._cells: dict[int, _Cell] = {}
        self.sizes: list[float] = []
        self._seconds: list[float] = []

    def observe(self, now: int, size: int, seconds: float) -> bool:
        """A step, the `now`th, of this size took so long; returns whether little was known of such steps."""
        cell = self._cells.setdefault(_cell_of(size), _Cell())
        cell.recent.append((seconds, size))
        cell.count += 1
        cell.last = now
        return cell.count <= _RECENT

    def refresh(self, now: int) -> None:
        """Makes the curve of the cells that are still believed."""
        live = [cell for cell in self._cells.values() if now - cell.last < cell.life]
        sure = [cell for cell in live if cell.count > 1] or ([] if self._origin else live)
        cells = sorted((size, seconds) for seconds, size in (cell.usual for cell in sure))
        self.sizes = [float(size) for size, _ in cells]
        self._seconds = [seconds for _, seconds in cells]
        for i in range(len(cells) - 2, -1, -1):
            self._seconds[i] = min(self._seconds[i], self._seconds[i + 1])
        if self._origin and cells:
            self.sizes.insert(0, 0.0)
            self._seconds.insert(0, 0.0)

    def sure_of(self, now: int, size: int) -> bool:
        """Whether steps of about this size were seen lately, and more than once if not just now."""
        cell = self._cells.get(_cell_of(size))
        return cell is not None and now - cell.last < min(cell.life, _FIRST_LOOK * 2 ** min(cell.count - 1, 5))

    def at(self, size: float) -> float:
        """Seconds at this size; 0 where nothing is known."""
        sizes, seconds = self.sizes, self._seconds
        if not sizes:
            return 0.0
        free = max(self._free * sizes[-1], sizes[-1] + self._once)
        least = seconds[-1] * size / free if size > sizes[-1] else 0.0
        if size < sizes[0]:  # a hiccup makes the first piece steep: followed down, it would soon be below nothing
            least = seconds[0] * size / sizes[0]
        if len(sizes) == 1:
            return max(seconds[0], least)
        i = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)  # beyond either end the last piece goes on
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        if self._origin and i == 1 and size > sizes[1]:
            slope /= 2  # of the one size that is known, part was there whatever the size
        return max(seconds[i] + slope * (size - sizes[i]), least)


def _cell_of(size: int) -> int:
    """The number of the cell: up to 8 a size has its own, then there are four to every doubling."""
    if size < 8:
        return size
    power = size.bit_length() - 1
    return 4 * power + (size >> (power - 2) & 3)


_Item = tuple[float, int, int, int]
"""Equal drafts: (-(chance to be accepted), so that the best sort first; which one of its request; its level; rows)."""


class DraftLengths:
    """Decides how many tokens to draft for each decoding request.

    A request of which a draft is accepted with chance a makes (1 - a^(k+1)) / (1 - a) tokens of k drafts (Leviathan et
    al. 2023): its j-th draft is worth a^j. The best n drafts of all requests are those worth the most; n, and the
    depth that drafting goes to, are chosen for the most tokens a second.

    Args:
        most: drafts of one request.
        whole: a request gets `most` drafts (a tree) or none; the mean number accepted is what they are worth.

    Raises:
        ValueError: `most` is less than 1.
    """

    def __init__(self, most: int, *, whole: bool = False) -> None:
        if most < 1:
            raise ValueError(f"most is {most}; it must be at least 1 (without drafts there is nothing to decide)")
        self._most = most
        self._whole = whole
        self._verifying = _Times(_FREE_ROWS, once=most if whole else 1)
        self._drafting = _Times(1.0, origin=True)
        self._now = self._refreshed = 0
        self._ended = 0.0  # when the last step did
        self._since_probe = 0
        self._chosen: dict[tuple[object, ...], list[int]] = {}  # since what was measured was looked at
        self._pools: dict[bool, DraftState] = {}
        self._step_seconds = 0.0  # of a usual step of decodes
        self._credit = math.inf  # seconds that may be lost: at first, the most

    def observe_step(self, result: StepResult, tuned: bool) -> None:
        """Learn from a step; `tuned`: nobody had more than one token beside drafts, and somebody could be drafted.

        The gap before it is part of what a step takes: fewer steps have fewer gaps. A longer one was no work.
        """
        gap = result.began - self._ended
        self._ended = result.began + result.seconds
        seconds = result.seconds + (gap if 0 < gap < result.seconds else 0.0)
        if not tuned:
            self.account(seconds, result.drafting)
            return
        drafted, base = [span.num_drafted for span in result.spans], len(result.spans)
        drafts = sum(drafted)
        accepted = sum(max(0, len(span.tokens) - 1) for span in result.spans)
        self.observe(base + drafts, seconds, result.drafting, max(drafted), drafts, accepted)

    def observe(
        self, rows: int, seconds: float, drafting: float, depth: int, drafts: int = 0, accepted: int = 0
    ) -> None:
        """Learn from a step of decodes and their drafts, without prompts.

        Args:
            rows: computed, drafts included.
            seconds: of the step.
            drafting: how many of those went by in following requests and drafting.
            depth: the most drafts of one request; 0: none had any.
            drafts, accepted: of all requests.
        """
        self._now += 1
        new = self._verifying.observe(self._now, rows, max(_SHORTEST, seconds - drafting))
        if depth:
            new |= self._drafting.observe(self._now, self._most if self._whole else depth, drafting)
        else:
            self._step_seconds += (seconds - self._step_seconds) * (0.1 if self._step_seconds else 1.0)
        if new or self._now - self._refreshed >= _REFRESH:
            self._refreshed = self._now
            self._verifying.refresh(self._now)
            self._drafting.refresh(self._now)
            self._chosen.clear()
        base = rows - drafts
        plain = self._verifying.at(base)
        self.account(seconds, drafting + self._verifying.at(rows) - plain * (base + accepted) / base)

    def account(self, seconds: float, lost: float) -> None:
        """A step took so long, prompts or not, and lost so much of that by following and drafting; negative: it gained.

        Losses may be a share of all time, and what drafts have gained lately.
        """
        if not self._step_seconds:
            return
        most = _TRIAL_STEPS * self._step_seconds
        self._credit = min(most, max(-most, self._credit + _TRIAL_SHARE * seconds - lost))

    def start(self, state: DraftState, greedy: bool, running: int) -> None:
        """A new request, beside others: decides whether it is followed, and supposes that it is like those before it.

        Args:
            greedy: requests are of two kinds.
            running: requests that decode beside it, itself included.
        """
        pool = state.pool = self._pools.setdefault(greedy, DraftState())
        if state.tried != _SUPPOSED:  # it has shown something itself
            return
        if not self._pays(pool.level, running):
            state.followed = state.again = self._credit > 0
            state.tried = 1.0  # what it shows itself shall count: its first probe goes deep
            self._credit -= self._step_seconds if state.followed else 0.0  # about what it will take to see
        state.accepted, state.level = state.tried * pool.accepted / pool.tried, pool.level

    def let_go(self, states: Sequence[DraftState]) -> int | None:
        """Which of these requests is followed in vain, and no longer; None: none is."""
        if self._credit >= 0:
            return None
        idle = [(state.level, i) for i, state in enumerate(states) if state.idle >= _PATIENCE]
        if not idle:
            return None
        states[min(idle)[1]].followed = False
        return min(idle)[1]

    def accepted(self, state: DraftState, proposed: int, accepted: int) -> None:
        """Of `proposed` drafts that were verified, so many were accepted."""
        if not proposed:  # the proposer had none: that says nothing of those that it will have
            state.again = True
            state.empty += 1
            return
        state.empty = 0
        trials = 1 if self._whole else accepted + (accepted < proposed)
        state.learn(trials, accepted)
        if state.pool is not None:
            state.pool.learn(trials, accepted, _POOL_FORGET)

    def choose(self, states: Sequence[DraftState], room: Sequence[int], budget: int, base_rows: int) -> list[int]:
        """How many drafts each request gets in a step.

        Args:
            states: of the step's decoding requests.
            room: drafts that each may have at most.
            budget: drafts that all may have together.
            base_rows: rows that the step computes without drafts.
        """
        if self._credit < 0:
            room = [0 if state.empty >= _PATIENCE else drafts for state, drafts in zip(states, room, strict=True)]
        lengths = [0] * len(states)
        if budget > 0 and self._verifying.sure_of(self._now, base_rows):
            lengths = self._gainful([state.level for state in states], room, budget, base_rows)
        self._probe(lengths, states, room, budget - sum(lengths))
        return lengths

    def _gainful(self, levels: list[int], room: Sequence[int], budget: int, base: int) -> list[int]:
        """The drafts of each request that make the most tokens a second."""
        most = self._most
        room = [min(drafts, most) for drafts in room]
        key = *levels, *room, min(budget, most * len(levels)), base
        found = self._chosen.get(key)
        if found is None:
            found = [0] * len(levels)
            items = self._items(levels, room)
            rows, depth = self._best(items, budget, base) if items else (0, 0)
            if rows:
                self._grant(found, levels, room, [item for item in items if item[1] <= depth], rows)
            self._chosen[key] = found
        return list(found)

    def _pays(self, level: int, requests: int) -> bool:
        """Whether a request like this one would get drafts beside others that get none, as far as is known."""
        items = self._items([level], [self._most])
        return bool(items) and (not self._verifying.sizes or self._best(items, self._most, requests)[0] > 0)

    def _items(self, levels: list[int], room: Sequence[int]) -> list[_Item]:
        """All drafts that may be made, those worth most first."""
        most = self._most
        groups: dict[int, list[int]] = {}  # level: how many of its requests have room for 0, 1, ... drafts
        for (level, drafts), count in Counter(zip(levels, room, strict=True)).items():
            groups.setdefault(level, [0] * (most + 1))[drafts] += count
        if self._whole:
            return sorted(
                (-level / _LEVELS / most, most, level, most * fits[most])
                for level, fits in groups.items()
                if level and fits[most]
            )
        items = []
        for level, fits in groups.items():
            left, chance = sum(fits), 1.0
            for depth in range(1, most + 1):
                left -= fits[depth - 1]
                chance *= level / _LEVELS
                if not left or chance < _SMALLEST_CHANCE:
                    break
                items.append((-chance, depth, level, left))
        items.sort()
        return items

    def _best(self, items: list[_Item], budget: int, base: int) -> tuple[int, int]:
        """How many drafts of the best depth make the most tokens a second, and that depth; (0, 0): none do.

        Args:
            base: rows, and tokens, of the step without drafts.
        """
        points = self._points(base, min(budget, sum(item[3] for item in items)))
        base_seconds = points[0][1]
        best, rows, best_depth = _MARGIN * base / base_seconds, 0, 0
        last = 0.0
        for depth in self._depths(items, base_seconds):
            drafting = self._drafting.at(depth)
            rate, end = _walk([item for item in items if item[1] <= depth], points, base, drafting)
            if rate < last:
                break  # each further draft is worth less, and its making costs no less
            last = rate
            if rate > best:
                best, rows, best_depth = rate, end - base, depth
        return rows, best_depth

    def _points(self, base: int, most: int) -> list[tuple[int, float]]:
        """The corners of the curve of step times from `base` rows to `most` more."""
        at, sizes = self._verifying.at, self._verifying.sizes
        corners = {base, base + most}
        for size in (*sizes, sizes[-1] * _FREE_ROWS, sizes[-1] + self._most):
            if base < size < base + most:
                corners.add(int(size))
        return [(corner, at(corner)) for corner in sorted(corners)]

    def _depths(self, items: list[_Item], base_seconds: float) -> Sequence[int]:
        """The depths to look at: those that differ in what drafting takes.

        While nobody knows, that is the deepest, from which the others follow; so it is where drafting takes nothing.
        """
        deepest = max(item[1] for item in items)
        if self._whole:
            return (deepest,)
        if self._drafting.at(deepest) < 0.005 * base_seconds:
            return (deepest,)
        return (*(depth for depth in _DEPTHS if depth < deepest), deepest)

    def _grant(self, lengths: list[int], levels: list[int], room: Sequence[int], items: list[_Item], rows: int) -> None:
        """Gives out the first `rows` drafts of `items`."""
        full: dict[int, int] = {}
        part, part_depth, part_left = -1, 0, 0  # the level of which only some requests get one more
        for _, depth, level, count in items:
            if rows < count:
                part, part_depth, part_left = level, depth, rows // (self._most if self._whole else 1)
                break
            full[level] = depth
            rows -= count
        for i, level in enumerate(levels):
            length = full.get(level, 0)
            if level == part and part_left and room[i] >= part_depth:
                length = part_depth
                part_left -= 1
            if length > room[i]:
                length = 0 if self._whole else room[i]
            lengths[i] = length

    def _probe(self, lengths: list[int], states: Sequence[DraftState], room: Sequence[int], budget: int) -> None:
        """Counts the idle steps of those that get nothing, and now and then gives some of them a draft."""
        length = self._most if self._whole else 1
        self._since_probe += 1
        turn = self._since_probe >= _PROBE  # all probe in the same steps: a draft model's steps are dear for one alone
        left = max(1, len(states) // _PROBED_SHARE)
        if turn:
            self._since_probe = 0
        for i, state in enumerate(states):
            if lengths[i]:
                if state.idle:
                    state.resume()
                state.wait = _PROBE
            else:
                state.idle += 1
                wanted = state.again or (turn and state.idle >= state.wait)
                if wanted and left > 0 and min(room[i], budget) >= length:
                    deep = state.tried <= 1.0 and not self._whole
                    lengths[i] = min(_DEEP, self._most, room[i], budget) if deep else length
                    budget -= lengths[i]
                    left -= 1
                    state.wait = min(_LONGEST_PROBE, state.wait if state.again else 2 * state.wait)
                    state.resume()
            state.again = False


def _walk(items: list[_Item], points: list[tuple[int, float]], tokens: float, drafting: float) -> tuple[float, int]:
    """The most tokens a second with the first so many drafts, and the rows of that step.

    Between the corners of the curve and the ends of the items both tokens and time are linear, so that their quotient
    is greatest at one of them.
    """
    best, best_rows = 0.0, 0
    (rows, seconds), place = points[0], 1
    for minus_chance, _, _, count in items:
        end = rows + count
        while rows < end:
            if place == len(points):
                return best, best_rows
            corner, corner_seconds = points[place]
            stop = corner if corner < end else end
            seconds += (corner_seconds - seconds) * (stop - rows) / (corner - rows)
            tokens -= minus_chance * (stop - rows)
            rows = stop
            if stop == corner:
                place += 1
            rate = tokens / (seconds + drafting)
            if rate > best:
                best, best_rows = rate, rows
    return best, best_rows
