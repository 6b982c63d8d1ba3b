"""Train what drafts for the embedded `demo` model: `demo-draft`, a smaller model, or `demo-eagle`, an EAGLE head.

Either learns the demo model's own distribution over the next tokens of the text that the demo model was trained on,
the Python standard library; the demo model runs beside it, and nothing is recorded or downloaded.

    python scripts/train_demo_drafters.py draft --minutes 14      # train, export, write the card
    python scripts/train_demo_drafters.py eagle --minutes 14

The learning rate follows the elapsed share of `--minutes`; `--steps` fixes the number of steps instead.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_data import Sampler, TrainingError, chat_texts, encode, read_corpus, standard_library
from demo_drafters import DraftModel, EagleHead, acceptance, export, teach
from demo_export import replace_file
from demo_model import Qwen3, load_model, parameter_count
from demo_run import Progression
from train_demo import make_optimizers, set_rate

ASSETS = Path(__file__).resolve().parents[1] / "src" / "quire" / "assets"
CORPUS_SEED, HELD_OUT = 0, 0.04
"""Those of the demo model: what it never saw, its drafters do not see either."""
HELD_OUT_TOKENS = 32768
REPORT_SECONDS, EXPORT_SECONDS = 60, 240
CLASSES: dict[str, type[DraftModel] | type[EagleHead]] = {"draft": DraftModel, "eagle": EagleHead}

CARD = """\
---
license: other
license_name: psf-2.0
license_link: ../demo/LICENSE.PSF
language: [en]
tags: [code, python, speculative-decoding]
---

# {name}

{what}

Trained by `scripts/train_demo_drafters.py` on the text that `demo` was trained on, the source of CPython
{python}'s standard library, whose licence stands in `demo`'s folder. The aim at each token is `demo`'s own
distribution, so nothing but `demo` and that text went into it.

{parameters:,} parameters in bf16. Seed {seed}; {tokens:,} tokens in {steps:,} steps and
{minutes:.0f} minutes on {threads} CPU thread(s). PyTorch {torch}.

## How often its drafts are right

On {held_out:,} tokens of library files that neither was trained on, at every position, with all before it known:

| draft | greedy | temperature 1 |
|--:|--:|--:|
{rows}

"Greedy" is how often its likeliest token is `demo`'s likeliest; "temperature 1" is the probability that the two
distributions share, with which the classic rule accepts.
{context}

To train it again:

    {command}

Under `--minutes` the number of steps follows the machine's speed, so the weights differ from run to run.
"""
WHAT = {
    "draft": "A Qwen3-architecture model for speculative decoding beside Quire's embedded `demo` model, whose\n"
    "tokenizer it has: it guesses tokens, and `demo` verifies them. On its own it is a worse `demo`.",
    "eagle": "An EAGLE head (https://arxiv.org/abs/2401.15077) for Quire's embedded `demo` model, in the format of\n"
    "the published heads: one Llama layer that continues `demo`'s last hidden states. It shares `demo`'s embedding\n"
    "and output head, so it is of no use without it.",
}
CONTEXT = {
    "draft": "A later draft is right about as often, if those before it are.",
    "eagle": "The second draft is made from the first one's output in place of `demo`'s hidden state.",
}


@dataclass
class Run:
    """One training run.

    Attributes:
        held_out: windows [rows, tokens] of files that nothing is trained on.
    """

    options: argparse.Namespace
    demo: Qwen3
    drafter: DraftModel | EagleHead
    optimizers: list[torch.optim.Optimizer]
    sampler: Sampler
    held_out: Tensor
    progression: Progression

    @property
    def share(self) -> float:
        """How much of the budget is spent, 0 to 1."""
        if self.options.steps:
            return self.progression.step / int(self.options.steps)
        return self.progression.seconds / (60 * float(self.options.minutes))

    @torch.no_grad()
    def acceptances(self) -> list[tuple[float, float]]:
        """Of each draft in a row, on the held-out text: see `demo_drafters.acceptance`."""
        found = []
        for windows in torch.split(self.held_out, 4):
            drafts = self.drafter.drafts(windows, teach(self.demo, windows))
            found.append([acceptance(logits, taught) for logits, taught in drafts])
        return [(float(greedy), float(shared)) for greedy, shared in np.mean(found, axis=0)]


def prepare(options: argparse.Namespace) -> Run:
    """Read the texts, build the drafter, and take up a checkpoint where one is given."""
    torch.manual_seed(options.seed)
    demo, tokenizer = load_model(options.demo)
    demo.requires_grad_(False)
    corpus = read_corpus(standard_library(), CORPUS_SEED, HELD_OUT)
    chats = chat_texts(corpus.library, CORPUS_SEED)
    streams = tuple(encode(tokenizer, texts) for texts in (corpus.library, corpus.tests, chats))
    drafter = CLASSES[options.kind](demo)
    run = Run(
        options=options,
        demo=demo,
        drafter=drafter,
        optimizers=make_optimizers(drafter, options.rate, options.muon_rate),
        sampler=Sampler(streams, (0.65, 0.23, 0.12), options.seed, 2048, 512, 2048),
        held_out=held_out_windows(tokenizer, corpus.held_out),
        progression=Progression(),
    )
    if options.checkpoint and options.checkpoint.exists():
        load_checkpoint(run)
    return run


def held_out_windows(tokenizer: Tokenizer, texts: list[str], window: int = 512) -> Tensor:
    """The beginning of the held-out text as [rows, window]."""
    stream = encode(tokenizer, texts)[:HELD_OUT_TOKENS]
    return torch.from_numpy(stream[: len(stream) // window * window].astype(np.int64)).view(-1, window)


def train(run: Run) -> None:
    """Train until the budget is spent; an export and a checkpoint now and then."""
    state, average, last = run.progression, math.nan, time.monotonic()
    next_report, next_export = state.seconds + 30, state.seconds + 60
    while run.share < 1:
        set_rate(run.optimizers, state.step, run.share)
        windows = run.sampler.batch(state.step)[:, :-1]
        loss = run.drafter.loss(windows, teach(run.demo, windows))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(run.drafter.parameters(), 1.0)
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        state.step, state.tokens = state.step + 1, state.tokens + windows.numel()
        now = time.monotonic()
        state.seconds, last = state.seconds + now - last, now
        if state.seconds >= next_report:
            report(run, average)
            next_report = state.seconds + REPORT_SECONDS
        if state.seconds >= next_export:
            export(run.drafter, run.options.output, run.options.demo)
            save_checkpoint(run)
            next_export = state.seconds + EXPORT_SECONDS
    if not math.isnan(average):
        report(run, average)


def report(run: Run, loss: float) -> None:
    """A line on how it goes."""
    state = run.progression
    found = ", ".join(f"{greedy:.3f} / {shared:.3f}" for greedy, shared in run.acceptances())
    print(
        f"{state.seconds / 60:5.1f} min  step {state.step:5d}  {state.tokens / 1e6:5.2f} M tokens  loss {loss:.3f}  "
        f"accepted (greedy / temperature 1): {found}",
        flush=True,
    )


def save_checkpoint(run: Run) -> None:
    """Keep weights, optimizer states and progress, so that the same command resumes the run."""
    path: Path | None = run.options.checkpoint
    if path is None:
        return
    state = {
        "drafter": run.drafter.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "progression": asdict(run.progression),
        "kind": run.options.kind,
        "seed": run.options.seed,
    }
    torch.save(state, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def load_checkpoint(run: Run) -> None:
    """Take up a run where `save_checkpoint` left it. Raises TrainingError if it is another run's."""
    state = torch.load(run.options.checkpoint, weights_only=True)
    for name in ("kind", "seed"):
        if state[name] != getattr(run.options, name):
            wanted = getattr(run.options, name)
            raise TrainingError(f"{run.options.checkpoint} was trained with {name} {state[name]!r}, not {wanted!r}")
    run.drafter.load_state_dict(state["drafter"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.progression = Progression(**state["progression"])
    run.progression.resumed += 1


def model_card(run: Run) -> str:
    """The card's text, with what the weights as exported are worth."""
    options, state, kind = run.options, run.progression, run.options.kind
    with torch.no_grad():
        for parameter in run.drafter.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    rows = [f"| {i} | {greedy:.3f} | {shared:.3f} |" for i, (greedy, shared) in enumerate(run.acceptances(), 1)]
    budget = f"--steps {options.steps}" if options.steps else f"--minutes {options.minutes:g}"
    return CARD.format(
        name=f"demo-{kind}",
        what=WHAT[kind],
        python=sys.version.split()[0],
        parameters=parameter_count(run.drafter),
        seed=options.seed,
        tokens=state.tokens,
        steps=state.step,
        minutes=state.seconds / 60,
        threads=options.threads,
        torch=torch.__version__,
        held_out=run.held_out.numel(),
        rows="\n".join(rows),
        context=CONTEXT[kind],
        command=f"python scripts/train_demo_drafters.py {kind} --seed {options.seed} {budget} "
        f"--threads {options.threads}",
    )


def parse_arguments() -> argparse.Namespace:
    """The options, checked. Exits with a message, as argparse does, where a value makes no sense."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("kind", choices=sorted(CLASSES), help="which of the two")
    add("--output", type=Path, help="folder to write (default: the package's)")
    add("--demo", type=Path, default=ASSETS / "demo", help="the model to draft for (default: the package's)")
    add("--minutes", type=float, default=14.0, help="training time (default: %(default)s)")
    add("--steps", type=int, help="number of steps, instead of --minutes")
    add("--seed", type=int, default=0, help="of weights and data order (default: %(default)s)")
    add("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    add("--checkpoint", type=Path, help="file that keeps the run's state; resumes from it if it exists")
    add("--rate", type=float, default=3e-3, help="AdamW's peak learning rate (default: %(default)s)")
    add("--muon-rate", type=float, default=0.02, help="Muon's peak learning rate (default: %(default)s)")
    options = parser.parse_args()
    for name in ("minutes", "steps", "threads", "rate", "muon_rate"):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {value}")
    options.output = options.output or ASSETS / f"demo-{options.kind}"
    return options


def main() -> int:
    """Run the command line; 0 on success, 2 for a condition the user can mend, 130 when interrupted."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    try:
        run = prepare(options)
        print(f"{parameter_count(run.drafter):,} parameters", flush=True)
        try:
            train(run)
        finally:
            save_checkpoint(run)
        export(run.drafter, options.output, options.demo)
        replace_file(options.output / "README.md", model_card(run))
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
