"""What grows: long contexts, many requests at once, a prompt of 32,768 tokens; beside the best this machine could do.

Random bf16 weights in the shape of Qwen3-0.6B. Each part runs in a process of its own, so that its memory is its own;
`--only` names some of them:

- **context**: a decode step of one request at several lengths of its context, with each kind of cache. The prompt's
  steps are passed over: the cache holds random numbers in its place, which are read like any others. The bound is the
  step's bytes at the rate at which a long sum reads. Steps and sums take turns, and the medians of both count: a
  virtual machine's memory may be half as fast a second later.
- **requests**: 256 requests at once, none of which may be refused or give way.
- **prompt**: one prompt, in steps as they are. Both these parts also compare the most memory that the process had
  resident with its plan: what `llm.memory_plan` says, and what the process had before it loaded anything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Options, Result, checkpoint, greedy, options_from, tell, tokens
from quire import LLM
from quire.bench.ceilings import READ_BYTES, Ceilings, Machine, measure_machine, work_of
from quire.ops.memory import huge

CONTEXTS, STEPS = (1024, 8192, 32768), 24
CACHES = ("auto", "int8", "fp8")
REST = 0.02
"""Seconds after a sum, in which torch's threads stop looking for more work."""
REQUESTS, PROMPT, OUTPUT = 256, 64, 24
LONG = 32768
HEADINGS = ("what", "measured", "bound", "share", "goal")

Found = dict[str, Any]
"""What a part's process has measured, of plain types."""


def run(options: Options, only: tuple[str, ...] = ()) -> Result:
    result = Result(HEADINGS)
    checkpoint(options)  # written before the processes begin
    for name, (measure, add) in PARTS.items():
        if not only or name in only:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                found = process.submit(measure, options).result()
            tell(f"growth: {name}: {json.dumps(found)}")
            add(result, found)
    return result


# -- contexts -----------------------------------------------------------------------------------------------------


def _contexts(options: Options) -> Found:
    """Seconds of a decode step, its bytes, and the read rate meanwhile, by cache and context."""
    contexts = (64, 256) if options.quick else CONTEXTS
    cases: list[Found] = []
    big = huge(READ_BYTES).view(torch.float32).fill_(1.0)
    for cache in CACHES:
        longest = max(contexts) + STEPS + 8
        with LLM(
            str(checkpoint(options)),
            threads=options.threads,
            prefix_cache="off",
            kv_cache_dtype=cache,
            max_num_seqs=1,
            num_kv_blocks=longest // 16 + 2,
            max_model_len=longest,
        ) as llm:
            _fill(llm)
            torch.set_num_threads(llm.threads)
            for context in contexts:
                tell(f"growth: {cache} KV, a context of {context:,}")
                seconds, rate = _decode(llm, context, big)
                cost = work_of(llm).step(1, context + STEPS // 2).num_bytes
                cases.append({"kv": cache, "context": context, "seconds": seconds, "bytes": cost, "read_rate": rate})
    return {"cases": cases}


def _fill(llm: LLM) -> None:
    """Random numbers in place of all keys and values."""
    runner = llm._engine.executor._runner  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    for cache in runner.kv:
        if cache.scales is None:
            cache.numbers.normal_(generator=generator)
        else:  # finite codes in both formats
            cache.numbers.view(torch.uint8).random_(0, 120, generator=generator)
            cache.scales.uniform_(0.01, 0.02, generator=generator)


def _decode(llm: LLM, context: int, big: torch.Tensor) -> tuple[float, float]:
    """Medians of a decode step's seconds behind so many tokens, and of the bytes a second that a sum reads."""
    params = greedy(STEPS + 1)
    with _passed_over(llm):
        llm.add_request(tokens(random.Random(1), context), params)
        while not llm.step():
            pass
    seconds, rates = [], []
    while not llm.idle:
        begin = time.perf_counter()
        big.sum()
        rates.append(big.nbytes / (time.perf_counter() - begin))
        time.sleep(REST)
        begin = time.perf_counter()
        [output] = llm.step()
        seconds.append(time.perf_counter() - begin)
        if output.outputs[0].error:
            raise RuntimeError(f"the request failed: {output.outputs[0].error}")
    return statistics.median(seconds), statistics.median(rates)


@contextmanager
def _passed_over(llm: LLM):
    """Steps that compute nothing: the cache stays as it is, and hidden states are zeros."""
    model = llm.model
    size = model.config.layer.hidden_size

    def nothing(batches: Any, caches: Any, aux: Any = None) -> torch.Tensor:
        return torch.zeros(len(batches[0].token_ids), size, dtype=model.dtype)

    model.forward = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


def _add_contexts(result: Result, found: Found) -> None:
    for case in found["cases"]:
        bound = case["bytes"] / case["read_rate"]
        name = {"auto": "bf16"}.get(case["kv"], case["kv"])
        result.add(
            (
                f"a decode step behind {case['context']:,} tokens, {name} KV",
                f"{case['seconds'] * 1e3:.1f} ms",
                f"{bound * 1e3:.1f} ms at {case['read_rate'] / 1e9:.0f} GB/s",
                f"{case['seconds'] / bound:.2f}",
                "<= 1.15",
            ),
            **case,
        )


# -- requests and a prompt ------------------------------------------------------------------------------------------


def _requests(options: Options) -> Found:
    """Many requests at once: seconds of their decode steps, and memory."""
    count, prompt, output = (8, 16, 8) if options.quick else (REQUESTS, PROMPT, OUTPUT)
    before = _resident("VmRSS")
    with LLM(
        str(checkpoint(options)),
        threads=options.threads,
        prefix_cache="off",
        max_num_seqs=count,
        num_kv_blocks=count * -(-(prompt + output) // 16),
    ) as llm:
        machine = _machine(llm)
        _forget_peak()
        generator = random.Random(2)
        for _ in range(count):
            llm.add_request(tokens(generator, prompt), greedy(output))
        tell(f"growth: {count} requests")
        begin, first, ended = time.perf_counter(), 0.0, 0
        while not llm.idle:
            outputs = llm.step()
            failed = [each.outputs[0].error for each in outputs if each.outputs[0].error]
            if failed:
                raise RuntimeError(f"a request failed: {failed[0]}")
            ended += sum(each.finished for each in outputs)
            if not first and llm.stats.running == count and not llm.stats.waiting and len(outputs) == count:
                first = time.perf_counter() - begin
                done = llm.stats.output_tokens
        seconds, made = time.perf_counter() - begin - first, llm.stats.output_tokens - done
        steps, ceilings = made // count, Ceilings(work_of(llm), machine)
        least = sum(ceilings.seconds(ceilings.work.step(count, prompt + output - k)) for k in range(steps))
        return {
            "requests": count,
            "ended": ended,
            "preemptions": llm.stats.preemptions,
            "tok_s": made / seconds,
            "ceiling_tok_s": steps * count / least,
            **_memory(llm, before),
        }


def _prompt(options: Options) -> Found:
    """One long prompt: its rate, that of the matrix products, and memory."""
    length = 256 if options.quick else LONG
    before = _resident("VmRSS")
    with LLM(
        str(checkpoint(options)),
        threads=options.threads,
        prefix_cache="off",
        max_num_seqs=1,
        num_kv_blocks=length // 16 + 1,
        max_model_len=length + 16,
    ) as llm:
        machine = _machine(llm)
        _forget_peak()
        llm.add_request(tokens(random.Random(3), length), greedy(1))
        begin, told = time.perf_counter(), time.perf_counter()
        while not llm.idle:
            llm.step()
            if time.perf_counter() - told > 20:
                told = time.perf_counter()
                tell(f"growth: {llm.stats.prefill_tokens:,} of {length:,} prompt tokens, {told - begin:.0f} s")
        seconds = time.perf_counter() - begin
        found = _memory(llm, before)  # before other matrices are made
        again = _machine(llm)
        cost = work_of(llm).prompts(1, length)
        rates = [machine.matrix_rate, again.matrix_rate]
        return {
            "tokens": length,
            "seconds": seconds,
            "operations": cost.products + cost.attention,
            "matrix_rates": rates,
            **found,
        }


def _memory(llm: LLM, before: int) -> Found:
    """The most that was resident since `_forget_peak`, and what was planned."""
    plan = llm.memory_plan
    return {
        "resident": _resident("VmHWM"),
        "planned": before + plan.weights + plan.activations + plan.kv_bytes,
        "weights": plan.weights,
        "activations": plan.activations,
        "kv": plan.kv_bytes,
        "before": before,
    }


def _add_requests(result: Result, found: Found) -> None:
    name = f"{found['requests']} requests at once"
    served = found["ended"] == found["requests"] and not found["preemptions"]
    result.add(
        (
            f"{name}, decode{'' if served else ' (SOME FAILED OR GAVE WAY)'}",
            f"{found['tok_s']:,.0f} tokens/s",
            f"{found['ceiling_tok_s']:,.0f} tokens/s",
            f"{found['tok_s'] / found['ceiling_tok_s']:.0%}",
            "",
        ),
        **found,
    )
    _add_memory(result, name, found)


def _add_prompt(result: Result, found: Found) -> None:
    rate, best = found["operations"] / found["seconds"], max(found["matrix_rates"])
    name = f"a prompt of {found['tokens']:,} tokens"
    result.add(
        (
            f"{name} ({found['seconds']:.0f} s, {found['tokens'] / found['seconds']:.0f} tokens/s)",
            f"{rate / 1e9:,.0f} GFLOP/s",
            f"{best / 1e9:,.0f} GFLOP/s",
            f"{rate / best:.0%}",
            ">= 70%",
        ),
        **found,
    )
    _add_memory(result, name, found)


def _add_memory(result: Result, name: str, found: Found) -> None:
    seen, planned = found["resident"], found["planned"]
    result.add(
        (
            f"{name}, most memory resident",
            f"{seen / 1e6:,.0f} MB",
            f"{planned / 1e6:,.0f} MB planned",
            f"{seen / planned:.2f}",
            "<= 1",
        ),
        **found,
    )


# -- the machine ----------------------------------------------------------------------------------------------------


def _machine(llm: LLM) -> Machine:
    return measure_machine(llm.model.dtype, llm.threads, repeat=5)


def _resident(field: str) -> int:
    """Bytes, of this process: VmRSS now, VmHWM at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def _forget_peak() -> None:
    """VmHWM begins anew with what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


PARTS: dict[str, tuple[Callable[[Options], Found], Callable[[Result, Found], None]]] = {
    "context": (_contexts, _add_contexts),
    "requests": (_requests, _add_requests),
    "prompt": (_prompt, _add_prompt),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    with options_from(parser) as (options, args):
        only = tuple(args.only.split(",")) if args.only else ()
        unknown = [name for name in only if name not in PARTS]
        if unknown:
            parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
        print(run(options, only).table())


if __name__ == "__main__":
    main()
