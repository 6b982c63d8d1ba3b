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
    """Log-probabilities that the device may still be computing."""

    _scores: TokenScores
    _tops: NDArray[np.int64]

    def finish(self) -> list[TokenLogprobs]:
        """One entry per row; to be called when the device is done (`Device.mark`)."""
        scores = self._scores
        table = zip(
            scores.ids.tolist(), scores.values.tolist(), scores.ranks.tolist(), self._tops.tolist(), strict=True
        )
        return [_token_logprobs(ids, values, rank, top) for ids, values, rank, top in table]


def launch_scores(
    kernels: Kernels, device: Device, logits: Tensor, rows: Tensor, tokens: Tensor, tops: NDArray[np.int64]
) -> Scored:
    """Queue the scores of some rows of logits: each row's token, then its `tops` most likely ones."""
    scores = kernels.token_scores(logits, rows, tokens, int(tops.max(initial=0)))
    return Scored(TokenScores(*device.download(*scores)), tops)


def launch_prompt_scores(kernels: Kernels, device: Device, logits: Tensor, targets: list[int], top: int) -> Scored:
    """Queue the log-probabilities of given tokens, for prompts.

    Args:
        logits: [rows, vocab] fp32, contiguous; not changed.
        targets: the token after each row.
        top: number of most likely tokens to report besides it.

    Returns:
        One entry per row. A row whose logits are not finite has only its target, with the value NaN.
    """
    rows, ids = device.upload(np.arange(len(targets)), np.array(targets, np.int64))
    return launch_scores(kernels, device, logits, rows, ids, np.full(len(targets), top))


def _token_logprobs(ids: list[int], values: list[float], rank: int, top: int) -> TokenLogprobs:
    """`top`: number of most likely tokens to report, limited by the vocabulary; none for a row that is not finite."""
    count = 0 if math.isnan(values[0]) else min(top, len(ids) - 1)
    return TokenLogprobs(ids[: 1 + count], values[: 1 + count], [rank, *range(1, 1 + count)])
