"""Checkpoints in AWQ's layout for matrix products ("gemm"), as AutoAWQ and AutoRound write it.

A module has qweight int32 [in, out / 8], eight codes of 4 bits a word, of outputs in the order `ORDER`; qzeros int32
[groups, out / 8], the same; and scales [groups, out]. A number is (code - zero) x scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.formats.integers import IntegerWeight, unpacked
from quire.models.formats.stored import FLOATS, Contents, check_shape, find_parts, matrix

BITS, IN_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of a word's outputs, from the lowest bits on."""
PLACES = [ORDER.index(output) for output in range(IN_WORD)]


@dataclass(frozen=True, kw_only=True)
class AwqWeight(IntegerWeight):
    """A weight in this layout."""

    def codes(self) -> torch.Tensor:
        """See `IntegerWeight`."""
        outputs, inputs = self.shape
        pieces = self.part("qweight").mT.contiguous().view(torch.uint8).view(-1, inputs, IN_WORD // 2)
        codes = torch.empty(outputs // IN_WORD, IN_WORD, inputs // 2, dtype=torch.uint8)
        for place, output in enumerate(ORDER):
            even, odd = pieces[:, 0::2, place // 2], pieces[:, 1::2, place // 2]
            codes[:, output] = even >> 4 | odd & 0xF0 if place % 2 else even & 0x0F | odd << 4
        return codes.flatten(0, 1)

    def scales(self) -> torch.Tensor:
        """See `IntegerWeight`."""
        return self.part("scales").mT.contiguous()

    def zeros(self) -> torch.Tensor:
        """See `IntegerWeight`."""
        words = self.part("qzeros")
        zeros = unpacked(words, BITS, self.shape[0]).view(len(words), -1, IN_WORD)[..., PLACES]
        return zeros.flatten(1).mT.contiguous()


def read(base: Checkpoint, section: Fields) -> Contents:
    """Find the weights in this layout.

    Raises:
        ModelConfigError: the configuration describes another one.
        MissingTensorError, TensorShapeError, TensorDtypeError: a weight's tensors are missing, or do not fit.
    """
    field = "version" if "version" in section else "format"
    if section.picked([field]).get(field, "gemm") not in ("gemm", "GEMM"):
        raise section.error(field, "'gemm', the only layout of AWQ that Quire reads")
    section.refuse("backend", ("autoawq", "auto"), "the layout of another program")
    if section.integer("bits", default=section.integer("w_bit", default=BITS)) != BITS:
        raise section.error("bits", "4")
    return find(base)


def find(base: Checkpoint) -> Contents:
    """The weights. Raises MissingTensorError, TensorShapeError, TensorDtypeError."""
    weights = []
    for name, words in base.entries.items():
        if name.endswith(".qweight"):
            prefix = name.removesuffix("qweight")
            parts = find_parts(base, prefix, {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS})
            (inputs, width), (groups, _) = matrix(words), matrix(parts["scales"])
            why = f"{name!r} of {[inputs, width]}"
            check_shape(parts["scales"], (groups, width * IN_WORD), why=why)
            check_shape(parts["qzeros"], (groups, width), why=f"{parts['scales'].name!r} of {groups} groups")
            shape = width * IN_WORD, inputs
            weights.append(AwqWeight(name=f"{prefix}weight", shape=shape, parts=parts, kind="AWQ int4", bits=BITS))
    return Contents(weights)
