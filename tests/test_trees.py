"""Rows of a tree get the bits that they would get if their ancestors were all there is, whatever computes them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.models.model import Model
from quire.models.registry import load_model
from quire.ops import BLOCK_SIZES, Kernels, KVCache, KVShape, RaggedBatch, store_kv
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.ragged import Trees
from tests.oracle import random_prompt, save_checkpoint
from tests.test_cpu_latent import turns, weight

KERNELS = [Kernels(), *(CpuKernels(isa) for isa in library.usable())]
EACH_KERNELS = pytest.mark.parametrize("kernels", KERNELS, ids=[kernels.name for kernels in KERNELS])
LAYERS, LAYER = 2, 1
BASES = (0, 1, 15, 16, 31, 100, 126, 127, 128, 129, 255, 300, 510, 513)
"""Positions of roots, about the borders of blocks, key tiles and splits."""


class Tree:
    """Slots of a tree by their parents (-1: the root's); `paths` are each one's ancestors and itself."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.paths: list[list[int]] = []
        for slot, parent in enumerate(parents):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), slot])
        self.leaves = sorted(set(range(len(parents))) - set(parents))


def random_tree(rng: random.Random, most: int = 24) -> Tree:
    count = rng.choice([1, 2, 7, most])
    return Tree([-1, *(rng.randrange(max(0, slot - 6), slot) for slot in range(1, count))])


class Part(NamedTuple):
    """Rows of one request in a step: `rows` that continue one another, or those of some paths of a tree at `start`."""

    table: torch.Tensor
    start: int
    rows: int = 0
    paths: Sequence[Sequence[int]] = ()

    @property
    def positions(self) -> list[int]:
        if self.paths:
            return [self.start + len(path) - 1 for path in self.paths]
        return list(range(self.start, self.start + self.rows))

    @property
    def places(self) -> list[int]:
        """Positions where a request without a tree would have what these rows store."""
        return [self.start + path[-1] for path in self.paths] if self.paths else self.positions

    @property
    def context(self) -> int:
        return max(itertools.chain(self.places, (self.start + slot for path in self.paths for slot in path))) + 1


def batch_of(parts: Sequence[Part], size: int) -> RaggedBatch:
    places = [torch.tensor(part.places) for part in parts]
    width = max((len(path) for part in parts for path in part.paths), default=1)
    paths = [path for part in parts for path in part.paths or [[]] * part.rows]
    return RaggedBatch(
        token_ids=torch.zeros(sum(map(len, places)), dtype=torch.int64),
        positions=torch.tensor([position for part in parts for position in part.positions]),
        slots=torch.cat([part.table[at // size] * size + at % size for part, at in zip(parts, places, strict=True)]),
        row_starts=[0, *itertools.accumulate(map(len, places))],
        context_lens=[part.context for part in parts],
        block_tables=torch.nn.utils.rnn.pad_sequence([part.table for part in parts], batch_first=True),
        block_size=size,
        trees=Trees(
            bases=torch.tensor([part.start if part.paths else part.context for part in parts]),
            paths=torch.tensor([[*path, *[0] * (width - len(path))] for path in paths]),
        ),
    )


class Heads:
    """Attention with heads of keys and values: what its rows are, and how they are stored and computed."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, stored: KVCacheDtype, window: int | None
    ) -> None:
        self.shape, self.dtype, self.stored, self.window = shape, dtype, stored, window

    def cache(self, blocks: int, size: int) -> KVCache:
        """In which every number or scale is NaN."""
        kv = KVCache(blocks, LAYERS, *self.shape[1:], size, self.dtype, self.stored)
        kv.data.view(torch.uint8).fill_(255)
        return kv

    def draw(self, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, [tokens, heads, head_dim] each."""
        generator, (heads, kv_heads, dim) = torch.Generator().manual_seed(seed), self.shape
        return tuple(
            torch.randn(tokens, n, dim, generator=generator).to(self.dtype) for n in (heads, kv_heads, kv_heads)
        )

    def store(self, rows: Sequence[torch.Tensor], kv: KVCache, batch: RaggedBatch) -> None:
        store_kv(rows[1], rows[2], kv, batch, LAYER)

    def attend(self, kernels: Kernels, q: torch.Tensor, kv: KVCache, batch: RaggedBatch) -> torch.Tensor:
        return kernels.attend(q, kv, batch, LAYER, kv.head_dim**-0.5, self.window)

    def in_fp64(self, q: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """One query's attention over the rows that it follows and its own, by the definition."""
        k, v = (x[-self.window :] if self.window else x for x in (rows[1].double(), rows[2].double()))
        k, v = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
        weights = torch.einsum("hd,khd->hk", q.double(), k).mul(k.shape[2] ** -0.5).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, v).flatten()


class Latent(Heads):
    """Latent attention; the shape is heads, latent and rope numbers."""

    def cache(self, blocks: int, size: int) -> KVCache:
        kv = KVCache(blocks, LAYERS, 1, self.shape[1] + self.shape[2], size, self.dtype, self.stored, sides=1)
        kv.data.view(torch.uint8).fill_(255)
        return kv

    def draw(self, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
        """Queries [tokens, heads, latent + rope], and rows that are not yet normalized and turned."""
        generator, (heads, latent, rope) = torch.Generator().manual_seed(seed), self.shape
        q = torch.randn(tokens, heads, latent + rope, generator=generator).to(self.dtype)
        return q, torch.randn(tokens, latent + rope, generator=generator).to(self.dtype)

    def store(self, rows: Sequence[torch.Tensor], kv: KVCache, batch: RaggedBatch) -> None:
        norm = weight(self.shape[1], self.dtype)
        Kernels().store_latent(rows[1], norm, 1e-6, turns(batch.positions, self.shape[2]), kv, batch, LAYER)

    def attend(self, kernels: Kernels, q: torch.Tensor, kv: KVCache, batch: RaggedBatch) -> torch.Tensor:
        return kernels.attend_latent(q, kv, batch, LAYER, kv.head_dim**-0.5, self.shape[1]).flatten(1)


class Request:
    """One request: what its tokens and its tree's slots bring (slot i at `start + i`), and its blocks."""

    def __init__(self, kind: Heads, start: int, slots: int, table: torch.Tensor, seed: int) -> None:
        self.start, self.table = start, table
        self.rows = kind.draw(start + slots, seed)

    def at(self, places: Sequence[int]) -> list[torch.Tensor]:
        return [x[list(places)] for x in self.rows]


class World:
    """A cache with room for some requests of at most `tokens` tokens, and a way to compute steps of them."""

    bases: Sequence[int] = BASES
    chunks = (2, 60)
    """Rows of a part of a prompt."""

    def __init__(self, kind: Heads, kernels: Kernels, size: int, tokens: int, requests: int) -> None:
        self.kind, self.kernels, self.size = kind, kernels, size
        each = -(-tokens // size)
        self.kv = kind.cache(each * requests + 1, size)
        self.tables = list(torch.split(torch.randperm(each * requests) + 1, each))

    def request(self, start: int, slots: int, seed: int) -> Request:
        """With everything before `start` stored."""
        request = Request(self.kind, start, slots, self.tables.pop(), seed)
        self.fill(request)
        return request

    def fill(self, request: Request) -> None:
        if request.start:
            batch = batch_of([Part(request.table, 0, request.start)], self.size)
            self.kind.store(request.at(range(request.start)), self.kv, batch)

    def step(self, parts: Sequence[tuple[Request, Part]]) -> list[torch.Tensor]:
        """Each part's rows of the output."""
        batch = batch_of([part for _, part in parts], self.size)
        if not any(part.paths for _, part in parts):
            batch = replace(batch, trees=None)
        rows = [torch.cat(x) for x in zip(*(request.at(part.places) for request, part in parts), strict=True)]
        self.kind.store(rows, self.kv, batch)
        out = self.attend(rows[0], [part for _, part in parts], batch)
        return list(out.split([len(part.places) for _, part in parts]))

    def attend(self, q: torch.Tensor, parts: Sequence[Part], batch: RaggedBatch) -> torch.Tensor:
        """Each row's output."""
        return self.kind.attend(self.kernels, q, self.kv, batch)

    def line(self, request: Request, path: Sequence[int]) -> torch.Tensor:
        """The output of a path's rows in a request of its own, whose tokens are the path's, one behind the other."""
        copy = Request.__new__(Request)
        copy.start, copy.table = request.start, self.tables.pop()
        copy.rows = tuple(request.at([*range(request.start), *(request.start + slot for slot in path)]))
        self.fill(copy)
        (out,) = self.step([(copy, Part(copy.table, copy.start, len(path)))])
        self.tables.append(copy.table)
        return out


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(world_of: type[World], kind: Heads, kernels: Kernels, rng: random.Random, most: int = 24) -> None:
    """Trees beside spans whose rows continue one another, all in one step: each as it would be alone."""
    trees = [random_tree(rng, most) for _ in range(2)]
    size, bases = rng.choice(BLOCK_SIZES), [rng.choice(world_of.bases) for _ in trees]
    world = world_of(kind, kernels, size, max(*bases, 150) + 70, 5)
    branching = [
        world.request(base, len(tree.paths), rng.randrange(999)) for base, tree in zip(bases, trees, strict=True)
    ]
    chunk, decode = world.request(rng.randrange(150), 60, 1), world.request(rng.randrange(150), 1, 2)
    linear = [
        (chunk, Part(chunk.table, chunk.start, rng.choice(world.chunks))),
        (decode, Part(decode.table, decode.start, 1)),
    ]
    before = [world.step([part])[0] for part in linear]
    parts = [(r, Part(r.table, r.start, paths=tree.paths)) for r, tree in zip(branching, trees, strict=True)]
    first, other, *rest = world.step([parts[0], linear[0], parts[1], linear[1]])
    assert equal(other, before[0]) and equal(rest[1], before[1])
    for request, tree, out in zip(branching, trees, (first, rest[0]), strict=True):
        assert out.isfinite().all()
        for path in (tree.paths[leaf] for leaf in tree.leaves):
            assert equal(out[path], world.line(request, path)), f"blocks of {size}, base {request.start}, path {path}"


SHAPES = [(4, 2, 64), (7, 1, 24), (3, 3, 16), (70, 1, 8)]


@pytest.mark.quick(every=5)
@EACH_KERNELS
@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_tree_has_the_bits_of_its_path_alone(
    kernels: Kernels, dtype: torch.dtype, stored: KVCacheDtype
) -> None:
    torch.manual_seed(0)
    for seed, shape in enumerate(SHAPES):
        rng = random.Random(f"{seed} {stored} {dtype}")
        check(World, Heads(shape, dtype, stored, rng.choice([None, None, 1, 3, 20, 200])), kernels, rng)


@EACH_KERNELS
@pytest.mark.parametrize("window", [1, 2, 9, 130])
def test_a_window_passes_over_a_row_s_ancestors(kernels: Kernels, window: int) -> None:
    torch.manual_seed(0)
    for seed in range(2):
        check(World, Heads((4, 2, 16), torch.float32, "auto", window), kernels, random.Random(seed))


@pytest.mark.quick(every=2)
@EACH_KERNELS
@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
def test_a_row_of_a_tree_has_the_bits_of_its_path_alone_in_latent_attention(
    kernels: Kernels, stored: KVCacheDtype
) -> None:
    torch.manual_seed(0)
    for seed, shape in enumerate([(5, 32, 8), (16, 72, 16), (70, 24, 2)]):
        for dtype in (torch.bfloat16, torch.float32):
            check(World, Latent(shape, dtype, stored, None), kernels, random.Random(f"{seed} {stored} {dtype}"))


KINDS = [
    Heads((4, 2, 64), torch.bfloat16, "auto", None),
    Heads((6, 2, 16), torch.float32, "int8", 20),
    Latent((5, 32, 8), torch.bfloat16, "fp8", None),
]
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=["heads", "window", "latent"])


@EACH_KERNELS
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_of_a_tree_is_attention_over_its_path(kernels: Kernels, window: int | None) -> None:
    torch.manual_seed(0)
    kind, tree = Heads((4, 2, 32), torch.float32, "auto", window), random_tree(random.Random(3))
    for base in (0, 120, 300):
        world = World(kind, kernels, 16, base + 24, 1)
        request = world.request(base, len(tree.paths), 5)
        (out,) = world.step([(request, Part(request.table, base, paths=tree.paths))])
        for slot, path in enumerate(tree.paths):
            rows = request.at([*range(base), *(base + slot for slot in path)])
            exact = kind.in_fp64(request.rows[0][base + slot], rows)
            torch.testing.assert_close(out[slot].double(), exact, atol=2e-6, rtol=1e-5)


@EACH_KERNELS
@EACH_KIND
def test_a_tree_may_grow_over_several_steps(kernels: Kernels, kind: Heads) -> None:
    torch.manual_seed(0)
    tree = Tree([-1, 0, 0, 1, 2, 2, 3, 4, 4, 7])
    for base, size in ((126, 16), (0, 32), (250, 256)):
        world = World(kind, kernels, size, base + 10, 2)
        request, again = (world.request(base, 10, 5) for _ in range(2))
        (whole,) = world.step([(request, Part(request.table, base, paths=tree.paths))])
        for slots in ([0], [1, 2], [5, 4, 3], [7], [9, 8, 6]):
            (some,) = world.step([(again, Part(again.table, base, paths=[tree.paths[slot] for slot in slots]))])
            assert equal(some, whole[slots])


@EACH_KERNELS
@pytest.mark.parametrize("kind", KINDS[:2], ids=["heads", "window"])
def test_a_path_that_is_moved_into_place_goes_on_as_if_nothing_else_had_been(kernels: Kernels, kind: Heads) -> None:
    torch.manual_seed(0)
    tree, base = Tree([-1, 0, 0, 1, 2, 2, 3, 4, 4, 7]), 125
    path, size = tree.paths[9], 16
    world = World(kind, kernels, size, base + 20, 2)
    request = world.request(base, 10, 5)
    world.step([(request, Part(request.table, base, paths=tree.paths))])
    sources, places = ([int(request.table[p // size]) * size + p % size for p in at] for at in _ends(base, path))
    kernels.move_rows(world.kv, sources, places)
    rows = request.at([*range(base), *(base + slot for slot in path), base + 3, base + 6])
    request.rows, after = tuple(rows), base + len(path)
    (out,) = world.step([(request, Part(request.table, after, 2))])
    request.start = base
    expected = world.line(request, range(len(path) + 2))
    assert equal(out, expected[-2:])


def _ends(base: int, path: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where a path's tokens lie, and where they would if it were all there is."""
    return [base + slot for slot in path], [base + depth for depth in range(len(path))]


@EACH_KERNELS
def test_a_draft_that_is_not_finite_reaches_only_those_that_follow_it(kernels: Kernels) -> None:
    for kind in KINDS:
        world = World(kind, kernels, 16, 20, 1)
        request = world.request(10, 5, 5)
        for rows in request.rows[1:]:
            rows[11] = float("inf")
        (out,) = world.step([(request, Part(request.table, 10, paths=Tree([-1, 0, 0, 1, 2]).paths))])
        assert out.isfinite().all(1).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_tokens_move_with_their_scales_and_all_are_read_before_any_is_written(
    stored: KVCacheDtype, as_tensors: bool
) -> None:
    kv = KVCache(4, 2, 3, 8, 16, torch.bfloat16, stored, draft_kv=KVShape(1, 2, 4, torch.bfloat16))
    other = kv.draft_kv
    assert other is not None
    kv.memory.random_(0, 100, generator=torch.Generator().manual_seed(1))
    before, untouched = kv.data.clone(), other.data.clone()
    sources, places = [17, 18, 40, 60], [18, 19, 17, 60]
    expected = KVCache(4, 2, 3, 8, 16, torch.bfloat16, stored)
    expected.data.copy_(before)
    whole = KVCache(4, 2, 3, 8, 16, torch.bfloat16, stored)
    whole.data.copy_(before)
    for source, place in zip(sources, places, strict=True):
        for ours, theirs in ((expected.numbers, whole.numbers), (expected.scales, whole.scales)):
            if ours is not None and theirs is not None:
                ours[place // 16, :, :, :, place % 16] = theirs[source // 16, :, :, :, source % 16]
    if as_tensors:
        Kernels().move_rows(kv, torch.tensor(sources), torch.tensor(places))
    else:
        Kernels().move_rows(kv, sources, places)
    assert torch.equal(kv.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(other.data, untouched)
    Kernels().move_rows(kv, [], [])
    with pytest.raises(ValueError, match="2 tokens cannot move to 1 slots"):
        Kernels().move_rows(kv, [1, 2], [3])


# -- what is refused -----------------------------------------------------------------------------------------------


@EACH_KERNELS
@EACH_KIND
def test_a_path_that_leaves_its_tree_is_refused(kernels: Kernels, kind: Heads) -> None:
    world = World(kind, kernels, 16, 60, 1)
    request = world.request(40, 3, 1)
    batch = batch_of([Part(request.table, 40, paths=[[0], [0, 1], [0, 2]])], 16)
    assert batch.trees is not None
    q = torch.cat(request.at([40, 41, 42])[:1])

    def refused(trees: Trees, message: str, **other: Any) -> None:
        with pytest.raises(ValueError, match=message):
            kind.attend(kernels, q, world.kv, replace(batch, trees=trees, **other))

    for slot in (-1, 3):
        paths = batch.trees.paths.clone()
        paths[2, 1] = slot
        refused(replace(batch.trees, paths=paths), r"name slots that their trees, of \[3, 3, 3\], do not have")
    refused(replace(batch.trees, paths=batch.trees.paths[:, :1]), r"rows \[0, 1, 1\] positions below .* have 1")
    refused(batch.trees, "positions below", positions=batch.positions - 1)


# -- whole models --------------------------------------------------------------------------------------------------


def hidden_states(model: Model, tokens: Sequence[int], part: Part, kv: KVCache) -> torch.Tensor:
    """Of the part's rows, whose tokens these are."""
    batch = replace(batch_of([part], kv.block_size), token_ids=torch.tensor(list(tokens)))
    with torch.inference_mode():
        return model.forward([batch], [kv])


@pytest.mark.quick(every=2)
@EACH_KERNELS
@pytest.mark.parametrize(
    "architecture, options", [("llama", {}), ("mistral", {"sliding_window": 6}), ("deepseek_v3", {})]
)
def test_a_model_s_hidden_states_in_a_tree_are_those_of_the_paths(
    kernels: Kernels, architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, **options)
    model = load_model(folder, kernels=kernels)
    tree, prompt, drafts = random_tree(random.Random(0)), random_prompt(126), random_prompt(24, seed=1)
    [kv], table = model.new_caches([21], 16), torch.randperm(20) + 1
    hidden_states(model, prompt, Part(table[:10], 0, 126), kv)
    drafted = hidden_states(model, drafts, Part(table[:10], 126, paths=tree.paths), kv)
    for leaf in tree.leaves:
        path = tree.paths[leaf]
        hidden_states(model, prompt, Part(table[10:], 0, 126), kv)
        line = hidden_states(model, [drafts[slot] for slot in path], Part(table[10:], 126, len(path)), kv)
        assert equal(drafted[path], line)
    path = tree.paths[tree.leaves[-1]]
    sources, places = ([int(table[p // 16]) * 16 + p % 16 for p in at] for at in _ends(126, path))
    kernels.move_rows(kv, sources, places)
    end = 126 + len(path)
    moved = hidden_states(model, [5], Part(table[:10], end, 1), kv)
    assert equal(moved, hidden_states(model, [5], Part(table[10:], end, 1), kv))
