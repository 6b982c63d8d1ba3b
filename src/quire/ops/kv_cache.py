"""Keys and values of all requests, in blocks."""

from __future__ import annotations

from array import array

import torch

from quire.errors import ConfigError

KEY, VALUE = 0, 1

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""What a block may hold. Attention reads whole runs of it, so its bits do not depend on the size."""


class KVCache:
    """The device's blocks.

    `data` is [num_blocks, layers, kv_heads, 2, block_size, head_dim]: a block is one contiguous range of
    bytes, and within it a head's keys (plane 0) and values (plane 1) are contiguous. Block 0 is null:
    padding may write there, and nothing reads from it.

    `pulse[0]` grows with every layer that a step has computed; whoever wants to see that puts his own sequence there.
    """

    def __init__(
        self,
        num_blocks: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Raises ConfigError for a block size that is not offered or a pool without a usable block."""
        if block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size is {block_size}; it must be one of {list(BLOCK_SIZES)}")
        if num_blocks < 2:
            raise ConfigError(
                f"the KV pool has {num_blocks} blocks; it needs at least 2, since block 0 is never used: "
                "raise num_kv_blocks or kv_cache_memory"
            )
        self.num_blocks, self.layers, self.kv_heads = num_blocks, layers, kv_heads
        self.head_dim, self.block_size, self.dtype = head_dim, block_size, dtype
        # Not zeroed: what no one has written is never read, and pages are only taken once they are used.
        self.pulse: array[int] | memoryview[int] = array("q", [0])
        self.data = torch.empty(num_blocks, layers, kv_heads, 2, block_size, head_dim, dtype=dtype)

    @property
    def bytes_per_block(self) -> int:
        """Size of one block, all layers."""
        return self.data[0].numel() * self.data.element_size()

    def copy(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy block heads: the first `tokens` tokens of block `source`, all layers, for each
        (source, destination, tokens). The rest of the destination is left as it is. In the list's order.
        """
        for source, destination, tokens in copies:
            self.data[destination, :, :, :, :tokens].copy_(self.data[source, :, :, :, :tokens])
