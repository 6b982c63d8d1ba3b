"""A waiting request's prefix: the blocks that it needs in order to begin further along its prompt, which are all that
the next token sees.

In a group that keeps all positions, that is every block up to there; with a window, the blocks that cover it; for
recurrent layers, the state of the last block (see `kv_group`). So, depending on which of a prompt's blocks are in the
pool, and which can be had from elsewhere (`external`), a request can begin at some positions and not at others, just as
a match in the prefix cache can end only at some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from quire.core.block_hash import part_name
from quire.core.block_pool import NULL_BLOCK
from quire.core.prefix_cache import PrefixCache
from quire.core.request import Request


class Part(NamedTuple):
    """One group's part of a block of a request.

    Attributes:
        place: the block's index in the request.
        name: see `block_hash.part_name`.
    """

    place: int
    group: int
    name: bytes


class Prefix:
    """A waiting request's blocks `first` to `last - 1`.

    Args:
        cache: the prefix cache, in which the first `first` blocks were found.
        request: whose full blocks are hashed.
        back: how many of the last tokens of a match will be computed again.

    Attributes:
        hashes: of all its full blocks.
    """

    def __init__(self, cache: PrefixCache, request: Request, first: int, last: int, back: int = 0) -> None:
        self.cache, self.request, self.hashes, self._back = cache, request, request.hashes, back
        self.first, self.last = first, min(last, len(self.hashes))  # without a cache there are no hashes
        self._numbers = sorted(range(len(cache.groups)), key=lambda number: not cache.groups[number].keeps_all)

    def reach(self, there: Callable[[bytes], bool]) -> int:
        """After how many blocks the request could begin if all parts named in `there` were in the pool."""
        groups, end, first = self.cache.groups, self.first, self.first
        runs = {number: first - self._seen(number, first) for number in self._numbers}  # lengths, as of a place
        for place in range(first, self.last):
            for number in self._numbers:
                name = part_name(self.hashes[place], number)
                here = there(name) or self.cache.has(self.hashes[place], number)
                if not here and groups[number].keeps_all:
                    return end
                runs[number] = runs[number] + 1 if here else 0
            if all(run >= place + 1 - self._seen(number, place + 1) for number, run in runs.items()):
                end = place + 1
        return end

    def missing(self, end: int) -> list[Part]:
        """The parts needed to begin after `end` blocks that are not in the pool; groups that keep all positions come
        first."""
        firsts = ((number, max(self.first, self._seen(number, end))) for number in self._numbers)
        return self._absent((place, number) for number, first in firsts for place in range(first, end))

    def parts(self, first: int) -> list[Part]:
        """What is not in the pool of block `first` and those after it, block for block; of each, the parts of groups
        that keep all positions first."""
        return self._absent((place, number) for place in range(first, self.last) for number in self._numbers)

    def _absent(self, places: Iterable[tuple[int, int]]) -> list[Part]:
        """The parts of these (place, group) that are not in the pool."""
        return [
            Part(place, number, part_name(self.hashes[place], number))
            for place, number in places
            if not self.cache.has(self.hashes[place], number)
        ]

    def needs(self, part: Part) -> bool:
        """Whether the request cannot begin anywhere after a part without it."""
        return self.cache.groups[part.group].keeps_all

    def found(self, end: int) -> Iterator[tuple[int, int, int]]:
        """(place, group, block) of the needed parts that are in the pool, last place first; and of the parts of the
        last block before `first`, so that it stays in the tree."""
        for place in range(end - 1, -1, -1):
            node = self.cache.find(self.hashes[place])
            for number in self._numbers if node is not None else ():
                needed = place >= self._seen(number, end) or place == self.first - 1
                if node is not None and needed and node.blocks[number] != NULL_BLOCK:
                    yield place, number, node.blocks[number]

    def _seen(self, number: int, count: int) -> int:
        """The first block of a group that the token after `count` blocks sees."""
        retention, size = self.cache.groups[number].retention, self.cache.block_size
        return min(count, retention.first_seen(max(0, count * size - self._back)) // size)
