"""Whether a row's bits depend on the rows beside it, tried on this machine with the kernels it chose.

The promise that a request's tokens depend on nothing but the request stands on this. `quire doctor` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.ops.attention import paged_attention, store_kv
from quire.ops.kv_cache import KVCache
from quire.ops.linear import PackedWeight
from quire.ops.ragged import RaggedBatch

DTYPES = (torch.bfloat16, torch.float32)
ROW_COUNTS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 64, 65)
LINEAR_SHAPES = ((256, 256), (704, 256), (256, 704), (128, 4096))
"""(outputs, inputs). Long sums show differences that short ones hide."""

CONTEXT = 300
CHUNKINGS = ((1, 299), (16, 284), (128, 128, 44), (129, 171), (255, 1, 44), (100, 100, 100), (299, 1))
"""Ways to cut a context into spans."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel in one data type: `failures` names the cases whose bits differed."""

    name: str
    cases: int
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def run() -> list[Check]:
    """All checks; about a second on an idle machine."""
    checks = [check_linear(dtype) for dtype in DTYPES]
    return checks + [check_attention(dtype) for dtype in DTYPES]


def check_linear(dtype: torch.dtype) -> Check:
    """`PackedWeight.matmul` of some of the rows against the same rows of all of them."""
    generator = torch.Generator().manual_seed(0)
    failures, cases = [], 0
    for shape in LINEAR_SHAPES:
        weight = PackedWeight(torch.randn(shape, generator=generator).to(dtype))
        x = torch.randn(2 * max(ROW_COUNTS), shape[1], generator=generator).to(dtype)
        whole = weight.matmul(x)
        for rows in ROW_COUNTS:
            for first in (0, 7):
                part = slice(first, first + rows)
                cases += 1
                if not torch.equal(weight.matmul(x[part]), whole[part]):
                    failures.append(f"{shape[1]} to {shape[0]}, rows {first} to {first + rows - 1}")
    return Check(f"linear {_name(dtype)}", cases, tuple(failures))


def check_attention(dtype: torch.dtype) -> Check:
    """A context's attention cut into chunks, and beside another request, against all of it at once."""
    failures, cases = [], 0
    whole = _Attention(dtype, 16)([CONTEXT])
    for block_size, neighbour in ((16, 0), (64, 37)):
        attend = _Attention(dtype, block_size)
        for chunks in CHUNKINGS:
            cases += 1
            if not torch.equal(attend(chunks, neighbour), whole):
                beside = f" beside {neighbour} other rows" if neighbour else ""
                failures.append(f"block size {block_size}, chunks {list(chunks)}{beside}")
    return Check(f"attention {_name(dtype)}", cases, tuple(failures))


class _Attention:
    """Attention of one request of `CONTEXT` tokens with given numbers, computed in any chunks."""

    heads, kv_heads, dim = 4, 2, 64

    def __init__(self, dtype: torch.dtype, block_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = (
            (CONTEXT, self.heads, self.dim),
            (CONTEXT, self.kv_heads, self.dim),
            (CONTEXT, self.kv_heads, self.dim),
        )
        self.q, self.k, self.v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        self.blocks = -(-CONTEXT // block_size)
        self.table = torch.randperm(self.blocks, generator=generator) + 1
        self.dtype, self.block_size = dtype, block_size

    def __call__(self, chunks: Sequence[int], neighbour: int = 0) -> torch.Tensor:
        """[CONTEXT, heads, dim]. Each chunk shares its step with `neighbour` rows of another request."""
        cache = KVCache(2 * self.blocks + 1, 1, self.kv_heads, self.dim, self.block_size, self.dtype)
        cache.data.zero_()
        out, start = [], 0
        for length in chunks:
            spans = [(start, length, self.table)]
            if neighbour:
                spans.insert(0, (0, neighbour, self.table + self.blocks))
            batch = _batch(spans, self.block_size)
            q, k, v = (
                torch.cat([x[first : first + rows] for first, rows, _ in spans]) for x in (self.q, self.k, self.v)
            )
            store_kv(k, v, cache, batch, 0)
            out.append(paged_attention(q, cache, batch, 0, self.dim**-0.5, None)[-length:])
            start += length
        return torch.cat(out)


def _batch(spans: Sequence[tuple[int, int, torch.Tensor]], block_size: int) -> RaggedBatch:
    """The batch of spans (start, rows, block table)."""
    positions = [torch.arange(start, start + rows) for start, rows, _ in spans]
    slots = [
        table[at // block_size] * block_size + at % block_size
        for at, (_, _, table) in zip(positions, spans, strict=True)
    ]
    ends = torch.tensor([rows for _, rows, _ in spans]).cumsum(0).tolist()
    return RaggedBatch(
        token_ids=torch.zeros(ends[-1], dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        row_starts=[0, *ends],
        context_lens=[start + rows for start, rows, _ in spans],
        block_tables=torch.stack([table for _, _, table in spans]),
        block_size=block_size,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
