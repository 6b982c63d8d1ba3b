"""Sampling on the device: edits, filters, noise, and log-probabilities.

Nothing is sorted, and nothing comes to the host. What is computed is defined in `quire.ops.sampling` and
`logit_edits`; only the masses behind top-p and the log-probabilities' sum are rounded differently: each token's to
2^-40 of the likeliest one's, and exactly summed. How it is done is in `sampling_kernels`.

Launches a step: three, one more for top-k and one for top-p; two for edits, and three or four for log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from quire.ops.logit_edits import Edits, History, Lists, Masks, mask_by_bits
from quire.ops.sampling import Filters, TokenScores
from quire.ops.triton import sampling_kernels as kernels

PART, CHUNK = kernels.PART.value, kernels.CHUNK.value

OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
"""16 ids a thread; and each product is rounded, so that a score does not depend on what is compiled beside it."""

USUAL_COUNT = 32
"""Places for a row's best log-probabilities: 20 are the most that a request may ask for, and all share a kernel."""


@dataclass(slots=True)
class _Parts:
    """The largest logits of n rows' parts, as the kernels take them.

    Attributes:
        best, best_ids: [n, parts].
        chunks: [n, chunks], each chunk's largest; None: not wanted.
    """

    best: Tensor
    best_ids: Tensor
    chunks: Tensor | None

    @classmethod
    def of(cls, logits: Tensor, rows: Tensor | None, with_chunks: bool) -> _Parts:
        """Of some rows of logits [.., vocab], or of all."""
        n, vocab = len(logits) if rows is None else len(rows), logits.shape[1]
        parts = -(-vocab // PART)
        best = torch.empty(n, parts, device=logits.device)
        best_ids = torch.empty(n, parts, dtype=torch.int32, device=logits.device)
        chunks = torch.empty(n, parts * (PART // CHUNK), device=logits.device) if with_chunks else None
        kernels.maxima[(n, parts)](logits, rows, best, best_ids, chunks, vocab, parts, **OPTIONS)
        return cls(best, best_ids, chunks)


@dataclass(slots=True)
class _Ends:
    """Where each row's k best tokens end, [n]; and the chunks that they lie in, [n, chunks] and how many, [n]."""

    logits: Tensor
    ids: Tensor
    listed: Tensor
    num_listed: Tensor

    @classmethod
    def of(
        cls, logits: Tensor, rows: Tensor | None, best: Tensor, maxima: Tensor, top_k: Tensor | None, k: int
    ) -> _Ends:
        """best, maxima: of `_Parts`, of its parts and chunks. k: of each row, `top_k` [n] int64, or one for all."""
        n, chunks = maxima.shape
        num_parts = best.shape[1]
        ends = cls(
            torch.empty(n, device=logits.device),
            torch.empty(n, dtype=torch.int32, device=logits.device),
            torch.empty(n, chunks, dtype=torch.int32, device=logits.device),
            torch.empty(n, dtype=torch.int32, device=logits.device),
        )
        kernels.select[(n,)](
            *(logits, rows, maxima, best, top_k, k, ends.logits, ends.ids, ends.listed, ends.num_listed),
            *(logits.shape[1], num_parts),
            PARTS=triton.next_power_of_2(num_parts),
            CHUNKS=triton.next_power_of_2(chunks),
            **OPTIONS,
        )
        return ends


def sample(logits: Tensor, filters: Filters) -> Tensor:
    """See `Kernels.sample`. logits: contiguous."""
    rows, vocab = logits.shape
    parts = _Parts.of(logits, None, filters.some_top_k)
    best, best_ids, num_parts = parts.best, parts.best_ids, parts.best.shape[1]
    ends = None if parts.chunks is None else _Ends.of(logits, None, best, parts.chunks, filters.top_k, vocab)
    end_logits, end_ids = (ends.logits, ends.ids) if ends else (None, None)

    heat, min_p, top_p = filters.temperature, filters.log_min_p, filters.top_p if filters.some_top_p else None
    scores, winners = torch.empty_like(best, dtype=torch.float64), torch.empty_like(best_ids)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    grid, padded = (rows, num_parts), triton.next_power_of_2(num_parts)
    kernels.draw[grid](
        *(logits, best, best_ids, heat, min_p, filters.keys, end_logits, end_ids, scores, winners, vocab, num_parts),
        PARTS=padded,
        **OPTIONS,
    )
    ahead = masses = None
    if filters.some_top_p:
        ahead, masses = (torch.empty_like(best, dtype=torch.int64) for _ in range(2))
        kernels.weigh[grid](
            *(logits, best, best_ids, heat, min_p, top_p, end_logits, end_ids, scores, winners, ahead, masses),
            *(vocab, num_parts),
            PARTS=padded,
            **OPTIONS,
        )
    kernels.settle[(rows,)](
        *(logits, best, best_ids, heat, min_p, top_p, filters.keys, scores, winners, ahead, masses, tokens),
        *(vocab, num_parts),
        PARTS=padded,
        **OPTIONS,
    )
    return tokens


def token_scores(logits: Tensor, rows: Tensor, ids: Tensor, count: int) -> TokenScores:
    """See `Kernels.token_scores`. logits: contiguous."""
    n, vocab, device = len(rows), logits.shape[1], logits.device
    count = min(count, vocab)
    parts = _Parts.of(logits, rows, count > 0)
    num_parts = parts.best.shape[1]
    padded = triton.next_power_of_2(num_parts)
    masses = torch.empty(n, num_parts, dtype=torch.int64, device=device)
    numbers_ahead = torch.empty(n, num_parts, dtype=torch.int32, device=device)
    kernels.score_parts[(n, num_parts)](
        *(logits, rows, ids, parts.best, masses, numbers_ahead, vocab, num_parts), PARTS=padded, **OPTIONS
    )
    top: tuple[Tensor | None, ...] = (None,) * 6
    if parts.chunks is not None:
        ends = _Ends.of(logits, rows, parts.best, parts.chunks, None, count)
        best = torch.empty(n, count, device=device), torch.empty(n, count, dtype=torch.int32, device=device)
        top = (ends.logits, ends.ids, ends.listed, ends.num_listed, *best)
    scores = TokenScores(
        torch.empty(n, 1 + count, dtype=torch.float64, device=device),
        torch.empty(n, 1 + count, dtype=torch.int64, device=device),
        torch.empty(n, dtype=torch.int64, device=device),
    )
    kernels.score_rows[(n,)](
        *(logits, rows, ids, parts.best, masses, numbers_ahead, *top, *scores, count, vocab, num_parts),
        PARTS=padded,
        COUNT=triton.next_power_of_2(max(1 + count, USUAL_COUNT)),
        **OPTIONS,
    )
    return scores


def edit_logits(logits: Tensor, edits: Edits) -> Tensor:
    """See `Kernels.edit_logits`. logits: contiguous.

    Raises:
        TypeError: `edits.seen` is not a `History`.
    """
    if not isinstance(edits.seen, History):
        raise TypeError("penalties on the device are computed from a History, not from lists of the tokens seen")
    n, vocab = len(edits.rows), logits.shape[1]
    parts = -(-vocab // PART)
    best = torch.empty(n, parts, device=logits.device)
    kernels.penalize[(n, parts)](
        *(logits, edits.rows, best, edits.seen.counts, edits.seen.requests),
        *(edits.repetition, edits.frequency, edits.presence, edits.masks.masks, edits.masks.requests, vocab, parts),
        **OPTIONS,
    )
    finite = torch.empty(n, dtype=torch.int8, device=logits.device)
    bias, banned = edits.bias, edits.banned
    kernels.mask[(n,)](
        *(logits, edits.rows, best, finite, bias.starts, bias.ids, bias.values),
        *(banned.starts, banned.ids, vocab, parts),
        PARTS=triton.next_power_of_2(parts),
        **OPTIONS,
    )
    mask_by_bits(logits, edits.bits)
    return finite.view(torch.bool)


def warm_up(vocab: int, device: torch.device | str) -> None:
    """Runs every form of every kernel once, so that none is compiled while requests wait."""
    rows = 2
    logits, numbers = torch.zeros(rows, vocab, device=device), torch.zeros(rows, device=device)
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    for some_top_k in (True, False):
        for some_top_p in (True, False):
            sample(logits, Filters(numbers, numbers, ids, numbers.double(), ids, some_top_k, some_top_p))
    for count in (0, 1):
        token_scores(logits, ids, ids, count)
    none = Lists(torch.zeros(rows + 1, dtype=torch.int64, device=device), ids, numbers)
    history = History(torch.zeros(1, vocab, dtype=torch.int32, device=device), ids)
    masks = Masks(torch.full((1, vocab), torch.inf, device=device), ids)
    edit_logits(logits, Edits(ids[:1], numbers, numbers, numbers, history, none, masks, none))
