"""Prompt lookup (Saxena 2023; vLLM's `ngram`): drafts what followed an earlier occurrence of the last few tokens.

There is no draft model, so it costs almost nothing, and it helps if a request repeats its prompt or itself: summaries,
edits of code, structured data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import RequestInfo
from quire.runner.draft_context import DraftContext
from quire.runner.drafts import Computed, Drafts, Wanted

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: the upper bits of a product spread well

_BULK = 16
"""If more tokens than this are new, and more than one in this many, indexing them in bulk is faster."""

_SMALLEST = 256
"""Initial slots of a table."""


class NgramProposer:
    """Proposes what followed the last earlier occurrence of the longest suffix of a request's tokens that has one.

    At the end of the text the drafts continue from their beginning, as if the text repeated itself.

    Args:
        min_length: tokens of the shortest suffix looked up (vLLM: `prompt_lookup_min`).
        max_length: of the longest one (`prompt_lookup_max`).

    Raises:
        ValueError: not 1 <= min_length <= max_length.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        if min_length < 1:
            raise ValueError(f"min_length is {min_length}; it must be at least 1 token")
        if max_length < min_length:
            raise ValueError(
                f"max_length is {max_length}, but min_length is {min_length}; max_length must not be the smaller one"
            )
        self._min_length = min_length
        self._max_length = max_length
        self._texts: dict[int, _Text] = {}

    def start(self, info: RequestInfo) -> None:
        """Store the tokens; they are indexed when drafts are first wanted."""
        tokens = [*info.prompt_token_ids, *info.output_token_ids]
        self._texts[info.request] = _Text(tokens, self._min_length, self._max_length)

    def end(self, request: int) -> None:
        """Drop the request."""
        self._texts.pop(request, None)

    def propose(self, wanted: Sequence[Wanted], context: DraftContext) -> list[Drafts]:
        """The drafts; none if no suffix occurs before, or not all tokens are known."""
        return [Drafts(self._drafts(one)) for one in wanted]

    def follow(self, computed: Sequence[Computed], features: Tensor, context: DraftContext) -> None:
        """Append new tokens; a preempted request repeats known ones."""
        for part in computed:
            text = self._texts.get(part.request)
            if text is None:
                continue
            text.extend(part.start, part.tokens)
            if part.next_token is not None:
                text.extend(part.start + len(part.tokens), (part.next_token,))

    def _drafts(self, wanted: Wanted) -> list[int]:
        text = self._texts.get(wanted.request)
        if text is None:
            return []
        text.extend(wanted.position - 1, (wanted.token,))
        if len(text.tokens) != wanted.position:
            return []
        return text.continuation(wanted.count)


class _Text:
    """A request's tokens, and where each n-gram of them last ended.

    A table per length, with open addressing: a slot holds the last end (the index after the last token) of the n-gram
    hashed to it, or 0. The tokens themselves are compared, so collisions are harmless. Python dicts would need several
    times the memory, and ten times the time for a long prompt.

    Args:
        tokens: the text so far; extended in place.
        min_length, max_length: of the n-grams.
    """

    def __init__(self, tokens: list[int], min_length: int, max_length: int) -> None:
        self.tokens = tokens
        self._factors = [pow(_FACTOR, power, 1 << 64) for power in range(1, max_length + 1)]
        self._min_length = min_length
        self._indexed = 0  # n-grams that end here or before are in the tables
        self._shift = 64
        self._tables: list[memoryview] = []

    def extend(self, start: int, tokens: Sequence[int]) -> None:
        """Append the new ones of the tokens from position `start` on; none if earlier tokens are missing."""
        known = len(self.tokens) - start
        if 0 <= known < len(tokens):
            self.tokens.extend(tokens[known:])

    def continuation(self, count: int) -> list[int]:
        """The `count` tokens after the last earlier occurrence of the longest known suffix; or none."""
        self._index(len(self.tokens) - 1)  # an occurrence at the very end has no continuation
        end = self._last_end()
        following = self.tokens[end : end + count] if end else []
        if not following or len(following) == count:
            return following
        return (following * (count // len(following) + 1))[:count]

    def _last_end(self) -> int:
        """End of the last earlier occurrence of the longest suffix; 0 if there is none."""
        if not self._tables:
            return 0
        tokens, size, last = self.tokens, len(self.tokens), 0
        for i, hashed in enumerate(self._hashes(size)):
            end = self._find(i, tokens[size - self._min_length - i :], hashed)[1]
            if not end:  # nor does a longer one
                break
            last = end
        return last

    def _find(self, which: int, gram: list[int], hashed: int) -> tuple[int, int]:
        """The slot of an n-gram in a table, and its value: the n-gram's last end, or 0."""
        tokens, length, table = self.tokens, len(gram), self._tables[which]
        slot = hashed >> self._shift
        while (end := table[slot]) and tokens[end - length : end] != gram:
            slot = (slot + 1) % len(table)
        return slot, end

    def _hashes(self, end: int) -> Iterator[int]:
        """Hashes of the n-grams that end there, the shortest first; fewer at the beginning of the text."""
        hashed = 0
        last = self.tokens[max(0, end - len(self._factors)) : end]
        for length, (factor, token) in enumerate(zip(self._factors, reversed(last), strict=False), 1):
            hashed = (hashed + (token + 1) * factor) & _MASK
            if length >= self._min_length:
                yield hashed

    def _index(self, end: int) -> None:
        """Add the n-grams that end there or before."""
        new = end - self._indexed
        if new <= 0:
            return
        slots = len(self._tables[0]) if self._tables else 0
        if (new > _BULK and _BULK * new >= end) or 2 * end > slots:  # tables more than half full get slow
            self._enter_all(end)
        else:
            for at in range(self._indexed + 1, end + 1):
                for i, hashed in enumerate(self._hashes(at)):
                    slot, _ = self._find(i, self.tokens[at - self._min_length - i : at], hashed)
                    self._tables[i][slot] = at
        self._indexed = end

    def _enter_all(self, end: int) -> None:
        """Rebuild the tables from all n-grams that end there or before."""
        bits = max(_SMALLEST, 4 * end).bit_length()
        self._shift = 64 - bits
        self._tables = []
        tokens = np.array(self.tokens[:end], np.int64).astype(np.uint64) + np.uint64(1)
        hashes = np.zeros(end + 1, np.uint64)  # by the end of the n-gram
        for length, factor in enumerate(self._factors, 1):
            hashes[length:] += tokens[: max(0, end - length + 1)] * np.uint64(factor)
            if length >= self._min_length:
                ends = np.arange(length, end + 1, dtype=np.int32)
                self._tables.append(_table(hashes, ends, bits).data)


def _table(hashes: NDArray[np.uint64], ends: NDArray[np.int32], bits: int) -> NDArray[np.int32]:
    """A table of 2^bits slots with the last end of each hash; `ends` are ascending.

    All are written to their first slot at once; the last one remains, and those with other hashes try the next slot.
    """
    table = np.zeros(1 << bits, np.int32)
    slots = (hashes[ends] >> np.uint64(64 - bits)).astype(np.int64)
    while len(ends):
        free = table[slots] == 0
        table[slots[free]] = ends[free]  # of duplicate slots, the last one counts
        left = hashes[table[slots]] != hashes[ends]
        ends, slots = ends[left], (slots[left] + 1) & ((1 << bits) - 1)
    return table
