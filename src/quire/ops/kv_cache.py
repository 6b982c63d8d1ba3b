"""Keys and values of all requests, in blocks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
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

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Each code type's largest number: a row's largest magnitude becomes it."""


class KVCache:
    """The device's blocks.

    A block is one contiguous range of bytes: [layers, kv_heads, sides, plane], where a plane is one head's keys
    (0) or values (1). Latent attention has one side, whose rows are both (see `quire.ops.latent`). Block 0 is null:
    padding may write there, and nothing reads from it.

    Attributes:
        sides: 2: keys and values; 1: rows that are both.
        dtype: the model's data type.
        stored_dtype: of `numbers`: `dtype`, or that of the codes.
        data: plain, [num_blocks, layers, kv_heads, sides, block_size, head_dim] in `dtype`; quantized, the
            bytes [num_blocks, layers, kv_heads, sides, plane bytes], of which `numbers` and `scales` are views.
        numbers: [num_blocks, layers, kv_heads, sides, block_size, head_dim].
        scales: [num_blocks, layers, kv_heads, sides, block_size] fp32, behind a plane's codes: a number is its
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
        self.others: list[KVCache] = []
        # Not zeroed: what no one has written is never read, and pages are only taken once they are used.
        planes, shape = (num_blocks, layers, kv_heads, sides), (block_size, head_dim)
        self.scales: torch.Tensor | None = None
        if kv_cache_dtype == "auto":
            size = math.prod((*planes, *shape)) * dtype.itemsize
            self.data = self.numbers = _memory(size, device).view(dtype).view(*planes, *shape)
        else:
            codes = block_size * head_dim
            plane = codes + block_size * SCALE_BYTES
            self.data = _memory(math.prod(planes) * plane, device).view(*planes, plane)
            self.numbers = self.data[..., :codes].view(self.stored_dtype).view(*planes, *shape)
            self.scales = self.data[..., codes:].view(torch.float32)

    @property
    def bytes_per_block(self) -> int:
        """Size of one block, all layers."""
        return self.data[0].numel() * self.data.element_size()

    def beside(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, sides: int = 2) -> KVCache:
        """A plain cache over the same block ids, for what another model keeps of the same tokens.

        Block heads are copied in it whenever they are copied here; all else that happens to either does not touch the
        other.
        """
        shape = self.num_blocks, layers, kv_heads, head_dim, self.block_size
        other = KVCache(*shape, dtype, device=self.data.device, sides=sides)
        self.others.append(other)
        return other

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy block heads: the first `tokens` tokens of block `source`, all layers, for each
        (source, destination, tokens). The rest of the destination is left as it is. In the list's order.
        """
        for source, destination, tokens in copies:
            self.numbers[destination, :, :, :, :tokens].copy_(self.numbers[source, :, :, :, :tokens])
            if self.scales is not None:
                self.scales[destination, :, :, :, :tokens].copy_(self.scales[source, :, :, :, :tokens])
        for other in self.others:
            other.copy(copies)

    def move(self, sources: torch.Tensor | Sequence[int], destinations: torch.Tensor | Sequence[int]) -> None:
        """Copy tokens, all layers, from slots (`block * block_size + offset`) to as many others, each named once.

        All are read before any is written, so a slot may be both. Caches beside this one are left as they are.
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
    on_device = torch.as_tensor(slots, dtype=torch.int64).to(device, non_blocking=True)  # the host waits for no step
    return on_device // block_size, on_device % block_size


def _memory(size: int, device: torch.device | str) -> torch.Tensor:
    """`size` bytes that nobody has written."""
    on_cpu = torch.device(device).type == "cpu"
    return huge(size) if on_cpu else torch.empty(size, dtype=torch.uint8, device=device)


def kv_bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_cache_dtype: str, sides: int = 2
) -> int:
    """Bytes of one token's keys and values in all layers, with their scales."""
    row = head_dim + SCALE_BYTES if kv_cache_dtype in CODE_DTYPES else head_dim * dtype.itemsize
    return sides * layers * kv_heads * row


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
