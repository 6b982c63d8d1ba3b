"""What parity checks share: how a difference is measured, and steps laid out for the reference and for the device.

Each kernel computes in bf16 or fp16 on the device what the plain-torch reference (`quire.ops.Kernels`) computes in fp32
on the CPU from the same numbers. A difference is counted as |found - wanted| / (|wanted| + the row's root mean square):
of large numbers it is relative, of small ones it is seen against what stands beside them. Tolerances are in units of
the data type's epsilon (a rounding errs by half a unit), as many as the kernel has roundings, and some room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.gpu.job import Job
from quire.ops import Fp8Weight, Kernels, RaggedBatch
from quire.ops.ragged import DeviceSpans, DeviceTrees, Trees
from quire.ops.triton.kernels import TritonKernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Rig:
    """The kernels under test and their reference, for one data type.

    In a rehearsal fp16 stands for bf16 too, in which Triton's interpreter cannot multiply.
    """

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.name = job, name
        self.dtype = torch.float16 if job.rehearse and name == "bf16" else DTYPES[name]
        self.kernels = TritonKernels(job.device, deterministic=False)
        self.deterministic = TritonKernels(job.device, deterministic=True)
        self.reference = Kernels()
        self._generator = torch.Generator().manual_seed(0)

    def draw(self, *shape: int, spread: float = 1.0) -> Tensor:
        """Random numbers in fp32 that the data type represents, on the CPU."""
        return (torch.randn(*shape, generator=self._generator) * spread).to(self.dtype).float()

    def sent(self, x: Tensor) -> Tensor:
        """The same numbers in the data type, on the device."""
        return x.to(self.job.device, self.dtype, copy=True)

    def near(self, what: str, found: Tensor, wanted: Tensor, units: float) -> None:
        """Record a check: found is wanted, but for `units` of the data type's epsilon."""
        self.within(what, found, wanted, units * torch.finfo(self.dtype).eps)

    def within(self, what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
        """Record a check: the greatest difference is at most the tolerance."""
        self.job.check(f"{self.name}: {what}", difference(found, wanted), tolerance)

    def same(self, what: str, found: Tensor, wanted: Tensor) -> None:
        """Record a check: bit for bit."""
        self.job.check(f"{self.name}: {what}", unequal(found, wanted), 0)

    def same_rows(self, what: str, compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        """Record a check: what is computed of some rows of the inputs has the bits that it has among all of them."""
        whole, rows = compute(*inputs), len(inputs[0])
        parts = [slice(0, count) for count in (1, 2, 8, 17, 64, 130) if count < rows] + [slice(rows // 2, rows)]
        wrong = sum(not torch.equal(compute(*(x[part] for x in inputs)), whole[part]) for part in parts)
        self.job.check(f"{self.name}: {what}: parts of the rows that change a bit", wrong, 0)


def fp8_weight(outputs: int, inputs: int, seed: int = 0) -> Fp8Weight:
    """Of every code but those that are no number, and of other scales for each 128 inputs of an output."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (outputs, inputs), dtype=torch.uint8, generator=generator)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, generator=generator) << 7
    return Fp8Weight(
        codes, (torch.rand(outputs, -(-inputs // 128), generator=generator) + 0.1) * inputs**-0.5 / 99, 128
    )


def difference(found: Tensor, wanted: Tensor) -> float:
    """The greatest one: see the head of this file. Infinite where the shapes differ."""
    if found.shape != wanted.shape:
        return math.inf
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    scale = wanted.abs() + wanted.square().mean(-1, keepdim=True).sqrt()
    ratio = (found - wanted).abs() / scale.clamp_min(1e-30)
    return float(torch.where(found == wanted, 0.0, ratio).max()) if ratio.numel() else 0.0


def unequal(found: Tensor, wanted: Tensor) -> float:
    """How many elements differ; infinite where shapes or types do."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return math.inf
    return float((found.cpu() != wanted.cpu()).sum())


def tree(parents: Sequence[int]) -> list[list[int]]:
    """The path to each row of a tree, its own the last; `parents` are those of all rows but the root, row 0."""
    paths = [[0]]
    for row, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], row])
    return paths


@dataclass(frozen=True)
class Step:
    """A mixture of spans, as the reference reads it and as the device does.

    Attributes:
        spans: (start, rows) of each.
        pad_rows, pad_spans: of padding, on the device.
        given_tables: the block tables; unless given, blocks lie anywhere.
        paths: by index of a span that is a tree, the rows from its root to each, its own the last.
    """

    spans: Sequence[tuple[int, int]]
    block_size: int
    pad_rows: int = 0
    pad_spans: int = 0
    given_tables: Tensor | None = None
    paths: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.spans)

    @property
    def num_blocks(self) -> int:
        """The null block included."""
        return 1 + sum(-(-(start + rows) // self.block_size) for start, rows in self.spans)

    @property
    def span_of_row(self) -> Tensor:
        """[rows] int64."""
        return torch.repeat_interleave(torch.tensor([rows for _, rows in self.spans]))

    @cached_property
    def tables(self) -> Tensor:
        """[spans, blocks] int64."""
        if self.given_tables is not None:
            return self.given_tables
        order = (torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        counts = [-(-(start + rows) // self.block_size) for start, rows in self.spans]
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for row, count in enumerate(counts):
            tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        return tables

    @property
    def row_starts(self) -> list[int]:
        return [0, *torch.tensor([rows for _, rows in self.spans]).cumsum(0).tolist()]

    def host(self) -> RaggedBatch:
        """For the reference."""
        places = torch.cat([torch.arange(start, start + rows) for start, rows in self.spans])
        blocks = self.tables[self.span_of_row, places // self.block_size]
        bases = torch.tensor([start for start, _ in self.spans])
        positions = torch.where(self.depths < 0, places, bases[self.span_of_row] + self.depths)
        ends = [start + rows for start, rows in self.spans]
        tree_bases = [start if span in self.paths else ends[span] for span, (start, _) in enumerate(self.spans)]
        return RaggedBatch(
            token_ids=torch.zeros(self.rows, dtype=torch.int64),
            positions=positions,
            slots=blocks * self.block_size + places % self.block_size,
            row_starts=self.row_starts,
            context_lens=ends,
            block_tables=self.tables,
            block_size=self.block_size,
            trees=Trees(torch.tensor(tree_bases), self.ancestors) if self.paths else None,
        )

    @property
    def _path_of_row(self) -> list[Sequence[int]]:
        """Empty ones of rows in no tree."""
        return [path for span, (_, rows) in enumerate(self.spans) for path in self.paths.get(span, [[]] * rows)]

    @property
    def depths(self) -> Tensor:
        """[rows] int64, how far behind its tree's root each row is; -1: it is in none."""
        return torch.tensor([len(path) - 1 for path in self._path_of_row])

    @property
    def ancestors(self) -> Tensor:
        """[rows, width] int64, see `Trees.paths`."""
        return pad_sequence([torch.tensor(path, dtype=torch.int64) for path in self._path_of_row], batch_first=True)

    def device_spans(self, device: str) -> DeviceSpans:
        """The spans, and padding behind them."""

        def ints(values: Sequence[int], pad: int) -> Tensor:
            return torch.tensor([*values, *[pad] * self.pad_spans], dtype=torch.int32, device=device)

        return DeviceSpans(
            row_starts=ints(self.row_starts, self.rows),
            starts=ints([start for start, _ in self.spans], 0),
            context_lens=ints([start + rows for start, rows in self.spans], 0),
            table_rows=ints(range(len(self.spans)), 0),
            block_tables=self.tables.to(device, torch.int32),
            trees=self._device_trees(device) if self.paths else None,
        )

    def _device_trees(self, device: str) -> DeviceTrees:
        bases = torch.tensor([*(start for start, _ in self.spans), *[0] * self.pad_spans])
        depths = torch.nn.functional.pad(self.depths, (0, self.pad_rows), value=-1)
        ancestors = torch.nn.functional.pad(self.ancestors, (0, 0, 0, self.pad_rows))
        return DeviceTrees(*(x.to(device, torch.int32) for x in (bases, depths, ancestors)))

    def on_device(self, device: str) -> RaggedBatch:
        """For kernels that read spans on the device."""
        host = self.host()

        def padded(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, self.pad_rows)).to(device)

        return RaggedBatch(
            token_ids=padded(host.token_ids),
            positions=padded(host.positions),
            slots=padded(host.slots),
            row_starts=[],
            context_lens=[],
            block_tables=torch.empty(0, 0, dtype=torch.int64, device=device),
            block_size=self.block_size,
            spans=self.device_spans(device),
        )
