"""Mixture of experts: all experts of a layer at once, whatever the tokens chose.

Rows are ordered and cut into tiles by `expert_rows`. A row's sum goes through all inputs in ascending order, in steps
of the matrix instruction, whatever else is in its tile, so its bits depend on nothing but the row. Weights lie where
they are, and kernels find them by their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.elementwise import WITHOUT_GATE, Activation
from quire.ops.experts import ExpertSlots, of_all_ranks
from quire.ops.linear import Product
from quire.ops.triton.early import launch_options
from quire.ops.triton.expert_rows import ordered, pairs_of, tile_at
from quire.ops.triton.fp8 import restored
from quire.ops.triton.linear_chunks import checked, place_of
from quire.ops.triton.linear_dense import Tile
from quire.ops.triton.linear_mxfp4 import numbers_of
from quire.ops.triton.rows import activated
from quire.ops.triton.weights import ALIGNMENT, MXFP4, Weights, pointer_at
from quire.parallel.group import Gather

PART = 1024
"""Numbers of a token that a program adds up: 8 a thread."""

FEW, SOME = Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4)
"""For few rows an expert: programs that read little each, and of which more run beside one another."""
MOST_FEW, MOST_SOME, MOST_SHORT = 8, 32, 64
"""Rows an expert, on average, up to which these and the short tile are taken; for more it is the tall one."""
TAIL = 64
"""Rows of what computes an expert's last ones where there are no more."""


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


@triton.jit
def _gate_up_tile(
    x,
    addresses,
    scale_addresses,
    biases,
    order,
    inner,
    expert,
    first,
    end,
    out_tile,
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
    """ROWS rows of an expert from `first` on: see `_gate_up_kernel`."""
    COLUMNS: tl.constexpr = OUTPUTS // TURNS
    m = first + tl.arange(0, ROWS)
    token = pairs_of(order, m, end) // TOP_K
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
    LEAST: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TURNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of `activation(gate) * up`, inner [pairs, intermediate] in the order of `order`.

    Columns of the product are by turns of gate and of up, so that a thread has both of what it multiplies; without a
    gate, TURNS is 1. An expert's last tile is computed as one of LEAST rows if it has no more.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    tile, out_tile = place_of(tl.program_id(0), tiles, tl.cdiv(intermediate, OUTPUTS // TURNS), 1)
    expert, first, end = tile_at(tile_table, tile, order is not None)
    if first >= end:
        return
    if LEAST < ROWS and end - first <= LEAST:
        _gate_up_tile(
            *(x, addresses, scale_addresses, biases, order, inner, expert, first, end, out_tile, hidden, intermediate),
            *(TOP_K, EVEN, GROUP, STORED, LEAST, OUTPUTS, INPUTS, ALIGNMENT, ACTIVATION, TURNS),
        )
    else:
        _gate_up_tile(
            *(x, addresses, scale_addresses, biases, order, inner, expert, first, end, out_tile, hidden, intermediate),
            *(TOP_K, EVEN, GROUP, STORED, ROWS, OUTPUTS, INPUTS, ALIGNMENT, ACTIVATION, TURNS),
        )


@triton.jit
def _down_tile(
    inner,
    addresses,
    scale_addresses,
    biases,
    order,
    weights,
    parts,
    expert,
    first,
    end,
    out_tile,
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
    """ROWS rows of an expert from `first` on: see `_down_kernel`."""
    m = first + tl.arange(0, ROWS)
    n = (out_tile * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
    where = n.to(tl.int64)
    weight_tile = _rows_of(addresses, expert, where, intermediate, STORED, GROUP, ALIGNMENT)
    scale_tile = None
    if GROUP:
        scale_tile = _scales_of(scale_addresses, expert, where, intermediate, GROUP, ALIGNMENT)
    x_tile = inner + m.to(tl.int64)[:, None] * intermediate
    there, outputs_there = (m < end)[:, None], n < hidden
    places = there, outputs_there  # a scale tile that is not there must not be in a tuple, for it has no type
    total = multiply(x_tile, weight_tile, scale_tile, *places, intermediate, EVEN, GROUP, ROWS, OUTPUTS, INPUTS)
    if biases is not None:
        total += tl.load(biases + expert.to(tl.int64) * hidden + n, mask=n < hidden, other=0.0)
    pair = pairs_of(order, m, end).to(tl.int64)
    total *= tl.load(weights + pair, mask=m < end, other=0.0)[:, None]
    tl.store(parts + pair[:, None] * hidden + n, total, mask=there & outputs_there)


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
    LEAST: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of the down product times the pairs' weights, to where the pairs belong: parts [pairs, hidden] fp32."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    tile, out_tile = place_of(tl.program_id(0), tiles, tl.cdiv(hidden, OUTPUTS), 1)
    expert, first, end = tile_at(tile_table, tile, order is not None)
    if first >= end:
        return
    if LEAST < ROWS and end - first <= LEAST:
        _down_tile(
            *(inner, addresses, scale_addresses, biases, order, weights, parts, expert, first, end, out_tile, hidden),
            *(intermediate, EVEN, GROUP, STORED, LEAST, OUTPUTS, INPUTS, ALIGNMENT),
        )
    else:
        _down_tile(
            *(inner, addresses, scale_addresses, biases, order, weights, parts, expert, first, end, out_tile, hidden),
            *(intermediate, EVEN, GROUP, STORED, ROWS, OUTPUTS, INPUTS, ALIGNMENT),
        )


@triton.jit
def _add_places_kernel(parts, out, hidden, TOP_K: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * PART + tl.arange(0, PART)
    parts += token * TOP_K * hidden + n
    total = tl.load(parts, mask=n < hidden, other=0.0)
    for place in tl.static_range(1, TOP_K):
        total += tl.load(parts + place * hidden, mask=n < hidden, other=0.0)
    tl.store(out + token * hidden + n, total.to(out.dtype.element_ty), mask=n < hidden)


def add_places(parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out [tokens, hidden]: parts [tokens * top_k, hidden] fp32 of each token, added in ascending order of places."""
    tokens, hidden = out.shape
    grid = (tokens, triton.cdiv(hidden, PART))
    _add_places_kernel[grid](
        parts,
        out,
        hidden,
        TOP_K=len(parts) // tokens,
        PART=PART,
        **launch_options(parts.device),
        enable_fp_fusion=False,
    )
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

    @property
    def gathers(self) -> bool:
        """Whether they have columns each."""
        return self._gather is not None

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


def tile_for(weights: Weights, dtype: torch.dtype, pairs: int) -> Tile:
    """The one for so many pairs of a row and an expert. All give the same bits: they differ in what a program computes,
    and the order of a sum is that of the inputs."""
    short, tall = weights.tiles(dtype)
    share = pairs / len(weights)
    if weights.low and share <= MOST_SOME:
        return FEW if share <= MOST_FEW else SOME
    return short if share <= MOST_SHORT else tall


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
        tile = tile_for(self._gate_up, x.dtype, ids.numel())
        own, slots = self._ranks.own(ids)
        order, tile_table = ordered(own, len(self._gate_up), tile.rows)
        inner = self._ranks.inner(self._launch_gate_up(x, order, tile_table, ids.shape, tile))
        parts = self._launch_down(inner, order, tile_table, weights.contiguous(), tile)
        return add_places(self._ranks.of_all(parts, slots), out)

    def _least_rows(self, tile: Tile) -> int:
        """Of what computes an expert's last ones; of codes in MXFP4, which take registers, there is one form alone."""
        return tile.rows if self._gate_up.group == MXFP4.value else min(tile.rows, TAIL)

    def _launch_gate_up(
        self, x: torch.Tensor, order: torch.Tensor | None, tile_table: torch.Tensor, ids: torch.Size, tile: Tile
    ) -> torch.Tensor:
        inner = x.new_empty(ids.numel(), self._intermediate)
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
            TOP_K=ids[1],
            EVEN=self._hidden % tile.inputs == 0,
            GROUP=self._gate_up.group,
            STORED=self._gate_up.stored,
            ROWS=tile.rows,
            LEAST=self._least_rows(tile),
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            ALIGNMENT=ALIGNMENT,
            ACTIVATION=self._activation,
            TURNS=self._turns,
            **launch_options(x.device),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        return inner

    def _launch_down(
        self,
        inner: torch.Tensor,
        order: torch.Tensor | None,
        tile_table: torch.Tensor,
        weights: torch.Tensor,
        tile: Tile,
    ) -> torch.Tensor:
        hidden, intermediate = self._down.out_features, self._down.in_features
        parts = inner.new_empty(len(inner), hidden, dtype=torch.float32)
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
            LEAST=self._least_rows(tile),
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            ALIGNMENT=ALIGNMENT,
            **launch_options(inner.device),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
        return parts
