"""Structured output: what compiling takes, what a mask takes, and what is left of the throughput.

1. **Compiling** a tool's schema of the usual size, and one of 10 KB, for a vocabulary of 151,936 tokens.
2. **Masks** for the same vocabulary: making the mask of the next token and taking that token in, along random outputs.
   In seconds of this thread's CPU, which is where all of it is done, so that a busy machine does not count.
3. **The demo model**, 32 requests at once, each with a schema of its own, in turns with 32 that have none and as many
   tokens. Their tokens are few, and the model is small, so what masks take shows here more than anywhere.
4. **Gaps** between the tokens of 32 plain streams of the demo model (`AsyncLLM`), while 32 others come one after the
   other: plain ones too, or each with a schema that nobody had before.

`python -m benchmarks.peers.structured` measures other engines beside Quire.

The vocabulary is made up: that of the demo model, and pairs of its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.common import Options, Result, main, tell
from quire import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from quire.grammar.grammars import Grammars
from quire.grammar.vocabulary import Vocabulary
from quire.models.hub import ASSETS
from quire.text.tokenizer import Tokenizer

VOCAB, END = 151_936, 2
TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "City and country, such as Bogotá, Colombia"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "include": {"type": "array", "items": {"enum": ["wind", "rain", "sun"]}, "maxItems": 3},
        "when": {"type": "string", "format": "date"},
    },
    "required": ["location", "unit"],
    "additionalProperties": False,
}


def large_schema() -> dict[str, Any]:
    """Of some 10 KB: an object of 24 such objects."""
    properties = {f"request_{number}": TOOL for number in range(24)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def vocabulary() -> Vocabulary:
    """See the head of this file."""
    tokenizer = Tokenizer.load(ASSETS / "demo")
    own = tokenizer.vocabulary(tokenizer.vocab_size).tokens[:-1]
    pairs = (a + b for a, b in itertools.product(own[300:], own[300:]) if b[:1] != b" ")
    more = itertools.islice(dict.fromkeys(pairs), VOCAB - len(own))
    return Vocabulary([*own, *more], sorted(tokenizer.special_ids), lambda text: [])


def run(options: Options) -> Result:
    """All parts."""
    result = Result(["What", "Median", "99th percentile"])
    made, walks = vocabulary(), 2 if options.quick else 20

    def row(what: str, seconds: list[float]) -> None:
        middle, high = statistics.median(seconds), float(np.percentile(seconds, 99))
        result.rows.append([what, _shown(middle), _shown(high)])
        result.raw.append({"what": what, "median": middle, "p99": high})

    for name, schema in (("a tool's schema", TOOL), ("10 KB", large_schema())):
        tell(f"{name}: {len(json.dumps(schema))} bytes")
        grammars = Grammars(lambda: made)
        grammars.compile(StructuredOutputsParams(regex="a"))  # the vocabulary's own work
        forms = [StructuredOutputsParams(json={**schema, "title": str(number)}) for number in range(walks)]
        row(f"compile {name}", [_timed(grammars.compile, form) for form in forms])
        row(f"mask and advance, {name}", _walks(grammars, forms))
    _throughput(options, result)
    asyncio.run(_gaps(options, result))
    return result


def _walks(grammars: Grammars, forms: list[StructuredOutputsParams]) -> list[float]:
    """CPU seconds of each mask with the token after it, along random outputs of at most 300 tokens."""
    draw, seconds = random.Random(1), []
    for form in forms:
        matcher = grammars.matcher(form, [END])
        for _ in range(300):
            begin = time.thread_time()
            words = matcher.mask()
            spent = time.thread_time() - begin
            bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB])
            token = int(draw.choice(bits))
            if token == END:
                break
            begin = time.thread_time()
            matcher.append(token)
            seconds.append(spent + time.thread_time() - begin)
    return seconds


def _throughput(options: Options, result: Result) -> None:
    rows, turns = (4, 1) if options.quick else (32, 3)
    rates: dict[str, list[float]] = {"plain": [], "schemas": []}
    with LLM("demo", threads=options.threads or 0 or None, max_num_seqs=rows) as llm:
        for turn in range(turns + 1):
            for kind, found in rates.items():
                params = [_params(kind == "schemas", turn * rows + number) for number in range(rows)]
                begin = time.perf_counter()
                outputs = llm.generate(["Once"] * rows, params)
                rate = sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begin)
                if turn:  # the first one warms up
                    found.append(rate)
    plain, schemas = (statistics.median(found) for found in rates.values())
    result.rows.append([f"demo, {rows} requests: with schemas / plain", f"{schemas / plain:.2f}", ""])
    result.raw.append({"what": "throughput", "plain": plain, "schemas": schemas})


async def _gaps(options: Options, result: Result) -> None:
    rows, turns = (4, 1) if options.quick else (32, 3)
    seconds: dict[str, list[float]] = {"plain ones": [], "ones with schemas": []}
    with contextlib.closing(AsyncLLM("demo", threads=options.threads or None, max_num_seqs=2 * rows)) as llm:
        for turn in range(turns + 1):
            for kind, found in seconds.items():
                gaps: list[float] = []
                numbers = range(turn * rows, turn * rows + rows)
                await asyncio.gather(
                    *(_stream(llm, _params(False, number), gaps) for number in numbers),
                    _others(llm, [_params(kind != "plain ones", number) for number in numbers]),
                )
                found += gaps if turn else []  # the first one warms up
    for kind, found in seconds.items():
        middle, high = statistics.median(found), float(np.percentile(found, 99))
        what = f"demo, gaps of {rows} plain streams while {rows} {kind} come"
        result.rows.append([what, _shown(middle), _shown(high)])
        result.raw.append({"what": what, "median": middle, "p99": high})


async def _stream(llm: AsyncLLM, params: SamplingParams, gaps: list[float]) -> None:
    """Adds the seconds between a request's tokens."""
    last: float | None = None
    async for _ in llm.generate("Once", params):
        now = time.perf_counter()
        gaps += [] if last is None else [now - last]
        last = now


async def _others(llm: AsyncLLM, params: Sequence[SamplingParams]) -> None:
    """Requests that come one every few milliseconds."""
    tasks = []
    for each in params:
        tasks.append(asyncio.create_task(_stream(llm, each, [])))
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)


def _params(constrained: bool, number: int) -> SamplingParams:
    """128 tokens, of a JSON array of strings where constrained."""
    schema = {"type": "array", "items": {"type": "string", "minLength": 40}, "minItems": 99, "title": str(number)}
    form = {"json": schema} if constrained else None
    return SamplingParams(max_tokens=128, min_tokens=128, seed=number, structured_outputs=form)


def _timed(call: Callable[[Any], object], value: object) -> float:
    begin = time.perf_counter()
    call(value)
    return time.perf_counter() - begin


def _shown(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


if __name__ == "__main__":
    main(run)
