"""Multi-head latent attention over the paged cache (https://arxiv.org/abs/2405.04434), in plain torch; the definition.

The cache holds one plane a layer: per token its normalized compressed vector, `latent` numbers, and after it the
rotated key that all heads share, `rope` numbers. In the absorbed form, queries have been mapped into the latent space,
so a head's query is [latent + rope] wide, the row of the cache is its key, and the row's first `latent` numbers its
value.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.ops import elementwise
from quire.ops.attention import paged_attention
from quire.ops.kv_cache import KEY, VALUE, KVCache, quantize
from quire.ops.ragged import RaggedBatch


def store_latent(
    compressed: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    index_keys: torch.Tensor | None = None,
) -> None:
    """Normalize the compressed vector, turn the shared key, and write both into the cache's slots.

    A quantized cache has one scale for the whole row, compressed vector and key together.

    Args:
        compressed: [tokens, latent + rope]: `kv_a_proj_with_mqa`'s result.
        norm: [latent], weight of `kv_a_layernorm`.
        tables: cos and sin of the step's positions, [tokens, rope / 2] fp32 each. Dimensions 2i and 2i + 1 turn
            together (interleaved), and lie there side by side in the cache too.
        index_keys: [tokens, ...], what lies behind them in the rows of sparse attention; None: nothing.
    """
    latent = len(norm)
    vector = elementwise.rms_norm(compressed[:, :latent], norm, eps)
    key = rotate_interleaved(compressed[:, latent:].unsqueeze(1), tables).squeeze(1)
    parts = [vector, key] if index_keys is None else [vector, key, index_keys]
    row = torch.cat(parts, dim=1)  # [tokens, latent + rope (+ index key)]
    block, offset = batch.slots // kv.block_size, batch.slots % kv.block_size
    if kv.scales is None:
        kv.numbers[block, layer, 0, KEY, offset] = row
        return
    codes, scales = quantize(row, kv.stored_dtype)
    kv.numbers.view(torch.uint8)[block, layer, 0, KEY, offset] = codes.view(torch.uint8)
    kv.scales[block, layer, 0, KEY, offset] = scales


def rotate_interleaved(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn queries x [tokens, heads, rope], any strides, as `store_latent` turns keys. Returns them contiguous.

    Computed in fp32 and rounded once.
    """
    cos, sin = (table.unsqueeze(1) for table in tables)  # [tokens, 1, rope / 2]
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([(even * cos).sub_(odd * sin), (odd * cos).add_(even * sin)], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def latent_attention(
    q: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
) -> torch.Tensor:
    """Causal attention in the absorbed form.

    It is ordinary attention with one key head, over a copy of the layer's rows that the batch reads, in which each
    row stands once as a key and once more, its key part zeroed, as a value.

    Args:
        q: [tokens, heads, latent + rope], contiguous. What lies behind so many numbers of a row is not read.
        width: `latent`, the numbers of a row that are its value.

    Returns [tokens, heads, latent], contiguous, in q's data type. A row's bits depend on nothing but the row and its
    context: key tiles lie at constant absolute positions (see `attention_plan`).
    """

    def make() -> tuple[KVCache, RaggedBatch, torch.Tensor]:
        blocks, names = torch.unique(batch.block_tables, return_inverse=True)
        dtype = kv.dtype if kv.scales is None else torch.float32  # code times scale would be rounded in kv.dtype
        wide = KVCache(len(blocks) + 1, 1, 1, q.shape[2], kv.block_size, dtype)
        return wide, replace(batch, block_tables=names), blocks

    wide, renamed, blocks = batch.once(("latent", q.shape[2], id(kv)), make)
    rows = kv.numbers[blocks, layer, 0, KEY, :, : q.shape[2]]  # [blocks, block_size, latent + rope]
    if kv.scales is not None:
        rows = rows.float() * kv.scales[blocks, layer, 0, KEY].unsqueeze(-1)
    wide.numbers[:-1, 0, 0, KEY] = rows
    wide.numbers[:-1, 0, 0, VALUE, :, :width] = rows[..., :width]
    return paged_attention(q, wide, renamed, 0, scale, None)[..., :width].contiguous()
