"""Linear layers."""

from __future__ import annotations

import torch

from quire.ops import Product


class Linear:
    """`y = x W^T + b`, each row's bits independent of the other rows.

    Args:
        weight: packed [out, in], as `Kernels.pack` or `Kernels.pack_quantized` gives it.
    """

    def __init__(self, weight: Product) -> None:
        self.product = weight
        self.in_features = weight.in_features
        self.out_features = weight.out_features

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [rows, in]. Returns [rows, out] in `out_dtype`, x's unless said."""
        return self.product.matmul(x, out_dtype)
