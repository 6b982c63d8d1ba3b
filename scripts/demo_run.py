"""One training run of the demo model: its state, its evaluation, its checkpoints."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_data import Corpus, Sampler, TrainingError
from demo_model import LossFunction, ModelConfig, Qwen3


@dataclass
class Progression:
    """Where a run stands: saved in checkpoints, told in the model card."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    resumed: int = 0  # how often the run was taken up from a checkpoint
    curve: list[tuple[float, int, float, float]] = field(default_factory=list)  # minutes, tokens, two losses

    @property
    def speed(self) -> float:
        """Training tokens per second, evaluation included."""
        return self.tokens / max(self.seconds, 1e-9)


@torch.no_grad()
def held_out_losses(
    losses: LossFunction, model: nn.Module, stream: np.ndarray, window: int, most_tokens: int = 1 << 62
) -> Tensor:
    """Nats of the held-out tokens, [windows, window], each predicted once from within its own window."""
    count = min((len(stream) - 1) // window, max(1, most_tokens // window))
    rows = max(1, 4096 // window)
    found = []
    for first in range(0, count, rows):
        starts = [min(first + row, count - 1) * window for row in range(rows)]  # one shape: compiled once
        windows = np.stack([stream[start : start + window + 1] for start in starts]).astype(np.int64)
        found.append(losses(model, torch.from_numpy(windows)))
    return torch.cat(found)[:count]


@dataclass
class Run:
    """One training run: everything that a step, an evaluation or an export needs."""

    options: argparse.Namespace
    config: ModelConfig
    model: Qwen3
    losses: LossFunction
    optimizers: list[torch.optim.Optimizer]
    tokenizer: Tokenizer
    sampler: Sampler
    held_out: np.ndarray
    corpus: Corpus
    progression: Progression
    console: Console

    @property
    def share(self) -> float:
        """How much of the budget is spent, 0 to 1: of the steps if they were given, else of the minutes."""
        steps: int | None = self.options.steps
        if steps:
            return self.progression.step / steps
        minutes: float = self.options.minutes
        return self.progression.seconds / (60 * minutes)

    def evaluate(self, training_loss: float) -> float:
        """Note a point of the curve; the held-out loss is estimated on at most 32,768 tokens."""
        state = self.progression
        window = self.options.window
        loss = held_out_losses(self.losses, self.model, self.held_out, window, 32768).mean().item()
        state.curve.append((state.seconds / 60, state.tokens, training_loss, loss))
        self.console.print(
            f"{state.seconds / 60:6.1f} min  step {state.step:5d}  {state.tokens / 1e6:6.2f} M tokens  "
            f"loss {training_loss:.3f}  held-out {loss:.3f}  {state.speed:,.0f} tokens/s",
            soft_wrap=True,
        )
        return loss


def save_checkpoint(run: Run) -> None:
    """Keep weights, optimizer states and progress, so that the same command resumes the run."""
    if not run.options.checkpoint:
        return
    state = {
        "model": run.model.state_dict(),
        "optimizers": [o.state_dict() for o in run.optimizers],
        "progression": asdict(run.progression),
        "seed": run.options.seed,
    }
    partial = run.options.checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, run.options.checkpoint)


def load_checkpoint(run: Run, path: Path) -> None:
    """Take up a run where `save_checkpoint` left it. Raises TrainingError if the seed differs."""
    state = torch.load(path, weights_only=True)
    if state["seed"] != run.options.seed:
        raise TrainingError(f"{path} was trained with --seed {state['seed']}, not {run.options.seed}")
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.progression = Progression(**state["progression"])
    run.progression.resumed += 1
