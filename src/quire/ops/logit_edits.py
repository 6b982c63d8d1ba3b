"""What changes logits before a token is sampled: penalties, bias and masks, of all rows of a step at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NO_IDS = np.zeros(0, np.int64)
_NO_VALUES = np.zeros(0, np.float32)

IN_PROMPT, IN_OUTPUT = 1, 2
"""What standing in the prompt, and each time in the output, adds to a token's count in a `History`."""


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
    def of(cls, ids: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.float32]] = ()) -> Lists:
        """One list for each entry of `ids`, with `values` in parallel or without; on the CPU."""
        return cls(*(torch.from_numpy(array) for array in list_arrays(ids, values)))

    def places(self, rows: Tensor, vocab: int) -> Tensor:
        """Where each entry lies in flattened logits [.., vocab]: [entries] int64."""
        return self.spread(rows * vocab) + self.ids

    def spread(self, values: Tensor) -> Tensor:
        """values [n] for each entry of a row: [entries]."""
        return values.repeat_interleave(self.starts.diff())


def list_arrays(
    ids: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.float32]] = ()
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """`starts`, `ids` and `values` of `Lists`, with one list for each entry of `ids`."""
    starts = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(part) for part in ids], out=starts[1:])
    return starts, np.concatenate([_NO_IDS, *ids]), np.concatenate([_NO_VALUES, *values])


@dataclass(slots=True)
class History:
    """The tokens that n rows' requests have seen, counted on the device: the host may not know the last ones yet.

    Attributes:
        counts: [requests, vocab] int32: twice how often a token stands in the output, plus 1 where it is the prompt's.
            The first row belongs to no request, and stays 0.
        requests: [n] int64, each row's place in `counts`; 0 where a row has no penalties.
    """

    counts: Tensor
    requests: Tensor


@dataclass(slots=True)
class Masks:
    """The tokens that n rows' requests may not sample, where they allow but some.

    Attributes:
        masks: [requests, vocab] fp32: minus infinity where a token is masked, else infinity; a logit becomes the lower
            of both. (A CPU does that 15 times as fast as it fills under a mask.) The first row, all infinity, is
            no request's.
        requests: [n] int64, each row's place in `masks`; 0 where a row allows all.
    """

    masks: Tensor
    requests: Tensor


@dataclass(slots=True)
class BitMasks:
    """The tokens that some rows may sample, made anew for each step.

    Attributes:
        rows: [m] int64, which rows of the logits; all different.
        words: [m, at least vocab / 32] int32: token i may come where bit i % 32, the lowest first, of word i / 32 is
            set.
    """

    rows: Tensor
    words: Tensor

    @classmethod
    def none(cls) -> BitMasks:
        """All may come in all rows."""
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.int32))


@dataclass(slots=True)
class Edits:
    """Edits of n rows of logits, in the order in which they act.

    Attributes:
        rows: [n] int64, which rows; all different.
        repetition, frequency, presence: [n] fp32, the penalties.
        seen: the tokens of prompt and output, and how often each stands in the output: a list, or a `History` for
            kernels that read a step's numbers on the device (`Kernels.reads_spans`).
        bias: added.
        masks: what stays of requests that allow but some tokens.
        banned: masked, too.
        bits: masks of rows whose grammar allows but some tokens.
    """

    rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    seen: Lists | History
    bias: Lists
    masks: Masks
    banned: Lists
    bits: BitMasks = field(default_factory=BitMasks.none)


def edit_logits(logits: Tensor, edits: Edits) -> Tensor:
    """Edits logits [.., vocab] fp32 in place.

    Returns:
        [n] bool: whether the row was finite before (no NaN, no infinity, not all masked), since a mask can hide that.
    """
    vocab, flat = logits.shape[1], logits.view(-1)
    finite = torch.isfinite(logits[edits.rows].amax(-1))
    if isinstance(edits.seen, History):
        _penalize_by_history(logits, edits, edits.seen)
    else:
        _penalize_listed(flat, edits, edits.seen, vocab)
    flat[edits.bias.places(edits.rows, vocab)] += edits.bias.values
    logits[edits.rows] = torch.minimum(logits[edits.rows], edits.masks.masks[edits.masks.requests])
    flat[edits.banned.places(edits.rows, vocab)] = -math.inf
    mask_by_bits(logits, edits.bits)
    return finite


def mask_by_bits(logits: Tensor, bits: BitMasks) -> None:
    """Masks what the bits of logits' [.., vocab] rows do not allow, in place."""
    if not len(bits.rows):
        return
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bits.words[:, :, None] >> places & 1).view(len(bits.rows), -1)[:, : logits.shape[1]]
    logits[bits.rows] = logits[bits.rows].masked_fill(allowed == 0, -math.inf)


def count_tokens(history: History, tokens: Tensor) -> None:
    """Counts tokens [n] as the next of their rows' outputs; a negative one is none."""
    vocab = history.counts.shape[1]
    amounts = ((tokens >= 0) & (history.requests > 0)).to(torch.int32) * IN_OUTPUT
    places = history.requests * vocab + tokens.clamp(min=0)
    history.counts.view(-1).index_add_(0, places, amounts)


def _penalize_listed(flat: Tensor, edits: Edits, seen: Lists, vocab: int) -> None:
    places = seen.places(edits.rows, vocab)
    penalties = (seen.spread(part) for part in (edits.repetition, edits.frequency, edits.presence))
    flat[places] = _penalized(flat[places], seen.values, *penalties)


def _penalize_by_history(logits: Tensor, edits: Edits, history: History) -> None:
    counts = history.counts[history.requests]  # [n, vocab]
    values = logits[edits.rows]
    penalties = (part[:, None] for part in (edits.repetition, edits.frequency, edits.presence))
    penalized = _penalized(values, (counts // IN_OUTPUT).float(), *penalties)
    logits[edits.rows] = torch.where(counts > 0, penalized, values)


def _penalized(values: Tensor, times: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Logits of tokens that were seen, `times` of them in the output."""
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * times
    values -= presence * (times > 0)
    return values
