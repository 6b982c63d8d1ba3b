"""Weights in codes, what these stand for, and scales in groups; the definition.

One description serves all formats that store whole numbers with scales: Quire's int8 and int4 (`ops.quantize_groups`),
Q4_0 to Q6_K and IQ4_XS of GGUF, AWQ, GPTQ, compressed-tensors, NVFP4. Nothing that a file says is rounded again: scales
keep the file's own type, and a number is

    factor[o] * (scale[o, g] * TABLE[code[o, i]] - offset[o, g])

with g the group of the input i. Where `Scheme.block` is set, a group's scale and offset are small whole numbers, and
are multiplied by those of their block. Whole offsets without a block's count steps of their group's scale, as the zero
points of AWQ and GPTQ do. MXFP4 (`ops.mxfp4`) and fp8 (`ops.fp8`) are apart, since they meet activations that are not
quantized.

Products quantize activations to int8 (`ops.activations`), with a scale for `Scheme.shared` inputs of a row. What a
`Scheme.segment` of inputs brings is a whole number, and exact. Segments are summed in ascending order, each times its
scale and less its offset times the sum of the activations' codes, and where each has a scale of activations of its own,
times that; otherwise those of 256 inputs are summed first, and these sums, times the row's scale. Factors come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from quire.errors import CheckpointError
from quire.ops.activations import BLOCK, fused_multiply_add, quantize_activations, quantize_rows

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WHOLE = (torch.uint8, torch.int8)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a weight's codes mean.

    Attributes:
        name: for people, such as "Q4_K".
        bits: of a code: 4 or 8.
        group: inputs that share a scale and an offset; 0: there are no scales but the outputs' factors.
        table: with 4 bits, the 16 whole numbers (from -128 to 127) that codes stand for. None: for themselves, 0 to 15
            or -128 to 127.
        block: inputs that share a scale of scales, a multiple of `group`; None: scales stand for themselves.
        activations: whether each "group" of a row of activations has a scale of its own when it is quantized, as many
            inputs as the weight's; or each "block" of 256 where there are blocks, as in llama.cpp; or the whole "row",
            since the format says so.
    """

    name: str
    bits: Literal[4, 8]
    group: int
    table: tuple[int, ...] | None = None
    block: int | None = None
    activations: Literal["group", "block", "row"] = "block"

    @property
    def segment(self) -> int:
        """Inputs whose products are summed exactly: within a group, and within a block of activations."""
        return math.gcd(self.group, BLOCK)

    @property
    def shared(self) -> int:
        """Inputs of activations that share a scale: as many as the weight's, which costs one more multiplication for
        each group; 256 (`ops.activations.BLOCK`) where there are no groups, or where `activations` says so."""
        alone = self.activations == "group" or (self.activations == "block" and self.block is None)
        return self.segment if self.group and alone else BLOCK

    @property
    def held_bits(self) -> int:
        """Of a code in a file of Quire's, and in memory: numbers of 8 bits in blocks fit 6, as those of Q5_K do."""
        return 6 if self.block and self.bits == 8 else self.bits


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in] row by row; its tensors may be views of a mapped file.

    Attributes:
        codes: uint8 [out, in / 2], two codes a byte, the even input's in the lower half; or int8 [out, in].
        scales: [out, in / group], floats, or whole numbers (uint8 or int8) with a block; None without groups.
        offsets: the same, or None where they are 0. Whole numbers without a block's offsets count steps of `scales`.
        block_scales, block_offsets: floats [out, in / block].
        factors: fp32 [out], or None where they are 1.

    Raises:
        CheckpointError: the tensors are not those that the scheme prescribes.
    """

    scheme: Scheme
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    block_scales: torch.Tensor | None = None
    block_offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def __post_init__(self) -> None:
        scheme, (rows, inputs) = self.scheme, (self.out_features, self.in_features)
        self._check("codes", (torch.uint8,) if scheme.bits == 4 else (torch.int8,), (rows, inputs * scheme.bits // 8))
        if scheme.group:
            if inputs % scheme.group or (scheme.block and inputs % scheme.block):
                raise CheckpointError(
                    f"{scheme.name}: groups of {scheme.block or scheme.group} do not divide {inputs} inputs"
                )
            groups = rows, inputs // scheme.group
            self._check("scales", WHOLE if scheme.block else FLOATS, groups)
            self._check(
                "offsets", WHOLE if self.block_offsets is not None else (*WHOLE, *FLOATS), groups, optional=True
            )
        if scheme.block:
            blocks = rows, inputs // scheme.block
            self._check("block_scales", FLOATS, blocks)
            self._check("block_offsets", FLOATS, blocks, optional=self.offsets is None)
        self._check("factors", (torch.float32,), (rows,), optional=bool(scheme.group))

    def _check(
        self, name: str, dtypes: Sequence[torch.dtype], shape: tuple[int, ...], *, optional: bool = False
    ) -> None:
        found: torch.Tensor | None = getattr(self, name)
        if found is None and optional:
            return
        if found is None or found.dtype not in dtypes or tuple(found.shape) != shape:
            what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            wanted = " or ".join(map(str, dtypes))
            raise CheckpointError(f"{self.scheme.name}: {name} must be {wanted} {list(shape)}, found {what}")

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 8 // self.scheme.bits

    @property
    def nbytes(self) -> int:
        """In memory, see `Scheme.held_bits`."""
        codes = self.codes.nbytes * self.scheme.held_bits // self.scheme.bits
        return codes + sum(tensor.nbytes for name, tensor in self._tensors().items() if name != "codes")

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "scheme"}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def outputs(self, wanted: range | torch.Tensor) -> CodedWeight:
        """Of these outputs alone: a view of a range, a copy for indices int64 [n]."""
        if isinstance(wanted, range) and len(wanted) == self.out_features:
            return self
        rows = slice(wanted.start, wanted.stop) if isinstance(wanted, range) else wanted
        parts: dict[str, Any] = {name: tensor[rows] for name, tensor in self._tensors().items()}
        return replace(self, **parts)

    def numbers(self) -> torch.Tensor:
        """What the codes stand for: whole numbers, int32 [out, in]."""
        if self.scheme.bits == 8:
            return self.codes.int()
        codes = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1).int()
        return codes if self.scheme.table is None else torch.tensor(self.scheme.table, dtype=torch.int32)[codes]

    def group_scales(self) -> torch.Tensor | None:
        """The scales of groups, fp32 [out, in / group], exact: at most 11 and 8 bits are multiplied."""
        return None if self.scales is None else self._times(self.scales, self.block_scales)

    def group_offsets(self) -> torch.Tensor | None:
        """The offsets of groups, fp32 [out, in / group]."""
        if self.offsets is None:
            return None
        whole = self.offsets.dtype in WHOLE and self.block_offsets is None
        return self._times(self.offsets, self.scales if whole else self.block_offsets)

    def _times(self, numbers: torch.Tensor, units: torch.Tensor | None) -> torch.Tensor:
        if units is None:
            return numbers.float()
        return numbers.float() * units.float().repeat_interleave(numbers.shape[1] // max(units.shape[1], 1), dim=1)

    def restored(self) -> torch.Tensor:
        """The numbers, [out, in] fp32: a product rounded once, and once more where an offset is subtracted."""
        numbers, scales, offsets = self.numbers().float(), self.group_scales(), self.group_offsets()
        if scales is not None:
            groups = numbers.view(len(numbers), -1, self.scheme.group)
            groups = groups * scales.unsqueeze(-1)
            numbers = (groups if offsets is None else groups - offsets.unsqueeze(-1)).flatten(1)
        return numbers if self.factors is None else numbers * self.factors.unsqueeze(-1)

    def check_finite(self) -> None:
        """Raises CheckpointError where a scale, an offset or a factor is not finite: products would be lost."""
        for name, tensor in self._tensors().items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise CheckpointError(f"{self.scheme.name}: {name} are not all finite. Download the file again.")


def side_by_side(parts: Sequence[CodedWeight]) -> CodedWeight:
    """The weight of parts [out, some inputs] in one scheme, without factors; its inputs are theirs, in turn."""
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in parts[0]._tensors()
    }
    return replace(parts[0], **tensors)


class CodedTable:
    """A coded matrix whose rows are restored when they are read: see `layers.embedding.Table`."""

    def __init__(self, weight: CodedWeight) -> None:
        self._weight, self.shape = weight, torch.Size((weight.out_features, weight.in_features))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [n]. Returns fp32 [n, in]. Raises IndexError for an id outside the table."""
        return self._weight.outputs(ids).restored()


class CodedProduct:
    """The product in plain torch: the oracle of the faster ones' tests. A row's bits depend on nothing but the row.

    Args:
        parts: with the same inputs; their outputs come side by side. They may have different schemes.

    Raises:
        CheckpointError: parts with other inputs, or numbers that are not finite.
    """

    outputs_at_once = 1024
    """Outputs whose codes are unpacked at a time."""

    def __init__(self, parts: Sequence[CodedWeight], bias: torch.Tensor | None = None) -> None:
        self.in_features, self.out_features = check_parts(parts)
        at_once = self.outputs_at_once
        self._pieces = [
            part.outputs(range(first, min(first + at_once, part.out_features)))
            for part in parts
            for first in range(0, part.out_features, at_once)
        ]
        self._bias = None if bias is None else bias.detach().float()

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `Product`."""
        out = torch.cat([_times(x, piece) for piece in self._pieces], 1)
        if self._bias is not None:
            out = out + self._bias
        return out.to(out_dtype or x.dtype)


def check_parts(parts: Sequence[CodedWeight]) -> tuple[int, int]:
    """The inputs, and all outputs, of the parts of a product. Raises CheckpointError: see `CodedProduct`."""
    inputs = parts[0].in_features
    if {part.in_features for part in parts} != {inputs}:
        raise CheckpointError(f"the parts of a product differ in inputs: {[part.in_features for part in parts]}")
    for part in parts:
        part.check_finite()
    return inputs, sum(part.out_features for part in parts)


def _times(x: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
    """x [rows, in] times a weight: fp32 [rows, out]."""
    scheme, (codes, row_scales) = weight.scheme, _quantized(x, weight.scheme)
    numbers, segment, group = weight.numbers().float(), weight.scheme.segment, scheme.group or BLOCK
    scales, offsets = weight.group_scales(), weight.group_offsets()
    total, shared = codes.new_zeros(len(x), len(numbers)), scheme.shared
    alone = shared < BLOCK  # each segment has a scale of its own
    for start in range(0, weight.in_features, shared):
        row_scale = row_scales[:, start // shared, None]
        block = total if alone else torch.zeros_like(total)
        for first in range(start, min(start + shared, weight.in_features), segment):
            inputs = slice(first, min(first + segment, weight.in_features))
            dots = codes[:, inputs] @ numbers[:, inputs].T  # whole numbers below 2^24
            sums = codes[:, inputs].sum(1, keepdim=True)
            if alone:
                dots, sums = dots * row_scale, sums * row_scale
            block = dots if scales is None else fused_multiply_add(dots, scales[:, first // group], block)
            if offsets is not None:
                block = fused_multiply_add(sums, -offsets[:, first // group], block)
        total = block if alone else fused_multiply_add(block, row_scale, total)
    return total if weight.factors is None else total * weight.factors


def _quantized(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of activations in fp32 [rows, at least in], and a scale for each `Scheme.shared` of a row."""
    if scheme.activations != "row":
        codes, scales = quantize_activations(x, scheme.shared)
    else:
        codes, of_rows = quantize_rows(x)
        scales = of_rows.unsqueeze(1).expand(-1, -(-x.shape[1] // BLOCK))
    return codes.float(), scales
