"""Which blocks are in which slots of a tier outside the pool, such as host memory. The decisions are made here; whoever
has the bytes only carries them out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate, pairwise

HOST, DISK, PEER, REMOTE = "host", "disk", "peer", "remote"
"""Sources of blocks: the host tier; and, into that, the disk, another engine that computes them, or another node that
has them.
"""


class Tier:
    """The index of a tier: a slot holds one full block of a KV group, by its name (`block_hash.part_name`). Blocks of
    different groups differ in size, and so do their slots: those of the first group come first.

    A slot is *free*; or *filling*, while a block is on its way into it; or it *keeps* a block, and is pinned while it
    is being read; or it is in *quarantine*: its contents are invalid, and it may still be read or written. When a slot
    is needed, the least recently used block that is kept and not pinned is evicted.

    Args:
        num_slots: number of slots for each group; if empty, nothing is ever found or kept.

    Attributes:
        changed: called with each block that is added or removed.
    """

    def __init__(self, *num_slots: int) -> None:
        self.num_slots = sum(num_slots)
        self._filling: set[bytes] = set()
        self._names: dict[int, bytes] = {}  # by slot, for those that are filling or kept
        self._given_up: set[int] = set()  # see `give_up`
        self._begins = [0, *accumulate(num_slots or (0,))]  # of each group's slots, and the end of all of them
        self.changed: Callable[[bytes], None] = lambda block_hash: None
        self.reset()

    def reset(self) -> None:
        """Make every slot free, except those that a step in flight may fill: these are given up, see `give_up`."""
        own = list(pairwise(self._begins))
        self._given_up |= {slot for slot, name in self._names.items() if name in self._filling}
        lost = self._given_up
        self._free = [[s for s in range(end - 1, begin - 1, -1) if s not in lost] for begin, end in own]  # by group
        self._filling, self._names = set(), {}
        self._kept: dict[bytes, int] = {}
        self._pins: dict[int, int] = {}
        # By group, slots that are kept and not pinned, least recently used first.
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in own]
        self._quarantined = set(lost)

    @property
    def counts(self) -> dict[str, int]:
        """Number of slots, by state."""
        free, others = sum(map(len, self._free)), (self._filling, self._kept, self._quarantined)
        return dict(zip(("free", "filling", "kept", "quarantined"), (free, *map(len, others)), strict=True))

    @property
    def idle_slots(self) -> list[int]:
        """Slots that can be evicted, in order; for invariant checks."""
        return [slot for idle in self._idle for slot in idle]

    @property
    def pins(self) -> dict[int, int]:
        """By slot, the number of readers; for invariant checks."""
        return self._pins

    @property
    def kept(self) -> dict[bytes, int]:
        """The slots of all blocks that are kept, by name."""
        return self._kept

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept

    def group(self, slot: int) -> int:
        """The group that a slot is for."""
        return bisect_right(self._begins, slot) - 1

    def room(self, group: int) -> int:
        """Number of a group's slots that are free or can be evicted."""
        return len(self._free[group]) + len(self._idle[group])

    def is_filling(self, block_hash: bytes) -> bool:
        """Whether a block is on its way into the tier."""
        return block_hash in self._filling

    def slot(self, block_hash: bytes) -> int | None:
        """The slot that keeps a block."""
        return self._kept.get(block_hash)

    def take(self, block_hash: bytes, group: int = 0) -> int | None:
        """Take a slot for a group's block, filling from now on; None if the block is here or on its way already, or no
        slot can be evicted."""
        if block_hash in self._filling:
            return None
        slot = self._kept.get(block_hash)
        if slot is not None:
            self._touch(slot)
            return None
        if not self._free[group] and not self._give_way(group):
            return None
        slot = self._free[group].pop()
        self._filling.add(block_hash)
        self._names[slot] = block_hash
        return slot

    def filled(self, slot: int) -> None:
        """The block has arrived: it is kept, and found from now on."""
        block_hash = self._names[slot]
        self._filling.remove(block_hash)
        self._kept[block_hash] = slot
        self._idle[self.group(slot)][slot] = None
        self.changed(block_hash)

    def dropped(self, slot: int) -> None:
        """The block will not come, and nothing more will be written: the slot is free."""
        self._filling.remove(self._names.pop(slot))
        self._free[self.group(slot)].append(slot)

    def pin(self, slot: int) -> None:
        """A reader begins: the block is not evicted until every reader has called `unpin`."""
        self._pins[slot] = self._pins.get(slot, 0) + 1
        self._idle[self.group(slot)].pop(slot, None)

    def unpin(self, slot: int) -> None:
        """A reader is done; this counts as a use of the block."""
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        del self._pins[slot]
        if slot in self._quarantined:
            self.released(slot)
        else:
            self._idle[self.group(slot)][slot] = None

    def cool(self, slot: int) -> None:
        """The block is not worth keeping: unless it is being read, it is evicted first."""
        idle = self._idle[self.group(slot)]
        if slot in idle:
            idle.move_to_end(slot, last=False)

    def withdraw(self, slot: int) -> None:
        """The block is corrupt: it is not found from now on, and the slot is free once nobody reads it."""
        block_hash = self._names.pop(slot, None)
        if block_hash is None:
            return  # withdrawn already
        del self._kept[block_hash]
        self.changed(block_hash)
        self._idle[self.group(slot)].pop(slot, None)
        self._quarantined.add(slot)
        if slot not in self._pins:
            self.released(slot)

    def quarantine(self, slot: int) -> None:
        """The block will not come, but something may still be written, until `released` is called."""
        self._filling.remove(self._names.pop(slot))
        self._quarantined.add(slot)

    def give_up(self, slot: int) -> None:
        """The step that was to fill the slot is given up. It may still write to it, until a later one has committed."""
        self.quarantine(slot)
        self._given_up.add(slot)

    def committed(self) -> None:
        """A step has committed, so all those before it have run: what was given up is free."""
        while self._given_up:
            self.released(self._given_up.pop())

    def released(self, slot: int) -> None:
        """A slot in quarantine is no longer read or written: it is free."""
        self._quarantined.remove(slot)
        self._free[self.group(slot)].append(slot)

    def _touch(self, slot: int) -> None:
        idle = self._idle[self.group(slot)]
        if slot in idle:
            idle.move_to_end(slot)

    def _give_way(self, group: int) -> bool:
        """Free a group's least recently used slot, if there is one."""
        if not self._idle[group]:
            return False
        slot, _ = self._idle[group].popitem(last=False)
        block_hash = self._names.pop(slot)
        del self._kept[block_hash]
        self.changed(block_hash)
        self._free[group].append(slot)
        return True
