"""Faults in a pool's memory before blocks are loaded there.

A page is allocated when it is first written, which may take longer than copying the data: for the 1.8 MB of a block up
to 5 ms on a virtual machine, whose host must allocate it too, and a tenth of that afterwards. Streams that decode in a
step which loads into such blocks would notice.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from quire.ops.memory import populate
from quire.ops.threads import step_aside

PROMPTS, MOST_BYTES = 4, 2 * 2**30
"""Long prompts whose memory is kept allocated and not used yet, as several may come at once; and the limit of that."""


class Prefaulter:
    """Faults in as much of one pool as the next long prompts need, in a thread of low priority. A pool hands out blocks
    that were never used in ascending order (`core.block_pool`).

    Args:
        memory: [num_blocks, bytes] uint8.
        blocks: number of blocks of a long prompt.
    """

    def __init__(self, memory: Tensor, blocks: int) -> None:
        self._memory, self._ahead = memory, min(PROMPTS * blocks, max(1, MOST_BYTES // memory.stride(0)))
        self._taken = 0
        self._thread = ThreadPoolExecutor(1, "quire-memory", step_aside)
        self.used(0)

    def used(self, block: int) -> None:
        """A step writes to blocks up to this one."""
        end = min(len(self._memory), block + 1 + self._ahead)
        if 2 * (end - self._taken) > self._ahead or self._taken < end == len(self._memory):
            begin, self._taken = self._taken, end
            self._thread.submit(populate, self._memory[begin:end])

    def drain(self) -> None:
        """Wait until the memory is allocated."""
        self._thread.submit(int).result()
