"""The interface from which layers get their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.ops import Kernels
from quire.parallel.group import Group, Split


class LayerWeights(Protocol):
    """Makes a layer's parts by their names in the checkpoint, such as "mlp.up_proj"."""

    kernels: Kernels
    dtype: torch.dtype
    """The data type of the computation."""
    group: Group
    """The ranks that share these layers."""
    expert_group: Group
    """The ranks that share the experts, which may include replicas of the other layers."""
    expert_slots: int
    """With expert parallelism, the number of slots for a layer's experts on all ranks; 0 if ranks share each one."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, such as "self_attn.q_norm.weight", in `dtype`, by default that of the computation."""
        ...

    def linear(
        self, *names: str, bias: bool = False, split: Split = Split.NONE, heads: Sequence[int] | None = None
    ) -> Linear:
        """The product with a weight; with several weights, their outputs are concatenated.

        Args:
            split: how the ranks share it.
            heads: for each weight, the number of heads in its outputs (with `Split.INPUTS`, in its inputs), if heads
                must not be split.
        """
        ...

    def elsewhere(self, prefix: str) -> None:
        """The weights with this prefix are on other ranks."""
        ...

    def norm(self, name: str, eps: float) -> RMSNorm:
        """Make a norm."""
        ...
