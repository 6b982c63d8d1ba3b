"""Weights in fp4 (e2m1) of compressed-tensors and modelopt: NVFP4 and MXFP4.

Two codes are in a byte of uint8 [out, in / 2], the even input's in the lower half. In NVFP4
(https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/BlockScaling.html) 16 inputs share a scale in
e4m3, and the whole weight one in fp32:

- compressed-tensors: weight_packed, weight_scale, and weight_global_scale, which divides;
- modelopt: weight, weight_scale, and weight_scale_2, which multiplies.

In MXFP4 32 inputs share an exponent of 2, weight_scale uint8 (for gpt-oss' experts see `mxfp4`). The numbers are halves
of whole ones, so NVFP4 is a table with scales (`ops.coded`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.models.checkpoint import Checkpoint
from quire.models.formats.stored import EXPONENTS, WeightOnDisk, check_shape, find_parts, matrix
from quire.models.safetensors_header import TensorEntry
from quire.ops.coded import CodedWeight, Scheme
from quire.ops.mxfp4 import GROUP, NUMBERS, Mxfp4Weight

DOUBLED = tuple(int(2 * number) for number in NUMBERS.tolist())
NVFP4 = Scheme("NVFP4", 4, 16, DOUBLED)
DIVIDES, MULTIPLIES = "weight_global_scale", "weight_scale_2"


@dataclass(frozen=True, kw_only=True)
class StoredNvfp4(WeightOnDisk):
    """A weight in NVFP4, of compressed-tensors or of modelopt."""

    def coded(self) -> CodedWeight:
        """See `WeightOnDisk`. Scales in e4m3 are exact in fp16."""
        scales = self.part("weight_scale").to(torch.float16)
        if DIVIDES in self.parts:
            factor = 0.5 / self.part(DIVIDES).float().reshape(1)
        else:
            factor = 0.5 * self.part(MULTIPLIES).float().reshape(1)
        weight = CodedWeight(NVFP4, self.part("codes"), scales, factors=factor.repeat(self.shape[0]))
        weight.check_finite()
        return weight


@dataclass(frozen=True, kw_only=True)
class StoredMxfp4(WeightOnDisk):
    """A weight in MXFP4."""

    def coded(self) -> Mxfp4Weight:
        """See `WeightOnDisk`; a view of the file."""
        return Mxfp4Weight(self.part("codes").view(self.shape[0], -1, GROUP // 2), self.part("weight_scale"))


def find_fp4(base: Checkpoint) -> Iterator[WeightOnDisk]:
    """The weights in fp4. Raises MissingTensorError, TensorShapeError, TensorDtypeError."""
    for name, entry in base.entries.items():
        part = name.rpartition(".")[2]
        if entry.dtype == "U8" and part in ("weight_packed", "weight"):
            yield _stored(base, name.removesuffix(part), part, entry)


def _stored(base: Checkpoint, prefix: str, part: str, codes: TensorEntry) -> WeightOnDisk:
    outputs, width = matrix(codes)
    name, shape, why = f"{prefix}weight", (outputs, 2 * width), f"{codes.name!r} of {list(codes.shape)}"
    parts = find_parts(base, prefix, {part: ("U8",), "weight_scale": ("F8_E4M3", *EXPONENTS)})
    scale = parts["weight_scale"]
    parts = {"codes": codes, "weight_scale": parts["weight_scale"]}
    if scale.dtype in EXPONENTS:
        check_shape(scale, (outputs, -(-shape[1] // GROUP)), why=why)
        check_shape(codes, (outputs, scale.shape[1] * GROUP // 2), why="groups of 32 inputs")
        return StoredMxfp4(name=name, shape=shape, parts=parts)
    whole = DIVIDES if part == "weight_packed" else MULTIPLIES
    parts |= find_parts(base, prefix, {whole: ("F32",)})
    check_shape(scale, (outputs, -(-shape[1] // NVFP4.group)), why=why)
    check_shape(parts[whole], (), (1,), (1, 1), why="one scale for all of the weight")
    return StoredNvfp4(name=name, shape=shape, parts=parts)
