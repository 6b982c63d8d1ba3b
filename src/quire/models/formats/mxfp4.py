"""Checkpoints with experts in MXFP4 (https://arxiv.org/abs/2310.10537), such as gpt-oss.

Their `quantization_config` has `quant_method` mxfp4. All experts of a layer are in PREFIX.experts.gate_up_proj_blocks
[experts, outputs, inputs / 32, 16] U8, where each byte is two 4-bit floating-point numbers, the lower half first, and
gate_up_proj_scales [experts, outputs, inputs / 32] U8, exponents of 2 for 32 numbers each; the outputs of gate and up
alternate. The same holds for down_proj. Kernels compute with weights as they are stored (`ops.mxfp4`); their exact
numbers are available too, for example to quantize them in another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.errors import CheckpointError, MissingTensorError, TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.formats.stored import Contents, WeightOnDisk
from quire.models.layout import EXPERTS
from quire.models.safetensors_header import TensorEntry
from quire.ops.mxfp4 import GROUP, Mxfp4Weight

BLOCKS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)_blocks")


@dataclass(frozen=True, kw_only=True)
class StoredExpert(WeightOnDisk):
    """An expert's weight.

    Attributes:
        expert: its place among the layer's.
        rows: its outputs among the fused ones.
        share: of its tensors' bytes.
    """

    expert: int
    rows: slice
    share: int

    def coded(self) -> Mxfp4Weight:
        """See `WeightOnDisk`; a view of the file."""
        blocks, scales = self.part("blocks"), self.part("scales")
        try:
            return Mxfp4Weight(blocks[self.expert, self.rows], scales[self.expert, self.rows])
        except CheckpointError as error:
            raise CheckpointError(f"expert {self.expert}: {error}") from error

    @property
    def num_bytes(self) -> int:
        """Of the codes in the file."""
        return self.parts["blocks"].num_bytes // max(self.share, 1)


def read(base: Checkpoint, section: Fields) -> Contents:
    """Find the experts, each a plain weight: "PREFIX.experts.0.gate_proj.weight".

    Raises:
        MissingTensorError, TensorShapeError: scales are missing, or blocks and scales have the wrong shape.
    """
    weights: list[WeightOnDisk] = []
    for name, blocks in base.entries.items():
        if (found := BLOCKS.fullmatch(name)) is not None:
            weights += _experts(found[1], EXPERTS[found[2]], blocks, _scales_of(base, blocks, EXPERTS[found[2]]))
    return Contents(weights)


def _experts(prefix: str, called: tuple[str, ...], blocks: TensorEntry, scales: TensorEntry) -> Iterator[StoredExpert]:
    experts, outputs, groups, _ = blocks.shape
    for expert in range(experts):
        for place, part in enumerate(called):
            yield StoredExpert(
                name=f"{prefix}{expert}.{part}.weight",
                shape=(outputs // len(called), groups * GROUP),
                parts={"blocks": blocks, "scales": scales},
                expert=expert,
                rows=slice(place, None, len(called)),
                share=experts * len(called),
            )


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
