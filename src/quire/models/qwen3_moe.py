"""Qwen3-MoE, as in transformers' `modeling_qwen3_moe.py` (https://arxiv.org/abs/2505.09388).

Special: the MLP of most layers is experts, `num_experts_per_tok` of `num_experts` for each token, scored by a softmax
over all of them; layers in `mlp_only_layers`, and those that `decoder_sparse_step` passes over, are dense. Each head's
query and key are normalized before they are rotated; `attention_bias` is for q, k, v and the output alike. With
`use_sliding_window`, every layer sees the same window.
"""

from __future__ import annotations

from quire.layers.experts import ExpertsConfig
from quire.models.config import (
    EXPERT_COUNTS,
    MAX_CONTEXT,
    MAX_LAYERS,
    DecoderConfig,
    read_decoder_config,
    read_num_layers,
    read_routing,
)
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    window = None
    if fields.flag("use_sliding_window", default=False) and "sliding_window" in fields:
        window = fields.integer("sliding_window", max=MAX_CONTEXT)
    kind = "full_attention" if window is None else "sliding_attention"
    fields.refuse("layer_types", ([kind] * num_layers,), "all of Qwen3-MoE's layers see the same window")
    count_field = next((name for name in EXPERT_COUNTS if name in fields), EXPERT_COUNTS[0])
    routing = read_routing(fields, count_field, normalize=fields.flag("norm_topk_prob", default=False))
    bias = fields.flag("attention_bias", default=False)
    return read_decoder_config(
        fields,
        generation,
        windows=(window,) * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        experts=ExpertsConfig(routing, fields.integer("moe_intermediate_size")),
        dense_layers=read_sparse_step(fields, num_layers),
    )


def read_sparse_step(fields: Fields, num_layers: int) -> frozenset[int]:
    """The layers without experts: every `decoder_sparse_step`-th has them, the first one being that many layers in.
    Raises ModelConfigError."""
    step = fields.integer("decoder_sparse_step", default=1, max=MAX_LAYERS)
    passed_over = {index for index in range(num_layers) if (index + 1) % step}
    return frozenset(passed_over.union(fields.integers("mlp_only_layers", below=num_layers)))
