"""Matrix products whose rows do not know of one another.

Every output row is summed in an order that does not depend on how many rows there are, so a token's numbers
do not change with the batch it rides in. torch's plain `linear` does not promise that: its fp32 form gives
other bits at 1, 2, 3, 5, 7 and 9 rows.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F

MAX_ROWS = 2048
"""Rows a oneDNN call may have: bit-equality was measured up to here."""

TILE_ROWS = 64
"""Rows of each call of the fallback: always exactly this many, so that the same kernel runs."""


class Product(Protocol):
    """The product with a weight [out, in] that has been brought into some layout."""

    in_features: int
    out_features: int

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        ...


class PackedWeight:
    """A weight in the layout in which the machine multiplies fastest, and the product with it.

    The given weight `[out, in]` is copied, so a memory-mapped one can be dropped after.

    Attributes:
        in_features, out_features: the weight's shape.
        packed: whether oneDNN's layout is used; otherwise the fallback, which is row-invariant too.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, packed: bool = True) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach().clone().contiguous()
        self.packed = packed and can_pack(weight.dtype, weight.device)
        if self.packed:
            self.weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        else:
            self.weight = weight.detach().clone().contiguous()

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features, dtype=out_dtype)
        out = self._packed_matmul(x) if self.packed else self._tiled_matmul(x)
        return out if out_dtype is None else out.to(out_dtype)

    def _packed_matmul(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows == 1:  # a lone row may be summed in another order when `in` is long
            return self._pointwise(x.expand(2, -1).contiguous())[:1]
        if rows <= MAX_ROWS:
            return self._pointwise(x.contiguous())
        # Equal parts, so that none has a single row.
        parts = x.tensor_split(-(-rows // MAX_ROWS))
        return torch.cat([self._pointwise(part.contiguous()) for part in parts])

    def _pointwise(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def _tiled_matmul(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        padding = -rows % TILE_ROWS
        if padding:
            x = torch.cat([x, x.new_zeros(padding, x.shape[1])])
        tiles = [F.linear(tile.contiguous(), self.weight, self.bias) for tile in torch.split(x, TILE_ROWS)]
        return torch.cat(tiles)[:rows] if len(tiles) > 1 else tiles[0][:rows]


@functools.cache
def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed product (private torch API) exists here, takes this data type, and sums in fp32.

    On ARM it sums fp16 in fp16, and torch's own product does not.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    half = 1 + torch.arange(512) / 1024
    x = torch.cat([half, half.flip(0)]).to(dtype).expand(2, -1)  # whose sums are exact in fp32
    weight = torch.cat([torch.ones(32, 512), -torch.ones(32, 512)], dim=1).to(dtype)
    bias = torch.ones(32, dtype=dtype)
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        out = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool((out == 1).all())
