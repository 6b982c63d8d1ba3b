"""The MLP of a dense layer, and of shared experts, with a gate (https://arxiv.org/abs/2002.05202) or without."""

from __future__ import annotations

import torch

from quire.layers.weights import LayerWeights
from quire.ops import MLPParts
from quire.ops.elementwise import WITHOUT_GATE, Activation
from quire.parallel.group import Split


class GatedMLP:
    """`down(activation(gate(x)) * up(x))`. The two weights that read the same input are one product.

    Args:
        weights: gives the parts by name.
        prefix: what `gate_proj`, `up_proj` and `down_proj` lie under, such as "mlp.".
        bias: whether each has one.
        activation: of the gate.
    """

    def __init__(self, weights: LayerWeights, prefix: str, bias: bool = False, activation: Activation = "silu") -> None:
        self.gate_up = weights.linear(f"{prefix}gate_proj", f"{prefix}up_proj", bias=bias, split=Split.OUTPUTS)
        self.down = weights.linear(f"{prefix}down_proj", bias=bias, split=Split.INPUTS)
        self.activation, self._kernels = activation, weights.kernels

    @property
    def parts(self) -> MLPParts | None:
        """What a kernel that computes the whole layer takes; None: ranks add up what it yields."""
        if self.down.reduces:
            return None
        return MLPParts(self.activation, self.gate_up.product, self.down.product, self.down.inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Same shape and type."""
        gate_up = self.gate_up(x)
        gelu = self.activation == "gelu_tanh"
        return self.down(self._kernels.gelu_tanh_mul(gate_up) if gelu else self._kernels.silu_mul(gate_up))


class PlainMLP:
    """`down(max(up(x), 0) ** 2)`, without a gate; see `GatedMLP`."""

    def __init__(self, weights: LayerWeights, prefix: str, bias: bool = False) -> None:
        self.up = weights.linear(f"{prefix}up_proj", bias=bias, split=Split.OUTPUTS)
        self.down = weights.linear(f"{prefix}down_proj", bias=bias, split=Split.INPUTS)
        self._kernels = weights.kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Same shape and type."""
        return self.down(self._kernels.relu2(self.up(x)))


def mlp_of(
    weights: LayerWeights, prefix: str, bias: bool = False, activation: Activation = "silu"
) -> GatedMLP | PlainMLP:
    """The MLP that has this activation."""
    return (
        GatedMLP(weights, prefix, bias, activation)
        if activation not in WITHOUT_GATE
        else PlainMLP(weights, prefix, bias)
    )


def mlp_shapes(
    prefix: str, hidden: int, inner: int, bias: bool = False, activation: Activation = "silu"
) -> dict[str, tuple[int, ...]]:
    """The tensors of an MLP by name, with their shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        if name == "gate_proj" and activation in WITHOUT_GATE:
            continue
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes
