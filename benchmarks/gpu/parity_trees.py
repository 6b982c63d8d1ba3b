"""Parity of attention in trees, as drafts are verified: rows see ancestors of their own among the rows of their span.

The attention that is tried, and how, is that of `parity_attention` and `parity_latent`; here the steps hold trees too.
"""

from __future__ import annotations

import random

from benchmarks.gpu import parity_attention, parity_latent
from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Rig, Step, tree

HEADS = (
    parity_attention.Case(16, 8, 128),
    parity_attention.Case(16, 8, 128, block_size=64, window=100),
    parity_attention.Case(16, 8, 128, stored="int8"),
    parity_attention.Case(32, 8, 64, stored="fp8"),
)
LATENT = (parity_latent.Case(16, 512, 64), parity_latent.Case(16, 512, 64, block_size=64, stored="int8"))

BASES, NODES = (0, 250, 505, 1023), (1, 17, 33, 64)
"""Where trees begin, about the borders of tiles of keys and of splits, and how many tokens they have."""
BETWEEN = [(0, 130), (700, 1), (255, 9)]
"""Spans whose rows continue one another, beside them."""

TINY_HEADS = (parity_attention.Case(4, 2, 32, stored="int8", window=20),)
TINY_LATENT = (parity_latent.Case(3, 32, 8),)
TINY_BASES, TINY_NODES, TINY_BETWEEN = (0, 37), (7, 5), [(0, 9), (40, 1)]


def run(job: Job, dtype: str) -> None:
    """Steps of trees alone, and of trees among other spans; then the same in latent attention."""
    rig = Rig(job, dtype)
    for case in TINY_HEADS if job.rehearse else HEADS:
        job.check_time()
        for name, step in _steps(job, case.block_size).items():
            parity_attention.attend(rig, case, name, step)
    for latent in TINY_LATENT if job.rehearse else LATENT:
        job.check_time()
        for name, step in _steps(job, latent.block_size).items():
            parity_latent.attend(rig, latent, name, step)


def _steps(job: Job, block_size: int) -> dict[str, Step]:
    bases, nodes, between = (TINY_BASES, TINY_NODES, TINY_BETWEEN) if job.rehearse else (BASES, NODES, BETWEEN)
    draw, trees = random.Random(0), list(zip(bases, nodes, strict=True))
    paths = [tree([draw.randrange(max(0, row - 6), row) for row in range(1, count)]) for count in nodes]
    mixed = [*between, *trees]
    behind = {len(between) + index: path for index, path in enumerate(paths)}
    return {
        "trees": Step(trees, block_size, pad_rows=3, pad_spans=2, paths=dict(enumerate(paths))),
        "trees among others": Step(mixed, block_size, pad_rows=3, pad_spans=2, paths=behind),
    }
