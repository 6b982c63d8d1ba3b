"""Kernels that work row by row: norms, gate, embedding, and whether rows are finite."""

from __future__ import annotations

import torch


def embed(ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `Kernels.embed`."""
    raise NotImplementedError


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Kernels.rms_norm`."""
    raise NotImplementedError


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.add_rms_norm`."""
    raise NotImplementedError


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `Kernels.silu_mul`."""
    raise NotImplementedError


def finite_rows(x: torch.Tensor) -> torch.Tensor:
    """See `Kernels.finite_rows`."""
    raise NotImplementedError
