"""The vendor's products under the contract: used where a row has the same bits in any company, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from quire.ops.triton import linear_vendor
from quire.ops.triton.linear_dense import DenseProduct
from quire.ops.triton.linear_vendor import (
    EXACT_ROWS,
    ROUNDED,
    Kind,
    Library,
    LibraryProduct,
    VendorProduct,
    counts,
    rows_are_alike,
)
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

Multiply = Callable[[torch.Tensor], torch.Tensor]

WEIGHT = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
ROW = torch.randn(96, generator=torch.Generator().manual_seed(1))


def whole(x: torch.Tensor) -> torch.Tensor:
    """Each row by itself, in fp64 and rounded once."""
    return (x.double()[:, None] * WEIGHT.double()).sum(-1).float()


def halves(x: torch.Tensor) -> torch.Tensor:
    """The inputs in two parts, as a library does that lets two programs share a row's sum."""
    first, second = (part[0] * part[1] for part in zip(x[:, None].chunk(2, -1), WEIGHT.chunk(2, -1), strict=True))
    return first.sum(-1) + second.sum(-1)


def other_at(*rows: int) -> Multiply:
    """Another order of the sum at these numbers of rows."""
    return lambda x: halves(x) if len(x) in rows else whole(x)


def other_in_the_last_row(x: torch.Tensor) -> torch.Tensor:
    return whole(x) if len(x) < 100 else torch.cat([whole(x[:-1]), halves(x[-1:])])


def not_finite_at_nine(x: torch.Tensor) -> torch.Tensor:
    return whole(x) * (torch.nan if len(x) == 9 else 1.0)


MOST = EXACT_ROWS + 3 * ROUNDED
KIND = Kind(40, 96, torch.float32, torch.float32, False)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_vendor, "MOST_ROWS", MOST)


def test_a_product_whose_rows_are_alike_is_found_to_be_so() -> None:
    assert rows_are_alike([whole], ROW, KIND)
    assert rows_are_alike([halves], ROW, KIND)  # another order, but always the same
    assert rows_are_alike([lambda x: whole(x)[:, :10], whole], ROW, KIND)
    assert not rows_are_alike([lambda x: halves(x)[:, :10], whole], ROW, KIND)


@pytest.mark.parametrize(
    "multiply",
    [other_at(1), other_at(2), other_at(EXACT_ROWS), other_at(MOST), other_in_the_last_row, not_finite_at_nine],
    ids=["one row", "two", "the last count", "the most rows", "the last of many rows", "not finite"],
)
def test_one_number_of_rows_with_other_bits_is_enough_to_refuse_a_product(multiply: Multiply) -> None:
    assert not rows_are_alike([multiply], ROW, KIND)


@pytest.mark.quick("251")
@pytest.mark.parametrize("fitting", [2 * MOST, MOST - 5, EXACT_ROWS - 5])
def test_every_number_of_rows_that_is_computed_is_tried(fitting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step brings: up to what one call may take, as far as so many rows fit its memory, and beyond."""
    monkeypatch.setattr(linear_vendor, "MOST_BYTES", fitting * len(WEIGHT) * WEIGHT.element_size())
    seen: list[int] = []

    def watched(self: VendorProduct, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        seen.append(len(x))
        return whole(x)[:, : len(self.weight)]

    monkeypatch.setattr(VendorProduct, "matmul", watched)
    product = LibraryProduct(WEIGHT, None, Library())
    x = torch.randn(2 * MOST + 5, 96)
    product.matmul(x[:1])
    tried = set(seen)
    assert tried == set(counts(max(EXACT_ROWS, min(MOST, fitting // ROUNDED * ROUNDED))))
    for rows in (0, 1, 7, EXACT_ROWS, EXACT_ROWS + 1, MOST - 5, MOST - 1, MOST, MOST + 1, len(x)):
        seen.clear()
        found = product.matmul(x[:rows])
        assert set(seen) <= tried | {0}
        assert torch.equal(found, whole(x[:rows]))


def test_rows_within_a_matrix_are_multiplied_from_where_those_that_were_tried_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begins: set[int] = set()

    def watched(self: VendorProduct, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        begins.add(x.storage_offset() * x.element_size() % 256)
        return whole(x)[:, : len(self.weight)]

    monkeypatch.setattr(VendorProduct, "matmul", watched)
    product, x = LibraryProduct(WEIGHT, None, Library()), torch.randn(2 * MOST, 96)
    for first in range(4):  # of 384 bytes
        assert torch.equal(product.matmul(x[first:]), whole(x[first:]))
    assert begins == {0}


def test_what_was_refused_is_computed_by_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VendorProduct, "matmul", lambda self, x, out_dtype=None: other_at(3)(x)[:, : len(self.weight)])
    monkeypatch.setattr(linear_vendor, "MOST_ROWS", 64)
    library = Library()
    weight = WEIGHT.half()
    product = library.product(weight, None)
    assert isinstance(product, LibraryProduct)
    assert not library.tried and not library.describe()
    x = torch.randn(5, 96).half()
    assert torch.equal(product.matmul(x), DenseProduct(weight, None).matmul(x))
    assert library.tried == {(Kind(40, 96, torch.float16, torch.float16, False), 40): False}
    assert library.describe() == "40 x 96 float16: Triton"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Outputs of each product that the library computes, in one order but with those in `OTHER`."""
    sizes: list[int] = []

    def matmul(self: VendorProduct, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        sizes.append(len(self.weight))
        total = (x.double()[:, None] * self.weight.double()).sum(-1).float()
        return total + len(x) * 1e-3 if len(self.weight) in OTHER else total

    monkeypatch.setattr(VendorProduct, "matmul", matmul)
    monkeypatch.setattr(linear_vendor, "EXACT_ROWS", FEW)
    monkeypatch.setattr(linear_vendor, "MOST_ROWS", FEW)
    OTHER.clear()
    return sizes


OTHER: set[int] = set()
FEW = 9


def test_a_kind_is_tried_once_and_named(tried: list[int]) -> None:
    library = Library()
    kind = KIND._replace(biased=True)
    assert [library.holds(kind, WEIGHT) for _ in range(3)] == [True] * 3
    assert len(tried) == 4 * FEW + 1
    assert library.describe().startswith("40 x 96 float32 with bias: cuBLASLt")


@pytest.mark.parametrize("own", [40, 20, 13])
def test_what_one_rank_and_several_choose_follows_from_the_whole_weight_and_its_parts(
    own: int, tried: list[int]
) -> None:
    """A part is tried beside those of 2, 4 and 8 ranks; whichever errs, on none of them the library multiplies."""
    part = WEIGHT[:own].half()
    for wrong in (None, 40, 20, 10, 5):
        OTHER.clear()
        OTHER.update({wrong} - {None})  # type: ignore[arg-type]
        tried.clear()
        product = Library().product(part, None, 40)
        assert isinstance(product, LibraryProduct)
        found = product.matmul(ROW[None].half())
        assert set(tried) == {40, 20, 10, 5, own}
        ours = DenseProduct(part, None, outputs=40).matmul(ROW[None].half())
        assert (tried[-1] == own and len(tried) == len({40, 20, 10, 5, own}) * FEW + 2) == (wrong is None)
        torch.testing.assert_close(found, ours, rtol=1e-2, atol=1e-2, check_dtype=False)
        assert torch.equal(found, ours) or wrong is None


def test_weights_in_fp32_are_ours() -> None:
    """Their products on the device would round inputs, or be slow."""
    library = Library()
    assert isinstance(library.product(torch.empty(48, 8, dtype=torch.bfloat16), None), LibraryProduct)
    assert isinstance(library.product(torch.empty(48, 8), None), DenseProduct)


@pytest.mark.slow
def test_a_library_is_preferred_without_a_word() -> None:
    """ROCm's stands for cuBLASLt, which torch refuses where there is no CUDA; the warning comes once a process."""
    call = "from quire.ops.triton.linear_vendor import prefer_quietly as prefer"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import torch; {call}; prefer('ck'); print(torch.backends.cuda.preferred_blas_library())",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("_BlasBackend.Ck\n", "")
