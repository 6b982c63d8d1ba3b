"""Recurrent layers of every kind with random weights, and spans of requests through them, as an engine has them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu, softplus
from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from quire.ops import Kernels, RaggedBatch
from quire.ops.mamba import MambaWeights
from quire.ops.recurrent import RecurrentCache, RecurrentShape
from quire.ops.short_conv import ConvShape, ShortConvWeights
from quire.ops.states import DeltaNetWeights, Gate, StateCache, StateShape

Step = Callable[[Kernels, torch.Tensor, RecurrentCache, RaggedBatch], torch.Tensor]
LAYER = 1
"""Which of two layers is computed."""


class Kind(NamedTuple):
    """One kind of recurrent layer.

    Attributes:
        width: columns of its input.
        weights: of its kernel.
        step: that.
    """

    shape: RecurrentShape
    width: int
    weights: Any
    step: Step


def drawn(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=generator)


def delta_kind(shape: StateShape) -> Kind:
    """A gated delta net, or Kimi delta attention: of each token queries, keys, values, a gate, and rates."""
    generator, decays = torch.Generator().manual_seed(1), shape.heads * shape.decay_dim
    conv = 0.5 * drawn(generator, shape.taps, shape.channels)
    decay = -torch.exp(3 * drawn(generator, decays) - 2)  # heads that forget at once, and that hardly do
    gate: Gate = "silu" if shape.decay_dim == 1 else "sigmoid"
    shift, norm = drawn(generator, decays), 1 + drawn(generator, shape.value_dim)
    weights = DeltaNetWeights(conv, decay, shift, norm, 1e-6, gate)

    def step(kernels: Kernels, x: torch.Tensor, cache: RecurrentCache, batch: RaggedBatch) -> torch.Tensor:
        assert isinstance(cache, StateCache)
        x, rates = x[:, : -shape.rates], x[:, -shape.rates :].float()
        return kernels.delta_net(x, rates, weights, cache, batch, LAYER)

    return Kind(shape, shape.channels + shape.heads * shape.value_dim + shape.rates, weights, step)


def mamba_kind(shape: StateShape) -> Kind:
    """Mamba 2: of each token C, B, x and a gate, and what steps are made of."""
    generator, heads = torch.Generator().manual_seed(2), shape.heads
    conv, bias = 0.5 * drawn(generator, shape.taps, shape.channels), drawn(generator, shape.channels)
    decay = -torch.exp(3 * drawn(generator, heads) - 2)
    weights = MambaWeights(conv, bias, decay, drawn(generator, heads), drawn(generator, heads))

    def step(kernels: Kernels, x: torch.Tensor, cache: RecurrentCache, batch: RaggedBatch) -> torch.Tensor:
        assert isinstance(cache, StateCache)
        return kernels.mamba(x[:, :-heads].contiguous(), x[:, -heads:].float(), weights, cache, batch, LAYER)

    return Kind(shape, shape.channels + heads * shape.value_dim + heads, weights, step)


def conv_kind(shape: ConvShape) -> Kind:
    """A gated short convolution: of each token two gates and what is convolved."""
    generator = torch.Generator().manual_seed(1)
    weights = ShortConvWeights(drawn(generator, 4, shape.channels), drawn(generator, shape.channels))

    def step(kernels: Kernels, x: torch.Tensor, cache: RecurrentCache, batch: RaggedBatch) -> torch.Tensor:
        return kernels.short_conv(x, weights, cache, batch, LAYER)  # type: ignore[arg-type]

    return Kind(shape, 3 * shape.channels, weights, step)


class Sequences:
    """Spans of some requests through one layer, with blocks anywhere."""

    def __init__(self, kernels: Kernels, kind: Kind, length: int, requests: int = 1, seed: int = 0) -> None:
        self.kernels, self.kind, self.length = kernels, kind, length
        shape, generator = kind.shape, torch.Generator().manual_seed(seed)
        self.x = drawn(generator, requests, length, kind.width).to(shape.dtype)
        each = -(-length // shape.block_size)
        self.cache = shape.cache(1 + each * requests)
        self.cache.memory.fill_(255)  # NaN everywhere: what is read before it is written shows
        order = list(range(1, 1 + each * requests))
        random.Random(seed).shuffle(order)
        self.tables = torch.tensor(order).view(requests, each)

    def step(self, spans: list[tuple[int, int, int]], x: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Spans (request, start, end); `x`: inputs in place of the requests' own."""
        inputs = x if x is not None else torch.cat([self.x[r, start:end] for r, start, end in spans])
        starts = [0]
        for _, start, end in spans:
            starts.append(starts[-1] + end - start)
        size = self.kind.shape.block_size
        width = max(-(-end // size) for _, _, end in spans)
        batch = RaggedBatch(
            token_ids=torch.zeros(starts[-1], dtype=torch.int64),
            positions=torch.cat([torch.arange(start, end) for _, start, end in spans]),
            slots=torch.zeros(starts[-1], dtype=torch.int64),
            row_starts=starts,
            context_lens=[end for _, _, end in spans],
            block_tables=self.tables[[request for request, _, _ in spans], :width].clone(),
            block_size=size,
        )
        with self.kernels.threads(2), torch.inference_mode():
            out = self.kind.step(self.kernels, inputs, self.cache, batch)
        return list(torch.split(out, [end - start for _, start, end in spans]))

    def whole(self, request: int = 0) -> torch.Tensor:
        [out] = self.step([(request, 0, self.length)])
        return out

    def random_steps(self, rnd: random.Random) -> list[torch.Tensor]:
        """All of each request in random spans, beside others in any order, with rejected rows that are no numbers."""
        places = [0] * len(self.x)
        found: list[list[torch.Tensor]] = [[] for _ in places]
        while min(places) < self.length:
            spans, inputs, kept = [], [], []
            for request in rnd.sample(range(len(places)), len(places)):
                start = places[request]
                if start == self.length or rnd.random() < 0.3:
                    continue
                end = min(self.length, start + rnd.choice([1, 1, 2, 5, 16, 17, 40]))
                last = min(self.length, end + rnd.choice([0, 0, 3, 20]))
                spans.append((request, start, last))
                poison = torch.full_like(self.x[request, end:last], float("nan"))
                inputs.append(torch.cat([self.x[request, start:end], poison]))
                kept.append(end - start)
                places[request] = end
            if spans:
                outs = self.step(spans, torch.cat(inputs))
                for (request, _, _), count, out in zip(spans, kept, outs, strict=True):
                    found[request].append(out[:count])
        return [torch.cat(parts) for parts in found]


KINDS: dict[str, Callable[[int, torch.dtype], Kind]] = {
    "gated delta net": lambda size, dtype: delta_kind(StateShape(2, 2, 4, 32, 40, 4, dtype, size)),
    "Kimi delta attention": lambda size, dtype: delta_kind(StateShape(2, 4, 4, 32, 40, 4, dtype, size, decay_dim=32)),
    "Mamba": lambda size, dtype: mamba_kind(StateShape(2, 2, 6, 20, 40, 4, dtype, size)),
    "short convolution": lambda size, dtype: conv_kind(ConvShape(2, 40, dtype, size)),
}
"""Of each kind a small one, by its block size and type: no width is one of whole vectors."""


def by_the_recurrence(sequences: Sequences) -> torch.Tensor:
    """The only request's results in float64: the layer with transformers' recurrence, one token after another."""
    shape, x = sequences.kind.shape, sequences.x[0].double()
    weights = type(sequences.kind.weights)(
        *(each.double() if isinstance(each, torch.Tensor) else each for each in sequences.kind.weights)
    )
    if isinstance(weights, ShortConvWeights):
        first, last, inner = x.chunk(3, dim=1)
        return last * _convolved(first * inner, weights.conv, weights.bias)
    assert isinstance(shape, StateShape)
    inputs, gate, rates = x.tensor_split([shape.channels, shape.channels + shape.heads * shape.value_dim], dim=1)
    mixed = silu(_convolved(inputs, weights.conv, getattr(weights, "bias", None)))
    keys = shape.key_heads * shape.key_dim
    q, k, v = torch.split(mixed, [keys, keys, shape.heads * shape.value_dim], dim=1)
    q, k = (part.view(len(x), shape.key_heads, shape.key_dim) for part in (q, k))
    v = v.view(len(x), shape.heads, shape.value_dim)
    if isinstance(weights, MambaWeights):
        return _mamba(q, k, v, rates, weights) * silu(gate)
    out = _delta_rule(q, k, v, rates, weights)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    through = silu if weights.gate == "silu" else torch.sigmoid
    return (normed * through(gate.view_as(out))).flatten(1)


def _convolved(x: torch.Tensor, conv: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    padded = torch.nn.functional.pad(x.T[None], (len(conv) - 1, 0))
    return torch.nn.functional.conv1d(padded, conv.T[:, None], bias, groups=x.shape[1])[0].T


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rates: torch.Tensor, weights: DeltaNetWeights
) -> torch.Tensor:
    a, b = rates.split([len(weights.decay), v.shape[1]], dim=1)
    g = weights.decay * softplus(a + weights.shift)
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    heads, beta = [part[None] for part in (q, k, v)], b.sigmoid()[None]
    if g.shape == b.shape:
        out, _ = torch_recurrent_gated_delta_rule(*heads, g=g[None], beta=beta)
    else:
        settings = {"initial_state": None, "output_final_state": False}
        g = g.view(1, len(v), v.shape[1], -1)
        out, _ = recurrent_kimi_delta_attention(*heads, g=g, beta=beta, **settings)
    return out[0].double()


def _mamba(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, weights: MambaWeights) -> torch.Tensor:
    tokens, heads, head_dim = x.shape
    state, found = torch.zeros(1, heads, head_dim, c.shape[2], dtype=torch.float64), []
    wide = [part[:, None].expand(-1, head_dim) for part in (weights.skip, weights.shift)]
    decay = weights.decay[:, None, None].expand(-1, *state.shape[2:])
    for row in range(tokens):
        step = dt[row].view(1, -1, 1).expand(-1, -1, head_dim)
        of_row = state, x[row][None], step, decay, b[row][None], c[row][None]
        found.append(mamba2_selective_state_update(*of_row, *wide, dt_softplus=True).flatten())
    return torch.stack(found)
