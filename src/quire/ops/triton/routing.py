"""Mixture of experts: which experts tokens go to, a program a token, and how many went to each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.experts import TINY, Routing
from quire.ops.ragged import RaggedBatch

COUNTED = 1024
"""Ids that a program counts: 8 a thread."""
LAST_KEY = tl.constexpr(-(2**63))
"""Below the key of any score: see `_keys`."""


@triton.jit
def _keys(scores, places):
    """Numbers that order scores as they are ordered, and of equal scores the lowest place first, int64.

    Higher ones come first; all differ. What is not a number comes before all else, as in torch's sort.
    """
    scores = tl.where(scores == scores, scores, float("inf"))
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative numbers ascend as the numbers descend
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _place_of_key(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _kept_groups(ranks, there, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """Whether each group of ranks [groups, experts] stays: [groups]."""
    group, within = tl.arange(0, ranks.shape[0]), tl.arange(0, ranks.shape[1])[None, :]
    keys = tl.where(there, _keys(ranks, within), LAST_KEY)
    best = tl.max(keys, 1)
    score = tl.max(tl.where(keys == best[:, None], ranks, float("-inf")), 1)
    if TOP2:
        score += tl.max(tl.where(keys == best[:, None], float("-inf"), ranks), 1)
    keys = tl.where(group < GROUPS, _keys(score, group), LAST_KEY)
    for _ in tl.static_range(TOP_GROUPS):
        keys = tl.where(keys == tl.max(keys, 0), LAST_KEY, keys)
    return (group < GROUPS) & (keys == LAST_KEY)


@triton.jit(do_not_specialize=["spans"])
def _route_kernel(
    logits,
    bias,
    ids,
    weights,
    row_starts,
    spans,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
):
    """One token; experts lie as [groups, experts of a group]. One of padding is taken for the last real one."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if row_starts is not None:
        source = tl.minimum(row, tl.maximum(tl.load(row_starts + spans), 1).to(tl.int64) - 1)
    group, within = tl.arange(0, GROUPS_BLOCK)[:, None], tl.arange(0, SIZE_BLOCK)[None, :]
    there = (group < GROUPS) & (within < SIZE)
    expert = group * SIZE + within
    logits += source * GROUPS * SIZE
    x = tl.load(logits + expert, mask=there, other=float("-inf")).to(tl.float32)
    highest = tl.max(x)
    total = tl.sum(tl.exp(x - highest))
    ranks = _score(x, highest, total, SIGMOID)
    if bias is not None:
        ranks += tl.load(bias + expert, mask=there, other=0.0)
    ranks = tl.where(there, tl.where(ranks == ranks, ranks, float("inf")), float("-inf"))
    if TOP_GROUPS < GROUPS:
        kept = _kept_groups(ranks, there, GROUPS, TOP_GROUPS, TOP2)
        ranks = tl.where(kept[:, None], ranks, float("-inf"))

    keys = tl.where(there, _keys(ranks, expert), LAST_KEY)
    place = tl.arange(0, TOP_K_BLOCK)
    chosen = tl.full((TOP_K_BLOCK,), GROUPS * SIZE, tl.int64)
    for number in tl.static_range(TOP_K):
        key = tl.max(keys)
        keys = tl.where(keys == key, LAST_KEY, keys)
        chosen = tl.where(place == number, _place_of_key(key), chosen)
    chosen = tl.sort(chosen)
    x = tl.load(logits + chosen, mask=place < TOP_K, other=0.0).to(tl.float32)
    scores = _score(x, highest, total, SIGMOID)
    if NORMALIZE:
        total = tl.sum(tl.where(place == 0, scores, 0.0))
        for number in tl.static_range(1, TOP_K):  # in the order of `experts.route`
            total += tl.sum(tl.where(place == number, scores, 0.0))
        scores = tl.div_rn(scores, tl.zeros((TOP_K_BLOCK,), tl.float32) + (total + TINY))
    tl.store(ids + row * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights + row * TOP_K + place, scores * SCALE, mask=place < TOP_K)


@triton.jit
def _score(x, highest, total, SIGMOID: tl.constexpr):
    """Of logits x, whose row has this highest one and sum of powers."""
    if SIGMOID:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))
    return tl.div_rn(tl.exp(x - highest), tl.zeros(x.shape, tl.float32) + total)


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None, batch: RaggedBatch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.route`. Experts are valid and differ whatever the logits: rows of padding may hold anything."""
    logits, spans = logits.contiguous(), None if batch is None else batch.spans
    ids = logits.new_empty(len(logits), routing.top_k, dtype=torch.int64)
    weights = logits.new_empty(len(logits), routing.top_k, dtype=torch.float32)
    if len(logits) == 0:
        return ids, weights
    size = routing.num_experts // routing.groups
    _route_kernel[(len(logits),)](
        logits,
        bias,
        ids,
        weights,
        None if spans is None else spans.row_starts,
        0 if spans is None else len(spans.starts),
        SIGMOID=routing.scoring == "sigmoid",
        GROUPS=routing.groups,
        SIZE=size,
        TOP_GROUPS=routing.top_groups,
        TOP2=routing.group_score == "top2",
        TOP_K=routing.top_k,
        NORMALIZE=routing.normalize,
        SCALE=routing.scale,
        TINY=TINY,
        GROUPS_BLOCK=triton.next_power_of_2(routing.groups),
        SIZE_BLOCK=triton.next_power_of_2(size),
        TOP_K_BLOCK=max(2, triton.next_power_of_2(routing.top_k)),
        num_warps=1,  # which finds a maximum without shared memory
        enable_fp_fusion=False,
    )
    return ids, weights


@triton.jit(do_not_specialize=["pairs", "spans"])
def _count_kernel(
    ids, row_starts, load, pairs, spans, experts, TOP_K: tl.constexpr, BINS: tl.constexpr, PART: tl.constexpr
):
    """Counts a part of the ids, and adds that to the load at once: sums of integers have no order."""
    at = tl.program_id(0) * PART + tl.arange(0, PART)
    there = at < pairs
    if row_starts is not None:
        there &= at < tl.load(row_starts + spans) * TOP_K
    counts = tl.histogram(tl.load(ids + at, mask=there, other=0).to(tl.int32), BINS, mask=there)
    bins = tl.arange(0, BINS)
    tl.atomic_add(load + bins, counts.to(tl.int64), mask=(bins < experts) & (counts > 0), sem="relaxed")


def count_experts(ids: torch.Tensor, batch: RaggedBatch, load: torch.Tensor) -> None:
    """See `Kernels.count_experts`. One launch, which reads on the device how many rows are real."""
    ids, spans = ids.contiguous(), batch.spans
    if ids.numel() == 0:
        return
    _count_kernel[(triton.cdiv(ids.numel(), COUNTED),)](
        ids,
        None if spans is None else spans.row_starts,
        load,
        ids.numel(),
        0 if spans is None else len(spans.starts),
        len(load),
        TOP_K=ids.shape[1],
        BINS=max(32, triton.next_power_of_2(len(load))),  # one a thread of a warp, at least
        PART=COUNTED,
        enable_fp_fusion=False,
    )
