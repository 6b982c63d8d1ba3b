"""Rejection sampling of drafts, and the distribution it needs: it keeps that of what is sampled, not the tokens.

A draft that was drawn from q is accepted with chance min(1, p / q) of its probabilities; in place of the first one that
is not, a token is drawn from what p has more than q (Leviathan et al. 2023, Chen et al. 2023). In plain torch, and
slower than `sampling.sample`: it needs all probabilities of a row, and a sort of them where there is top-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops import sampling
from quire.ops.sampling import Filters


def probabilities(logits: Tensor, filters: Filters) -> Tensor:
    """What `sampling.sample` draws from: [rows, vocab] fp32 of logits [rows, vocab] fp32.

    Temperature 0 gives all to the most likely token, the lowest id of equals. A row that is not finite is NaN.
    """
    maxima = sampling.chunk_maxima(logits)
    best = maxima.amax(-1)
    finite = torch.isfinite(best)
    noisy = filters.temperature > 0
    ordered = (filters.top_k < logits.shape[1]) | (filters.top_p < math.inf)
    result = torch.full_like(logits, math.nan)

    greedy = (finite & ~noisy).nonzero().flatten()
    result[greedy] = 0.0
    if len(greedy):
        result[greedy, sampling.argmax(logits, maxima, greedy)] = 1.0
    rows = (finite & noisy & ~ordered).nonzero().flatten()
    if len(rows):
        scaled = (logits[rows] - best[rows, None]) / filters.temperature[rows, None]
        scaled.masked_fill_(scaled < filters.log_min_p[rows, None], -math.inf)
        result[rows] = torch.softmax(scaled, -1)
    rows = (finite & noisy & ordered).nonzero().flatten()
    if len(rows):
        result[rows] = _filtered(logits, maxima, rows, filters.of(rows))
    return result


def _filtered(logits: Tensor, maxima: Tensor, rows: Tensor, filters: Filters) -> Tensor:
    """Probabilities [n, vocab] of `rows` [n] that have top-k or top-p; as `sampling.sample_filtered`, which see."""
    vocab = logits.shape[1]
    values, ids = sampling.top(logits, maxima, rows, int(filters.top_k.max()))  # [n, count], in rank order
    scaled = (values - maxima[rows].amax(-1, keepdim=True)) / filters.temperature[:, None]
    rank = torch.arange(values.shape[1], device=logits.device)
    limited = (scaled >= filters.log_min_p[:, None]) & (rank < filters.top_k[:, None])
    weights = torch.where(limited, scaled.double().exp(), 0.0)
    mass = weights.cumsum(-1)
    totals = mass[:, -1].clone()
    whole = (filters.log_min_p == -math.inf) & (filters.top_k >= vocab)
    if whole.any():  # the same sum as there, to the last bit
        totals[whole] = sampling.exp_sums(logits, maxima, rows[whole], filters.temperature[whole])
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    weights.masked_fill_(before >= (filters.top_p * totals)[:, None], 0.0)
    weights /= weights.sum(-1, keepdim=True)
    return logits.new_zeros(len(rows), vocab).scatter_(1, ids, weights.to(logits.dtype))


def verify(
    target: Tensor,
    drafts: Sequence[int],
    proposed: Tensor | None,
    accept_keys: Sequence[int],
    resample_keys: Sequence[int],
) -> tuple[int, int | None]:
    """How many of a request's drafts are accepted, and what is drawn in place of the first one that is not.

    Args:
        target: [k or more, vocab] `probabilities` at the drafts' positions.
        drafts: k ids.
        proposed: [k, vocab] probabilities that they were drawn from, with noise of other purposes than these two; None:
            each was certain.
        accept_keys, resample_keys: k of each, `noise_key` of `Purpose.ACCEPT` and `Purpose.RESAMPLE` there.

    Returns:
        The number accepted, and the token after those: None where all were (the next row is sampled as ever), -1 where
        the row is not finite.
    """
    device, count = target.device, len(drafts)
    places, ids = torch.arange(count, device=device), torch.tensor(drafts, dtype=torch.int64, device=device)
    keys = torch.tensor(accept_keys, dtype=torch.int64, device=device)
    uniform = (sampling.noise_bits(keys, torch.zeros_like(keys)).double() + 0.5) * 2.0**-sampling.NOISE_BITS
    chance = target[places, ids].double()
    drawn_with = torch.ones_like(chance) if proposed is None else proposed[places, ids].double()
    accepted = int((uniform * drawn_with < chance).long().cumprod(0).sum())
    if accepted == count:
        return accepted, None

    row = target[accepted].double()
    if proposed is None:
        rest = row.clone()
        rest[drafts[accepted]] = 0.0
    else:
        rest = (row - proposed[accepted].double()).clamp_(min=0.0)
    if not bool(rest.sum() > 0):  # p and q are equal but for rounding
        rest = row
    return accepted, _draw(rest, resample_keys[accepted])


def _draw(weights: Tensor, key: int) -> int:
    """A token of weights [vocab] fp64, the lowest id of equals; -1 where none is above 0."""
    ids = (weights > 0).nonzero().flatten()
    if not len(ids):
        return -1
    keys = torch.tensor(key, dtype=torch.int64, device=weights.device)
    scores = weights[ids].log() + sampling.gumbel(sampling.noise_bits(keys, ids))
    return int(ids[scores == scores.max()][0])
