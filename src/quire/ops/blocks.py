"""Weights as a GGUF file has them, in blocks of a mapped file, which are taken apart when they are packed.

A model's codes are then in memory once, as they are packed, and not also as they were unpacked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire.ops.coded import CodedWeight
from quire.ops.mxfp4 import Mxfp4Weight

NUMBERS_IN_CPP = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "NVFP4", "MXFP4"),
)
"""The types that C++ takes apart, in the order of its `BLOCK_TYPES`."""
SIX_BITS = {"Q5_0": 16, "Q5_1": 0, "Q5_K": 0, "Q6_K": 32}
"""Types whose numbers fit 6 bits, and what makes them 0 to 63."""


@dataclass(frozen=True)
class BlockForm:
    """A type of blocks.

    Attributes:
        name: as GGUF has it.
        inputs, size: of a block, the size in bytes.
        decode: the definition: blocks taken apart, given uint8 [rows, blocks, size], and which rows, int64 [n], or
            None for all.
    """

    name: str
    inputs: int
    size: int
    decode: Callable[[torch.Tensor, torch.Tensor | None], CodedWeight | Mxfp4Weight]

    @functools.cached_property
    def example(self) -> CodedWeight | Mxfp4Weight:
        """What a block is: its scheme, and the types of its scales."""
        return self.decode(torch.zeros(1, 1, self.size, dtype=torch.uint8), None)


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [out, in] in blocks.

    Attributes:
        blocks: uint8 [rows, in / inputs of a block, bytes of a block], a view of a mapped file.
        index: int64 [out], which of these rows; None for all.
        factor: by which all numbers are multiplied (of a CodedWeight alone).
    """

    form: BlockForm
    blocks: torch.Tensor
    index: torch.Tensor | None = None
    factor: float | None = None

    @property
    def out_features(self) -> int:
        return len(self.blocks if self.index is None else self.index)

    @property
    def in_features(self) -> int:
        return self.blocks.shape[1] * self.form.inputs

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.out_features * self.blocks.shape[1] * self.form.size

    def outputs(self, wanted: range | torch.Tensor) -> BlockWeight:
        """Of these outputs alone."""
        if isinstance(wanted, range) and len(wanted) == self.out_features:
            return self
        rows = slice(wanted.start, wanted.stop) if isinstance(wanted, range) else wanted
        if self.index is not None:
            return replace(self, index=self.index[rows])
        return replace(self, blocks=self.blocks[rows]) if isinstance(rows, slice) else replace(self, index=rows)

    def decoded(self) -> CodedWeight | Mxfp4Weight:
        """The weight in tensors of its own.

        Raises:
            CheckpointError: exponents of MXFP4 that are not computed with.
        """
        weight = self.form.decode(self.blocks, self.index)
        if self.factor is None or isinstance(weight, Mxfp4Weight):
            return weight
        return replace(weight, factors=torch.full((self.out_features,), self.factor))

    def restored(self) -> torch.Tensor:
        """The numbers, [out, in] fp32."""
        return self.decoded().restored()
