"""Parity of latent attention, sparse too: what goes into its cache, queries that turn, and attention, as in
`parity_attention`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Rig, Step
from benchmarks.gpu.parity_attention import (
    DECODES,
    LAYER,
    LAYERS,
    MIXED,
    TINY_DECODES,
    TINY_MIXED,
    UNITS,
    caches,
    each_alone,
    on_device,
)
from benchmarks.gpu.parity_rows import read
from quire.ops import Kernels, KVCache, RaggedBatch, sparse
from quire.ops.kv_cache import KVCacheDtype

STORED_TOLERANCE: dict[KVCacheDtype, float] = {"int8": 0.1, "fp8": 0.14}
"""As in `parity_rows`; codes of int8 are parts of a row's largest number, which in so wide a row is far from most."""


class Case(NamedTuple):
    """Heads, the two parts of a row of the cache, and the cache."""

    heads: int
    latent: int
    rope: int
    block_size: int = 16
    stored: KVCacheDtype = "auto"

    def __str__(self) -> str:
        return f"{self.heads} heads, rows of {self.latent} + {self.rope}, blocks of {self.block_size}, {self.stored}"


CASES = (
    Case(16, 512, 64),
    Case(16, 512, 64, block_size=64, stored="int8"),
    Case(16, 512, 64, stored="fp8"),
    Case(6, 48, 20, block_size=32),
)
WIDE = Case(128, 512, 64)
"""DeepSeek-V3's, which is tried with decodes alone: the reference is slow."""
SPARSE = Case(64, 512, 64)
"""GLM-5's, which is tried with index keys behind the rows; as many heads choose."""
TINY_CASES = tuple(Case(3, 32, 8, stored=stored) for stored in ("auto", "int8", "fp8"))


def run(job: Job, dtype: str) -> None:
    """Stores into each kind of cache; then mixtures of spans and pure decodes."""
    rig = Rig(job, dtype)
    for case in TINY_CASES if job.rehearse else CASES:
        _turn_and_store(rig, case)
    steps = {"mixed": TINY_MIXED, "decodes": TINY_DECODES} if job.rehearse else {"mixed": MIXED, "decodes": DECODES}
    for case in TINY_CASES if job.rehearse else CASES:
        for name, spans in steps.items():
            job.check_time()
            attend(rig, case, name, _step(case, spans))
    if not job.rehearse:
        attend(rig, WIDE, "decodes", _step(WIDE, DECODES))
    for name, spans in steps.items():
        case, index, top = (TINY_CASES[0], 16, 10) if job.rehearse else (SPARSE, 128, 256)
        job.check_time()
        attend_chosen(rig, case, index, top, name, _step(case, spans))


def _step(case: Case, spans: list[tuple[int, int]]) -> Step:
    return Step(spans, case.block_size, pad_rows=3, pad_spans=2)


def _turn_and_store(rig: Rig, case: Case) -> None:
    """The cache as it is read, and queries that lie beside others."""
    step = Step([(0, 5), (70, 1), (31, 9)], case.block_size, pad_rows=2, pad_spans=1)
    compressed, norm = rig.draw(step.rows, case.latent + case.rope), rig.draw(case.latent)
    q, angles = rig.draw(step.rows, case.heads, case.rope + 8), torch.rand(step.rows, case.rope // 2) * 100
    answers = []
    for kernels, device in ((rig.reference, "cpu"), (rig.kernels, rig.job.device)):
        on_cpu = kernels is rig.reference
        dtype = torch.float32 if on_cpu else rig.dtype
        shape = (step.num_blocks, LAYERS, 1, case.latent + case.rope, case.block_size)
        kv = KVCache(*shape, dtype, case.stored, device, sides=1)
        kv.data.zero_()
        pad = 0 if on_cpu else step.pad_rows
        tables = tuple(F.pad(table, (0, 0, 0, pad)).to(device) for table in (angles.cos(), angles.sin()))
        x, weight = F.pad(compressed, (0, 0, 0, pad)).to(device, dtype), norm.to(device, dtype)
        batch = step.host() if on_cpu else step.on_device(device)
        kernels.store_latent(x, weight, 1e-6, (tables[0], tables[1]), kv, batch, LAYER)
        queries = F.pad(q, (0, 0, 0, 0, 0, pad)).to(device, dtype)[..., 8:]
        turned = kernels.rotate_interleaved(queries, (tables[0], tables[1]))
        answers.append((turned[: step.rows], read(kv)))
    (wanted_q, wanted), (found_q, found) = answers
    rig.near(f"rotate_interleaved, {case}", found_q, wanted_q, 1.0)
    if case.stored == "auto":
        rig.near(f"store_latent, {case}", found, wanted, 2.5)
    else:
        rig.within(f"store_latent, {case}", found, wanted, STORED_TOLERANCE[case.stored])


def attend(rig: Rig, case: Case, name: str, step: Step) -> None:
    """The checks of one step."""
    size = case.latent + case.rope
    wide, kv = caches(rig, step, 1, size, case.stored, sides=1)
    q = rig.draw(step.rows, case.heads, size)

    def compute(kernels: Kernels, q: Tensor, kv: KVCache, batch: RaggedBatch) -> Tensor:
        return kernels.attend_latent(q, kv, batch, LAYER, size**-0.5, case.latent)

    wanted = compute(rig.reference, q, wide, step.host())
    ours = functools.partial(compute, rig.kernels)  # the same with `deterministic`
    rig.near(f"attend_latent, {name}, {case}", on_device(rig, ours, step, kv, q), wanted, UNITS)
    each_alone(rig, f"attend_latent, {name}, {case}", ours, step, kv, q)


def attend_chosen(rig: Rig, case: Case, index: int, top: int, name: str, step: Step) -> None:
    """The same of `top` positions that an indexer chooses, whose keys of `index` numbers lie behind the cache's rows.

    All numbers but the queries of attention are 1 or -1: sums are exact, so both choose the same of many equal scores.
    """
    size = case.latent + case.rope
    wide, kv = caches(rig, step, 1, size + index, case.stored, sides=1)
    for cache in (wide, kv):
        cache.numbers.sign_()
    q = rig.draw(step.rows, case.heads, size + index + 1)
    q[..., size:] = q[..., size:].sign()

    def compute(kernels: Kernels, q: Tensor, kv: KVCache, batch: RaggedBatch) -> Tensor:
        attended, queries, weights = torch.split(q, [size, index, 1], dim=2)
        choice = sparse.choice(batch, top)
        of = choice.of_rows
        kernels.choose(of(queries), of(weights).float().squeeze(2), kv, batch, LAYER, choice)
        return kernels.attend_chosen(attended.contiguous(), choice, kv, batch, LAYER, size**-0.5, case.latent)

    wanted = compute(rig.reference, q, wide, step.host())
    ours = functools.partial(compute, rig.kernels)
    what = f"attend_chosen, {name}, {case}, {top} positions"
    rig.near(what, on_device(rig, ours, step, kv, q), wanted, UNITS)
    each_alone(rig, what, ours, step, kv, q)
