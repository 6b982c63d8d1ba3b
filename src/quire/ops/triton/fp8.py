"""Numbers in 8-bit floating point (E4M3): how a kernel reads them, and widens them exactly."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from quire.ops.kv_cache import KVCache
from quire.ops.triton.linear_chunks import finish

FIRST_WITH_FP8 = 89
"""Compute capability of which instructions convert E4M3 two at a time."""
COMPILED = isinstance(finish, triton.JITFunction)
"""Whether kernels are compiled, not interpreted."""


def stored_numbers(kv: KVCache) -> torch.Tensor:
    """A cache's numbers as kernels take them: see `as_read`."""
    return as_read(kv.numbers) if kv.stored_dtype == torch.float8_e4m3fn else kv.numbers


def as_read(codes: torch.Tensor) -> torch.Tensor:
    """Codes of one byte each as kernels take them: E4M3 where the device converts that; bytes, which `widen` does."""
    return codes.view(torch.float8_e4m3fn if COMPILED and _has_fp8(_current_device()) else torch.uint8)


def _current_device() -> int:
    return int(triton.runtime.driver.active.get_current_device())


@functools.cache
def _has_fp8(device: int) -> bool:
    return int(triton.runtime.driver.active.get_current_target().arch) >= FIRST_WITH_FP8


@triton.jit
def widen(codes, dtype: tl.constexpr):
    """Stored numbers as `dtype`, exactly. Bytes are E4M3 codes, since not every GPU has that type.

    A GPU that has it makes two of them fp16 at once, and those go on through fp32: the way from fp16 to bf16 is slow.
    Of bytes, sign, exponent and mantissa, put where a wider type has its own, mean a number too small by a power of
    two: that of the difference between the exponents' biases. Extending the sign and shifting puts it all in place,
    but for copies of the sign above the exponent, which the mask takes out.
    """
    if codes.dtype == tl.float8e4nv:
        wide = codes.to(tl.float16)
        if dtype != tl.float16:
            wide = wide.to(tl.float32).to(dtype)
    elif codes.dtype != tl.uint8:
        wide = codes.to(dtype)
    elif dtype == tl.float16:
        bits = codes.to(tl.int8, bitcast=True).to(tl.int16) << 7 & (0xBF80 - 0x10000)
        wide = bits.to(tl.float16, bitcast=True) * tl.full((), 2.0**8, tl.float16)
    elif dtype == tl.bfloat16:
        bits = codes.to(tl.int8, bitcast=True).to(tl.int16) << 4 & (0x87F0 - 0x10000)
        wide = bits.to(tl.bfloat16, bitcast=True) * tl.full((), 2.0**120, tl.bfloat16)
    else:
        bits = codes.to(tl.int8, bitcast=True).to(tl.int32) << 20 & (0x87F00000 - 0x100000000)
        wide = bits.to(tl.float32, bitcast=True) * 2.0**120
    return wide


@triton.jit
def restored(codes, scales, dtype: tl.constexpr):
    """Codes of weights times their scales, fp32, rounded once to `dtype`."""
    return (widen(codes, tl.float32) * scales).to(dtype)
