"""Sampling on the device: edits, filters, noise, and log-probabilities."""

from __future__ import annotations

import torch

from quire.ops.logit_edits import Edits
from quire.ops.sampling import Filters, TokenScores


def edit_logits(logits: torch.Tensor, edits: Edits) -> torch.Tensor:
    """See `Kernels.edit_logits`."""
    raise NotImplementedError


def sample(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """See `Kernels.sample`."""
    raise NotImplementedError


def token_scores(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, count: int) -> TokenScores:
    """See `Kernels.token_scores`."""
    raise NotImplementedError
