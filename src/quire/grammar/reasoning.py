"""Counts the reasoning tokens of a reply, and forces the end marker once the budget is used up.

Like masks, this depends on nothing but the tokens so far.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from quire.core.structured_outputs import ReasoningBudget
from quire.errors import SamplingParamsError

SPECIAL = b"\xff"
"""Prefix of a special token's text: no valid text has this byte."""

LONGEST_CHARACTER = 4


class Part(Enum):
    """A position in a reply, relative to its reasoning."""

    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class Spelling:
    """Finds markers in tokens, and tokens for markers.

    Args:
        tokens: the bytes of each token id.
        specials: special tokens by their text.
        encode: tokenizes a text.
    """

    def __init__(
        self, tokens: Sequence[bytes], specials: Mapping[str, int], encode: Callable[[str], list[int]]
    ) -> None:
        self._tokens, self._encode = tokens, encode
        self._specials = {text: id for text, id in specials.items() if text}
        self._special_ids = frozenset(self._specials.values())
        names = sorted(self._specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        self.ids = functools.lru_cache(maxsize=256)(self._ids)

    def added(self, token: int) -> bytes:
        """The bytes that a token adds to a reply."""
        text = self._tokens[token] if 0 <= token < len(self._tokens) else b""
        return SPECIAL + text if token in self._special_ids else text.replace(SPECIAL, b"\xfe")

    def marker(self, text: str) -> bytes:
        """A marker as bytes in a reply."""
        return b"".join(SPECIAL + part.encode() if special else part.encode() for part, special in self._parts(text))

    def _ids(self, marker: bytes) -> list[int]:
        """The tokens of a marker, or of its rest."""
        ids: list[int] = []
        for part, special in self._parts(marker.replace(SPECIAL, b"").decode(errors="replace")):
            ids += [self._specials[part]] if special else self._encode(part)
        return ids

    def _parts(self, text: str) -> list[tuple[str, bool]]:
        """Split a text into plain parts and special tokens."""
        parts: list[tuple[str, bool]] = []
        at = 0
        for found in self._special.finditer(text):
            parts += [(text[at : found.start()], False), (found[0], True)]
            at = found.end()
        return [(part, special) for part, special in [*parts, (text[at:], False)] if part]


class ReasoningCounter:
    """Follows one request's output.

    Attributes:
        dangling: number of tokens at the end of the output that form a partial character. A grammar would allow only
            the rest of the character after them, but a forced marker must follow anyway.
    """

    def __init__(self, budget: ReasoningBudget, spelling: Spelling) -> None:
        """Raises SamplingParamsError: the tokenizer cannot encode the end marker."""
        self._budget, self._spelling = budget, spelling
        self._start, self._end = spelling.marker(budget.start), spelling.marker(budget.end)
        self._call = spelling.marker(budget.call)
        if b"".join(map(spelling.added, spelling.ids(self._end))) != self._end:
            raise SamplingParamsError(
                "thinking_token_budget: the tokenizer cannot write the marker that ends reasoning"
            )
        self._part = Part.INSIDE if budget.begun else Part.BEFORE
        self._seen = b""  # the end of the output, in which a marker may have begun
        self._count = 0
        self.dangling = 0

    def copy(self) -> ReasoningCounter:
        """An independent copy."""
        return copy.copy(self)

    def may_force(self, ahead: int) -> bool:
        """Whether the end marker may be forced within this many tokens."""
        return self._part is not Part.AFTER and self._count + ahead >= self._budget.tokens

    def forced(self) -> list[int]:
        """The tokens that must follow: the rest of the end marker, or none."""
        if self._part is not Part.INSIDE or self._count < self._budget.tokens:
            return []
        return self._spelling.ids(self._end[_overlap(self._seen, self._end) :])

    def append(self, token: int) -> None:
        """Add the next token."""
        added = self._spelling.added(token)
        self._seen += added
        was_inside = self._part is Part.INSIDE
        while self._advance():
            pass
        self._count += was_inside and self._part is Part.INSIDE
        self.dangling = self.dangling + 1 if _is_cut(self._seen) else 0

    def _advance(self) -> bool:
        """Look for a marker; returns whether the part has changed."""
        match self._part:
            case Part.AFTER:
                self._seen = b""
                return False
            case Part.INSIDE:
                before, found, rest = self._seen.partition(self._end)
                if self._call and self._call in before:
                    self._part = Part.AFTER
                    return True
                longest = max(len(self._end), len(self._call), LONGEST_CHARACTER)
                self._seen = rest if found else self._seen[-longest:]
                if found:
                    self._part = Part.BEFORE if self._budget.again else Part.AFTER
                return bool(found)
            case _:
                return self._begins()

    def _begins(self) -> bool:
        if self._budget.again:
            _, found, rest = self._seen.partition(self._start)
            self._seen = rest if found else self._seen[-len(self._start) :]
            self._part = Part.INSIDE if found else Part.BEFORE
            return bool(found)
        text = self._seen.decode(errors="surrogateescape").lstrip().encode(errors="surrogateescape")
        if text.startswith(self._start):
            self._part, self._seen = Part.INSIDE, text[len(self._start) :]
            return True
        if self._start.startswith(text):
            self._seen = text
            return False
        if _is_cut(text) and len(text) < LONGEST_CHARACTER:
            return False  # it may be white space
        self._part = Part.AFTER
        return True


def _overlap(text: bytes, marker: bytes) -> int:
    """Length of the longest suffix of a text that is a prefix of the marker."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)


def _is_cut(text: bytes) -> bool:
    """Whether a text ends with a partial character."""
    for back, byte in enumerate(reversed(text[-LONGEST_CHARACTER:]), 1):
        if byte < 0x80 or byte == SPECIAL[0]:
            return False
        if byte >= 0xC0:
            return back < (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2)
    return False
