"""A loaded model: embedding, decoder layers, norm and head. Architectures differ in what `read_config` says alone."""

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
from quire.models.weights import EXPERT, Weights
from quire.ops import KVCache, KVShape, Quantization, RaggedBatch
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.quantized import BLOCK
from quire.ops.recurrent import RecurrentShape
from quire.parallel.group import Group, OneRank, Split, own_heads


class AuxHiddenStates:
    """What enters some layers in one step: the residual stream, as EAGLE-3 reads it.

    Args:
        layers: numbers of the layers.

    Attributes:
        taken: of each layer that the step has come to, [tokens, hidden].
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.taken: dict[int, torch.Tensor] = {}

    def take(self, layer: int, x: torch.Tensor | None, residual: torch.Tensor) -> None:
        """Told before each layer what it gets (see `DecoderLayer`), which the layer may overwrite: a copy is kept."""
        if layer in self.layers:
            self.taken[layer] = residual.clone() if x is None else x + residual

    def features(self) -> torch.Tensor:
        """Side by side in the order of `layers`: [tokens, len(layers) * hidden]."""
        return torch.cat([self.taken[layer] for layer in self.layers], dim=1)


class ModelSizes:
    """What memory and time need to know of a model.

    Args:
        config: what config.json says.
        dtype: of activations and KV, and of weights that are not quantized.
        quantization: how the linear layers are quantized; None: they are not.
        expands: latent attention keeps weights of its own to restore keys with.

    Attributes:
        vocab_size: ids run from 0 to vocab_size - 1.
        num_layers, num_kv_heads, head_dim: the shape of a token's KV; where layers differ, of most of them.
        windows: per layer, how many tokens back it sees, itself included; None where all.
        groups: layers that keep the same positions in the same shape, and so share blocks; most models have one group.
        kv_sides: see `LayerConfig`.
        kv_saving: how many times more numbers the keys and values of all heads would have than what is stored of a
            token; None: they are what is stored.
        attention_width: numbers of a key and its value that each query head is multiplied with, the mean of all layers.
        num_parameters: numbers in the checkpoint; a tied head is counted once.
        weight_bytes: what memory holds of them, and a step of many tokens reads. An embedding table is not among
            them: it stays a mapped file, of which a step reads a row a token. A tied one is there as the head. Nor is
            a table of per-layer inputs.
        expert_parameters, expert_bytes: those of them in experts that tokens are sent to, of which a step reads what
            some token chose; 0 where there are none.
        active_parameters: numbers that one token is computed with, and the embedding table.
        pair_share: operations of a token and one that it sees, in all layers without a window, as a share of those of
            a token's products with weights, the head's left out.
        causal: tokens see nothing that follows them; else prompts are computed whole, and embedded alone.
    """

    stage: Group = OneRank()

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, quantization: Quantization | None = None, expands: bool = False
    ) -> None:
        layer = config.layer
        self.config = config
        self.dtype, self.quantization, self.causal = dtype, quantization, layer.causal
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
        """What it keeps of each token in all layers, if each has the shape of most."""
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        return KVShape(*shape, self.dtype, "auto", self.kv_sides)

    def kv_shapes(self, kv_cache_dtype: KVCacheDtype = "auto", block_size: int = 16) -> list[KVShape | RecurrentShape]:
        """What each group keeps of a token; of recurrent layers, in blocks of so many tokens."""
        return [self._kept(group, len(group.layers), kv_cache_dtype, block_size) for group in self.groups]

    def _kept(
        self, group: LayerGroup, layers: int, kv_cache_dtype: KVCacheDtype, block_size: int
    ) -> KVShape | RecurrentShape:
        """What so many layers of a group keep of a token."""
        if group.recurrent and self.config.recurrent is not None:
            return self.config.recurrent.state_shape(layers, block_size, self.dtype, self.stage)
        layer = self.config.layer_at(group.layers[0])
        heads = own_heads(layer.num_kv_heads, self.stage)
        return KVShape(layers, heads, layer.head_dim, self.dtype, kv_cache_dtype, self.kv_sides)


class Model(ModelSizes):
    """A loaded causal language model.

    Args:
        config: what config.json says.
        weights: the checkpoint's.
        ranks: those that share it; None: it is whole.
        stage: those of them that share each of this one's layers; None: all do.
        stages: how many groups of layers there are, each of which another `stage` has. Where there is one, and not all
            share it, each stage is a replica: they have only experts in common.

    Attributes:
        kernels: the implementation that computes it.
        ranks, stage, stages: see above.
        replicas: how many groups of ranks have the same layers.
        rank_groups: in which this one meets others, the smallest first.
        embedding: its table of tokens.
        rotary: the rotary embedding of most layers.
        max_position_embeddings: the longest context, in tokens.
        eos_token_ids: ids that end a text.
        expert_layers: the layers' experts, by number of the layer; none where there are none.
        expert_slots: see `LayerWeights`.
        loads_elsewhere: see `expert_loads`; of other stages' layers, as they were last told.
        mtp: what predicts one token more; None unless it was asked for.
        architecture: its name in config.json.
        notes: what a user should know at start-up.
    """

    architecture: str = ""
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        ranks: Group | None = None,
        stage: Group | None = None,
        stages: int = 1,
    ) -> None:
        expands = config.layer.expands and may_expand(weights.kernels)
        super().__init__(config, weights.dtype, weights.quantization, expands)
        self.kernels, self.ranks = weights.kernels, ranks or OneRank()
        self.stage, self.stages = stage or self.ranks, stages
        self.replicas = self.ranks.size // self.stage.size // stages
        self.rank_groups = (self.ranks,) if self.stage is self.ranks else (self.stage, self.ranks)
        own = layers_of(self.ranks.rank // self.stage.size % stages, stages, config.num_layers)
        if self.stages > 1:
            self.num_layers = len(own)
            self.groups = tuple(group.within(own) for group in self.groups)
            for index in {*range(config.num_layers)} - {*own}:
                weights.elsewhere(f"model.layers.{index}.")
        self._first = own.start
        self.num_kv_heads = own_heads(self.num_kv_heads, self.stage)
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        # The largest tensor first: memory's peak is then not the whole model and once more this.
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.head = weights.linear(head, split=Split.VOCABULARY)
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
        self.mtp = MultiTokenPrediction(config, weights, self) if config.mtp else None

    def kv_shapes(self, kv_cache_dtype: KVCacheDtype = "auto", block_size: int = 16) -> list[KVShape | RecurrentShape]:
        """See `ModelSizes`. All stages have the same blocks, as large as the one with most layers of a group needs."""
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
        """Of the memory through which the ranks of a machine gather, all of it."""
        parts = self.stages * self.replicas
        return self.ranks.shared_bytes + (parts * self.stage.shared_bytes if parts > 1 else 0)

    @property
    def expert_loads(self) -> dict[int, torch.Tensor]:
        """By number, of each layer with experts: [experts] int64, tokens that each has got."""
        own = {index: layer.load for index, layer in self.expert_layers.items()}
        return dict(sorted((own | self.loads_elsewhere).items()))

    @property
    def precision(self) -> str:
        """How its numbers are held, in words: whatever changes them changes this."""
        name = str(self.dtype).removeprefix("torch.")
        if self.config.rope.is_long:
            name += ", long rotary factors"
        if self.quantization is None:
            return name
        return f"{name}, weights {self.quantization}, activations int8 by {BLOCK}"

    def new_caches(
        self,
        num_blocks: Sequence[int],
        block_size: int,
        kv_cache_dtype: KVCacheDtype = "auto",
        draft_kv: KVShape | None = None,
    ) -> list[KVCache]:
        """Blocks for the KV of each group, so many; raises what `KVCache` does.

        Args:
            draft_kv: of a model that drafts for it, in the blocks of the first group, which keeps most.
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
        """Runs a step: stores its keys and values, returns the hidden states after the last norm.

        Shape: [tokens, hidden], in the model's data type.

        Args:
            batches: the step, a group each: they differ in slots and block tables alone.
            caches: of each group.
            aux: filled with what enters some of the layers; None: they are not needed.
        """
        x, residual = self.run_layers(None, self.embedding(batches[0].token_ids), batches, caches, aux)
        return self.norm(residual) if x is None else self.norm.with_residual(x, residual)[0]

    def run_layers(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        batches: Sequence[RaggedBatch],
        caches: Sequence[KVCache],
        aux: AuxHiddenStates | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """A step through the layers that are here, see `forward`: (x, residual) [tokens, hidden] before and after."""
        tables = [rotary.tables(batches[0].positions) for rotary in self._rotaries]
        of_layers: torch.Tensor | None = None
        if self._per_layer_inputs is not None:  # then there are no stages: the stream is what was embedded
            of_layers = self._per_layer_inputs(batches[0].token_ids, residual)
        for index, (layer, rotary) in enumerate(zip(self.layers, self._rotary_of, strict=True), start=self._first):
            if aux is not None:
                aux.take(index, x, residual)
            group, _ = self._places[index]
            own = None if of_layers is None else of_layers[:, index]
            x, residual = layer(x, residual, tables[rotary], caches[group], batches[group], own)
        return x, residual

    def without_rows(self) -> None:
        """A step of which this replica computes nothing: it has a part in what others send to its experts."""
        nothing = torch.empty(0, self.config.layer.hidden_size, dtype=self.dtype)
        for experts in self.expert_layers.values():
            experts.without_rows(nothing)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden] of `forward`. Returns [rows, vocabulary] fp32."""
        logits = self.head(hidden, torch.float32)
        logits = logits if self._logits_divisor == 1.0 else logits.div_(self._logits_divisor)
        return logits if self._logits_cap is None else self.kernels.soft_cap(logits, self._logits_cap)


def _embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    scale = config.embedding_scale
    return float(torch.tensor(scale, dtype=dtype)) if config.embedding_scale_rounded else scale


def _places_of(own: range, groups: Sequence[LayerGroup], config: DecoderConfig) -> dict[int, tuple[int, int]]:
    """By layer: the group in whose cache it looks, and which layer of that it is."""
    places = {index: (number, place) for number, group in enumerate(groups) for place, index in enumerate(group.layers)}
    for index in own:
        source = config.layer_at(index).kv_source
        if source is not None:
            places[index] = places[source]
        places.setdefault(index, (0, 0))  # of a layer without attention, which looks at no cache
    return places


def _per_layer_inputs(config: DecoderConfig, weights: Weights) -> PerLayerInputs:
    layer = config.layer
    table = weights.embedding("model.embed_tokens_per_layer", scale_of_table(layer.per_layer_input))
    norm = weights.norm("model.per_layer_projection_norm", eps_of_norm(layer.rms_norm_eps, layer.hidden_size))
    return PerLayerInputs(table, weights.linear("model.per_layer_model_projection"), norm)


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of one stage: as many as of any other one, or one more; the first one never has fewer."""
    return range(*(-(-layers * place // stages) for place in (stage, stage + 1)))


def stage_of(layer: int, stages: int, layers: int) -> int:
    """The stage that has a layer."""
    return next(stage for stage in range(stages) if layer in layers_of(stage, stages, layers))
