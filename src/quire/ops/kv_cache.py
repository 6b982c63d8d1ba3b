"""Keys and values of all requests, in blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from quire.errors import ConfigError
from quire.ops.memory import huge

KEY, VALUE = 0, 1

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""What a block may hold. Attention reads whole runs of it, so its bits do not depend on the size."""

KVCacheDtype = Literal["auto", "int8", "fp8"]
"""How keys and values are stored: in the model's data type, or as codes of 8 bits with scales."""

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE_BYTES = 4

WORD = 4
"""Bytes that a token's are a multiple of: then those of the smallest block are one of a cache line."""

LAYOUT = 1
"""Version of how tokens lie in a block. Whoever changes that counts it up, so that no block is read as another."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Each code type's largest number: a row's largest magnitude becomes it."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps of each token, in all its layers.

    Attributes:
        dtype: the model's data type.
        sides: 2: keys and values; 1: rows that are both.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_cache_dtype: KVCacheDtype = "auto"
    sides: int = 2

    @property
    def row_bytes(self) -> int:
        """Of one head's key, with its scale."""
        quantized = self.kv_cache_dtype in CODE_DTYPES
        return self.head_dim + SCALE_BYTES if quantized else self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Rounded up, so that a block of any size is a whole number of cache lines."""
        return -(-self.sides * self.layers * self.kv_heads * self.row_bytes // WORD) * WORD


class KVCache:
    """The device's blocks, and what one model has in them.

    A block is one contiguous range of bytes: planes [layers, kv_heads, sides], where a plane is one head's keys (0) or
    values (1); and after them those of a model that drafts for this one, which is a cache too, over the same blocks.
    Latent attention has one side, whose rows are both (see `quire.ops.latent`). Block 0 is null: padding may write
    there, and nothing reads from it.

    Args:
        draft_kv: what another model keeps of the same tokens.
        memory: [num_blocks, bytes] uint8, blocks in which the planes lie first; None: memory of its own, all zeros.

    Attributes:
        memory: with `memory[block]` a block moves, whoever has something in it.
        draft_kv: the other model's cache; None: there is no other.
        shape: of a token's keys and values.
        sides: 2: keys and values; 1: rows that are both.
        dtype: the model's data type.
        stored_dtype: of `numbers`: `dtype`, or that of the codes.
        data: plain, [num_blocks, layers, kv_heads, sides, block_size, head_dim] in `dtype`; quantized, the
            bytes [num_blocks, layers, kv_heads, sides, plane bytes], of which `numbers` and `scales` are views. So is
            it of `memory`: with draft KV, blocks lie further apart than their own planes take.
        numbers: [num_blocks, layers, kv_heads, sides, block_size, head_dim].
        scales: [num_blocks, layers, kv_heads, sides, block_size] fp32, after a plane's codes: a number is its
            code times its token's scale. None for a plain cache.
        pulse: `pulse[0]` grows with every layer that a step has computed; whoever wants to see that puts his
            own sequence there.
    """

    def __init__(
        self,
        num_blocks: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: KVCacheDtype = "auto",
        device: torch.device | str = "cpu",
        sides: int = 2,
        draft_kv: KVShape | None = None,
        memory: torch.Tensor | None = None,
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
        self.head_dim, self.block_size, self.dtype, self.sides = head_dim, block_size, dtype, sides
        self.stored_dtype = CODE_DTYPES.get(kv_cache_dtype, dtype)
        self.pulse: array[int] | memoryview[int] = array("q", [0])
        self.shape = own = KVShape(layers, kv_heads, head_dim, dtype, kv_cache_dtype, sides)
        if memory is None:
            size = block_size * (own.bytes_per_token + (draft_kv.bytes_per_token if draft_kv else 0))
            memory = zeros(num_blocks * size, device).view(num_blocks, size)
        self.memory = memory
        planes, shape, plane = (num_blocks, layers, kv_heads, sides), (block_size, head_dim), block_size * own.row_bytes
        part = memory[:, : layers * kv_heads * sides * plane]
        self.scales: torch.Tensor | None = None
        if kv_cache_dtype == "auto":
            self.data = self.numbers = part.view(dtype).view(*planes, *shape)
        else:
            codes = block_size * head_dim
            self.data = part.view(*planes, plane)
            self.numbers = self.data[..., :codes].view(self.stored_dtype).view(*planes, *shape)
            self.scales = self.data[..., codes:].view(torch.float32)
        self.draft_kv: KVCache | None = None
        if draft_kv is not None:
            rest = memory[:, block_size * own.bytes_per_token :]
            heads = num_blocks, draft_kv.layers, draft_kv.kv_heads, draft_kv.head_dim, block_size
            stored = draft_kv.dtype, draft_kv.kv_cache_dtype, device, draft_kv.sides
            self.draft_kv = KVCache(*heads, *stored, memory=rest)

    @property
    def bytes_per_block(self) -> int:
        """From one block to the next: of all that lies in one."""
        return self.memory.stride(0)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy beginnings of blocks: the first `tokens` tokens of `source`, all layers, draft KV too, for each
        (source, destination, tokens). The rest of the destination is left as it is. In the list's order.
        """
        for source, destination, tokens in copies:
            self.numbers[destination, :, :, :, :tokens].copy_(self.numbers[source, :, :, :, :tokens])
            if self.scales is not None:
                self.scales[destination, :, :, :, :tokens].copy_(self.scales[source, :, :, :, :tokens])
        if self.draft_kv is not None:
            self.draft_kv.copy(copies)

    def move(self, sources: torch.Tensor | Sequence[int], destinations: torch.Tensor | Sequence[int]) -> None:
        """Copy tokens, all layers, from slots (`block * block_size + offset`) to as many others, each named once.

        All are read before any is written, so a slot may be both. Draft KV is left as it is.
        Raises ValueError where the numbers of slots differ.
        """
        if len(sources) != len(destinations):
            raise ValueError(f"{len(sources)} tokens cannot move to {len(destinations)} slots: give one to each")
        read, write = (_at(slots, self.block_size, self.data.device) for slots in (sources, destinations))
        numbers = self.numbers if self.scales is None else self.numbers.view(torch.uint8)
        numbers[write[0], :, :, :, write[1]] = numbers[read[0], :, :, :, read[1]]
        if self.scales is not None:
            self.scales[write[0], :, :, :, write[1]] = self.scales[read[0], :, :, :, read[1]]


def _at(
    slots: torch.Tensor | Sequence[int], block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and offsets of slots."""
    there = on_device(slots, device)
    return there // block_size, there % block_size


def on_device(numbers: torch.Tensor | Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Numbers as int64 on a device, for which the host waits for no step.

    A GPU copies from pinned memory by itself. Of other memory, CUDA may wait for all that was queued before.
    """
    found = torch.as_tensor(numbers, dtype=torch.int64)
    if device.type == "cuda" and found.device.type == "cpu":
        found = found.pin_memory()  # torch keeps it from being used again before it is copied
    return found.to(device, non_blocking=True)


def zeros(size: int, device: torch.device | str) -> torch.Tensor:
    """`size` bytes. On a CPU, pages are only taken once they are used."""
    on_cpu = torch.device(device).type == "cpu"
    return huge(size) if on_cpu else torch.zeros(size, dtype=torch.uint8, device=device)


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., size] in `dtype` and scales [...] fp32 of rows x [..., size].

    A row's scale is its largest magnitude over the code type's largest number; codes are rounded to nearest, ties
    to even. A row of zeros has scale 0. A row that is not finite has scale NaN, so that whoever reads it sees that.
    """
    x = x.float()
    top = x.abs().amax(-1)
    scales = top / torch.tensor(LARGEST[dtype])
    usable = top.isfinite() & (scales > 0)
    # A scale among the subnormal numbers is coarse: then the quotient may be above the largest.
    codes = (x / scales.unsqueeze(-1)).clamp_(-LARGEST[dtype], LARGEST[dtype])
    codes = torch.where(usable.unsqueeze(-1), codes, torch.zeros(()))
    if dtype == torch.int8:
        codes = codes.round_()
    return codes.to(dtype), torch.where(top.isfinite(), scales, torch.full((), float("nan")))
