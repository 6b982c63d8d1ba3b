"""Ranks: one model over several processes of a machine, against one process that has all cores.

Random bf16 weights in the shape of Qwen3-0.6B; as many threads in all. The cells run in turns, and the best of each
counts; of a pipeline, also how much of the time its stages compute. Then what a step costs that is no computing:
telling the plan, and a gather, with gloo beside it. At last experts: a router that sends most tokens to two of them,
before and after they were moved between ranks.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.common import Options, Result, checkpoint, main, tell
from quire import LLM, SamplingParams
from quire.bench.cells import Cell, measure, parse_cells, warm_up
from quire.core.expert_balance import imbalance
from quire.core.step import Span, StepPlan
from quire.models.random_checkpoint import SHAPES, write_checkpoint
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

UNEVEN = SHAPES["qwen3-moe-1b"] | {
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "hidden_size": 512,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAVOUR = 2.1
"""What the router adds to the logits of the first two experts, in standard deviations: they get 60 % of the tokens."""


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
        _pipeline(result, folder, cells[:1] if options.quick else (CELLS[1], CELLS[3]), alone, cores)
    _plans(result)
    for what, seconds in (("shared memory", _gather(_shared)), ("gloo", _gather(_gloo))):
        result.add(
            (f"a gather of 8 rows of {WIDTH} numbers in bf16, {what}", "-", f"{seconds * 1e6:.0f} µs", "-"),
            what=f"gather: {what}",
            seconds=seconds,
        )
        tell(f"gather, {what}: {seconds * 1e6:.1f} µs")
    with tempfile.TemporaryDirectory() as folder:
        _experts(result, _uneven_checkpoint(Path(folder) / "uneven"), 100 if options.quick else 500)
    return result


def _pipeline(result: Result, folder: str, cells: Sequence[Cell], alone: LLM, cores: int) -> None:
    """The same of a rank for each half of the layers."""
    sizes = {"max_model_len": 2048, "num_kv_blocks": 200, "prefix_cache": "off"}
    with LLM(folder, threads=max(1, cores // 2), pipeline_parallel_size=2, **sizes) as piped:
        warm_up(piped)
        runner = piped._engine.executor._runner  # type: ignore[attr-defined]
        for cell in cells:
            before = [*runner.busy, runner.seconds]
            rates = [max(pair) for pair in zip(*(_rates(cell, alone, piped) for _ in range(TURNS)), strict=True)]
            *busy, seconds = (now - then for now, then in zip([*runner.busy, runner.seconds], before, strict=True))
            shares = ", ".join(f"{each / seconds:.0%}" for each in busy)
            result.add(
                (
                    f"{cell.name}, a pipeline of two ({shares} busy), tokens/s",
                    *map("{:.1f}".format, rates),
                    f"{rates[1] / rates[0]:.2f}",
                ),
                what=f"pipeline: {cell.name}",
                one=rates[0],
                two=rates[1],
                busy=[each / seconds for each in busy],
            )
            tell(f"a pipeline, {cell.name}: {rates[0]:.1f} and {rates[1]:.1f} tokens/s; busy {shares}")


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
    parts = [range(WIDTH // 2), range(WIDTH // 2, WIDTH)]
    return lambda: group.all_gather(own, parts)


def _gloo(rank: int, folder: str) -> Callable[[], object]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    own = torch.zeros(8, WIDTH // 2, dtype=torch.bfloat16)
    parts = [torch.empty_like(own) for _ in range(2)]

    def gather() -> object:
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=1)

    return gather


def _uneven_checkpoint(folder: Path) -> Path:
    """Random weights, but all embeddings, and the router's rows of the first two experts, have a part in common."""
    write_checkpoint(folder, UNEVEN)
    weights, hidden = load_file(folder / "model.safetensors"), UNEVEN["hidden_size"]
    draw = torch.Generator().manual_seed(0)
    common = torch.randint(0, 2, (hidden,), generator=draw) * 2.0 - 1.0
    for name, weight in weights.items():
        if name == "model.embed_tokens.weight":
            weight.copy_(torch.randn(weight.shape, generator=draw) + common).mul_(8)  # layers add little to them
        if name.endswith(".mlp.gate.weight"):
            rows = torch.randn(weight.shape, generator=draw) * (2 / hidden) ** 0.5
            rows -= (rows @ common / hidden)[:, None] * common
            rows[:2] += FAVOUR * 2**0.5 / hidden * common
            weight.copy_(rows)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _experts(result: Result, folder: Path, steps: int) -> None:
    """What the busiest of two ranks has to do, and what a step takes, before, while and after experts are moved."""
    sizes = {"max_model_len": 2 * steps, "prefix_cache": "off", "threads": 1, "tensor_parallel_size": 2}
    with LLM(str(folder), enable_expert_parallel=True, eplb_interval=steps + 1, **sizes) as llm:
        layers = llm._engine.model.expert_layers
        before, moving, after = (_decodes(llm, steps) for _ in range(3))
        loads = {number: layer.load.tolist() for number, layer in layers.items()}
        uneven = [imbalance(load, range(len(load)), 2) for load in loads.values()]
        even = [imbalance(load, layers[number].slots, 2) for number, load in loads.items()]
        moves = llm._engine.rank_stats()["expert_moves"]
    share = sum(sum(load[:2]) for load in loads.values()) / sum(map(sum, loads.values()))
    first, last = statistics.median(before), statistics.median(after)
    slowest = [max(times) / first for times in (before, moving, after)]
    numbers = {"share": share, "uneven": uneven, "even": even, "first": first, "last": last, "slowest": slowest}
    rows = {
        f"2 of 32 experts get {share:.0%} of the tokens: the busiest rank over the mean, before and after a move of "
        f"{moves} layers": f"{statistics.mean(uneven):.2f}, {statistics.mean(even):.2f}",
        "a decode step of 16, before and after": f"{first * 1e3:.1f}, {last * 1e3:.1f} ms",
        "the slowest step before, meanwhile and after, over the median before": ", ".join(
            map("{:.2f}".format, slowest)
        ),
    }
    for what, shown in rows.items():
        result.add((what, "-", shown, "-"), what=what, **numbers)
        tell(f"{what}: {shown}")


def _decodes(llm: LLM, steps: int) -> list[float]:
    """Seconds of each of so many decode steps of 16 requests, of which each has a text of its own."""
    for number in range(16):
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=steps, ignore_eos=True)
        llm.add_request([5 + number, 9], params)
    times = []
    while not llm.idle:
        begin = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - begin)
    return times[1:]


if __name__ == "__main__":
    main(run)
