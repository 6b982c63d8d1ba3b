"""Norm, gate and rotation in plain torch: the definition that faster kernels round alike.

Only operations whose result for an element does not depend on where the element lies are used: additions,
products, divisions and roundings are exact to IEEE everywhere, and torch's `exp` gives the same bits at every
place of a contiguous tensor. `silu` and `sigmoid` do not: the last elements of a call take a scalar path.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""What the gate of an MLP goes through: x * sigmoid(f(x)), SiLU with f(x) = x. Or, without a gate, `relu2`: what is
above 0 is squared, and the rest is 0 (https://arxiv.org/abs/2109.08668)."""

WITHOUT_GATE: frozenset[Activation] = frozenset({"relu2"})

GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR
"""GELU's f(x) = GELU_LINEAR * x + GELU_CUBIC * x ** 3, in the approximation by a tanh (https://arxiv.org/abs/1606.08415):
(1 + tanh(y)) / 2 is the sigmoid of 2 * y."""

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""gpt-oss's: the gate is at most the limit, f(x) = alpha * x, and it multiplies 1 + what is above it, that within both
limits (https://arxiv.org/abs/2508.10925)."""

PART = 1 << 17
"""About how many numbers are worked on at a time: intermediate results stay in the processor's cache."""

LARGE_PART = 1 << 24
"""The same on a GPU, where each part costs launches: it only bounds memory."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, in x's data type.

    Statistics are in fp32, and the quotient is rounded to the weight's type before that is applied, as Hugging Face
    does; a weight in fp32, as Gemma's norms have, is applied to what is not rounded.
    """
    if x.numel() <= 2 * PART:
        return _normalized(x, eps, weight.dtype).mul_(weight).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows in _parts(x):
        torch.mul(_normalized(x[rows], eps, weight.dtype), weight, out=out[rows])
    return out


def grouped_norm(x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """An RMS norm of each of so many equal parts of a row, in `dtype`, rounded once.

    x: [tokens, width] fp32; weight: [width] fp32.
    """
    parts = x.view(len(x), groups, -1)
    scale = parts.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (parts * scale * weight.view(groups, -1)).flatten(1).to(dtype)


def _normalized(x: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(dtype)


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(gate)` in x's data type, rounded once; a gate may be one number a row."""
    return (x.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation(gate) * up` for x [rows, 2 * n] = gate | up; without a gate, `activation(x)` for x [rows, n].

    Returns [rows, n] in x's data type, to which the activated gate is rounded before the product, as Hugging Face does.
    """
    if activation == "relu2":
        return x.relu().square_()
    gate, up = x.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        return _clamped_swiglu(gate, up)
    activated = {"silu": _silu, "gelu_tanh": _gelu_tanh}[activation]
    if x.numel() <= 2 * PART:
        return activated(gate).mul_(up)
    out = torch.empty(up.shape, dtype=x.dtype, device=x.device)
    for rows in _parts(gate):
        torch.mul(activated(gate[rows]), up[rows], out=out[rows])
    return out


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    clamped = gate.float().clamp(max=SWIGLU_LIMIT)
    active = (clamped / (clamped * -SWIGLU_ALPHA).exp_().add_(1.0)).to(gate.dtype)
    return (active.float() * up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1.0)).to(gate.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    slope = (wide * wide).mul_(GELU_CUBIC).add_(GELU_LINEAR).mul_(wide)
    return (wide / slope.neg_().exp_().add_(1.0)).to(x.dtype)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(logits / cap)` in place, for fp32; tanh(y) is 1 - 2 / (exp(2 * y) + 1)."""
    powers = logits.mul_(2 / cap).exp_().add_(1.0)
    return powers.reciprocal_().mul_(-2 * cap).add_(cap)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, in the convention of Hugging Face's `rotate_half`.

    Args:
        x: [tokens, heads, head_dim], any strides. Dimension i turns with dimension i + head_dim / 2.
        cos, sin: [tokens, head_dim / 2] fp32.

    Returns [tokens, heads, head_dim], contiguous, in x's data type; computed in fp32 and rounded once.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    size = PART if x.device.type == "cpu" else LARGE_PART
    if x.numel() <= 2 * size:
        return torch.cat(_rotated(x, cos, sin), dim=-1).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows in _parts(x, size):
        first, second = out[rows].chunk(2, dim=-1)
        turned = _rotated(x[rows], cos[rows], sin[rows])
        first.copy_(turned[0])
        second.copy_(turned[1])
    return out


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x.float().chunk(2, dim=-1)
    return (first * cos).sub_(second * sin), (second * cos).add_(first * sin)


def _parts(x: torch.Tensor, size: int = PART) -> list[slice]:
    """Slices of x's rows, about `size` numbers each."""
    rows = max(1, size // x[0].numel())
    return [slice(start, start + rows) for start in range(0, len(x), rows)]
