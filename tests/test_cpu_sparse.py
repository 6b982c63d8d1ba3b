"""Sparse attention in C++: what plain torch chooses, whatever is around a row, and attention to it where it lies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from quire.ops import BLOCK_SIZES, Kernels, KVCache, RaggedBatch, sparse
from quire.ops.cpu import library
from quire.ops.cpu import sparse as in_cpp
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kv_cache import KEY, KVCacheDtype, quantize
from tests.test_cpu_attention import batch_of
from tests.test_cpu_latent import last_place

ISAS = library.usable()
LAYERS, LAYER = 2, 1

pytestmark = pytest.mark.skipif(not ISAS, reason="the C++ kernels were not built: there was no compiler")


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


class Case(NamedTuple):
    """A step: index queries [tokens, heads, width] and weights of all rows, and queries of attention."""

    q: torch.Tensor
    weights: torch.Tensor
    attended: torch.Tensor
    kv: KVCache
    batch: RaggedBatch
    top: int

    def chosen(self, kernels: Kernels, batch: RaggedBatch | None = None) -> sparse.Choice:
        batch = batch or replace(self.batch)  # without what other kernels made for it
        choice = sparse.choice(batch, self.top)
        of = choice.of_rows
        kernels.choose(of(self.q), of(self.weights), self.kv, batch, LAYER, choice)
        return choice


SPANS = [(0, 70), (200, 1), (39, 3), (511, 1), (130, 20), (500, 13)]


def case_of(
    seed: int, dtype: torch.dtype, stored: KVCacheDtype, whole: bool, spans: list[tuple[int, int]], **fixed: int
) -> Case:
    """With `whole`, of small whole numbers, whose sums are exact and often equal. What no row may read is NaN."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads = fixed.get("heads", rng.choice([1, 4, 16, 24, 40]))
    width = fixed.get("width", rng.choice([8, 20, 64, 128]))
    latent, rope, size = rng.choice([16, 72]), 8, rng.choice(BLOCK_SIZES)

    def numbers(*shape: int) -> torch.Tensor:
        if whole:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    counts = [-(-(start + rows) // size) for start, rows in spans]
    row = latent + rope + width
    kv = KVCache(sum(counts) + 1, LAYERS, 1, row, size, dtype, stored, sides=1)
    kv.data.view(torch.uint8).fill_(255)
    tables = torch.split(torch.randperm(sum(counts), generator=generator) + 1, counts)
    for (start, count), table in zip(spans, tables, strict=True):
        rows = numbers(start + count, row).to(dtype)
        rows[:, 0] = {"auto": 1.0, "int8": 127.0, "fp8": 448.0}[stored] if whole else 1.0  # codes are the numbers
        at = torch.arange(start + count)
        block, offset = table[at // size], at % size
        if kv.scales is None:
            kv.numbers[block, LAYER, 0, KEY, offset] = rows
        else:
            codes, scales = quantize(rows, kv.stored_dtype)
            kv.numbers.view(torch.uint8)[block, LAYER, 0, KEY, offset] = codes.view(torch.uint8)
            kv.scales[block, LAYER, 0, KEY, offset] = scales
    tokens = sum(rows for _, rows in spans)
    q, weights = numbers(tokens, heads, width).to(dtype), numbers(tokens, heads)
    attended = torch.randn(tokens, 3, latent + rope, generator=generator).to(dtype)
    top = fixed.get("top", rng.choice([1, 40, 129, 500]))
    return Case(q, weights, attended, kv, batch_of(spans, tables, size), top)


KINDS: list[tuple[torch.dtype, KVCacheDtype]] = [
    (torch.float32, "auto"),
    (torch.bfloat16, "auto"),
    (torch.float16, "int8"),
    (torch.bfloat16, "fp8"),
    (torch.bfloat16, "int8"),
]


@pytest.mark.parametrize(("dtype", "stored"), KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_chosen_is_what_plain_torch_chooses_with_many_ties(
    kernels: CpuKernels, seed: int, dtype: torch.dtype, stored: KVCacheDtype
) -> None:
    case = case_of(seed, dtype, stored, True, SPANS)
    ours, theirs = case.chosen(kernels), case.chosen(Kernels())
    assert len(ours.slots) > 0 and torch.equal(ours.slots, theirs.slots)


@pytest.mark.parametrize(("dtype", "stored"), KINDS[:3])
def test_of_real_numbers_the_best_are_chosen(kernels: CpuKernels, dtype: torch.dtype, stored: KVCacheDtype) -> None:
    """By sums in fp64, but for what those in fp32 take for equal."""
    case = case_of(5, dtype, stored, False, SPANS)
    choice = case.chosen(kernels)
    assert choice.rows is not None
    for each in choice.beyond:
        for row in range(each.first, each.last):
            table, size = case.batch.block_tables[each.span], case.kv.block_size
            at = torch.arange(each.position + row - each.first + 1)
            slots = table[at // size] * size + at % size
            keys = case.kv.numbers[slots // size, LAYER, 0, KEY, slots % size, -case.q.shape[2] :].double()
            if case.kv.scales is not None:
                keys = keys * case.kv.scales[slots // size, LAYER, 0, KEY, slots % size].unsqueeze(1)
            token = choice.rows[row]
            scores = (case.q[token].double() @ keys.t()).relu_().mul_(case.weights[token].unsqueeze(1)).sum(0)
            found = torch.isin(slots, choice.slots[row])
            assert found.sum() == case.top and torch.equal(slots[found], choice.slots[row])  # ascending, none twice
            error = 1e-5 * float(scores.abs().max())
            assert float(scores[found].min()) >= float(scores.topk(case.top).values.min()) - error


def test_a_row_chooses_the_same_alone_and_among_others_in_any_rounds_by_any_threads(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(7, torch.bfloat16, "auto", False, SPANS, top=40)
    whole = case.chosen(kernels)
    assert whole.rows is not None
    for most, threads in ((1, 2), (20_000, 1), (2**26, 3)):
        monkeypatch.setattr(in_cpp, "SCORE_BYTES", most)
        with kernels.threads(threads):
            assert torch.equal(case.chosen(kernels).slots, whole.slots)
    for index, token in enumerate(whole.rows.tolist()):
        span = next(s for s, last in enumerate(case.batch.row_starts[1:]) if token < last)
        end = case.batch.context_lens[span] - case.batch.row_starts[span + 1] + token + 1
        alone = batch_of([(end - 1, 1)], [case.batch.block_tables[span]], case.kv.block_size)
        one = case._replace(q=case.q[token : token + 1], weights=case.weights[token : token + 1])
        assert torch.equal(one.chosen(kernels, alone).slots[0], whole.slots[index])


def test_two_thousand_of_a_long_context(kernels: CpuKernels) -> None:
    """2,048 of 32k, of which most scores are 0."""
    case = case_of(2, torch.bfloat16, "auto", True, [(32_700, 2)], heads=4, width=8, top=2048)
    weights = torch.ones_like(case.weights)
    case = case._replace(weights=weights, q=case.q * (torch.arange(4) < 2)[:, None])
    ours, theirs = case.chosen(kernels), case.chosen(Kernels())
    assert torch.equal(ours.slots, theirs.slots)


def test_numbers_that_are_none_choose_slots_of_the_context_all_the_same(kernels: CpuKernels) -> None:
    case = case_of(3, torch.float32, "auto", False, [(299, 1)], top=129)
    for bad in (float("nan"), -float("nan"), float("inf")):
        slots = case.batch.block_tables[0, :2] * case.kv.block_size  # of two tokens of the context
        case.kv.numbers[slots // case.kv.block_size, LAYER, 0, KEY, slots % case.kv.block_size, -3:] = bad
        chosen = case.chosen(kernels).slots[0]
        size = case.kv.block_size
        at = torch.arange(300)
        seen = case.batch.block_tables[0][at // size] * size + at % size
        assert len(chosen.unique()) == 129 and torch.isin(chosen, seen).all()


@pytest.mark.parametrize(("dtype", "stored"), KINDS)
def test_attention_sees_what_was_chosen_and_its_bits_depend_on_nothing_else(
    kernels: CpuKernels, dtype: torch.dtype, stored: KVCacheDtype
) -> None:
    case = case_of(9, dtype, stored, False, SPANS, top=129)
    width = case.attended.shape[2] - 8

    def attend(kernels: Kernels, choice: sparse.Choice, q: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        return kernels.attend_chosen(q, choice, case.kv, batch, LAYER, 0.2, width)

    choice = case.chosen(kernels)
    out = attend(kernels, choice, case.attended, case.batch)
    exact = attend(Kernels(), replace(choice, batch=choice.batch and replace(choice.batch)), case.attended, case.batch)
    torch.testing.assert_close(out, exact, atol=6 * last_place(dtype), rtol=6 * last_place(dtype))
    for span in (1, 3, 5):
        first, last = case.batch.row_starts[span : span + 2]
        table, context = case.batch.block_tables[span], case.batch.context_lens[span]
        for token in {first, last - 1}:
            alone = batch_of([(context - last + token, 1)], [table], case.kv.block_size)
            one = case._replace(q=case.q[token : token + 1], weights=case.weights[token : token + 1])
            mine = one.chosen(kernels, alone)
            assert torch.equal(attend(kernels, mine, case.attended[token : token + 1], alone)[0], out[token])


def test_what_does_not_fit_is_refused() -> None:
    kernels = CpuKernels(ISAS[0])
    case = case_of(1, torch.bfloat16, "auto", False, SPANS, top=40)
    choice = sparse.choice(case.batch, case.top)
    of = choice.of_rows
    arguments: dict[str, Any] = {"weights": of(case.weights), "kv": case.kv, "batch": case.batch, "choice": choice}
    with pytest.raises(ValueError, match=r"do not fit .* rows that choose"):
        kernels.choose(case.q[:3], layer=LAYER, **arguments)
    with pytest.raises(ValueError, match=r"do not fit .* a cache of 2 layers"):
        kernels.choose(of(case.q), layer=LAYERS, **arguments)
    with pytest.raises(ValueError, match="need a cache of one plane a layer"):
        kernels.choose(of(case.q).float(), layer=LAYER, **arguments)
    case.batch.block_tables[0, 0] = case.kv.num_blocks
    with pytest.raises(ValueError, match="block tables name blocks"):
        kernels.choose(of(case.q), layer=LAYER, **{**arguments, "batch": replace(case.batch)})
