"""Verifies drafts by rejection sampling. (Without it, drafts are accepted while they equal the sampled tokens, see
`drafter.accepted_path`.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops import rejection
from quire.ops.sampling import Filters, noise_keys


class Verified(NamedTuple):
    """Rows of one request that verify drafts by rejection sampling: see `rejection.verify`.

    Attributes:
        first: its first row; there is one row per draft, and one more.
        distributions: [drafts, vocabulary] from which they were sampled; None if they were not sampled.
    """

    first: int
    drafts: list[int]
    distributions: Tensor | None


def verify(logits: Tensor, filters: Filters, state: NDArray[Any], tokens: Tensor, verified: Sequence[Verified]) -> None:
    """Write the result of rejection sampling into `tokens`.

    Args:
        logits: [rows, vocab] fp32, edited.
        state: [rows] of the sampler's table, with the position of each row in `next`.
        tokens: [rows] int64, the sampled tokens.
    """
    accept = noise_keys(state["accept"], state["next"]).tolist()
    resample = noise_keys(state["resample"], state["next"]).tolist()
    for first, drafts, distributions in verified:
        rows = torch.arange(first, first + len(drafts), device=logits.device)
        if bool((tokens[rows] < 0).any()):
            continue  # not finite: drafts count while they equal the sampled tokens, then the request ends
        place = slice(first, first + len(drafts))
        target = rejection.probabilities(logits[rows], filters.of(rows))
        accepted, drawn = rejection.verify(target, drafts, distributions, accept[place], resample[place])
        tokens[rows[:accepted]] = torch.tensor(drafts[:accepted], dtype=torch.int64, device=tokens.device)
        if drawn is not None:
            tokens[first + accepted] = drawn
