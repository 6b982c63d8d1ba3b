"""Mixture of experts: all experts of a layer at once, whatever the tokens chose.

A token and one of its experts are a **pair**: pair `t * top_k + p` is token t's expert at place p. A call orders the
pairs by expert and cuts them into **row tiles**, of which none has rows of two experts, so an expert that no token
chose costs nothing. How many row tiles there are is known on the device alone: launches have as many programs as any
choice could need, and those after the last tile end at once.

A row's sum goes through all inputs in ascending order, in tiles of the shapes of `linear_dense`, whatever else is in
them, so its bits depend on nothing but the row. Weights lie where they are, and kernels find them by their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl

from quire.ops.elementwise import WITHOUT_GATE, Activation
from quire.ops.experts import ExpertSlots, of_all_ranks
from quire.ops.linear import Product
from quire.ops.triton.fp8 import restored
from quire.ops.triton.linear_chunks import checked, place_of
from quire.ops.triton.linear_dense import Tile
from quire.ops.triton.linear_mxfp4 import numbers_of
from quire.ops.triton.rows import activated
from quire.ops.triton.weights import ALIGNMENT, MXFP4, Weights, pointer_at
from quire.parallel.group import Gather

PAIRS = 1024
"""That a program which orders them reads at once: 8 a thread."""
PART = 1024
"""Numbers of a token that a program adds up: 8 a thread."""


# -- the loop that all products share ------------------------------------------------------------------------


@triton.jit
def _rows_of(addresses, expert, rows, in_features, dtype: tl.constexpr, GROUP: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointers to some rows of an expert's weight: of numbers, or of codes where there are scales."""
    width = in_features // 2 if GROUP == MXFP4 else in_features
    return pointer_at(addresses, expert, dtype, ALIGNMENT) + rows * width


@triton.jit
def _scales_of(scale_addresses, expert, rows, in_features, GROUP: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointers to the same rows of its scales."""
    dtype: tl.constexpr = tl.uint8 if GROUP == MXFP4 else tl.float32
    return pointer_at(scale_addresses, expert, dtype, ALIGNMENT) + rows * tl.cdiv(in_features, GROUP)


@triton.jit
def _multiply_codes(
    x_tile,
    weight_tile,
    scale_tile,
    rows_there,
    outputs_there,
    in_features,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """As `multiply`, with pointers to rows of codes in MXFP4, and of their scales."""
    k = tl.arange(0, INPUTS)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, in_features, INPUTS):
        at = (start + k)[:, None]
        inside = at < in_features
        a = tl.load(x_tile + (start + k)[None, :], mask=rows_there & ((start + k) < in_features)[None, :], other=0.0)
        codes = tl.load(weight_tile + at // 2, mask=outputs_there & inside, other=0) >> (at % 2 * 4).to(tl.uint8)
        scales = tl.load(scale_tile + at // 32, mask=outputs_there & inside, other=0)
        b = numbers_of(codes, scales, x_tile.dtype.element_ty)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def _multiply_numbers(
    x_tile,
    weight_tile,
    scale_tile,
    rows_there,
    outputs_there,
    in_features,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """As `multiply`, with pointers to rows of numbers, or of codes in fp8."""
    k = tl.arange(0, INPUTS)
    x_tile += k[None, :]
    weight_tile += k[:, None]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, in_features, INPUTS):
        if EVEN:
            a = tl.load(x_tile, mask=rows_there, other=0.0)
            b = tl.load(weight_tile, mask=outputs_there, other=0.0)
        else:
            inside = k < in_features - start
            a = tl.load(x_tile, mask=rows_there & inside[None, :], other=0.0)
            b = tl.load(weight_tile, mask=outputs_there & inside[:, None], other=0.0)
        if GROUP:
            b = restored(b, tl.load(scale_tile + start // GROUP, mask=outputs_there, other=0.0), a.dtype)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_tile += INPUTS
        weight_tile += INPUTS
    return total


@triton.jit
def multiply(
    x_tile,
    weight_tile,
    scale_tile,
    rows_there,
    outputs_there,
    in_features,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """The sums over all inputs, in ascending order, fp32 [ROWS, OUTPUTS].

    Args:
        x_tile, weight_tile: pointers [ROWS, 1] and [1, OUTPUTS] to rows of x and of the weight.
        scale_tile: the same to rows of scales of GROUP inputs; None, and no GROUP: weights are dense.
        rows_there, outputs_there: which of them exist.
    """
    if GROUP == MXFP4:
        total = _multiply_codes(
            x_tile, weight_tile, scale_tile, rows_there, outputs_there, in_features, ROWS, OUTPUTS, INPUTS
        )
    else:
        places = rows_there, outputs_there
        total = _multiply_numbers(
            x_tile, weight_tile, scale_tile, *places, in_features, EVEN, GROUP, ROWS, OUTPUTS, INPUTS
        )
    return total


# -- experts -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _order_kernel(
    ids, order, tile_table, pairs, tiles, experts, BINS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr
):
    """One expert: its pairs in ascending order, after those of the experts before it, and its row tiles.

    tile_table: [tiles, 3], expert, first row and the row after the expert's last; zeros where there is no tile.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, PAIRS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, PAIRS):
        found = tl.load(ids + start + at, mask=at < pairs - start, other=-1).to(tl.int32)
        counts += tl.histogram(found, BINS, mask=found >= 0)
    bins = tl.arange(0, BINS)
    tiles_of = (counts + ROWS - 1) // ROWS
    row = tl.sum(tl.where(bins < expert, counts, 0))
    end = row + tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, tiles_of, 0))
    last = tl.where(expert == experts - 1, tiles, tile + (end - row + ROWS - 1) // ROWS)
    for start in range(tile, last, PAIRS):
        first = row + (start - tile + at) * ROWS
        there, real = start + at < last, first < end
        entry = tile_table + (start + at) * 3
        tl.store(entry, tl.where(real, expert, 0), mask=there)
        tl.store(entry + 1, tl.where(real, first, 0), mask=there)
        tl.store(entry + 2, tl.where(real, end, 0), mask=there)
    if row < end:
        for start in range(0, pairs, PAIRS):
            mine = tl.load(ids + start + at, mask=at < pairs - start, other=-1) == expert
            tl.store(order + row + tl.cumsum(mine.to(tl.int32), 0) - 1, start + at, mask=mine)
            row += tl.sum(mine.to(tl.int32))


@triton.jit
def tile_at(tile_table, tile):
    """A tile's expert, its first row, and the row after its expert's last; zeros where there is no tile."""
    entry = tile_table + tile * 3
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit(do_not_specialize=["tiles"])
def _gate_up_kernel(
    x,
    addresses,
    scale_addresses,
    biases,
    order,
    tile_table,
    inner,
    tiles,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    STORED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TURNS: tl.constexpr,
):
    """A tile of `activation(gate) * up`, inner [pairs, intermediate] in the order of `order`.

    Columns of the product are by turns of gate and of up, so that a thread has both of what it multiplies; without a
    gate, TURNS is 1.
    """
    COLUMNS: tl.constexpr = OUTPUTS // TURNS
    tile, out_tile = place_of(tl.program_id(0), tiles, tl.cdiv(intermediate, COLUMNS), 1)
    expert, first, end = tile_at(tile_table, tile)
    if first >= end:
        return
    m = first + tl.arange(0, ROWS)
    token = tl.load(order + m, mask=m < end, other=0) // TOP_K
    column = tl.arange(0, OUTPUTS)
    n = out_tile * COLUMNS + column // TURNS
    weight_row = (n + column % TURNS * intermediate).to(tl.int64)
    where = weight_row[None, :]
    weight_tile = _rows_of(addresses, expert, where, hidden, STORED, GROUP, ALIGNMENT)
    scale_tile = None
    if GROUP:
        scale_tile = _scales_of(scale_addresses, expert, where, hidden, GROUP, ALIGNMENT)
    x_tile = x + token.to(tl.int64)[:, None] * hidden
    there, outputs_there = (m < end)[:, None], (n < intermediate)[None, :]
    total = multiply(x_tile, weight_tile, scale_tile, there, outputs_there, hidden, EVEN, GROUP, ROWS, OUTPUTS, INPUTS)

    if biases is not None:
        bias = biases + expert.to(tl.int64) * (TURNS * intermediate) + weight_row
        total += tl.load(bias, mask=n < intermediate, other=0.0)[None, :]
    dtype: tl.constexpr = inner.dtype.element_ty  # what the reference rounds is rounded here
    gate = total.to(dtype).to(tl.float32)
    up = gate
    if TURNS == 2:
        gate, up = tl.split(tl.reshape(gate, (ROWS, COLUMNS, 2)))
    active, up = activated(gate, up, dtype, ACTIVATION)
    n = (out_tile * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    tl.store(
        inner + m.to(tl.int64)[:, None] * intermediate + n, (active * up).to(dtype), mask=there & (n < intermediate)
    )


@triton.jit(do_not_specialize=["tiles"])
def _down_kernel(
    inner,
    addresses,
    scale_addresses,
    biases,
    order,
    tile_table,
    weights,
    parts,
    tiles,
    hidden,
    intermediate,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    STORED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """A tile of the down product times the pairs' weights, to where the pairs belong: parts [pairs, hidden] fp32."""
    tile, out_tile = place_of(tl.program_id(0), tiles, tl.cdiv(hidden, OUTPUTS), 1)
    expert, first, end = tile_at(tile_table, tile)
    if first >= end:
        return
    m = first + tl.arange(0, ROWS)
    n = (out_tile * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
    where = n.to(tl.int64)
    weight_tile = _rows_of(addresses, expert, where, intermediate, STORED, GROUP, ALIGNMENT)
    scale_tile = None
    if GROUP:
        scale_tile = _scales_of(scale_addresses, expert, where, intermediate, GROUP, ALIGNMENT)
    x_tile = inner + m.to(tl.int64)[:, None] * intermediate
    there, outputs_there = (m < end)[:, None], n < hidden
    places = there, outputs_there
    total = multiply(x_tile, weight_tile, scale_tile, *places, intermediate, EVEN, GROUP, ROWS, OUTPUTS, INPUTS)
    if biases is not None:
        total += tl.load(biases + expert.to(tl.int64) * hidden + n, mask=n < hidden, other=0.0)
    pair = tl.load(order + m, mask=m < end, other=0).to(tl.int64)
    total *= tl.load(weights + pair, mask=m < end, other=0.0)[:, None]
    tl.store(parts + pair[:, None] * hidden + n, total, mask=there & (n < hidden))


@triton.jit
def _add_places_kernel(parts, out, hidden, TOP_K: tl.constexpr, PART: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * PART + tl.arange(0, PART)
    parts += token * TOP_K * hidden + n
    total = tl.load(parts, mask=n < hidden, other=0.0)
    for place in tl.static_range(1, TOP_K):
        total += tl.load(parts + place * hidden, mask=n < hidden, other=0.0)
    tl.store(out + token * hidden + n, total.to(out.dtype.element_ty), mask=n < hidden)


def ordered(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of ids [tokens, top_k] ordered by expert, and the tiles of `rows` rows into which they are cut.

    Pairs whose id is none of the experts (-1: another rank has it) are in no tile.

    Returns:
        (pairs [tokens * top_k] int32, table [tiles, 3] int32: see `_order_kernel`).
    """
    ids, pairs = ids.contiguous(), ids.numel()
    chosen = min(experts, pairs)  # at most
    tiles = (pairs + chosen * (rows - 1)) // rows
    order = ids.new_empty(pairs, dtype=torch.int32)
    tile_table = ids.new_empty(tiles, 3, dtype=torch.int32)
    bins = max(32, triton.next_power_of_2(experts))  # one a thread of a warp, at least
    _order_kernel[(experts,)](
        ids, order, tile_table, pairs, tiles, experts, BINS=bins, ROWS=rows, PAIRS=PAIRS, enable_fp_fusion=False
    )
    return order, tile_table


def add_places(parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out [tokens, hidden]: parts [tokens * top_k, hidden] fp32 of each token, added in ascending order of places."""
    tokens, hidden = out.shape
    grid = (tokens, triton.cdiv(hidden, PART))
    _add_places_kernel[grid](parts, out, hidden, TOP_K=len(parts) // tokens, PART=PART, enable_fp_fusion=False)
    return out


class AllWeights(Protocol):
    """One of the two products of all experts."""

    in_features: int
    out_features: int

    def __len__(self) -> int: ...


def turns_of(activation: Activation) -> int:
    """How many parts an expert's first product has: gate and up, or up alone."""
    return 1 if activation in WITHOUT_GATE else 2


class Shared:
    """What ranks do together where they share the experts of a layer: see `Kernels.experts`.

    Each has some columns of every expert, which are brought together between the products; or experts of its own, whose
    results are.
    """

    def __init__(self, shared: Gather | ExpertSlots | None, device: torch.device) -> None:
        self._gather = shared if isinstance(shared, Gather) else None
        self._slots = shared if isinstance(shared, ExpertSlots) else None
        self._turns = None if self._slots is None else self._slots.turns(device)

    def check(self, gate_up: AllWeights, down: AllWeights, turns: int) -> None:
        """Raises ValueError: an expert's products do not fit each other; `turns`: of its activation."""
        inner = gate_up.out_features // turns if self._gather is None else self._gather.width
        hidden = down.out_features if self._gather is None else gate_up.in_features
        if (len(down), down.in_features, hidden) != (len(gate_up), inner, gate_up.in_features):
            raise ValueError("the experts' gate and up do not fit their down")

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [tokens, top_k] as numbers of what is here, -1: elsewhere; and the slots, where ranks have their own."""
        if self._slots is None or self._turns is None:
            return ids, ids
        slots, own = self._turns.of(ids), self._slots.own
        return torch.where((slots >= own.start) & (slots < own.stop), slots - own.start, -1), slots

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What the second product reads of what the first one makes, [pairs, intermediate]."""
        return x if self._gather is None else self._gather(x)

    def of_all(self, parts: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Each pair's result, [pairs, hidden]."""
        return parts if self._slots is None else of_all_ranks(parts, slots, self._slots)


class GroupedExperts:
    """All experts of a layer in four launches: an `Experts`.

    Args:
        gate_up, down: one dense product of either kind an expert.
        shared, activation: see `Kernels.experts`.

    Raises:
        ValueError: a product is not dense, or the experts differ.
    """

    def __init__(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> None:
        self._gate_up, self._down, self._activation = Weights(gate_up), Weights(down), activation
        self._hidden, self._turns = self._gate_up.in_features, turns_of(activation)
        self._intermediate = self._gate_up.out_features // self._turns
        self._ranks = Shared(shared, self._gate_up.device)
        if self._gate_up.dtypes != self._down.dtypes:
            raise ValueError("the experts' gate and up have other data types than their down")
        self._ranks.check(self._gate_up, self._down, self._turns)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        x, _ = checked(x, self._hidden, self._gate_up.dtypes, None)
        out = x.new_empty(len(x), self._down.out_features)
        if len(x) == 0:
            return out
        short, tall = self._gate_up.tiles(x.dtype)
        tile = tall if ids.numel() >= len(self._gate_up) * tall.rows else short
        own, slots = self._ranks.own(ids)
        order, tile_table = ordered(own, len(self._gate_up), tile.rows)
        inner = self._ranks.inner(self._launch_gate_up(x, order, tile_table, ids.shape[1], tile))
        parts = self._launch_down(inner, order, tile_table, weights.contiguous(), tile)
        return add_places(self._ranks.of_all(parts, slots), out)

    def _launch_gate_up(
        self, x: torch.Tensor, order: torch.Tensor, tile_table: torch.Tensor, top_k: int, tile: Tile
    ) -> torch.Tensor:
        inner = x.new_empty(len(order), self._intermediate)
        _gate_up_kernel[(len(tile_table) * triton.cdiv(self._intermediate, tile.outputs // self._turns),)](
            x,
            self._gate_up.addresses,
            self._gate_up.scale_addresses,
            self._gate_up.bias,
            order,
            tile_table,
            inner,
            len(tile_table),
            self._hidden,
            self._intermediate,
            TOP_K=top_k,
            EVEN=self._hidden % tile.inputs == 0,
            GROUP=self._gate_up.group,
            STORED=self._gate_up.stored,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            ALIGNMENT=ALIGNMENT,
            ACTIVATION=self._activation,
            TURNS=self._turns,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        return inner

    def _launch_down(
        self, inner: torch.Tensor, order: torch.Tensor, tile_table: torch.Tensor, weights: torch.Tensor, tile: Tile
    ) -> torch.Tensor:
        (hidden, intermediate), pairs = (self._down.out_features, self._down.in_features), len(order)
        parts = inner.new_empty(pairs, hidden, dtype=torch.float32)
        _down_kernel[(len(tile_table) * triton.cdiv(hidden, tile.outputs),)](
            inner,
            self._down.addresses,
            self._down.scale_addresses,
            self._down.bias,
            order,
            tile_table,
            weights,
            parts,
            len(tile_table),
            hidden,
            intermediate,
            EVEN=intermediate % tile.inputs == 0,
            GROUP=self._down.group,
            STORED=self._down.stored,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            ALIGNMENT=ALIGNMENT,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        return parts
