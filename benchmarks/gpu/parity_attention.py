"""Parity of attention over the paged cache, and that no row depends on its company."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Rig, Step
from quire.ops import Kernels, KVCache, RaggedBatch
from quire.ops.kv_cache import KVCacheDtype, quantize

UNITS = 2.0
"""The result is rounded, and the probabilities before they are multiplied with the values."""

LAYERS, LAYER = 2, 1


class Case(NamedTuple):
    """Heads, cache and window of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    stored: KVCacheDtype = "auto"

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{heads}, blocks of {self.block_size}, cache {self.stored}{window}"


CASES = {
    "attention": (
        Case(16, 8, 128),
        Case(16, 8, 128, block_size=64, window=100),
        Case(16, 8, 128, stored="int8"),
        Case(16, 8, 128, stored="fp8"),
        Case(40, 8, 128, block_size=32),
    ),
    "heads": (
        Case(32, 8, 64),
        Case(14, 2, 64, stored="int8"),
        Case(8, 8, 80),
        Case(8, 2, 256),
    ),
}
"""By the section that they belong to. Each takes some seconds to compile, so they are two."""

MIXED = [(0, 1), (0, 130), (16, 1), (255, 1), (256, 45), (299, 1), (1500, 1), (1000, 300), (63, 2)]
"""Whole prompts, chunks and decodes, around the borders of blocks and of tiles of keys."""
DECODES = [(0, 1), (15, 1), (16, 1), (255, 1), (256, 1), (700, 1), (2047, 1)]

TINY_CASES = {"attention": (Case(4, 2, 16),), "heads": (Case(4, 2, 32, stored="int8", window=20),)}
TINY_MIXED, TINY_DECODES = [(0, 1), (0, 20), (37, 3)], [(0, 1), (40, 1)]


def run(job: Job, part: str, dtype: str) -> None:
    """Mixtures of spans and pure decodes; also each span alone."""
    rig = Rig(job, dtype)
    steps = (TINY_MIXED, TINY_DECODES) if job.rehearse else (MIXED, DECODES)
    for case in (TINY_CASES if job.rehearse else CASES)[part]:
        for name, spans in zip(("mixed", "decodes"), steps, strict=True):
            attend(rig, case, name, Step(spans, case.block_size, pad_rows=3, pad_spans=2))


def attend(rig: Rig, case: Case, name: str, step: Step) -> None:
    """The checks of one step."""
    wide, kv = caches(rig, step, case.kv_heads, case.head_dim, case.stored)
    q = rig.draw(step.rows, case.heads, case.head_dim)

    def compute(kernels: Kernels, q: Tensor, kv: KVCache, batch: RaggedBatch) -> Tensor:
        return kernels.attend(q, kv, batch, LAYER, case.head_dim**-0.5, case.window)

    wanted = compute(rig.reference, q, wide, step.host())
    ours = functools.partial(compute, rig.kernels)  # the same with `deterministic`
    rig.near(f"attend, {name}, {case}", on_device(rig, ours, step, kv, q), wanted, UNITS)
    each_alone(rig, f"attend, {name}, {case}", ours, step, kv, q)


Attend = Callable[[Tensor, KVCache, RaggedBatch], Tensor]
"""A layer's attention on the device, of queries [rows, heads, size]."""


def on_device(rig: Rig, attend: Attend, step: Step, kv: KVCache, q: Tensor) -> Tensor:
    """The result of the real rows."""
    padded = torch.nn.functional.pad(rig.sent(q), (0, 0, 0, 0, 0, step.pad_rows))
    return attend(padded, kv, step.on_device(rig.job.device))[: step.rows]


def each_alone(rig: Rig, what: str, attend: Attend, step: Step, kv: KVCache, q: Tensor) -> None:
    """Record a check: each span alone has the bits that it has among the others."""
    together = on_device(rig, attend, step, kv, q)
    first, wrong = 0, 0
    for index, (start, rows) in enumerate(step.spans):
        paths = {0: step.paths[index]} if index in step.paths else {}
        alone = Step([(start, rows)], step.block_size, given_tables=step.tables[index : index + 1], paths=paths)
        part = slice(first, first + rows)
        wrong += not torch.equal(on_device(rig, attend, alone, kv, q[part]), together[part])
        first += rows
    rig.job.check(f"{rig.name}: {what}: spans that differ alone", wrong, 0)


def caches(
    rig: Rig, step: Step, kv_heads: int, head_dim: int, stored: KVCacheDtype, sides: int = 2
) -> tuple[KVCache, KVCache]:
    """The same random numbers in the cache for the reference, in fp32, and for the device.

    What no span may read is NaN on the device: the null block, and what lies behind each context.
    """
    shape = (step.num_blocks, LAYERS, kv_heads, head_dim, step.block_size)
    wide = KVCache(*shape, torch.float32, stored, sides=sides)
    kv = KVCache(*shape, rig.dtype, stored, rig.job.device, sides)
    numbers = rig.draw(*wide.numbers.shape)
    readable = torch.zeros(step.num_blocks, step.block_size, dtype=torch.bool)
    for (start, rows), table in zip(step.spans, step.tables, strict=True):
        places = torch.arange(start + rows)
        readable[table[places // step.block_size], places % step.block_size] = True
    hidden = ~readable[:, None, None, None, :].expand(wide.numbers.shape[:-1])
    if wide.scales is None or kv.scales is None:
        wide.numbers.copy_(numbers)
        kv.numbers.copy_(numbers.masked_fill(hidden.unsqueeze(-1), torch.nan))
    else:
        codes, scales = quantize(numbers, wide.stored_dtype)
        wide.numbers.copy_(codes)
        wide.scales.copy_(scales)
        kv.numbers.copy_(codes)
        kv.scales.copy_(scales.masked_fill(hidden, torch.nan))
    return wide, kv
