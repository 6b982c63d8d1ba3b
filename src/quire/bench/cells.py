"""Workload cells: a few fixed workloads, so that figures of different days and engines can be compared.

A cell is a batch of requests submitted at once, each with a prompt of random token ids and a fixed number of greedy
tokens (end-of-sequence ignored, prefix cache off). It is run twice: with one token per request, which gives the prefill
rate, and in full. The decode rate is the number of tokens after the first ones, over the difference of the two times.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.core.sampling_params import SamplingParams
from quire.errors import BenchmarkError, ConfigError

if TYPE_CHECKING:
    from quire.llm import LLM


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` requests at once, with `prompt` tokens each, that generate `output` tokens each."""

    name: str
    batch: int
    prompt: int
    output: int

    @property
    def first(self) -> Cell:
        """The same cell with one token per request, for the prefill's share of the time."""
        return Cell(self.name, self.batch, self.prompt, 1)


CELLS = (
    Cell("decode-1", batch=1, prompt=128, output=48),
    Cell("decode-8", batch=8, prompt=128, output=32),
    Cell("decode-32", batch=32, prompt=128, output=32),
    Cell("prefill-1k", batch=1, prompt=1024, output=1),
)
"""The default cells: 1, 8 and 32 concurrent requests, and a long prompt."""

WARM_UP = Cell("warm-up", batch=1, prompt=16, output=4)


def parse_cells(text: str) -> list[Cell]:
    """Parse names of `CELLS` or shapes written BATCHxPROMPT+OUTPUT, separated by commas.

    Raises:
        ConfigError: a part is neither.
    """
    return [_parse_cell(part.strip()) for part in text.split(",")]


def _parse_cell(text: str) -> Cell:
    known = {cell.name: cell for cell in CELLS}
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,7})\+([1-9]\d{0,7})", text)
    if match:
        return Cell(text, *(int(number) for number in match.groups()))
    if text not in known:
        raise ConfigError(
            f"unknown cell {text!r}; known: {', '.join(known)}; or write a shape as BATCHxPROMPT+OUTPUT, as in 4x256+64"
        )
    return known[text]


def refusal(cell: Cell, llm: LLM) -> str | None:
    """Why this engine cannot run the cell as intended, with what to change; None if it can."""
    length = cell.prompt + cell.output
    if length > llm.max_model_len:
        return (
            f"needs a context of {length} tokens, but this engine's is {llm.max_model_len}; choose another model, "
            "or raise max_model_len if it was lowered"
        )
    if cell.batch > llm.config.max_num_seqs:
        return (
            f"has {cell.batch} requests at once, but max_num_seqs is {llm.config.max_num_seqs}; "
            f"set --max-num-seqs {cell.batch}"
        )
    plan = llm.memory_plan
    group = plan.lacking(cell.batch, length)
    if group is not None:
        blocks, usable = group.needed(cell.batch, -(-length // plan.block_size)), group.num_usable
        size = (blocks + 1) * plan.kv_bytes // group.num_blocks
        return (
            f"needs {blocks} KV blocks of {plan.block_size} tokens, but the memory plan has {usable}; "
            f"set --kv-cache-memory to at least {-(-size // 2**20)}MiB, or free some memory"
        )
    return None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a cell's two runs, each the best of its repeats. With one output token, `total` equals `first`."""

    first: float
    total: float

    def prefill_rate(self, cell: Cell) -> float:
        """Prompt tokens per second."""
        return cell.batch * cell.prompt / self.first

    def decode_rate(self, cell: Cell) -> float | None:
        """Output tokens after the first ones, per second beyond the first run; None if there are none.

        Raises:
            BenchmarkError: the full run took no longer than the first one, so the machine was too noisy.
        """
        if cell.output == 1:
            return None
        if self.total <= self.first:
            raise BenchmarkError(
                f"{cell.name}: {cell.output} tokens took {self.total:.4f} s and 1 token {self.first:.4f} s: the cell "
                "is too small, or the machine was busy; try --repeat 3, or more output tokens"
            )
        return cell.batch * (cell.output - 1) / (self.total - self.first)


OnToken = Callable[[int], None]
"""Called with the number of tokens that a run has generated so far."""


def measure(llm: LLM, cell: Cell, repeat: int = 1, on_token: OnToken | None = None) -> Timing:
    """Time a cell: each of its two runs `repeat` times, of which the fastest counts.

    Raises:
        BenchmarkError: a run did not generate all its tokens.
    """
    seed = 0
    best: list[float] = []
    for shape in (cell.first, cell) if cell.output > 1 else (cell,):
        times = []
        for _ in range(repeat):
            seed += 1
            times.append(_timed(llm, shape, seed, on_token))
        best.append(min(times))
    return Timing(best[0], best[-1])


def warm_up(llm: LLM) -> None:
    """A small run, so that one-time costs are not counted in the first cell."""
    length = min(WARM_UP.prompt, llm.max_model_len - WARM_UP.output)
    if length > 0:
        _timed(llm, Cell(WARM_UP.name, 1, length, WARM_UP.output), 0, None)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids; equal seeds give equal prompts."""
    generator = random.Random(seed)
    return [generator.choices(range(vocab_size), k=length) for _ in range(count)]


def greedy(output: int) -> SamplingParams:
    """Exactly `output` greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)


def _timed(llm: LLM, cell: Cell, seed: int, on_token: OnToken | None) -> float:
    """Seconds from the first request's submission to the last one's end.

    The tokens are counted, since an engine that dropped a request would look very fast.
    """
    prompts = random_prompts(cell.batch, cell.prompt, llm.model.vocab_size, seed)
    params, made, ended = greedy(cell.output), 0, 0
    before = llm.stats.output_tokens
    begin = time.perf_counter()
    for prompt in prompts:
        llm.add_request(prompt, params)
    while not llm.idle:
        for output in llm.step():
            if output.finished:
                ended += 1
                made += len(output.outputs[0].token_ids)
        if on_token:
            on_token(llm.stats.output_tokens - before)
    seconds = time.perf_counter() - begin
    if (ended, made) != (cell.batch, cell.batch * cell.output):
        raise BenchmarkError(
            f"{cell.name}: {ended} requests ended with {made} tokens, but {cell.batch} with "
            f"{cell.batch * cell.output} were asked for; the engine's log says why"
        )
    return seconds


def shape_of(cell: Cell) -> dict[str, Any]:
    """The cell's fields, for the beginning of its JSON line."""
    return {"cell": cell.name, "batch": cell.batch, "prompt": cell.prompt, "output": cell.output}
