"""What connectors have in common: a connector keeps blocks elsewhere (`core/external.py`), and here is the part that
puts what it saves and loads into plans.

Bytes are copied in the order of the plans (`StepPlan.saves`, `StepPlan.loads`), so no block is touched outside the
steps, and what a step in flight may still write is not used before a later step has committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from quire.core.external import Found, Loadable, Pace
from quire.core.prefix import Part, Prefix
from quire.core.prefix_cache import PrefixCache
from quire.core.step import Move, StepPlan, StepResult


class Connector:
    """Keeps blocks elsewhere, for one pool; see `core.external.External`, and docs/kv.md for how to write one.

    By default nothing is found and nothing is saved. A subclass overrides `lookup`; some of `published`, `used` and
    `evicted`, from which it calls `save`; `saved` and `loaded`, to be told what came of it; and `put` and `get`, which
    move the bytes, unless someone else does (`mover.Mover`).

    Attributes:
        cache: the pool's prefix cache.
    """

    cache: PrefixCache
    _numbered = 0

    def reset(self, cache: PrefixCache) -> None:
        """See `External`."""
        self.cache = cache
        self._saves: list[Move] = []
        self._begun: list[Loadable] = []
        self._in_flight: deque[tuple[int, list[Move], list[Loadable]]] = deque()

    # -- for subclasses ----------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Found]:
        """See `External`."""
        return []

    def lookup(self, prefix: Prefix, decoding: bool) -> Found | None:
        """See `External`."""
        return None

    def slot(self, part: Part) -> int:
        """The number of the place of a block that is loaded, for those who move it; by default, a new number. From now
        on until `loaded` or `dropped`, it stays there."""
        self._numbered += 1
        return self._numbered

    def published(self, name: bytes, group: int, block: int) -> None:
        """See `External`."""

    def used(self, name: bytes, group: int, block: int) -> None:
        """See `External`."""

    def evicted(self, name: bytes, group: int, block: int) -> None:
        """See `External`."""

    def saved(self, move: Move) -> None:
        """A block that was to be saved is there now."""

    def loaded(self, found: Loadable, bad: Sequence[Move], seconds: float) -> None:
        """Blocks were loaded, and are in the prefix cache next, as far as none of them is `bad`: has other bytes."""

    def dropped(self, saves: Sequence[Move], found: Sequence[Loadable]) -> None:
        """These moves' step was given up: it may still save until a later one has committed."""

    def pace(self, least: int) -> Pace | None:
        """See `External`."""
        return None

    @property
    def waits(self) -> bool:
        """See `External`."""
        return False

    def wait(self, seconds: float) -> bool:
        """Nothing can run: wait up to this long for what is on its way; whether there may be something."""
        return True

    def close(self) -> None:
        """The engine ends: nothing more is called."""

    def put(self, name: bytes, value: bytes) -> None:
        """Keep a block's value; called by the thread that computes steps. It may be lost, or be there already."""
        raise NotImplementedError

    def get(self, name: bytes) -> bytes | None:
        """A block's value, None if it is not there; called by the thread that computes steps. What is returned is
        verified: other bytes than those that were put are a miss."""
        raise NotImplementedError

    def wrong(self) -> Iterator[str]:
        """See `External`."""
        return iter(())

    # -- plans -------------------------------------------------------------------------------------------------

    def save(self, block: int, name: bytes, group: int, slot: int = 0) -> None:
        """Have the next plan save a block, before anything is written into it."""
        self._saves.append(Move(block, slot, name, group))

    def load(self, found: Loadable, allocate: Callable[[int], int]) -> None:
        """See `External`."""
        slots = [self.slot(part) for part in found.parts]  # before others are evicted, which may be saved there
        found.moves = [
            Move(allocate(part.group), slot, part.name, part.group)
            for part, slot in zip(found.parts, slots, strict=True)
        ]
        self._begun.append(found)

    @property
    def has_moves(self) -> bool:
        """Whether the next plan has saves or loads."""
        return bool(self._begun or self._saves)

    @property
    def under_way(self) -> list[Loadable]:
        """All loads that have not ended."""
        return [*self._begun, *(found for _, _, loads in self._in_flight for found in loads)]

    @property
    def saves_under_way(self) -> list[Move]:
        """All saves that have not ended."""
        return [*self._saves, *(move for _, saves, _ in self._in_flight for move in saves)]

    def planned(self, number: int) -> tuple[list[Move], list[Move]]:
        """See `External`."""
        saves, begun, self._saves, self._begun = self._saves, self._begun, [], []
        if saves or begun:
            self._in_flight.append((number, saves, begun))
        return saves, [move for found in begun for move in found.moves]

    def committed(self, plan: StepPlan, result: StepResult) -> list[Loadable]:
        """See `External`."""
        if not self._in_flight or self._in_flight[0][0] != plan.number:
            return []
        _, saves, loads = self._in_flight.popleft()
        for move in saves:
            self.saved(move)
        for found in loads:
            bad = [move for move in found.moves if move.slot in result.bad_loads]
            places = (part.place for part, move in zip(found.parts, found.moves, strict=True) if move in bad)
            found.num_published = min(places, default=found.prefix.first + len(found.hashes)) - found.prefix.first
            self.loaded(found, bad, result.loading)
        return loads

    def given_up(self) -> None:
        """See `External`."""
        for _, saves, loads in self._in_flight:
            self.dropped(saves, loads)
        self._in_flight.clear()
