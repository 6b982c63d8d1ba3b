"""Rows of a tree in Triton: the bits of their paths alone, in the interpreter; and the kernels compile for GPUs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from quire.ops import Kernels, KVCache, KVShape, RaggedBatch
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.ragged import DeviceSpans, DeviceTrees
from quire.ops.triton import attention, latent, splits
from quire.ops.triton.kernels import TritonKernels
from tests.devices import SpanKernels
from tests.test_trees import Heads, Latent, Part, Tree, World, batch_of, check, equal
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

TRITON = TritonKernels("cpu", deterministic=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # idle rows of a tile, and padding


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SPLIT", 128)
    monkeypatch.setattr(attention, "MERGED_AT_ONCE", 2)


def on_device(parts: Sequence[Part], size: int, kernels: Kernels, padding: tuple[int, int] = (0, 0)) -> RaggedBatch:
    """The batch as kernels read it that find spans on the device; its rows' slots are `places` one after the other."""
    host, (rows, spans) = batch_of(parts, size), padding
    assert host.trees is not None
    count = len(parts)

    def padded(numbers: Sequence[int], value: int, how_many: int = spans) -> torch.Tensor:
        return torch.tensor([*numbers, *[value] * how_many], dtype=torch.int32)

    depths = [len(path) - 1 for part in parts for path in part.paths or [[]] * part.rows]
    device = DeviceSpans(
        row_starts=padded(host.row_starts, host.row_starts[-1]),
        starts=padded([part.places[0] for part in parts], 0),
        context_lens=padded([-7] * count, -7),
        table_rows=padded([count - 1 - span for span in range(count)], 0),
        block_tables=host.block_tables.flip(0).int(),
        trees=DeviceTrees(
            bases=padded([part.start if part.paths else -5 for part in parts], 0),
            depths=padded(depths, -1, rows),
            paths=torch.cat([host.trees.paths, torch.zeros(rows, host.trees.paths.shape[1])]).int(),
        ),
    )
    owner = [span for span, part in enumerate(parts) for _ in part.places]
    tokens = padded([7] * len(owner), 7, rows)
    placed = kernels.place(tokens, padded(owner, 0, rows), torch.zeros(count, 1, dtype=torch.int64), device, size)
    for got, wanted in zip(placed, (torch.full_like(host.slots, 7), host.positions, host.slots), strict=True):
        assert got.tolist() == [*wanted.tolist(), *[0] * rows]
    assert device.context_lens.tolist() == [part.places[-1] + 1 for part in parts] + [0] * spans
    return RaggedBatch(*placed, [], [], torch.empty(0, 0, dtype=torch.int64), size, device)


class DeviceWorld(World):
    """Whose kernels read a step's spans on the device, with rows and spans of padding."""

    bases = (0, 16, 63, 64, 100, 127, 128, 130, 200)
    chunks = (2, 9)

    def attend(self, q: torch.Tensor, parts: Sequence[Part], batch: RaggedBatch) -> torch.Tensor:
        batch = on_device(parts, self.size, self.kernels, (3, 2))
        assert batch.spans is not None
        if not any(part.paths for part in parts):
            batch.spans.trees = None
        padded = torch.cat([q, q.new_full((3, *q.shape[1:]), float("nan"))])
        return super().attend(padded, parts, batch)[: len(q)]


@pytest.mark.quick("0-dtype0-auto-shape0-None-False", "0-dtype1-int8-shape1-20-True")
@pytest.mark.parametrize(
    "dtype, stored, shape, window, listed",
    [
        (torch.float32, "auto", (4, 2, 32), None, False),
        (torch.float32, "int8", (7, 1, 16), 20, True),
        (torch.float16, "auto", (4, 2, 16), 3, True),
        pytest.param(torch.float16, "fp8", (10, 2, 24), None, True, marks=pytest.mark.slow),
        pytest.param(torch.float16, "int8", (70, 1, 16), 140, False, marks=pytest.mark.slow),
        (torch.float16, "fp8", (6, 2, 24), 140, True),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_row_of_a_tree_has_the_bits_of_its_path_alone(
    seed: int,
    dtype: torch.dtype,
    stored: KVCacheDtype,
    shape: tuple[int, int, int],
    window: int | None,
    listed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splits, "WORKERS", 6)
    if not listed:  # their splits are computed one after the other
        monkeypatch.setattr(splits, "SCRATCH_BYTES", 0)
    torch.manual_seed(0)
    check(DeviceWorld, Heads(shape, dtype, stored, window), TRITON, random.Random(f"{seed} {shape}"), most=12)


@pytest.mark.parametrize("base", [128, 256])
def test_a_tree_that_begins_a_split_has_the_bits_of_its_paths(base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SCRATCH_BYTES", 0)  # one program, split after split
    torch.manual_seed(0)
    tree, world = Tree([-1, 0, 0, 1]), DeviceWorld(Heads((4, 2, 32), torch.float32, "auto", None), TRITON, 16, 300, 2)
    request = world.request(base, len(tree.paths), 5)
    (out,) = world.step([(request, Part(request.table, base, paths=tree.paths))])
    for path in (tree.paths[leaf] for leaf in tree.leaves):
        assert equal(out[path], world.line(request, path))


@pytest.mark.quick("dtype3-int8-shape3-False")
@pytest.mark.parametrize(
    "dtype, stored, shape, listed",
    [
        (torch.float32, "auto", (4, 32, 8), True),
        pytest.param(torch.float16, "fp8", (16, 24, 16), True, marks=pytest.mark.slow),
        pytest.param(torch.float16, "int8", (70, 16, 8), False, marks=pytest.mark.slow),
        (torch.float16, "int8", (6, 16, 8), False),
    ],
)
def test_a_row_of_a_tree_has_the_bits_of_its_path_alone_in_latent_attention(
    dtype: torch.dtype,
    stored: KVCacheDtype,
    shape: tuple[int, int, int],
    listed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splits, "SPLIT", 64)
    monkeypatch.setattr(splits, "WORKERS", 6)
    if not listed:
        monkeypatch.setattr(splits, "SCRATCH_BYTES", 0)
    torch.manual_seed(0)
    check(DeviceWorld, Latent(shape, dtype, stored, None), TRITON, random.Random(f"{shape}"), most=9)


@pytest.mark.parametrize("kernels", [TRITON, SpanKernels()], ids=["triton", "torch"])
def test_a_row_of_a_tree_is_attention_over_its_path(kernels: Kernels) -> None:
    torch.manual_seed(0)
    kind, tree = Heads((4, 2, 32), torch.float32, "auto", 100), Tree([-1, 0, 0, 1, 2, 2, 4])
    world = DeviceWorld(kind, kernels, 16, 150, 1)
    request = world.request(125, len(tree.paths), 5)
    (out,) = world.step([(request, Part(request.table, 125, paths=tree.paths))])
    for slot, path in enumerate(tree.paths):
        exact = kind.in_fp64(request.rows[0][125 + slot], request.at([*range(125), *(125 + slot for slot in path)]))
        torch.testing.assert_close(out[slot].double(), exact, atol=2e-6, rtol=1e-5)


@pytest.mark.quick("kind1")
@pytest.mark.parametrize(
    "kind", [Heads((4, 2, 16), torch.float32, "auto", 20), Latent((4, 32, 8), torch.float16, "auto", None)]
)
def test_a_tree_may_grow_over_several_steps(kind: Heads) -> None:
    torch.manual_seed(0)
    tree, base = Tree([-1, 0, 0, 1, 2, 2, 3, 4, 4, 7]), 126
    world = DeviceWorld(kind, TRITON, 16, base + 10, 2)
    request, again = (world.request(base, 10, 5) for _ in range(2))
    (whole,) = world.step([(request, Part(request.table, base, paths=tree.paths))])
    for first, last in ((0, 1), (1, 3), (3, 7), (7, 10)):
        (some,) = world.step([(again, Part(again.table, base, paths=tree.paths[first:last]))])
        assert equal(some, whole[first:last])


def test_a_draft_that_is_not_finite_reaches_only_those_that_follow_it() -> None:
    for kind in (Heads((4, 2, 16), torch.float16, "auto", None), Latent((4, 32, 8), torch.float16, "auto", None)):
        tree = Tree([-1, 0, 0, 1, 2])
        world = DeviceWorld(kind, TRITON, 16, 20, 2)
        request = world.request(10, 5, 5)
        for rows in request.rows[1:]:
            rows[11] = float("inf")
        (out,) = world.step([(request, Part(request.table, 10, paths=tree.paths))])
        assert out.isfinite().all(1).tolist() == [True, False, True, False, True]


@pytest.mark.quick("kind3")
@pytest.mark.parametrize(
    "kind",
    [
        Heads((4, 2, 16), torch.float16, "auto", None),
        pytest.param(Heads((4, 2, 16), torch.float32, "fp8", 20), marks=pytest.mark.slow),
        pytest.param(Latent((4, 32, 8), torch.float16, "auto", None), marks=pytest.mark.slow),
        Latent((4, 24, 16), torch.float16, "int8", None),
    ],
)
def test_what_another_model_keeps_in_the_same_blocks_changes_nothing(kind: Heads) -> None:
    trees, outs = Tree([-1, 0, 0, 1, 2]).paths, []
    for where in ("alone", "first", "behind"):
        torch.manual_seed(0)
        world = DeviceWorld(kind, TRITON, 16, 150, 2)
        kv, other = world.kv, KVShape(1, 2, 24, torch.float16)
        own = KVShape(kv.layers, kv.kv_heads, kv.head_dim, kv.dtype, kind.stored, kv.sides)
        if where != "alone":
            shape, behind = (own, other) if where == "first" else (other, own)
            heads = kv.num_blocks, shape.layers, shape.kv_heads, shape.head_dim, 16
            both = KVCache(*heads, shape.dtype, shape.kv_cache_dtype, sides=shape.sides, draft_kv=behind)
            both.memory.fill_(255)
            assert both.draft_kv is not None
            world.kv = both if where == "first" else both.draft_kv
        one, another = world.request(130, 6, 5), world.request(100, 9, 6)
        outs.append(world.step([(one, Part(one.table, 130, paths=trees)), (another, Part(another.table, 100, 9))]))
    for out in zip(*outs, strict=True):
        assert out[0].isfinite().all() and equal(out[0], out[1]) and equal(out[0], out[2])


def launch_all() -> None:
    """A tree of Qwen3-0.6B, and one of DeepSeek-V2-Lite; called where kernels are compiled."""
    parts = [Part(torch.zeros(2560, dtype=torch.int64), 100, paths=Tree([-1, *range(31)]).paths)]
    batch = on_device(parts, 16, Kernels())
    for how in ("auto", "fp8"):
        kv = KVCache(2, 28, 8, 128, 16, torch.bfloat16, how)
        q = torch.empty(32, 16, 128, dtype=torch.bfloat16)
        attention.attend(q, kv, batch, 1, 0.1, None)
    kv = KVCache(2, 27, 1, 576, 16, torch.bfloat16, sides=1)
    latent.attend_latent(torch.empty(32, 16, 576, dtype=torch.bfloat16), kv, batch, 1, 0.1, 512)
    spans = batch.spans
    assert spans is not None
    TRITON.place(torch.zeros(32).int(), torch.zeros(32).int(), torch.zeros(1, 1).long(), spans, 16)


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus(arch: int) -> None:
    found = compile_all("tests.test_triton_trees", arch)
    instruction = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}[arch]
    kernels = [use for use in found if use["kernel"] in ("_attend", "_attend_latent")]
    assert len(kernels) == 3 and all(use["matrix"] == [instruction] for use in kernels), found
    assert {use["kernel"] for use in found} >= {"_merge_splits", "_place"}
    assert all(use["shared"] <= (163 if arch == 80 else 227) * 1024 for use in kernels), kernels
