"""What quantized weights stand for: the oracle of products with them."""

from __future__ import annotations

import torch

from quire.ops import QuantizedWeight
from quire.ops.quantized import codes_of


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """The weight that it stands for, fp32 [out, in]."""
    codes = codes_of(weight).float()
    if weight.group is None:
        full = codes * weight.scales[:, None]
    else:
        scales = weight.scales.float().transpose(1, 2).flatten(0, 1)  # [outputs, groups]
        full = codes * scales.repeat_interleave(weight.group, 1)
    return full[: weight.out_features]
