"""Weights of whole numbers: (code - zero) x scale, where a group of inputs of an output shares zero and scale.

GPTQ, AWQ and compressed-tensors differ only in how they lay these out (`gptq`, `awq`, `compressed_tensors`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from quire.errors import CheckpointError
from quire.models.formats.stored import WeightOnDisk
from quire.ops.coded import CodedWeight, Scheme

WORD = 32
"""Bits of the words that codes are packed into."""
USUAL_GROUP = 128
"""Inputs that share a scale in most published checkpoints; what kernels multiply best."""


@dataclass(frozen=True, kw_only=True)
class IntegerWeight(WeightOnDisk):
    """A weight of codes with up to 8 bits.

    Up to 4 bits, codes are counted from 0, and two are in a byte as in `CodedWeight`; with more, their middle is 0.

    Attributes:
        kind: its format, for people.
        bits: of a code.
        activations: see `ops.coded.Scheme`.
    """

    kind: str
    bits: int
    activations: Literal["block", "row"] = "block"

    def __post_init__(self) -> None:
        if self.bits <= 4 and self.shape[1] % 2:
            first = next(iter(self.parts.values()))
            raise CheckpointError(f"{first.file}: {first.name!r} has {self.shape[1]} inputs; an odd number is not read")

    @abstractmethod
    def codes(self) -> torch.Tensor:
        """Uint8 [out, in / 2], or int8 [out, in]."""

    @abstractmethod
    def scales(self) -> torch.Tensor:
        """Floats [out, groups]."""

    @abstractmethod
    def zeros(self) -> torch.Tensor | None:
        """The codes that stand for 0, of the codes' type, [out, groups]; None: the middle."""

    def order(self) -> torch.Tensor | None:
        """The group of each input, int64 [in]; None: groups are of consecutive inputs, and of one size."""
        return None

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1) if self.bits <= 4 else 0

    def coded(self) -> CodedWeight | None:
        """See `WeightOnDisk`; None if a group's inputs are not consecutive."""
        inputs, scales = self.shape[1], self.scales()
        if inputs % scales.shape[1] or self.order() is not None:
            return None
        zeros = self._zeros(scales)
        table = None
        if self.bits <= 4 and zeros is None:
            table = tuple(min(code, 2 * self.middle - 1) - self.middle for code in range(16))
        bits: Literal[4, 8] = 4 if self.bits <= 4 else 8
        if scales.shape[1] == 1 and zeros is None:
            scheme = Scheme(self.kind, bits, 0, table, activations=self.activations)
            return CodedWeight(scheme, self.codes(), factors=scales[:, 0].float().contiguous())
        if scales.shape[1] == 1 and zeros is not None and inputs % USUAL_GROUP == 0:
            scales, zeros = (each.repeat_interleave(inputs // USUAL_GROUP, dim=1) for each in (scales, zeros))
        scheme = Scheme(self.kind, bits, inputs // scales.shape[1], table, activations=self.activations)
        return CodedWeight(scheme, self.codes(), scales, zeros)

    def restored(self) -> torch.Tensor:
        """See `WeightOnDisk`."""
        coded = self.coded()
        if coded is not None:
            return coded.restored()
        scales, order = self.scales(), self.order()
        zeros = self._zeros(scales)
        if order is None:
            order = torch.arange(self.shape[1]) // -(-self.shape[1] // scales.shape[1])
        numbers = self.codes()
        if self.bits <= 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)
        shift = self.middle if zeros is None else zeros.float()[:, order]
        return (numbers.float() - shift) * scales.float()[:, order]

    def _zeros(self, scales: torch.Tensor) -> torch.Tensor | None:
        """None also if all are the middle, as they are in formats that always store them."""
        if not bool(scales.isfinite().all()):
            raise CheckpointError("some of its scales are not finite")
        zeros = self.zeros()
        return None if zeros is None or bool((zeros == self.middle).all()) else zeros


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes uint8 [rows, count] from a stream of bits in each row of words, int32, the lowest bits first."""
    if bits == 8:
        return words.contiguous().view(torch.uint8)[:, :count]
    if bits == 4:
        pairs = words.contiguous().view(torch.uint8)
        return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)[:, :count]
    rows, have = words.shape
    stretches = -(-count // WORD)  # as many codes as a word has bits are in as many words as a code has
    words = torch.nn.functional.pad(words, (0, stretches * bits - have)).view(rows, stretches, bits)
    codes = torch.empty(rows, stretches, WORD, dtype=torch.uint8)
    for place in range(WORD):
        word, shift = divmod(place * bits, WORD)
        code = words[..., word] >> shift
        if shift + bits > WORD:
            code = code & ((1 << (WORD - shift)) - 1) | words[..., word + 1] << (WORD - shift)
        codes[..., place] = code & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count]


def in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes of up to 4 bits [out, in], two in a byte, the even input's in the lower half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()


def as_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes counted from 0, uint8 [out, in], as `IntegerWeight` has them."""
    return in_pairs(codes) if bits <= 4 else centered(codes, bits)


def centered(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes or zeros of more than 4 bits counted from 0, uint8, as int8 whose middle is 0."""
    return (codes - (1 << (bits - 1))).view(torch.int8)


def in_groups(numbers: torch.Tensor, outputs: int) -> torch.Tensor:
    """Scales or zeros [out, groups], of which there may be one, one an output, or one a group."""
    return numbers.reshape(1, 1).expand(outputs, 1) if numbers.numel() == 1 else numbers.reshape(outputs, -1)


def order_of(groups_of: torch.Tensor, groups: int) -> torch.Tensor | None:
    """The group of each input, int64 [in]; None if groups are of consecutive inputs.

    Raises:
        CheckpointError: there is no such group.
    """
    order, inputs = groups_of.long(), len(groups_of)
    if bool(((order < 0) | (order >= groups)).any()):
        raise CheckpointError(
            f"inputs belong to groups 0 to {groups - 1}, found {int(order.min())} to {int(order.max())}"
        )
    consecutive = inputs % groups == 0 and torch.equal(order, torch.arange(inputs) // (inputs // groups))
    return None if consecutive else order
