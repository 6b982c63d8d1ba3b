"""Per-layer embeddings, as in Gemma 3n and 4: a second embedding table, with a part for each layer.

A token's part for a layer is combined with a projection of the first embedding, and gates the last addition of the
layer.
"""

from __future__ import annotations

import math

import torch

from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.weights import LayerWeights


class PerLayerInputs:
    """Computes them for all layers, once per step: (a token's row + a normed projection) / sqrt(2).

    The reference scales the projection before its norm, which is equivalent to another epsilon; and the factor of the
    sum is applied to both terms before they are added.

    Args:
        table: rows of the tokens, [vocabulary, layers * width], already scaled by `scale_of_table`.
        projection: of the first embedding, [layers * width, hidden].
        norm: of each layer's part, with epsilon `eps_of_norm`; its weights are scaled in place.
    """

    def __init__(self, table: Embedding, projection: Linear, norm: RMSNorm) -> None:
        self.table, self._projection, self._norm = table, projection, norm
        self.width = len(norm.weight)
        norm.weight.mul_(math.sqrt(0.5))

    def __call__(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """ids: [tokens]; embedded: [tokens, hidden], from the first table. Returns [tokens, layers, width]."""
        projected = self._norm(self._projection(embedded).view(-1, self.width))
        return self.table(ids).view(len(ids), -1, self.width).add_(projected.view(len(ids), -1, self.width))


def scale_of_table(width: int) -> float:
    """The factor of the table's rows."""
    return math.sqrt(width) * math.sqrt(0.5)


def eps_of_norm(eps: float, hidden_size: int) -> float:
    """The epsilon of a norm of values that were not multiplied by hidden_size ** -0.5 before."""
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
        """x: [tokens, hidden]; per_layer_input: [tokens, width]. Returns the term to add, [tokens, hidden]."""
        both = torch.cat([self._gate(x), per_layer_input], dim=1)
        return self.norm(self._projection(self._kernels.activate(both, "gelu_tanh")))


def gate_shapes(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a `PerLayerGate` by name, with their shapes."""
    return {
        "per_layer_input_gate.weight": (width, hidden),
        "per_layer_projection.weight": (hidden, width),
        "post_per_layer_input_norm.weight": (hidden,),
    }
