"""Records what tests/core/test_recorded_drafts.py replays: the demo model's drafts everywhere, and step times.

**Accepted drafts.** Each prompt of `benchmarks.speculation` is continued without speculation while a drafter proposes
at every position; afterwards, how many of those drafts are what the text says. One character a position: a digit of
base 36, or `.` where nothing was proposed.

**Times.** Steps with every number of requests and of drafts are run, and the time of a step is fitted to what they
have: see `Times`. It is CPU time of one thread, so that others on the machine matter little.

    .venv/bin/python -m benchmarks.draft_traces
"""

from __future__ import annotations

import argparse
import json
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks import speculation
from benchmarks.common import Options, options_from, tell
from benchmarks.speculation import DRAFTED, PROMPTS
from quire.core.draft_length import DraftState
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import DRAFT, StepPlan, StepResult
from quire.engine.engine import Engine
from quire.models.checkpoint import resolve
from quire.runner.drafts import Drafts
from quire.text.tokenizer import Tokenizer

FILE = Path("tests/core/demo_drafts.json")
KINDS = {
    "greedy": SamplingParams(temperature=0.0, seed=1, ignore_eos=True).resolved(),
    "temperature 1": SamplingParams(seed=1, ignore_eos=True).resolved(),
}
LENGTH = 160
DIGITS = string.digits + string.ascii_lowercase


class Always:
    """In place of `DraftLengths`: always so many drafts."""

    def __init__(self, count: int) -> None:
        self._count = count

    def choose(self, states: Sequence[DraftState], room: Sequence[int], *_: int) -> list[int]:
        return [min(self._count, most) for most in room]

    def drop_drafting(self, states: Sequence[DraftState]) -> None:
        return None

    def start(self, *_: Any) -> None: ...
    def accepted(self, *_: Any) -> None: ...
    def observe_step(self, *_: Any) -> None: ...


class Clock:
    """A point that was reached, in the thread's CPU time: see `quire.runner.device.Reached`."""

    def __init__(self) -> None:
        self._time = time.thread_time()

    def wait(self) -> None:
        return

    def time(self) -> float:
        return self._time


class Recorder:
    """Stands before a proposer: keeps what it proposes, and has it verified nowhere."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self.proposed: dict[tuple[int, int], Drafts] = {}  # by request and position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, wanted: Sequence[Any], context: Any) -> list[Drafts]:
        for want, drafts in zip(wanted, self._proposer.propose(wanted, context), strict=True):
            self.proposed[want.request, want.position] = drafts
        return [Drafts([]) for _ in wanted]


def engine_of(spec: dict[str, Any]) -> Engine:
    engine = speculation.engine_of("demo", Options("", threads=1), spec | {"adaptive": False})
    engine.device.mark = Clock  # type: ignore[assignment, method-assign]
    return engine


def record(spec: dict[str, Any], params: SamplingParams, prompts: Sequence[list[int]], count: int) -> list[str]:
    """A line a prompt: how many drafts would be accepted after 1, 2, ... tokens."""
    engine = engine_of(spec)
    drafter = engine.executor._runner._drafter  # type: ignore[attr-defined]
    recorder = drafter._proposer = Recorder(drafter._proposer)
    lines = []
    for prompt in prompts:
        recorder.proposed.clear()
        text = speculation.generate(engine, [prompt], params, count).tokens[0]
        line = ""
        for known in range(1, count):
            [drafts] = [d for (_, position), d in recorder.proposed.items() if position == len(prompt) + known] or [
                Drafts([])
            ]
            line += _accepted(text[known:], drafts) if drafts.tokens else "."
        lines.append(line)
    engine.close()
    return lines


def _accepted(text: list[int], drafts: Drafts) -> str:
    """How many of the drafts are what the text says; the tree's path follows the text, which ends somewhere."""
    path = [0]
    for row, token in enumerate(drafts.tokens, start=1):
        if drafts.parent(row) == path[-1] and len(path) <= len(text) and token == text[len(path) - 1]:
            path.append(row)
    return DIGITS[len(path) - 1]


class Times:
    """Milliseconds of steps, by what they have; and what is fitted to them.

    A step of `n` requests, all followed, of which some are asked for drafts: `step` of (1, n, rows, whether any are
    verified), and beside it `follow` of (1, n), or `draft` of (1, n, depth, n * depth) where drafts are asked for.
    """

    def __init__(self, spec: dict[str, Any], params: SamplingParams, prompts: Sequence[list[int]], count: int) -> None:
        self._engine, self._params = engine_of(spec), params
        self._seen: dict[tuple[int, int, int, int, bool], list[tuple[float, float]]] = {}
        self._commit = self._engine.scheduler.commit
        self._engine.scheduler.commit = self.commit  # type: ignore[method-assign]
        self._kind: tuple[int, int, int, int, bool] | None = None
        most = self._engine.scheduler._speculation.num_speculative_tokens  # type: ignore[union-attr]
        counts = (0, most) if spec.get("tree_width", 1) > 1 else (0, 1, 2, most // 2, most)
        for _ in range(2):
            for together in (1, 2, 4, 8):
                for drafts in counts:
                    self._engine.scheduler._lengths = Always(drafts)  # type: ignore[assignment]
                    self._run(prompts[:together], params, count)
                self._run(prompts[:together], replace(params, speculate=False), count)
        self._engine.close()

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> Any:
        drafts = [span.num_drafted for span in result.spans]
        wanted = max(span.tokens.count(DRAFT) for span in plan.spans)
        n, rows = len(drafts), len(drafts) + sum(drafts)
        alone = all(len(span.tokens) - span.tokens.count(DRAFT) == 1 for span in plan.spans)
        followed = bool(self._engine.executor._runner._drafter._texts)  # type: ignore[attr-defined]
        self._kind = (n, rows, wanted, max(drafts), followed) if alone else None
        self._drafting = result.drafting
        return self._commit(plan, result, now)

    def _run(self, prompts: Sequence[list[int]], params: SamplingParams, count: int) -> None:
        engine, first = self._engine, 2 * self._engine.stats.prompt_tokens
        for i, prompt in enumerate(prompts):
            engine.add(Request(first + i, list(prompt), params, max_tokens=count))
        while not engine.idle:
            begin = time.thread_time()
            engine.step()
            seconds = time.thread_time() - begin
            if self._kind is not None:
                self._seen.setdefault(self._kind, []).append((1000 * seconds, 1000 * self._drafting))

    def fitted(self) -> dict[str, list[float]]:
        kinds = {
            kind: (_usual([a - b for a, b in seen]), _usual([b for _, b in seen]), len(seen))
            for kind, seen in self._seen.items()
            if len(seen) >= 5
        }
        for kind, (step, drafting, seen) in sorted(kinds.items()):
            if seen > 30:
                tell(f"    {kind}: {step:.3f} + {drafting:.3f} ms, {seen} times")
        steps = [((1, n, rows, depth > 0), kinds[n, rows, w, depth, f]) for n, rows, w, depth, f in kinds]
        plain = [((1, n), kinds[n, r, w, depth, f]) for n, r, w, depth, f in kinds if not w and f]
        drafted = [((1, n, depth, n * depth), kinds[n, r, w, depth, f]) for n, r, w, depth, f in kinds if w]
        return {
            "step": _fit([(x, y[0], y[2]) for x, y in steps]),
            "follow": _fit([(x, y[1], y[2]) for x, y in plain]),
            "draft": _fit([(x, y[1], y[2]) for x, y in drafted]),
        }


def _usual(times: Sequence[float]) -> float:
    """The fastest tenth ends there: what else the machine does does not show."""
    return sorted(times)[len(times) // 10]


def _fit(points: Sequence[tuple[Sequence[float], float, int]]) -> list[float]:
    """Least squares, kinds seen more often counting more; in milliseconds."""
    x, y = np.array([p[0] for p in points], float), np.array([p[1] for p in points])
    weight = np.sqrt(np.array([p[2] for p in points]))
    found = np.linalg.lstsq(x * weight[:, None], y * weight, rcond=None)[0]
    return [round(float(v), 4) for v in found]


def run(options: Options, only: Sequence[str] = tuple(DRAFTED)) -> dict[str, Any]:
    tokenizer = Tokenizer.load(resolve("demo"))
    assert tokenizer is not None
    prompts, count = [tokenizer.encode(text) for text in PROMPTS], 24 if options.quick else LENGTH
    made: dict[str, Any] = {}
    for name in only:
        made[name] = {}
        for kind, params in KINDS.items():
            tell(f"{name}, {kind}")
            lines = record(DRAFTED[name], params, prompts, count)
            times = Times(DRAFTED[name], params, prompts, min(count, 60)).fitted()
            tell(f"    {times}")
            made[name][kind] = {"accepted": lines, "milliseconds": times}
    return made


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="drafters, with semicolons")
    parser.add_argument("--to", default=str(FILE))
    with options_from(parser) as (options, args):
        made = run(options, args.only.split(";") if args.only else tuple(DRAFTED))
        Path(args.to).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        _main()
