"""The MLP of a dense layer, and of shared experts, with a gate (https://arxiv.org/abs/2002.05202) or without."""

from __future__ import annotations

import torch

from quire.layers.weights import LayerWeights
from quire.ops import MLPParts
from quire.ops.elementwise import WITHOUT_GATE, Activation
from quire.parallel.group import Split


class MLP:
    """`down(activation(gate(x)) * up(x))`, with gate and up fused into one product; without a gate,
    `down(activation(up(x)))`.

    Args:
        weights: makes the parts by name.
        prefix: of `gate_proj`, `up_proj` and `down_proj`, such as "mlp.".
        bias: whether these have biases.
        activation: of the gate.
    """

    def __init__(self, weights: LayerWeights, prefix: str, bias: bool = False, activation: Activation = "silu") -> None:
        first = [prefix + name for name in _first(activation)]
        self.gate_up = weights.linear(*first, bias=bias, split=Split.OUTPUTS)
        self.down = weights.linear(f"{prefix}down_proj", bias=bias, split=Split.INPUTS)
        self.activation, self._kernels = activation, weights.kernels

    @property
    def parts(self) -> MLPParts | None:
        """The arguments of a kernel that computes the whole layer; None if it is row-parallel, or has no gate."""
        if self.down.reduces or self.activation in WITHOUT_GATE:
            return None
        return MLPParts(self.activation, self.gate_up.product, self.down.product, self.down.inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Same shape and type."""
        return self.down(self._kernels.activate(self.gate_up(x), self.activation))


def mlp_shapes(
    prefix: str, hidden: int, inner: int, bias: bool = False, activation: Activation = "silu"
) -> dict[str, tuple[int, ...]]:
    """The shapes of an MLP's tensors, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (*((name, inner, hidden) for name in _first(activation)), ("down_proj", hidden, inner)):
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _first(activation: Activation) -> tuple[str, ...]:
    """The projections of the MLP's input."""
    return ("up_proj",) if activation in WITHOUT_GATE else ("gate_proj", "up_proj")
