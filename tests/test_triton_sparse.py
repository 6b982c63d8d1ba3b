"""Sparse attention in Triton: what plain torch chooses and sees, and bit-equal whatever is around a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.ops import Kernels, KVCache, RaggedBatch, sparse
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.triton import attention, splits
from quire.ops.triton import sparse as in_triton
from quire.ops.triton.kernels import TritonKernels
from quire.runner import device_forward
from tests.oracle import save_checkpoint
from tests.test_cpu_sparse import LAYER, Case, case_of
from tests.test_triton_attention import on_device
from tests.test_triton_engine import run, start
from tests.test_triton_rows import as_on_a_gpu
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

__all__ = ["as_on_a_gpu"]

TRITON = TritonKernels("cpu", deterministic=True)
SPANS = [(0, 30), (90, 1), (38, 4), (64, 7)]

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # idle rows of a tile, and padding


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short contexts have some of each."""
    monkeypatch.setattr(splits, "SPLIT", 64)
    monkeypatch.setattr(attention, "MERGED_AT_ONCE", tl.constexpr(2))
    for name, value in (("KEYS", 16), ("PART", 32), ("TAKEN", 32)):
        monkeypatch.setattr(in_triton, name, value)


def step_of(
    case: Case, spans: Sequence[tuple[int, int]], tables: Sequence[torch.Tensor], padding: tuple[int, int] = (3, 2)
) -> tuple[torch.Tensor, sparse.Choice, RaggedBatch]:
    """What a step chooses, as [rows] lists of slots, on the device's side."""
    batch = on_device(list(spans), list(tables), case.kv.block_size, padding)
    rows = len(batch.positions) - len(case.q)
    choice = sparse.choice(batch, case.top)
    choice.slots.fill_(-1)
    q, weights = (torch.cat([x, x.new_full((rows, *x.shape[1:]), float("nan"))]) for x in (case.q, case.weights))
    TRITON.choose(q, weights, case.kv, batch, LAYER, choice)
    return choice.slots[: len(case.q)], choice, batch


def whole_step(case: Case, padding: tuple[int, int] = (3, 2)) -> tuple[torch.Tensor, sparse.Choice, RaggedBatch]:
    return step_of(case, SPANS, list(case.batch.block_tables), padding)


KINDS: list[tuple[torch.dtype, KVCacheDtype]] = [
    (torch.float32, "auto"),
    (torch.float16, "int8"),
    (torch.float16, "fp8"),
    (torch.float16, "auto"),
]


@pytest.mark.quick("65-dtype8-fp8", "40-dtype10-auto")
@pytest.mark.parametrize(
    ("top", "dtype", "stored"),
    [
        pytest.param(top, *kind, marks=() if top == (40, 1, 65, 40)[i] else pytest.mark.slow)
        for i, kind in enumerate(KINDS)
        for top in (1, 40, 65)
    ],
)
def test_what_is_chosen_is_what_plain_torch_chooses_with_many_ties(
    top: int, dtype: torch.dtype, stored: KVCacheDtype
) -> None:
    case = case_of(top, dtype, stored, True, SPANS, top=top)
    slots, _, batch = whole_step(case)
    theirs = case.chosen(Kernels())
    assert theirs.rows is not None
    assert len(theirs.slots) > 0 and torch.equal(slots[theirs.rows].long(), theirs.slots)
    spans = batch.spans
    assert spans is not None
    for row in theirs.whole.tolist():  # all that there is
        span = next(s for s, last in enumerate(spans.row_starts[1:].tolist()) if row < last)
        at = torch.arange(int(batch.positions[row]) + 1)
        table, size = case.batch.block_tables[span], case.kv.block_size
        assert torch.equal(slots[row, : len(at)].long(), table[at // size] * size + at % size)


def test_heads_are_added_group_by_group_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_triton, "MOST_HEADS", 16)
    case = case_of(3, torch.float16, "int8", True, SPANS, top=40, heads=40)
    slots, _, _ = whole_step(case)
    theirs = case.chosen(Kernels())
    assert torch.equal(slots[theirs.rows].long(), theirs.slots)


@pytest.mark.parametrize(("dtype", "stored"), [KINDS[1], pytest.param(*KINDS[0], marks=pytest.mark.slow)])
def test_a_row_chooses_and_sees_the_same_alone_and_among_others(
    dtype: torch.dtype, stored: KVCacheDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(4, dtype, stored, False, SPANS, top=40, heads=4, width=20)
    width = case.attended.shape[2] - 8

    def attend(choice: sparse.Choice, batch: RaggedBatch, q: torch.Tensor) -> torch.Tensor:
        rows = len(batch.positions) - len(q)
        q = torch.cat([q, q.new_full((rows, *q.shape[1:]), float("nan"))])
        return TRITON.attend_chosen(q, choice, case.kv, batch, LAYER, 0.2, width)[: len(q) - rows]

    slots, choice, batch = whole_step(case)
    out = attend(choice, batch, case.attended)
    assert out.isfinite().all()
    monkeypatch.setattr(in_triton, "SCORE_BYTES", 4 * 3 * 300)
    monkeypatch.setattr(splits, "SCRATCH_BYTES", 0)
    again, choice, batch = whole_step(case, (0, 0))
    there = torch.arange(case.top) <= batch.positions[:, None]  # of other rows there is less
    assert torch.equal(again[there], slots[there]) and torch.equal(attend(choice, batch, case.attended), out)
    for token in (0, 29, 30, 34, 41):
        span = next(s for s, last in enumerate(case.batch.row_starts[1:]) if token < last)
        position = int(case.batch.positions[token])
        one = case._replace(q=case.q[token : token + 1], weights=case.weights[token : token + 1])
        mine, choice, batch = step_of(one, [(position, 1)], [case.batch.block_tables[span]], (0, 0))
        seen = min(position + 1, case.top)
        assert torch.equal(mine[0, :seen], slots[token, :seen])
        assert torch.equal(attend(choice, batch, case.attended[token : token + 1])[0], out[token])


@pytest.mark.quick("dtype0-auto", "dtype1-int8")
@pytest.mark.parametrize(("dtype", "stored"), KINDS)
def test_attention_sees_what_plain_torch_sees(dtype: torch.dtype, stored: KVCacheDtype) -> None:
    case = case_of(5, dtype, stored, True, SPANS, top=40, heads=4)  # of whole numbers: the choice is the same
    width = case.attended.shape[2] - 8
    _, choice, batch = whole_step(case, (0, 0))
    out = TRITON.attend_chosen(case.attended, choice, case.kv, batch, LAYER, 0.2, width)
    exact = Kernels().attend_chosen(case.attended, case.chosen(Kernels()), case.kv, case.batch, LAYER, 0.2, width)
    tolerance = 4e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out, exact, atol=tolerance, rtol=tolerance)


def test_a_batch_whose_spans_are_on_the_host_is_refused() -> None:
    case = case_of(5, torch.float32, "auto", True, SPANS, top=40)
    choice = sparse.choice(case.batch, case.top)
    with pytest.raises(ValueError, match="not on the device"):
        TRITON.choose(case.q, case.weights, case.kv, case.batch, LAYER, choice)


# -- the whole engine ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}),
        pytest.param("deepseek_v32", {}, marks=pytest.mark.slow),
    ],
)
def test_the_engine_gives_the_tokens_of_the_plain_kernels_whatever_is_around_a_request(
    architecture: str, sizes: dict[str, Any], tmp_path
) -> None:
    """With the prefix cache, which copies the head of a block; of 15 positions, rows see at most 6."""
    sizes = {"num_hidden_layers": 2, "index_topk": 6, "mlp_layer_types": ["dense", "dense"], **sizes}
    folder = str(save_checkpoint(tmp_path, architecture, dtype=torch.float32, **sizes))
    plain = Engine(EngineConfig(model=folder, threads=1, device="cpu", cpu_kernels="torch", max_model_len=32))
    theirs = run(plain, [1, 2], max_tokens=2)
    with mock.patch.object(device_forward, "CHUNK", 4):  # the interpreter is slow: steps are padded to few rows
        engine = start(folder, {})
        together = run(engine, [1, 2], max_tokens=2)
        assert run(engine, [2], max_tokens=2) == {2: together[2]}
    assert engine.stats.cached_tokens > 0
    for index, ours in together.items():
        assert [token for token, _ in ours] == [token for token, _ in theirs[index]]
        for (_, [got, *_]), (_, [want, *_]) in zip(ours, theirs[index], strict=True):
            assert got == pytest.approx(want, abs=1e-4)


# -- for GPUs that are not there -----------------------------------------------------------------------------------

SHAPES: list[tuple[torch.dtype, int, int, KVCacheDtype]] = [
    (torch.bfloat16, 64, 128, "auto"),
    (torch.bfloat16, 32, 64, "fp8"),
]
"""Data type, heads of the indexer and of attention (DeepSeek V3.2's and GLM-5's), and how the cache is stored."""


def launch_all() -> None:
    """Of each kind, steps of several sizes."""
    for dtype, index_heads, heads, how in SHAPES:
        kv = KVCache(40, 2, 1, 512 + 64 + 128, 16, dtype, how, sides=1)
        for tokens in (2, 4):
            batch = on_device([(0, 1)] * tokens, [torch.zeros(512, dtype=torch.int64)] * tokens, 16)
            choice = sparse.choice(batch, 2048)
            q = torch.empty(tokens, index_heads, 128, dtype=dtype)
            TRITON.choose(q, torch.empty(tokens, index_heads), kv, batch, 1, choice)
            TRITON.attend_chosen(torch.empty(tokens, heads, 576, dtype=dtype), choice, kv, batch, 1, 0.1, 512)
            angles = torch.empty(tokens, 32)
            tables, norm = (angles, angles), torch.empty(512, dtype=dtype)
            compressed, keys = (torch.empty(tokens, size, dtype=dtype) for size in (576, 128))
            TRITON.store_latent(compressed, norm, 1e-6, tables, kv, batch, 1, keys)


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus(arch: int) -> None:
    found = compile_all("tests.test_triton_sparse", arch)
    count = Counter(use["kernel"] for use in found)
    assert count["_score"] == len(SHAPES) == count["_attend_latent"] and count["_choose"] >= 1
    instruction, most = {80: ("mma.sync", 160), 90: ("wgmma", 227), 100: ("tcgen05", 227)}[arch]
    assert all(instruction in use["matrix"] for use in found if use["kernel"] == "_attend_latent"), found
    assert all(use["matrix"] for use in found if use["kernel"] == "_score"), found
    assert max(use["shared"] for use in found) <= most * 1024, found
