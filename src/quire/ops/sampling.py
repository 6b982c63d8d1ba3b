"""The tensor side of sampling: best tokens, filters and noise over rows of logits, in plain torch.

A vocabulary of 151,936 makes a full sort, or noise for every token, as expensive as a small model. So a row is
seen through *chunks*: chunk c holds the ids c, c + C, c + 2C, ... (C chunks of up to `CHUNK` ids), and one
fast pass takes each chunk's maximum. All tokens above some logit lie in the few chunks whose maximum is
above it; only those are looked at. Every function gives exactly what the plain full computation would.

A row's result never depends on the other rows: elementwise steps and selections are exact, the order of a
sum is fixed (softmax goes row by row, cumulative sums run in sequence), and which short cut a row
takes depends on that row alone.

Two orders break all ties: tokens are ranked by (logit descending, id ascending), and of equal scores the
lowest id wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 16
"""Ids a chunk. Fewer make its maximum a sharper sieve, more make the list of maxima shorter."""

PREFIX_SIZES = ((64, 128), (1024, 2048), (4096, 16384))
"""(chunks looked at, tokens sorted) at each try to find the survivors of top-k and top-p; then all."""

SUM_ROWS = 8
"""Rows whose exponentials are summed at once: it bounds the memory, and they stay in the cache."""

SLICE = 8192
"""Chunks whose noise is drawn at once: 1 MiB of numbers, so that they stay in the processor's cache."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

NOISE_BITS = 52
LARGEST_NOISE = -math.log(-math.log1p(-(2.0 ** -(NOISE_BITS + 1)))) + 1e-6
"""No Gumbel noise of `gumbel` is larger (36.7)."""


class Purpose(IntEnum):
    """What a draw is for, so that two draws at one position are independent."""

    SAMPLE = 0
    ACCEPT = 1
    RESAMPLE = 2


@dataclass(slots=True)
class Filters:
    """How to sample each of some rows; all tensors are [rows].

    Attributes:
        temperature: fp32; 0 takes the most likely token.
        log_min_p: fp32, the log of min_p; -inf is off.
        top_k: int64; the vocabulary's size is off.
        top_p: fp64; inf is off.
        keys: int64, `noise_key` of each row.
        some_top_k, some_top_p: False where the host knows that no row has it, so that it need not be looked for.
    """

    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    keys: Tensor
    some_top_k: bool = True
    some_top_p: bool = True

    def of(self, index: Tensor) -> Filters:
        """The filters of some of the rows."""
        return Filters(
            self.temperature[index],
            self.log_min_p[index],
            self.top_k[index],
            self.top_p[index],
            self.keys[index],
            self.some_top_k,
            self.some_top_p,
        )


# --- noise ------------------------------------------------------------------------------------------------


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), on unsigned 64-bit integers."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def noise_stream(seed: int, choice: int, purpose: Purpose) -> int:
    """The generator's state for all positions of one choice, as an unsigned 64-bit integer."""
    state = _mix(seed & _MASK)
    for part in (choice, int(purpose)):
        state = _mix((state + (part + 1) * _GAMMA) & _MASK)
    return state


def noise_key(seed: int, choice: int, purpose: Purpose, position: int) -> int:
    """The generator's state for one position of one choice, as a signed 64-bit integer."""
    return _signed(_mix((noise_stream(seed, choice, purpose) + (position + 1) * _GAMMA) & _MASK))


def noise_keys(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """`noise_key` of many streams (`noise_stream`), each at its position."""
    state = streams + (positions + 1).astype(np.uint64) * np.uint64(_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    keys: NDArray[np.int64] = (state ^ (state >> np.uint64(31))).view(np.int64)
    return keys


def noise_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """SplitMix64 of the stream `keys` at place `ids`: `NOISE_BITS` random bits, int64, shape as broadcast."""
    return (
        _mixed(ids * _signed(_GAMMA) + keys).bitwise_right_shift_(64 - NOISE_BITS).bitwise_and_((1 << NOISE_BITS) - 1)
    )


def keys_at(streams: Tensor, positions: Tensor) -> Tensor:
    """`noise_keys` on the device: streams as signed 64-bit integers."""
    return _mixed((positions + 1) * _signed(_GAMMA) + streams)


def _mixed(z: Tensor) -> Tensor:
    """`_mix` of signed 64-bit integers, which are overwritten.

    int64 products wrap, and a logical shift is an arithmetic one with the copied sign bits masked away.
    """
    scratch = torch.empty_like(z)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        torch.bitwise_right_shift(z, shift, out=scratch).bitwise_and_((1 << (64 - shift)) - 1)
        z.bitwise_xor_(scratch).mul_(_signed(factor))
    torch.bitwise_right_shift(z, 31, out=scratch).bitwise_and_((1 << 33) - 1)
    return z.bitwise_xor_(scratch)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise from `noise_bits`, fp64. The half keeps u away from 0 and from 1."""
    u = (bits.double() + 0.5) * 2.0**-NOISE_BITS
    return -torch.log(-torch.log(u))


# --- best tokens ------------------------------------------------------------------------------------------


def chunk_maxima(logits: Tensor) -> Tensor:
    """The largest logit of every chunk: [rows, vocab] to [rows, chunks]. A NaN makes its chunk NaN."""
    num_rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    full = vocab // chunks
    maxima: Tensor = logits[:, : full * chunks].view(num_rows, full, chunks).amax(1)
    rest = logits[:, full * chunks :]
    maxima[:, : rest.shape[1]] = torch.maximum(maxima[:, : rest.shape[1]], rest)
    return maxima


def _members(logits: Tensor, rows: Tensor, chunks: Tensor, num_chunks: int) -> tuple[Tensor, Tensor]:
    """The ids and logits in `chunks` of `rows` (same shape): both [CHUNK, *shape], -inf where no id is."""
    vocab = logits.shape[1]
    offsets = torch.arange(CHUNK, device=logits.device) * num_chunks
    ids = chunks + offsets.view(-1, *[1] * chunks.dim())
    values = torch.take(logits, rows * vocab + ids.clamp(max=vocab - 1))
    return ids, values.masked_fill_(ids >= vocab, -math.inf)


def _winners(scores: Tensor, ids: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Of flat candidates, each row's id of the highest score, the lowest of equals: [num_rows] int64."""
    best = scores.new_full((num_rows,), -math.inf).scatter_reduce_(0, rows, scores, "amax")
    top = scores == best[rows]
    lowest = ids.new_full((num_rows,), torch.iinfo(torch.int64).max)
    return lowest.scatter_reduce_(0, rows[top], ids[top], "amin")


def argmax(logits: Tensor, maxima: Tensor, rows: Tensor) -> Tensor:
    """The most likely token of each of `rows`, the lowest id of equals. (torch.argmax promises no order.)"""
    maxima = maxima[rows]
    index, chunks = (maxima == maxima.amax(-1, keepdim=True)).nonzero(as_tuple=True)
    ids, values = _members(logits, rows[index], chunks, maxima.shape[1])
    return _winners(values.flatten(), ids.flatten(), index.expand_as(ids).flatten(), len(rows))


def _order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys that are all different: larger means larger logit, or of equal logits the lower id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, its equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) + (0xFFFFFFFF - ids)


@dataclass(slots=True)
class Prefix:
    """The best tokens of some rows in order: logits and ids [rows, n], and how far that order is certain.

    Entries are certain where their logit is above `bound` [rows]: all tokens above it are here or, if they
    are too many, cut off at the end. A bound of -inf means that no unmasked token is missing.
    """

    values: Tensor
    ids: Tensor
    bound: Tensor


def best_tokens(logits: Tensor, maxima: Tensor, rows: Tensor, num_chunks: int, num_tokens: int) -> Prefix:
    """The best tokens of `rows`, found in the `num_chunks` best chunks; at most `num_tokens` are sorted."""
    maxima = maxima[rows]
    total = maxima.shape[1]
    if num_chunks < total:
        top = maxima.topk(num_chunks + 1, -1)
        chunks, bound = top.indices[:, :-1], top.values[:, -1]
    else:
        chunks = torch.arange(total, device=logits.device).expand(len(rows), -1)
        bound = maxima.new_full((len(rows),), -math.inf)
    ids, values = (part.transpose(0, 1).flatten(1) for part in _members(logits, rows[:, None], chunks, total))
    keys = _order_keys(values, ids)
    if num_tokens < keys.shape[1]:
        best = keys.topk(num_tokens, -1).indices
    else:
        best = keys.argsort(-1, descending=True)
    values, ids = values.gather(1, best), ids.gather(1, best)
    if num_tokens < keys.shape[1]:
        # What was cut off may be above the chunks' bound; the last one that is left bounds it too.
        bound = torch.maximum(bound, torch.nextafter(values[:, -1], torch.full_like(bound, -math.inf)))
    return Prefix(values, ids, bound)


def exp_sums(logits: Tensor, maxima: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
    """Sum of exp((logit - best) / temperature) over each of `rows`: [rows] fp64.

    It is read off torch's softmax, whose greatest entry is one over it: that kernel is fused, and sums a
    row in an order that does not depend on the other rows.
    """
    best = maxima[rows].amax(-1, keepdim=True)
    at = argmax(logits, maxima, rows)[:, None]
    scaled = logits.new_empty(min(len(rows), SUM_ROWS), logits.shape[1])
    shares = torch.empty_like(scaled)
    sums = logits.new_empty(len(rows), 1)
    for start in range(0, len(rows), SUM_ROWS):
        block = slice(start, start + SUM_ROWS)
        n = len(rows[block])
        torch.index_select(logits, 0, rows[block], out=scaled[:n])
        scaled[:n].sub_(best[block]).div_(temperature[block, None])
        torch.softmax(scaled[:n], -1, out=shares[:n])
        sums[block] = shares[:n].gather(1, at[block])
    return sums.double().reciprocal().flatten()


def top(logits: Tensor, maxima: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Logits and ids of the `count` best tokens of `rows` (or of all), in rank order: [rows, count] each."""
    count = min(count, logits.shape[1])
    num_chunks, num_tokens = 2 * count + 1, 4 * count + 1
    while True:
        prefix = best_tokens(logits, maxima, rows, num_chunks, num_tokens)
        certain = (prefix.values > prefix.bound[:, None]).sum(-1)
        if num_chunks >= maxima.shape[1] or bool((certain >= count).all()):
            return prefix.values[:, :count], prefix.ids[:, :count]
        num_chunks, num_tokens = 8 * num_chunks, 8 * num_tokens


def ranks(logits: Tensor, maxima: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """The rank of one token of each of `rows`, 1 for the most likely: [rows] int64."""
    values = logits[rows, ids]
    maxima = maxima[rows]
    index, chunks = (maxima >= values[:, None]).nonzero(as_tuple=True)
    others, found = _members(logits, rows[index], chunks, maxima.shape[1])
    ahead = (found > values[index]) | ((found == values[index]) & (others < ids[index]))
    return torch.ones_like(ids).index_add_(0, index, ahead.sum(0))


# --- sampling ---------------------------------------------------------------------------------------------


def sample_filtered(logits: Tensor, maxima: Tensor, rows: Tensor, filters: Filters) -> Tensor:
    """Samples rows that have top-k or top-p: [rows] int64.

    min-p keeps scaled logits of at least log(min_p) below the best; top-k keeps the first k in rank order;
    top-p keeps those of them before which, in rank order, less than top_p of their mass lies.
    """
    vocab = logits.shape[1]
    best = maxima[rows].amax(-1)
    # Without min-p and top-k the mass is that of the whole row; else that of the few survivors.
    whole = (filters.log_min_p == -math.inf) & (filters.top_k >= vocab)
    totals = torch.zeros(len(rows), dtype=torch.float64, device=logits.device)
    if whole.any():
        totals[whole] = exp_sums(logits, maxima, rows[whole], filters.temperature[whole])
    tokens = torch.empty_like(rows)
    pending = torch.arange(len(rows), device=rows.device)
    for num_chunks, num_tokens in PREFIX_SIZES:
        if len(pending) == 0 or num_chunks >= maxima.shape[1]:
            break
        prefix = best_tokens(logits, maxima, rows[pending], num_chunks, num_tokens)
        picked, done = _pick(prefix, best[pending], filters.of(pending), whole[pending], totals[pending])
        tokens[pending[done]] = picked[done]
        pending = pending[~done]
    for one in torch.split(pending, 1):
        prefix = best_tokens(logits, maxima, rows[one], maxima.shape[1], vocab)
        tokens[one], _ = _pick(prefix, best[one], filters.of(one), whole[one], totals[one])
    return tokens


def _pick(prefix: Prefix, best: Tensor, filters: Filters, whole: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """The winners among the survivors in a prefix, and for which rows the prefix was long enough."""
    scaled = (prefix.values - best[:, None]) / filters.temperature[:, None]
    certain = prefix.values > prefix.bound[:, None]
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    limited = certain & (scaled >= filters.log_min_p[:, None]) & (rank < filters.top_k[:, None])
    weights = torch.where(limited, scaled.double().exp(), 0.0)
    mass = weights.cumsum(-1)
    totals = torch.where(whole, totals, mass[:, -1])
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept = limited & (before < (filters.top_p * totals)[:, None])

    num_certain, num_limited = certain.sum(-1), limited.sum(-1)
    complete = (prefix.bound == -math.inf) | (num_limited < num_certain) | (num_limited == filters.top_k)
    done = complete | (whole & (kept.sum(-1) < num_certain))

    scores = scaled.double() + gumbel(noise_bits(filters.keys[:, None], prefix.ids))
    scores = scores.masked_fill(~kept, -math.inf)
    top = kept & (scores == scores.amax(-1, keepdim=True))
    return prefix.ids.masked_fill(~top, torch.iinfo(torch.int64).max).amin(-1), done


def sample_open(logits: Tensor, maxima: Tensor, rows: Tensor, filters: Filters) -> Tensor:
    """Samples rows that have neither top-k nor top-p (min-p they may have): [rows] int64.

    A token wins only if its scaled logit plus its noise reaches the best such score among the likeliest
    tokens. So a chunk is dropped whose maximum could not reach it with the largest possible noise, then one
    whose maximum could not reach it with the chunk's own largest noise; the rest is computed.
    """
    num_chunks = maxima.shape[1]
    maxima = maxima[rows]
    best = maxima.amax(-1)
    likely = maxima.topk(min(64, num_chunks), -1).indices  # [rows, 64]
    ids, values = _members(logits, rows[:, None], likely, num_chunks)  # [CHUNK, rows, 64]
    scaled = (values - best[:, None]) / filters.temperature[:, None]
    scores = scaled.double() + gumbel(noise_bits(filters.keys[:, None], ids))
    scores.masked_fill_(scaled < filters.log_min_p[:, None], -math.inf)
    goal = scores.amax((0, 2)) - 1e-6  # the slack covers a log that is not quite monotonic

    ceiling = (maxima - best[:, None]) / filters.temperature[:, None]
    open_chunks = (ceiling >= filters.log_min_p[:, None]) & (ceiling.double() + LARGEST_NOISE >= goal[:, None])
    index, chunks = open_chunks.nonzero(as_tuple=True)
    found = [
        _contenders(logits, rows, filters, best, goal, ceiling, i, c)
        for i, c in zip(torch.split(index, SLICE), torch.split(chunks, SLICE), strict=True)
    ]
    scores, ids, index = (torch.cat(parts) for parts in zip(*found, strict=True))
    return _winners(scores, ids, index, len(rows))


def _contenders(
    logits: Tensor,
    rows: Tensor,
    filters: Filters,
    best: Tensor,
    goal: Tensor,
    ceiling: Tensor,
    index: Tensor,
    chunks: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ids and row indices, flat, in those of the (index, chunk) pairs that can reach the goal."""
    num_chunks = ceiling.shape[1]
    offsets = torch.arange(CHUNK, device=logits.device)[:, None] * num_chunks
    bits = noise_bits(filters.keys[index], chunks + offsets)  # [CHUNK, pairs]
    reach = ceiling[index, chunks].double() + gumbel(bits.amax(0))
    near = reach >= goal[index]
    index, bits = index[near], bits[:, near]
    ids, values = _members(logits, rows[index], chunks[near], num_chunks)
    scaled = (values - best[index]) / filters.temperature[index]
    scores = (scaled.double() + gumbel(bits)).masked_fill_(scaled < filters.log_min_p[index], -math.inf)
    return scores.flatten(), ids.flatten(), index.expand_as(ids).flatten()


# --- a step -----------------------------------------------------------------------------------------------


def sample(logits: Tensor, filters: Filters) -> Tensor:
    """Samples a token a row of logits [rows, vocab] fp32: [rows] int64, -1 for a row that is not finite.

    A row is not finite where it holds a NaN or +infinity, or nothing but -infinity.
    """
    maxima = chunk_maxima(logits)
    finite = torch.isfinite(maxima.amax(-1))
    noisy = filters.temperature > 0
    ordered = (filters.top_k < logits.shape[1]) | (filters.top_p < math.inf)
    tokens = torch.full_like(filters.keys, -1)
    greedy = (finite & ~noisy).nonzero().flatten()
    if len(greedy):
        tokens[greedy] = argmax(logits, maxima, greedy)
    for kind, kernel in ((ordered, sample_filtered), (~ordered, sample_open)):
        rows = (finite & noisy & kind).nonzero().flatten()
        if len(rows):
            tokens[rows] = kernel(logits, maxima, rows, filters.of(rows))
    return tokens


class TokenScores(NamedTuple):
    """Log-probabilities in n rows: of one given token each, then of the best ones in rank order.

    Attributes:
        values: [n, 1 + count] fp64, natural logarithms; NaN in a row that is not finite.
        ids: [n, 1 + count] int64. What they are after the given token says nothing in a row that is not finite.
        ranks: [n] int64, of the given token; 1 is the most likely.
    """

    values: Tensor
    ids: Tensor
    ranks: Tensor


def token_scores(logits: Tensor, rows: Tensor, ids: Tensor, count: int) -> TokenScores:
    """Log-probabilities of one token `ids` of each of `rows` (both [n] int64), and of the `count` best.

    A vocabulary smaller than `count` has only that many.
    """
    count = min(count, logits.shape[1])
    values = torch.full((len(rows), 1 + count), math.nan, dtype=torch.float64, device=logits.device)
    scored = TokenScores(values, ids[:, None].repeat(1, 1 + count), torch.ones_like(ids))
    maxima = chunk_maxima(logits)
    good = torch.isfinite(maxima[rows].amax(-1)).nonzero().flatten()
    rows, ids = rows[good], ids[good]
    if not len(rows):
        return scored
    best = maxima[rows].amax(-1)
    log_sums = exp_sums(logits, maxima, rows, torch.ones_like(best)).log()
    found = logits[rows, ids][:, None]
    if count:
        top_logits, top_ids = top(logits, maxima, rows, count)
        found = torch.cat([found, top_logits], 1)
        scored.ids[good, 1:] = top_ids
    scored.values[good] = (found - best[:, None]).double() - log_sums[:, None]
    scored.ranks[good] = ranks(logits, maxima, rows, ids)
    return scored
