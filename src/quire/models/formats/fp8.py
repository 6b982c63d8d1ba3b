"""Weights in fp8 (e4m3) with scales: one, one for each output, or one for each block, such as DeepSeek V3's.

A weight NAME [out, in] of type F8_E4M3 has a second tensor, NAME_scale_inv or NAME_scale; a number is its code times
its scale. Scales are [blocks of rows, blocks of columns], [out], [out, 1], or one number; or, in MXFP8, exponents of 2
for each 32 inputs. Quire computes with the numbers themselves, rounded once to the data type of the computation: they
are restored when they are read, or stay in 8 bits if the kernels restore them (`ops.fp8`). Scales of activations are
not used.

Formats are the `quant_method` fp8 (of DeepSeek, Qwen, MiniMax, Mistral, and, without blocks, of AutoFP8), fbgemm_fp8,
and those of modelopt and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quire.errors import MissingTensorError, TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.formats.stored import (
    EXPONENTS,
    FLOATS,
    Contents,
    WeightOnDisk,
    matrix,
    scale_numbers,
    unused_scales,
)
from quire.models.safetensors_header import TensorEntry
from quire.ops.fp8 import Fp8Weight

Block = tuple[int, int]
"""Rows and columns that share a scale."""
CODES = "F8_E4M3"
USUAL_BLOCK = 128
"""Rows and columns that share a scale in published checkpoints."""
MX_GROUP = 32
"""Inputs that share an exponent in MXFP8."""
SCALES = ("_scale_inv", "_scale")
"""Suffixes of a weight's name, for its scales."""


@dataclass(frozen=True, kw_only=True)
class StoredFp8(WeightOnDisk):
    """A weight in fp8.

    Attributes:
        block: rows and columns that share a scale.
    """

    block: Block

    def coded(self) -> Fp8Weight:
        """With a scale for each output, so that any outputs can be concatenated."""
        codes, scales = self.part("weight"), scale_numbers(self.part("scale"))
        rows = -(-self.shape[0] // self.block[0])
        scales = scales.reshape(rows, -1).repeat_interleave(self.block[0], dim=0)[: self.shape[0]]
        return Fp8Weight(codes.view(torch.uint8), scales.contiguous(), self.block[1])

    def restored(self) -> torch.Tensor:
        """See `WeightOnDisk`."""
        return restore(self.part("weight"), scale_numbers(self.part("scale")), self.block)


def restore(codes: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """The numbers [out, in] fp32, given codes [out, in] and scales [blocks of rows, blocks of columns] fp32.

    The last block of a row or column may be incomplete.
    """
    rows, columns = codes.shape
    scales = scales.reshape(-(-rows // block[0]), -(-columns // block[1]))
    of_rows = scales if scales.shape[1] == 1 else scales.repeat_interleave(block[1], dim=1)[:, :columns]
    numbers = codes.float()
    if block[0] == 1:
        return numbers.mul_(of_rows)
    for index, start in enumerate(range(0, rows, block[0])):
        numbers[start : start + block[0]] *= of_rows[index]
    return numbers


def read(base: Checkpoint, section: Fields) -> Contents:
    """Find the weights of `quant_method` fp8 and fbgemm_fp8.

    Raises:
        ModelConfigError: the configuration describes another format.
        MissingTensorError, TensorShapeError: a weight's scales are missing, or have the wrong shape.
    """
    section.choice("fmt", {"e4m3", "float8_e4m3fn"}, default="e4m3")
    section.choice("activation_scheme", {"dynamic", "static"}, default="dynamic")
    section.refuse("expert_dtype", ("fp8",), "experts in another format")
    blocks = [read_block(section, "weight_block_size")] if "weight_block_size" in section else []
    unused, notes = unused_scales(base)
    return Contents(list(find_fp8(base, blocks)), unused, notes)


def read_block(section: Fields, name: str) -> Block:
    """A field that holds rows and columns that share a scale. Raises ModelConfigError."""
    block = section.picked([name]).get(name)
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= 1 << 16 for n in block)):
        raise section.error(name, "two whole numbers, such as [128, 128]")
    return block[0], block[1]


def find_fp8(base: Checkpoint, blocks: Sequence[Block] = ()) -> Iterator[StoredFp8]:
    """The weights in fp8; `blocks`: of scales for blocks. Raises MissingTensorError, TensorShapeError."""
    for name, entry in base.entries.items():
        if entry.dtype == CODES and not name.endswith(SCALES):
            shape, scale = matrix(entry), _scale_of(base, entry)
            block = _block_of(entry, shape, scale, blocks)
            yield StoredFp8(name=name, shape=shape, parts={"weight": entry, "scale": scale}, block=block)


def _scale_of(base: Checkpoint, entry: TensorEntry) -> TensorEntry:
    for suffix in SCALES:
        if (found := base.entries.get(entry.name + suffix)) is not None and found.dtype in (*FLOATS, *EXPONENTS):
            return found
    raise MissingTensorError(
        f"{entry.file}: {entry.name!r} is of type {entry.dtype}, but {entry.name + SCALES[0]!r} (or {SCALES[1]}), "
        f"which holds its scales, is missing from {base.folder}. Is the download complete?"
    )


def _block_of(entry: TensorEntry, shape: tuple[int, int], scale: TensorEntry, blocks: Sequence[Block]) -> Block:
    """The rows and columns that share a scale, by the shape of the scales."""
    outputs, inputs = shape
    whole = -(-inputs // USUAL_BLOCK) * USUAL_BLOCK  # one group of all inputs, in whole blocks as they usually are
    for block in (*blocks, (1, MX_GROUP)) if scale.dtype in EXPONENTS else blocks:
        rows, columns = (-(-size // part) for size, part in zip(shape, block, strict=True))
        if scale.shape in ((rows, columns), (rows, 1, columns, 1)):
            return block
    if scale.shape in ((), (1,), (1, 1)):
        return outputs, whole
    if scale.shape in ((outputs,), (outputs, 1)):
        return 1, whole
    wanted = [[-(-size // part) for size, part in zip(shape, block, strict=True)] for block in blocks]
    sizes = " or ".join(f"{block[0]} x {block[1]}" for block in blocks)
    needs = f"not {' or '.join(map(str, wanted))}, as {entry.name!r} of {list(shape)} in blocks of {sizes} needs"
    raise TensorShapeError(
        f"{scale.file}: {scale.name!r} is {list(scale.shape)}, "
        + (
            f"{needs}, nor [1] or [{outputs}]"
            if blocks
            else f"not [1] or [{outputs}], as {entry.name!r} of {list(shape)} needs"
        )
    )
