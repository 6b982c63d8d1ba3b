"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops.linear import Product
from quire.ops.quantized import Quantization, QuantizedWeight


def pack(
    parts: Sequence[torch.Tensor], bias: torch.Tensor | None, device: torch.device, deterministic: bool
) -> Product:
    """See `Kernels.pack`; cuBLAS's product unless `deterministic`."""
    raise NotImplementedError


def quantize(weight: torch.Tensor, how: Quantization, device: torch.device) -> QuantizedWeight:
    """See `Kernels.quantize`."""
    raise NotImplementedError


def pack_quantized(weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device) -> Product:
    """See `Kernels.pack_quantized`."""
    raise NotImplementedError
