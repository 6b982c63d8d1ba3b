"""Row-wise and elementwise kernels: norm, gate, rotation.

Only operations whose result for an element does not depend on where the element lies are used: additions,
products, divisions and roundings are exact to IEEE everywhere, and torch's `exp` gives the same bits at every
place of a contiguous tensor. `silu` and `sigmoid` do not: the last elements of a call take a scalar path.
"""

from __future__ import annotations

import torch

PART = 1 << 17
"""About how many numbers are worked on at a time: intermediate results stay in the processor's cache."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, in x's data type.

    Statistics are in fp32, and the quotient is rounded before the weight is applied, as Hugging Face does.
    """
    if x.numel() <= 2 * PART:
        return _rms_norm(x, weight, eps)
    return torch.cat([_rms_norm(part, weight, eps) for part in _parts(x)])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul(weight)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for x [rows, 2 * n] = gate | up. Returns [rows, n] in x's data type.

    `silu` is rounded to x's data type before the product, as Hugging Face does.
    """
    if x.numel() <= 4 * PART:
        return _silu_mul(x)
    return torch.cat([_silu_mul(part) for part in _parts(x)])


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    divisor = wide.neg().exp_().add_(1.0)
    return (wide / divisor).to(x.dtype).mul_(up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, in the convention of Hugging Face's `rotate_half`.

    Args:
        x: [tokens, heads, head_dim], any strides. Dimension i turns with dimension i + head_dim / 2.
        cos, sin: [tokens, head_dim / 2] fp32.

    Returns [tokens, heads, head_dim], contiguous, in x's data type; computed in fp32 and rounded once.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if x.numel() <= 2 * PART:
        return _rotate(x, cos, sin)
    rows = len(_parts(x)[0])
    parts = zip(_parts(x), torch.split(cos, rows), torch.split(sin, rows), strict=True)
    return torch.cat([_rotate(*part) for part in parts])


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x [rows, ...] cut into parts of about `PART` numbers."""
    return torch.split(x, max(1, PART // x[0].numel()))
