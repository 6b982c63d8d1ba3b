"""The gated MLP of a dense layer, and of shared experts (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch

from quire.layers.weights import LayerWeights
from quire.parallel.group import Split


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`. The two weights that read the same input are one product.

    Args:
        weights: gives the parts by name.
        prefix: what `gate_proj`, `up_proj` and `down_proj` lie under, such as "mlp.".
        bias: whether each has one.
    """

    def __init__(self, weights: LayerWeights, prefix: str, bias: bool = False) -> None:
        self.gate_up = weights.linear(f"{prefix}gate_proj", f"{prefix}up_proj", bias=bias, split=Split.OUTPUTS)
        self.down = weights.linear(f"{prefix}down_proj", bias=bias, split=Split.INPUTS)
        self._kernels = weights.kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Same shape and type."""
        return self.down(self._kernels.silu_mul(self.gate_up(x)))


def mlp_shapes(prefix: str, hidden: int, inner: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a `GatedMLP` by name, with their shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes
