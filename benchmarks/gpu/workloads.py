"""The workloads A to D and G: what one would do with an engine, and how near it comes to what the device allows.

Weights are random, prompts are random token ids, output is greedy and of a fixed length. Whatever happens once
(compiling, recording graphs) happens in a warm-up of the same kind before the clock starts.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks.gpu.engines import Bench, bench, random_head
from benchmarks.gpu.job import Job
from benchmarks.replay import ReplayProposer
from quire.runner.drafts import DraftingModel
from quire.speculate import methods
from quire.speculate.device_drafting import DeviceDraftingProposer
from quire.speculate.drafting import DraftingProposer

SHAPES = {"0.6B": "qwen3-0.6b", "14B": "qwen3-14b"}

LONGEST = 4096
"""Tokens of a context in A."""

WARM_STEPS = 12
"""Decode steps before those that are timed: the first of a size records its graph."""


MORE_THAN_ENOUGH = 2048
"""Output tokens of requests that shall still be there when the clock stops."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the workloads are.

    Attributes:
        requests, low, high: of A; lengths of prompts and outputs are uniform from low to high.
        decodes: (batch, context) of B, by model.
        decode_steps: that are timed.
        prompt: of the prefill.
        readers, long_prompt, steps_before: of C.
        budgets: tokens a step in C.
        sharers, prefix, own: of D.
        drafted: batches of G; drafted_prompt, drafted_output: tokens of its requests.
        head_output: tokens of its requests beside a head.
    """

    requests: int = 256
    low: int = 100
    high: int = 1024
    decodes: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
        ("0.6B", ((8, 1024), (64, 1024), (256, 1024), (8, 8192))),
        ("14B", ((1, 1024), (64, 1024))),
    )
    decode_steps: int = 128
    prompt: int = 8192
    readers: int = 16
    long_prompt: int = 16384
    steps_before: int = 256
    budgets: tuple[int, ...] = (256, 512, 2048)
    sharers: int = 64
    prefix: int = 4096
    own: int = 256
    drafted: tuple[int, ...] = (1, 8)
    drafted_prompt: int = 128
    drafted_output: int = 256
    head_output: int = 128


TINY = Sizes(
    requests=6,
    low=4,
    high=24,
    decodes=(("0.6B", ((2, 32), (4, 32))), ("14B", ((1, 32), (4, 32)))),
    decode_steps=8,
    prompt=96,
    readers=3,
    long_prompt=256,
    steps_before=12,
    budgets=(64, 128),
    sharers=4,
    prefix=64,
    own=16,
    drafted=(1, 3),
    drafted_prompt=8,
    drafted_output=40,
    head_output=30,
)
"""For a rehearsal."""

AIMS: dict[tuple[str, str, str], tuple[str, float]] = {
    ("A", "0.6B", ""): ("share", 0.8),
    ("A", "14B", ""): ("share", 0.8),
    ("B", "0.6B", "64 x 1,024"): ("share", 0.8),
    ("B", "0.6B", "256 x 1,024"): ("share", 0.8),
    ("B", "14B", "1 x 1,024"): ("share", 0.6),
    ("B", "14B", "64 x 1,024"): ("share", 0.8),
    ("B", "14B", "prefill of 8,192"): ("share", 0.6),
    ("D", "0.6B", "64 x (4,096 + 256)"): ("value", 8),
}
"""Which field of a figure should be how much at least; by workload, model and setting. Shares are of what the device
was measured to do, so they hold for any."""

MOST_GAP = 3
"""C: the worst gap between tokens should be at most this many times the median before."""


def sizes(job: Job) -> Sizes:
    return TINY if job.rehearse else Sizes()


def shape(job: Job, model: str) -> str:
    return "qwen3-tiny" if job.rehearse else SHAPES[model]


# -- A: many requests ----------------------------------------------------------------------------------------


def throughput(job: Job, model: str, **options: Any) -> None:
    """A: output tokens a second of many requests that arrive at once. What is done counts if time runs out.

    With the settings of nano-vllm's benchmark: temperature 0.6, contexts of at most 4,096 tokens.
    """
    size = sizes(job)
    limits = {"prefix_cache": "off", "max_num_seqs": size.requests, "max_model_len": LONGEST}
    with bench(job, shape(job, model), **limits, **options) as under:
        generator = random.Random(1)
        for _ in range(size.requests):  # all batch sizes, so all their graphs
            under.add(generator.randint(size.low // 4, size.high // 4), generator.randint(1, size.high // 8))
        under.run()
        generator = random.Random(0)
        wanted = [[generator.randint(size.low, size.high) for _ in range(2)] for _ in range(size.requests)]
        prompts = [under.random_tokens(length) for length, _ in wanted]
        under.meter.clear()
        begin = time.perf_counter()
        mine = [under.add(prompt, output, temperature=0.6) for prompt, (_, output) in zip(prompts, wanted, strict=True)]
        while not under.engine.idle and not job.late:
            under.step()
        elapsed = time.perf_counter() - begin
        made, asked = sum(under.tokens[number] for number in mine), sum(output for _, output in wanted)
        fields = under.measured(elapsed)
        if made < asked:
            fields["note"] = f"stopped after {made:,} of {asked:,} output tokens, when its time was over"
        figure(job, "A", model, _setting(options, ""), made / elapsed, "tok/s", **fields)


# -- B: decode steps alone, and a long prompt alone ----------------------------------------------------------


def decodes(job: Job, model: str, only: Sequence[tuple[int, int]] | None = None, **options: Any) -> None:
    """B: steps in which each of some requests gets one token, behind contexts of random tokens."""
    size = sizes(job)
    cases = only or dict(size.decodes)[model]
    most = max(16, *(batch for batch, _ in cases))
    with bench(job, shape(job, model), prefix_cache="off", max_num_seqs=most, **options) as under:
        for batch, context in cases:
            _decode(under, model, batch, context, size.decode_steps, options)
        if model == "14B":
            _prefill(under, model, size.prompt)


def _decode(under: Bench, model: str, batch: int, context: int, steps: int, options: dict[str, Any]) -> None:
    mine = [under.add(context, steps + MORE_THAN_ENOUGH) for _ in range(batch)]
    under.run(lambda: min(under.tokens[number] for number in mine) >= WARM_STEPS)
    under.meter.clear()
    begin = time.perf_counter()
    for _ in range(steps):  # before the first and after the last the same number of steps is in flight
        under.step()
    elapsed = time.perf_counter() - begin
    fields = under.measured(elapsed)
    under.drop_all()
    setting = _setting(options, f"{batch} x {context:,}")
    took, host = 1000 * elapsed / steps, fields["host_ms"]
    figure(under.job, "B", model, setting, took, "ms a step", **fields)
    if not options and batch == max(size for size, _ in dict(sizes(under.job).decodes)["0.6B"]):
        hidden = {"aim": f"below {took:.3g}", "met": host < took, "host_ms": host}
        figure(under.job, "B", model, f"{setting}: what the host does meanwhile", host, "ms a step", **hidden)


def _prefill(under: Bench, model: str, length: int) -> None:
    """One prompt, in as few steps as the engine takes; the best of three, after one that does not count."""
    best: dict[str, Any] = {}
    for turn in range(4):
        prompt = under.random_tokens(length)
        under.meter.clear()
        begin = time.perf_counter()
        under.add(prompt, 1)
        under.run()
        elapsed = time.perf_counter() - begin
        if turn and (not best or elapsed < best["seconds"]):
            best = under.measured(elapsed)
    figure(under.job, "B", model, f"prefill of {length:,}", length / best["seconds"], "tok/s", **best)


# -- C: a long prompt among streams --------------------------------------------------------------------------


def interference(job: Job) -> None:
    """C: gaps between the tokens of decoding requests while a long prompt arrives, for several budgets of a step."""
    size = sizes(job)
    for budget in size.budgets:
        options = {"prefix_cache": "off", "max_num_seqs": 2 * size.readers, "max_num_batched_tokens": budget}
        with bench(job, shape(job, "0.6B"), **options) as under:
            before, during, fields = _gaps(under, size)
        quiet, worst = statistics.median(before), max(during)
        figure(
            job,
            "C",
            "0.6B",
            f"{budget:,} tokens a step",
            worst / quiet,
            "times",
            median_before_ms=1000 * quiet,
            median_ms=1000 * statistics.median(during),
            p99_ms=1000 * percentile(during, 0.99),
            worst_ms=1000 * worst,
            aim=f"at most {MOST_GAP}" if budget == size.budgets[0] else None,
            met=worst <= MOST_GAP * quiet if budget == size.budgets[0] else None,
            **fields,
        )


def _gaps(under: Bench, size: Sizes) -> tuple[list[float], list[float], dict[str, Any]]:
    """Seconds between tokens of each reader, before the prompt arrives and until it has its first token.

    Also what the steps after its arrival took and could have taken.
    """
    readers = [under.add(32, MORE_THAN_ENOUGH) for _ in range(size.readers)]
    under.run(lambda: min(under.tokens[number] for number in readers) >= WARM_STEPS)
    warm = under.add(size.long_prompt, 1)
    under.run(lambda: under.tokens[warm] > 0)
    enough = under.tokens[readers[0]] + size.steps_before
    before = _gaps_until(under, readers, lambda: under.tokens[readers[0]] >= enough)
    prompt = under.random_tokens(size.long_prompt)
    under.meter.clear()
    begin = time.perf_counter()
    late = under.add(prompt, 1)
    during = _gaps_until(under, readers, lambda: under.tokens[late] > 0)
    fields = under.measured(time.perf_counter() - begin)
    under.drop_all()
    return before, during, fields


def _gaps_until(under: Bench, readers: Sequence[int], done: Callable[[], bool]) -> list[float]:
    last = dict.fromkeys(readers, time.perf_counter())
    gaps: list[float] = []
    while not done():
        grown = under.step()
        now = time.perf_counter()
        for number in grown:
            if number in last:
                gaps.append(now - last[number])
                last[number] = now
        under.job.check_time()
    return gaps


# -- D: shared prefixes --------------------------------------------------------------------------------------


def shared_prefix(job: Job) -> None:
    """D: prompt tokens a second of requests that share a prefix, against as many that share nothing.

    Both once before the clock starts: the last step of either may be of a size of its own, whose graph is recorded.
    """
    size = sizes(job)
    length = size.prefix + size.own
    with bench(job, shape(job, "0.6B"), prefix_cache="radix", max_num_seqs=size.sharers) as under:
        for _ in range(2):
            apart, _ = _prompts(under, [under.random_tokens(length) for _ in range(size.sharers)])
        for _ in range(2):
            head = under.random_tokens(size.prefix)
            together, fields = _prompts(under, [head + under.random_tokens(size.own) for _ in range(size.sharers)])
    rates = {"shared_tok_s": size.sharers * length / together, "unshared_tok_s": size.sharers * length / apart}
    setting = f"{size.sharers} x ({size.prefix:,} + {size.own:,})"
    figure(job, "D", "0.6B", setting, apart / together, "times", **fields, **rates)


def _prompts(under: Bench, prompts: Sequence[Sequence[int]]) -> tuple[float, dict[str, Any]]:
    """Seconds until each has its first token."""
    under.meter.clear()
    begin = time.perf_counter()
    for prompt in prompts:
        under.add(prompt, 1)
    under.run()
    elapsed = time.perf_counter() - begin
    return elapsed, under.measured(elapsed)


# -- G: speculation ------------------------------------------------------------------------------------------

DRAFTS, RIGHT = 4, 0.8
"""Tokens that a step verifies of each request, and the share of them that are right."""


OPTIONS: dict[str, Any] = {"prefix_cache": "off", "max_num_seqs": 16}
"""Of all engines of G."""


def speculation(job: Job) -> None:
    """G: tokens a second of an engine that does not draft, and of one that does, with its drafts and without.

    Where such drafts are, a step is launched once the one before it has ended: that is what the second of these shows.
    """
    size = sizes(job)
    plain = _plain(job, size.drafted_output, "no speculation")
    spec = {"method": "ngram", "num_speculative_tokens": DRAFTS, "adaptive": False}
    proposer = ReplayProposer(
        [[*prompt, *text] for prompt, text in zip(plain.prompts, plain.texts, strict=True)], RIGHT, plain.vocab_size
    )
    with bench(job, shape(job, "14B"), proposer=proposer, speculative_config=spec, **OPTIONS) as under:
        for batch in size.drafted:
            _against(under, plain, batch, "speculate=False", drafts=False)
            _against(under, plain, batch, f"{DRAFTS} drafts, {RIGHT:.0%} right")


def heads(job: Job) -> None:
    """G: what it costs to draft with an EAGLE head, whose weights are random, so that hardly a draft is right.

    First where drafts stay on the device: requests without them, which only have its tables kept up, and with them.
    Then where the host is told of the drafts and waits for each step, as it does for trees and for rejection sampling.
    """
    size = sizes(job)
    plain = _plain(job, size.head_output, "without a head")
    head = random_head(job, shape(job, "14B"))
    spec = {"method": "eagle", "model": str(head), "num_speculative_tokens": DRAFTS, "adaptive": False}
    with bench(job, shape(job, "14B"), speculative_config=spec, **OPTIONS) as under:
        _check_proposer(under, DeviceDraftingProposer)
        for batch in size.drafted:
            _against(under, plain, batch, "a head on the device, speculate=False", drafts=False)
            _against(under, plain, batch, f"a head on the device, {DRAFTS} drafts")
    with (
        mock.patch.object(methods, "DeviceDraftingProposer", _OnHost),
        bench(job, shape(job, "14B"), speculative_config=spec, **OPTIONS) as under,
    ):
        _check_proposer(under, DraftingProposer)
        for batch in size.drafted:
            _against(under, plain, batch, f"a head that is waited for, {DRAFTS} drafts")


class _OnHost(DraftingProposer):
    """Drafts of the same head, of which the host is told."""

    def __init__(self, model: DraftingModel, lead: int, most: int) -> None:
        super().__init__(model, lead)
        self.keeps = 1


def _check_proposer(under: Bench, kind: type) -> None:
    """Raises RuntimeError where the figures would be of something else."""
    found = under.engine.speculation and under.engine.speculation.proposer
    if not isinstance(found, kind):
        raise RuntimeError(f"what drafts is a {type(found).__name__}, and a {kind.__name__} was to be measured")


@dataclass(frozen=True, slots=True)
class _Plain:
    """What an engine without drafts makes.

    Attributes:
        prompts, texts: of the most requests at once.
        rates: tokens a second, by batch.
    """

    vocab_size: int
    prompts: list[list[int]]
    texts: list[list[int]]
    rates: dict[int, float]


def _plain(job: Job, output: int, what: str) -> _Plain:
    size = sizes(job)
    with bench(job, shape(job, "14B"), **OPTIONS) as under:
        prompts = [under.random_tokens(size.drafted_prompt) for _ in range(max(size.drafted))]
        made = {batch: _streams(under, prompts[:batch], output, what) for batch in size.drafted}
        rates = {batch: rate for batch, (rate, _) in made.items()}
        return _Plain(under.engine.model.vocab_size, prompts, made[max(size.drafted)][1], rates)


def _against(under: Bench, plain: _Plain, batch: int, what: str, drafts: bool = True) -> None:
    """The same requests in another engine. Raises RuntimeError where their tokens differ."""
    output = len(plain.texts[0])
    _, found = _streams(under, plain.prompts[:batch], output, what, plain.rates[batch], drafts)
    if found != plain.texts[:batch]:
        raise RuntimeError(f"{batch} requests, {what}: the tokens are not those without speculation")


def _streams(
    under: Bench,
    prompts: Sequence[Sequence[int]],
    output: int,
    what: str,
    plain: float | None = None,
    drafts: bool = False,
) -> tuple[float, list[list[int]]]:
    """Tokens a second of decode steps, from when all requests decode until the first one ends; and all texts."""
    mine = [under.add(prompt, output, speculate=drafts) for prompt in prompts]
    under.run(lambda: min(under.tokens[number] for number in mine) >= WARM_STEPS)
    under.meter.clear()
    before, begin = sum(under.tokens[number] for number in mine), time.perf_counter()
    under.run(lambda: max(under.tokens[number] for number in mine) >= output)
    elapsed = time.perf_counter() - begin
    fields, made = under.measured(elapsed), sum(under.tokens[number] for number in mine) - before
    under.run()
    fields |= {"tokens_a_step": made / fields["steps"] / len(mine), "step_ms": 1000 * elapsed / fields["steps"]}
    fields["note"] = f"{fields['tokens_a_step']:.2f} tokens and {fields['step_ms']:.3g} ms a step"
    if plain is not None:
        fields["ratio"] = made / elapsed / plain
        fields["note"] += f", {fields['ratio']:.2f} times as fast"
    figure(under.job, "G", "14B", f"{len(mine)} x {len(prompts[0])}, {what}", made / elapsed, "tok/s", **fields)
    return made / elapsed, [under.texts[number] for number in mine]


# -- figures -------------------------------------------------------------------------------------------------


def deterministic_cost(job: Job) -> None:
    """A at 0.6B and B at batch 64 once more, with deterministic=False: table.py sets them beside the others."""
    throughput(job, "0.6B", deterministic=False)
    second = dict(sizes(job).decodes)["0.6B"][1]  # batch 64
    decodes(job, "0.6B", [second], deterministic=False)


def figure(job: Job, workload: str, model: str, setting: str, value: float, unit: str, **fields: Any) -> None:
    """Record a figure, beside its aim where it has one."""
    fields |= {"workload": workload, "model": model, "setting": setting, "value": value, "unit": unit}
    aim = AIMS.get((workload, model, setting))
    if aim is not None:
        name, least = aim
        fields["aim"] = f"{least:.0%} of the bound" if name == "share" else f"{least:,g}"
        fields["met"] = None if fields[name] is None else fields[name] >= least
    job.record("figure", **fields)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _setting(options: dict[str, Any], text: str) -> str:
    """What is special about a figure."""
    return ", ".join(filter(None, [text, *(f"{name}={value}" for name, value in options.items())]))
