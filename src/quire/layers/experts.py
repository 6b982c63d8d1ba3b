"""The sparse layer: a router sends each token to a few of many gated MLPs (https://arxiv.org/abs/1701.06538)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from quire.layers.mlp import MLP, mlp_shapes
from quire.layers.weights import LayerWeights
from quire.ops import ExpertsParts, Product, RaggedBatch
from quire.ops.elementwise import WITHOUT_GATE, Activation, sigmoid_gated
from quire.ops.experts import CountedExperts, Experts, ExpertSlots, Routing
from quire.parallel.group import Gather, Group, Split

INTO, OUT_OF = "latent_in_proj", "latent_out_proj"
"""Projections around experts with a width of their own."""

ROUTING_BYTES = 32
"""Bytes per token and expert: its logit, its score, and in plain torch the indices that sort them."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in a checkpoint of the parts of a layer with experts: "BLOCK.gate.weight", "BLOCK.experts.0.UP.weight"."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A layer's experts.

    Attributes:
        routing: how each token's experts are chosen.
        intermediate_size: inner width of an expert.
        shared_intermediate_size: inner width of the shared experts, which are one MLP for all tokens; 0 if there are
            none.
        shared_gate: whether the shared experts' output is multiplied by the sigmoid of a projection of their input.
        selection_bias: whether the router has a selection bias (`e_score_correction_bias`).
        names: their names in the checkpoint.
        bias: whether the router and the projections of each expert have biases.
        activation: of the gates, also of shared experts; `relu2` has no gate.
        latent: width of the experts' inputs and outputs, with projections from and to the residual stream; 0 if it is
            the residual stream's.
        scales: whether each expert's routing weights are multiplied by a number (`per_expert_scale`).
    """

    routing: Routing
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    selection_bias: bool = False
    names: ExpertNames = ExpertNames()
    bias: bool = False
    activation: Activation = "silu"
    scales: bool = False
    latent: int = 0

    @property
    def first(self) -> tuple[str, ...]:
        """Names of an expert's projections of its input."""
        return (self.names.up,) if self.activation in WITHOUT_GATE else (self.names.gate, self.names.up)

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a layer's experts, by name."""
        block, names, inner, read = self.names.block, self.names, self.intermediate_size, self.latent or hidden
        shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (self.routing.num_experts, hidden)}
        if self.selection_bias:
            shapes[f"{block}.gate.e_score_correction_bias"] = (self.routing.num_experts,)
        for expert in range(self.routing.num_experts):
            prefix = f"{block}.experts.{expert}."
            shapes |= {f"{prefix}{name}.weight": (inner, read) for name in self.first}
            shapes[f"{prefix}{names.down}.weight"] = (read, inner)
            if self.bias:
                shapes |= {f"{prefix}{name}.bias": (inner,) for name in self.first}
                shapes[f"{prefix}{names.down}.bias"] = (read,)
        if self.bias:
            shapes[f"{block}.gate.bias"] = (self.routing.num_experts,)
        if self.scales:
            shapes[f"{block}.per_expert_scale"] = (self.routing.num_experts,)
        if self.shared_intermediate_size:
            sizes = hidden, self.shared_intermediate_size
            shapes |= mlp_shapes(f"{block}.shared_experts.", *sizes, activation=self.activation)
        if self.latent:
            shapes[f"{block}.{INTO}.weight"], shapes[f"{block}.{OUT_OF}.weight"] = (read, hidden), (hidden, read)
        if self.shared_gate:
            shapes[f"{block}.shared_experts.gate.weight"] = (1, hidden)
        return shapes


@dataclass(frozen=True, slots=True)
class Arranged:
    """A rank's experts for a placement: see `ExpertsLayer.arrange`."""

    slots: tuple[int, ...]
    own: dict[int, tuple[Product, Product]]
    experts: Experts


class Everybody:
    """The replicas that share experts, each with its own rows.

    Args:
        ranks: the ranks of all replicas, one replica after the other.
        size: number of ranks of a replica, which have the same rows.
    """

    def __init__(self, ranks: Group, size: int) -> None:
        self._ranks, self._size = ranks, size

    def rows(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]:
        """Gather the rows of all replicas; returns them, and the slice of this replica's.

        Args:
            x: [tokens, hidden]. ids, weights: [tokens, top_k], see `Kernels.route`.
        """
        given = x, ids, weights
        replica, leads = self._ranks.rank // self._size, self._ranks.rank % self._size == 0
        brought = self._ranks.exchange(given if leads else ())[:: self._size]
        widths = [each.shape[1] * each.itemsize for each in given]
        counts = [len(part) // sum(widths) for part in brought]
        cut = [
            torch.split(part, [count * width for width in widths]) for part, count in zip(brought, counts, strict=True)
        ]
        all_x, all_ids, all_weights = (
            torch.cat([parts[place] for parts in cut]).view(each.dtype).view(-1, each.shape[1])
            for place, each in enumerate(given)
        )
        begin = sum(counts[:replica])
        return all_x, all_ids, all_weights, slice(begin, begin + counts[replica])


class ExpertsLayer:
    """The experts of one layer, instead of an `MLP`.

    The router's logits are fp32, from a product in the model's data type: as precise as DeepSeek's in transformers, and
    more precise than those of Qwen3-MoE and Mixtral, which are rounded to the model's data type, so that experts tie.
    (The products of plain torch are rounded as well.) The router and the selection bias are never quantized.

    Args:
        config: sizes and routing.
        weights: makes the layer's parts by name.

    Attributes:
        load: [experts] int64, number of tokens that each expert has processed.
        slots: with expert parallelism, the expert in each slot; otherwise empty.
    """

    def __init__(self, config: ExpertsConfig, weights: LayerWeights) -> None:
        names, block, count = config.names, config.names.block, config.routing.num_experts
        self.routing = config.routing
        self._shared_size = config.shared_intermediate_size
        self._kernels = weights.kernels
        self._activation: Activation = config.activation
        of_router = weights.tensor(f"{block}.gate.bias") if config.bias else None
        self._router = weights.kernels.pack([weights.tensor(f"{block}.gate.weight")], of_router)
        self._bias = None
        if config.selection_bias:
            self._bias = weights.tensor(f"{block}.gate.e_score_correction_bias", torch.float32).clone()
        self._scales = weights.tensor(f"{block}.per_expert_scale", torch.float32).clone() if config.scales else None
        prefixes = [f"{block}.experts.{expert}." for expert in range(count)]
        self.slots: tuple[int, ...] = ()
        if weights.expert_slots:
            self._outputs, self._group = None, weights.expert_group
            self._own: dict[int, tuple[Product, Product]] = {}  # by expert
            self._read: Callable[[int], tuple[Product, Product]] = lambda expert: _whole(
                weights, prefixes[expert], config
            )
            first = ExpertSlots(self._group, first_slots(count, weights.expert_slots))
            read = {expert: self._read(expert) for expert in dict.fromkeys(first.own_experts)}
            self.use(self._arranged(first, read))
            for prefix in (prefix for expert, prefix in enumerate(prefixes) if expert not in self._own):
                weights.elsewhere(prefix)
        else:
            bias = config.bias
            up = [weights.linear(*_first(prefix, config), bias=bias, split=Split.OUTPUTS) for prefix in prefixes]
            down = [weights.linear(prefix + names.down, bias=bias, split=Split.INPUTS) for prefix in prefixes]
            products = [each.product for each in up], [each.product for each in down]
            self._experts, self._outputs = self._computed(*products, down[0].inputs), down[0].outputs
        shared = weights.expert_slots and weights.expert_group.size > weights.group.size
        self._everybody = Everybody(weights.expert_group, weights.group.size) if shared else None
        self._shared: MLP | None = None
        if config.shared_intermediate_size:
            self._shared = MLP(weights, f"{block}.shared_experts.", activation=config.activation)
        self._latent = config.latent
        self._into = weights.linear(f"{block}.{INTO}") if config.latent else None
        self._out_of = weights.linear(f"{block}.{OUT_OF}") if config.latent else None
        self._shared_gate: Product | None = None
        if config.shared_gate:
            self._shared_gate = weights.kernels.pack([weights.tensor(f"{block}.shared_experts.gate.weight")])
        self.load = torch.zeros(count, dtype=torch.int64, device=weights.kernels.device)

    def __call__(self, x: torch.Tensor, batch: RaggedBatch, routed: torch.Tensor | None = None) -> torch.Tensor:
        """x: [tokens, hidden]; routed: the router's input, by default x. Returns x's shape and type."""
        logits = self._router.matmul(x if routed is None else routed, torch.float32)  # [tokens, experts]
        ids, weights = self._kernels.route(logits, self.routing, self._bias, batch)
        if self._scales is not None:
            weights = weights * self._scales[ids]
        read = x if self._into is None else self._into(x)
        if self._everybody is not None:
            out = self._of_all(read, ids, weights, self._everybody)
        else:
            self._kernels.count_experts(ids, batch, self.load)
            out = self._experts(read, ids, weights)
            out = out if self._outputs is None else self._outputs(out)
        if self._out_of is not None:
            out = self._out_of(out)
        if self._shared is None:
            return out
        of_all = self._shared(x)
        return out + (of_all if self._shared_gate is None else sigmoid_gated(of_all, self._shared_gate.matmul(x)))

    @property
    def parts(self) -> ExpertsParts | None:
        """The arguments of a kernel that computes the whole layer; None if there is none for this kind of experts."""
        shared = None if self._shared is None else self._shared.parts
        others = (self._scales, self._into, self._out_of, self._shared_gate)
        if self.slots or any(other is not None for other in others) or (self._shared is not None and shared is None):
            return None
        return ExpertsParts(self._router, self.routing, self._bias, self._experts, shared, self.load)

    def _computed(self, up: Sequence[Product], down: Sequence[Product], shared: Gather | ExpertSlots | None) -> Experts:
        return self._kernels.experts(up, down, shared, self._activation)

    def without_rows(self, x: torch.Tensor) -> None:
        """Take part in a step without tokens of this replica; x: [0, hidden], in the model's data type."""
        if self._everybody is not None:
            top_k = self.routing.top_k
            x = x.new_empty(0, self._latent or x.shape[1])
            self._of_all(x, torch.empty(0, top_k, dtype=torch.int64), torch.empty(0, top_k), self._everybody)

    def _of_all(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, everybody: Everybody) -> torch.Tensor:
        """Compute this rank's experts for the rows of all replicas; returns the results of this replica's rows."""
        x, ids, weights, own = everybody.rows(x, ids, weights)
        self.load += torch.bincount(ids.flatten(), minlength=len(self.load))
        return self._experts(x, ids, weights)[own] if len(x) else x

    def arrange(self, experts: Sequence[int]) -> Generator[None, None, Arranged]:
        """Prepare this rank's experts for a placement: new ones are read from the checkpoint, one per iteration.

        May run in another thread than the computation: experts that the rank has and keeps do not change.
        """
        slots = ExpertSlots(self._group, tuple(experts))
        own = {expert: self._own[expert] for expert in slots.own_experts if expert in self._own}
        for expert in slots.own_experts:
            if expert not in own:
                own[expert] = self._read(expert)
                yield
        return self._arranged(slots, own)

    def _arranged(self, slots: ExpertSlots, own: dict[int, tuple[Product, Product]]) -> Arranged:
        up, down = zip(*(own[expert] for expert in slots.own_experts), strict=True)
        return Arranged(slots.experts, own, self._computed(up, down, slots))

    def use(self, arranged: Arranged) -> None:
        """Switch to a placement; all ranks do so at the same step."""
        self.slots, self._own, self._experts = arranged.slots, arranged.own, arranged.experts

    def workspace(self, tokens: int, hidden: int, dtype: torch.dtype) -> int:
        """Estimate of the intermediate results' bytes for [tokens, hidden] in `dtype`, without x.

        Raises:
            TypeError: there is no estimate for these kernels: on a GPU, where a step is measured instead.
        """
        if not isinstance(self._experts, CountedExperts):
            raise TypeError(f"{type(self._experts).__name__} cannot tell what memory it needs; measure a step")
        experts, top_k = self.routing.num_experts, self.routing.top_k
        per_token = ROUTING_BYTES * experts + 32 * top_k  # ids and weights, and their copies
        widths = 3 * hidden + 2 * self._latent + 3 * self._shared_size  # the experts', the shared one's, the sum
        per_token += widths * dtype.itemsize
        return tokens * per_token + self._experts.workspace(tokens, top_k, dtype)


def first_slots(experts: int, slots: int) -> tuple[int, ...]:
    """The initial expert in each slot."""
    return tuple(slot % experts for slot in range(slots))


def _first(prefix: str, config: ExpertsConfig) -> tuple[str, ...]:
    """An expert's projections of its input."""
    return tuple(prefix + name for name in config.first)


def _whole(weights: LayerWeights, prefix: str, config: ExpertsConfig) -> tuple[Product, Product]:
    """Read an expert's two products from the checkpoint."""
    names, bias = config.names, config.bias
    up = weights.linear(*_first(prefix, config), bias=bias)
    return up.product, weights.linear(prefix + names.down, bias=bias).product
