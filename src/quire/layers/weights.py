"""What layers ask of whoever has a checkpoint's weights."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.ops import Kernels


class LayerWeights(Protocol):
    """Gives a layer's parts by their names in the checkpoint, such as "mlp.up_proj"."""

    kernels: Kernels

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in `dtype`, unless said that of the computation, such as "self_attn.q_norm.weight"."""
        ...

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """The product with a weight; with several that read the same input, their outputs side by side."""
        ...

    def norm(self, name: str, eps: float) -> RMSNorm:
        """A norm."""
        ...
