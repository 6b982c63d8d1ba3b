"""Counts the tokens of a reply's reasoning, and says which must come where there are as many as there may be.

What it says depends on the tokens so far and on nothing else, as masks do.
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
"""Stands before the text of a special token: no text has this byte."""

LONGEST_CHARACTER = 4


class Part(Enum):
    """Where in a reply one is."""

    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class Spelling:
    """A vocabulary, as far as markers are found and written in it.

    Args:
        tokens: what each id adds to a text.
        specials: special tokens by their text.
        encode: the tokens of a text.
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
        """What a token adds to a reply."""
        text = self._tokens[token] if 0 <= token < len(self._tokens) else b""
        return SPECIAL + text if token in self._special_ids else text.replace(SPECIAL, b"\xfe")

    def marker(self, text: str) -> bytes:
        """As it stands in a reply."""
        return b"".join(SPECIAL + part.encode() if special else part.encode() for part, special in self._parts(text))

    def _ids(self, marker: bytes) -> list[int]:
        """The tokens of a marker, or of the rest of one."""
        ids: list[int] = []
        for part, special in self._parts(marker.replace(SPECIAL, b"").decode(errors="replace")):
            ids += [self._specials[part]] if special else self._encode(part)
        return ids

    def _parts(self, text: str) -> list[tuple[str, bool]]:
        """Text and special tokens, in turn."""
        parts: list[tuple[str, bool]] = []
        at = 0
        for found in self._special.finditer(text):
            parts += [(text[at : found.start()], False), (found[0], True)]
            at = found.end()
        return [(part, special) for part, special in [*parts, (text[at:], False)] if part]


class ReasoningCounter:
    """Follows one request's output.

    Attributes:
        dangling: how many tokens ago a character was whole the last time: nothing may follow half a one but its end,
            and a marker that must come follows anyway.
    """

    def __init__(self, budget: ReasoningBudget, spelling: Spelling) -> None:
        """Raises SamplingParamsError: the end marker cannot be written."""
        self._budget, self._spelling = budget, spelling
        self._start, self._end = spelling.marker(budget.start), spelling.marker(budget.end)
        if b"".join(map(spelling.added, spelling.ids(self._end))) != self._end:
            raise SamplingParamsError(
                "thinking_token_budget: the tokenizer cannot write the marker that ends reasoning"
            )
        self._part = Part.INSIDE if budget.begun else Part.BEFORE
        self._seen = b""  # what a marker may begin in
        self._count = 0
        self.dangling = 0

    def copy(self) -> ReasoningCounter:
        """One that goes its own way."""
        return copy.copy(self)

    def may_force(self, ahead: int) -> bool:
        """Whether a marker might have to come within so many tokens."""
        return self._part is not Part.AFTER and self._count + ahead >= self._budget.tokens

    def forced(self) -> list[int]:
        """The tokens that must come next: what is left of the end marker, or nothing."""
        if self._part is not Part.INSIDE or self._count < self._budget.tokens:
            return []
        return self._spelling.ids(self._end[_overlap(self._seen, self._end) :])

    def append(self, token: int) -> None:
        """This is the next token."""
        added = self._spelling.added(token)
        self._seen += added
        was_inside = self._part is Part.INSIDE
        while self._advance():
            pass
        self._count += was_inside and self._part is Part.INSIDE
        self.dangling = self.dangling + 1 if _is_cut(self._seen) else 0

    def _advance(self) -> bool:
        """Whether another part has begun."""
        match self._part:
            case Part.AFTER:
                self._seen = b""
                return False
            case Part.INSIDE:
                _, found, rest = self._seen.partition(self._end)
                self._seen = rest if found else self._seen[-max(len(self._end), LONGEST_CHARACTER) :]
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
    """Length of the longest end of a text that begins the marker."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)


def _is_cut(text: bytes) -> bool:
    """Whether it ends within a character."""
    for back, byte in enumerate(reversed(text[-LONGEST_CHARACTER:]), 1):
        if byte < 0x80 or byte == SPECIAL[0]:
            return False
        if byte >= 0xC0:
            return back < (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2)
    return False
