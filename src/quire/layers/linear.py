"""Linear layers."""

from __future__ import annotations

import torch

from quire.ops import Product
from quire.parallel.group import Gather, Group


class Linear:
    """`y = x W^T + b`, where a row's bits do not depend on other rows.

    Args:
        weight: packed [out, in], made by `Kernels.pack` or another of its ways to pack; this rank's shard.
        inputs: gathers the ranks' columns of x; None if x is whole.
        outputs: gathers the ranks' columns of y; None if y stays sharded.
        reduces: the group over which y is summed, if the product is row-parallel.
    """

    def __init__(
        self,
        weight: Product,
        inputs: Gather | None = None,
        outputs: Gather | None = None,
        reduces: Group | None = None,
    ) -> None:
        self.product, self.inputs, self.outputs, self.reduces = weight, inputs, outputs, reduces

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [rows, in]. Returns [rows, out] in `out_dtype`, by default x's."""
        y = self.product.matmul(x if self.inputs is None else self.inputs(x), out_dtype)
        if self.reduces is not None:
            return self.reduces.all_reduce(y)
        return y if self.outputs is None else self.outputs(y)
