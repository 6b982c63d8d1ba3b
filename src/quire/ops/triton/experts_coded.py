"""All experts of a layer at once, with weights in codes: as in `experts`, with the products of `linear_coded`, whose
bits they share.

A token is quantized once for all of its experts. What is between the two products is rounded to the data type of x
and quantized anew, so gate and up are joined in the launch that does that. Each part of a product is a launch, and so
is each form (`coded.Form`) that a part has among the experts: programs of another form's experts end at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.ops.elementwise import Activation
from quire.ops.experts import ExpertSlots
from quire.ops.linear import Product
from quire.ops.triton.activations import Activations, Shares, quantize_activations
from quire.ops.triton.coded import FEW, OUTPUTS, TYPES, Form, Lain, looked_up, multiply
from quire.ops.triton.expert_rows import ordered, pairs_of, tile_at
from quire.ops.triton.experts import Shared, add_places, turns_of
from quire.ops.triton.linear_chunks import Chunks, checked, place_of
from quire.ops.triton.linear_coded import DTYPES, CodedPart, CodedProduct
from quire.ops.triton.rows import activate
from quire.ops.triton.weights import ALIGNMENT, biases_of, pointer_at
from quire.parallel.group import Gather

# Without weights, the product is gate and up: rows are read from their tokens and left in the order of pairs. With
# weights, it is down: rows are read in that order and left at their pairs.


@triton.jit
def _at(addresses, expert, which: tl.constexpr, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointer to one of the tensors of an expert's part; without a type, None: it is not there."""
    pointer = None
    if dtype is not None:
        pointer = pointer_at(addresses, expert * 6 + which, dtype, ALIGNMENT)
    return pointer


@triton.jit(do_not_specialize=["rows", "tiles", "length"])
def _coded_experts_kernel(
    codes,
    row_scales,
    row_sums,
    addresses,
    table,
    biases,
    order,
    tile_table,
    weights,
    out,
    rows,
    tiles,
    begin,
    part_features,
    out_features,
    inputs,
    padded,
    steps,
    length,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    BLOCK_OFFSETS: tl.constexpr,
    FACTORS: tl.constexpr,
    TOP_K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ALONE: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    OFFSET_UNITS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """A tile of W x^T of one expert, of `part_features` of its outputs, from `begin` on.

    rows: of codes [rows, inputs]. addresses: [experts, 6], in the order of `Lain`; 0: the expert has another form.
    """
    tile, out_tile = place_of(tl.program_id(0), tiles, padded // OUTPUTS, 1)
    expert, first, end = tile_at(tile_table, tile, order is not None)
    if first >= end:
        return
    if tl.load(addresses + expert * 6) == 0:
        return
    m = (first + tl.arange(0, ROWS)).to(tl.int64)
    source, there = m, m < end
    if weights is None:
        source = pairs_of(order, m, end).to(tl.int64) // TOP_K
    n = out_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    sums_of_rows = None
    if row_sums is not None:
        sums_of_rows = row_sums + source
    total = multiply(
        *(codes + source * inputs, there, row_scales + source),
        sums_of_rows,
        *(rows, pointer_at(addresses, expert * 6, tl.int8, ALIGNMENT)),
        _at(addresses, expert, 1, SCALES, ALIGNMENT),
        _at(addresses, expert, 2, OFFSETS, ALIGNMENT),
        _at(addresses, expert, 3, BLOCK_SCALES, ALIGNMENT),
        _at(addresses, expert, 4, BLOCK_OFFSETS, ALIGNMENT),
        table,
        *(n, padded, expert * 0, steps, length),
        *(CHUNKED, ROWS, OUTPUTS, SEGMENT, GROUP, UNIT, ALONE, WHOLE_ROWS, OFFSET_UNITS, LOW, HIGH, DEPTH, BLOCK),
        COMPILED,
    )
    inside = n < part_features
    if FACTORS:
        factors = pointer_at(addresses, expert * 6 + 5, tl.float32, ALIGNMENT)
        total *= tl.load(factors + n, mask=inside, other=0.0)[:, None]
    column = begin + n
    if biases is not None:
        total += tl.load(biases + expert.to(tl.int64) * out_features + column, mask=inside, other=0.0)[:, None]
    target = m
    if weights is not None:  # pairs are read here, for the loop needs the registers
        target = pairs_of(order, m, end).to(tl.int64)
        total *= tl.load(weights + target, mask=there, other=0.0)[None, :]
    out += target[None, :] * out_features + column[:, None]
    tl.store(out, total.to(out.dtype.element_ty), mask=there[None, :] & inside[:, None])


class _Part(NamedTuple):
    """The same outputs of those experts that have them in one form: `outputs` from `begin` on."""

    form: Form
    begin: int
    outputs: int
    chunks: Chunks


class CodedWeights:
    """Weights in codes of one shape, each where it lies.

    Args:
        products: made by `Kernels.pack_coded`.

    Attributes:
        out_features, in_features, device: of each.

    Raises:
        ValueError: the products are of other kinds, or differ in shape.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = [_checked(product) for product in products]
        first = self._products[0]
        self.out_features, self.in_features, self.device = first.out_features, first.in_features, first.device
        if {(product.out_features, product.in_features) for product in self._products} != {
            (self.out_features, self.in_features)
        }:
            raise ValueError("the weights differ in shape")
        found: dict[_Part, dict[int, CodedPart]] = {}
        for expert, product in enumerate(self._products):
            for part, chunks in zip(product.parts, product.chunks, strict=True):
                key = _Part(part.form, part.begin, part.out_features, chunks)
                found.setdefault(key, {})[expert] = part
        experts = range(len(products))
        self._parts = [
            (key, addresses_of([parts[expert].lain if expert in parts else None for expert in experts], self.device))
            for key, parts in found.items()
        ]
        self._tables = {part.form: looked_up(part.form, self.device) for part in found}
        self._biases, self._padded_inputs = biases_of(self._products), first.padded_inputs

    def __len__(self) -> int:
        return len(self._products)

    def tile_rows(self, many: bool) -> int:
        """Rows of the tiles that all parts can have."""
        return min(part.form.tile(many).rows for part, _ in self._parts)

    def multiply(
        self,
        x: torch.Tensor,
        order: torch.Tensor | None,
        tile_table: torch.Tensor,
        top_k: int,
        many: bool,
        rows: int,
        weights: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """The product of each pair: [pairs, out], in fp32 with weights, else in x's data type.

        Args:
            many, rows: of a tile: see `Form.tile`.
            activation: of x, before it is multiplied; None: that has been done, or is not wanted.
        """
        pairs = len(x) if weights is not None else len(x) * top_k
        out = x.new_empty(pairs, self.out_features, dtype=x.dtype if weights is None else torch.float32)
        quantized: dict[Shares, Activations] = {}
        for part, addresses in self._parts:
            shares = part.form.shares
            if shares not in quantized:
                quantized[shares] = quantize_activations(x, self._padded_inputs, shares, activation)
            padded = triton.cdiv(part.outputs, OUTPUTS) * OUTPUTS
            tile = part.form.tile(many)
            _coded_experts_kernel[(len(tile_table) * (padded // OUTPUTS),)](
                *quantized[shares],
                addresses,
                self._tables[part.form],
                self._biases,
                order,
                tile_table,
                weights,
                out,
                len(quantized[shares].codes),
                len(tile_table),
                part.begin,
                part.outputs,
                self.out_features,
                self._padded_inputs,
                padded,
                part.chunks.blocks,
                part.chunks.length,
                **_types(part.form),
                TOP_K=top_k,
                ALIGNMENT=ALIGNMENT,
                CHUNKED=part.chunks.count > 1,
                ROWS=rows,
                OUTPUTS=OUTPUTS,
                **part.form.constants(),
                num_warps=tile.warps,
                num_stages=tile.stages,
                enable_fp_fusion=False,
            )
        return out


def _checked(product: Product) -> CodedProduct:
    if not isinstance(product, CodedProduct):
        raise ValueError(f"a product is a {type(product).__name__}, where all others have codes")
    return product


def addresses_of(parts: Sequence[Lain | None], device: torch.device) -> torch.Tensor:
    """Where the tensors of each expert's part lie, [experts, 6] int64; 0: it is not there. Whoever keeps this keeps the
    tensors too."""
    found = [[0 if tensor is None else tensor.data_ptr() for tensor in part or (None,) * 6] for part in parts]
    return torch.tensor(found, dtype=torch.int64, device=device)


def _types(form: Form) -> dict[str, Any]:
    """What the tensors of a part hold, for `_at`."""
    numbers = form.scales, form.offsets, form.block_scales, form.block_offsets
    names = "SCALES", "OFFSETS", "BLOCK_SCALES", "BLOCK_OFFSETS"
    found = {name: None if dtype is None else TYPES[dtype] for name, dtype in zip(names, numbers, strict=True)}
    return found | {"FACTORS": form.has_factors}


class CodedExperts:
    """All experts of a layer, as many launches whatever the tokens: an `Experts`.

    Args:
        gate_up, down: one product with weights in codes of either kind an expert; their schemes may differ.
        shared, activation: see `Kernels.experts`.

    Raises:
        ValueError: a product has no codes, or the experts differ in shape.
    """

    def __init__(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> None:
        self._activation: Activation = activation
        self._gate_up, self._down = CodedWeights(gate_up), CodedWeights(down)
        self._ranks = Shared(shared, self._gate_up.device)
        self._ranks.check(self._gate_up, self._down, turns_of(activation))

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        x, _ = checked(x, self._gate_up.in_features, DTYPES, None)
        out = x.new_empty(len(x), self._down.out_features)
        if len(x) == 0:
            return out
        many = ids.numel() >= len(self._gate_up) * FEW.rows
        rows = min(self._gate_up.tile_rows(many), self._down.tile_rows(many))
        own, slots = self._ranks.own(ids)
        order, tile_table = ordered(own, len(self._gate_up), rows)
        gate_up = self._gate_up.multiply(x, order, tile_table, ids.shape[1], many, rows, None)
        rest: Activation | None = self._activation
        if self._ranks.gathers:
            gate_up, rest = self._ranks.inner(activate(gate_up, self._activation)), None
        parts = self._down.multiply(gate_up, order, tile_table, 1, many, rows, weights.contiguous(), rest)
        return add_places(self._ranks.of_all(parts, slots), out)
