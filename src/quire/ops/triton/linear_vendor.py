"""Products of torch's library for the device, cuBLAS: as it is, and under the contract where it keeps it.

cuBLASLt chooses a kernel by the number of rows, and all of its kernels for Hopper sum a row's products in one order as
long as none splits the inputs among programs: so found vLLM, with no memory to split them in and no sums of reduced
precision (https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/batch_invariant.py). Nobody
promises that, so it is tried on the device itself, for each shape of a weight before its first use: one row is
multiplied beside copies of itself, in each number of rows in which products are computed, and must have the bits that
it has alone in every place. A shape that fails at one number of rows is computed by `linear_dense`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.ops.triton.linear_chunks import checked
from quire.ops.triton.linear_dense import DenseProduct

WIDE = 64 * 132
"""Outputs of a weight that keep an H100's multiprocessors busy. With fewer, `linear_dense` cuts the inputs up instead,
which cuBLASLt may not do here."""

EXACT_ROWS = 256
"""Up to here products are computed with the rows that there are, beyond it with a multiple of `ROUNDED`."""
ROUNDED = 64
MOST_ROWS = 8192
MOST_BYTES = 1 << 28
"""Of what one call makes; more rows are taken in parts."""

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
    """All that the library chooses a kernel by, but for the number of rows."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    biased: bool

    @property
    def most_rows(self) -> int:
        """Of one call."""
        return max(EXACT_ROWS, min(MOST_ROWS, MOST_BYTES // (self.out_features * self.out_dtype.itemsize)))

    def __str__(self) -> str:
        types = f"{self.dtype}".removeprefix("torch.")
        if self.out_dtype != self.dtype:
            types += f" to {self.out_dtype}".replace("torch.", "")
        return f"{self.out_features} x {self.in_features} {types}{' with bias' if self.biased else ''}"


class Library:
    """Which products of the vendor's library give a row the same bits in any company, as far as was tried.

    Attributes:
        tried: by kind; it never changes once it is there.
    """

    def __init__(self) -> None:
        self.tried: dict[Kind, bool] = {}

    @classmethod
    def settled(cls) -> Library:
        """The one of this process, told to sum each row in one piece. What a user has set is left as it is."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch.backends.cuda.preferred_blas_library("cublaslt")
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            setattr(torch.backends.cuda.matmul, name, (False, False))  # nor any split of the inputs
        return cls()

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseProduct | LibraryProduct:
        """That of a weight [out, in]."""
        if len(weight) < WIDE or weight.dtype == torch.float32:
            return DenseProduct(weight, bias)
        return LibraryProduct(weight, bias, self)

    def holds(self, kind: Kind, multiply: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> bool:
        """Whether products of this kind may be used; tried at the first question, which waits for the device."""
        if kind not in self.tried:
            generator = torch.Generator(device).manual_seed(0)
            row = torch.randn(kind.in_features, generator=generator, device=device).to(kind.dtype)
            self.tried[kind] = rows_are_alike(multiply, row, kind.most_rows)
        return self.tried[kind]

    def describe(self) -> str:
        """For people, and for the name of what a block's bytes depend on; empty where nothing was tried."""
        words = ((True, "cuBLASLt, whose rows have the same bits in any company here"), (False, "Triton"))
        parts = []
        for wanted, name in words:
            if found := sorted(str(kind) for kind, holds in self.tried.items() if holds is wanted):
                parts.append(f"{', '.join(found)}: {name}")
        return "; ".join(parts)


class LibraryProduct:
    """The product with a dense weight by the vendor's library, if its rows do not know of one another, or by ours.

    Attributes:
        weight: [out, in], contiguous, used where it lies; for kernels that multiply with several at once.
        bias: [out]; None: there is none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, library: Library) -> None:
        self._library, self._vendor, self._own = library, VendorProduct(weight, bias), DenseProduct(weight, bias)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        x, out_dtype = checked(x, self.in_features, (self.weight.dtype,), out_dtype)
        kind = Kind(self.out_features, self.in_features, x.dtype, out_dtype, self.bias is not None)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            return self._vendor.matmul(rows, out_dtype)

        if not self._library.holds(kind, multiply, x.device):
            return self._own.matmul(x, out_dtype)
        parts = [_rounded(multiply, part) for part in x.split(kind.most_rows)] if len(x) else [multiply(x)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def rows_are_alike(multiply: Callable[[torch.Tensor], torch.Tensor], row: torch.Tensor, most: int) -> bool:
    """Whether a row [in] has the same bits beside any number of copies of itself, and in any place among them.

    A sum's order does not depend on the numbers, so copies do for other rows.
    """
    x = row.expand(most, -1).contiguous()
    alone = _bits(multiply(x[:1]))
    differs = torch.zeros((), dtype=torch.bool, device=row.device)
    for count in counts(most):
        differs |= (_bits(multiply(x[:count])) != alone).any()  # the device goes on while the next one is launched
    return not bool(differs)


def counts(most: int) -> Iterator[int]:
    """Every number of rows in which a product is computed."""
    yield from range(1, min(most, EXACT_ROWS) + 1)
    yield from range(EXACT_ROWS + ROUNDED, most + 1, ROUNDED)


def _rounded(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The product of rows of which there are as many as were tried, or with some of zeros behind them."""
    missing = 0 if len(x) <= EXACT_ROWS else -len(x) % ROUNDED
    return multiply(F.pad(x, (0, 0, 0, missing)))[: len(x)] if missing else multiply(x)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)
