"""Products of torch's library for the device, cuBLAS: as it is, and under the contract where it keeps it.

cuBLASLt chooses a kernel by the number of rows, and all of its kernels for Hopper sum a row's products in one order as
long as none splits the inputs among programs: so found vLLM, with no memory to split them in and no sums of reduced
precision (https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/batch_invariant.py). Nobody
promises that, so it is tried on the device itself, for each shape of a weight before its first use: one row is
multiplied beside copies of itself, in each number of rows in which products are computed, and must have the bits that
it has alone in every place; and so with the parts of the weight that ranks would have. So one rank and several agree,
and what each of them chooses follows from the whole weight. A shape that fails once is computed by `linear_dense`. On
an H200 all shapes tried hold (torch 2.11, CUDA 13.0), and cost no more than with splits (`benchmarks/gpu.md`).
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.ops.triton.linear_chunks import checked
from quire.ops.triton.linear_dense import DenseProduct

RANKS = (2, 4, 8)
"""How many may share a weight so that one rank would choose as they do, beside as many as there are."""

EXACT_ROWS = 256
"""Up to here products are computed with the rows that there are, beyond it with a multiple of `ROUNDED`."""
ROUNDED = 64
MOST_ROWS = 8192
MOST_BYTES = 1 << 28
"""Of what one call makes; more rows are taken in parts."""

ALIGNMENT = 256
"""Bytes: torch looks for no more (`_getAlignment` in CUDABlas.cpp), and what it allocates begins so."""

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""In KiB: too little for sums that programs leave for others. torch reads it at the first product of a process."""


class VendorProduct:
    """The product that torch's library for the device computes, cuBLAS: a row's bits depend on the other rows.

    Attributes:
        weight: [out, in], contiguous, used where it lies; for kernels that multiply with several at once.
        bias: [out]; None: there is none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        x, out_dtype = checked(x, self.in_features, (self.weight.dtype,), out_dtype)
        if out_dtype == x.dtype:
            return F.linear(x, self.weight, self.bias)
        if not x.is_cuda:  # only there has torch a product whose fp32 sums are returned as they are
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        out = torch.mm(x, self.weight.t(), out_dtype=out_dtype)
        return out if self.bias is None else out.add_(self.bias)


class Kind(NamedTuple):
    """All that the library chooses a kernel by, but for the number of rows, and which part of a weight a rank has."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    biased: bool

    @property
    def most_rows(self) -> int:
        """Of one call; a multiple of `ROUNDED`, so that what is rounded up to has been tried."""
        fitting = MOST_BYTES // (self.out_features * self.out_dtype.itemsize)
        return max(EXACT_ROWS, min(MOST_ROWS, fitting // ROUNDED * ROUNDED))

    def __str__(self) -> str:
        types = f"{self.dtype}".removeprefix("torch.")
        if self.out_dtype != self.dtype:
            types += f" to {self.out_dtype}".replace("torch.", "")
        return f"{self.out_features} x {self.in_features} {types}{' with bias' if self.biased else ''}"


class Library:
    """Which products of the vendor's library give a row the same bits in any company, as far as was tried.

    Attributes:
        tried: by kind of a whole weight, and outputs of the part that is here; it never changes once it is there.
    """

    def __init__(self) -> None:
        self.tried: dict[tuple[Kind, int], bool] = {}

    @classmethod
    def settled(cls) -> Library:
        """The one of this process, told to sum each row in one piece. What a user has set is left as it is."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        prefer_quietly("cublaslt")
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            setattr(torch.backends.cuda.matmul, name, (False, False))  # nor any split of the inputs
        return cls()

    def product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, outputs: int | None = None
    ) -> DenseProduct | LibraryProduct:
        """That of a weight [out, in]; `outputs`: see `Kernels.pack`."""
        if weight.dtype == torch.float32:
            return DenseProduct(weight, bias, outputs=outputs)
        return LibraryProduct(weight, bias, self, outputs)

    def holds(self, kind: Kind, weight: torch.Tensor) -> bool:
        """Whether products of this kind may be used, of which `weight` is a part or the whole; tried at the first
        question, which waits for the device."""
        key = kind, len(weight)
        if key not in self.tried:
            self.tried[key] = parts_are_alike(kind, weight)
        return self.tried[key]

    def describe(self) -> str:
        """For people, and for the name of what a block's bytes depend on; empty where nothing was tried."""
        words = ((True, "cuBLASLt, whose rows have the same bits in any company here"), (False, "Triton"))
        parts = []
        for wanted, name in words:
            if found := sorted({str(kind) for (kind, _), holds in self.tried.items() if holds is wanted}):
                parts.append(f"{', '.join(found)}: {name}")
        return "; ".join(parts)


def prefer_quietly(library: str) -> None:
    """`torch.backends.cuda.preferred_blas_library`, without its warning that this is experimental.

    It goes past Python to standard error, unless one of torch's functions that hand warnings on is being called: `map_`
    is, and calls back. The environment variable that does the same is read when torch is imported.
    """

    def prefer(*_: float) -> float:
        torch.backends.cuda.preferred_blas_library(library)
        return 0.0

    one = torch.zeros(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.backends.cuda.preferred_blas_library is an experimental feature")
        one.map_(one, prefer)


class LibraryProduct:
    """The product with a dense weight by the vendor's library, if its rows do not know of one another, or by ours.

    Attributes:
        weight: [out, in], contiguous, used where it lies; for kernels that multiply with several at once.
        bias: [out]; None: there is none.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, library: Library, outputs: int | None = None
    ) -> None:
        self._library, self._vendor = library, VendorProduct(weight, bias)
        self._own = DenseProduct(weight, bias, outputs=outputs)
        self.out_features, self.in_features = weight.shape
        self._whole = outputs or self.out_features
        self.weight, self.bias = weight, bias

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        x, out_dtype = checked(x, self.in_features, (self.weight.dtype,), out_dtype)
        kind = Kind(self._whole, self.in_features, x.dtype, out_dtype, self.bias is not None)
        if not self._library.holds(kind, self.weight):
            return self._own.matmul(x, out_dtype)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            return self._vendor.matmul(_aligned(rows), out_dtype)

        parts = [_rounded(multiply, part) for part in x.split(kind.most_rows)] if len(x) else [multiply(x)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def parts_are_alike(kind: Kind, weight: torch.Tensor) -> bool:
    """Whether a row has the same bits in any company with a whole weight, and with the parts that ranks would have.

    Args:
        weight: the whole one; of a part, numbers stand for those that are elsewhere.
    """
    generator = torch.Generator(weight.device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=weight.device).to(kind.dtype)

    own, row = len(weight), numbers(kind.in_features)
    if own < kind.out_features:
        weight = weight.repeat(-(-kind.out_features // own), 1)[: kind.out_features]
    bias = numbers(kind.out_features) if kind.biased else None
    sizes = {kind.out_features, own, *(kind.out_features // ranks for ranks in RANKS if kind.out_features % ranks == 0)}
    products = [VendorProduct(weight[:size], None if bias is None else bias[:size]) for size in sorted(sizes)]
    return rows_are_alike([functools.partial(one.matmul, out_dtype=kind.out_dtype) for one in products], row, kind)


def rows_are_alike(products: Sequence[Callable[[torch.Tensor], torch.Tensor]], row: torch.Tensor, kind: Kind) -> bool:
    """Whether a row [in] has the same bits beside any number of copies of itself, and in any place among them, and
    those in each of some products with a weight's first outputs, the last of which is with all.

    A sum's order does not depend on the numbers, so copies do for other rows.
    """
    x = row.expand(kind.most_rows, -1).contiguous()
    alone = _bits(products[-1](x[:1]))
    differs = torch.zeros((), dtype=torch.bool, device=row.device)
    for multiply, count in itertools.product(products, counts(kind.most_rows)):
        found = _bits(multiply(x[:count]))
        differs |= (found != alone[:, : found.shape[1]]).any()  # the device goes on while the next one is launched
    return not bool(differs)


def counts(most: int) -> Iterator[int]:
    """Every number of rows in which a product is computed."""
    yield from range(1, min(most, EXACT_ROWS) + 1)
    yield from range(EXACT_ROWS + ROUNDED, most + 1, ROUNDED)


def _rounded(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The product of rows of which there are as many as were tried, or with some of zeros behind them."""
    missing = 0 if len(x) <= EXACT_ROWS else -len(x) % ROUNDED
    return multiply(F.pad(x, (0, 0, 0, missing)))[: len(x)] if missing else multiply(x)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if it begins within a matrix where torch tells cuBLASLt of less than the usual alignment: that
    may then take another kernel."""
    return x if x.storage_offset() * x.element_size() % ALIGNMENT == 0 else x.clone()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)
