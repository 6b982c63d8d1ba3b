"""GPTQ's rounding (https://arxiv.org/abs/2210.17323): codes column by column, each error made up for by those after it.

What counts is the error of a layer's outputs on the calibration's activations. Once a column has its codes, the error
that it makes is the least if the columns that have none yet move by what the inverse of the activations' second moments
says. A block's scales are found, as without it, for the numbers that its columns have by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from quire.errors import CheckpointError
from quire.ops.coded import CodedWeight, side_by_side

DAMPING = 0.01
"""Of the mean square of inputs, that is added to each: moments of few tokens are not certain."""

LIMITS = {
    "Q4_K": (0, 15),
    "Q6_K": (-32, 31),
    "Q5_0": (-16, 15),
    "Q8_0": (-127, 127),
    "int4": (0, 15),
    "int6": (-32, 31),
    "int8": (-127, 127),
}
"""The least and the greatest code of schemes, by their names."""


def rounded(
    weight: torch.Tensor,
    products: torch.Tensor,
    importance: torch.Tensor,
    block: int,
    quantize: Callable[[torch.Tensor, torch.Tensor], CodedWeight],
) -> CodedWeight:
    """A weight [out, in] with codes of which the outputs' error is least.

    Args:
        products: the sums of products of each two inputs, fp32 [in, in].
        importance: see `Met`, fp32 [in].
        block: inputs of a block, which share no scale with others.
        quantize: given fp32 [out, block] and the importance of these inputs, finds the block's scales and codes;
            numbers that it gives back are on the grid of these.
    """
    w, inverse = weight.float().clone(), _inverse(products)
    parts = []
    for start in range(0, w.shape[1], block):
        own = slice(start, start + block)
        x = w[:, own]
        coded = quantize(x.contiguous(), importance[own])
        wanted, errors = _columns(x, inverse[own, own], coded)
        parts.append(wanted)
        w[:, start + block :] -= errors @ inverse[own, start + block :]
    return side_by_side(parts)


def _inverse(products: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped moments. Raises CheckpointError: they are not finite."""
    if not products.isfinite().all():
        raise CheckpointError("activations over the calibration's text are not finite; calibrate on another text")
    moments = products.double()
    diagonal = moments.diagonal()
    diagonal += DAMPING * diagonal.mean().clamp_min(1e-30)
    lower = torch.linalg.cholesky(moments)
    factor: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor.float()


def _columns(x: torch.Tensor, inverse: torch.Tensor, coded: CodedWeight) -> tuple[CodedWeight, torch.Tensor]:
    """Codes of a block's columns, one after the other, and their errors [out, block], in units of the inverse's
    diagonal. `x` [out, block] is changed."""
    group, scheme = coded.scheme.group, coded.scheme
    scales, offsets = coded.group_scales(), coded.group_offsets()
    numbers = coded.numbers()
    low, high = LIMITS[scheme.name]
    codes, errors = torch.empty_like(numbers), torch.empty_like(x)
    for column in range(x.shape[1]):
        scale = torch.ones_like(x[:, 0]) if scales is None else scales[:, column // group]
        offset = 0.0 if offsets is None else offsets[:, column // group]
        code = ((x[:, column] + offset) / scale).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(low, high)
        codes[:, column] = code
        errors[:, column] = (x[:, column] - (scale * code - offset)) / inverse[column, column]
        x[:, column + 1 :] -= errors[:, column, None] * inverse[column, column + 1 :]
    packed = codes.to(torch.int8)
    if scheme.bits == 4:
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return replace(coded, codes=packed), errors
