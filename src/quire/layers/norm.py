"""Root mean square layer normalization (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch

from quire.ops import Kernels


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: Kernels) -> None:
        self.weight = weight.detach().clone()
        self.eps = eps
        self._kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, size]. Same shape and type; statistics in fp32."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def with_residual(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then normalize: returns (normalized sum, sum), which may overwrite `x` and `residual`."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps)
