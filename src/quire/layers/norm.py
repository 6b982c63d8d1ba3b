"""Root mean square layer normalization (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch

from quire.ops import rms_norm


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.detach().clone()
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]. Same shape and type; statistics in fp32."""
        return rms_norm(x, self.weight, self.eps)

    def with_residual(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then normalize: returns (normalized sum, sum)."""
        total = residual + x
        return rms_norm(total, self.weight, self.eps), total
