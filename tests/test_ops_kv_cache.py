"""What two models keep of the same tokens lies in the same blocks: each sees its own, and a block is one range."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

import tests.triton_launches  # noqa: F401  # for every test
from quire.ops import BLOCK_SIZES, Kernels, KVCache, KVShape, RaggedBatch
from quire.ops.triton.kernels import TritonKernels
from tests.test_cpu_latent import turns, weight
from tests.test_trees import EACH_KERNELS, KERNELS

TARGETS = [
    KVShape(2, 2, 16, torch.bfloat16),
    KVShape(3, 1, 24, torch.float32),
    KVShape(2, 2, 8, torch.bfloat16, "int8"),
    KVShape(1, 3, 16, torch.float16, "fp8"),
    KVShape(2, 1, 40, torch.bfloat16, sides=1),
    KVShape(1, 1, 18, torch.float32, "int8", sides=1),  # a token's 22 bytes do not fill cache lines
]
DRAFTS = [
    KVShape(1, 2, 24, torch.bfloat16),
    KVShape(2, 1, 8, torch.float32),
    KVShape(1, 1, 24, torch.float16, sides=1),
]
Pair = tuple[KVShape, KVShape]


def each(pairs: Sequence[Pair]) -> pytest.MarkDecorator:
    names = [" and ".join(f"{kv.dtype} {kv.kv_cache_dtype} {kv.head_dim}" for kv in pair) for pair in pairs]
    return pytest.mark.parametrize("pair", pairs, ids=[name.replace("torch.", "") for name in names])


PAIRS = [(target, draft) for target in TARGETS for draft in DRAFTS]
EACH_PAIR = each(PAIRS)
BLOCKS, ROPE = 7, 8


def alone(shape: KVShape, size: int) -> KVCache:
    """A cache of one model's own."""
    heads = BLOCKS, shape.layers, shape.kv_heads, shape.head_dim, size
    return KVCache(*heads, shape.dtype, shape.kv_cache_dtype, sides=shape.sides)


def together(pair: Pair, size: int) -> tuple[KVCache, KVCache]:
    """Both models' caches over the same blocks."""
    shape, behind = pair
    heads = BLOCKS, shape.layers, shape.kv_heads, shape.head_dim, size
    kv = KVCache(*heads, shape.dtype, shape.kv_cache_dtype, sides=shape.sides, draft_kv=behind)
    assert kv.draft_kv is not None
    return kv, kv.draft_kv


def bits(kv: KVCache) -> torch.Tensor:
    """All that a model keeps."""
    return kv.data.contiguous().view(torch.uint8)


def store(kernels: Kernels, kv: KVCache, slots: Sequence[int], seed: int) -> None:
    """Random rows into some slots of all layers."""
    generator, none = torch.Generator().manual_seed(seed), torch.zeros(0, dtype=torch.int64)
    batch = RaggedBatch(none, none, torch.tensor(slots), [0], [], none.view(0, 0), kv.block_size)
    for layer in range(kv.layers):
        width = kv.head_dim if kv.sides == 1 else 4 * kv.kv_heads * kv.head_dim
        rows = torch.randn(len(slots), width, generator=generator).to(kv.dtype)
        if kv.sides == 1:
            norm, tables = weight(kv.head_dim - ROPE, kv.dtype), turns(torch.arange(len(slots)), ROPE)
            kernels.store_latent(rows, norm, 1e-6, tables, kv, batch, layer)
        else:
            angles = torch.rand(len(slots), kv.head_dim // 2, generator=generator)
            kernels.rotate_and_store(rows, None, (angles.cos(), angles.sin()), kv, batch, layer)


def attend(kernels: Kernels, kv: KVCache, table: torch.Tensor, context: int) -> torch.Tensor:
    """What the last three rows of a request see in each layer: [layers, 3, ..]."""
    positions, size = torch.arange(context - 3, context), kv.block_size
    slots = table[positions // size] * size + positions % size
    generator, outs = torch.Generator().manual_seed(context), []
    for layer in range(kv.layers):
        batch = RaggedBatch(torch.zeros(3).long(), positions, slots, [0, 3], [context], table[None], size)
        q = torch.randn(3, 2 * kv.kv_heads, kv.head_dim, generator=generator).to(kv.dtype)
        if kv.sides == 1:
            outs.append(kernels.attend_latent(q, kv, batch, layer, 0.3, kv.head_dim - ROPE).flatten(1))
        else:
            outs.append(kernels.attend(q, kv, batch, layer, 0.3, None))
    return torch.stack(outs)


def use_at_random(kernels: Kernels, pair: Pair, size: int, seed: int) -> tuple[list[KVCache], list[KVCache]]:
    """The same things happen to both models' caches in shared blocks, and to those that each has alone."""
    draw = random.Random(seed)
    shared, own = list(together(pair, size)), [alone(shape, size) for shape in pair]
    for step in range(10):
        kind = draw.choice(["store", "store", "copy", "move"])
        places = draw.sample(range(size, BLOCKS * size), draw.choice([1, 2, 9]) * 2)
        half = len(places) // 2
        if kind == "store":  # of one model
            which = draw.randrange(2)
            store(kernels, shared[which], places, step)
            store(kernels, own[which], places, step)
        elif kind == "copy":
            source, *others = draw.sample(range(1, BLOCKS), 3)
            copies = [(source, other, draw.choice([1, size // 2, size])) for other in others]
            for kv in (shared[0], *own):  # of both, whoever is asked
                kernels.copy_blocks(kv, copies)
        else:  # of one model alone
            which = draw.randrange(2)
            for kv in (shared[which], own[which]):
                kernels.move_rows(kv, places[:half], places[half:])
        for one, other in zip(shared, own, strict=True):
            assert torch.equal(bits(one), bits(other)), f"{kind} in step {step}"
    return shared, own


@EACH_PAIR
@EACH_KERNELS
def test_neither_model_sees_or_changes_what_the_other_keeps(kernels: Kernels, pair: Pair) -> None:
    for seed, size in enumerate((16, 32)):
        shared, own = use_at_random(kernels, pair, size, seed)
        table = torch.tensor([3, 1, 6, 2])
        for one, other in zip(shared, own, strict=True):
            for context in (3, size + 1, 4 * size - 5):
                out = attend(kernels, one, table, context)
                assert out.isfinite().all() and torch.equal(out, attend(kernels, other, table, context))


@pytest.mark.quick(
    "float32 int8 18 and float32 auto 8", "bfloat16 auto 16 and float32 auto 8", "float32 int8 18 and float16 auto 24"
)
@each(PAIRS[::4] + PAIRS[1::8])
def test_the_same_holds_in_triton(pair: Pair) -> None:
    use_at_random(TritonKernels("cpu", deterministic=True), pair, 16, seed=7)


@EACH_PAIR
def test_a_block_is_one_range_of_bytes_that_holds_both_models_parts(pair: Pair) -> None:
    for size in BLOCK_SIZES:
        kv, behind = together(pair, size)
        each = kv.bytes_per_block
        assert each == behind.bytes_per_block == size * sum(shape.bytes_per_token for shape in pair)
        assert kv.memory.shape == (BLOCKS, each) and kv.memory[1].is_contiguous()
        for block in range(BLOCKS):
            first = kv.memory[block].data_ptr()
            starts = [cache.data[block].data_ptr() for cache in (kv, behind)]
            ends = [cache.data[block].data_ptr() + cache.data[block].nbytes for cache in (kv, behind)]
            assert starts[0] == first and ends[0] <= starts[1] and ends[1] <= first + each
            assert all(start % 64 == 0 for start in starts)


@EACH_PAIR
def test_new_blocks_are_all_zeros(pair: Pair) -> None:
    """Behind a cached head a drafting model may see rows that nobody has written."""
    kv, _ = together(pair, 16)
    assert kv.memory.count_nonzero() == 0


def after_a_move(move: Callable[[KVCache, dict[int, int]], None], pair: Pair) -> list[bool]:
    """Whether each model sees after its request's blocks have moved what it saw before."""
    kernels, context = KERNELS[-1], 4 * 16 - 5
    caches = together(pair, 16)
    table, new = torch.tensor([3, 1, 6, 2]), torch.tensor([4, 5, 2, 3])
    slots = [int(table[at // 16]) * 16 + at % 16 for at in range(context)]
    for kv in caches:
        store(kernels, kv, slots, seed=1)
    before = [attend(kernels, kv, table, context) for kv in caches]
    move(caches[0], dict(zip(table.tolist(), new.tolist(), strict=True)))
    after = [attend(kernels, kv, new, context) for kv in caches]
    return [torch.equal(one, other) for one, other in zip(before, after, strict=True)]


@EACH_PAIR
def test_whoever_moves_a_block_as_one_range_moves_both_models_keys_and_values(pair: Pair) -> None:
    def whole(kv: KVCache, places: dict[int, int]) -> None:
        away = {block: kv.memory[block].clone() for block in places}  # swapped out, and into other blocks
        for block, place in places.items():
            kv.memory[place] = away[block]

    def of_one(kv: KVCache, places: dict[int, int]) -> None:
        away = {block: kv.data[block].clone() for block in places}
        for block, place in places.items():
            kv.data[place] = away[block]

    assert after_a_move(whole, pair) == [True, True]
    assert after_a_move(of_one, pair) == [True, False]
