"""Pools a prompt's hidden states: see `core/pooling.py`."""

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

ROWS, DEVICE_ROWS = 64, 512
"""Number of rows that are summed at once, which takes eight bytes per number; on a GPU, where each part costs launches,
more."""

TOO_LARGE = f"the model's hidden states are larger than {MOST}, which is more than pooling counts"
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


class Pooled(Protocol):
    """The pooled rows of a span, which the device may still be computing."""

    def finish(self) -> tuple[list[float] | None, str | None]:
        """The numbers, or an error; to be called when the device is done."""
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
    """Queue the sum of hidden states [rows, hidden], as multiples of 1 / `UNIT`."""
    rows = ROWS if hidden.device.type == "cpu" else DEVICE_ROWS
    parts = [(part.double() * UNIT).round_().to(torch.int64).sum(0) for part in torch.split(hidden, rows)]
    total, largest = device.download(torch.stack(parts).sum(0), hidden.abs().max().float())
    return _Sum(total, largest)


def launch_labels(kernels: Kernels, device: Device, logits: Tensor, labels: Sequence[int]) -> Pooled:
    """Queue the log-probabilities of some tokens in one row of logits [1, vocab]."""
    none = np.zeros(len(labels), np.int64)
    rows, ids = device.upload(none, np.array(labels, np.int64))
    return _Labels(launch_scores(kernels, device, logits, rows, ids, none))
