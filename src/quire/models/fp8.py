"""Checkpoints with weights in fp8 (e4m3) and a scale per block, such as DeepSeek V3.

Their `quantization_config` has `quant_method` fp8 and `weight_block_size`, 128 x 128. A weight NAME.weight [out, in] of
type F8_E4M3 has a second tensor NAME.weight_scale_inv [blocks of rows, blocks of columns]; a number is its code times
its block's scale. With `activation_scheme` static, as in Ministral 3, there is one scale for the whole weight, and one
for the activations (NAME.activation_scale), which is not used here. Other weights are stored as usual. Quire computes
with the numbers themselves, rounded once to the data type of the computation: they are restored when they are read, or
stay in 8 bits if the kernels restore them (`ops.fp8`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quire.errors import MissingTensorError, TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.safetensors_file import FLOAT_DTYPES, map_tensor
from quire.models.safetensors_header import TensorEntry
from quire.ops.fp8 import Fp8Weight

SECTION = "quantization_config"
CODES = {"F8_E4M3": torch.float8_e4m3fn}
USUAL_BLOCK = 128
"""Rows and columns that share a scale in published checkpoints."""
SCALE = "_scale_inv"
"""Suffix of a weight's name, for its scales."""
OF_ACTIVATIONS = ".activation_scale"


class BlockQuantizedCheckpoint(Checkpoint):
    """Presents such a checkpoint as one with plain weights.

    Its entries are the weights without their scales; weights in fp8 are F32, as `tensor` restores them. Its
    configuration is the base's without `quantization_config`.

    Raises:
        ModelConfigError: `quantization_config` describes another format.
        MissingTensorError, TensorShapeError: a weight's scales are missing, or have the wrong shape.
    """

    def __init__(self, base: Checkpoint) -> None:
        self.folder, self.generation = base.folder, base.generation
        self.config = base.config.without(SECTION)
        self._block = _read_block(base.config.section(SECTION))
        self._stored = {name: entry for name, entry in base.entries.items() if entry.dtype in CODES}
        self._scales = {name: _scales_of(base, entry, self._block) for name, entry in self._stored.items()}
        scales = {entry.name for entry in self._scales.values()}
        self.entries = {
            name: replace(entry, dtype="F32") if name in self._stored else entry
            for name, entry in base.entries.items()
            if name not in scales and not name.endswith(OF_ACTIVATIONS)
        }

    def tensor(self, name: str, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
        """A tensor: see `Checkpoint`. One in fp8 is restored in fp32."""
        if name not in self._stored:
            return super().tensor(name, dtypes)
        return restore(*self._codes_and_scales(name), self._block)

    def coded(self, name: str) -> Fp8Weight | None:
        """See `Checkpoint`."""
        return _weight(*self._codes_and_scales(name), self._block) if name in self._stored else None

    def _codes_and_scales(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return map_tensor(self._stored[name], CODES), map_tensor(self._scales[name]).float()


def _weight(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> Fp8Weight:
    """The numbers of `restore`, with a scale for each output, so that any outputs can be concatenated."""
    outputs, inputs = codes.shape
    if block is None:  # one group of all inputs, in whole blocks as they usually are
        scales, group = scales.reshape(1, 1).expand(outputs, 1), -(-inputs // USUAL_BLOCK) * USUAL_BLOCK
    else:
        scales, group = scales.repeat_interleave(block[0], dim=0)[:outputs], block[1]
    return Fp8Weight(codes.view(torch.uint8), scales.contiguous(), group)


def restore(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """The numbers [out, in] fp32, given codes [out, in] and scales [blocks of rows, blocks of columns] fp32.

    The last block of a row or column may be incomplete. Without blocks there is one scale.
    """
    if block is None:
        return codes.float() * scales
    rows, columns = codes.shape
    of_rows = scales.repeat_interleave(block[1], dim=1)[:, :columns]  # [blocks of rows, in]
    numbers = codes.float()
    for index, start in enumerate(range(0, rows, block[0])):
        numbers[start : start + block[0]] *= of_rows[index]
    return numbers


def is_block_quantized(checkpoint: Checkpoint) -> bool:
    """Whether its weights are in fp8, by its configuration."""
    section = checkpoint.config.section(SECTION)
    return section.picked(["quant_method"]) == {"quant_method": "fp8"}


def _read_block(section: Fields) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None if all do. Raises ModelConfigError if the format is another one."""
    section.choice("fmt", {"e4m3", "float8_e4m3fn"}, default="e4m3")
    static = section.choice("activation_scheme", {"dynamic", "static"}, default="dynamic") == "static"
    if static and "weight_block_size" not in section:
        return None
    block = section.picked(["weight_block_size"]).get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= 1 << 16 for n in block)):
        raise section.error("weight_block_size", "two whole numbers, such as [128, 128]")
    return block[0], block[1]


def _scales_of(checkpoint: Checkpoint, entry: TensorEntry, block: tuple[int, int] | None) -> TensorEntry:
    """The entry of a weight's scales, after checking its shape."""
    scales = checkpoint.entries.get(entry.name + SCALE)
    if scales is None:
        raise MissingTensorError(
            f"{entry.file}: {entry.name!r} is of type {entry.dtype}, but {entry.name + SCALE!r}, which holds its "
            f"scales, is missing from {checkpoint.folder}. Is the download complete?"
        )
    if len(entry.shape) != 2:
        raise TensorShapeError(f"{entry.file}: {entry.name!r} is of type {entry.dtype}, but not a matrix")
    if block is None:
        if scales.shape not in ((), (1,)):
            raise TensorShapeError(f"{scales.file}: {scales.name!r} is {list(scales.shape)}; it must be one number")
        return scales
    wanted = tuple(-(-size // part) for size, part in zip(entry.shape, block, strict=True))
    if scales.shape != wanted:
        raise TensorShapeError(
            f"{scales.file}: {scales.name!r} is {list(scales.shape)}, not {list(wanted)}, as {entry.name!r} of "
            f"{list(entry.shape)} in blocks of {block[0]} x {block[1]} needs"
        )
    return scales
