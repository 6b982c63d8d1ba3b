"""Mamba 2's state-space layer over rows and states in blocks (plain torch): https://arxiv.org/abs/2405.21060.

It is the gated delta rule of `ops/states.py` without the correction, in the same blocks. A head keeps a matrix
S [state size, head size], which each token lets decay and adds to; B is its key, C its query, x its value:

    S_i = exp(g_i) S_(i-1) + B_i u_i^T,  g_i = A dt_i,  u_i = dt_i x_i,  y_i = S_i^T C_i + D x_i

What a token needs are S0, the state at the last position that is a multiple of `TILE`, and the rows (B, u, G) of the
tokens of its tile, G_i being the sum of g since then:

    y_i = exp(G_i) S0^T C_i + sum_(j<=i) exp(G_i - G_j) (C_i . B_j) u_j + D x_i

So its sums run over tiles at absolute positions, with a state in front, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.ops.ragged import RaggedBatch
from quire.ops.recurrent import check_no_trees, convolved
from quire.ops.states import TILE, StateCache


class MambaWeights(NamedTuple):
    """What a layer needs beside its inputs, all fp32.

    Attributes:
        conv: [taps, channels], the last tap is a token's own. bias: [channels], of the convolution.
        decay: [heads], A above, which is negative.
        shift: [heads]: dt is softplus(what is given + shift).
        skip: [heads], D above.
    """

    conv: torch.Tensor
    bias: torch.Tensor
    decay: torch.Tensor
    shift: torch.Tensor
    skip: torch.Tensor


def mamba(
    x: torch.Tensor, dt: torch.Tensor, weights: MambaWeights, cache: StateCache, batch: RaggedBatch, layer: int
) -> torch.Tensor:
    """Convolves, goes through the states, and gates: `y * silu(z)`.

    Args:
        x: [tokens, channels + heads * value_dim]: C, B and x before the convolution, and the gate z.
        dt: [tokens, heads] fp32.

    Returns:
        [tokens, heads * value_dim] fp32.

    Raises:
        ValueError: see `check_mamba`.
    """
    check_mamba(x, dt, cache, batch, layer)
    shape = cache.states_shape
    out = torch.empty(len(x), shape.heads, shape.value_dim)
    shifted = dt.float() + weights.shift
    steps = shifted.clamp(min=0) + torch.log1p(torch.exp(-shifted.abs()))
    spans = zip(batch.row_starts, batch.row_starts[1:], batch.context_lens, batch.block_tables.tolist(), strict=False)
    for begin, end, context, table in spans:
        start, span = context - (end - begin), slice(begin, end)
        inputs = x[span, : shape.channels]
        mixed = convolved(inputs, weights.conv, weights.bias, cache.inputs[:, layer], table, start)
        mixed = mixed / (1 + torch.exp(-mixed))
        _span(_rows(mixed, steps[span], weights, cache), out[span], cache, table, start, layer)
        values = mixed[:, 2 * shape.key_heads * shape.key_dim :].view(-1, shape.heads, shape.value_dim)
        out[span] += weights.skip.unsqueeze(1) * values
    gate = x[:, shape.channels :].float()
    return out.flatten(1) * (gate / (1 + torch.exp(-gate)))


def check_mamba(x: torch.Tensor, dt: torch.Tensor, cache: StateCache, batch: RaggedBatch, layer: int) -> None:
    """Whether a step fits the cache.

    Raises:
        ValueError: it does not, or the batch has trees, whose rows do not continue one another.
    """
    check_no_trees(batch)
    shape = cache.states_shape
    widths = shape.channels + shape.heads * shape.value_dim, shape.heads
    if (x.shape[1], dt.shape[1]) != widths or len(x) != len(dt) or not 0 <= layer < cache.layers:
        raise ValueError(
            f"inputs {list(x.shape)} and {list(dt.shape)} for layer {layer} do not fit the rows of {cache.layers} "
            f"layers, whose inputs have {widths[0]} and {widths[1]} columns"
        )


class _Rows(NamedTuple):
    """A span's rows, fp32: q, k [tokens, key_heads, key_dim], u [tokens, heads, value_dim], g [tokens, heads]."""

    q: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor


def _rows(mixed: torch.Tensor, steps: torch.Tensor, weights: MambaWeights, cache: StateCache) -> _Rows:
    shape = cache.states_shape
    width = shape.key_heads * shape.key_dim
    q, k, v = torch.split(mixed, [width, width, shape.heads * shape.value_dim], dim=1)
    q, k = (part.reshape(-1, shape.key_heads, shape.key_dim) for part in (q, k))
    u = v.view(-1, shape.heads, shape.value_dim) * steps.unsqueeze(2)
    return _Rows(q, k, u, weights.decay * steps)


def _span(rows: _Rows, out: torch.Tensor, cache: StateCache, table: list[int], start: int, layer: int) -> None:
    """One span; `out` [tokens, heads, value_dim] is filled."""
    shape, size = cache.states_shape, cache.block_size
    each = shape.heads // shape.key_heads
    state = torch.zeros(shape.heads, shape.key_dim, shape.value_dim)
    first = start // size * size
    if first:
        state.copy_(cache.states[table[first // size - 1], layer])
    keys = torch.zeros(shape.heads, TILE, shape.key_dim)
    updates, sums = torch.zeros(shape.heads, TILE, shape.value_dim), torch.zeros(shape.heads, TILE)
    for position in range(first, start + len(out)):
        place, block, offset = position % TILE, table[position // size], position % size
        if position < start:
            keys[:, place] = cache.keys[block, layer, :, offset].repeat_interleave(each, 0)
            updates[:, place] = cache.updates[block, layer, :, offset]
            sums[:, place] = cache.decays[block, layer, :, offset, 0]
        else:
            row = position - start
            keys[:, place] = rows.k[row].repeat_interleave(each, 0)
            updates[:, place] = rows.u[row]
            total = sums[:, place] = rows.g[row] + (sums[:, place - 1] if place else 0)
            if block:
                cache.keys[block, layer, :, offset] = rows.k[row]
                cache.updates[block, layer, :, offset], cache.decays[block, layer, :, offset, 0] = rows.u[row], total
            q = rows.q[row].repeat_interleave(each, 0)  # [heads, key_dim]
            out[row] = torch.exp(total).unsqueeze(1) * (state * q.unsqueeze(2)).sum(1)
            for j in range(place + 1):
                weight = (keys[:, j] * q).sum(-1) * torch.exp(total - sums[:, j])
                out[row] += weight.unsqueeze(1) * updates[:, j]
        if place == TILE - 1:
            left = torch.exp(sums[:, -1:] - sums)  # [heads, TILE]
            state *= torch.exp(sums[:, -1]).view(-1, 1, 1)
            for j in range(TILE):
                state += keys[:, j].unsqueeze(2) * (left[:, j : j + 1] * updates[:, j]).unsqueeze(1)
            if block and (position + 1) % size == 0 and position >= start:
                cache.states[block, layer] = state
