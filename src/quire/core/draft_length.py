"""How many tokens to draft for each decoding request: as many as make the most tokens a second.

A draft costs its row of the step that verifies it, and its own making. What both take is measured as steps go by; how
often a request's drafts are accepted, too. What has not been measured is taken to be cheap, so that it is tried and
then known. Nothing here changes a token, only the time it takes.

While no drafts are expected to pay, two things only cost time: trying some now and then, and following requests so that
they can be drafted at all. Both are paid from an account to which a share of all time is credited. While it is
overdrawn nothing is tried, and requests lose their drafting for good, one a step.

What each part is worth stands in benchmarks/README.md, under "Self-tuned draft lengths".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.step import StepResult
from quire.core.step_times import StepTimes

_OPTIMISM = 0.8
"""Acceptance as long as none has been seen: so high that whatever may pay is tried."""

_PRIOR = 8
"""Drafts that what others have shown is worth to a new request: its own soon count for more."""

_WINDOW = 20
"""Drafts that an average remembers: enough to tell 0.6 from 0.8, few enough to turn within a sentence."""

_LEVELS = 20
"""Chances are rounded to one of so many, and requests of equal chances are decided together: that is fast."""

_Chances = tuple[int, int]
"""Of a first draft, and of each later one, to be accepted, in parts of `_LEVELS`."""

_Draft = tuple[float, int]
"""How likely one is to be accepted, negative so that the best sorts first, and its place among the request's."""

_MARGIN = 1.03
"""Drafts must make this many times the tokens a second of none: less is within the error of what was measured."""

_EXPLORE = 96
"""Steps from one without drafts to the next, where drafts pay: what that takes may have changed."""

_SHARE = 0.01
"""Of all time, so much may be lost."""

_MOST_CREDIT = 2.0
"""The account's most, with which it begins: the time of so many steps. One step is the most of a debt."""

_PATIENCE = 4
"""Steps without drafts after which drafting may be dropped: no step in flight verifies any by then. For as many nothing
is tried after drafts of which none was accepted, even if they cost nothing."""


@dataclass(slots=True)
class Average:
    """A mean over the last trials.

    Attributes:
        value: what share of them succeeded; of trees, how many drafts of one were accepted.
        weight: trials that back it, `_WINDOW` at most.
    """

    value: float = _OPTIMISM
    weight: float = _PRIOR

    def learn(self, trials: int, successes: int, window: int) -> None:
        """Of so many trials, some succeeded."""
        kept = max(0.0, min(self.weight, window - trials))
        self.value = (kept * self.value + successes) / (kept + trials)
        self.weight = kept + trials


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
        first: as of the pool, of its own.
        pool: what all requests of its kind have shown.
        idle: steps since it was given drafts.
        drafting_enabled: whether it can be drafted; once that was dropped, it never can.
    """

    first: Average = field(default_factory=lambda: Average(weight=0.0))
    pool: Pool = field(default_factory=Pool)
    idle: int = 0
    drafting_enabled: bool = True

    @property
    def chances(self) -> _Chances:
        """Of its first draft and of each later one to be accepted."""
        own, pool = self.first, self.pool
        first = (own.weight * own.value + _PRIOR * pool.first.value) / (own.weight + _PRIOR)
        return round(_LEVELS * first), round(_LEVELS * pool.later.value)


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
        self._verifying = StepTimes()  # by rows
        self._drafting = StepTimes()  # by depth; 0: following alone
        self._pools: dict[bool, Pool] = {}
        self._since_plain = 0  # steps since the last one without drafts
        self._pause = 0  # steps before something is tried again
        self._trial = False  # a request was enabled to see, and has not been drafted
        self._ended = 0.0  # when the last step did
        self._step_seconds = 0.0  # of a step without drafts
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
        drafted = [span.num_drafted for span in result.spans]
        accepted = sum(max(0, len(span.tokens) - 1) for span in result.spans)
        self.observe(len(drafted), seconds, result.drafting, max(drafted), sum(drafted), accepted)

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
        rows, depth = base + drafts, self._most if self._tree_mode and depth else depth
        self._verifying.observe(rows, max(1e-6, seconds - drafting))  # a coarse clock may see none of it
        self._drafting.observe(depth, drafting)
        if drafts and not accepted:
            self._pause = _PATIENCE
        gained = self._verifying.at(base) * (1 + accepted / base)
        self.account(seconds, self._verifying.at(rows) + self._drafting.at(depth) - gained)

    def account(self, seconds: float, lost: float) -> None:
        """So much time went by, and so much of it was lost by following and drafting; negative: it was gained."""
        if self._step_seconds:
            credit = self._credit + _SHARE * seconds - lost
            self._credit = min(_MOST_CREDIT * self._step_seconds, max(-self._step_seconds, credit))

    def accepted(self, state: DraftState, proposed: int, accepted: int) -> None:
        """Of `proposed` drafts that were verified, so many were accepted."""
        if proposed:
            success = accepted if self._tree_mode else min(1, accepted)
            state.first.learn(1, success, _WINDOW)
            state.pool.first.learn(1, success, 2 * _WINDOW)
            if accepted and proposed > 1 and not self._tree_mode:
                state.pool.later.learn(min(accepted, proposed - 1), accepted - 1, 2 * _WINDOW)

    # -- whose drafting is enabled -------------------------------------------------------------------------

    def start(self, state: DraftState, greedy: bool, running: int) -> None:
        """A new request: decides whether it can be drafted, and supposes that it is like those before it.

        Args:
            greedy: requests are of two kinds.
            running: requests that decode beside it, itself included.
        """
        state.pool = self._pools.setdefault(greedy, Pool())
        if not self._verifying.at(running) or self._cheap:
            return
        if not any(self._best([state.chances] * running, [self._most] * running, self._most * running, running)):
            state.drafting_enabled = self._credit > 0
            if state.drafting_enabled:  # one is enough to see, and it may be a short one
                self._credit, self._trial = 0.0, True

    def drop_drafting(self, states: Sequence[DraftState]) -> int | None:
        """Which of these requests is followed without a gain, and loses its drafting; None: none."""
        idle = [(state.chances, i) for i, state in enumerate(states) if state.idle >= _PATIENCE]
        if self._credit >= 0 or self._cheap or not idle:
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
        lengths = [0] * len(states)
        if states and budget > 0 and self._verifying.at(base_rows):
            self._step_seconds = self._verifying.at(base_rows)
            least = self._most if self._tree_mode else 0
            room = [min(drafts, self._most) if drafts >= least else 0 for drafts in room]
            kinds = [state.chances for state in states]
            lengths = self._best(kinds, room, budget, base_rows)
            if any(lengths) and self._since_plain >= _EXPLORE:
                lengths = [0] * len(states)
            elif not any(lengths) and (self._trial or (self._credit > 0 and self._pause <= 0)):
                self._trial = False
                lengths = self._explore(states, room, budget, base_rows)
        self._since_plain = self._since_plain + 1 if any(lengths) else 0
        self._pause -= 1
        for state, length in zip(states, lengths, strict=True):
            state.idle = 0 if length else state.idle + 1
        return lengths

    def _best(self, kinds: Sequence[_Chances], room: Sequence[int], budget: int, base: int) -> list[int]:
        """The drafts of each request that make the most tokens a second: those worth most first, down to each depth."""
        requests = list(zip(kinds, room, strict=True))
        drafts = {kind: self._drafts(*kind) for kind in set(requests)}
        counts: Counter[_Draft] = Counter()
        for kind, count in Counter(requests).items():
            for draft in drafts[kind]:
                counts[draft] += count
        ordered = sorted(counts.items())
        best, deepest, last = _MARGIN * base / self._verifying.at(base), 0, (0.0, 0)
        for depth in range(1, self._most + 1):
            rows, tokens, drafting = base, float(base), self._drafting.at(depth)
            for draft, count in ordered:
                if draft[1] > depth:
                    continue
                rows += count
                tokens -= count * draft[0]
                if rows > base + budget:
                    break
                rate = tokens / (self._verifying.at(rows) + drafting)
                if rate > best:
                    best, deepest, last = rate, depth, draft
        return [sum(draft <= last and draft[1] <= deepest for draft in drafts[kind]) for kind in requests]

    def _drafts(self, chances: _Chances, count: int) -> list[_Draft]:
        """Those that a request may get, the best first. Of a tree each is worth the same, and in the last place."""
        first, later = chances[0] / _LEVELS, chances[1] / _LEVELS
        if self._tree_mode:
            return [(-first / count, count)] * count if count and first else []
        worths = [first * later**place for place in range(count)]
        return [(-worth, place) for place, worth in enumerate(worths, start=1) if worth >= 1 / _LEVELS]

    def _explore(self, states: Sequence[DraftState], room: Sequence[int], budget: int, base: int) -> list[int]:
        """Those requests that have had no drafts for longest get as many as would pay if nothing were known of them."""
        wanted = max(self._best([DraftState().chances] * len(states), room, budget, base)) or 1
        wanted = self._most if self._tree_mode else wanted
        longest = sorted(range(len(states)), key=lambda i: -states[i].idle)[: len(states) // 8 + 1]
        lengths = [min(room[i], wanted) if i in longest else 0 for i in range(len(states))]
        return lengths if sum(lengths) <= budget else [0] * len(states)
