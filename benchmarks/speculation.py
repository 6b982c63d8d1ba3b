"""Speculative decoding on a CPU: what drafting brings at known acceptance, and with what ships with the demo model.

1. **Replayed drafts**: random bf16 weights in the shape of Qwen3-0.6B, one request, 4 drafts a step that come from a
   recorded run, each replaced by another token with probability 1 - a. What rejected drafts cost is measured with
   the self-tuning on and a = 0.
2. **An edit**: the same model is forced along a text, as if it had answered "rename the parameter": a file of Python's
   standard library stands in the prompt, its edited form is the output, and n-grams draft.
3. **The demo model** with its draft model and its EAGLE head, one request after the other and eight at once.
4. **Noise**: how often drafts of `demo-draft` are accepted at temperature 1 with the target's own noise, and with other
   noise; and **proposing with n-grams** at a context of 32,768 tokens.

What is compared runs in turns, and all runs count, so that what self-tuning spends on exploring does, too. Parts 1 and
2 compare runs of one engine, with `speculate` on and off. Part 3 compares engines, which take turns at every group of
requests, after a round that does not count: what an engine has learned outlives requests. *Of the better* is
self-tuned speculation's rate as a share of the better of plain decoding and always as many drafts.
"""

from __future__ import annotations

import gc
import inspect
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.common import Options, Result, checkpoint, main, tell
from benchmarks.replay import ReplayProposer
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from quire.engine.engine import Engine
from quire.runner.drafts import Computed, Wanted
from quire.runner.proposer import Proposer
from quire.runner.sampler import Sampled, Sampler
from quire.speculate.ngram import NgramProposer
from quire.text.tokenizer import Tokenizer

PROMPT, OUTPUT, DRAFTS, TURNS = 128, 128, 4, 4
SEEDED = SamplingParams(temperature=0.8, seed=1, ignore_eos=True).resolved()
GREEDY = SamplingParams(temperature=0.0, seed=1, ignore_eos=True).resolved()
DRAFTED: dict[str, dict[str, Any]] = {
    "n-grams": {"method": "ngram"},
    "demo-draft": {"method": "draft_model"},
    "demo-eagle": {"method": "eagle"},
    "demo-eagle, trees of 16": {"method": "eagle", "tree_width": 4},
}
"""How the demo model is drafted, self-tuned and always."""
PROMPTS = (
    "def read(self, size=-1):\n",
    "import os\nimport sys\n\nclass Parser:\n    def __init__(self",
    "for i in range(10):\n    ",
    "class TestQueue(unittest.TestCase):\n    def test_put(self):\n",
    "    def __repr__(self):\n        return ",
    "try:\n    import ssl\nexcept ImportError:\n",
    "def main(args=None):\n    parser = argparse.ArgumentParser(",
    '    """Return a list of all the names that',
)


def run(options: Options) -> Result:
    """All parts."""
    headings = "what", "tokens a step", "tokens/s", "of plain", "of the better", "accepted, by position"
    result = Result(headings)
    replay(result, options)
    edit(result, options)
    demo(result, options)
    noise(result, options)
    ngrams(result)
    return result


@dataclass
class Run:
    """Some requests' way through an engine: their tokens, seconds of decoding, and what the engine counted."""

    tokens: dict[int, list[int]]
    seconds: float
    steps: int
    made: int
    by_position: list[float]
    company: int

    @property
    def rate(self) -> float:
        return self.made / self.seconds


def generate(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, count: int) -> Run:
    """All prompts at once; counted is what comes after the first tokens."""
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    first = engine.stats.prompt_tokens  # ids must be new
    for i, prompt in enumerate(prompts):
        engine.add(Request(first + i, list(prompt), params, max_tokens=count))
    before, seconds, steps, made = _counters(engine), 0.0, 0, 0
    while not engine.idle:
        all_decode = all(tokens.values())
        begin = time.perf_counter()
        updates = engine.step()
        if all_decode:
            seconds += time.perf_counter() - begin
            steps += 1
            made += sum(len(update.tokens) for update in updates)
        for update in updates:
            tokens[update.request - first] += update.tokens
    after = _counters(engine)
    verified = after[0] - before[0]
    counts = zip([*before[1], *[0] * len(after[1])], after[1], strict=False)
    return Run(tokens, seconds, steps, made, [(b - a) / verified for a, b in counts] if verified else [], len(prompts))


def _counters(engine: Engine) -> tuple[int, list[int]]:
    return engine.stats.verifications, list(engine.stats.accepted_by_position)


def engine_of(model: str, options: Options, spec: dict[str, Any] | None, proposer: Proposer | None = None) -> Engine:
    config = EngineConfig(
        model=model,
        device="cpu",
        async_scheduling=False,
        threads=options.threads,
        prefix_cache="off",
        speculative_config=spec,
        max_model_len=2048,
        max_num_seqs=8,
    )
    return Engine(config, proposer=proposer)


def all_of(turns: int, runs: Sequence[Callable[[], Run]]) -> list[Run]:
    """All runs of each, taken in turns, every other time backwards."""
    made: list[list[Run]] = [[] for _ in runs]
    for turn in range(turns):
        order = range(len(runs)) if turn % 2 else range(len(runs) - 1, -1, -1)
        for i in order:
            made[i].append(runs[i]())
    return [joined(column) for column in made]


def add(result: Result, what: str, made: Run, plain: Run, always: Run | None = None, **raw: Any) -> None:
    """A row; the tokens must be those of the plain run. With `always`, it is compared with the better of the two."""
    if made.tokens != plain.tokens:
        raise RuntimeError(f"{what}: the tokens differ from those without speculation")
    row = {"tokens_a_step": made.made / made.steps / made.company, "tok_s": made.rate, "plain_tok_s": plain.rate}
    positions = ", ".join(f"{share:.0%}" for share in made.by_position)
    ratio = made.rate / plain.rate
    better = made.rate / max(plain.rate, always.rate) if always else None
    shares = f"{ratio:.2f}", f"{better:.2f}" if better else "-"
    result.add(
        (what, f"{row['tokens_a_step']:.2f}", f"{made.rate:.1f}", *shares, positions or "-"),
        what=what,
        **row,
        ratio=ratio,
        of_better=better,
        by_position=made.by_position,
        **raw,
    )
    tell(f"{what}: {ratio:.2f} times plain, {row['tokens_a_step']:.2f} tokens a step")


def replay(result: Result, options: Options) -> None:
    """Part 1. What is compared is computed with the same weights in the same memory, since speeds differ by that."""
    folder, count = str(checkpoint(options)), 24 if options.quick else OUTPUT
    prompt = random.Random(0).choices(range(500), k=PROMPT)
    for adaptive in (False, True):
        proposer = ReplayProposer([], 0.0, 500)
        spec = {"method": "ngram", "num_speculative_tokens": DRAFTS, "adaptive": adaptive}
        engine = engine_of(folder, options, spec, proposer)
        for name, params in (("greedy", GREEDY), ("temperature 0.8", SEEDED)):
            plain = replace(params, speculate=False)
            proposer.recordings = [[*prompt, *generate(engine, [prompt], plain, count).tokens[0]]]
            for accuracy in (0.8, 0.0) if adaptive else (0.8,):
                proposer.accuracy = accuracy
                runs = [lambda e=engine, p=p: generate(e, [prompt], p, count) for p in (plain, params)]  # type: ignore[misc]
                turns = TURNS if accuracy else 2 * TURNS  # what is looked for there is small
                without, drafted = all_of(1 if options.quick else turns, runs)
                tuned = ", self-tuned" if adaptive else ""
                add(result, f"{DRAFTS} drafts, {name}, a = {accuracy:g}{tuned}", drafted, without)


class Forced:
    """Makes an engine's sampler choose what a text says next, at the cost of its ordinary work."""

    def __init__(self, engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> None:
        self._all = [*prompt, *text]
        runner = engine.executor._runner  # type: ignore[attr-defined]
        self._launch: Callable[..., Any] = runner.sampler._launch
        runner.sampler._launch = self.launch

    def launch(self, logits: Tensor, rows: Sequence[tuple[int, int]], state: Any, ahead: Any, verified: Any) -> Any:
        """`Sampler._launch`, with tokens of the text wherever it has been followed so far."""
        sampled, edits = self._launch(logits, rows, state, ahead, verified)
        assert isinstance(sampled, Sampled)
        for row, (_, position) in enumerate(rows):
            drafts = list(ahead[row]) if ahead else []
            if drafts == self._all[position - len(drafts) : position] and position < len(self._all):
                sampled.tokens[row] = sampled.on_host[row] = self._all[position]
        return sampled, edits


def edit(result: Result, options: Options) -> None:
    """Part 2."""
    folder, tokenizer = str(checkpoint(options)), _demo_tokenizer()
    source = inspect.getsource(textwrap.TextWrapper._wrap_chunks) + inspect.getsource(textwrap.TextWrapper.wrap)
    edited = source.replace("chunks", "pieces").replace("cur_len", "length").replace("indent", "prefix")
    prompt = tokenizer.encode(source + "\n# The same with better names:\n")
    text = tokenizer.encode(edited)[: 40 if options.quick else 500]
    if options.quick:
        prompt, text = [t % 500 for t in prompt], [t % 500 for t in text]
    engine = engine_of(folder, options, {"method": "ngram"})
    Forced(engine, prompt, text)
    both = (replace(GREEDY, speculate=False), GREEDY)
    runs = [lambda e=engine, p=p: generate(e, [prompt], p, len(text)) for p in both]  # type: ignore[misc]
    plain, drafted = all_of(1 if options.quick else 2, runs)
    if plain.tokens[0] != text:
        raise RuntimeError("the engine did not follow the text")
    add(result, "an edit, n-grams", drafted, plain, prompt=len(prompt), output=len(text))


def _demo_tokenizer() -> Tokenizer:
    from quire.models.checkpoint import resolve

    tokenizer = Tokenizer.load(resolve("demo"))
    if tokenizer is None:
        raise RuntimeError("the demo model has no tokenizer")
    return tokenizer


def demo(result: Result, options: Options) -> None:
    """Part 3."""
    tokenizer, count = _demo_tokenizer(), 24 if options.quick else 160
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    specs: dict[str, dict[str, Any] | None] = {"plain": None}
    for name, spec in DRAFTED.items():
        specs |= {name: spec, f"{name}, always": spec | {"adaptive": False}}
    engines = {name: engine_of("demo", options, spec) for name, spec in specs.items()}
    gc.collect()
    gc.freeze()  # as an engine's process does: looking through all of torch now and then takes longer than many steps
    for kind, params in (("greedy", GREEDY), ("temperature 1", SamplingParams(seed=1, ignore_eos=True).resolved())):
        for company in (1, 8):
            groups = [prompts[i : i + company] for i in range(0, len(prompts), company)]
            made: dict[str, list[Run]] = {name: [] for name in engines}
            for turn in range(1 if options.quick else 1 + 2 * TURNS):
                for number, group in enumerate(groups):
                    for name in _from(list(engines), turn + number):
                        run = generate(engines[name], group, params, count)
                        if turn or options.quick:
                            made[name].append(run)
            runs = {name: joined(each) for name, each in made.items()}
            for name, each in runs.items():
                always = runs.get(f"{name}, always")
                add(result, f"demo, {company} at once, {kind}: {name}", each, runs["plain"], always)


def _from(names: Sequence[str], first: int) -> list[str]:
    """All of them, beginning elsewhere each time."""
    first %= len(names)
    return [*names[first:], *names[:first]]


def joined(runs: Sequence[Run]) -> Run:
    """Runs one after the other, as one; acceptance is the mean."""
    longest = max(len(each.by_position) for each in runs)
    padded = [[*each.by_position, *[0.0] * (longest - len(each.by_position))] for each in runs if each.by_position]
    return Run(
        {len(runs) * k + i: tokens for i, each in enumerate(runs) for k, tokens in each.tokens.items()},
        sum(each.seconds for each in runs),
        sum(each.steps for each in runs),
        sum(each.made for each in runs),
        [statistics.mean(column) for column in zip(*padded, strict=True)],
        runs[0].company,
    )


def noise(result: Result, options: Options) -> None:
    """Part 4: the first draft's acceptance, with shared noise and with its own."""
    tokenizer = _demo_tokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    params = SamplingParams(seed=1, ignore_eos=True).resolved()
    for what, own in (("the target's noise", False), ("noise of its own", True)):
        spec = {"method": "draft_model", "adaptive": False, "num_speculative_tokens": 1}
        engine = engine_of("demo", options, spec)
        if own:
            draw_apart(engine.executor._runner.sampler)  # type: ignore[attr-defined]
        made = generate(engine, prompts, params, 24 if options.quick else 160)
        share = made.by_position[0] if made.by_position else 0.0
        result.add(
            (f"demo-draft at temperature 1, drawn with {what}", *["-"] * 4, f"{share:.1%}"),
            what=f"noise: {what}",
            accepted=share,
        )
        tell(f"{what}: {share:.1%} accepted")


def draw_apart(sampler: Sampler) -> None:
    """Makes drafts be drawn with noise that the target does not use."""
    filters_ahead = sampler.filters_ahead

    def apart(*given: Any) -> Any:
        sampler._table.rows["stream"] ^= 0x5555
        try:
            return filters_ahead(*given)
        finally:
            sampler._table.rows["stream"] ^= 0x5555

    sampler.filters_ahead = apart  # type: ignore[method-assign]


def ngrams(result: Result) -> None:
    """Part 4: microseconds of following a token and proposing, in a text where every try finds something."""
    draw = random.Random(0)
    phrases = [draw.choices(range(3000), k=12) for _ in range(400)]
    text = [token for _ in range(3000) for token in draw.choice(phrases)][: 32768 + 2000]
    proposer = NgramProposer(2, 5)
    context: Any = None  # it needs none
    proposer.start(RequestInfo(0, GREEDY, 0, text[:32768]))
    begin = time.perf_counter()
    proposer.propose([Wanted(0, 32768, text[32767], 8)], context)
    build, times = time.perf_counter() - begin, []
    for at in range(32768, len(text)):
        begin = time.perf_counter()
        proposer.follow([Computed(0, at - 1, [text[at - 1]], text[at], [0])], None, context)
        proposer.propose([Wanted(0, at + 1, text[at], 8)], context)
        times.append((time.perf_counter() - begin) * 1e6)
    times.sort()
    median, late = statistics.median(times), times[len(times) * 99 // 100]
    result.add(
        (f"n-grams at 32,768 tokens: {median:.0f} µs a step, {late:.0f} at the 99th percentile", *["-"] * 5),
        what="n-grams",
        median_us=median,
        p99_us=late,
        build_ms=build * 1000,
    )
    tell(f"n-grams: {median:.1f} us median, {late:.1f} at the 99th percentile; index built in {build * 1000:.1f} ms")


if __name__ == "__main__":
    with torch.inference_mode():
        main(run)
