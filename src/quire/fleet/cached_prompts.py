"""Reports to a router which prompt prefixes an engine has cached, as numbered events.

A router knows prompts by their JSON, with one name (a chained hash) per 128 bytes (`prompt.py`); an engine has blocks
of tokens. The mapping is estimated: a prompt's names are spread evenly over its tokens, and a name counts as cached
while the block in which it ends is. That is accurate enough for a hint, and costs one lookup per name when a prompt has
been computed, and one per evicted block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from quire.fleet.cache_events import CacheEvent, CacheEvents
from quire.fleet.prompt import NAME_BYTES

MAX_NAMES = 2**17
"""Most names that are kept, for 16 MB of prompts; the least recently used are dropped first."""


@dataclass(slots=True)
class CachedPrompts:
    """The names of cached prompt prefixes.

    Attributes:
        boot: identifies the engine's run; a new one after each start.
    """

    boot: str
    max_names: int = MAX_NAMES
    _events: CacheEvents = field(default_factory=CacheEvents)
    _block_of: dict[bytes, bytes] = field(default_factory=dict)  # by name, in the order of their last use
    _names_of: dict[bytes, list[bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._block_of)

    def computed(self, names: bytes, blocks: Sequence[bytes], holds: Callable[[bytes], bool]) -> None:
        """A prompt with these names was computed, or has ended before that; names whose block is not held are removed.

        Args:
            names: concatenated, `NAME_BYTES` each.
            blocks: hashes of the prompt's full blocks.
            holds: whether a block is cached.
        """
        count = len(names) // NAME_BYTES
        for index in range(count):
            name = names[index * NAME_BYTES : (index + 1) * NAME_BYTES]
            # Rounded down to whole blocks, which prompts that diverge soon afterwards have in common.
            place = max(1, (index + 1) * len(blocks) // count) - 1
            if name in self._block_of:
                self._block_of[name] = self._block_of.pop(name)
            elif blocks and holds(blocks[place]):
                self._block_of[name] = blocks[place]
                self._names_of.setdefault(blocks[place], []).append(name)
                self._events.add(True, name)
            else:
                self._events.add(False, name)
        for name in list(islice(self._block_of, max(0, len(self._block_of) - self.max_names))):
            self._forget(name)

    def gone(self, blocks: Iterable[bytes]) -> None:
        """These blocks are no longer cached."""
        for block in blocks:
            for name in self._names_of.pop(block, ()):
                del self._block_of[name]
                self._events.add(False, name)

    def _forget(self, name: bytes) -> None:
        block = self._block_of.pop(name)
        self._names_of[block].remove(name)
        if not self._names_of[block]:
            del self._names_of[block]
        self._events.add(False, name)

    def told(self, since: int) -> dict[str, Any]:
        """A JSON document with the events from this number on, or with all names if some of these events were dropped.

        `next` is the number of the next event. An event is "+" (cached from now on) or "-" (no longer cached), followed
        by the name; the first event's number is `since`.
        """
        document: dict[str, Any] = {"boot": self.boot, "next": self._events.next}
        events = self._events.since(since)
        if events is None:
            return document | {"snapshot": b"".join(self._block_of).hex()}
        return document | {"events": [("+" if each.stored else "-") + each.name.hex() for each in events]}


@dataclass(frozen=True, slots=True)
class News:
    """The contents of a document made by `told`.

    Attributes:
        names: all cached names; None if only changes are reported, as `events`.
        next: number of the next event.
    """

    boot: str
    next: int
    names: list[bytes] | None
    events: list[CacheEvent]


def read_told(document: Any, since: int) -> News:
    """Read a document that another process has made with `told`.

    Raises:
        ValueError: it is not valid.
    """
    try:
        boot, following = str(document["boot"]), int(document["next"])
        if "snapshot" in document:
            data = bytes.fromhex(document["snapshot"])
            names = [data[start : start + NAME_BYTES] for start in range(0, len(data), NAME_BYTES)]
            return News(boot, following, names, [])
        events = [
            CacheEvent(number, text[0] == "+", bytes.fromhex(text[1:]))
            for number, text in enumerate(document["events"], since)
        ]
        return News(boot, following, None, events)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
