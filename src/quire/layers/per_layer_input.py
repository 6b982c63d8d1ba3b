"""What each layer gets of the tokens themselves, as in Gemma 3n and 4: a second table, with a part for each layer.

A token's part of a layer is mixed with what the first embedding says, and gates what the layer adds last.
"""

from __future__ import annotations

import math

import torch

from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.weights import LayerWeights


class PerLayerInputs:
    """Makes them for all layers, once a step: the mean (by root) of a token's row and a norm of a projection.

    The projection is scaled before its norm, which changes nothing but how much its epsilon counts; and what both are
    multiplied with at the end, they are multiplied with before they are added.

    Args:
        table: rows of the tokens, [vocabulary, layers * width], scaled already by `scale_of_table`.
        projection: of the first embedding, [layers * width, hidden].
        norm: of each layer's part, whose epsilon is `eps_of_norm`; its weights are changed.
    """

    def __init__(self, table: Embedding, projection: Linear, norm: RMSNorm) -> None:
        self._table, self._projection, self._norm = table, projection, norm
        self.width = len(norm.weight)
        norm.weight.mul_(math.sqrt(0.5))

    def __call__(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """ids: [tokens]; embedded: [tokens, hidden], from the first table. Returns [tokens, layers, width]."""
        projected = self._norm(self._projection(embedded).view(-1, self.width))
        return self._table(ids).view(len(ids), -1, self.width).add_(projected.view(len(ids), -1, self.width))


def scale_of_table(width: int) -> float:
    """What the table's rows are multiplied with."""
    return math.sqrt(width) * math.sqrt(0.5)


def eps_of_norm(eps: float, hidden_size: int) -> float:
    """The epsilon of a norm of what was not multiplied with hidden_size ** -0.5 before."""
    return eps * hidden_size


class PerLayerGate:
    """The last part of a layer: `norm(projection(gelu(gate(x)) * per_layer_input))`, which is added to x.

    Args:
        weights: gives the layer's parts by name.
        eps: of the norm.
    """

    def __init__(self, weights: LayerWeights, eps: float) -> None:
        self._gate, self._projection = (
            weights.linear(name) for name in ("per_layer_input_gate", "per_layer_projection")
        )
        self.norm = weights.norm("post_per_layer_input_norm", eps)
        self._kernels = weights.kernels

    def __call__(self, x: torch.Tensor, per_layer_input: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]; per_layer_input: [tokens, width]. Returns what is to be added, [tokens, hidden]."""
        both = torch.cat([self._gate(x), per_layer_input], dim=1)
        return self.norm(self._projection(self._kernels.activate(both, "gelu_tanh")))


def gate_shapes(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a `PerLayerGate` by name, with their shapes."""
    return {
        "per_layer_input_gate.weight": (width, hidden),
        "per_layer_projection.weight": (hidden, width),
        "post_per_layer_input_norm.weight": (hidden,),
    }
