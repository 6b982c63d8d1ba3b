"""A loaded model: embedding, decoder layers, norm and head. Architectures differ only in their `read_config`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.layers.decoder import DecoderLayer
from quire.layers.latent import may_expand
from quire.layers.per_layer_input import PerLayerInputs, eps_of_norm, scale_of_table
from quire.layers.rotary import RotaryEmbedding
from quire.models.config import PER_LAYER_TABLE, DecoderConfig
from quire.models.layer_groups import LayerGroup
from quire.models.mtp import MultiTokenPrediction
from quire.models.sharing import Sharing
from quire.models.weights import EXPERT, Weights
from quire.ops import KVCache, KVShape, RaggedBatch
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.recurrent import RecurrentShape
from quire.parallel.group import Group, OneRank, Split, own_heads


class AuxHiddenStates:
    """Inputs of some layers in one step (the residual stream), which EAGLE-3 uses as features.

    Args:
        layers: numbers of the layers.

    Attributes:
        taken: by layer, its input [tokens, hidden], once the step has reached it.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.taken: dict[int, torch.Tensor] = {}

    def take(self, layer: int, x: torch.Tensor | None, residual: torch.Tensor) -> None:
        """Called before each layer with its input (see `DecoderLayer`). Copies it, as the layer may overwrite it."""
        if layer in self.layers:
            self.taken[layer] = residual.clone() if x is None else x + residual

    def features(self) -> torch.Tensor:
        """Concatenated in the order of `layers`: [tokens, len(layers) * hidden]."""
        return torch.cat([self.taken[layer] for layer in self.layers], dim=1)


class ModelSizes:
    """A model's sizes, from which memory and time are estimated.

    Args:
        config: the parsed config.json.
        dtype: of activations and KV, and of weights that are not quantized.
        quantization: of the linear layers; None if they are not quantized.
        expands: latent attention has additional weights to expand keys with.

    Attributes:
        multiplies_bytes: products are of whole numbers of 8 bits, as those with weights in codes are.
        vocab_size: token ids are 0 to vocab_size - 1.
        num_layers, num_kv_heads, head_dim: the shape of a token's KV; if layers differ, that of most.
        windows: per layer, the number of positions that a token sees, including itself; None for all.
        groups: layers that keep the same positions in the same shape, and so share blocks; most models have one group.
        kv_sides: see `LayerConfig`.
        kv_saving: size of the keys and values of all heads, relative to what is stored per token; None if these are
            stored.
        attention_width: length of a key plus its value, with which each query head is multiplied; the mean of all
            layers.
        num_parameters: number of parameters in the checkpoint; a tied head counts once.
        weight_bytes: size of the parameters in memory, all of which a step of many tokens reads. Without the embedding
            table, which remains a mapped file of which a step reads one row per token (if it is tied, it is included as
            the head), and without a table of per-layer inputs.
        expert_parameters, expert_bytes: the part of these in routed experts, of which a step reads only the chosen
            ones; 0 without experts.
        active_parameters: number of parameters with which one token is computed, plus the embedding table.
        pair_share: operations for a token and one that it attends to, in all layers without a window, relative to those
            of a token's products with weights, without the head.
        causal: tokens do not see those that follow them; if false, prompts are computed whole, and only embedded.
    """

    stage: Group = OneRank()

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, quantization: str | None = None, expands: bool = False
    ) -> None:
        layer = config.layer
        self.config = config
        self.dtype, self.quantization, self.causal = dtype, quantization, layer.causal
        self.multiplies_bytes = quantization is not None
        self.vocab_size = config.vocab_size
        self.num_layers, self.windows, self.groups = config.num_layers, config.windows, config.groups
        self.num_kv_heads, self.head_dim, self.kv_sides = layer.num_kv_heads, layer.head_dim, layer.kv_sides
        self.kv_saving = None
        layers = [config.layer_at(i) for i in range(self.num_layers) if i not in config.recurrent_layers]
        attending = [each for each in layers if each.attends]
        self.attention_width = sum(2 * each.head_dim for each in attending) // self.num_layers
        if layer.latent is not None:
            self.kv_saving = layer.num_heads * (layer.latent.qk_head_dim + layer.latent.v_head_dim) / layer.latent.row
            self.attention_width = layer.latent.row + layer.latent.kv_lora_rank
        sizes = {name: math.prod(shape) for name, shape in config.tensor_shapes().items()}
        self.num_parameters = sum(sizes.values())
        held = self.num_parameters - sizes.get(PER_LAYER_TABLE, 0)
        if not config.tie_word_embeddings:
            held -= config.vocab_size * layer.hidden_size
        if layer.latent is not None and expands:
            held += config.num_layers * layer.num_heads * layer.latent.qk_nope_head_dim * layer.latent.kv_lora_rank
        self.weight_bytes = held * dtype.itemsize
        self.expert_parameters = sum(size for name, size in sizes.items() if EXPERT.fullmatch(name))
        self.expert_bytes = self.expert_parameters * dtype.itemsize
        self.active_parameters = self.num_parameters - sizes.get(PER_LAYER_TABLE, 0)
        if config.routing is not None:
            idle = config.routing.num_experts - config.routing.top_k
            self.active_parameters -= self.expert_parameters * idle // config.routing.num_experts
        table = config.vocab_size * layer.hidden_size
        products = self.active_parameters - table * (1 if config.tie_word_embeddings else 2)
        seeing_all = sum(each is None for each in self.windows) / self.num_layers
        self.pair_share = layer.num_heads * self.attention_width * self.num_layers * seeing_all / max(1, products)

    def kv_shape(self) -> KVShape:
        """The KV of a token in all layers, assuming the shape of most layers."""
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        return KVShape(*shape, self.dtype, "auto", self.kv_sides)

    def kv_shapes(self, kv_cache_dtype: KVCacheDtype = "auto", block_size: int = 16) -> list[KVShape | RecurrentShape]:
        """Each group's KV of a token; for recurrent layers, in blocks of this many tokens."""
        return [self._kept(group, len(group.layers), kv_cache_dtype, block_size) for group in self.groups]

    def _kept(
        self, group: LayerGroup, layers: int, kv_cache_dtype: KVCacheDtype, block_size: int
    ) -> KVShape | RecurrentShape:
        """The KV of a token in this many layers of a group."""
        if group.recurrent and self.config.recurrent is not None:
            return self.config.recurrent.state_shape(layers, block_size, self.dtype, self.stage)
        layer = self.config.layer_at(group.layers[0])
        heads = own_heads(layer.num_kv_heads, self.stage)
        return KVShape(layers, heads, layer.head_dim, self.dtype, kv_cache_dtype, self.kv_sides)


class Model(ModelSizes):
    """A loaded causal language model.

    Args:
        config: the parsed config.json.
        weights: the checkpoint's.
        sharing: how ranks share it.

    Attributes:
        kernels: the implementation that computes it.
        ranks, stage, stages: see `Sharing`.
        replicas: number of groups of ranks with the same layers.
        rank_groups: the groups that this rank belongs to, the smallest first.
        embedding: the embedding table.
        rotary: the rotary embedding of most layers.
        max_position_embeddings: the longest context, in tokens.
        eos_token_ids: ids that end a text.
        expert_layers: the layers' experts, by layer number; empty without experts.
        expert_slots: see `LayerWeights`.
        loads_elsewhere: see `expert_loads`; of other stages' layers, as last exchanged.
        mtp: the multi-token prediction layer; None unless it was requested.
        architecture: its name in config.json.
        notes: messages for the user.
    """

    architecture: str = ""
    notes: tuple[str, ...] = ()

    def __init__(self, config: DecoderConfig, weights: Weights, sharing: Sharing) -> None:
        expands = config.layer.expands and may_expand(weights.kernels)
        super().__init__(config, weights.dtype, weights.quantization, expands)
        self.kernels = weights.kernels
        self.ranks, self.stage, self.stages = sharing.ranks, sharing.stage, sharing.stages
        self.replicas = self.ranks.size // self.stage.size // self.stages
        self.rank_groups = (self.ranks,) if self.stage is self.ranks else (self.stage, self.ranks)
        own = layers_of(self.ranks.rank // self.stage.size % self.stages, self.stages, config.num_layers)
        if self.stages > 1:
            self.num_layers = len(own)
            self.groups = tuple(group.within(own) for group in self.groups)
            for index in {*range(config.num_layers)} - {*own}:
                weights.elsewhere(f"model.layers.{index}.")
        self._first = own.start
        self.num_kv_heads = own_heads(self.num_kv_heads, self.stage)
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        # The largest tensor first, so that peak memory is not the whole model plus this tensor.
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.head = weights.linear(head, split=Split.VOCABULARY)
        self._head_in_table = config.tie_word_embeddings and not weights.is_coded(head)
        self.embedding = weights.embedding("model.embed_tokens", _embedding_scale(config, self.dtype))
        self._per_layer_inputs = _per_layer_inputs(config, weights) if config.per_layer_width else None
        ropes = [(config.ropes or (config.rope,) * config.num_layers)[index] for index in own]
        kinds = list(dict.fromkeys([config.rope, *ropes]))
        self._rotaries = [RotaryEmbedding(rope, weights.kernels.device) for rope in kinds]
        self.rotary, self._rotary_of = self._rotaries[0], [kinds.index(rope) for rope in ropes]
        self._logits_divisor, self._logits_cap = config.logits_divisor, config.logits_cap
        self._places = _places_of(own, self.groups, config)
        self.layers = [
            DecoderLayer(
                config.layer_at(index),
                weights.under(f"model.layers.{index}.", self.stage),
                self._places[index][1],
                window,
            )
            for index, window in zip(own, config.windows[own.start :], strict=False)
        ]
        self.norm = weights.norm("model.norm", config.layer.rms_norm_eps)
        self.expert_layers = {
            index: layer.experts for index, layer in zip(own, self.layers, strict=True) if layer.experts is not None
        }
        self.expert_slots = weights.expert_slots
        self.loads_elsewhere = {
            index: torch.zeros(config.routing.num_experts, dtype=torch.int64)
            for index in {*range(config.num_layers)} - {*own} - config.dense_layers
            if self.expert_slots and config.routing
        }
        self.mtp = None
        if config.mtp:
            shared = self.embedding, self.rotary, self.logits, self.kv_shape()
            self.mtp = MultiTokenPrediction(config, weights, *shared)

    def kv_shapes(self, kv_cache_dtype: KVCacheDtype = "auto", block_size: int = 16) -> list[KVShape | RecurrentShape]:
        """See `ModelSizes`. All stages have blocks of the same size, for the most layers of a group in any stage."""
        if self.stages == 1:
            return super().kv_shapes(kv_cache_dtype, block_size)
        parts = [layers_of(stage, self.stages, self.config.num_layers) for stage in range(self.stages)]
        most = [max(len(group.within(part).layers) for part in parts) for group in self.config.groups]
        return [
            self._kept(group, layers, kv_cache_dtype, block_size)
            for group, layers in zip(self.config.groups, most, strict=True)
        ]

    @property
    def shared_bytes(self) -> int:
        """Size of all memory that the ranks of a machine share for collectives."""
        parts = self.stages * self.replicas
        return self.ranks.shared_bytes + (parts * self.stage.shared_bytes if parts > 1 else 0)

    @property
    def table_bytes(self) -> int:
        """Size of the embedding tables in a GPU's memory besides `weight_bytes`. On a CPU they are mapped files."""
        if self.kernels.device.type == "cpu":
            return 0
        found = [self.embedding.weight, *([self._per_layer_inputs.table.weight] if self._per_layer_inputs else [])]
        tables = [table for table in found if isinstance(table, torch.Tensor)]  # as all are on a GPU
        size = sum(table.nbytes for table in tables)
        if self._head_in_table:
            size -= self.head.product.out_features * self.embedding.hidden_size * tables[0].itemsize
        return size

    @property
    def expert_loads(self) -> dict[int, torch.Tensor]:
        """By layer number, the number of tokens that each expert has processed: [experts] int64."""
        own = {index: layer.load for index, layer in self.expert_layers.items()}
        return dict(sorted((own | self.loads_elsewhere).items()))

    @property
    def precision(self) -> str:
        """A description of its precision, which identifies its numerical results."""
        name = str(self.dtype).removeprefix("torch.")
        if self.config.rope.is_long:
            name += ", long rotary factors"
        if self.quantization is None:
            return name
        return f"{name}, weights {self.quantization}, activations int8"

    def new_caches(
        self,
        num_blocks: Sequence[int],
        block_size: int,
        kv_cache_dtype: KVCacheDtype = "auto",
        draft_kv: KVShape | None = None,
    ) -> list[KVCache]:
        """Allocate `num_blocks` blocks for each KV group; raises what `KVCache` does.

        Args:
            draft_kv: KV of its draft model, in the blocks of the first group, which keeps most.
        """
        caches: list[KVCache] = []
        for count, shape in zip(num_blocks, self.kv_shapes(kv_cache_dtype, block_size), strict=True):
            if isinstance(shape, RecurrentShape):
                caches.append(shape.cache(count, self.kernels.device))
                caches[-1].pulse = caches[0].pulse
                continue
            size = count, shape.layers, shape.kv_heads, shape.head_dim, block_size
            stored = shape.dtype, kv_cache_dtype, self.kernels.device, shape.sides
            caches.append(KVCache(*size, *stored, None if caches else draft_kv))
            caches[-1].pulse = caches[0].pulse
        return caches

    def forward(
        self, batches: Sequence[RaggedBatch], caches: Sequence[KVCache], aux: AuxHiddenStates | None = None
    ) -> torch.Tensor:
        """Run a step: store its keys and values, and return the hidden states after the last norm.

        Shape: [tokens, hidden], in the model's data type.

        Args:
            batches: the step, for each group; they differ only in slots and block tables.
            caches: of each group.
            aux: collects the inputs of some layers, if needed.
        """
        x, residual = self.run_layers(None, self.embedding(batches[0].token_ids), batches, caches, aux)
        return self.norm(residual) if x is None else self.norm.with_residual(x, residual)[0]

    def run_layers(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        batches: Sequence[RaggedBatch],
        caches: Sequence[KVCache],
        aux: AuxHiddenStates | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run a step through this rank's layers, see `forward`: (x, residual) [tokens, hidden] before and after."""
        tables = [rotary.tables(batches[0].positions) for rotary in self._rotaries]
        of_layers: torch.Tensor | None = None
        if self._per_layer_inputs is not None:  # only without stages, so the residual is the embedding
            of_layers = self._per_layer_inputs(batches[0].token_ids, residual)
        for index, (layer, rotary) in enumerate(zip(self.layers, self._rotary_of, strict=True), start=self._first):
            if aux is not None:
                aux.take(index, x, residual)
            group, _ = self._places[index]
            own = None if of_layers is None else of_layers[:, index]
            x, residual = layer(x, residual, tables[rotary], caches[group], batches[group], own)
        return x, residual

    def without_rows(self) -> None:
        """A step without tokens of this replica: take part in the other replicas' exchanges of experts."""
        nothing = torch.empty(0, self.config.layer.hidden_size, dtype=self.dtype)
        for experts in self.expert_layers.values():
            experts.without_rows(nothing)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [rows, vocabulary] fp32 of rows [rows, hidden] of `forward`."""
        logits = self.head(hidden, torch.float32)
        logits = logits if self._logits_divisor == 1.0 else logits.div_(self._logits_divisor)
        return logits if self._logits_cap is None else self.kernels.soft_cap(logits, self._logits_cap)


def _embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    scale = config.embedding_scale
    return float(torch.tensor(scale, dtype=dtype)) if config.embedding_scale_rounded else scale


def _places_of(own: range, groups: Sequence[LayerGroup], config: DecoderConfig) -> dict[int, tuple[int, int]]:
    """By layer: the group whose cache it uses, and its index in there."""
    places = {index: (number, place) for number, group in enumerate(groups) for place, index in enumerate(group.layers)}
    for index in own:
        source = config.layer_at(index).kv_source
        if source is not None:
            places[index] = places[source]
        places.setdefault(index, (0, 0))  # a layer without attention, which uses no cache
    return places


def _per_layer_inputs(config: DecoderConfig, weights: Weights) -> PerLayerInputs:
    layer = config.layer
    table = weights.embedding("model.embed_tokens_per_layer", scale_of_table(layer.per_layer_input))
    norm = weights.norm("model.per_layer_projection_norm", eps_of_norm(layer.rms_norm_eps, layer.hidden_size))
    return PerLayerInputs(table, weights.linear("model.per_layer_model_projection"), norm)


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of one stage. Stages differ by at most one layer, and the first one never has fewer."""
    return range(*(-(-layers * place // stages) for place in (stage, stage + 1)))


def stage_of(layer: int, stages: int, layers: int) -> int:
    """The stage that has a layer."""
    return next(stage for stage in range(stages) if layer in layers_of(stage, stages, layers))
