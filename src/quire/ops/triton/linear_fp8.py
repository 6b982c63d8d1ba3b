"""Products with weights in fp8, which stay in 8 bits in memory: a kernel restores their numbers as it reads them.

The numbers are those of `quire.ops.fp8`, rounded as they are when a weight is restored once and for all. With many rows
a weight would be restored again for each tile of rows: there it is restored once a product, for which its dense form is
held as long as that takes; where both have the same bits, which is where `adds_up_as_dense` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.errors import CheckpointError
from quire.ops.fp8 import Fp8Weight, joined
from quire.ops.linear import Product
from quire.ops.triton.early import major
from quire.ops.triton.fp8 import as_read, restored
from quire.ops.triton.linear import Make
from quire.ops.triton.linear_chunks import checked
from quire.ops.triton.linear_dense import DenseProduct, Scales

STEP = 128
"""At most so many inputs are those of a step of `linear_dense`'s loop, all of which share a scale."""
MANY_ROWS = 1024
"""From here on writing a dense weight and reading it again takes a tenth of what the product does, on an H100."""
NUMBERS = 1024
"""That a program restores: 8 a thread."""


class Fp8Product:
    """The product with such a weight: a `Product`.

    Args:
        dtype: of what it is multiplied with, and of the numbers that its codes stand for.
        make: what multiplies with many rows; where bits count, a `DenseProduct` that cuts sums as this one does. None:
            the same as with few.
        outputs: see `Kernels.pack`.

    Attributes: for kernels that multiply with several at once.
        weight: [out, in], contiguous, as `as_read` gives it.
        scales: of its outputs and groups of inputs.
        bias: [out]; None: there is none.

    Raises:
        CheckpointError: parts that do not fit, or a code that is not a number.
    """

    def __init__(
        self,
        parts: Sequence[Fp8Weight],
        bias: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        make: Make | None,
        outputs: int | None = None,
    ) -> None:
        whole = joined(parts, device)
        if bool(((whole.codes & 0x7F) == 0x7F).any()):
            raise CheckpointError("it has numbers that are not finite")
        self.out_features, self.in_features = whole.out_features, whole.in_features
        self.weight = as_read(whole.codes)
        self.scales = Scales(whole.scales, whole.group, dtype)
        self.bias = None if bias is None else bias.to(device)
        self._few, self._make = DenseProduct(self.weight, self.bias, outputs=outputs, scales=self.scales), make

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        if self._make is None or len(x) < MANY_ROWS:
            return self._few.matmul(x, out_dtype)
        checked(x, self.in_features, (self.scales.dtype,), out_dtype)
        many: Product = self._make(restored_weight(self.weight, self.scales), self.bias)
        return many.matmul(x, out_dtype)


def can_multiply(weight: Fp8Weight) -> bool:
    """Whether kernels take scales of such groups: otherwise it is restored once and for all."""
    return weight.group % STEP == 0


def adds_up_as_dense(device: torch.device) -> bool:
    """Whether sums over codes have the order of those over the restored numbers.

    They do where matrix instructions read their operands as they lie (wgmma, tcgen05). `mma.sync` takes them from
    registers, in an order that Triton chooses by the width of what was loaded: 4 numbers beside each other of bytes, 2
    of 16 bits. It is all that compute capabilities 8.x and 12.x have.
    """
    return major(device) not in (8, 12)


def restored_weight(codes: torch.Tensor, scales: Scales) -> torch.Tensor:
    """The numbers of a weight, [out, in] in `scales.dtype`."""
    out = torch.empty(codes.shape, dtype=scales.dtype, device=codes.device)
    grid = (len(codes), triton.cdiv(codes.shape[1], NUMBERS))
    shape = codes.shape[1], scales.group, NUMBERS
    _restore_kernel[grid](codes, scales.numbers, out, *shape, enable_fp_fusion=False)
    return out


@triton.jit
def _restore_kernel(codes, scales, out, in_features, GROUP: tl.constexpr, NUMBERS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    there = k < in_features
    code = tl.load(codes + row * in_features + k, mask=there, other=0.0)
    scale = tl.load(scales + row * tl.cdiv(in_features, GROUP) + k // GROUP, mask=there, other=0.0)
    tl.store(out + row * in_features + k, restored(code, scale, out.dtype.element_ty), mask=there)
