"""Kernels that work row by row: norms, gate, embedding, and whether rows are finite.

A row's bits depend on nothing but the row: what is summed over a row is summed by one program, in a layout that its
size decides (for tensors that begin at a multiple of 16 bytes, as torch allocates them). Divisions, roots and roundings
are IEEE's, so all but `exp` and the order of that sum is as in `quire.ops.elementwise`. No launch depends on a number
of a step but its rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.elementwise import GELU_CUBIC, GELU_LINEAR, SWIGLU_ALPHA, SWIGLU_LIMIT, WITHOUT_GATE, Activation

LINEAR, CUBIC = tl.constexpr(GELU_LINEAR), tl.constexpr(GELU_CUBIC)
LIMIT, ALPHA = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_ALPHA)

PART = 1024
"""Numbers of a row that a program works on where nothing is summed: with 4 warps, 16 bytes of bf16 a thread."""


def row_tile(size: int) -> tuple[int, int]:
    """(numbers, warps) of a program that holds a whole row of `size` numbers.

    A thread holds 8 of them, a load of 16 bytes in bf16; more where the row is over 4,096, since more than 16 warps
    wait longer for one another than they gain.
    """
    block = 1 << (size - 1).bit_length()
    return block, min(max(block // 256, 1), 16)


def embed(ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `Kernels.embed`; each row of the table is contiguous.

    An id outside the table gets a row of NaN, which `finite_rows` finds: an error on the device would end the engine.
    """
    vocabulary, size = weight.shape
    out = torch.empty(len(ids), size, dtype=dtype, device=weight.device)
    grid, table = (len(ids), -(-size // PART)), (weight, vocabulary, weight.stride(0))
    _embed[grid](ids, *table, out, SIZE=size, PART=PART, num_warps=4, enable_fp_fusion=False)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Kernels.rms_norm`."""
    return grouped_norm(x, weight, 1, eps, x.dtype)


def grouped_norm(x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """See `Kernels.grouped_norm`."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    size = x.shape[1] // groups
    block, warps = row_tile(size)
    _rms_norm[(len(x), groups)](x, weight, out, eps, SIZE=size, BLOCK=block, num_warps=warps, enable_fp_fusion=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.add_rms_norm`. The results take the places of `x` and `residual`."""
    x, residual = x.contiguous(), residual.contiguous()
    rows, size = x.shape
    block, warps = row_tile(size)
    _add_rms_norm[(rows,)](x, residual, weight, eps, SIZE=size, BLOCK=block, num_warps=warps, enable_fp_fusion=False)
    return x, residual


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See `Kernels.activate`."""
    x = x.contiguous()
    rows, size = len(x), x.shape[1] if activation in WITHOUT_GATE else x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    grid, sizes = (rows, -(-size // PART)), {"SIZE": size, "UP": x.shape[1] - size, "PART": PART}
    _gate_mul[grid](*(x, out), ACTIVATION=activation, **sizes, num_warps=4, enable_fp_fusion=False)
    return out


def finite_rows(x: torch.Tensor) -> torch.Tensor:
    """See `Kernels.finite_rows`."""
    x = x.contiguous()
    rows, size = x.shape
    out = torch.empty(rows, dtype=torch.bool, device=x.device)
    block, warps = row_tile(size)
    _finite_rows[(rows,)](x, out, SIZE=size, BLOCK=block, num_warps=warps, enable_fp_fusion=False)
    return out


@triton.jit
def inverse_rms(sum_of_squares, SIZE: tl.constexpr, eps):
    """What a row of SIZE numbers is multiplied with; fp32."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of_squares, SIZE * 1.0) + eps))


@triton.jit
def normalized(x, scale, weight):
    """x * scale * weight in fp32; the first product is rounded to the weight's type, the second is not yet."""
    return (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _embed(ids, weight, vocabulary, stride, out, SIZE: tl.constexpr, PART: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART + tl.arange(0, PART)
    number = tl.load(ids + row)
    there = tl.where((number >= 0) & (number < vocabulary), SIZE, 0)  # numbers of the row that the table has
    values = tl.load(weight + number * stride + column, mask=column < there, other=float("nan"))
    tl.store(out + row * SIZE + column, values, mask=column < SIZE)


@triton.jit
def _rms_norm(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    group, column = tl.program_id(1), tl.arange(0, BLOCK)
    start = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + group) * SIZE
    inside = column < SIZE
    values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    scale = inverse_rms(tl.sum(values * values, 0), SIZE, eps)
    weights = tl.load(weight + group * SIZE + column, mask=inside, other=0.0)
    tl.store(out + start + column, normalized(values, scale, weights), mask=inside)


@triton.jit
def _add_rms_norm(x, residual, weight, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    start, column = tl.program_id(0).to(tl.int64) * SIZE, tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    total = total.to(dtype)
    tl.store(residual + start + column, total, mask=inside)
    values = total.to(tl.float32)
    scale = inverse_rms(tl.sum(values * values, 0), SIZE, eps)
    weights = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(x + start + column, normalized(values, scale, weights), mask=inside)


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """(activation(gate), rounded to `dtype`; what it is multiplied with), all fp32: see `elementwise.activate`."""
    slope = gate
    if ACTIVATION == "gelu_tanh":
        slope = (gate * gate * CUBIC + LINEAR) * gate
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # what is not a number stays so
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        slope = gate * ALPHA
    active = tl.div_rn(gate, 1.0 + tl.exp(-slope)).to(dtype).to(tl.float32)
    if ACTIVATION == "relu2":  # of what is alone
        active = tl.where(gate < 0.0, 0.0, gate)
        up = active
    return active, up


@triton.jit
def _gate_mul(x, out, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, UP: tl.constexpr, PART: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < SIZE
    x += row * (SIZE + UP) + column
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + UP, mask=inside, other=0.0).to(tl.float32)
    active, up = activated(gate, up, x.dtype.element_ty, ACTIVATION)
    tl.store(out + row * SIZE + column, active * up, mask=inside)


@triton.jit
def _finite_rows(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    finite = tl.abs(values) < float("inf")  # false for what is not a number
    tl.store(out + row, tl.min(finite.to(tl.int32), 0) == 1)
