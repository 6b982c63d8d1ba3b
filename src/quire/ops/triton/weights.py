"""Weights that one launch works on, each where it lies: addresses, formats and biases, for `experts` and `heads`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.ops import mxfp4
from quire.ops.linear import Product
from quire.ops.triton.linear_dense import EXACT, SHORT, TALL, DenseProduct, Tile, one_instruction
from quire.ops.triton.linear_fp8 import Fp8Product
from quire.ops.triton.linear_mxfp4 import DTYPES, Mxfp4Product
from quire.ops.triton.linear_vendor import LibraryProduct, VendorProduct

ALIGNMENT = 16
"""Bytes: loads of that width are what kernels take from an address."""
MXFP4 = tl.constexpr(mxfp4.GROUP)
"""What tells a weight in MXFP4 from one in fp8: no group of the other has so few inputs."""
STORED = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.uint8: tl.uint8,
}
"""Triton's names of what weights may be stored in."""


def addresses_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where tensors lie, [tensors] int64, on their device. Whoever keeps this keeps the tensors too.

    Raises:
        ValueError: they differ in shape or type.
    """
    first = tensors[0]
    if {(tensor.shape, tensor.dtype) for tensor in tensors} != {(first.shape, first.dtype)}:
        raise ValueError(f"the weights differ: {[(tensor.dtype, list(tensor.shape)) for tensor in tensors]}")
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=first.device)


class Weights:
    """Weights of one shape, each where it lies.

    Args:
        products: made by `linear.pack`, or all of them in MXFP4, or in fp8 with scales of as many inputs.

    Attributes:
        out_features, in_features, device: of each.
        dtypes: that what they are multiplied with may have.
        bias: [weights, out_features] fp32; None: they have none.
        addresses: [weights] int64, on their device.
        scale_addresses: the same of what scales them, in MXFP4 and fp8; None: they are dense.
        group: inputs that share a scale; 0: they are dense.
        stored: Triton's type of what lies there.

    Raises:
        ValueError: the products are of other kinds, or differ.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        kind, *others = dict.fromkeys(_format_of(product) for product in products)
        if others:
            raise ValueError(f"weights that are multiplied together are in one format; found {[kind, *others]}")
        self._tensors = [_aligned(_weight(product)) for product in products]
        self._scales = [_aligned(scales) for product in products if (scales := _scales(product)) is not None]
        self.addresses = addresses_of(self._tensors)
        self.scale_addresses = addresses_of(self._scales) if self._scales else None
        self.bias = biases_of(products)
        self.out_features, self.in_features = products[0].out_features, products[0].in_features
        self.group, self.dtypes = kind
        self.stored = STORED[self._tensors[0].dtype]
        self.device = self._tensors[0].device

    def __len__(self) -> int:
        return len(self._tensors)

    def tiles(self, dtype: torch.dtype) -> tuple[Tile, Tile]:
        """Those for few rows and for many, which give the same bits: see `linear_dense`."""
        short, tall = (EXACT, EXACT) if dtype == torch.float32 else (SHORT, TALL)
        if self.group == mxfp4.GROUP:  # codes take registers
            short, tall = short._replace(warps=8, stages=2), tall._replace(stages=2)
        return short, tall if one_instruction(self.device) else short

    @property
    def low(self) -> bool:
        """Whether there are tiles of 16 and 32 rows: where their instruction gives the bits of the one for many rows.

        It does not on some GPUs (see `linear_dense`), nor for numbers that are restored from codes in registers: of
        these Triton gives `mma.sync` the inputs in another order than `wgmma`.
        """
        return not self.group and self._tensors[0].dtype != torch.float32 and one_instruction(self.device)


class _Format(NamedTuple):
    """How a weight is stored.

    Attributes:
        group: inputs that share a scale; 0: it is dense.
        dtypes: that what it is multiplied with may have.
    """

    group: int
    dtypes: tuple[torch.dtype, ...]


def _format_of(product: Product) -> _Format:
    if isinstance(product, Mxfp4Product):
        return _Format(mxfp4.GROUP, DTYPES)
    if isinstance(product, Fp8Product):
        return _Format(product.scales.group, (product.scales.dtype,))
    return _Format(0, (_weight(product).dtype,))


def _weight(product: Product) -> torch.Tensor:
    if not isinstance(product, DenseProduct | VendorProduct | LibraryProduct | Mxfp4Product | Fp8Product):
        raise ValueError(f"a product is a {type(product).__name__}; grouped products are dense, in MXFP4 or in fp8")
    return product.weight


def _scales(product: Product) -> torch.Tensor | None:
    if isinstance(product, Fp8Product):
        return product.scales.numbers
    return product.scales if isinstance(product, Mxfp4Product) else None


def biases_of(products: Sequence[Product]) -> torch.Tensor | None:
    """The biases of dense or quantized products of one shape, [products, out] fp32; None: they have none.

    Raises:
        ValueError: some have one.
    """
    biases: list[torch.Tensor] = [bias for product in products if (bias := getattr(product, "bias", None)) is not None]
    if biases and len(biases) < len(products):
        raise ValueError(f"{len(biases)} of {len(products)} weights have biases; all must, or none")
    return torch.stack(biases).float() if biases else None


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """The weight where it lies, or a copy if kernels cannot read that with their widest loads."""
    return weight if weight.data_ptr() % ALIGNMENT == 0 else weight.clone()


@triton.jit
def pointer_at(addresses, number, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointer to one of the tensors of `addresses_of`."""
    address = tl.multiple_of(tl.load(addresses + number), ALIGNMENT)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGNMENT)
