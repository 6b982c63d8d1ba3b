"""Checkpoints in GPTQ's layout, as AutoGPTQ, GPTQModel, optimum and AutoRound write it.

A module has qweight int32 [in x bits / 32, out], a stream of bits along the inputs of each output; scales
[groups, out]; qzeros int32 [groups, out x bits / 32], along the outputs; and g_idx int32 [in], the group of each input,
which may be left out where groups are of consecutive inputs. A number is (code - zero) x scale. Shapes say how many
bits there are, so overrides for modules need not be matched. In the first version of the format zeros are stored less
1, in the second one as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.errors import TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.formats.integers import WORD, IntegerWeight, as_codes, centered, order_of, unpacked
from quire.models.formats.stored import FLOATS, Contents, check_shape, find_parts, matrix
from quire.models.safetensors_header import TensorEntry

BITS = range(2, 9)
FIRST, SECOND = "gptq", "gptq_v2"


@dataclass(frozen=True, kw_only=True)
class GptqWeight(IntegerWeight):
    """A weight in this layout.

    Attributes:
        less_1: zeros are stored less 1.
    """

    less_1: bool

    def codes(self) -> torch.Tensor:
        """See `IntegerWeight`."""
        words, inputs = self.part("qweight").mT.contiguous(), self.shape[1]
        if self.bits == 4 and words.shape[1] * 8 == inputs:
            return words.view(torch.uint8)
        return as_codes(unpacked(words, self.bits, inputs), self.bits)

    def scales(self) -> torch.Tensor:
        """See `IntegerWeight`."""
        return self.part("scales").mT.contiguous()

    def zeros(self) -> torch.Tensor:
        """See `IntegerWeight`."""
        words, aligned = self.part("qzeros"), WORD % self.bits == 0
        if self.less_1 and aligned:  # to whole words, since some writers subtracted 1 from each code of a word at once
            words = words + sum(1 << shift for shift in range(0, WORD, self.bits))
        zeros = unpacked(words, self.bits, self.shape[0]).mT.contiguous()
        if self.less_1 and not aligned:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return zeros if self.bits <= 4 else centered(zeros, self.bits)

    def order(self) -> torch.Tensor | None:
        """See `IntegerWeight`."""
        if "g_idx" not in self.parts:
            return None
        return order_of(self.part("g_idx"), self.parts["scales"].shape[0])


def read(base: Checkpoint, section: Fields) -> Contents:
    """Find the weights in this layout.

    Raises:
        ModelConfigError: the configuration describes another one.
        MissingTensorError, TensorShapeError, TensorDtypeError: a weight's tensors are missing, or do not fit.
    """
    field = "checkpoint_format" if "checkpoint_format" in section else "format"
    version = section.choice(field, {FIRST, SECOND}, default=FIRST)
    section.refuse("is_marlin_format", (False,), "the layout of a kernel")
    section.refuse("pack_dtype", ("int32",), "words of another size")
    return contents_of(base, section, version == FIRST)


def contents_of(base: Checkpoint, section: Fields, less_1: bool) -> Contents:
    """The weights, and a note if inputs may be in another order; `less_1`: see `GptqWeight`."""
    bits = section.integer("bits", default=4, max=8)
    notes: tuple[str, ...] = ()
    if section.flag("desc_act", default=False):
        notes = ("weights whose groups are not of consecutive inputs (desc_act) are restored when they are read",)
    return Contents(list(_find(base, bits, less_1)), notes=notes)


def _find(base: Checkpoint, usual_bits: int, less_1: bool) -> Iterator[GptqWeight]:
    wanted = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx?": ("I32", "I64")}
    for name in base.entries:
        if name.endswith(".qweight"):
            prefix = name.removesuffix("qweight")
            parts = find_parts(base, prefix, wanted)
            bits, inputs = _bits_of(parts, usual_bits)
            groups, outputs = matrix(parts["scales"])
            why = f"{parts['scales'].name!r} of {[groups, outputs]}"
            check_shape(parts["qweight"], (-(-inputs * bits // WORD), outputs), why=why)
            check_shape(parts["qzeros"], (groups, -(-outputs * bits // WORD)), why=why)
            if "g_idx" in parts:
                check_shape(parts["g_idx"], (inputs,), why=f"{name!r} of {list(parts['qweight'].shape)}")
            shape = outputs, inputs
            kind = f"GPTQ int{bits}"
            yield GptqWeight(name=f"{prefix}weight", shape=shape, parts=parts, kind=kind, bits=bits, less_1=less_1)


def _bits_of(parts: dict[str, TensorEntry], usual: int) -> tuple[int, int]:
    """Bits of a code and the number of inputs, by the shapes; `usual`: what the configuration says."""
    (height, outputs), (_, width) = matrix(parts["qweight"]), matrix(parts["qzeros"])
    for bits in sorted(BITS, key=lambda bits: bits != usual):
        inputs = parts["g_idx"].shape[0] if "g_idx" in parts and parts["g_idx"].shape else height * WORD // bits
        if -(-outputs * bits // WORD) == width and -(-inputs * bits // WORD) == height:
            return bits, inputs
    entry = parts["qweight"]
    raise TensorShapeError(
        f"{entry.file}: {entry.name!r} is {list(entry.shape)} and its qzeros {list(parts['qzeros'].shape)}, which fit "
        "for no number of bits from 2 to 8"
    )
