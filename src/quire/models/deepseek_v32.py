"""DeepSeek V3.2 and V3.2-Exp, as in transformers' `modeling_deepseek_v32.py` (https://arxiv.org/abs/2512.02556).

Special, compared with DeepSeek V3: attention sees only the `index_topk` positions that an indexer chooses.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.sparse_latent import IndexConfig
from quire.models import deepseek_v3
from quire.models.config import MAX_CONTEXT, MAX_HEADS, DecoderConfig
from quire.models.fields import Fields

KIND = "indexed_attention"


def read_config(
    fields: Fields,
    generation: Fields,
    *,
    default_eps: float = 1e-6,
    default_heads: int = 64,
    interleaved: bool = False,
) -> DecoderConfig:
    """Reads config.json and generation_config.json; raises ModelConfigError.

    Args:
        default_eps, default_heads: rms_norm_eps and index_n_heads where the field is absent.
        interleaved: see `IndexConfig`.
    """
    fields.refuse("indexer_rope_interleave", (interleaved,), "an indexer that turns other pairs than its family's")
    if {*(fields.strings("layer_types") or ())} - {KIND}:
        raise fields.error("layer_types", f"absent, or {KIND!r} for each layer")
    config = deepseek_v3.read_config(fields, generation, default_eps=default_eps)
    latent = config.layer.latent
    if latent is None or latent.q_lora_rank is None:
        raise fields.error("q_lora_rank", "a width: the indexer's queries are made of the compressed ones")
    index = IndexConfig(
        heads=fields.integer("index_n_heads", default=default_heads, max=MAX_HEADS),
        head_dim=fields.integer("index_head_dim", default=128, max=MAX_HEADS),
        top=fields.integer("index_topk", default=2048, max=MAX_CONTEXT),
        interleaved=interleaved,
    )
    if index.head_dim < latent.qk_rope_head_dim:
        raise fields.error("index_head_dim", f"at least qk_rope_head_dim ({latent.qk_rope_head_dim})")
    latent = replace(latent, index_key=index.head_dim)
    return replace(config, layer=replace(config.layer, head_dim=latent.row, latent=latent, index=index))
