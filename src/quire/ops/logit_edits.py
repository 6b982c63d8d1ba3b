"""What changes logits before a token is sampled: penalties, bias and masks, of all rows of a step at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class Lists:
    """Token ids, with a number each, for n rows: those of row i stand from `starts[i]` to `starts[i + 1]`.

    Attributes:
        starts: [n + 1] int64.
        ids: int64. Different from each other within a row.
        values: fp32, one an id; empty where the kind of list has none.
    """

    starts: Tensor
    ids: Tensor
    values: Tensor

    @classmethod
    def of(
        cls,
        ids: Sequence[NDArray[np.int64]],
        values: Sequence[NDArray[np.float32]] = (),
        device: torch.device | str = "cpu",
    ) -> Lists:
        """One list for each entry of `ids`, with `values` in parallel or without."""

        def joined(parts: Sequence[NDArray[Any]], dtype: type) -> Tensor:
            whole = np.concatenate(parts) if len(parts) else np.zeros(0, dtype)
            return torch.from_numpy(whole).to(device)

        starts = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(part) for part in ids], out=starts[1:])
        return cls(torch.from_numpy(starts).to(device), joined(ids, np.int64), joined(values, np.float32))

    def places(self, rows: Tensor, vocab: int) -> Tensor:
        """Where each entry lies in flattened logits [.., vocab]: [entries] int64."""
        return self.spread(rows * vocab) + self.ids

    def spread(self, values: Tensor) -> Tensor:
        """values [n] for each entry of a row: [entries]."""
        return values.repeat_interleave(self.starts.diff())


@dataclass(slots=True)
class Edits:
    """Edits of n rows of logits, in the order in which they act.

    Attributes:
        rows: [n] int64, which rows; all different.
        repetition, frequency, presence: [n] fp32, the penalties.
        seen: the tokens of prompt and output, and how often each stands in the output.
        bias: added.
        allowed: where a row has some, all others are masked.
        banned: masked.
    """

    rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    seen: Lists
    bias: Lists
    allowed: Lists
    banned: Lists


def edit_logits(logits: Tensor, edits: Edits) -> Tensor:
    """Edits logits [.., vocab] fp32 in place.

    Returns:
        [n] bool: whether the row was finite before (no NaN, no infinity, not all masked), since a mask can hide that.
    """
    vocab, flat = logits.shape[1], logits.view(-1)
    finite = torch.isfinite(logits[edits.rows].amax(-1))
    _penalize(flat, edits, vocab)
    flat[edits.bias.places(edits.rows, vocab)] += edits.bias.values
    places = edits.allowed.places(edits.rows, vocab)
    kept = flat[places]
    logits[edits.rows[edits.allowed.starts.diff() > 0]] = -math.inf
    flat[places] = kept
    flat[edits.banned.places(edits.rows, vocab)] = -math.inf
    return finite


def _penalize(flat: Tensor, edits: Edits, vocab: int) -> None:
    seen, places = edits.seen, edits.seen.places(edits.rows, vocab)
    values, repetition = flat[places], edits.seen.spread(edits.repetition)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= seen.spread(edits.frequency) * seen.values
    values -= seen.spread(edits.presence) * (seen.values > 0)
    flat[places] = values
