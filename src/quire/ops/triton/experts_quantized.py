"""All experts of a layer at once, with weights in 8 or 4 bits: as in `experts`, with the products of
`linear_quantized`, whose bits they share.

A token is quantized once for all of its experts. What is between the two products is rounded to the data type of x
and quantized anew, so gate and up are joined in the launch that does that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.ops.elementwise import Activation
from quire.ops.experts import ExpertSlots
from quire.ops.linear import Product
from quire.ops.quantized import BLOCK
from quire.ops.triton.expert_rows import ordered, pairs_of, tile_at
from quire.ops.triton.experts import Shared, add_places, turns_of
from quire.ops.triton.linear_chunks import checked, place_of
from quire.ops.triton.linear_quantized import (
    COMPILED,
    DTYPES,
    FEW,
    INT8_BLOCK,
    MANY,
    MANY_INT4,
    OUTPUTS,
    QuantizedProduct,
    Tile,
    add_group,
    high_halves,
    low_halves,
    quantize_activations,
    row_scales_at,
)
from quire.ops.triton.rows import activate
from quire.ops.triton.weights import ALIGNMENT, addresses_of, biases_of, pointer_at
from quire.parallel.group import Gather

# Without weights, the product is gate and up: rows are read from their tokens and left in the order of pairs. With
# weights, it is down: rows are read in that order and left at their pairs.


@triton.jit
def _source(order, m, end, weights, TOP_K: tl.constexpr):
    """Where the codes of rows m are."""
    if weights is None:
        return pairs_of(order, m, end).to(tl.int64) // TOP_K
    return m


@triton.jit
def _finish(total, m, end, n, scales, biases, expert, order, weights, out, out_features):
    """Scale sums [OUTPUTS, ROWS] and add biases as `linear_chunks.finish` does, then scale by the pairs' weights, and
    store them."""
    n, there = n[:, None], m < end
    if scales is not None:
        total *= tl.load(scales + n, mask=n < out_features, other=0.0)
    if biases is not None:
        total += tl.load(biases + expert.to(tl.int64) * out_features + n, mask=n < out_features, other=0.0)
    target = m
    if weights is not None:  # pairs are read here, for the loop needs the registers
        target = pairs_of(order, m, end).to(tl.int64)
        total *= tl.load(weights + target, mask=there, other=0.0)[None, :]
    out += target[None, :] * out_features + n
    tl.store(out, total.to(out.dtype.element_ty), mask=there[None, :] & (n < out_features))


@triton.jit(do_not_specialize=["rows", "tiles", "length"])
def _int8_kernel(
    codes,
    addresses,
    scale_addresses,
    biases,
    row_scales,
    order,
    tile_table,
    weights,
    out,
    rows,
    tiles,
    out_features,
    out_padded,
    blocks,
    length,
    TOP_K: tl.constexpr,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """A tile of W x^T of one expert; the blocks' sums come together as those of `linear_quantized`. rows: of codes."""
    tile, out_tile = place_of(tl.program_id(0), tiles, out_padded // OUTPUTS, 1)
    expert, first, end = tile_at(tile_table, tile, order is not None)
    if first >= end:
        return
    m = (first + tl.arange(0, ROWS)).to(tl.int64)
    source, there = _source(order, m, end, weights, TOP_K), (m < end)[None, :]
    n, k = out_tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    weight_tile = pointer_at(addresses, expert, tl.int8, ALIGNMENT) + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    source = source[None, :]
    x_tile = codes + source * blocks * INPUTS + k[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    chunk = tl.zeros((OUTPUTS, ROWS), tl.float32)
    row_scale = row_scales_at(row_scales, rows, source, there, 0, INPUTS, BLOCK)
    for block in range(blocks):
        # The next block's scales are on their way while this one is computed.
        next_scale = row_scales_at(row_scales, rows, source, there, block + 1, INPUTS, BLOCK)
        sums = tl.dot(tl.load(weight_tile), tl.load(x_tile, mask=there, other=0), out_dtype=tl.int32)
        chunk = tl.fma(sums.to(tl.float32), tl.broadcast_to(row_scale, chunk.shape), chunk)
        if CHUNKED and ((block + 1) % length == 0 or block + 1 == blocks):
            total += chunk
            chunk = tl.zeros((OUTPUTS, ROWS), tl.float32)
        row_scale = next_scale
        x_tile += INPUTS
        weight_tile += out_padded * INPUTS
    scales = pointer_at(scale_addresses, expert, tl.float32, ALIGNMENT)
    total = total if CHUNKED else chunk
    _finish(total, m, end, n, scales, biases, expert, order, weights, out, out_features)


@triton.jit(do_not_specialize=["rows", "tiles", "length"])
def _int4_kernel(
    codes,
    addresses,
    scale_addresses,
    biases,
    row_scales,
    order,
    tile_table,
    weights,
    out,
    rows,
    tiles,
    out_features,
    out_padded,
    blocks,
    length,
    TOP_K: tl.constexpr,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """As `_int8_kernel`, with the sums of the groups."""
    tile, out_tile = place_of(tl.program_id(0), tiles, out_padded // OUTPUTS, 1)
    expert, first, end = tile_at(tile_table, tile, order is not None)
    if first >= end:
        return
    m = (first + tl.arange(0, ROWS)).to(tl.int64)
    source, there = _source(order, m, end, weights, TOP_K), (m < end)[None, :]
    n, k = out_tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, GROUP)
    weight_tile = pointer_at(addresses, expert, tl.int8, ALIGNMENT) + n.to(tl.int64)[:, None] * GROUP + k[None, :]
    source = source[None, :]
    x_tile = codes + source * blocks * 2 * GROUP + k[:, None]
    scale = pointer_at(scale_addresses, expert, tl.float16, ALIGNMENT) + n
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    chunk = tl.zeros((OUTPUTS, ROWS), tl.float32)
    scale_1 = tl.load(scale)
    scale_2 = tl.load(scale + out_padded)
    row_scale = row_scales_at(row_scales, rows, source, there, 0, 2 * GROUP, BLOCK)
    for block in range(blocks):
        # The next block's scales are on their way while this one is computed.
        scale += 2 * out_padded
        next_1 = tl.load(scale)
        next_2 = tl.load(scale + out_padded)
        next_scale = row_scales_at(row_scales, rows, source, there, block + 1, 2 * GROUP, BLOCK)
        both = tl.load(weight_tile)
        sums = tl.dot(low_halves(both, COMPILED), tl.load(x_tile, mask=there, other=0), out_dtype=tl.int32)
        chunk = add_group(chunk, sums, scale_1, row_scale)
        sums = tl.dot(high_halves(both, COMPILED), tl.load(x_tile + GROUP, mask=there, other=0), out_dtype=tl.int32)
        chunk = add_group(chunk, sums, scale_2, row_scale)
        if CHUNKED and ((block + 1) % length == 0 or block + 1 == blocks):
            total += chunk
            chunk = tl.zeros((OUTPUTS, ROWS), tl.float32)
        scale_1, scale_2, row_scale = next_1, next_2, next_scale
        x_tile += 2 * GROUP
        weight_tile += out_padded * GROUP
    total = total if CHUNKED else chunk
    _finish(total, m, end, n, None, biases, expert, order, weights, out, out_features)


class QuantizedWeights:
    """Quantized weights of one shape and format, each where it lies.

    Args:
        products: made by `linear.pack_quantized`.

    Raises:
        ValueError: the products are of other kinds, or differ.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = [_checked(product) for product in products]
        first = self._products[0]
        self.out_features, self.in_features, self.device = first.out_features, first.in_features, first.blocks.device
        self.is_int8 = first.group is None
        if {(product.out_features, product.in_features) for product in self._products} != {
            (self.out_features, self.in_features)
        }:
            raise ValueError("the weights differ in shape")
        self._addresses = addresses_of([product.blocks for product in self._products])
        self._scale_addresses = addresses_of([product.scales for product in self._products])
        self._biases = biases_of(self._products)
        self._shape, self._chunks = first.blocks.shape, first.chunks
        self._padded_inputs = len(first.blocks) * first.block_inputs

    def __len__(self) -> int:
        return len(self._products)

    def multiply(
        self,
        x: torch.Tensor,
        order: torch.Tensor | None,
        tile_table: torch.Tensor,
        top_k: int,
        tile: Tile,
        weights: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """The product of each pair: [pairs, out], in fp32 with weights, else in x's data type: see `_source`.

        activation: of x, before it is multiplied; None: that has been done, or is not wanted.
        """
        blocks, padded, width = self._shape
        codes, row_scales = quantize_activations(x, self._padded_inputs, activation)
        pairs = len(x) if weights is not None else len(x) * top_k
        out = x.new_empty(pairs, self.out_features, dtype=x.dtype if weights is None else torch.float32)
        where = (
            codes,
            self._addresses,
            self._scale_addresses,
            self._biases,
            row_scales,
            order,
            tile_table,
            weights,
            out,
        )
        sizes = (len(codes), len(tile_table), self.out_features, padded, blocks, self._chunks.length)
        grid = (len(tile_table) * (padded // OUTPUTS),)
        shape = {"TOP_K": top_k, "CHUNKED": self._chunks.count > 1, "ROWS": tile.rows, "OUTPUTS": OUTPUTS}
        shape |= {"BLOCK": BLOCK, "ALIGNMENT": ALIGNMENT}
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
        if self.is_int8:
            _int8_kernel[grid](*where, *sizes, INPUTS=INT8_BLOCK, **shape, **options)
        else:
            _int4_kernel[grid](*where, *sizes, GROUP=width, COMPILED=COMPILED, **shape, **options)
        return out


def _checked(product: Product) -> QuantizedProduct:
    if not isinstance(product, QuantizedProduct):
        raise ValueError(f"a product is a {type(product).__name__}, where all others are quantized")
    return product


class QuantizedExperts:
    """All experts of a layer, as many launches whatever the tokens: an `Experts`.

    Args:
        gate_up, down: one quantized product of either kind an expert.
        shared, activation: see `Kernels.experts`.

    Raises:
        ValueError: a product is not quantized, or the experts differ.
    """

    def __init__(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> None:
        self._activation: Activation = activation
        self._gate_up, self._down = QuantizedWeights(gate_up), QuantizedWeights(down)
        self._ranks = Shared(shared, self._gate_up.device)
        self._ranks.check(self._gate_up, self._down, turns_of(activation))

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        x, _ = checked(x, self._gate_up.in_features, DTYPES, None)
        out = x.new_empty(len(x), self._down.out_features)
        if len(x) == 0:
            return out
        many = MANY if self._gate_up.is_int8 else MANY_INT4
        tile = many if ids.numel() >= len(self._gate_up) * FEW.rows else FEW
        own, slots = self._ranks.own(ids)
        order, tile_table = ordered(own, len(self._gate_up), tile.rows)
        gate_up = self._gate_up.multiply(x, order, tile_table, ids.shape[1], tile, None)
        rest: Activation | None = self._activation
        if self._ranks.gathers:
            gate_up, rest = self._ranks.inner(activate(gate_up, self._activation)), None
        parts = self._down.multiply(gate_up, order, tile_table, 1, tile, weights.contiguous(), rest)
        return add_places(self._ranks.of_all(parts, slots), out)
