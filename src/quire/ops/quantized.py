"""Weights in 8 or 4 bits: the two formats, how a weight is brought into one, and the product in plain torch.

Both formats are symmetric, and both lie in panels of 32 outputs with four inputs of an output side by side, as dot
products of bytes want them. Activations become int8 in the product itself (dynamic quantization, as in
https://arxiv.org/abs/2206.01861), with a scale for each `BLOCK` inputs of a row: an outlier, which real models have in
some channels (https://arxiv.org/abs/2208.07339), costs only its own block precision. Integers are multiplied and their
sums over a group (int8: a block) are exact; then they are scaled and added in ascending order, those of a block first.
So a row gives the same bits in any company. With P = ceil(out / 32):

- **int8**, a scale an output: w = code * scale, codes -127 to 127.
  packed: int8 [P, padded / 4, 32, 4], `padded` being `in` rounded up to a multiple of 64; the element [p, j, o, i]
  is code[32p + o, 4j + i]; padding is 0. scales: fp32 [P * 32].
- **int4**, a scale for each `group` of inputs of an output: w = (code - 8) * scale, codes 0 to 15.
  packed: uint8 [P, in / 8, 32, 4]; the byte [p, j, o, i] is code[32p + o, 8j + i] | code[32p + o, 8j + 4 + i] << 4.
  scales: fp16 [P, in / group, 32].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from quire.errors import CheckpointError, ConfigError

Scheme = Literal["int8", "int4"]
SCHEMES: tuple[Scheme, ...] = ("int8", "int4")
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP = 64

PANEL = 32
"""Outputs that lie together."""
DEPTH = 64
"""int8: the inputs are padded to a multiple of this."""
BLOCK = 256
"""Inputs of a row of activations that share a scale: the super-block of llama.cpp's k-quants. 255 * 127 * this is below
2^24, so sums of a block are exact even in fp32."""

TINY = 1e-36
"""Numbers below this count as zeros: the inverse of a scale must be finite in fp32."""

SMALLEST_SCALE = 2.0**-14
"""Of fp16, with all of its bits."""

CHUNK = 1 << 19
"""Numbers that are quantized at a time, so that they stay in the processor's caches."""

INT4_LEVELS = (-7.0, -7.7, -8.4, -9.2, -10.2)
"""Where the largest number of a group may come to lie, before it is cut to -8 to 7: the best is taken."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's weights are quantized.

    Attributes:
        scheme: of the linear layers; an int4 model's head is int8 all the same, since it errs where nothing after
            it could make up for it.
        group: int4: inputs that share a scale; None in int8.

    Raises:
        ConfigError: an unknown scheme or group size, or a group size in int8.
    """

    scheme: Scheme
    group: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError(f"quantization={self.scheme!r} is not supported; allowed: {', '.join(SCHEMES)}")
        if self.scheme == "int8" and self.group is not None:
            raise ConfigError(f"int8 has no groups, found a group size of {self.group}; leave it out, or choose int4")
        if self.scheme == "int4" and self.group not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"int4 in groups of {self.group} is not supported; allowed: {sizes}")

    @classmethod
    def of(cls, scheme: Scheme | None, group: int | None) -> Quantization | None:
        """What two options ask for: int4 has `DEFAULT_GROUP` unless said; None: no quantization."""
        if scheme is None:
            return None
        return cls(scheme, DEFAULT_GROUP if scheme == "int4" and group is None else group)

    def of_head(self) -> Quantization:
        """That of the model's head."""
        return Quantization("int8")

    def of_model(self) -> str:
        """The whole model, for people."""
        return str(self) if self.scheme == "int8" else f"{self}, the head {self.of_head()}"

    def __str__(self) -> str:
        return "int8" if self.group is None else f"int4 in groups of {self.group}"


class Layout(NamedTuple):
    """Data types and shapes of a quantized weight's two tensors."""

    packed_dtype: torch.dtype
    packed: tuple[int, ...]
    scales_dtype: torch.dtype
    scales: tuple[int, ...]


def layout(how: Quantization, out_features: int, in_features: int) -> Layout:
    """That of a weight [out, in].

    Raises:
        CheckpointError: this format cannot hold such a weight; the message says why.
    """
    if in_features <= 0:
        raise CheckpointError(f"it has {in_features} inputs; quantized weights have at least one")
    panels = -(-out_features // PANEL)
    if how.group is None:
        padded = -(-in_features // DEPTH) * DEPTH
        return Layout(torch.int8, (panels, padded // 4, PANEL, 4), torch.float32, (panels * PANEL,))
    if in_features % how.group:
        sizes = [str(size) for size in GROUP_SIZES if in_features % size == 0]
        remedy = f"group sizes that do are: {', '.join(sizes)}" if sizes else "no group size does, so choose int8"
        raise CheckpointError(f"groups of {how.group} do not divide its {in_features} inputs; {remedy}")
    scales = (panels, in_features // how.group, PANEL)
    return Layout(torch.uint8, (panels, in_features // 8, PANEL, 4), torch.float16, scales)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] in one of the formats above; its tensors may be views of a mapped file.

    Raises:
        CheckpointError: the tensors are not those that the format prescribes, so nothing may be computed with them.
    """

    how: Quantization
    packed: torch.Tensor
    scales: torch.Tensor
    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        wanted = layout(self.how, self.out_features, self.in_features)
        for name, tensor, dtype, shape in (
            ("packed", self.packed, wanted.packed_dtype, wanted.packed),
            ("scales", self.scales, wanted.scales_dtype, wanted.scales),
        ):
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape) or not tensor.is_contiguous():
                raise CheckpointError(
                    f"{name} of {self.how}, {self.out_features} x {self.in_features}, must be {dtype} "
                    f"{list(shape)}, found {tensor.dtype} {list(tensor.shape)}"
                )

    @property
    def scheme(self) -> Scheme:
        return self.how.scheme

    @property
    def group(self) -> int | None:
        """int4: inputs that share a scale; None in int8."""
        return self.how.group

    def outputs(self, wanted: Sequence[int]) -> QuantizedWeight:
        """Of these outputs alone: a copy, unless they are all."""
        if list(wanted) == list(range(self.out_features)):
            return self
        panels = -(-len(wanted) // PANEL)
        index = F.pad(torch.tensor(wanted), (0, panels * PANEL - len(wanted)))
        packed = self.packed[index // PANEL, :, index % PANEL].view(panels, PANEL, -1, 4)
        if self.group is None:
            scales = self.scales[index]
        else:
            scales = self.scales[index // PANEL, :, index % PANEL].view(panels, PANEL, -1).transpose(1, 2).contiguous()
        packed = packed.transpose(1, 2).contiguous()
        return QuantizedWeight(self.how, packed, scales, self.in_features, len(wanted))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


# -- quantizing ----------------------------------------------------------------------------------------------


def quantize(weight: torch.Tensor, how: Quantization) -> QuantizedWeight:
    """A weight [out, in] of any floating-point type in a format; a mapped one is read a part at a time.

    Raises:
        CheckpointError: the format cannot hold it: its shape, or numbers that are not finite, too large or too small.
    """
    wanted = layout(how, *weight.shape)
    packed = torch.empty(wanted.packed, dtype=wanted.packed_dtype)
    scales = torch.empty(wanted.scales, dtype=wanted.scales_dtype)
    at_once = max(1, CHUNK // (PANEL * weight.shape[1]))  # panels
    for first in range(0, len(packed), at_once):
        part = weight[first * PANEL : (first + at_once) * PANEL].float()
        last = first + -(-len(part) // PANEL)
        part = F.pad(part, (0, 0, 0, -len(part) % PANEL))  # [panels * 32, in], outputs that are padding are zeros
        if how.group is None:
            codes, scales[first * PANEL : last * PANEL] = _int8_codes(part)
            packed[first:last] = _pack_int8(codes)
        else:
            codes, found = _int4_codes(part, how.group)
            packed[first:last] = _pack_int4(codes)
            scales[first:last] = found.view(last - first, PANEL, -1).transpose(1, 2)
    return finished(weight, how, packed, scales)


def finished(weight: torch.Tensor, how: Quantization, packed: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """A weight that has been quantized, unless its scales do not hold it.

    A group of int4 may be so small beside the others that fp16 holds its scale with fewer bits: what it loses is small
    beside what the others lose. Where that is so of all groups, the weight would be lost.

    Raises:
        CheckpointError: a scale is not finite, as it is where a number is not, or all of them are too small.
    """
    if not scales.isfinite().all():
        raise CheckpointError(f"it has numbers that are not finite, or too large for {how}")
    if how.group is not None and scales.numel() and float(scales.abs().max()) < SMALLEST_SCALE and bool(weight.any()):
        largest = float(weight.abs().max())
        raise CheckpointError(
            f"its numbers are too small for {how}, whose scales are fp16: the largest is {largest:.1e}, and scales "
            f"below {SMALLEST_SCALE:.1e} lose bits; choose int8"
        )
    return QuantizedWeight(how, packed, scales, weight.shape[1], weight.shape[0])


def _int8_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [out, in] and scales fp32 [out]."""
    codes, scales = quantize_rows(weight)
    return codes, scales


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row [in] as int8 and a scale, x = code * scale; halves go to the even code.

    Returns:
        Codes int8 [rows, in], from -127 to 127, and scales fp32 [rows]: the row's largest number / 127. A row of
        zeros has the scale 0; one with a number that is not finite has zeros and the scale NaN, so that all that is
        made of it is NaN.
    """
    x = x.float()
    largest = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    largest = torch.where(largest < TINY, 0.0, largest)
    # True divisions: torch takes "127 / x" as 127 times the reciprocal, and so does a GPU with "x / 127".
    full = torch.full_like(largest, 127.0)
    inverse = torch.where(largest > 0, full / largest, 0.0)  # NaN is not above 0
    codes = (x * inverse[:, None]).nan_to_num_(0.0).round_().clamp_(-127, 127)  # infinity * 0 is NaN
    return codes.to(torch.int8), largest / full


def quantize_activations(x: torch.Tensor, each: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Each `each` inputs of each row as `quantize_rows` does a row.

    Returns:
        Codes int8 [rows, blocks * each], zeros after x's, and scales fp32 [rows, blocks].
    """
    rows, size = x.shape
    blocks = -(-size // each)
    codes, scales = quantize_rows(F.pad(x, (0, blocks * each - size)).view(rows * blocks, each))
    return codes.view(rows, blocks * each), scales.view(rows, blocks)


def _int4_codes(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [out, in], and scales fp16 [out, groups].

    The scale comes from the signed number that is the largest of its group by magnitude, laid onto one of
    `INT4_LEVELS`; for the codes that this gives, the scale of least squared error follows by projection, and the
    level with the least error wins. Then the codes are taken anew for this scale as it is stored, in fp16.
    """
    w = weight.view(len(weight), -1, group)  # [out, groups, group]
    high, low = w.amax(2), w.amin(2)
    inverse = torch.where(high > -low, high, low).reciprocal_()
    best_gain = torch.zeros_like(inverse)
    best_scale = torch.zeros_like(inverse)
    codes, product = torch.empty_like(w), torch.empty_like(w)
    for level in INT4_LEVELS:
        torch.mul(w, (level * inverse)[:, :, None], out=codes).round_().clamp_(-8, 7)
        dot = _sum_of_lanes(torch.mul(w, codes, out=product))
        square = torch.mul(codes, codes, out=product).sum(2)
        scale = dot / square
        gain = dot * scale  # the squared error is the sum of w^2 less this
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    finite = (high.isfinite() & low.isfinite()).all()
    scales = best_scale.half() if finite else torch.full_like(best_scale, torch.nan, dtype=torch.float16)
    stored = scales.float()
    inverse = torch.where(stored == 0, 0.0, 1 / stored)
    torch.mul(w, inverse[:, :, None], out=codes).round_().clamp_(-8, 7).add_(8)
    return codes.view_as(weight).to(torch.uint8), scales


def _sum_of_lanes(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis in a fixed order, so that every machine finds the same: 16 lanes, then a tree."""
    lanes = x.view(*x.shape[:-1], -1, 16)
    total = lanes[..., 0, :]
    for index in range(1, lanes.shape[-2]):
        total = total + lanes[..., index, :]
    for width in (8, 4, 2, 1):
        total = total[..., :width] + total[..., width:]
    return total[..., 0]


def _pack_int8(codes: torch.Tensor) -> torch.Tensor:
    """int8 [panels * 32, in] as [panels, padded / 4, 32, 4]."""
    codes = F.pad(codes, (0, -codes.shape[1] % DEPTH))
    return _in_panels(codes).view(torch.int8).view(-1, codes.shape[1] // 4, PANEL, 4)


def _pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [panels * 32, in], each from 0 to 15, as [panels, in / 8, 32, 4]."""
    eights = codes.view(len(codes), -1, 2, 4)
    both = eights[:, :, 0] | eights[:, :, 1] << 4  # [outputs, in / 8, 4]
    return _in_panels(both.flatten(1)).view(torch.uint8).view(-1, both.shape[1], PANEL, 4)


def _in_panels(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [panels * 32, n] as int32 [panels, n / 4, 32]: four bytes of an output stay side by side."""
    return codes.contiguous().view(torch.int32).view(-1, PANEL, codes.shape[1] // 4).transpose(1, 2).contiguous()


# -- the way back --------------------------------------------------------------------------------------------


def codes_of(weight: QuantizedWeight, panels: slice = slice(None)) -> torch.Tensor:
    """The codes of some panels, int8 [outputs, in]: -127 to 127, or -8 to 7. Outputs that are padding are there."""
    packed = weight.packed[panels]
    four = packed.flatten(2).view(torch.int32).transpose(1, 2).contiguous()  # [panels, 32, columns / 4]
    codes = four.flatten(0, 1).view(packed.dtype)  # [outputs, columns]
    if weight.group is None:
        return codes[:, : weight.in_features]
    fours = codes.view(len(codes), -1, 1, 4)
    return torch.cat([fours & 15, fours >> 4], 2).flatten(1).view(torch.int8) - 8


# -- the product ---------------------------------------------------------------------------------------------


class QuantizedProduct:
    """The product with a quantized weight in plain torch: the oracle of the faster ones' tests.

    A row's bits depend on nothing but the row: its integers are summed exactly, and the rest is done number by
    number, in the order of the groups.
    """

    panels_at_once = 32
    """Panels of codes that are unpacked at a time: the weight is never held in more than its 8 or 4 bits."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._weight = weight
        self._bias = None if bias is None else bias.detach().float()

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        codes, scales = quantize_activations(x)
        parts = []
        for first in range(0, len(self._weight.packed), self.panels_at_once):
            parts.append(self._panels(codes.float(), scales, slice(first, first + self.panels_at_once)))
        out = torch.cat(parts, 1)[:, : self.out_features]
        if self._bias is not None:
            out = out + self._bias
        return out.to(out_dtype or x.dtype)

    def _panels(self, x: torch.Tensor, row_scales: torch.Tensor, panels: slice) -> torch.Tensor:
        """The sum over the blocks of what is in each times the rows' scales: of int4 the groups' integers times the
        outputs' scales, of int8 integers, whose outputs' scales come at the end."""
        weight = codes_of(self._weight, panels).float()  # [outputs, in]
        group = self._weight.group or BLOCK
        total = x.new_zeros(len(x), len(weight))
        for start in range(0, self.in_features, BLOCK):
            block = torch.zeros_like(total)
            for first in range(start, min(start + BLOCK, self.in_features), group):
                inputs = slice(first, min(first + group, self.in_features))
                dots = x[:, inputs] @ weight[:, inputs].T
                if self._weight.group is None:
                    block = dots
                else:
                    block = fused_multiply_add(
                        dots, self._weight.scales[panels, first // group].flatten().float(), block
                    )
            total = fused_multiply_add(block, row_scales[:, start // BLOCK, None], total)
        if self._weight.group is None:
            total *= self._weight.scales.view(-1, PANEL)[panels].flatten()
        return total


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once, to fp32."""
    return (a.double() * b.double() + c).float()
