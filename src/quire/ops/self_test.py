"""Whether a row's bits depend on the rows beside it, tried on this machine with the kernels that it chose.

The promise that a request's tokens depend on nothing but the request stands on this. `quire doctor` runs the short
one, `--full` all of it. Products, attention, routing and experts are also compared with plain torch in fp32, so that a
kernel that this machine computes wrongly is seen too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from quire.ops.experts import Routing
from quire.ops.kernels import Kernels
from quire.ops.kv_cache import KVCache, KVCacheDtype
from quire.ops.linear import Product
from quire.ops.mamba import MambaWeights
from quire.ops.mxfp4 import BIAS, GROUP, NUMBERS, Mxfp4Weight
from quire.ops.quantized import Quantization
from quire.ops.ragged import DeviceSpans, DeviceTrees, RaggedBatch, Trees
from quire.ops.short_conv import ConvCache, ConvShape, ShortConvWeights
from quire.ops.states import DeltaNetWeights, StateCache, StateShape
from quire.parallel.group import OneRank, share

DTYPES = (torch.bfloat16, torch.float32)
QUANTIZATIONS: tuple[Quantization | Literal["mxfp4"], ...] = (Quantization("int8"), Quantization("int4", 64), "mxfp4")
ROW_COUNTS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 64, 65)
LINEAR_SHAPES = ((256, 256), (704, 256), (256, 704), (128, 4096))
"""(outputs, inputs). Long sums show differences that short ones hide."""
SHORT_SHAPES = ((72, 1000),)
"""Of the short self-test: neither number is one of whole tiles."""

SHARED_SHAPE, RANKS = (360, 704), (2, 3, 4)
"""A product that ranks share, not all in whole panels; and how many they are."""

CONTEXT = 300
CHUNKINGS = ((1, 299), (16, 284), (128, 128, 44), (129, 171), (255, 1, 44), (100, 100, 100), (299, 1))
"""Ways to cut a context into spans."""

CACHES: tuple[tuple[torch.dtype, KVCacheDtype], ...] = (
    (torch.bfloat16, "auto"),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "fp8"),
    (torch.float32, "auto"),
)
"""Of activations, and of the KV cache."""

ROUTINGS = {
    "softmax": Routing(32, 4),
    "groups": Routing(32, 4, "sigmoid", groups=8, top_groups=4, group_score="top2", scale=2.5),
}
"""As in Qwen3-MoE and in DeepSeek-V3, with fewer experts."""

EXPERTS_SHAPE = (8, 3, 256, 128)
"""Experts, experts a token, hidden and inner numbers."""

LATENT_CACHES: tuple[tuple[torch.dtype, KVCacheDtype], ...] = ((torch.bfloat16, "auto"), (torch.bfloat16, "int8"))

TREE_BASES, TREE_SIZE = (1, 120, 250), 24
"""Positions of roots, so that trees lie across the borders of key tiles; and tokens of a tree."""

NEAR = 0.05
"""How far a row may be from plain torch's in fp32, root mean squares over each other: codes of 8 bits round so far."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel in one data type: `failures` names the cases whose bits, or whose numbers, differed."""

    name: str
    cases: int
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def run(kernels: Kernels) -> Iterator[Check]:
    """All checks, each with one thread and with two, one after the other."""
    yield from (check_linear(kernels, dtype) for dtype in DTYPES)
    yield from (check_quantized_linear(kernels, how) for how in QUANTIZATIONS)
    yield from (check_shares(kernels, how) for how in (*DTYPES, *QUANTIZATIONS))
    yield from (check_norm_and_gate(kernels, dtype) for dtype in DTYPES)
    yield from (check_attention(kernels, dtype, cache) for dtype, cache in CACHES)
    yield from (check_routing(kernels, name) for name in ROUTINGS)
    yield from (check_experts(kernels, how) for how in (*DTYPES, *QUANTIZATIONS))
    yield from (check_latent_attention(kernels, dtype, cache) for dtype, cache in LATENT_CACHES)
    if type(kernels).delta_net is not Kernels.delta_net:  # plain torch takes seconds, a row at a time
        yield check_delta_net(kernels, torch.bfloat16)
        yield check_mamba(kernels, torch.bfloat16)
        yield check_short_conv(kernels, torch.bfloat16)
    yield from (check_trees(kernels, dtype, cache) for dtype, cache in CACHES)
    yield from (check_latent_trees(kernels, dtype, cache) for dtype, cache in LATENT_CACHES)


def run_short(kernels: Kernels) -> Iterator[Check]:
    """Small products alone: what a processor's instructions for matrices are tried with at every start."""
    yield check_linear(kernels, torch.bfloat16, SHORT_SHAPES)
    yield from (check_quantized_linear(kernels, how) for how in QUANTIZATIONS)


def check_linear(kernels: Kernels, dtype: torch.dtype, shapes: Sequence[tuple[int, int]] | None = None) -> Check:
    """The product of some of the rows against the same rows of all of them, and all against plain torch.

    Args:
        shapes: (outputs, inputs) of weights; None: `LINEAR_SHAPES`.
    """
    generator = torch.Generator().manual_seed(0)
    failures, cases = [], 0
    for shape in LINEAR_SHAPES if shapes is None else shapes:
        weight = torch.randn(shape, generator=generator).to(dtype)
        x = torch.randn(2 * max(ROW_COUNTS), shape[1], generator=generator).to(dtype)
        product, on_device = _product(kernels, weight, dtype), x.to(kernels.device)
        differing, tried = _compare_rows(kernels, product.matmul, on_device)
        if not _near(product.matmul(on_device), x.float() @ weight.float().T):
            differing.append("against plain torch")
        failures += [f"{shape[1]} to {shape[0]}, {where}" for where in differing]
        cases += tried + 1
    return Check(f"linear {_name(dtype)}", cases, tuple(failures))


def check_quantized_linear(kernels: Kernels, how: Quantization | Literal["mxfp4"]) -> Check:
    """As `check_linear`, with a weight in 8 or 4 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(320, 704, generator=generator)
    x = torch.randn(2 * max(ROW_COUNTS), 704, generator=generator).to(torch.bfloat16)
    product, on_device = _product(kernels, weight, torch.bfloat16, how), x.to(kernels.device)
    failures, cases = _compare_rows(kernels, product.matmul, on_device)
    if not _near(product.matmul(on_device), _product(Kernels(), weight, torch.float32, how).matmul(x.float())):
        failures.append("against plain torch")
    return Check(f"linear {_name(how)}", cases + 1, tuple(failures))


def check_shares(kernels: Kernels, how: torch.dtype | Quantization | Literal["mxfp4"]) -> Check:
    """The outputs that a rank has of a product against the same ones of the whole product."""
    generator = torch.Generator().manual_seed(0)
    dtype = how if isinstance(how, torch.dtype) else torch.bfloat16
    weight = torch.randn(SHARED_SHAPE, generator=generator)
    x = torch.randn(max(ROW_COUNTS), SHARED_SHAPE[1], generator=generator).to(kernels.device, dtype)
    whole = _product(kernels, weight, dtype, how)
    failures, cases = [], 0
    for ranks in RANKS:
        for rank in range(ranks):
            own = share(len(weight), OneRank(rank, ranks))
            product = _product(kernels, weight[own.start : own.stop], dtype, how)
            for rows in (1, 8, len(x)):
                cases += 1
                if not torch.equal(product.matmul(x[:rows]), whole.matmul(x[:rows])[:, own.start : own.stop]):
                    failures.append(f"{rows} rows, rank {rank} of {ranks}")
    return Check(f"shares of ranks, {_name(how)}", cases, tuple(failures))


def check_norm_and_gate(kernels: Kernels, dtype: torch.dtype) -> Check:
    """The norm and the gate of some of the rows against the same rows of all of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * max(ROW_COUNTS), 1408, generator=generator).to(kernels.device, dtype)
    weight = torch.randn(1408, generator=generator).to(kernels.device, dtype)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([kernels.rms_norm(rows, weight, 1e-6), kernels.silu_mul(rows)], dim=1)

    failures, cases = _compare_rows(kernels, compute, x)
    return Check(f"norm and gate {_name(dtype)}", cases, tuple(failures))


def _compare_rows(
    kernels: Kernels, compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[list[str], int]:
    """The cases, in words, in which `compute` gives other bits for a part of x than for all of it; and all cases."""
    failures, cases = [], 0
    with kernels.threads(1):
        whole = compute(x)
    for threads, first, counts in ((1, 0, ROW_COUNTS), (1, 7, ROW_COUNTS), (2, 0, (1, 8, 65, len(x)))):
        with kernels.threads(threads):
            for rows in counts:
                part = slice(first, first + rows)
                cases += 1
                if not torch.equal(compute(x[part]), whole[part]):
                    failures.append(f"rows {first} to {first + rows - 1} with {threads} thread{'s' * (threads > 1)}")
    return failures, cases


def check_routing(kernels: Kernels, name: str) -> Check:
    """Experts and weights of some of the rows against those of all of them."""
    routing, generator = ROUTINGS[name], torch.Generator().manual_seed(0)
    logits = torch.randn(2 * max(ROW_COUNTS), routing.num_experts, generator=generator)
    bias = torch.randn(routing.num_experts, generator=generator) if routing.scoring == "sigmoid" else None
    on_device = None if bias is None else bias.to(kernels.device)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        ids, weights = kernels.route(rows, routing, on_device)
        return torch.cat([ids, weights], dim=1)

    failures, cases = _compare_rows(kernels, compute, logits.to(kernels.device))
    ids, weights = kernels.route(logits.to(kernels.device), routing, on_device)
    wanted_ids, wanted = Kernels().route(logits, routing, bias)
    if not torch.equal(ids.cpu(), wanted_ids) or not torch.allclose(weights.cpu(), wanted, rtol=1e-4):
        failures.append("against plain torch")
    return Check(f"routing by {name}", cases + 1, tuple(failures))


def check_experts(kernels: Kernels, how: torch.dtype | Quantization | Literal["mxfp4"]) -> Check:
    """A token's experts beside some of the other tokens' and beside all of them.

    Args:
        how: data type of the weights, or how they are quantized.
    """
    count, top_k, hidden, inner = EXPERTS_SHAPE
    generator = torch.Generator().manual_seed(0)
    dtype = how if isinstance(how, torch.dtype) else torch.bfloat16
    gate_up, down = (
        torch.randn(count, *shape, generator=generator).mul_(shape[1] ** -0.5).to(dtype).float()
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    x = torch.randn(2 * max(ROW_COUNTS), hidden + count, generator=generator).to(dtype)

    def experts(of: Kernels, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        up, out = ([_product(of, weight, dtype, how) for weight in weights] for weights in (gate_up, down))
        call = of.experts(up, out)

        def compute(rows: torch.Tensor) -> torch.Tensor:
            """The numbers behind a token's own are its logits."""
            ids, weights = of.route(rows[:, hidden:].float(), Routing(count, top_k), None)
            return call(rows[:, :hidden].contiguous(), ids, weights)

        return compute

    compute, on_device = experts(kernels, dtype), x.to(kernels.device)
    failures, cases = _compare_rows(kernels, compute, on_device)
    if not _near(compute(on_device), experts(Kernels(), torch.float32)(x.float())):
        failures.append("against plain torch")
    return Check(f"experts {_name(how)}", cases + 1, tuple(failures))


def _product(
    kernels: Kernels,
    weight: torch.Tensor,
    dtype: torch.dtype,
    how: torch.dtype | Quantization | Literal["mxfp4"] = torch.float32,
) -> Product:
    """The product with a weight in `dtype`, or quantized."""
    if how == "mxfp4":
        return kernels.pack_mxfp4([_mxfp4(weight)])
    if isinstance(how, Quantization):
        return kernels.pack_quantized(kernels.quantize(weight, how))
    return kernels.pack([weight.to(kernels.device, dtype)])


def _mxfp4(weight: torch.Tensor) -> Mxfp4Weight:
    """The weight [out, in] in MXFP4: each number of a group is the nearest one by the group's scale."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2  # the largest numbers are from 4 to 8 then
    codes = (groups.unsqueeze(-1) / exponents.exp2().unsqueeze(-1) - NUMBERS).abs().argmin(-1).to(torch.uint8)
    return Mxfp4Weight(codes[..., ::2] | codes[..., 1::2] << 4, (exponents.squeeze(-1) + BIAS).to(torch.uint8))


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether rows are those of the reference, but for `NEAR`."""
    apart, size = (x.square().mean(-1).sqrt() for x in (found.float().cpu() - wanted, wanted))
    return bool((apart <= NEAR * size).all())


def check_attention(kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> Check:
    """A context's attention cut into chunks, and beside another request, against all of it at once."""
    return _check_chunks("attention", _Attention, kernels, dtype, kv_cache_dtype)


def check_latent_attention(kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> Check:
    """As `check_attention`, of latent attention, with the products of its heads."""
    return _check_chunks("latent attention", _LatentAttention, kernels, dtype, kv_cache_dtype)


def check_delta_net(kernels: Kernels, dtype: torch.dtype) -> Check:
    """As `check_attention`, of a gated delta net."""
    return _check_chunks("gated delta net", _DeltaNet, kernels, dtype, "auto")


def check_mamba(kernels: Kernels, dtype: torch.dtype) -> Check:
    """As `check_attention`, of a Mamba 2 layer."""
    return _check_chunks("Mamba 2", _Mamba, kernels, dtype, "auto")


def check_short_conv(kernels: Kernels, dtype: torch.dtype) -> Check:
    """As `check_attention`, of a gated short convolution."""
    return _check_chunks("short convolution", _ShortConv, kernels, dtype, "auto")


def _check_chunks(
    name: str, kind: type[_Attention], kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype
) -> Check:
    failures, cases = [], 1
    with kernels.threads(1):
        whole = kind(kernels, dtype, kv_cache_dtype, 16)([CONTEXT])
    if not _near(whole, kind(Kernels(), torch.float32, kv_cache_dtype, 16)([CONTEXT])):
        failures.append("against plain torch")
    for block_size, neighbour, threads in ((16, 0, 1), (64, 37, 2)):
        attend = kind(kernels, dtype, kv_cache_dtype, block_size)
        for chunks in CHUNKINGS:
            cases += 1
            with kernels.threads(threads):
                same = torch.equal(attend(chunks, neighbour), whole)
            if not same:
                beside = f" beside {neighbour} other rows, {threads} threads" if neighbour else ""
                failures.append(f"block size {block_size}, chunks {list(chunks)}{beside}")
    return Check(f"{name} {_name(dtype)}{_of_cache(kv_cache_dtype)}", cases, tuple(failures))


def check_trees(kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> Check:
    """Attention of rows in a tree, as drafts are, against the same rows where their ancestors are all there is."""
    return _check_trees("attention", _Attention, kernels, dtype, kv_cache_dtype)


def check_latent_trees(kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> Check:
    """As `check_trees`, of latent attention, with the products of its heads."""
    return _check_trees("latent attention", _LatentAttention, kernels, dtype, kv_cache_dtype)


def _check_trees(
    name: str, kind: type[_Attention], kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype
) -> Check:
    failures, cases = [], 0
    exact = kind(Kernels(), torch.float32, kv_cache_dtype, 16)
    for base in TREE_BASES:
        paths, tree = _random_tree(TREE_SIZE, base), torch.empty(0)
        for block_size, neighbour, threads in ((16, 0, 1), (64, 37, 2)):
            attention = kind(kernels, dtype, kv_cache_dtype, block_size)
            cache, leaves = attention.cache(base), _to_leaves(paths)
            with kernels.threads(threads):
                tree = attention.behind(cache, base, range(TREE_SIZE), paths, neighbour)
            with kernels.threads(1):
                wrong = [path for path in leaves if not torch.equal(attention.behind(cache, base, path), tree[path])]
            failures += [f"block size {block_size}, tree at {base}, path {path}" for path in wrong]
            cases += len(leaves)
        cases += 1
        if not _near(tree, exact.behind(exact.cache(base), base, range(TREE_SIZE), paths)):
            failures.append(f"tree at {base}, against plain torch")
    return Check(f"{name} in trees, {_name(dtype)}{_of_cache(kv_cache_dtype)}", cases, tuple(failures))


def _random_tree(size: int, seed: int) -> list[list[int]]:
    """The path to each row of a tree, its own the last."""
    draw, paths = random.Random(seed), [[0]]
    for row in range(1, size):
        paths.append([*paths[draw.randrange(max(0, row - 6), row)], row])
    return paths


def _to_leaves(paths: Sequence[list[int]]) -> list[list[int]]:
    """Those that no other one goes on from."""
    parents = {path[-2] for path in paths if len(path) > 1}
    return [path for path in paths if path[-1] not in parents]


class _Attention:
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


class _LatentAttention(_Attention):
    """Latent attention: of each token the queries of 4 heads, then its compressed vector and its key."""

    still, turned, latent = 128, 64, 512
    kv_heads, dim, sides = 1, 512 + 64, 1
    width = 4 * (128 + 64) + 512 + 64

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        super().__init__(kernels, dtype, kv_cache_dtype, block_size)
        generator = torch.Generator().manual_seed(2)
        self.norm = torch.ones(self.latent, device=kernels.device, dtype=dtype)
        self.into_latent, self.out_of_latent = (
            kernels.heads(
                [_product(kernels, weight / 16, dtype) for weight in self._draw(4, *shape, generator=generator)]
            )
            for shape in ((self.latent, self.still), (self.still, self.latent))
        )

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `_Attention`: [rows, heads * still]."""
        q, compressed = rows[:, : -self.dim].reshape(len(rows), self.heads, -1), rows[:, -self.dim :].contiguous()
        self.kernels.store_latent(compressed, self.norm, 1e-6, tables, kv, batch, 0)
        turned = self.kernels.rotate_interleaved(q[..., self.still :], tables)
        q = torch.cat([self.into_latent(q[..., : self.still]), turned], dim=-1)
        scale = (self.still + self.turned) ** -0.5
        return self.out_of_latent(self.kernels.attend_latent(q, kv, batch, 0, scale, self.latent)).flatten(1)


class _DeltaNet(_Attention):
    """A gated delta net: of each token queries, keys and values, a gate, and what decays and betas are made of."""

    shape = StateShape(1, 2, 4, 64, 48, 4, torch.float32, 16)
    rates = 2 * shape.heads
    width = shape.channels + shape.heads * shape.value_dim + rates

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        super().__init__(kernels, dtype, kv_cache_dtype, block_size)
        shape = self.shape = replace(self.shape, dtype=dtype, block_size=block_size)
        generator = torch.Generator().manual_seed(3)
        sizes = (shape.taps, shape.channels), (shape.heads,), (shape.heads,), (shape.value_dim,)
        conv, decay, shift, norm = (self._draw(*size, generator=generator) for size in sizes)
        self.weights = DeltaNetWeights(conv, -decay.exp(), shift, norm, 1e-6)

    def cache(self, filled: int = 0) -> KVCache:
        """Room for two such requests."""
        return StateCache(2 * self.blocks + 1, self.shape)

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `_Attention`: [rows, heads * value_dim]."""
        if not isinstance(kv, StateCache):
            raise TypeError(f"a cache of states is needed, not {type(kv).__name__}")
        x, ab = rows[:, : -self.rates], rows[:, -self.rates :].float()
        return self.kernels.delta_net(x, ab, self.weights, kv, batch, 0)


class _Mamba(_Attention):
    """Mamba 2: of each token C, B and x, a gate, and what steps are made of."""

    shape = StateShape(1, 2, 4, 64, 48, 4, torch.float32, 16)
    width = shape.channels + shape.heads * shape.value_dim + shape.heads

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        super().__init__(kernels, dtype, kv_cache_dtype, block_size)
        shape = self.shape = replace(self.shape, dtype=dtype, block_size=block_size)
        generator = torch.Generator().manual_seed(5)
        sizes = (shape.taps, shape.channels), (shape.channels,), *((shape.heads,),) * 3
        conv, bias, decay, shift, skip = (self._draw(*size, generator=generator) for size in sizes)
        self.weights = MambaWeights(conv, bias, -decay.exp(), shift, skip)

    def cache(self, filled: int = 0) -> KVCache:
        """Room for two such requests."""
        return StateCache(2 * self.blocks + 1, self.shape)

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `_Attention`: [rows, heads * value_dim]."""
        if not isinstance(kv, StateCache):
            raise TypeError(f"a cache of states is needed, not {type(kv).__name__}")
        heads = self.shape.heads
        return self.kernels.mamba(rows[:, :-heads], rows[:, -heads:].float(), self.weights, kv, batch, 0)


class _ShortConv(_Attention):
    """A gated short convolution: of each token two gates and what is convolved."""

    channels = 200
    width = 3 * channels

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        super().__init__(kernels, dtype, kv_cache_dtype, block_size)
        self.shape = ConvShape(1, self.channels, dtype, block_size)
        generator = torch.Generator().manual_seed(4)
        sizes = (3, self.channels), (self.channels,)
        self.weights = ShortConvWeights(*(self._draw(*size, generator=generator) for size in sizes))

    def cache(self, filled: int = 0) -> KVCache:
        """Room for two such requests."""
        return self.shape.cache(2 * self.blocks + 1)

    def step(
        self, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `_Attention`: [rows, channels]."""
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


def _name(how: torch.dtype | Quantization | Literal["mxfp4"]) -> str:
    return how.scheme if isinstance(how, Quantization) else str(how).removeprefix("torch.")


def _of_cache(kv_cache_dtype: KVCacheDtype) -> str:
    return "" if kv_cache_dtype == "auto" else f", {kv_cache_dtype} cache"
