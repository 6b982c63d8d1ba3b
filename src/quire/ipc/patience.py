"""How long an engine's pulse may stand still in an honest step: what tells a slow machine from a wedged engine."""

from __future__ import annotations

from quire.core.step import StepPlan
from quire.models.model import Model

SLOWEST = {False: 1e9, True: 1e12}
"""Floating-point operations a second that the slowest machine does, without and with a device of its own, while others
keep it busy too. The plain kernels on one busy core do ten times as many, and a small GPU does."""

COMPILING_SECONDS = 120.0
"""A device's kernels are compiled when they are needed first, which may be in any step, on a slow host."""


class Patience:
    """Counts what lies between two signs of life: a layer of a step, or all of it where a device computes by itself.

    Args:
        asynchronous: the device works while the host, which beats the pulse, goes on and waits.
    """

    def __init__(self, model: Model, asynchronous: bool) -> None:
        layer, layers = model.config.layer, max(1, model.num_layers)
        between = 1 if asynchronous else layers
        self._of_token = 2 * model.active_parameters / between
        self._of_pair = 2 * layer.num_heads * model.attention_width * layers / between  # a token and one that it sees
        self._of_row = 2 * layer.hidden_size * model.vocab_size  # the head has no sign of life in it
        self._speed = SLOWEST[asynchronous]
        self._always = COMPILING_SECONDS if asynchronous else 0.0

    def seconds(self, plan: StepPlan) -> float:
        """How long this step's pulse may stand still, beside what any process is given."""
        operations = 0.0
        for span in plan.spans:
            length, rows = len(span.tokens), span.num_sampled + len(span.targets)
            operations += length * (self._of_token + self._of_pair * (span.start + length)) + rows * self._of_row
        return self._always + operations / self._speed
