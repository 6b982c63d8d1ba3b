"""Products with weights in codes: how they lie and the loop over them are in `coded`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.ops.activations import BLOCK
from quire.ops.coded import CodedWeight, check_parts
from quire.ops.triton.activations import Activations, Shares, quantize_activations
from quire.ops.triton.coded import FEW, OUTPUTS, Form, Tile, looked_up, multiply, relay
from quire.ops.triton.linear_chunks import Chunks, Ending, checked, finish, place_of, sum_chunks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of activations."""


@triton.jit(do_not_specialize=["rows", "length", "span"])
def _coded_kernel(
    codes,
    row_scales,
    row_sums,
    weight,
    scales,
    offsets,
    block_scales,
    block_offsets,
    table,
    factors,
    bias,
    out,
    rows,
    out_features,
    stride,
    inputs,
    padded,
    steps,
    length,
    span,
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
    """A tile of W x^T, over `span` steps of inputs from program_id(1) * span on; out is [.., rows, out_features].

    inputs: of codes [rows, inputs]; stride: see `finish`.
    """
    row_tile, out_tile = place_of(tl.program_id(0), rows, padded // OUTPUTS, ROWS)
    m = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = out_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, steps)
    sums_of_rows = None
    if row_sums is not None:
        sums_of_rows = row_sums + m
    total = multiply(
        *(codes + m * inputs, m < rows, row_scales + m),
        sums_of_rows,
        *(rows, weight),
        scales,
        offsets,
        block_scales,
        block_offsets,
        table,
        *(n, padded, first, last, length),
        *(CHUNKED, ROWS, OUTPUTS, SEGMENT, GROUP, UNIT, ALONE, WHOLE_ROWS, OFFSET_UNITS, LOW, HIGH, DEPTH, BLOCK),
        COMPILED,
    )
    out += tl.program_id(1).to(tl.int64) * rows * out_features
    finish(total, m[None, :], n[:, None], rows, out_features, stride, factors, bias, out)


class CodedPart:
    """Some outputs of a product, whose weights have one form, on the device.

    Attributes:
        form, lain: see `coded`.
        table: see `coded.looked_up`.
        begin, out_features: which outputs of the product these are.
    """

    def __init__(self, form: Form, parts: list[CodedWeight], begin: int, device: torch.device) -> None:
        self.form, self.lain, self.begin = form, relay(form, parts, device), begin
        self.table = looked_up(form, device)
        self.out_features = sum(part.out_features for part in parts)

    def chunks(self, inputs: int, outputs: int) -> Chunks:
        """How the sums of steps come together in a product of so many outputs; whatever the form, a chunk has as many
        whole blocks of inputs."""
        steps, whole = self.form.steps(inputs), BLOCK // (2 * self.form.depth)
        step_bytes = OUTPUTS * 2 * self.form.depth * self.form.bits // 8
        return Chunks.of(triton.cdiv(outputs, OUTPUTS), steps, whole, step_bytes, unit=whole)

    def multiply(self, x: Activations, chunks: Chunks, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The product, in its columns of out; `bias`: of these outputs."""
        tile = self.form.tile(len(out) > FEW.rows)
        tiles = triton.cdiv(len(out), tile.rows) * (self.lain.codes.shape[1] // OUTPUTS)
        columns = out[:, self.begin : self.begin + self.out_features]
        launch = functools.partial(self._launch, x, chunks, tile)
        sum_chunks(launch, tiles, chunks, columns, Ending(self.lain.factors, bias))

    def _launch(
        self,
        x: Activations,
        chunks: Chunks,
        tile: Tile,
        grid: tuple[int, int],
        span: int,
        out: torch.Tensor,
        ending: Ending,
    ) -> None:
        codes, scales, sums = x
        rows, inputs = codes.shape
        _coded_kernel[grid](
            codes,
            scales,
            sums,
            *self.lain[:-1],
            self.table,
            *ending,
            out,
            rows,
            self.out_features,
            out.stride(-2),
            inputs,
            self.lain.codes.shape[1],
            chunks.blocks,
            chunks.length,
            span,
            CHUNKED=chunks.count > 1,
            ROWS=tile.rows,
            OUTPUTS=OUTPUTS,
            **self.form.constants(),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )


class CodedProduct:
    """The product with weights in codes, each row's bits independent of the other rows: a `Product`.

    Args:
        parts: copied to the device; their outputs come side by side, and they may have different schemes.
        bias: [out], on the device.
        outputs: see `Kernels.pack`.
        scaled: inputs of activations that share a scale; None: as the schemes say.

    Attributes: for kernels that multiply with several such weights at once, with the same bits.
        parts: neighbours of one form together.
        chunks: of each.
        bias: [out] fp32; None: there is none.

    Raises:
        CheckpointError: see `ops.coded.CodedProduct`.
    """

    def __init__(
        self,
        parts: Sequence[CodedWeight],
        bias: torch.Tensor | None,
        device: torch.device,
        outputs: int | None = None,
        scaled: int | None = None,
    ) -> None:
        self.in_features, self.out_features = check_parts(parts)
        self.parts, begin = list[CodedPart](), 0
        for form, alike in itertools.groupby(parts, functools.partial(Form.of, scaled=scaled)):
            self.parts.append(CodedPart(form, list(alike), begin, device))
            begin += self.parts[-1].out_features
        self.chunks = [part.chunks(self.in_features, outputs or self.out_features) for part in self.parts]
        self.bias = None if bias is None else bias.float()

    @property
    def device(self) -> torch.device:
        return self.parts[0].lain.codes.device

    @property
    def padded_inputs(self) -> int:
        """Of activations in codes: whole blocks."""
        return -(-self.in_features // BLOCK) * BLOCK

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        x, out_dtype = checked(x, self.in_features, DTYPES, out_dtype)
        out = x.new_empty(len(x), self.out_features, dtype=out_dtype)
        if len(x) == 0:
            return out
        rows: dict[Shares, Activations] = {}
        for part, chunks in zip(self.parts, self.chunks, strict=True):
            shares = part.form.shares
            if shares not in rows:
                rows[shares] = quantize_activations(x, self.padded_inputs, shares)
            bias = None if self.bias is None else self.bias[part.begin : part.begin + part.out_features]
            part.multiply(rows[shares], chunks, out, bias)
        return out
