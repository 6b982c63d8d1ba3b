"""What becomes of a prompt's hidden states where no tokens are made of them: see `core/pooling.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.core.pooling import MOST, UNIT
from quire.ops import Kernels
from quire.runner.device import Device
from quire.runner.scores import Scored, launch_scores

ROWS = 64
"""So many rows are summed at once: their sums take eight bytes a number."""

TOO_LARGE = f"the model's hidden states are larger than {MOST}, which is more than pooling counts"
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


class Pooled(Protocol):
    """What a span's rows are pooled to, on which the device may still be working."""

    def finish(self) -> tuple[list[float] | None, str | None]:
        """The numbers, or why there are none; to be called once the device has come past the launch."""
        ...


class _Sum:
    def __init__(self, total: Tensor, largest: Tensor) -> None:
        self._total, self._largest = total, largest

    def finish(self) -> tuple[list[float] | None, str | None]:
        if not self._largest.item() <= MOST:
            return None, TOO_LARGE
        return self._total.tolist(), None


class _Labels:
    def __init__(self, scored: Scored) -> None:
        self._scored = scored

    def finish(self) -> tuple[list[float] | None, str | None]:
        values = [entry.values[0] for entry in self._scored.finish()]
        return (None, NOT_FINITE) if any(map(math.isnan, values)) else (values, None)


def launch_sum(device: Device, hidden: Tensor) -> Pooled:
    """Queues the sum of hidden states [rows, hidden], in parts of `UNIT`."""
    parts = [(part.double() * UNIT).round_().to(torch.int64).sum(0) for part in torch.split(hidden, ROWS)]
    total, largest = device.download(torch.stack(parts).sum(0), hidden.abs().max().float())
    return _Sum(total, largest)


def launch_labels(kernels: Kernels, device: Device, logits: Tensor, labels: Sequence[int]) -> Pooled:
    """Queues the log-probabilities of some tokens in one row of logits [1, vocab]."""
    none = np.zeros(len(labels), np.int64)
    rows, ids = device.upload(none, np.array(labels, np.int64))
    return _Labels(launch_scores(kernels, device, logits, rows, ids, none))
