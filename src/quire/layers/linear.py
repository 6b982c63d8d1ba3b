"""Linear layers."""

from __future__ import annotations

import torch

from quire.ops import Product
from quire.parallel.group import Gather, Group


class Linear:
    """`y = x W^T + b`, each row's bits independent of the other rows.

    Args:
        weight: packed [out, in], as `Kernels.pack` or `Kernels.pack_quantized` gives it; this rank's outputs.
        inputs: brings together the ranks' columns of x; None: x has all.
        outputs: the same for y; None: this rank's outputs stay as they are.
        reduces: the ranks whose y are added up, where the weight is that of this rank's inputs instead.
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
        """x: [rows, in]. Returns [rows, out] in `out_dtype`, x's unless said."""
        y = self.product.matmul(x if self.inputs is None else self.inputs(x), out_dtype)
        if self.reduces is not None:
            return self.reduces.all_reduce(y)
        return y if self.outputs is None else self.outputs(y)
