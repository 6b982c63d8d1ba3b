"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops import PackedWeight


class Linear:
    """`y = x W^T + b`, each row's bits independent of the other rows.

    The weight [out, in] is packed (copied) here and the original is not kept, so it may be a view into a
    memory-mapped file.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = PackedWeight(weight, bias)
        self.in_features = self._weight.in_features
        self.out_features = self._weight.out_features

    @classmethod
    def fused(cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None) -> Linear:
        """Several layers that read the same input (q, k, v; or gate, up) as one product.

        Its output is theirs side by side, in the order given.
        """
        return cls(torch.cat(list(weights)), None if biases is None else torch.cat(list(biases)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        return self._weight.matmul(x)
