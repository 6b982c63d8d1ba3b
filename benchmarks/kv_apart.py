"""Prefill and decode apart, against one engine that does both in chunks: what streams notice of long prompts.

Eight streams decode; each that ends is followed by another one, so that there are always as many, of the same lengths.
Their gaps between tokens are taken while nothing else happens, and while three long prompts arrive at once, until each
of these has its first token. Apart, an engine in another process computes the prompts, with half of the threads, and
the one that decodes has the other half; the one engine has all of them, and computes prompts in steps of 256 tokens.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import Options, Result, greedy, tell, tokens
from quire import LLM
from quire.bench.kv import wait_ready
from quire.bench.kv_prefill import prefill_process
from quire.core.request import RequestUpdate
from quire.core.step import StepPlan, StepResult

STREAMS, PROMPTS, LENGTH, CHUNK = 8, 3, 4096, 256
BEGIN, OUTPUT = 32, 128
"""Tokens of a stream: its prompt, and what it decodes."""

ALONE, MOVING, BEGIN_OF, LOADS, END_OF = (
    "decodes alone",
    "while blocks come",
    "a prompt's beginning",
    "loads",
    "a long prompt's end",
)
"""What a step may hold, or have beside it; of several, the last one names it."""

BESIDE = 0.001
"""Seconds of other threads than the one that computes: they bring blocks."""


Gaps = dict[str, list[float]]
"""By what the step held that ended them, seconds between tokens of one stream."""


@dataclass
class Measured:
    """Gaps, and seconds to the first token of the long prompts."""

    quiet: Gaps = field(default_factory=lambda: defaultdict(list))
    disturbed: Gaps = field(default_factory=lambda: defaultdict(list))
    first: list[float] = field(default_factory=list)


def all_of(gaps: Gaps) -> list[float]:
    return [gap for each in gaps.values() for gap in each]


def time_apart(result: Result, folder: str, options: Options) -> None:
    """Add the rows of both ways, and what disturbed gaps are beside undisturbed ones."""
    length = 256 if options.quick else LENGTH
    threads = options.threads or 2
    ways: list[Measured] = []
    for name, engine in (("together", together), ("apart", apart)):
        with engine(folder, length, threads) as llm, without_garbage():
            tell(f"kv: {STREAMS} streams, prefill and decode {name}")
            ways.append(Streams(llm).measure(length, 16 if options.quick else 2 * OUTPUT))
            for when, gaps in (("undisturbed", ways[-1].quiet), ("while prompts arrive", ways[-1].disturbed)):
                for what, own in sorted(gaps.items(), key=lambda item: -max(item[1])):
                    mean, longest = statistics.fmean(own) * 1e3, max(own) * 1e3
                    tell(f"kv: {name}, {when}, {what}: {len(own)} gaps, mean {mean:.1f} ms, longest {longest:.1f}")
            if name == "apart" and (came := llm.stats.kv_tiers["peer"]["loaded"]) < PROMPTS * ((length - 1) // 16):
                raise RuntimeError(f"only {came} blocks came from the engine that computes prompts")
    streams, arriving = f"0.6B: {STREAMS} streams", f"while {PROMPTS} prompts of {length:,} tokens arrive"
    kinds = {"longest gap": max, "99 % of gaps": percentile_99, "mean gap": statistics.fmean}
    for what, of in kinds.items():
        quiet, disturbed = (
            [of(all_of(gaps)) for gaps in kind] for kind in zip(*((w.quiet, w.disturbed) for w in ways), strict=True)
        )
        _add(result, f"{streams}, {what}, ms", [seconds * 1e3 for seconds in quiet])
        _add(result, f"{streams} {arriving}, {what}, ms", [seconds * 1e3 for seconds in disturbed])
        longer = [many / few for many, few in zip(disturbed, quiet, strict=True)]
        _add(result, f"{streams}, {what}: times as long {arriving}", longer, 2)
    if alone := ways[1].disturbed[ALONE]:
        label = f"{streams} {arriving}, mean gap: times as long as where nothing moves then"
        moving = statistics.fmean(all_of(ways[1].disturbed)) / statistics.fmean(alone)
        result.add((label, "", f"{moving:.2f}", ""), what=label, apart=moving)
    for what, rank in (("first", min), ("median", statistics.median), ("last", max)):
        _add(result, f"{streams} {arriving}, time to the {what} one's first token, s", [rank(w.first) for w in ways], 2)


def _add(result: Result, label: str, values: list[float], digits: int = 0) -> None:
    one, other = values
    row = (label, f"{one:,.{digits}f}", f"{other:,.{digits}f}", f"{other / one:.1%}")
    result.add(row, what=label, together=one, apart=other)


@contextmanager
def without_garbage() -> Iterator[None]:
    """As in an engine's process: to look through all of torch now and then would take longer than a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def percentile_99(values: list[float]) -> float:
    """What 99 of 100 are at most."""
    ordered = sorted(values)
    return ordered[-(-99 * len(ordered) // 100) - 1]


def _sizes(length: int, requests: int) -> dict[str, Any]:
    longest = max(length, BEGIN + OUTPUT) + 64
    return {"max_model_len": longest, "max_num_seqs": requests, "num_kv_blocks": requests * (longest // 16 + 1)}


@contextmanager
def together(folder: str, length: int, threads: int) -> Iterator[LLM]:
    """One engine."""
    sizes = _sizes(length, STREAMS + PROMPTS)
    with LLM(folder, threads=threads, max_num_batched_tokens=CHUNK, **sizes) as llm:
        yield llm


@contextmanager
def apart(folder: str, length: int, threads: int) -> Iterator[LLM]:
    """One that decodes, and has prompts computed by another one."""
    half = max(1, threads // 2)
    with ExitStack() as stack:
        there = {"model": folder, "threads": half, "host_kv_memory": "2GiB", **_sizes(length, PROMPTS)}
        other = stack.enter_context(prefill_process(there))
        llm = stack.enter_context(
            LLM(
                folder,
                threads=half,
                kv_role="decode",
                prefill_url=other.address,
                cluster_key_file=other.key_file,
                host_kv_memory="2GiB",
                max_num_batched_tokens=CHUNK,
                prefill_min_tokens=2 * BEGIN,
                **_sizes(length, STREAMS + PROMPTS),
            )
        )
        wait_ready(llm._engine)
        yield llm


class LastStep:
    """What a step held, as the engine's observer."""

    def __init__(self) -> None:
        self.held = ALONE

    def planned(self, plan: StepPlan, begin: float, seconds: float) -> None:
        many = [
            span for span in plan.spans if len(span.tokens) > 1 or not span.num_sampled or span.start > BEGIN + OUTPUT
        ]
        deep = any(span.start >= BEGIN for span in many)
        self.held = END_OF if deep else LOADS if plan.loads else BEGIN_OF if many else ALONE

    def committed(self, plan: StepPlan, result: StepResult, updates: list[RequestUpdate]) -> None:
        """Nothing more is known of it than what was planned."""

    def given_up(self) -> None:
        """The next one is planned anew."""


class Streams:
    """Decoding requests, always as many."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._generator, self._begun = llm, random.Random(0), 0
        self._last: dict[str, float] = {}  # when each had its last token
        self._step_held = LastStep()
        self._one_thread = llm._engine.threads == 1
        llm._engine._observers.append(self._step_held)
        for number in range(STREAMS):
            self._begin(OUTPUT * (number + 1) // STREAMS)  # so that they end one after the other

    def measure(self, length: int, steps: int) -> Measured:
        """Gaps of so many steps without prompts, and then of those until all the prompts have a first token."""
        found = Measured()
        for _ in range(OUTPUT):
            self._step(defaultdict(list))
        for _ in range(steps):
            self._step(found.quiet)
        prompts = [tokens(self._generator, length) for _ in range(PROMPTS)]
        begin, waiting = time.perf_counter(), set()
        for number, prompt in enumerate(prompts):
            waiting.add(self._llm.add_request(prompt, greedy(1), f"prompt-{number}"))
        while waiting:
            ended = self._step(found.disturbed) & waiting
            found.first += [time.perf_counter() - begin] * len(ended)
            waiting -= ended
        return found

    def _step(self, gaps: Gaps) -> set[str]:
        """Run a step. Returns what has ended."""
        beside = time.process_time() - time.thread_time()
        outputs = self._llm.step()
        now, ended, held = time.perf_counter(), set(), self._step_held.held
        if held == ALONE and self._one_thread and time.process_time() - time.thread_time() - beside > BESIDE:
            held = MOVING
        for output in outputs:
            id = output.request_id
            if any(choice.error for choice in output.outputs):
                raise RuntimeError(f"{id} failed: {output.outputs[0].error}")
            if id in self._last:
                gaps[held].append(now - self._last[id])
            if output.finished:
                ended.add(id)
                if self._last.pop(id, None) is not None:
                    self._begin(OUTPUT)
            elif not id.startswith("prompt"):
                self._last[id] = now
        return ended

    def _begin(self, output: int) -> None:
        self._begun += 1
        self._llm.add_request(tokens(self._generator, BEGIN), greedy(output), f"stream-{self._begun}")
