"""DeepSeek V2 and V2-Lite, as in transformers' `modeling_deepseek_v2.py` (https://arxiv.org/abs/2405.04434).

Special: latent attention, with compressed queries (V2) or without (V2-Lite: `q_lora_rank` is null), and rotary pairs
that lie side by side; with yarn, `mscale_all_dim` scales the softmax. From layer `first_k_dense_replace` on, the MLP is
`n_routed_experts` experts and `n_shared_experts` that every token goes through; a softmax scores them, and
`topk_method` chooses among all (`greedy`) or within the `topk_group` groups with the best experts
(`group_limited_greedy`). `norm_topk_prob`, which no published checkpoint sets and transformers ignores, divides the
weights by their sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.layers.experts import ExpertsConfig, expert_layers
from quire.layers.latent import LatentConfig, LatentDecoderLayer, LatentLayerConfig, may_expand
from quire.layers.rotary import RopeConfig, RotaryEmbedding, yarn_mscale
from quire.models.config import MAX_LAYERS, DecoderConfig, read_decoder_config, read_num_layers, read_routing
from quire.models.fields import Fields
from quire.models.model import Model, Taps
from quire.models.weights import Weights
from quire.ops import KVCache, RaggedBatch
from quire.ops.experts import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """What config.json says about DeepSeek V2 or V3: see `DecoderConfig`.

    Attributes:
        mtp: whether the layer that predicts one token more, behind the last one, is part of the model.
    """

    layer: LatentLayerConfig
    mtp: bool = False

    def layer_at(self, index: int) -> LatentLayerConfig:
        """See `DecoderConfig`."""
        return replace(self.layer, experts=None) if index in self.dense_layers else self.layer

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `DecoderConfig`."""
        shapes = DecoderConfig.tensor_shapes(self)
        if self.mtp:
            hidden, prefix = self.layer.hidden_size, f"model.layers.{self.num_layers}."
            shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
            shapes |= {prefix + name: shape for name, shape in self.layer.tensor_shapes().items()}
        return shapes


class DeepseekV2(Model):
    """DeepSeek V2: see the head of this file."""

    kv_sides = 1

    def __init__(self, config: DeepseekConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        latent = config.layer.latent
        self.kv_saving = config.layer.num_heads * (latent.qk_head_dim + latent.v_head_dim) / latent.row
        self.attention_width = latent.row + latent.kv_lora_rank
        # The largest tensor first: memory's peak is then not the whole model and once more this.
        self.head = weights.linear("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
        self.embedding = weights.embedding("model.embed_tokens")
        self.rotary = RotaryEmbedding(config.rope, weights.kernels.device)
        self.layers = [
            LatentDecoderLayer(config.layer_at(index), weights.under(f"model.layers.{index}."), index)
            for index in range(config.num_layers)
        ]
        self.norm = weights.norm("model.norm", config.layer.rms_norm_eps)
        self.expert_layers = expert_layers(layer.mlp for layer in self.layers)
        if may_expand(weights.kernels):  # keys are restored with weights of their own
            keys = config.layer.num_heads * latent.qk_nope_head_dim * latent.kv_lora_rank
            self.weight_bytes += config.num_layers * keys * self.dtype.itemsize

    @staticmethod
    def read_config(fields: Fields, generation: Fields) -> DeepseekConfig:
        """Reads config.json and generation_config.json; raises ModelConfigError."""
        method = fields.choice("topk_method", {"greedy", "group_limited_greedy"}, default="greedy")
        fields.choice("scoring_func", {"softmax"}, default="softmax")
        routing = read_routing(
            fields,
            "n_routed_experts",
            group_score="max" if method == "group_limited_greedy" else None,
            normalize=fields.flag("norm_topk_prob", default=False),
            scale=fields.number("routed_scaling_factor", default=1.0),
        )
        return read_deepseek_config(fields, generation, routing, default_first_dense=0)

    def forward(self, batch: RaggedBatch, kv: KVCache, taps: Taps | None = None) -> torch.Tensor:
        """See Model."""
        tables = self.rotary.tables(batch.positions)
        x, residual = None, self.embedding(batch.token_ids)  # [tokens, hidden]
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.take(index, x, residual)
            x, residual = layer(x, residual, tables, kv, batch)
        return self.norm(residual) if x is None else self.norm.with_residual(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self.head(hidden, torch.float32)


def read_deepseek_config(
    fields: Fields, generation: Fields, routing: Routing, *, default_first_dense: int, selection_bias: bool = False
) -> DeepseekConfig:
    """Reads the fields that V2 and V3 share; the other arguments say what is special.

    Args:
        default_first_dense: `first_k_dense_replace`, where the field is absent.
        selection_bias: see `ExpertsConfig`.

    Raises:
        ModelConfigError: a field is missing, of the wrong type, or asks for what is not supported.
    """
    num_layers = read_num_layers(fields)
    fields.refuse("moe_layer_freq", (1,), "dense layers between layers with experts")
    fields.refuse("mlp_bias", (False,), "biases of the MLP")
    fields.refuse("sliding_window", (), "latent attention has no sliding window")
    first_dense = fields.integer("first_k_dense_replace", default=default_first_dense, min=0, max=MAX_LAYERS)
    inner, rotating = fields.integer("moe_intermediate_size"), fields.integer("qk_rope_head_dim")
    fields.refuse("head_dim", (rotating,), f"a head_dim other than qk_rope_head_dim ({rotating})")
    base = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        default_head_dim=rotating,
        experts=ExpertsConfig(
            routing,
            inner,
            shared_intermediate_size=inner * fields.integer("n_shared_experts", default=0, min=0),
            selection_bias=selection_bias,
        ),
        dense_layers=frozenset(range(min(first_dense, num_layers))),
    )
    if base.layer.num_kv_heads != base.layer.num_heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads ({base.layer.num_heads}): all share one latent")
    latent = _read_latent(fields, base.rope)
    layer = base.layer
    return DeepseekConfig(
        layer=LatentLayerConfig(
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            num_heads=layer.num_heads,
            num_kv_heads=1,
            head_dim=latent.row,
            rms_norm_eps=layer.rms_norm_eps,
            experts=layer.experts,
            latent=latent,
        ),
        vocab_size=base.vocab_size,
        windows=base.windows,
        rope=base.rope,
        max_position_embeddings=base.max_position_embeddings,
        tie_word_embeddings=base.tie_word_embeddings,
        eos_token_ids=base.eos_token_ids,
        dense_layers=base.dense_layers,
    )


def _read_latent(fields: Fields, rope: RopeConfig) -> LatentConfig:
    still = fields.integer("qk_nope_head_dim")
    scale = (still + rope.head_dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return LatentConfig(
        q_lora_rank=fields.integer("q_lora_rank") if "q_lora_rank" in fields else None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=still,
        qk_rope_head_dim=rope.head_dim,
        v_head_dim=fields.integer("v_head_dim"),
        bias=fields.flag("attention_bias", default=False),
        scale=scale,
    )
