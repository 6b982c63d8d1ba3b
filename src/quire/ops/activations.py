"""Activations in int8, as products with coded weights (`ops.coded`) multiply them.

They are quantized in the product itself (dynamic quantization, as in https://arxiv.org/abs/2206.01861), with a scale
for so many inputs of a row: an outlier, which real models have in some channels (https://arxiv.org/abs/2208.07339),
costs only its own block precision. So a row gives the same bits in any company.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 256
"""Most inputs of a row of activations that share a scale: the super-block of llama.cpp's k-quants. 255 * 127 * this is
below 2^24, so sums of a block are exact even in fp32."""

TINY = 1e-36
"""Numbers below this count as zeros: the inverse of a scale must be finite in fp32."""


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


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once, to fp32."""
    return (a.double() * b.double() + c).float()
