"""Train Quire's embedded `demo` model from scratch on the Python standard library's own source text.

The result is an ordinary Hugging Face folder: a Qwen3-architecture model of about four million
parameters, its byte-level BPE tokenizer, a chat template and a model card. Everything comes from the
interpreter that runs this script; nothing is downloaded.

    python scripts/train_demo.py --minutes 45                # train, export, write the card
    python scripts/train_demo.py --sample "def read(self"    # complete a prompt with the exported model

The learning rate follows the elapsed share of `--minutes`, so a run ends well on any machine; `--steps`
fixes the number of steps instead, which makes two runs on one machine the same. On a machine that does
other work too, set OMP_WAIT_POLICY=passive: threads that spin while they wait slow each other several times.
"""

# The parts lie beside this file: demo_data (texts, tokenizer, windows), demo_model (network, loss, generator),
# demo_run (state of a run, checkpoints), demo_export (model folder, measurements, card).

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor, nn

from demo_data import Sampler, TrainingError, chat_texts, encode, read_corpus, standard_library, train_tokenizer
from demo_export import assess, export, model_card, print_summary, replace_file
from demo_model import LossFunction, ModelConfig, Qwen3, generate, load_model, parameter_count, token_losses
from demo_run import Progression, Run, load_checkpoint, save_checkpoint

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "src" / "quire" / "assets" / "demo"


# -------------------------------------------------------------------------------------------- training


def make_optimizers(model: nn.Module, rate: float, muon_rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embeddings = [p for n, p in model.named_parameters() if "embed" in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    adamw_groups = [{"params": embeddings, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimizers = [
        torch.optim.Muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(adamw_groups, lr=rate, betas=(0.9, 0.95), fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], step: int, share: float) -> None:
    """Linear warm-up over 50 steps, then a cosine over the run's elapsed `share` down to nothing."""
    scale = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale


def training_step(
    losses: LossFunction, model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Tensor
) -> float:
    """One update; returns the batch's mean loss in nats a token."""
    loss = losses(model, batch).mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def prepare(options: argparse.Namespace, console: Console) -> Run:
    """Read the sources, train the tokenizer, build the model, and take up a checkpoint where one is given."""
    torch.manual_seed(options.seed)
    corpus = read_corpus(standard_library(), options.seed, options.held_out)
    tokenizer = train_tokenizer(corpus.library + corpus.tests[::4], ModelConfig.vocab_size)
    chats = chat_texts(corpus.library, options.seed)
    streams = tuple(encode(tokenizer, texts) for texts in (corpus.library, corpus.tests, chats))
    sampler = Sampler(
        streams, (0.65, 0.23, 0.12), options.seed, options.batch_tokens, options.window, options.long_window
    )
    config = ModelConfig()
    model = Qwen3(config)
    losses = torch.compile(token_losses, dynamic=False) if options.compile else token_losses
    run = Run(
        options=options,
        config=config,
        model=model,
        losses=losses,
        optimizers=make_optimizers(model, options.rate, options.muon_rate),
        tokenizer=tokenizer,
        sampler=sampler,
        held_out=encode(tokenizer, corpus.held_out),
        corpus=corpus,
        progression=Progression(),
        console=console,
    )
    console.print(
        f"library {len(streams[0]):,} tokens, tests {len(streams[1]):,}, chat {len(streams[2]):,}, "
        f"held out {len(run.held_out):,}; {parameter_count(model):,} parameters",
        soft_wrap=True,
    )
    if options.checkpoint and options.checkpoint.exists():
        load_checkpoint(run, options.checkpoint)
        console.print(f"resumed from {options.checkpoint} at step {run.progression.step}")
    return run


def train(run: Run) -> None:
    """Train until the budget is spent, with evaluations, snapshots and checkpoints on the way."""
    options, state = run.options, run.progression
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    average, held_out, last = math.nan, math.nan, time.monotonic()
    next_evaluation, next_export = state.seconds + 60, state.seconds + 60 * min(4, options.export_minutes)
    with Progress(*columns, console=run.console) as progress:
        task = progress.add_task("training", total=1.0)
        while run.share < 1:
            set_rate(run.optimizers, state.step, run.share)
            batch = run.sampler.batch(state.step)
            loss = training_step(run.losses, run.model, run.optimizers, batch)
            average = loss if math.isnan(average) else 0.98 * average + 0.02 * loss
            state.step += 1
            state.tokens += batch.shape[0] * (batch.shape[1] - 1)
            now = time.monotonic()
            state.seconds, last = state.seconds + now - last, now
            if state.seconds >= next_evaluation:
                held_out, next_evaluation = run.evaluate(average), state.seconds + 120
            if state.seconds >= next_export:
                export(run)
                save_checkpoint(run)
                next_export = state.seconds + 60 * options.export_minutes
            description = f"loss {average:.3f}  held-out {held_out:.3f}  {state.speed:,.0f} tokens/s"
            progress.update(task, completed=run.share, description=description)
    run.evaluate(average)


# ---------------------------------------------------------------------------------------- command line


def parse_arguments() -> argparse.Namespace:
    """The options, checked. Exits with a message, as argparse does, if they make no sense together."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--output", type=Path, default=DEFAULT_OUTPUT, help="model folder to write (default: the package's)")
    add("--minutes", type=float, default=55.0, help="training time (default: %(default)s)")
    add("--steps", type=int, help="number of steps, instead of --minutes")
    add("--seed", type=int, default=0, help="of weights, split and data order (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all)")
    add("--compile", action="store_true", help="use torch.compile: a third faster, needs a C++ compiler")
    add("--checkpoint", type=Path, help="file that keeps the run's state; resumes from it if it exists")
    add("--export-minutes", type=float, default=8.0, help="time between snapshots (default: %(default)s)")
    add("--held-out", type=float, default=0.04, help="share of library files held out (default: %(default)s)")
    add("--batch-tokens", type=int, default=4096, help="tokens in a step (default: %(default)s)")
    add("--window", type=int, default=512, help="tokens in a training window (default: %(default)s)")
    add("--long-window", type=int, default=2048, help="the same, every fourth step (default: %(default)s)")
    add("--rate", type=float, default=3e-3, help="AdamW's peak learning rate (default: %(default)s)")
    add("--muon-rate", type=float, default=0.02, help="Muon's peak learning rate (default: %(default)s)")
    add("--sample", metavar="PROMPT", help="complete a prompt with the model in --output, and train nothing")
    options = parser.parse_args()
    for name in ("minutes", "steps", "threads", "export_minutes", "window", "rate", "muon_rate"):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {value}")
    if options.seed < 0:
        parser.error(f"--seed must be 0 or more, not {options.seed}")
    if not 0 < options.held_out < 0.5:
        parser.error(f"--held-out must be between 0 and 0.5, not {options.held_out}")
    if not options.window <= options.long_window <= ModelConfig.max_position_embeddings:
        parser.error(f"--long-window must be from --window to {ModelConfig.max_position_embeddings}")
    if options.batch_tokens < options.long_window:
        parser.error("--batch-tokens must hold at least one --long-window")
    return options


def check_environment(options: argparse.Namespace) -> None:
    """Raise TrainingError now for what would otherwise fail minutes into the run."""
    if not hasattr(torch.optim, "Muon"):
        raise TrainingError(f"torch.optim.Muon needs torch 2.9 or later, and this is {torch.__version__}")
    if options.compile and not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        raise TrainingError("--compile needs a C++ compiler, and there is none on the path")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "config.json.partial").touch()
    except OSError as error:
        raise TrainingError(f"cannot write to {options.output}: {error.strerror}") from error


def print_samples(options: argparse.Namespace, console: Console) -> None:
    """`--sample`: one greedy and three drawn completions of the given prompt."""
    model, tokenizer = load_model(options.output)
    prompt = options.sample.encode().decode("unicode_escape") if "\\" in options.sample else options.sample
    for temperature, seed in ((0.0, 0), *((0.7, options.seed + draw) for draw in range(3))):
        completion = generate(model, tokenizer, prompt, 128, temperature, seed)
        console.rule("greedy" if temperature == 0 else f"temperature {temperature}, seed {seed}")
        console.print(Text.assemble((prompt, "dim"), completion), soft_wrap=True)


def main() -> int:
    """Run the command line; 0 on success, 2 for a condition the user can mend, 130 when interrupted."""
    options, console = parse_arguments(), Console()
    torch.set_num_threads(options.threads)
    try:
        if options.sample is not None:
            print_samples(options, console)
            return 0
        check_environment(options)
        run = prepare(options, console)
        try:
            train(run)
        finally:
            save_checkpoint(run)
        result = assess(run)
        export(run)
        replace_file(options.output / "README.md", model_card(run, result))
        print_summary(run, result)
    except TrainingError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(
            "interrupted" + (f"; the same command resumes from {options.checkpoint}" if options.checkpoint else "")
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
