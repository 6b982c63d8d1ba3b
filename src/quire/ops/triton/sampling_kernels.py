"""The kernels behind `quire.ops.triton.sampling`.

A row of logits is seen in *parts* of `PART` ids, a program each, and in *chunks* of `CHUNK` ids within them. Programs
of one row meet in the next launch, which merges what all parts of the row have written; no launch waits within itself.

Sums of exponentials are sums of integers (`mass`), so their order does not matter. All else is a comparison, or
arithmetic on one token alone, so no bit of a row depends on how it was cut up.

Common arguments: `logits` [.., vocab] fp32; `parts`, how many a row has; `PARTS`, the next power of two;
`best`, `best_ids` [rows, parts], the largest logit of each part and its lowest id.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

PART = tl.constexpr(4096)
"""Ids that a program works on: 16 a thread, so that their 64-bit noise and its bound stay in registers."""
CHUNK = tl.constexpr(64)
"""Ids a chunk. A vocabulary of 262,144 has 4,096, whose maxima one program searches in its registers."""

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
SLACK = tl.constexpr(1e-3)
"""Far more than fp32 can lose in a bound of a score that reaches -4 (its terms are then below 41)."""
MASS_UNIT = tl.constexpr(2.0**40)
"""Masses are whole numbers of 2^-40 of the likeliest token's. So 2^18 tokens lose less than 2^-22 of it, as little as
exp itself in fp32, and even 2^22 of them fit into 64 bits."""
LARGEST_NOISE = tl.constexpr(36.75)
"""A little above `sampling.LARGEST_NOISE`."""
LOG_2 = tl.constexpr(math.log(2))
INFINITE = tl.constexpr(math.inf)
LAST = tl.constexpr(0x7FFFFFFF)
"""Behind every id."""
IN_OUTPUT = tl.constexpr(2)
"""As in `logit_edits`."""


# -- reading a row ---------------------------------------------------------------------------------------------------


@triton.jit
def maxima(logits, rows, best, best_ids, chunk_maxima, vocab, parts):
    """Of each part of row `rows[i]` (or row i): its chunks' maxima, and the largest with its id.

    NaN counts as infinity: a row is not finite if its largest logit is not.
    """
    i, part = tl.program_id(0), tl.program_id(1)
    row = i if rows is None else tl.load(rows + i)
    ids = part * PART + tl.arange(0, PART // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-INFINITE)
    values = tl.where(values == values, values, INFINITE)
    tops = tl.max(values, 1)  # [chunks]
    if chunk_maxima is not None:
        tl.store(chunk_maxima + (i * parts + part) * (PART // CHUNK) + tl.arange(0, PART // CHUNK), tops)
    top = tl.max(tops, 0)
    tl.store(best + i * parts + part, top)
    tl.store(best_ids + i * parts + part, tl.min(tl.min(tl.where(values == top, ids, LAST), 1), 0))


@triton.jit
def merged(scores, ids, i, parts, PARTS: tl.constexpr):
    """The largest of row i's scores [rows, parts], and the lowest id that has it."""
    at = tl.arange(0, PARTS)
    found = tl.load(scores + i * parts + at, mask=at < parts, other=-INFINITE)
    top = tl.max(found, 0)
    owners = tl.load(ids + i * parts + at, mask=at < parts, other=LAST)
    return top, tl.min(tl.where(found == top, owners, LAST), 0)


@triton.jit
def largest(best, i, parts, PARTS: tl.constexpr):
    """The largest logit of row i."""
    at = tl.arange(0, PARTS)
    return tl.max(tl.load(best + i * parts + at, mask=at < parts, other=-INFINITE), 0)


@triton.jit
def total(numbers, i, parts, PARTS: tl.constexpr):
    """The sum of row i's numbers [rows, parts]."""
    at = tl.arange(0, PARTS)
    return tl.sum(tl.load(numbers + i * parts + at, mask=at < parts, other=0), 0)


@triton.jit
def is_finite(top):
    return (top > -INFINITE) & (top < INFINITE)


@triton.jit
def ahead(logits, ids, end_logit, end_id):
    """Whether tokens rank before an end: the likelier first, of equals the lower id."""
    return (logits > end_logit) | ((logits == end_logit) & (ids < end_id))


@triton.jit
def order_key(logits):
    """int32 numbers in the logits' order; both zeros have the same."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# -- the k best ------------------------------------------------------------------------------------------------------


@triton.jit
def count_listed(row_logits, vocab, listed, num_listed, low, last_id):
    """How many tokens of the listed chunks have an order key above `low`, or that key and an id below `last_id`."""
    count = tl.zeros((), tl.int32)
    for first in range(0, num_listed, PART // CHUNK):
        at = first + tl.arange(0, PART) // CHUNK
        ids = tl.load(listed + at, mask=at < num_listed, other=LAST // CHUNK) * CHUNK + tl.arange(0, PART) % CHUNK
        keys = order_key(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITE))
        count += tl.sum(((ids < vocab) & ((keys > low) | ((keys == low) & (ids < last_id)))).to(tl.int32), 0)
    return count


@triton.jit(do_not_specialize=["k"])
def select(
    logits, rows, chunk_maxima, best, top_k, k, end_logits, end_ids, listed, num_listed, vocab, parts,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Where the k best tokens of a row end: exactly k are `ahead` of (end_logits[i], end_ids[i]).

    k is `top_k[i]`, or `k` for all rows. The k best lie in the chunks whose maxima are not below the k-th largest
    maximum; `listed` [rows, chunks] gets those, `num_listed` how many. A row that is not finite ends after all tokens,
    and so does one whose `top_k` is the vocabulary's size.
    """
    i = tl.program_id(0)
    row_logits = logits + (i if rows is None else tl.load(rows + i)).to(tl.int64) * vocab
    wanted = tl.maximum(k if top_k is None else tl.load(top_k + i), 1)
    top = largest(best, i, parts, PARTS)
    tl.store(end_logits + i, -INFINITE)
    tl.store(end_ids + i, LAST)
    searched = is_finite(top)
    if top_k is not None:
        searched = searched & (wanted < vocab)
    if searched:
        chunks = parts * (PART // CHUNK)
        at = tl.arange(0, CHUNKS)
        keys = order_key(tl.load(chunk_maxima + i * chunks + at, mask=at < chunks, other=-INFINITE))
        low = order_key(top - INFINITE).to(tl.int64)  # that of -infinity
        above = order_key(top).to(tl.int64) + 1
        # The chunks: until `wanted` of their maxima are not below `low`, or more if the last ones are equal.
        high, number = above, tl.full((), -1, tl.int32)
        while (high - low > 1) & (number != wanted):
            middle = (low + high) >> 1
            number = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
            low, high = tl.where(number >= wanted, middle, low), tl.where(number >= wanted, high, middle)
        keep = (keys >= low) & (at * CHUNK < vocab)
        row_list = listed + i * chunks
        tl.store(row_list + tl.cumsum(keep.to(tl.int32), 0) - 1, at, mask=keep)
        num = tl.sum(keep.to(tl.int32), 0)
        tl.store(num_listed + i, num)
        tl.debug_barrier()  # what follows reads the list
        # The tokens in them: the same.
        high, number = above, tl.full((), -1, tl.int32)
        while (high - low > 1) & (number != wanted):
            middle = (low + high) >> 1
            number = count_listed(row_logits, vocab, row_list, num, middle.to(tl.int32), LAST)
            low, high = tl.where(number >= wanted, middle, low), tl.where(number >= wanted, high, middle)
        # The tokens of the last key, by id: nothing is done where all of them are wanted.
        key = low.to(tl.int32)
        first, end = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + vocab
        while (end - first > 1) & (number != wanted):
            middle_id = (first + end) >> 1
            number = count_listed(row_logits, vocab, row_list, num, key, middle_id)
            first, end = tl.where(number >= wanted, first, middle_id), tl.where(number >= wanted, middle_id, end)
        tl.store(end_logits + i, (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
        tl.store(end_ids + i, end)


# -- noise -----------------------------------------------------------------------------------------------------------


@triton.jit
def noise_bits(key, ids):
    """See `sampling.noise_bits`: 52 bits as int64."""
    z = key.to(tl.uint64, bitcast=True) + ids.to(tl.uint64) * GAMMA
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return ((z ^ (z >> 31)) >> 12).to(tl.int64)


@triton.jit
def gumbel(key, ids):
    """See `sampling.gumbel`, fp64."""
    u = (noise_bits(key, ids).to(tl.float64) + 0.5) * 2.0**-52
    return -tl.log(-tl.log(u))


@triton.jit
def gumbel_bound(key, ids):
    """Not below `gumbel`, but for fp32's rounding, and close to it where it is large: -log(u) is at least 1 - u."""
    rest = ((1 << 52) - 1 - noise_bits(key, ids)).to(tl.float32) + 0.5
    return 52 * LOG_2 - tl.log(rest)


@triton.jit
def scale(logits, best, temperature):
    return tl.div_rn(logits - best, temperature)


@triton.jit
def race(row_logits, vocab, part, part_top, best, temperature, log_min_p, key, end_logit, end_id, score, winner):
    """The best (score, id) of the one given and of a part's tokens: those ahead of the end and not below min-p.

    A score is the scaled logit plus noise in fp64. It is computed for the tokens alone whose bound reaches the best
    one so far, the highest bound first: for hardly more than one a part, and for none where `part_top`, the part's
    largest logit, cannot reach it.
    """
    reach = scale(part_top, best, temperature)
    if (part_top >= end_logit) & (reach >= log_min_p) & (reach + LARGEST_NOISE >= score):
        ids = part * PART + tl.arange(0, PART)
        values = tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITE)
        scaled = scale(values, best, temperature)
        running = (scaled > -INFINITE) & (scaled >= log_min_p) & ahead(values, ids, end_logit, end_id)
        bounds = tl.where(running, scaled + gumbel_bound(key, ids) + SLACK, -INFINITE)
        highest = tl.max(bounds, 0)
        while highest >= score:
            token = tl.min(tl.where(bounds == highest, ids, LAST), 0)
            own = scale(tl.load(row_logits + token), best, temperature).to(tl.float64) + gumbel(key, token)
            wins = (own > score) | ((own == score) & (token < winner))
            score, winner = tl.where(wins, own, score), tl.where(wins, token, winner)
            bounds = tl.where(ids == token, -INFINITE, bounds)
            highest = tl.max(bounds, 0)
    return score, winner


@triton.jit
def draw(
    logits, best, best_ids, temperature, log_min_p, keys, end_logits, end_ids, scores, winners, vocab, parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The best (score, id) of each part and of the row's likeliest token, [rows, parts].

    A greedy row's is the likeliest token, that of a row which is not finite -1. `end_logits`, `end_ids` [rows] are
    `select`'s, or None.
    """
    i, part = tl.program_id(0), tl.program_id(1)
    top, winner = merged(best, best_ids, i, parts, PARTS)
    heat, least = tl.load(temperature + i), tl.load(log_min_p + i)
    score = tl.zeros((), tl.float64)
    if is_finite(top):
        if heat > 0:
            key = tl.load(keys + i)
            score = gumbel(key, winner)  # its scaled logit is 0
            end_logit = -INFINITE if end_logits is None else tl.load(end_logits + i)
            end_id = LAST if end_ids is None else tl.load(end_ids + i)
            row_logits = logits + i.to(tl.int64) * vocab
            part_top = tl.load(best + i * parts + part)
            score, winner = race(
                row_logits, vocab, part, part_top, top, heat, least, key, end_logit, end_id, score, winner
            )
    else:
        winner = tl.full((), -1, tl.int32)
    tl.store(scores + i * parts + part, score)
    tl.store(winners + i * parts + part, winner)


# -- mass ------------------------------------------------------------------------------------------------------------


@triton.jit
def mass(row_logits, vocab, part, best, temperature, log_min_p, end_logit, end_id, logit, token):
    """The mass of a part's tokens: of those ahead of a token, and of all; only what is ahead of the end counts."""
    ids = part * PART + tl.arange(0, PART)
    values = tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITE)
    scaled = scale(values, best, temperature)
    counts = (scaled >= log_min_p) & ahead(values, ids, end_logit, end_id)
    masses = tl.where(counts, tl.exp(scaled) * MASS_UNIT, 0.0).to(tl.int64)
    return tl.sum(tl.where(ahead(values, ids, logit, token), masses, 0), 0), tl.sum(masses, 0)


@triton.jit
def weigh(
    logits, best, best_ids, temperature, log_min_p, top_p, end_logits, end_ids, scores, winners, masses_ahead, masses,
    vocab, parts, PARTS: tl.constexpr,
):  # fmt: skip
    """Each part's mass ahead of the row's winner, and in all: [rows, parts] int64, where `settle` asks for it."""
    i, part = tl.program_id(0), tl.program_id(1)
    heat, least = tl.load(temperature + i), tl.load(log_min_p + i)
    top, likeliest = merged(best, best_ids, i, parts, PARTS)
    _, winner = merged(scores, winners, i, parts, PARTS)
    if (heat > 0) & (tl.load(top_p + i) < INFINITE) & (winner >= 0) & (winner != likeliest):
        row_logits = logits + i.to(tl.int64) * vocab
        end_logit = -INFINITE if end_logits is None else tl.load(end_logits + i)
        end_id = LAST if end_ids is None else tl.load(end_ids + i)
        logit = tl.load(row_logits + winner)
        some, all_of_it = mass(row_logits, vocab, part, top, heat, least, end_logit, end_id, logit, winner)
        tl.store(masses_ahead + i * parts + part, some)
        tl.store(masses + i * parts + part, all_of_it)


@triton.jit
def settle(
    logits, best, best_ids, temperature, log_min_p, top_p, keys, scores, winners, masses_ahead, masses, tokens,
    vocab, parts, PARTS: tl.constexpr,
):  # fmt: skip
    """The row's winner, if it is within top-p (`top_p` None: no row has it).

    Top-p needs no order: the winner of all tokens is right if it is within top-p. If it is not, nor is what ranks
    after it, and those ahead of it race again; each time about half of the mass that is too much is dropped.
    """
    i = tl.program_id(0)
    _, winner = merged(scores, winners, i, parts, PARTS)
    if top_p is not None:
        heat, least, share = tl.load(temperature + i), tl.load(log_min_p + i), tl.load(top_p + i)
        top, likeliest = merged(best, best_ids, i, parts, PARTS)
        if (heat > 0) & (share < INFINITE) & (winner >= 0) & (winner != likeliest):
            mass_ahead = total(masses_ahead, i, parts, PARTS)
            limit = share * total(masses, i, parts, PARTS).to(tl.float64)
            row_logits = logits + i.to(tl.int64) * vocab
            key = tl.load(keys + i)
            while mass_ahead.to(tl.float64) >= limit:
                end_logit, end_id = tl.load(row_logits + winner), winner
                score, winner = gumbel(key, likeliest), likeliest
                for part in range(parts):
                    part_top = tl.load(best + i * parts + part)
                    score, winner = race(
                        row_logits, vocab, part, part_top, top, heat, least, key, end_logit, end_id, score, winner
                    )
                logit = tl.load(row_logits + winner)
                mass_ahead = tl.zeros((), tl.int64)
                for part in range(parts):
                    if tl.load(best + i * parts + part) >= logit:
                        some, _all = mass(row_logits, vocab, part, top, heat, least, end_logit, end_id, logit, winner)
                        mass_ahead += some
    tl.store(tokens + i, winner.to(tl.int64))


# -- log-probabilities -----------------------------------------------------------------------------------------------


@triton.jit
def score_parts(logits, rows, ids, best, masses, numbers_ahead, vocab, parts, PARTS: tl.constexpr):
    """Each part's mass, and how many of its tokens rank before the row's given one: [n, parts] int64 and int32."""
    i, part = tl.program_id(0), tl.program_id(1)
    top = largest(best, i, parts, PARTS)
    if is_finite(top):
        row_logits = logits + tl.load(rows + i) * vocab
        token = tl.load(ids + i)
        others = part * PART + tl.arange(0, PART)
        values = tl.load(row_logits + others, mask=others < vocab, other=-INFINITE)
        is_ahead = ahead(values, others, tl.load(row_logits + token), token)
        tl.store(masses + i * parts + part, tl.sum((tl.exp(values - top) * MASS_UNIT).to(tl.int64), 0))
        tl.store(numbers_ahead + i * parts + part, tl.sum(is_ahead.to(tl.int32), 0))


@triton.jit(do_not_specialize=["count"])
def score_rows(
    logits, rows, ids, best, masses, numbers_ahead, end_logits, end_ids, listed, num_listed, top_logits, top_ids,
    values, found_ids, ranks, count, vocab, parts, PARTS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """See `sampling.TokenScores`. `top_logits`, `top_ids` [n, count] hold the best tokens before they are in order."""
    i = tl.program_id(0)
    row_logits = logits + tl.load(rows + i) * vocab
    token = tl.load(ids + i)
    top = largest(best, i, parts, PARTS)
    values += i * (1 + count)
    found_ids += i * (1 + count)
    places = tl.arange(0, COUNT)
    if is_finite(top):
        log_sum = tl.log(total(masses, i, parts, PARTS).to(tl.float64) / MASS_UNIT)
        tl.store(values, (tl.load(row_logits + token) - top).to(tl.float64) - log_sum)
        tl.store(found_ids, token)
        tl.store(ranks + i, 1 + total(numbers_ahead, i, parts, PARTS).to(tl.int64))
        if end_logits is not None:
            top_logits += i * count
            top_ids += i * count
            chunks = parts * (PART // CHUNK)
            collect(
                row_logits, vocab, listed + i * chunks, tl.load(num_listed + i), tl.load(end_logits + i),
                tl.load(end_ids + i), top_logits, top_ids,
            )  # fmt: skip
            tl.debug_barrier()
            mine = tl.load(top_logits + places, mask=places < count, other=-INFINITE)
            my_ids = tl.load(top_ids + places, mask=places < count, other=LAST)
            rank = tl.zeros((COUNT,), tl.int32)
            for other in range(count):
                rank += ahead(tl.load(top_logits + other), tl.load(top_ids + other), mine, my_ids).to(tl.int32)
            tl.store(values + 1 + rank, (mine - top).to(tl.float64) - log_sum, mask=places < count)
            tl.store(found_ids + 1 + rank, my_ids.to(tl.int64), mask=places < count)
    else:
        tl.store(values + places, float("nan"), mask=places <= count)
        tl.store(found_ids + places, token, mask=places <= count)
        tl.store(ranks + i, 1)


@triton.jit
def collect(row_logits, vocab, listed, num_listed, end_logit, end_id, found_logits, found_ids):
    """The tokens of the listed chunks that are ahead of an end."""
    found = tl.zeros((), tl.int32)
    for first in range(0, num_listed, PART // CHUNK):
        at = first + tl.arange(0, PART) // CHUNK
        ids = tl.load(listed + at, mask=at < num_listed, other=LAST // CHUNK) * CHUNK + tl.arange(0, PART) % CHUNK
        values = tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITE)
        keep = (ids < vocab) & ahead(values, ids, end_logit, end_id)
        places = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(found_logits + places, values, mask=keep)
        tl.store(found_ids + places, ids, mask=keep)
        found += tl.sum(keep.to(tl.int32), 0)


# -- edits -----------------------------------------------------------------------------------------------------------


@triton.jit
def penalize(
    logits, rows, best, counts, requests, repetition, frequency, presence, masks, masked, vocab, parts
):  # fmt: skip
    """Penalties and the mask of each part of row `rows[i]`; `best` [n, parts] gets its largest logit before.

    NaN counts as infinity. A bias that comes after changes nothing of what is masked.
    """
    i, part = tl.program_id(0), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    places = logits + tl.load(rows + i) * vocab + ids
    values = tl.load(places, mask=ids < vocab, other=-INFINITE)
    tl.store(best + i * parts + part, tl.max(tl.where(values == values, values, INFINITE), 0))
    request = tl.load(requests + i)
    if request > 0:
        count = tl.load(counts + request * vocab + ids, mask=ids < vocab, other=0)
        by, times = tl.load(repetition + i), (count // IN_OUTPUT).to(tl.float32)
        penalized = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + by), values * by)
        penalized -= tl.load(frequency + i) * times
        penalized -= tl.load(presence + i) * (times > 0).to(tl.float32)
        tl.store(places, penalized, mask=(ids < vocab) & (count > 0))
    request = tl.load(masked + i)
    if request > 0:
        hidden = tl.load(masks + request * vocab + ids, mask=ids < vocab, other=INFINITE) < 0
        hidden &= values == values  # NaN stays, as the minimum of both
        tl.store(places, tl.full((PART,), -INFINITE, tl.float32), mask=(ids < vocab) & hidden)


@triton.jit
def mask(
    logits, rows, best, finite, bias_starts, bias_ids, biases, banned_starts, banned_ids, vocab, parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Bias and banned ids of row `rows[i]`, and whether it was finite."""
    i = tl.program_id(0)
    top = largest(best, i, parts, PARTS)
    tl.store(finite + i, is_finite(top).to(tl.int8))
    row_logits = logits + tl.load(rows + i) * vocab
    entries = tl.arange(0, PART // 4)
    for first in range(tl.load(bias_starts + i), tl.load(bias_starts + i + 1), PART // 4):
        at = first + entries
        some = at < tl.load(bias_starts + i + 1)
        places = row_logits + tl.load(bias_ids + at, mask=some, other=0)
        tl.store(places, tl.load(places, mask=some) + tl.load(biases + at, mask=some), mask=some)
    tl.debug_barrier()  # whatever one thread has written, another may read next
    end = tl.load(banned_starts + i + 1)
    for first in range(tl.load(banned_starts + i), end, PART // 4):
        at = first + entries
        places = row_logits + tl.load(banned_ids + at, mask=at < end, other=0)
        tl.store(places, tl.full((PART // 4,), -INFINITE, tl.float32), mask=at < end)
