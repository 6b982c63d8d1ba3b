"""The activations that a weight has met, and its codes by them, whatever the format: see `models.calibration`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.models.gptq import rounded
from quire.ops.coded import CodedWeight, Scheme

BLOCK = 128
"""Inputs that GPTQ takes at a time where scales are their groups' own."""

Quantize = Callable[[torch.Tensor, torch.Tensor | None], CodedWeight]
"""Given some inputs of a weight, [out, some], and the importance of these, fp32 [some] or None: the nearest codes."""


@dataclass(slots=True)
class Met:
    """What a weight has met: the sum of squares of each input, fp32 [inputs]; if asked for, the sums of products of
    each two, fp32 [inputs, inputs]; and the number of tokens."""

    squares: torch.Tensor
    products: torch.Tensor | None
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Add activations [rows, inputs]."""
        numbers = x.float()
        self.tokens += len(numbers)
        self.squares += numbers.square().sum(0)
        if self.products is not None:
            self.products.addmm_(numbers.T, numbers)

    @property
    def importance(self) -> torch.Tensor | None:
        """The mean square of each input, fp32 [inputs], none of them 0; None if the weight has met nothing."""
        mean = self.squares / max(self.tokens, 1)
        return None if not mean.any() else mean + 1e-6 * mean.mean()


Calibration = dict[str, Met]
"""By the names of weights. Those that share a product share what they have met."""


def fitted(weight: torch.Tensor, scheme: Scheme, met: Met | None, quantize: Quantize) -> CodedWeight:
    """A weight [out, in] with codes whose outputs err little on what it has met.

    Args:
        met: None, or without tokens: inputs count alike. With products of pairs, codes are rounded as GPTQ does.
        quantize: in this scheme.

    Raises:
        CheckpointError: see `quantize`.
    """
    importance = None if met is None else met.importance
    if met is None or importance is None or met.products is None:
        return quantize(weight, importance)
    return rounded(weight, met.products, importance, scheme.block or BLOCK, quantize)
