"""Rows and states of recurrent layers, in blocks, and the gated delta rule over them (plain torch).

The gated delta rule (https://arxiv.org/abs/2412.06464) keeps a matrix S [key_dim, value_dim] a head, which each token
lets decay and corrects:

    S_i = exp(g_i) S_(i-1) + k_i u_i^T,  u_i = beta_i (v_i - exp(g_i) S_(i-1)^T k_i),  o_i = S_i^T q_i

In Kimi delta attention (https://arxiv.org/abs/2510.26692) g_i is a vector, of the key's width: each row of S decays by
itself, and what is written exp(G) (k . k) below is a sum over the key's numbers, each with its own factor.

It is computed in another form, which reads a state and writes none: with S0, the state at the last position that is a
multiple of `TILE`, and G_i, the sum of g since then,

    u_i = beta_i (v_i - exp(G_i) S0^T k_i - sum_(j<i) exp(G_i - G_j) (k_i . k_j) u_j)
    o_i = exp(G_i) S0^T q_i + sum_(j<=i) exp(G_i - G_j) (q_i . k_j) u_j

so that what a token needs are S0 and the rows (k, u, G) of the tokens before it in its tile. Tiles lie at absolute
positions: a row's sums are the same whatever chunks a prompt comes in, and whatever was drafted and rejected, since
rows after a token are never read and are written again before they are. At the end of a tile its rows are folded into
the next S0. (Known as ReplaySSM, https://dao-lab.ai/blog/2026/replayssm, with tiles that begin where decoding did.)

Rows and states lie in blocks, as keys and values do: a block has a row for each of its tokens, and the state after its
last one. See `core.kv_group` for which blocks are there; of those that are not (block 0), nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from quire.ops.ragged import RaggedBatch
from quire.ops.recurrent import Part, RecurrentCache, RecurrentShape, check_no_trees, convolved

TILE = 16
"""Tokens whose rows lie between two states. Changing it changes bits."""

L2_EPS = 1e-6
"""Added to the sum of a key's or query's squares, before its root divides them."""


@dataclass(frozen=True, slots=True)
class StateShape(RecurrentShape):
    """What a block of recurrent layers holds, a layer after another: the state, then its rows.

    Attributes:
        key_heads, key_dim: heads of queries and keys, and their width.
        heads, value_dim: the same of values; each key head serves heads / key_heads values next to each other.
        taps: tokens that the convolution before the rule sees, its own included.
        dtype: of that convolution's inputs; all else is fp32.
        decay_dim: numbers by which a head's state decays: 1, or key_dim, one for each of its rows.
    """

    layers: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: torch.dtype
    block_size: int
    decay_dim: int = 1

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def rates(self) -> int:
        """Columns of what decays and betas are made of."""
        return self.heads * (self.decay_dim + 1)

    @property
    def parts(self) -> list[Part]:
        """States, keys, updates, decays, inputs."""
        wide, size = torch.float32, self.block_size
        keys, values = (self.key_heads * self.key_dim, self.key_heads), (self.heads * self.value_dim, self.heads)
        return [
            Part(wide, (self.heads, self.key_dim, self.value_dim)),
            Part(wide, (self.key_heads, size, self.key_dim), 1),
            Part(wide, (self.heads, size, self.value_dim), 1),
            Part(wide, (self.heads, size, self.decay_dim), 1),
            Part(self.dtype, (size, self.channels), 0, 1, (keys, keys, values)),
        ]

    def cache(self, num_blocks: int, device: torch.device | str = "cpu") -> StateCache:
        """See `RecurrentShape`."""
        return StateCache(num_blocks, self, device)


class StateCache(RecurrentCache):
    """The device's blocks of layers that keep a matrix a head.

    Attributes:
        widths: columns of what the rule reads of a token: see `delta_net`.
        states: [num_blocks, layers, heads, key_dim, value_dim] fp32, after a block's last token.
        keys: [num_blocks, layers, key_heads, block_size, key_dim] fp32.
        updates: [num_blocks, layers, heads, block_size, value_dim] fp32, u above.
        decays: [num_blocks, layers, heads, block_size, decay_dim] fp32, G above.
        inputs: [num_blocks, layers, block_size, channels] in the model's data type.
    """

    def __init__(self, num_blocks: int, shape: StateShape, device: torch.device | str = "cpu") -> None:
        """Raises what `RecurrentCache` does."""
        super().__init__(num_blocks, shape, device)
        self.states_shape = shape
        self.widths = shape.channels + shape.heads * shape.value_dim, shape.rates
        self.states, self.keys, self.updates, self.decays, self.inputs = self.views


Gate = Literal["silu", "sigmoid"]


class DeltaNetWeights(NamedTuple):
    """What a layer's rule needs beside its inputs, all fp32.

    Attributes:
        conv: [taps, channels], the last tap is a token's own.
        decay: [heads * decay_dim], negative: g = decay * softplus(a + shift).
        shift: [heads * decay_dim].
        norm: [value_dim], weight of the RMS norm of each head's result.
        eps: of that.
        gate: what the gate goes through before it multiplies the result.
    """

    conv: torch.Tensor
    decay: torch.Tensor
    shift: torch.Tensor
    norm: torch.Tensor
    eps: float
    gate: Gate = "silu"


def delta_net(
    x: torch.Tensor, ab: torch.Tensor, weights: DeltaNetWeights, cache: StateCache, batch: RaggedBatch, layer: int
) -> torch.Tensor:
    """Convolves, applies the gated delta rule, normalizes and gates.

    Args:
        x: [tokens, channels + heads * value_dim]: queries, keys and values before the convolution, and the gate.
        ab: [tokens, heads * (decay_dim + 1)] fp32: what decays are made of, then what betas are.

    Returns:
        [tokens, heads * value_dim] in x's data type.

    Raises:
        ValueError: see `check_batch`.
    """
    check_batch(x, ab, cache, batch, layer)
    shape = cache.states_shape
    out = torch.empty(len(x), shape.heads, shape.value_dim)
    spans = zip(batch.row_starts, batch.row_starts[1:], batch.context_lens, batch.block_tables.tolist(), strict=False)
    for begin, end, context, table in spans:
        rows = slice(begin, end)
        inputs = x[rows, : shape.channels]
        made = _prepared(inputs, ab[rows], weights, cache, table, context - (end - begin), layer)
        _span(made, out[rows], cache, table, context - (end - begin), layer)
    scale = out.square().mean(-1, keepdim=True).add_(weights.eps).rsqrt_()
    gate = x[:, shape.channels :].float().view_as(out)
    out = out * scale * weights.norm * _sigmoid(gate)
    return (out * gate if weights.gate == "silu" else out).flatten(1).to(x.dtype)


def check_batch(x: torch.Tensor, ab: torch.Tensor, cache: StateCache, batch: RaggedBatch, layer: int) -> None:
    """Whether a step fits the cache.

    Raises:
        ValueError: it does not, or the batch has trees, whose rows do not continue one another.
    """
    check_no_trees(batch)
    if (x.shape[1], ab.shape[1]) != cache.widths or len(x) != len(ab) or not 0 <= layer < cache.layers:
        raise ValueError(
            f"inputs {list(x.shape)} and {list(ab.shape)} for layer {layer} do not fit states of {cache.layers} "
            f"layers, whose inputs have {cache.widths[0]} and {cache.widths[1]} columns"
        )


class _Rows(NamedTuple):
    """A span's rows, fp32: q, k [tokens, key_heads, key_dim], v [tokens, heads, value_dim], beta [tokens, heads], g
    [tokens, heads, decay_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    g: torch.Tensor


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _prepared(
    x: torch.Tensor,
    ab: torch.Tensor,
    weights: DeltaNetWeights,
    cache: StateCache,
    table: list[int],
    start: int,
    layer: int,
) -> _Rows:
    """What the rule reads; inputs are stored for the convolutions to come."""
    shape, count = cache.states_shape, len(x)
    total = convolved(x, weights.conv, None, cache.inputs[:, layer], table, start)
    total = total * _sigmoid(total)
    keys = shape.key_heads * shape.key_dim
    q, k, v = (part.contiguous() for part in torch.split(total, [keys, keys, shape.heads * shape.value_dim], dim=1))
    q, k = (_unit(each.view(count, shape.key_heads, shape.key_dim)) for each in (q, k))
    a, b = (part.contiguous() for part in torch.split(ab.float(), [shape.heads * shape.decay_dim, shape.heads], dim=1))
    a = a + weights.shift
    softplus = a.clamp(min=0) + torch.log1p(torch.exp(-a.abs()))
    v = v.view(count, shape.heads, shape.value_dim)
    g = (weights.decay * softplus).view(count, shape.heads, shape.decay_dim)
    return _Rows(q * shape.key_dim**-0.5, k, v, _sigmoid(b), g)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _span(rows: _Rows, out: torch.Tensor, cache: StateCache, table: list[int], start: int, layer: int) -> None:
    """The rule over one span; `out` [tokens, heads, value_dim] is filled."""
    shape, size = cache.states_shape, cache.block_size
    each = shape.heads // shape.key_heads
    state = torch.zeros(shape.heads, shape.key_dim, shape.value_dim)
    first = start // size * size
    if first:
        state.copy_(cache.states[table[first // size - 1], layer])
    keys, updates = (torch.zeros(shape.heads, TILE, width) for width in (shape.key_dim, shape.value_dim))
    sums = torch.zeros(shape.heads, TILE, shape.decay_dim)
    for position in range(first, start + len(out)):
        place, block, offset = position % TILE, table[position // size], position % size
        if position < start:
            keys[:, place] = cache.keys[block, layer, :, offset].repeat_interleave(each, 0)
            updates[:, place] = cache.updates[block, layer, :, offset]
            sums[:, place] = cache.decays[block, layer, :, offset]
        else:
            row = position - start
            q, k = (part[row].repeat_interleave(each, 0) for part in (rows.q, rows.k))  # [heads, key_dim]
            sums[:, place] = rows.g[row] + (sums[:, place - 1] if place else 0)
            total = sums[:, place]  # [heads, decay_dim]
            before = keys[:, :place] * torch.exp(total.unsqueeze(1) - sums[:, :place])  # [heads, rows before, key_dim]
            decay = torch.exp(total)
            seen = _weighted((before * k.unsqueeze(1)).sum(-1), updates[:, :place])
            update = rows.v[row] - (state * (decay * k).unsqueeze(2)).sum(1) - seen
            update *= rows.beta[row].unsqueeze(1)
            keys[:, place], updates[:, place] = k, update
            read = _weighted((before * q.unsqueeze(1)).sum(-1), updates[:, :place])
            own = (k * q).sum(-1, keepdim=True) * update
            out[row] = (state * (decay * q).unsqueeze(2)).sum(1) + read + own
            if block:
                cache.keys[block, layer, :, offset] = rows.k[row]
                cache.updates[block, layer, :, offset], cache.decays[block, layer, :, offset] = update, total
        if place == TILE - 1:
            left = keys * torch.exp(sums[:, -1:] - sums)  # [heads, TILE, key_dim]
            state *= torch.exp(sums[:, -1]).unsqueeze(2)
            for j in range(TILE):
                state += left[:, j].unsqueeze(2) * updates[:, j].unsqueeze(1)
            if block and (position + 1) % size == 0 and position >= start:
                cache.states[block, layer] = state


def _weighted(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The sum of rows [heads, count, value_dim] with weights [heads, count], one after another."""
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for j in range(rows.shape[1]):
        total = total + weights[:, j : j + 1] * rows[:, j]
    return total
