"""Multi-head latent attention over the paged cache (https://arxiv.org/abs/2405.04434), in plain torch; the definition.

The cache holds one plane a layer: per token its normalized compressed vector, `latent` numbers, and behind it the
rotated key that all heads share, `rope` numbers. In the absorbed form, queries have been mapped into the latent space,
so a head's query is [latent + rope] wide, the row of the cache is its key, and the row's first `latent` numbers its value.
"""

from __future__ import annotations

import torch

from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch


def store_latent(
    compressed: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
) -> None:
    """Normalize the compressed vector, turn the shared key, and write both into the cache's slots.

    Args:
        compressed: [tokens, latent + rope]: `kv_a_proj_with_mqa`'s result.
        norm: [latent], weight of `kv_a_layernorm`.
        tables: cos and sin of the step's positions, [tokens, rope / 2] fp32 each. Dimensions 2i and 2i + 1 turn
            together (interleaved), and lie there side by side in the cache too.
    """
    raise NotImplementedError


def rotate_interleaved(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn queries x [tokens, heads, rope], any strides, as `store_latent` turns keys. Returns them contiguous."""
    raise NotImplementedError


def latent_attention(
    q: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float
) -> torch.Tensor:
    """Causal attention in the absorbed form.

    Args:
        q: [tokens, heads, latent + rope], contiguous.

    Returns [tokens, heads, latent] in q's data type. A row's bits depend on nothing but the row and its context: key
    tiles lie at constant absolute positions (see `attention_plan`).
    """
    raise NotImplementedError
