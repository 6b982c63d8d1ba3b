"""How long a step may run without a sign of life, so that a slow machine is not taken for a hanging engine."""

from __future__ import annotations

from quire.core.step import StepPlan
from quire.models.model import Model

SLOWEST = {False: 1e9, True: 1e12}
"""Floating-point operations per second of the slowest machine, without and with a GPU, while it does other work, too.
The plain kernels on one busy core reach ten times as many, and so does a small GPU."""

COMPILING_SECONDS = 120.0
"""GPU kernels are compiled when they are first needed, which may be in any step, on a slow host."""


class Patience:
    """Estimates the time between two signs of life: a layer of a step, or the whole step on an asynchronous device.

    Args:
        asynchronous: the device computes a step while the host, which updates the pulse, waits.
    """

    def __init__(self, model: Model, asynchronous: bool) -> None:
        layer, layers = model.config.layer, max(1, model.num_layers)
        between = 1 if asynchronous else layers
        self._of_token = 2 * model.active_parameters / between
        self._of_pair = 2 * layer.num_heads * model.attention_width * layers / between  # a token and one that it sees
        self._of_row = 2 * layer.hidden_size * model.vocab_size  # the head is one operation, without a sign of life
        self._speed = SLOWEST[asynchronous]
        self._always = COMPILING_SECONDS if asynchronous else 0.0

    def seconds(self, plan: StepPlan) -> float:
        """Seconds that this step may take without a sign of life, in addition to what every process is allowed."""
        operations = 0.0
        for span in plan.spans:
            length, rows = len(span.tokens), span.num_sampled + len(span.targets)
            operations += length * (self._of_token + self._of_pair * (span.start + length)) + rows * self._of_row
        return self._always + operations / self._speed
