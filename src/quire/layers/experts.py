"""The sparse layer: a router sends each token to a few of many gated MLPs (https://arxiv.org/abs/1701.06538)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quire.layers.mlp import GatedMLP, mlp_shapes
from quire.layers.weights import LayerWeights
from quire.ops import RaggedBatch
from quire.ops.experts import Routing


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the parts of a layer with experts: "BLOCK.gate.weight", "BLOCK.experts.0.UP.weight"."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A layer's experts.

    Attributes:
        routing: how tokens choose among them.
        intermediate_size: width inside an expert.
        shared_intermediate_size: of the MLP that every token goes through beside them ("shared experts" are one MLP,
            as wide as all of them); 0: there is none.
        selection_bias: whether the router has one (`e_score_correction_bias`).
        names: what the checkpoint calls them.
    """

    routing: Routing
    intermediate_size: int
    shared_intermediate_size: int = 0
    selection_bias: bool = False
    names: ExpertNames = ExpertNames()

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer's experts by name, with their shapes."""
        block, names, inner = self.names.block, self.names, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (self.routing.num_experts, hidden)}
        if self.selection_bias:
            shapes[f"{block}.gate.e_score_correction_bias"] = (self.routing.num_experts,)
        for expert in range(self.routing.num_experts):
            prefix = f"{block}.experts.{expert}."
            shapes[f"{prefix}{names.gate}.weight"] = shapes[f"{prefix}{names.up}.weight"] = (inner, hidden)
            shapes[f"{prefix}{names.down}.weight"] = (hidden, inner)
        if self.shared_intermediate_size:
            shapes |= mlp_shapes(f"{block}.shared_experts.", hidden, self.shared_intermediate_size)
        return shapes


class ExpertsLayer:
    """The experts of one layer, in place of a `GatedMLP`.

    The router's logits are fp32, of a product in the model's data type: as exact as DeepSeek's in transformers, and
    more so than those of Qwen3-MoE and Mixtral, which are rounded to the model's data type, so that experts tie. (The
    products of plain torch round like them, all the same.) Its weight, and the selection bias, are never quantized.

    Args:
        config: sizes and routing.
        weights: gives the layer's parts by name.

    Attributes:
        load: [experts] int64, tokens that each expert has got.
    """

    def __init__(self, config: ExpertsConfig, weights: LayerWeights) -> None:
        names, block, count = config.names, config.names.block, config.routing.num_experts
        self.routing = config.routing
        self._kernels = weights.kernels
        self._router = weights.kernels.pack([weights.tensor(f"{block}.gate.weight")])
        self._bias = None
        if config.selection_bias:
            self._bias = weights.tensor(f"{block}.gate.e_score_correction_bias", torch.float32).clone()
        prefixes = [f"{block}.experts.{expert}." for expert in range(count)]
        self._experts = weights.kernels.experts(
            [weights.linear(prefix + names.gate, prefix + names.up).product for prefix in prefixes],
            [weights.linear(prefix + names.down).product for prefix in prefixes],
        )
        self._shared = GatedMLP(weights, f"{block}.shared_experts.") if config.shared_intermediate_size else None
        self.load = torch.zeros(count, dtype=torch.int64, device=weights.kernels.device)

    def __call__(self, x: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """x: [tokens, hidden]. Same shape and type."""
        logits = self._router.matmul(x, torch.float32)  # [tokens, experts]
        ids, weights = self._kernels.route(logits, self.routing, self._bias)
        self._count(ids, batch)
        out = self._experts(x, ids, weights)
        return out if self._shared is None else out + self._shared(x)

    def _count(self, ids: torch.Tensor, batch: RaggedBatch) -> None:
        """Add to the load, without waiting for the device; rows of padding do not count."""
        counted = batch.once(("counted", ids.shape[1]), lambda: _counted(ids, batch))
        self.load.index_add_(0, ids.flatten(), counted)


def _counted(ids: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
    """1 for each of a step's ids, 0 in rows of padding: [tokens * top_k] int64; the same in all layers."""
    counted = torch.ones_like(ids)
    if batch.spans is not None:
        rows = torch.arange(len(ids), device=ids.device)
        counted *= (rows < batch.spans.row_starts[-1]).unsqueeze(1)
    return counted.flatten()


def expert_loads(mlps: Iterable[object]) -> dict[int, torch.Tensor]:
    """The loads of those layers that have experts, by the layer's number. `mlps`: one a layer, of either kind."""
    return {index: mlp.load for index, mlp in enumerate(mlps) if isinstance(mlp, ExpertsLayer)}
