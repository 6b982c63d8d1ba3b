"""What recurrent layers keep, in blocks: rows of a block's tokens, and a state after the last one, where there is one.

Which layers those are, and what they compute, is in files of their own: `ops/states.py`, `ops/short_conv.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.errors import ConfigError
from quire.ops.kv_cache import BLOCK_SIZES, KVCache, zeros
from quire.ops.ragged import RaggedBatch

LINE = 256
"""Bytes that a layer's part of a block is a multiple of, and so a block of any size is of its tokens."""


class Part(NamedTuple):
    """One of the tensors that a layer has in a block.

    Attributes:
        tokens: which dimension is the block's tokens, of which each has a row; None: it is a state.
        shared: which dimension ranks share.
        sections: what lies along that, in order: how many columns, and of how many heads; None: columns are by
            themselves. Ranks share each section as `parallel.group.share` says; none: one of a head a column.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    tokens: int | None = None
    shared: int = 0
    sections: tuple[tuple[int, int | None], ...] = ()

    @property
    def num_bytes(self) -> int:
        """In a block, where parts begin at whole cache lines."""
        return -(-torch.Size(self.shape).numel() * self.dtype.itemsize // 64) * 64


class RecurrentShape(ABC):
    """What a block holds of some recurrent layers, a layer after another.

    Attributes:
        layers: how many.
        dtype: the model's.
        block_size: tokens of a block.
    """

    __slots__ = ()
    layers: int
    dtype: torch.dtype
    block_size: int

    @property
    @abstractmethod
    def parts(self) -> list[Part]:
        """Of a layer, in their order."""

    @abstractmethod
    def cache(self, num_blocks: int, device: torch.device | str = "cpu") -> RecurrentCache:
        """So many blocks; raises what `RecurrentCache` does."""

    @property
    def layer_bytes(self) -> int:
        """Of a layer's part of a block."""
        return -(-sum(part.num_bytes for part in self.parts) // LINE) * LINE

    @property
    def block_bytes(self) -> int:
        """Of a block."""
        return self.layers * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        """A block's bytes, by its tokens."""
        return self.block_bytes // self.block_size

    def bytes_of_parts(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Of blocks [count, block_bytes] uint8, a view of each part: [count, layers, *its shape], whose last dimension
        is in bytes."""
        by_layer, first, found = blocks.view(len(blocks), self.layers, self.layer_bytes), 0, []
        for part in self.parts:
            shape = *part.shape[:-1], part.shape[-1] * part.dtype.itemsize
            size = torch.Size(shape).numel()
            found.append(by_layer[:, :, first : first + size].view(len(blocks), self.layers, *shape))
            first += part.num_bytes
        return found


class RecurrentCache(KVCache):
    """The device's blocks of recurrent layers. Block 0 is null: it stands for blocks that are not there.

    Attributes:
        holds: what a block does.
        layer_bytes: of a layer's part of a block.
        offsets: where each part begins in a layer's bytes.
        views: of each part, [num_blocks, layers, *its shape].
    """

    def __init__(self, num_blocks: int, shape: RecurrentShape, device: torch.device | str = "cpu") -> None:
        """Raises ConfigError for a block size that is not offered or a pool without a usable block."""
        if shape.block_size not in BLOCK_SIZES or num_blocks < 2:
            raise ConfigError(
                f"{num_blocks} blocks of {shape.block_size} tokens for recurrent states; there must be at least 2, of "
                f"one of {list(BLOCK_SIZES)} tokens"
            )
        self.num_blocks, self.block_size, self.holds = num_blocks, shape.block_size, shape
        self.layers, self.dtype = shape.layers, shape.dtype
        self.draft_kv = None
        self.pulse = array("q", [0])
        size = shape.layers * shape.layer_bytes
        self.memory = zeros(num_blocks * size, device).view(num_blocks, size)
        self.layer_bytes, self._parts = shape.layer_bytes, shape.parts
        self.offsets: list[int] = []
        self.views: list[torch.Tensor] = []
        by_layer, first = self.memory.view(num_blocks, shape.layers, shape.layer_bytes), 0
        for part in self._parts:
            last = first + torch.Size(part.shape).numel() * part.dtype.itemsize
            self.views.append(by_layer[:, :, first:last].view(part.dtype).view(num_blocks, shape.layers, *part.shape))
            self.offsets.append(first)
            first += part.num_bytes

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """The rows of the first `tokens` tokens of each (source, destination, tokens), and no state."""
        for source, destination, tokens in copies:
            for part, view in zip(self._parts, self.views, strict=True):
                if part.tokens is not None:
                    to = view[destination].narrow(1 + part.tokens, 0, tokens)
                    to.copy_(view[source].narrow(1 + part.tokens, 0, tokens))


def check_no_trees(batch: RaggedBatch) -> None:
    """Raises ValueError where the batch has trees, whose rows do not continue one another."""
    if batch.trees is not None:
        raise ValueError("recurrent layers have no rows that do not continue one another; draft without trees")


def convolved(
    x: torch.Tensor,
    conv: torch.Tensor,
    bias: torch.Tensor | None,
    stored: torch.Tensor,
    table: list[int],
    start: int,
) -> torch.Tensor:
    """A depthwise causal convolution of one span, whose inputs are stored for those to come.

    Args:
        x: [tokens, channels], the span's inputs.
        conv: [taps, channels] fp32, the last tap is a token's own. bias: [channels] fp32.
        stored: a layer's inputs, [num_blocks, block_size, channels].
        table: the request's blocks. start: position of the first token.

    Returns:
        [tokens, channels] fp32; taps are added in their order.
    """
    taps, size, count = len(conv), stored.shape[1], len(x)
    before = torch.zeros(taps - 1, x.shape[1], dtype=x.dtype)
    for place, position in enumerate(range(start - taps + 1, start)):
        if position >= 0:
            before[place] = stored[table[position // size], position % size]
    for row, position in enumerate(range(start, start + count)):
        if block := table[position // size]:
            stored[block, position % size] = x[row]
    wide = torch.cat([before, x]).float()
    total = wide[:count] * conv[0] if bias is None else bias + wide[:count] * conv[0]
    for tap in range(1, taps):
        total = total + wide[tap : tap + count] * conv[tap]
    return total
