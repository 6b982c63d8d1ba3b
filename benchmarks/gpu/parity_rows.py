"""Parity of the kernels that work row by row, and of what goes into the cache."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Rig, Step, tree
from quire.ops import HeadNorm, KVCache
from quire.ops.kv_cache import KVCacheDtype

PLACED = [(0, 7), (33, 1), (64, 1), (15, 20)]
"""Spans whose inputs the device makes."""


def run(job: Job, dtype: str) -> None:
    """All of them, in the sizes of the models that are measured."""
    rig = Rig(job, dtype)
    for hidden, inter in [(64, 96)] if job.rehearse else [(1024, 3072), (5120, 17408)]:
        _row_kernels(rig, hidden, inter)
    _place(rig, Step(PLACED, 16, pad_rows=3, pad_spans=2))
    branching = {3: tree([row // 2 for row in range(19)])}
    _place(rig, Step(PLACED, 16, pad_rows=3, pad_spans=2, paths=branching), " with a tree")
    heads = [(4, 2, 16)] if job.rehearse else [(16, 8, 128), (40, 8, 128), (6, 2, 80), (4, 4, 256)]
    for shape, normed in itertools.product(heads, (True, False)):
        _store(rig, shape, normed, "auto")
    for stored in ("int8", "fp8"):
        _store(rig, heads[0], True, stored)
        _copies(rig, stored)
    _copies(rig, "auto")


def _row_kernels(rig: Rig, hidden: int, inter: int) -> None:
    kernels, reference, eps = rig.kernels, rig.reference, 1e-6
    for rows in (1, 5) if rig.job.rehearse else (1, 300):
        x, residual, weight = rig.draw(rows, hidden), rig.draw(rows, hidden), rig.draw(hidden)
        sizes = f"{rows} x {hidden}"
        rig.near(
            f"rms_norm, {sizes}",
            kernels.rms_norm(rig.sent(x), rig.sent(weight), eps),
            reference.rms_norm(x, weight, eps),
            1.5,
        )
        normed, total = kernels.add_rms_norm(rig.sent(x), rig.sent(residual), rig.sent(weight), eps)
        wanted, wanted_total = reference.add_rms_norm(x.clone(), residual.clone(), weight, eps)
        rig.near(f"add_rms_norm, {sizes}", normed, wanted, 3)  # the sum is rounded before it is normalized
        rig.near(f"add_rms_norm, the sum, {sizes}", total, wanted_total, 0.75)
        gate_up = rig.draw(rows, 2 * inter)
        rig.near(
            f"silu_mul, {rows} x {inter}",
            kernels.activate(rig.sent(gate_up), "silu"),
            reference.activate(gate_up, "silu"),
            1.5,
        )
        ids = torch.randint(0, 97, (rows,))
        table = rig.draw(97, hidden)
        found = kernels.embed(ids.to(rig.job.device), rig.sent(table), rig.dtype)
        rig.same(f"embed, {sizes}", found, F.embedding(ids, table).to(rig.dtype))
    x = rig.draw(6, hidden)
    x[1, 3], x[2, hidden - 1], x[4, 0] = math.inf, math.nan, -math.inf
    rig.same(f"finite_rows, {hidden}", kernels.finite_rows(rig.sent(x)), reference.finite_rows(x))


def _place(rig: Rig, step: Step, what: str = "") -> None:
    """The inputs of a step, with padding, tokens that only the device knows, and a request that has failed."""
    tokens = torch.randint(0, 1000, (step.rows + step.pad_rows,), dtype=torch.int32)
    tokens[7:9], tokens[11] = -1, -2
    recent = torch.tensor([[11, 111, 211, 311], [12, 112, 212, 312], [-1] * 4, [14, 114, 214, 314]])
    spans = F.pad(step.span_of_row, (0, step.pad_rows)).int()
    answers = []
    for kernels, device in ((rig.reference, "cpu"), (rig.kernels, rig.job.device)):
        on_device = step.device_spans(device)
        on_device.context_lens.fill_(-7)
        made = kernels.place(tokens.to(device), spans.to(device), recent.to(device), on_device, 16)
        answers.append([*made, on_device.context_lens])
    for name, wanted, found in zip(("token ids", "positions", "slots", "context lengths"), *answers, strict=True):
        rig.same(f"place{what}, {name}", found, wanted)


def _store(rig: Rig, shape: tuple[int, int, int], normed: bool, stored: KVCacheDtype) -> None:
    """Norm, rotation and store: the queries that come back, and the cache as it is read."""
    heads, kv_heads, dim = shape
    step = Step([(0, 5), (70, 1), (31, 9)], 16, pad_rows=2, pad_spans=1)
    width = (heads + 2 * kv_heads) * dim
    qkv, angles = rig.draw(step.rows, width), torch.rand(step.rows, dim // 2) * 100
    weight = rig.draw(heads + kv_heads, dim)
    what = f"rotate_and_store, {heads}/{kv_heads} heads of {dim}, {'with' if normed else 'no'} norm, cache {stored}"
    answers = []
    for kernels, device in ((rig.reference, "cpu"), (rig.kernels, rig.job.device)):
        on_cpu = kernels is rig.reference
        dtype = torch.float32 if on_cpu else rig.dtype
        kv = KVCache(step.num_blocks, 2, kv_heads, dim, 16, dtype, stored, device)
        kv.data.zero_()
        batch = step.host() if on_cpu else step.on_device(device)
        pad = 0 if on_cpu else step.pad_rows
        tables = tuple(F.pad(table, (0, 0, 0, pad)).to(device) for table in (angles.cos(), angles.sin()))
        norm = HeadNorm(weight.to(device, dtype), 1e-6) if normed else None
        x = F.pad(qkv, (0, 0, 0, pad)).to(device, dtype)
        q = kernels.rotate_and_store(x, norm, (tables[0], tables[1]), kv, batch, 1)
        answers.append((q[: step.rows], read(kv)))
    (wanted_q, wanted_kv), (found_q, found_kv) = answers
    units = 2.5 if normed else 1.0
    rig.near(f"{what}: queries", found_q, wanted_q, units)
    step = one_code(wanted_kv, stored)
    rig.near(f"{what}: keys and values", found_kv - (found_kv - wanted_kv).clamp(-step, step), wanted_kv, units)


def one_code(stored: Tensor, how: KVCacheDtype) -> Tensor:
    """How far the next code's number is from each of `stored` [..., head_dim], or was before it: found and wanted may
    fall to two sides of a rounding, however little they differ before it. Nothing for a plain cache.

    The row's largest is 127 of int8, whose codes are 1 apart; or 448 of E4M3, whose are 2 ** -3 of the power of two
    below them apart, and at least 2 ** -9.
    """
    top = stored.abs().amax(-1, keepdim=True)
    if how == "auto":
        return torch.zeros_like(stored)
    return (top / 127).expand_as(stored) if how == "int8" else torch.maximum(stored.abs() / 8, top / 448 / 512)


def read(kv: KVCache) -> Tensor:
    """The numbers that stand in a cache, without the null block; fp32, on the CPU."""
    numbers = kv.numbers[1:].cpu().float()
    return numbers if kv.scales is None else numbers * kv.scales[1:].cpu().unsqueeze(-1)


def _copies(rig: Rig, stored: KVCacheDtype) -> None:
    """Heads of blocks, whole and in part: the same bytes as the reference copies."""
    answers = []
    for kernels, device in ((rig.reference, "cpu"), (rig.kernels, rig.job.device)):
        kv = KVCache(9, 2, 2, 64, 16, rig.dtype, stored, device)
        content = torch.randint(
            0, 256, (kv.data.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
        )
        kv.data.view(torch.uint8).view(-1).copy_(content)
        kernels.copy_blocks(kv, [(1, 2, 16), (3, 4, 5), (5, 6, 1)])
        answers.append(kv.data.view(torch.uint8).cpu())
    rig.same(f"copy_blocks, cache {stored}", answers[1], answers[0])
