"""Head and sampling of a step of decodes, as work that `Graphs` can record.

Launching their few kernels one by one, with a tensor for each parameter, takes the host longer than the layers of a
small model, which are one replay. Recorded is what most requests ask for: temperature and min-p. Rows with edits, top-k
or top-p, or log-probabilities are sampled by `Sampler.launch`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.models.model import Model
from quire.ops.sampling import Filters

TEMPERATURE, LOG_MIN_P, KEYS, ROWS = range(4)
"""Rows of the input [4, width] of 64-bit numbers; the first two have 32-bit ones, one after the other."""


def described(count: int, state: NDArray[Any], keys: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """How to sample the first of `count` rows; those of padding are greedy.

    Args:
        state: rows of `SamplingTable.rows`, one for each request.
        keys: [requests], see `Filters`.
        rows: [requests], of the block tables.
    """
    sent = np.zeros((4, _width(count)), np.int64)
    sent[TEMPERATURE].view(np.float32)[: len(rows)] = state["temperature"]
    sent[LOG_MIN_P].view(np.float32)[: len(rows)] = state["log_min_p"]
    sent[KEYS, : len(rows)], sent[ROWS, : len(rows)] = keys, rows
    return sent.reshape(-1).view(np.int32)


def sample(model: Model, inputs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token for each row of hidden states.

    Args:
        inputs: as from `described`.
        hidden: [requests, hidden].

    Returns:
        The tokens and `rows`, both [requests] int64.
    """
    count = len(hidden)
    read = inputs.view(torch.int64).view(4, _width(count))
    temperature, log_min_p = (read[row].view(torch.float32)[:count] for row in (TEMPERATURE, LOG_MIN_P))
    top_k = torch.full((count,), model.vocab_size, dtype=torch.int64, device=hidden.device)
    top_p = torch.full((count,), math.inf, dtype=torch.float64, device=hidden.device)
    filters = Filters(temperature, log_min_p, top_k, top_p, read[KEYS, :count], some_top_k=False, some_top_p=False)
    return model.kernels.sample(model.logits(hidden), filters), read[ROWS, :count]


def _width(count: int) -> int:
    """So that each row of the input is aligned to 16 bytes, for which kernels are compiled."""
    return count + count % 2
