"""Checkpoints with experts in MXFP4 (https://arxiv.org/abs/2310.10537), such as gpt-oss.

Their `quantization_config` has `quant_method` mxfp4. All experts of a layer are in PREFIX.experts.gate_up_proj_blocks
[experts, outputs, inputs / 32, 16] U8, where each byte is two 4-bit floating-point numbers, the lower half first, and
gate_up_proj_scales [experts, outputs, inputs / 32] U8, exponents of 2 for 32 numbers each; the outputs of gate and up
alternate. The same holds for down_proj. Kernels compute with weights as they are stored (`ops.mxfp4`); their exact
numbers are available too, for example to quantize them in another way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from quire.errors import CheckpointError, MissingTensorError, TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.layout import EXPERTS
from quire.models.safetensors_file import FLOAT_DTYPES, map_tensor
from quire.models.safetensors_header import TensorEntry
from quire.ops.mxfp4 import GROUP, Mxfp4Weight

SECTION = "quantization_config"
BLOCKS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)_blocks")
CODES = {"U8": torch.uint8}


class Mxfp4Checkpoint(Checkpoint):
    """Presents such a checkpoint as one with a plain weight per expert: "PREFIX.experts.0.gate_proj.weight".

    Raises:
        MissingTensorError, TensorShapeError: scales are missing, or blocks and scales have the wrong shape.
    """

    def __init__(self, base: Checkpoint) -> None:
        self.folder, self.generation = base.folder, base.generation
        self.config = base.config.without(SECTION)
        self.entries = dict(base.entries)
        self._parts: dict[str, tuple[TensorEntry, TensorEntry, int, slice]] = {}  # by name: blocks, scales, where
        for name, blocks in base.entries.items():
            if (found := BLOCKS.fullmatch(name)) is not None:
                scales = _scales_of(base, blocks, EXPERTS[found[2]])
                self._add(found[1], EXPERTS[found[2]], blocks, scales)
                del self.entries[name], self.entries[scales.name]

    def _add(self, prefix: str, called: tuple[str, ...], blocks: TensorEntry, scales: TensorEntry) -> None:
        experts, outputs, groups, _ = blocks.shape
        shape = outputs // len(called), groups * GROUP
        size = blocks.num_bytes // max(experts * len(called), 1)
        for expert in range(experts):
            for place, part in enumerate(called):
                name = f"{prefix}{expert}.{part}.weight"
                self.entries[name] = replace(blocks, name=name, dtype="F32", shape=shape, num_bytes=size)
                self._parts[name] = blocks, scales, expert, slice(place, None, len(called))

    def tensor(self, name: str, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
        """A tensor: see `Checkpoint`. Experts are restored in fp32."""
        coded = self.coded(name)
        return super().tensor(name, dtypes) if coded is None else coded.restored()

    def coded(self, name: str) -> Mxfp4Weight | None:
        """See `Checkpoint`."""
        if name not in self._parts:
            return None
        blocks, scales, expert, rows = self._parts[name]
        try:
            return Mxfp4Weight(map_tensor(blocks, CODES)[expert, rows], map_tensor(scales, CODES)[expert, rows])
        except CheckpointError as error:
            raise CheckpointError(f"{blocks.file}: {blocks.name!r}, expert {expert}: {error}") from error


def is_mxfp4(checkpoint: Checkpoint) -> bool:
    """Whether its experts are in this format, by its configuration."""
    section = checkpoint.config.section(SECTION)
    return section.picked(["quant_method"]) == {"quant_method": "mxfp4"}


def _scales_of(checkpoint: Checkpoint, blocks: TensorEntry, called: tuple[str, ...]) -> TensorEntry:
    """The entry of some blocks' scales, after checking the shapes of both."""
    name = blocks.name.removesuffix("_blocks") + "_scales"
    scales = checkpoint.entries.get(name)
    if scales is None:
        raise MissingTensorError(
            f"{blocks.file}: {blocks.name!r} is there, but {name!r}, which holds its scales, is missing from "
            f"{checkpoint.folder}. Is the download complete?"
        )
    fits = len(blocks.shape) == 4 and blocks.shape[3] == GROUP // 2 and blocks.shape[1] % len(called) == 0
    if not fits or scales.shape != blocks.shape[:3]:
        raise TensorShapeError(
            f"{blocks.file}: {blocks.name!r} is {list(blocks.shape)} and its scales {list(scales.shape)}; they must "
            f"be [experts, outputs, inputs / {GROUP}, {GROUP // 2}] and the same without the last, with outputs a "
            f"multiple of {len(called)}"
        )
    return scales
