"""What layers ask of whoever has a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.ops import Kernels
from quire.parallel.group import Group, Split


class LayerWeights(Protocol):
    """Gives a layer's parts by their names in the checkpoint, such as "mlp.up_proj"."""

    kernels: Kernels
    dtype: torch.dtype
    """Of the computation."""
    group: Group
    """Of the ranks that compute these layers together."""
    expert_group: Group
    """Of those that share the experts: replicas of the other layers have them in common."""
    expert_slots: int
    """Of these ranks, for a layer's experts, each of which one rank computes alone; 0: ranks share every expert."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in `dtype`, unless said that of the computation, such as "self_attn.q_norm.weight"."""
        ...

    def linear(
        self, *names: str, bias: bool = False, split: Split = Split.NONE, heads: Sequence[int] | None = None
    ) -> Linear:
        """The product with a weight; with several that read the same input, their outputs side by side.

        Args:
            split: how the ranks share it.
            heads: of how many the outputs of each are (split by inputs: its inputs), where no head may be cut.
        """
        ...

    def elsewhere(self, prefix: str) -> None:
        """Another rank has the weights whose names begin so."""
        ...

    def norm(self, name: str, eps: float) -> RMSNorm:
        """A norm."""
        ...
