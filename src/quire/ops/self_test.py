"""Whether a row's bits depend on the rows beside it, tried on this machine with the kernels that it chose.

The promise that a request's tokens depend on nothing but the request stands on this. `quire doctor` runs the short
one, `--full` all of it. Products, attention, routing and experts are also compared with plain torch in fp32, so that a
kernel that this machine computes wrongly is seen too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from quire.ops import self_test_layers
from quire.ops.experts import Routing
from quire.ops.fp8 import Fp8Weight
from quire.ops.kernels import Kernels
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.linear import Product
from quire.ops.mxfp4 import BIAS, GROUP, NUMBERS, Mxfp4Weight
from quire.ops.quantize_groups import scheme_of
from quire.parallel.group import OneRank, share

Quantized = Literal["int8", "int6", "int4", "mxfp4", "fp8"]
Stored = torch.dtype | Quantized
"""How a weight is stored."""

DTYPES = (torch.bfloat16, torch.float32)
QUANTIZATIONS: tuple[Quantized, ...] = ("int8", "int6", "int4", "mxfp4")
ROWS_DTYPE = torch.bfloat16
"""Of what quantized weights are multiplied with."""
ROW_COUNTS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 64, 65)
FP8_ROWS, FP8_GROUP = 1100, 128
"""So many rows that a kernel may restore a weight in fp8 before it multiplies; and inputs that share a scale."""
LINEAR_SHAPES = ((256, 256), (704, 256), (256, 704), (128, 4096))
"""(outputs, inputs). Long sums show differences that short ones hide."""
SHORT_SHAPES = ((72, 1000),)
"""Of the short self-test: neither number is one of whole tiles."""

SHARED_SHAPE, RANKS = (360, 704), (2, 3, 4)
"""A product that ranks share, not all in whole panels; and how many they are."""
WIDE_SHAPE = (8640, 512)
"""One of so many outputs that a GPU would cut the sums of a part in another way than those of the whole."""

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
    formats = _formats(kernels)
    yield from (check_linear(kernels, dtype) for dtype in DTYPES)
    yield from (check_quantized_linear(kernels, how) for how in formats)
    yield from (check_shares(kernels, how) for how in (*DTYPES, *formats))
    yield from (check_norm_and_gate(kernels, dtype) for dtype in DTYPES)
    yield from (check_attention(kernels, dtype, cache) for dtype, cache in CACHES)
    yield from (check_routing(kernels, name) for name in ROUTINGS)
    yield from (check_experts(kernels, how) for how in (*DTYPES, *formats))
    yield from (check_latent_attention(kernels, dtype, cache) for dtype, cache in LATENT_CACHES)
    yield from (check_sparse_attention(kernels, dtype) for dtype in DTYPES)
    for name in RECURRENT:
        if getattr(type(kernels), name) is not getattr(Kernels, name):  # plain torch takes seconds, a row at a time
            yield check_recurrent(kernels, name)
    yield from (check_trees(kernels, dtype, cache) for dtype, cache in CACHES)
    yield from (check_latent_trees(kernels, dtype, cache) for dtype, cache in LATENT_CACHES)


def run_short(kernels: Kernels) -> Iterator[Check]:
    """Small products and a few chunks: what a processor's instructions for matrices are tried with at every start."""
    yield check_linear(kernels, torch.bfloat16, SHORT_SHAPES)
    yield from (check_quantized_linear(kernels, how) for how in _formats(kernels))
    yield check_attention(kernels, torch.bfloat16, chunkings=CHUNKINGS[:1])
    yield check_latent_attention(kernels, torch.bfloat16, chunkings=CHUNKINGS[:1])


def _formats(kernels: Kernels) -> tuple[Quantized, ...]:
    """Of weights in few bits; fp8 where they stay in it: elsewhere they are dense when they are multiplied."""
    return (*QUANTIZATIONS, "fp8") if kernels.keeps(_fp8(torch.zeros(1, FP8_GROUP))) else QUANTIZATIONS


def check_linear(kernels: Kernels, dtype: torch.dtype, shapes: Sequence[tuple[int, int]] | None = None) -> Check:
    """The product of some of the rows against the same rows of all of them, and all against plain torch.

    Args:
        shapes: (outputs, inputs) of weights; None: `LINEAR_SHAPES`.
    """
    generator = torch.Generator().manual_seed(0)
    failures, cases = [], 0
    for shape in shapes or LINEAR_SHAPES:
        weight = torch.randn(shape, generator=generator).to(dtype)
        x = torch.randn(2 * max(ROW_COUNTS), shape[1], generator=generator).to(dtype)
        product, on_device = _product(kernels, weight, dtype), x.to(kernels.device)
        differing, tried = _compare_rows(kernels, product.matmul, on_device)
        if not _near(product.matmul(on_device), x.float() @ weight.float().T):
            differing.append("against plain torch")
        failures += [f"{shape[1]} to {shape[0]}, {where}" for where in differing]
        cases += tried + 1
    return Check(f"linear {_name(dtype)}", cases, tuple(failures))


def check_quantized_linear(kernels: Kernels, how: Quantized) -> Check:
    """As `check_linear`, with a weight in 8 or 4 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(320, 704, generator=generator)
    rows = FP8_ROWS if how == "fp8" else 2 * max(ROW_COUNTS)
    x = torch.randn(rows, 704, generator=generator).to(ROWS_DTYPE)
    product, on_device = _product(kernels, weight, ROWS_DTYPE, how), x.to(kernels.device)
    failures, cases = _compare_rows(kernels, product.matmul, on_device)
    if not _near(product.matmul(on_device), _product(Kernels(), weight, torch.float32, how).matmul(x.float())):
        failures.append("against plain torch")
    return Check(f"linear {_name(how)}", cases + 1, tuple(failures))


def check_shares(kernels: Kernels, how: Stored) -> Check:
    """The outputs that a rank has of a product against the same ones of the whole product."""
    generator = torch.Generator().manual_seed(0)
    dtype = how if isinstance(how, torch.dtype) else ROWS_DTYPE
    shape = WIDE_SHAPE if kernels.device.type == "cuda" else SHARED_SHAPE
    weight = torch.randn(shape, generator=generator)
    x = torch.randn(max(ROW_COUNTS), shape[1], generator=generator).to(kernels.device, dtype)
    whole = _product(kernels, weight, dtype, how)
    failures, cases = [], 0
    for ranks in RANKS:
        for rank in range(ranks):
            own = share(len(weight), OneRank(rank, ranks))
            product = _product(kernels, weight[own.start : own.stop], dtype, how, len(weight))
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
        return torch.cat([kernels.rms_norm(rows, weight, 1e-6), kernels.activate(rows, "silu")], dim=1)

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


def check_experts(kernels: Kernels, how: Stored) -> Check:
    """A token's experts beside some of the other tokens' and beside all of them.

    Args:
        how: data type of the weights, or how they are quantized.
    """
    count, top_k, hidden, inner = EXPERTS_SHAPE
    generator = torch.Generator().manual_seed(0)
    dtype = how if isinstance(how, torch.dtype) else ROWS_DTYPE
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
    kernels: Kernels, weight: torch.Tensor, dtype: torch.dtype, how: Stored = torch.float32, outputs: int | None = None
) -> Product:
    """The product with a weight in `dtype`, or quantized; `outputs`: see `Kernels.pack`."""
    if how == "mxfp4":
        return kernels.pack_mxfp4([_mxfp4(weight)])
    if how == "fp8":
        return kernels.pack_fp8([_fp8(weight)], dtype, None, outputs)
    if isinstance(how, str):
        coded = kernels.quantize_groups(weight, scheme_of(how, weight.shape[1]))
        return kernels.pack_coded([coded], None, outputs)
    return kernels.pack([weight.to(kernels.device, dtype)], None, outputs)


def _mxfp4(weight: torch.Tensor) -> Mxfp4Weight:
    """The weight [out, in] in MXFP4: each number of a group is the nearest one by the group's scale."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2  # the largest numbers are from 4 to 8 then
    codes = (groups.unsqueeze(-1) / exponents.exp2().unsqueeze(-1) - NUMBERS).abs().argmin(-1).to(torch.uint8)
    return Mxfp4Weight(codes[..., ::2] | codes[..., 1::2] << 4, (exponents.squeeze(-1) + BIAS).to(torch.uint8))


def _fp8(weight: torch.Tensor) -> Fp8Weight:
    """The weight [out, in] in fp8: the largest number of a group is its type's largest."""
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % FP8_GROUP))
    groups = padded.view(len(weight), -1, FP8_GROUP)
    scales = groups.abs().amax(-1).clamp_min(1e-6) / torch.finfo(torch.float8_e4m3fn).max
    codes = (groups / scales.unsqueeze(-1)).flatten(1)[:, : weight.shape[1]].to(torch.float8_e4m3fn)
    return Fp8Weight(codes.contiguous().view(torch.uint8), scales, FP8_GROUP)


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether rows are those of the reference, but for `NEAR`."""
    apart, size = (x.square().mean(-1).sqrt() for x in (found.float().cpu() - wanted, wanted))
    return bool((apart <= NEAR * size).all())


def check_attention(
    kernels: Kernels,
    dtype: torch.dtype,
    kv_cache_dtype: KVCacheDtype = "auto",
    chunkings: Sequence[Sequence[int]] | None = None,
) -> Check:
    """A context's attention cut into chunks, and beside another request, against all of it at once."""
    return _check_chunks("attention", self_test_layers.Attention, kernels, dtype, kv_cache_dtype, chunkings)


def check_latent_attention(
    kernels: Kernels,
    dtype: torch.dtype,
    kv_cache_dtype: KVCacheDtype = "auto",
    chunkings: Sequence[Sequence[int]] | None = None,
) -> Check:
    """As `check_attention`, of latent attention, with the products of its heads."""
    return _check_chunks(
        "latent attention", self_test_layers.LatentAttention, kernels, dtype, kv_cache_dtype, chunkings
    )


def check_sparse_attention(kernels: Kernels, dtype: torch.dtype) -> Check:
    """As `check_attention`, of latent attention to the positions that an indexer chooses."""
    return _check_chunks("sparse attention", self_test_layers.SparseAttention, kernels, dtype)


RECURRENT: dict[str, tuple[str, type[self_test_layers.Attention]]] = {
    "delta_net": ("gated delta net", self_test_layers.DeltaNet),
    "mamba": ("Mamba 2", self_test_layers.Mamba),
    "short_conv": ("short convolution", self_test_layers.ShortConv),
}
"""By the kernel: what is checked, and how."""


def check_recurrent(kernels: Kernels, kernel: str, dtype: torch.dtype = torch.bfloat16) -> Check:
    """As `check_attention`, of a recurrent layer."""
    return _check_chunks(*RECURRENT[kernel], kernels, dtype)


def _check_chunks(
    name: str,
    kind: type[self_test_layers.Attention],
    kernels: Kernels,
    dtype: torch.dtype,
    kv_cache_dtype: KVCacheDtype = "auto",
    chunkings: Sequence[Sequence[int]] | None = None,
) -> Check:
    failures, cases = [], 1
    with kernels.threads(1):
        whole = kind(kernels, dtype, kv_cache_dtype, 16)([self_test_layers.CONTEXT])
    if not _near(whole, kind(Kernels(), torch.float32, kv_cache_dtype, 16)([self_test_layers.CONTEXT])):
        failures.append("against plain torch")
    for block_size, neighbour, threads in ((16, 0, 1), (64, 37, 2)):
        attend = kind(kernels, dtype, kv_cache_dtype, block_size)
        for chunks in chunkings or CHUNKINGS:
            cases += 1
            with kernels.threads(threads):
                same = torch.equal(attend(chunks, neighbour), whole)
            if not same:
                beside = f" beside {neighbour} other rows, {threads} threads" if neighbour else ""
                failures.append(f"block size {block_size}, chunks {list(chunks)}{beside}")
    return Check(f"{name} {_name(dtype)}{_of_cache(kv_cache_dtype)}", cases, tuple(failures))


def check_trees(kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> Check:
    """Attention of rows in a tree, as drafts are, against the same rows where their ancestors are all there is."""
    return _check_trees("attention", self_test_layers.Attention, kernels, dtype, kv_cache_dtype)


def check_latent_trees(kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> Check:
    """As `check_trees`, of latent attention, with the products of its heads."""
    return _check_trees("latent attention", self_test_layers.LatentAttention, kernels, dtype, kv_cache_dtype)


def _check_trees(
    name: str,
    kind: type[self_test_layers.Attention],
    kernels: Kernels,
    dtype: torch.dtype,
    kv_cache_dtype: KVCacheDtype,
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


def _name(how: Stored) -> str:
    return str(how).removeprefix("torch.")


def _of_cache(kv_cache_dtype: KVCacheDtype) -> str:
    return "" if kv_cache_dtype == "auto" else f", {kv_cache_dtype} cache"
