"""What a waiting request lacks to begin further along its prompt: blocks of each KV group that the next token sees.

Of a group that keeps all positions that is every block up to there; of one with a window those that cover it; of
recurrent layers the state of the last one (see `kv_group`). So where the blocks of a prompt lie in the pool and in
tiers, a request may begin at some places and not at others, as a match in the prefix cache may end at some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.core.block_hash import part_name
from quire.core.block_pool import NULL_BLOCK
from quire.core.prefix_cache import PrefixCache


class Part(NamedTuple):
    """One group's block of a request.

    Attributes:
        place: which of the request's blocks.
        name: see `block_hash.part_name`.
    """

    place: int
    group: int
    name: bytes


class Chain:
    """A waiting request's blocks `first` to `last - 1`.

    Args:
        cache: where it could begin after `first` blocks now.
        hashes: of all its full blocks.
        back: so many of the last tokens of what is found will be computed again.
    """

    def __init__(self, cache: PrefixCache, hashes: list[bytes], first: int, last: int, back: int = 0) -> None:
        self.cache, self.all_hashes, self._back = cache, hashes, back
        self.first, self.last = first, min(last, len(hashes))  # where nothing is cached, nothing is hashed
        self._numbers = sorted(range(len(cache.groups)), key=lambda number: cache.groups[number].window is not None)

    @property
    def hashes(self) -> list[bytes]:
        """Of these blocks."""
        return self.all_hashes[self.first : self.last]

    def reach(self, there: Callable[[bytes], bool]) -> int:
        """After how many blocks the request could begin if all parts that are `there`, by name, were in the pool."""
        groups, end, first = self.cache.groups, self.first, self.first
        runs = {number: first - self._seen(number, first) for number in self._numbers}  # that end at a place
        for place in range(first, self.last):
            for number in self._numbers:
                name = part_name(self.all_hashes[place], number)
                here = there(name) or self.cache.has(self.all_hashes[place], number)
                if not here and groups[number].window is None:
                    return end
                runs[number] = runs[number] + 1 if here else 0
            if all(run >= place + 1 - self._seen(number, place + 1) for number, run in runs.items()):
                end = place + 1
        return end

    def missing(self, end: int) -> list[Part]:
        """What is not in the pool of all that is needed to begin after `end` blocks; of groups that keep all positions
        first."""
        return [
            Part(place, number, part_name(self.all_hashes[place], number))
            for number in self._numbers
            for place in range(max(self.first, self._seen(number, end)), end)
            if not self.cache.has(self.all_hashes[place], number)
        ]

    def parts(self, first: int) -> list[Part]:
        """What is not in the pool of block `first` and those after it, block for block; of each, the parts of groups
        that keep all positions first."""
        return [
            Part(place, number, part_name(self.all_hashes[place], number))
            for place in range(first, self.last)
            for number in self._numbers
            if not self.cache.has(self.all_hashes[place], number)
        ]

    def needs(self, part: Part) -> bool:
        """Whether the request cannot begin anywhere behind a part without it."""
        return self.cache.groups[part.group].window is None

    def found(self, end: int) -> Iterator[tuple[int, int, int]]:
        """(place, group, block) of what is in the pool of that, the last place first; and the parts of the last block
        before `first`, so that it stays in the tree."""
        for place in range(end - 1, -1, -1):
            node = self.cache.find(self.all_hashes[place])
            for number in self._numbers if node is not None else ():
                needed = place >= self._seen(number, end) or place == self.first - 1
                if node is not None and needed and node.blocks[number] != NULL_BLOCK:
                    yield place, number, node.blocks[number]

    def _seen(self, number: int, count: int) -> int:
        """The first block of a group that the token after `count` blocks looks into."""
        group, size = self.cache.groups[number], self.cache.block_size
        return min(count, group.first_seen(max(0, count * size - self._back)) // size)
