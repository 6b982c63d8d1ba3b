"""A gated MLP and experts in parallel, as in Gemma 4's sparse models: each has its own norm of the residual stream."""

from __future__ import annotations

import torch

from quire.layers.experts import ExpertsConfig, ExpertsLayer
from quire.layers.mlp import MLP
from quire.layers.weights import LayerWeights
from quire.ops import RaggedBatch
from quire.ops.elementwise import Activation

AFTER_MLP, BEFORE_EXPERTS, AFTER_EXPERTS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


class MLPBesideExperts:
    """`norm(mlp(x)) + norm(experts(norm(residual)))`, where the router has its own norm of the residual.

    The router's norm has no weights; the factors of its result (a number per column, and the root of their count) are
    used as its weights.

    Args:
        config: sizes of the experts.
        weights: gives the layer's parts by name.
        activation: of the MLP's gate.
        hidden: width of the residual stream.
        eps: of the norms.
    """

    def __init__(
        self, config: ExpertsConfig, weights: LayerWeights, activation: Activation, hidden: int, eps: float
    ) -> None:
        self.mlp = MLP(weights, "mlp.", activation=activation)
        self.experts = ExpertsLayer(config, weights)
        self._after_mlp, self._before_experts, self._after_experts = (
            weights.norm(name, eps) for name in (AFTER_MLP, BEFORE_EXPERTS, AFTER_EXPERTS)
        )
        self._router_norm = weights.tensor(f"{config.names.block}.scale", torch.float32) * hidden**-0.5
        self._eps, self._kernels = eps, weights.kernels

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """x: [tokens, hidden], the MLP's normed input; residual: [tokens, hidden]. Same shape and type."""
        routed = self._kernels.rms_norm(residual, self._router_norm, self._eps)
        sparse = self._after_experts(self.experts(self._before_experts(residual), batch, routed))
        return self._after_mlp(self.mlp(x)).add_(sparse)


def beside_shapes(block: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes, by name, of the tensors of such a layer besides the MLP's and the experts'."""
    norms = {f"{name}.weight": (hidden,) for name in (AFTER_MLP, BEFORE_EXPERTS, AFTER_EXPERTS)}
    return {**norms, f"{block}.scale": (hidden,)}
