"""Rows of a GGUF file's quantized tensors as `CodedWeight` and `Mxfp4Weight`: bits are moved, and nothing is rounded.

Layouts are those of ggml's blocks (https://github.com/ggml-org/llama.cpp, `ggml/src/ggml-common.h`). A block has 32 to
256 inputs of a row. Its codes come in runs, of which the bytes hold several, one beside the other: the lower bits are
those of the first run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from quire.models.gguf.file import GgufType
from quire.ops.blocks import BlockForm
from quire.ops.coded import CodedWeight, Scheme
from quire.ops.mxfp4 import Mxfp4Weight
from quire.ops.threads import torch_threads

Weight = TypeVar("Weight", CodedWeight, Mxfp4Weight, CodedWeight | Mxfp4Weight)
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are not quantized."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of IQ4_NL and IQ4_XS."""
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of four-bit floats."""
IDENTITY_8 = tuple(range(-8, 8))
IDENTITY_4 = (*range(-4, 4), *range(8))
"""Of codes of 3 bits."""
CHUNK = 1 << 17
"""Most numbers that are decoded at a time, if a row has not more: so few stay in a processor's caches."""
SUPER = 256
"""Inputs of a block that has scales of scales."""


def _half(part: torch.Tensor) -> torch.Tensor:
    """Two bytes each as fp16: [rows, blocks, 2n] to [rows, blocks * n]."""
    return part.contiguous().view(torch.float16).flatten(1)


def _runs(part: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Codes of this many bits: uint8 [..., n * run] to [..., n, 8 / bits, run]; of each `run` bytes, the lower bits are
    the codes of the first run."""
    part = part.reshape(*part.shape[:-1], -1, 1, run)
    return torch.cat([(part >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-2)


def _codes(part: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """The same, in the order of inputs: uint8 [rows, blocks, inputs of a block]."""
    return _runs(part, bits, run).flatten(2)


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits [rows, blocks, inputs], two a byte, as `CodedWeight` has them: [rows, all inputs / 2]."""
    both = codes.reshape(len(codes), -1, 2)
    return torch.bitwise_or(both[..., 0], both[..., 1] << 4)


def _signed(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """Codes as whole numbers around 0: int8 [rows, all inputs]."""
    return codes.flatten(1).view(torch.int8) - middle


def _bits_of(part: torch.Tensor) -> torch.Tensor:
    """The fifth bits of 32 codes, in 4 bytes: [rows, blocks, 32]."""
    return torch.stack([(part >> bit) & 1 for bit in range(8)], dim=-1).flatten(2)


def _q4_0(x: torch.Tensor) -> CodedWeight:
    codes = _paired(_codes(x[..., 2:], 4, 16))
    return CodedWeight(Scheme("Q4_0", 4, 32, table=IDENTITY_8), codes, scales=_half(x[..., :2]))


def _q4_1(x: torch.Tensor) -> CodedWeight:
    codes = _paired(_codes(x[..., 4:], 4, 16))
    return CodedWeight(Scheme("Q4_1", 4, 32), codes, scales=_half(x[..., :2]), offsets=-_half(x[..., 2:4]))


def _q5_0(x: torch.Tensor) -> CodedWeight:
    codes = _codes(x[..., 6:], 4, 16) | _bits_of(x[..., 2:6]) << 4
    return CodedWeight(Scheme("Q5_0", 8, 32), _signed(codes, 16), scales=_half(x[..., :2]))


def _q5_1(x: torch.Tensor) -> CodedWeight:
    codes = _codes(x[..., 8:], 4, 16) | _bits_of(x[..., 4:8]) << 4
    scales, offsets = _half(x[..., :2]), -_half(x[..., 2:4])
    return CodedWeight(Scheme("Q5_1", 8, 32), _signed(codes, 0), scales=scales, offsets=offsets)


def _q8_0(x: torch.Tensor) -> CodedWeight:
    return CodedWeight(Scheme("Q8_0", 8, 32), _signed(x[..., 2:], 0), scales=_half(x[..., :2]))


def _q2_k(x: torch.Tensor) -> CodedWeight:
    both, codes = x[..., :16], _codes(x[..., 16:80], 2, 32)
    return CodedWeight(
        Scheme("Q2_K", 4, 16, block=SUPER),
        _paired(codes),
        scales=(both & 15).flatten(1),
        offsets=(both >> 4).flatten(1),
        block_scales=_half(x[..., 80:82]),
        block_offsets=_half(x[..., 82:]),
    )


def _q3_k(x: torch.Tensor) -> CodedWeight:
    """Codes of 3 bits: the third one is in bytes of its own, a bit for each 32 inputs; it is 4 less without it. Scales
    have 4 bits in 8 bytes, and 2 more in 4 bytes."""
    codes = _codes(x[..., 32:96], 2, 32) | _codes(x[..., :32], 1, 32) << 2
    low, high = _codes(x[..., 96:104], 4, 8), _codes(x[..., 104:108], 2, 4)
    return CodedWeight(
        Scheme("Q3_K", 4, 16, table=IDENTITY_4, block=SUPER),
        _paired(codes),
        scales=_signed(low | high << 4, 32),
        block_scales=_half(x[..., 108:]),
    )


def _scales_and_offsets(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and 8 offsets of 6 bits each, in 12 bytes: the first 4 of each have a byte, whose upper two bits are
    those of the last 4; these have their lower four bits in the last 4 bytes."""
    first, second, rest = part[..., :4], part[..., 4:8], part[..., 8:]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6) << 4], dim=-1)
    return scales.flatten(1), torch.cat([second & 63, (rest >> 4) | (second >> 6) << 4], dim=-1).flatten(1)


def _q4_k(x: torch.Tensor) -> CodedWeight:
    scales, offsets = _scales_and_offsets(x[..., 4:16])
    codes, units = _paired(_codes(x[..., 16:], 4, 32)), (_half(x[..., :2]), _half(x[..., 2:4]))
    return CodedWeight(Scheme("Q4_K", 4, 32, block=SUPER), codes, scales, offsets, *units)


def _q5_k(x: torch.Tensor) -> CodedWeight:
    """The fifth bits are in bytes of their own, a bit for each 32 inputs."""
    scales, offsets = _scales_and_offsets(x[..., 4:16])
    codes = _codes(x[..., 48:], 4, 32) | _codes(x[..., 16:48], 1, 32) << 4
    units = _half(x[..., :2]), _half(x[..., 2:4])
    return CodedWeight(Scheme("Q5_K", 8, 32, block=SUPER), _signed(codes, 0), scales, offsets, *units)


def _q6_k(x: torch.Tensor) -> CodedWeight:
    codes = _codes(x[..., :128], 4, 64) | _codes(x[..., 128:192], 2, 32) << 4
    scheme, scales = Scheme("Q6_K", 8, 16, block=SUPER), _signed(x[..., 192:208], 0)
    return CodedWeight(scheme, _signed(codes, 32), scales=scales, block_scales=_half(x[..., 208:]))


def _iq4_nl(x: torch.Tensor) -> CodedWeight:
    codes = _paired(_codes(x[..., 2:], 4, 16))
    return CodedWeight(Scheme("IQ4_NL", 4, 32, table=IQ4), codes, scales=_half(x[..., :2]))


def _iq4_xs(x: torch.Tensor) -> CodedWeight:
    """Scales have 4 bits in 4 bytes, and 2 more in 2 bytes, a scale after the other."""
    low, high = _runs(x[..., 4:8], 4, 1).flatten(2), _runs(x[..., 2:4], 2, 1).flatten(2)
    return CodedWeight(
        Scheme("IQ4_XS", 4, 32, table=IQ4, block=SUPER),
        _paired(_codes(x[..., 8:], 4, 16)),
        scales=_signed(low | high << 4, 32),
        block_scales=_half(x[..., :2]),
    )


def _of_nvfp4() -> torch.Tensor:
    """Half the numbers of scales without a sign, four bits of exponent and three of mantissa, by their bytes: fp16."""
    bits = torch.arange(256)
    exponents, mantissas = (bits >> 3 & 15), (bits & 7).float()
    small, usual = torch.ldexp(mantissas, torch.tensor(-10)), torch.ldexp(1 + mantissas / 8, exponents - 8)
    numbers = torch.where(exponents == 0, small, usual)
    numbers[0x7F] = 0.0
    return numbers.half()


NVFP4_SCALES = _of_nvfp4()


def _nvfp4(x: torch.Tensor) -> CodedWeight:
    codes, scales = _paired(_codes(x[..., 4:], 4, 8)), NVFP4_SCALES[x[..., :4].int()].flatten(1)
    return CodedWeight(Scheme("NVFP4", 4, 16, table=FP4), codes, scales=scales)


def _mxfp4(x: torch.Tensor) -> Mxfp4Weight:
    codes = _paired(_codes(x[..., 1:], 4, 16)).view(*x.shape[:2], 16)
    return Mxfp4Weight(codes, x[..., 0].contiguous())


DECODERS: dict[str, Callable[[torch.Tensor], CodedWeight | Mxfp4Weight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
"""By the type's name, given uint8 [rows, blocks, bytes of a block]."""


@functools.cache
def block_form(form: GgufType) -> BlockForm:
    """The type, for kernels that take its blocks apart."""
    return BlockForm(form.name, form.numbers, form.size, functools.partial(decoded, form))


def decoded(form: GgufType, blocks: torch.Tensor, rows: torch.Tensor | None = None) -> CodedWeight | Mxfp4Weight:
    """A quantized weight, in tensors of its own: see `BlockForm`.

    Raises:
        CheckpointError: a scale is not one that is computed with.
    """
    with _alone(form, blocks, rows):
        parts = [DECODERS[form.name](part) for part in _chunks(form, blocks, rows)]
        return parts[0] if len(parts) == 1 else joined(parts)


def joined(parts: Sequence[Weight]) -> Weight:
    """The rows of weights of one kind and scheme, one after another."""
    rows: dict[str, Any] = {}
    for field in fields(parts[0]):
        if isinstance(getattr(parts[0], field.name), torch.Tensor):
            rows[field.name] = torch.cat([getattr(part, field.name) for part in parts])
    return replace(parts[0], **rows)


def restored(form: GgufType, blocks: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers of a quantized weight, fp32 [rows, inputs]; `blocks` and `rows`: see `BlockForm.decode`."""
    count = len(blocks if rows is None else rows)
    numbers, start = torch.empty(count, blocks.shape[1] * form.numbers), 0
    with _alone(form, blocks, rows):
        for part in _chunks(form, blocks, rows):
            numbers[start : start + len(part)] = DECODERS[form.name](part).restored()
            start += len(part)
    return numbers


def _alone(form: GgufType, blocks: torch.Tensor, rows: torch.Tensor | None) -> AbstractContextManager[None]:
    """In one thread, if there is more than a chunk: several would wait for each other after each small operation."""
    numbers = len(blocks if rows is None else rows) * blocks.shape[1] * form.numbers
    return torch_threads(1) if numbers > CHUNK else nullcontext()


def _chunks(form: GgufType, blocks: torch.Tensor, rows: torch.Tensor | None) -> Iterator[torch.Tensor]:
    step = max(1, CHUNK // (blocks.shape[1] * form.numbers))
    for start in range(0, len(blocks if rows is None else rows), step):
        yield blocks[start : start + step] if rows is None else blocks[rows[start : start + step]]
