"""Ranks: one model over several processes of a machine, against one process that has all cores.

Random bf16 weights in the shape of Qwen3-0.6B; as many threads in all. The cells run in turns, and the best of each
counts. Then what a step costs that is no computing: telling the plan, and a gather, with gloo beside it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import torch
import torch.distributed as dist

from benchmarks.common import Options, Result, checkpoint, main, tell
from quire import LLM
from quire.bench.cells import Cell, measure, parse_cells, warm_up
from quire.core.step import Span, StepPlan
from quire.ops.cpu.group import SharedGroup, new_memory

CELLS = (
    Cell("decode-1", batch=1, prompt=32, output=32),
    Cell("decode-8", batch=8, prompt=32, output=32),
    Cell("decode-32", batch=32, prompt=32, output=32),
    Cell("prefill-1k", batch=1, prompt=1024, output=1),
)
TURNS = 3
GATHERS = 4000
WIDTH = 1024


def run(options: Options) -> Result:
    result = Result(("what", "one rank", "two ranks", "share"))
    folder = str(checkpoint(options))
    cells = parse_cells("2x16+8,1x64+1") if options.quick else CELLS
    cores = options.threads or 2
    with ExitStack() as stack:
        sizes = {"max_model_len": 2048, "num_kv_blocks": 200, "prefix_cache": "off"}
        alone = stack.enter_context(LLM(folder, threads=cores, **sizes))
        both = stack.enter_context(LLM(folder, threads=max(1, cores // 2), tensor_parallel_size=2, **sizes))
        for llm in (alone, both):
            warm_up(llm)
        for cell in cells:
            rates = [max(pair) for pair in zip(*(_rates(cell, alone, both) for _ in range(TURNS)), strict=True)]
            share = rates[1] / rates[0]
            result.add(
                (f"{cell.name}, tokens/s", f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{share:.2f}"),
                what=cell.name,
                one=rates[0],
                two=rates[1],
            )
            tell(f"{cell.name}: {rates[0]:.1f} and {rates[1]:.1f} tokens/s, {share:.2f}")
    _plans(result)
    for what, seconds in (("shared memory", _gather(_shared)), ("gloo", _gather(_gloo))):
        result.add(
            (f"a gather of 8 rows of {WIDTH} numbers in bf16, {what}", "-", f"{seconds * 1e6:.0f} µs", "-"),
            what=f"gather: {what}",
            seconds=seconds,
        )
        tell(f"gather, {what}: {seconds * 1e6:.1f} µs")
    return result


def _rates(cell: Cell, *llms: LLM) -> list[float]:
    found = []
    for llm in llms:
        timing = measure(llm, cell)
        found.append(timing.decode_rate(cell) or timing.prefill_rate(cell))
    return found


def _plans(result: Result) -> None:
    """Microseconds to tell a plan of 64 decodes: encoded once, and decoded by the other rank."""
    plan = StepPlan(0, [Span(request, 500, [7], num_sampled=1) for request in range(64)], num_tokens=64)
    encoder, decoder, times = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(StepPlan), []
    for _ in range(500):
        begin = time.perf_counter()
        decoder.decode(encoder.encode(plan))
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    result.add(
        ("a plan of 64 decodes to a rank, encoded and decoded", "-", f"{seconds * 1e6:.0f} µs", "-"),
        what="plan",
        seconds=seconds,
    )
    tell(f"a plan of 64 decodes: {seconds * 1e6:.1f} µs")


def _gather(form: Callable[[int, str], Callable[[], object]]) -> float:
    """Median seconds of a gather between this process and another one."""
    with tempfile.TemporaryDirectory() as folder:
        script = f"from benchmarks.ranks import other; other({form.__name__!r}, {folder!r})"
        memory = new_memory(1 << 20)
        child = subprocess.Popen([sys.executable, "-c", script, str(memory)], pass_fds=(memory,))
        try:
            return _median(form(0, folder if form is _gloo else str(memory)))
        finally:
            child.wait(60)
            os.close(memory)


def other(form: str, folder: str) -> None:
    """What the other process does."""
    torch.set_num_threads(1)
    _median({"_shared": _shared, "_gloo": _gloo}[form](1, folder if form == "_gloo" else sys.argv[1]))


def _median(gather: Callable[[], object]) -> float:
    times = []
    for _ in range(GATHERS):
        begin = time.perf_counter()
        gather()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _shared(rank: int, memory: str) -> Callable[[], object]:
    group = SharedGroup(int(memory), 1 << 20, rank, 2, 60.0)
    own = torch.zeros(8, WIDTH // 2, dtype=torch.bfloat16)
    return lambda: group.all_gather(own, rank * WIDTH // 2, WIDTH)


def _gloo(rank: int, folder: str) -> Callable[[], object]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    own = torch.zeros(8, WIDTH // 2, dtype=torch.bfloat16)
    parts = [torch.empty_like(own) for _ in range(2)]

    def gather() -> object:
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=1)

    return gather


if __name__ == "__main__":
    main(run)
