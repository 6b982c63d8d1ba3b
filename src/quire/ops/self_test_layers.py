"""What the self-test of kernels computes in chunks: one layer of each kind, with numbers of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quire.ops import sparse
from quire.ops.kernels import Kernels
from quire.ops.kv_cache import KVCache, KVCacheDtype
from quire.ops.mamba import MambaWeights
from quire.ops.ragged import DeviceSpans, DeviceTrees, RaggedBatch, Trees
from quire.ops.recurrent import RecurrentShape
from quire.ops.short_conv import ConvCache, ConvShape, ShortConvWeights
from quire.ops.states import DeltaNetWeights, StateCache, StateShape

CONTEXT = 300
"""Tokens of the request."""


class Attention:
    """Attention of one request of `CONTEXT` tokens with given numbers, computed in any chunks."""

    heads, kv_heads, dim, sides = 4, 2, 64, 2
    width, turned = (4 + 2 * 2) * 64, 64
    """Numbers of a token, and how many of a head's are rotated."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = self._draw(CONTEXT, self.width, generator=generator).to(kernels.device, dtype)
        angles = torch.randn(CONTEXT, self.turned // 2, generator=generator).to(kernels.device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.blocks = -(-CONTEXT // block_size)
        self.table = torch.randperm(self.blocks, generator=generator) + 1
        self.kernels, self.dtype, self.kv_cache_dtype, self.block_size = kernels, dtype, kv_cache_dtype, block_size

    @staticmethod
    def _draw(*shape: int, generator: torch.Generator) -> torch.Tensor:
        """Random numbers that are the same in each data type."""
        return torch.randn(shape, generator=generator).bfloat16().float()

    def cache(self, filled: int = 0) -> KVCache:
        """Room for two such requests, in which the first tokens of one are stored."""
        shape = (2 * self.blocks + 1, 1, self.kv_heads, self.dim, self.block_size)
        cache = KVCache(*shape, self.dtype, self.kv_cache_dtype, self.kernels.device, self.sides)
        if filled:
            self._span(cache, range(filled), 0)
        return cache

    def __call__(self, chunks: Sequence[int], neighbour: int = 0) -> torch.Tensor:
        """[CONTEXT, ..]. Each chunk shares its step with `neighbour` rows of another request."""
        cache, out, start = self.cache(), [], 0
        for length in chunks:
            out.append(self._span(cache, range(start, start + length), start, neighbour))
            start += length
        return torch.cat(out)

    def behind(
        self,
        cache: KVCache,
        base: int,
        tokens: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
        neighbour: int = 0,
    ) -> torch.Tensor:
        """[tokens, ..]: of the tokens `base` + each, which stand after the first `base`.

        Args:
            cache: holds these.
            paths: of a tree whose rows they are; None: they continue one another.
        """
        return self._span(cache, [base + token for token in tokens], base, neighbour, paths)

    def _span(
        self,
        cache: KVCache,
        tokens: Sequence[int],
        start: int,
        neighbour: int = 0,
        paths: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """These tokens' rows from position `start` on, in a step with `neighbour` rows of another request."""
        spans, count = [(start, len(tokens), self.table)], len(tokens)
        if neighbour:
            spans.insert(0, (0, neighbour, self.table + self.blocks))
        batch = _batch(spans, self.block_size, self.kernels, paths)
        rows = self.rows[[*range(neighbour), *tokens]]
        tables = self.cos[batch.positions], self.sin[batch.positions]
        return self.step(rows, tables, cache, batch)[-count:]

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """What a layer's attention makes of a step's rows [rows, width]: [rows, ..]."""
        q = self.kernels.rotate_and_store(rows, None, tables, kv, batch, 0)
        return self.kernels.attend(q, kv, batch, 0, self.dim**-0.5, None)


class LatentAttention(Attention):
    """Latent attention: of each token the queries of 4 heads, then its compressed vector and its key."""

    still, turned, latent = 128, 64, 512
    kv_heads, dim, sides = 1, 512 + 64, 1
    width = 4 * (128 + 64) + 512 + 64

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        super().__init__(kernels, dtype, kv_cache_dtype, block_size)
        generator = torch.Generator().manual_seed(2)
        self.norm = torch.ones(self.latent, device=kernels.device, dtype=dtype)
        self.into_latent, self.out_of_latent = (
            kernels.heads([kernels.pack([weight.to(kernels.device, dtype)]) for weight in weights])
            for weights in (
                self._draw(4, *shape, generator=generator) / 16
                for shape in ((self.latent, self.still), (self.still, self.latent))
            )
        )

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `Attention`: [rows, heads * still]."""
        q, compressed = rows[:, : -self.dim].reshape(len(rows), self.heads, -1), rows[:, -self.dim :].contiguous()
        self.kernels.store_latent(compressed, self.norm, 1e-6, tables, kv, batch, 0)
        turned = self.kernels.rotate_interleaved(q[..., self.still :], tables)
        q = torch.cat([self.into_latent(q[..., : self.still]), turned], dim=-1)
        scale = (self.still + self.turned) ** -0.5
        return self.out_of_latent(self.kernels.attend_latent(q, kv, batch, 0, scale, self.latent)).flatten(1)


class SparseAttention(LatentAttention):
    """Latent attention to what an indexer of 4 heads chooses: behind what that has of a token, its index key, index
    queries and weights, which are 1 or -1, so that the choice among many equal scores is the same with all kernels.
    """

    index, top = 32, 24
    dim = LatentAttention.dim + index
    width = LatentAttention.width + index + 4 * index + 4

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `Attention`: [rows, heads * still]."""
        kernels, scale = self.kernels, (self.still + self.turned) ** -0.5
        signs = rows[:, LatentAttention.width :].sign()
        keys, queries, weights = torch.split(signs, [self.index, 4 * self.index, 4], dim=1)
        own = [4 * (self.still + self.turned), LatentAttention.dim]
        q, compressed = torch.split(rows[:, : LatentAttention.width], own, dim=1)
        q = q.reshape(len(rows), self.heads, -1)
        kernels.store_latent(compressed.contiguous(), self.norm, 1e-6, tables, kv, batch, 0, keys.contiguous())
        choice = sparse.choice(batch, self.top)
        of = choice.of_rows
        kernels.choose(of(queries).reshape(-1, 4, self.index), of(weights).float(), kv, batch, 0, choice)
        turned = kernels.rotate_interleaved(q[..., self.still :], tables)
        q = torch.cat([self.into_latent(q[..., : self.still]), turned], dim=-1)
        out = kernels.attend_chosen(q, choice, kv, batch, 0, scale, self.latent)
        return self.out_of_latent(out).flatten(1)


class Recurrent(Attention):
    """A recurrent layer in place of attention; `shape`: of what it keeps."""

    shape: RecurrentShape

    def cache(self, filled: int = 0) -> KVCache:
        """Room for two such requests."""
        return self.shape.cache(2 * self.blocks + 1, self.kernels.device)

    def _weights(self, seed: int, *sizes: tuple[int, ...]) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return (self._draw(*size, generator=generator).to(self.kernels.device) for size in sizes)


class DeltaNet(Recurrent):
    """A gated delta net: of each token queries, keys and values, a gate, and what decays and betas are made of."""

    shape = StateShape(1, 2, 4, 64, 48, 4, torch.float32, 16)
    rates = 2 * shape.heads
    width = shape.channels + shape.heads * shape.value_dim + rates

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        super().__init__(kernels, dtype, kv_cache_dtype, block_size)
        shape = self.shape = replace(self.shape, dtype=dtype, block_size=block_size)
        sizes = (shape.taps, shape.channels), (shape.heads,), (shape.heads,), (shape.value_dim,)
        conv, decay, shift, norm = self._weights(3, *sizes)
        self.weights = DeltaNetWeights(conv, -decay.exp(), shift, norm, 1e-6)

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `Attention`: [rows, heads * value_dim]."""
        if not isinstance(kv, StateCache):
            raise TypeError(f"a cache of states is needed, not {type(kv).__name__}")
        x, ab = rows[:, : -self.rates], rows[:, -self.rates :].float()
        return self.kernels.delta_net(x, ab, self.weights, kv, batch, 0)


class Mamba(Recurrent):
    """Mamba 2: of each token C, B and x, a gate, and what steps are made of."""

    shape = DeltaNet.shape
    width = shape.channels + shape.heads * shape.value_dim + shape.heads

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        super().__init__(kernels, dtype, kv_cache_dtype, block_size)
        shape = self.shape = replace(self.shape, dtype=dtype, block_size=block_size)
        sizes = (shape.taps, shape.channels), (shape.channels,), *((shape.heads,),) * 3
        conv, bias, decay, shift, skip = self._weights(5, *sizes)
        self.weights = MambaWeights(conv, bias, -decay.exp(), shift, skip)

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `Attention`: [rows, heads * value_dim]."""
        if not isinstance(kv, StateCache):
            raise TypeError(f"a cache of states is needed, not {type(kv).__name__}")
        heads = self.shape.heads
        return self.kernels.mamba(rows[:, :-heads], rows[:, -heads:].float(), self.weights, kv, batch, 0)


class ShortConv(Recurrent):
    """A gated short convolution: of each token two gates and what is convolved."""

    channels = 200
    width = 3 * channels

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        super().__init__(kernels, dtype, kv_cache_dtype, block_size)
        self.shape = ConvShape(1, self.channels, dtype, block_size)
        self.weights = ShortConvWeights(*self._weights(4, (3, self.channels), (self.channels,)))

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `Attention`: [rows, channels]."""
        if not isinstance(kv, ConvCache):
            raise TypeError(f"a cache of inputs is needed, not {type(kv).__name__}")
        return self.kernels.short_conv(rows, self.weights, kv, batch, 0)


def _batch(
    spans: Sequence[tuple[int, int, torch.Tensor]],
    block_size: int,
    kernels: Kernels,
    paths: Sequence[Sequence[int]] | None = None,
) -> RaggedBatch:
    """The batch of spans (start, rows, block table), as these kernels read it; `paths` are of the last one's rows."""
    places = [torch.arange(start, start + rows) for start, rows, _ in spans]
    slots = [
        table[at // block_size] * block_size + at % block_size for at, (_, _, table) in zip(places, spans, strict=True)
    ]
    ends = torch.tensor([rows for _, rows, _ in spans]).cumsum(0).tolist()
    if paths is not None:
        places[-1] = spans[-1][0] + torch.tensor([len(path) - 1 for path in paths])
    batch = RaggedBatch(
        token_ids=torch.zeros(ends[-1], dtype=torch.int64, device=kernels.device),
        positions=torch.cat(places).to(kernels.device),
        slots=torch.cat(slots).to(kernels.device),
        row_starts=[0, *ends],
        context_lens=[start + rows for start, rows, _ in spans],
        block_tables=torch.stack([table for _, _, table in spans]),
        block_size=block_size,
    )
    if kernels.reads_spans:
        batch.spans = DeviceSpans(
            row_starts=_sent(batch.row_starts, kernels),
            starts=_sent([start for start, _, _ in spans], kernels),
            context_lens=_sent(batch.context_lens, kernels),
            table_rows=_sent(list(range(len(spans))), kernels),
            block_tables=batch.block_tables.to(kernels.device, torch.int32),
        )
    if paths is not None:
        _add_tree(batch, spans[-1][0], paths, kernels)
    return batch


def _add_tree(batch: RaggedBatch, base: int, paths: Sequence[Sequence[int]], kernels: Kernels) -> None:
    """Say that the last span's rows follow these paths, from position `base` on."""
    first = batch.row_starts[-2]
    on_host = Trees(
        bases=torch.tensor([*batch.context_lens[:-1], base]),
        paths=torch.zeros(batch.row_starts[-1], max(map(len, paths)), dtype=torch.int64),
    )
    for row, path in enumerate(paths, start=first):
        on_host.paths[row, : len(path)] = torch.tensor(path)
    batch.trees = on_host
    if batch.spans is not None:
        depths = [*[-1] * first, *(len(path) - 1 for path in paths)]
        bases, ancestors = (x.to(kernels.device, torch.int32) for x in (on_host.bases, on_host.paths))
        batch.spans.trees = DeviceTrees(bases, _sent(depths, kernels), ancestors)


def _sent(numbers: list[int], kernels: Kernels) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=kernels.device)
