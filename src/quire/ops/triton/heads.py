"""Products of heads, each with a weight of its own, in one launch: the same loop and the same tiles as experts have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.ops.linear import Product
from quire.ops.triton.experts import multiply
from quire.ops.triton.linear_chunks import place_of
from quire.ops.triton.linear_dense import quicker
from quire.ops.triton.weights import ALIGNMENT, Weights, pointer_at


@triton.jit(do_not_specialize=["rows"])
def _heads_kernel(
    x,
    addresses,
    out,
    rows,
    stride_row,
    stride_head,
    in_features,
    out_features,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    row_tile, out_tile = place_of(tl.program_id(0), rows, tl.cdiv(out_features, OUTPUTS), ROWS)
    head = tl.program_id(1)
    m = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    n = (out_tile * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
    weight = pointer_at(addresses, head, x.dtype.element_ty, ALIGNMENT)
    x_tile = x + m * stride_row + head.to(tl.int64) * stride_head
    weight_tile = weight + n.to(tl.int64) * in_features
    rows_there, outputs_there = m < rows, n < out_features
    total = multiply(x_tile, weight_tile, None, rows_there, outputs_there, in_features, EVEN, 0, ROWS, OUTPUTS, INPUTS)
    out += (m * tl.num_programs(1) + head) * out_features + n
    tl.store(out, total.to(out.dtype.element_ty), mask=rows_there & outputs_there)


class GroupedHeads:
    """A product of its own for each head, in one launch: a `HeadProducts`.

    Args:
        products: dense, without biases.

    Raises:
        ValueError: a product is quantized or has a bias, or they differ.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        self._weights = Weights(products)
        if self._weights.group:
            raise ValueError("the weights of heads are in 8 or 4 bits; they must be dense")
        if self._weights.bias is not None:
            raise ValueError("heads have no biases")
        self._short, self._tall = self._weights.tiles(self._weights.dtypes[0])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `HeadProducts`."""
        weights = self._weights
        if x.shape[1:] != (len(weights), weights.in_features) or x.dtype not in weights.dtypes:
            wanted = f"{weights.dtypes[0]} [.., {len(weights)}, {weights.in_features}]"
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; the heads take {wanted}")
        x = x if x.stride(2) == 1 else x.contiguous()
        out = x.new_empty(len(x), len(weights), weights.out_features)
        if len(x) == 0:
            return out
        out_tiles = triton.cdiv(weights.out_features, self._short.outputs)
        tile = quicker(self._short, self._tall, len(x), out_tiles * len(weights))
        _heads_kernel[(triton.cdiv(len(x), tile.rows) * out_tiles, len(weights))](
            x,
            weights.addresses,
            out,
            len(x),
            x.stride(0),
            x.stride(1),
            weights.in_features,
            weights.out_features,
            EVEN=weights.in_features % tile.inputs == 0,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            ALIGNMENT=ALIGNMENT,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        return out
