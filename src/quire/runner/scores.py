"""Log-probabilities of the raw logits: of sampled tokens, and of prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import TokenLogprobs
from quire.ops import Kernels
from quire.ops.sampling import TokenScores
from quire.runner.device import Device


@dataclass(slots=True)
class Scored:
    """Log-probabilities that the device may still be working on."""

    _scores: TokenScores
    _tops: NDArray[np.int64]

    def finish(self) -> list[TokenLogprobs]:
        """One entry a row; to be called once the device has come past the launch (`Device.mark`)."""
        scores = self._scores
        table = zip(
            scores.ids.tolist(), scores.values.tolist(), scores.ranks.tolist(), self._tops.tolist(), strict=True
        )
        return [_token_logprobs(ids, values, rank, top) for ids, values, rank, top in table]


def launch_scores(
    kernels: Kernels, device: Device, logits: Tensor, rows: Tensor, tokens: Tensor, tops: NDArray[np.int64]
) -> Scored:
    """Queues the scores of some rows of logits: each row's token, then its best ones, as many as `tops` says."""
    scores = kernels.token_scores(logits, rows, tokens, int(tops.max(initial=0)))
    return Scored(TokenScores(*device.download(*scores)), tops)


def launch_prompt_scores(kernels: Kernels, device: Device, logits: Tensor, targets: list[int], top: int) -> Scored:
    """Queues the log-probabilities of given tokens, for prompts.

    Args:
        logits: [rows, vocab] fp32, contiguous; not changed.
        targets: the token that follows each row's.
        top: how many of the best tokens to report beside it.

    Returns:
        What will have one entry a row. A row whose logits are not finite has NaN as the value of its target, alone.
    """
    rows, ids = device.upload(np.arange(len(targets)), np.array(targets, np.int64))
    return launch_scores(kernels, device, logits, rows, ids, np.full(len(targets), top))


def _token_logprobs(ids: list[int], values: list[float], rank: int, top: int) -> TokenLogprobs:
    """`top` is how many of the best to report, fewer where the vocabulary ends, and none for a row not finite."""
    count = 0 if math.isnan(values[0]) else min(top, len(ids) - 1)
    return TokenLogprobs(ids[: 1 + count], values[: 1 + count], [rank, *range(1, 1 + count)])
