"""Whether a row's bits depend on the rows beside it, tried on this machine with the kernels that it chose.

The promise that a request's tokens depend on nothing but the request stands on this. `quire doctor` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quire.ops.kernels import Kernels
from quire.ops.kv_cache import KVCache, KVCacheDtype
from quire.ops.quantized import Quantization
from quire.ops.ragged import DeviceSpans, RaggedBatch

DTYPES = (torch.bfloat16, torch.float32)
QUANTIZATIONS = (Quantization("int8"), Quantization("int4", 64))
ROW_COUNTS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 64, 65)
LINEAR_SHAPES = ((256, 256), (704, 256), (256, 704), (128, 4096))
"""(outputs, inputs). Long sums show differences that short ones hide."""

CONTEXT = 300
CHUNKINGS = ((1, 299), (16, 284), (128, 128, 44), (129, 171), (255, 1, 44), (100, 100, 100), (299, 1))
"""Ways to cut a context into spans."""

CACHES: tuple[tuple[torch.dtype, KVCacheDtype], ...] = (
    (torch.bfloat16, "auto"),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "fp8"),
    (torch.float32, "auto"),
)
"""Of activations, and of the KV cache."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel in one data type: `failures` names the cases whose bits differed."""

    name: str
    cases: int
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def run(kernels: Kernels) -> list[Check]:
    """All checks, each with one thread and with two; about a second on an idle machine."""
    checks = [check_linear(kernels, dtype) for dtype in DTYPES]
    checks += [check_quantized_linear(kernels, how) for how in QUANTIZATIONS]
    checks += [check_norm_and_gate(kernels, dtype) for dtype in DTYPES]
    return checks + [check_attention(kernels, dtype, cache) for dtype, cache in CACHES]


def check_linear(kernels: Kernels, dtype: torch.dtype) -> Check:
    """The product of some of the rows against the same rows of all of them."""
    generator = torch.Generator().manual_seed(0)
    failures, cases = [], 0
    for shape in LINEAR_SHAPES:
        weight = kernels.pack([torch.randn(shape, generator=generator).to(kernels.device, dtype)])
        x = torch.randn(2 * max(ROW_COUNTS), shape[1], generator=generator).to(kernels.device, dtype)
        differing, tried = _compare_rows(weight.matmul, x)
        failures += [f"{shape[1]} to {shape[0]}, {where}" for where in differing]
        cases += tried
    return Check(f"linear {_name(dtype)}", cases, tuple(failures))


def check_quantized_linear(kernels: Kernels, how: Quantization) -> Check:
    """As `check_linear`, with a weight in 8 or 4 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = kernels.pack_quantized(kernels.quantize(torch.randn(320, 704, generator=generator), how))
    x = torch.randn(2 * max(ROW_COUNTS), 704, generator=generator).to(kernels.device, torch.bfloat16)
    failures, cases = _compare_rows(weight.matmul, x)
    return Check(f"linear {how.scheme}", cases, tuple(failures))


def check_norm_and_gate(kernels: Kernels, dtype: torch.dtype) -> Check:
    """The norm and the gate of some of the rows against the same rows of all of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * max(ROW_COUNTS), 1408, generator=generator).to(kernels.device, dtype)
    weight = torch.randn(1408, generator=generator).to(kernels.device, dtype)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([kernels.rms_norm(rows, weight, 1e-6), kernels.silu_mul(rows)], dim=1)

    failures, cases = _compare_rows(compute, x)
    return Check(f"norm and gate {_name(dtype)}", cases, tuple(failures))


def _compare_rows(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[list[str], int]:
    """The cases, in words, in which `compute` gives other bits for a part of x than for all of it; and all cases."""
    failures, cases = [], 0
    with _threads(1):
        whole = compute(x)
    for threads, first, counts in ((1, 0, ROW_COUNTS), (1, 7, ROW_COUNTS), (2, 0, (1, 8, 65, len(x)))):
        with _threads(threads):
            for rows in counts:
                part = slice(first, first + rows)
                cases += 1
                if not torch.equal(compute(x[part]), whole[part]):
                    failures.append(f"rows {first} to {first + rows - 1} with {threads} thread{'s' * (threads > 1)}")
    return failures, cases


def check_attention(kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> Check:
    """A context's attention cut into chunks, and beside another request, against all of it at once."""
    failures, cases = [], 0
    with _threads(1):
        whole = _Attention(kernels, dtype, kv_cache_dtype, 16)([CONTEXT])
    for block_size, neighbour, threads in ((16, 0, 1), (64, 37, 2)):
        attend = _Attention(kernels, dtype, kv_cache_dtype, block_size)
        for chunks in CHUNKINGS:
            cases += 1
            with _threads(threads):
                same = torch.equal(attend(chunks, neighbour), whole)
            if not same:
                beside = f" beside {neighbour} other rows, {threads} threads" if neighbour else ""
                failures.append(f"block size {block_size}, chunks {list(chunks)}{beside}")
    cache = "" if kv_cache_dtype == "auto" else f", {kv_cache_dtype} cache"
    return Check(f"attention {_name(dtype)}{cache}", cases, tuple(failures))


class _Attention:
    """Attention of one request of `CONTEXT` tokens with given numbers, computed in any chunks."""

    heads, kv_heads, dim = 4, 2, 64

    def __init__(self, kernels: Kernels, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        width, device = (self.heads + 2 * self.kv_heads) * self.dim, kernels.device
        self.qkv = torch.randn(CONTEXT, width, generator=generator).to(device, dtype)
        angles = torch.randn(CONTEXT, self.dim // 2, generator=generator).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.blocks = -(-CONTEXT // block_size)
        self.table = torch.randperm(self.blocks, generator=generator) + 1
        self.kernels, self.dtype, self.kv_cache_dtype, self.block_size = kernels, dtype, kv_cache_dtype, block_size

    def __call__(self, chunks: Sequence[int], neighbour: int = 0) -> torch.Tensor:
        """[CONTEXT, heads * dim]. Each chunk shares its step with `neighbour` rows of another request."""
        shape = (2 * self.blocks + 1, 1, self.kv_heads, self.dim, self.block_size)
        cache = KVCache(*shape, self.dtype, self.kv_cache_dtype, self.kernels.device)
        cache.data.zero_()
        out, start = [], 0
        for length in chunks:
            spans = [(start, length, self.table)]
            if neighbour:
                spans.insert(0, (0, neighbour, self.table + self.blocks))
            batch = _batch(spans, self.block_size, self.kernels)
            qkv, cos, sin = (
                torch.cat([x[first : first + rows] for first, rows, _ in spans]) for x in (self.qkv, self.cos, self.sin)
            )
            q = self.kernels.rotate_and_store(qkv, None, (cos, sin), cache, batch, 0)
            out.append(self.kernels.attend(q, cache, batch, 0, self.dim**-0.5, None)[-length:])
            start += length
        return torch.cat(out)


def _batch(spans: Sequence[tuple[int, int, torch.Tensor]], block_size: int, kernels: Kernels) -> RaggedBatch:
    """The batch of spans (start, rows, block table), as these kernels read it."""
    positions = [torch.arange(start, start + rows) for start, rows, _ in spans]
    slots = [
        table[at // block_size] * block_size + at % block_size
        for at, (_, _, table) in zip(positions, spans, strict=True)
    ]
    ends = torch.tensor([rows for _, rows, _ in spans]).cumsum(0).tolist()
    batch = RaggedBatch(
        token_ids=torch.zeros(ends[-1], dtype=torch.int64, device=kernels.device),
        positions=torch.cat(positions).to(kernels.device),
        slots=torch.cat(slots).to(kernels.device),
        row_starts=[0, *ends],
        context_lens=[start + rows for start, rows, _ in spans],
        block_tables=torch.stack([table for _, _, table in spans]),
        block_size=block_size,
    )
    if kernels.reads_spans:
        batch.spans = DeviceSpans(
            row_starts=_sent(batch.row_starts, kernels),
            starts=_sent([start for start, _, _ in spans], kernels),
            context_lens=_sent(batch.context_lens, kernels),
            table_rows=_sent(list(range(len(spans))), kernels),
            block_tables=batch.block_tables.to(kernels.device, torch.int32),
        )
    return batch


def _sent(numbers: list[int], kernels: Kernels) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=kernels.device)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """For a while, this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
