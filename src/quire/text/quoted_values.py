"""Values in tool calls with special quotes around strings and unquoted names (Gemma 4): finds their end, and converts
them to JSON. Strings have no escapes: they may contain anything but the quote.

The work is linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.text.python_literals import WORDS

_WORD = re.compile(r"([^\s{}\[\],:][^{}\[\],:]*)(:?)")
"""A name with its colon, or a number, true, false or null."""


class QuotedScanner:
    """Finds the end of a value given in pieces.

    Args:
        quote: delimits strings.
    """

    def __init__(self, quote: str) -> None:
        self._quote, self._at, self._depth, self._in_text = quote, 0, 0, False

    def end(self, text: str) -> int:
        """Index of the comma or brace after the value; -1 if not there yet. `text` is all of it so far."""
        while self._at < len(text):
            if text.startswith(self._quote, self._at):
                self._in_text = not self._in_text
                self._at += len(self._quote)
                continue
            letter = text[self._at]
            if letter == self._quote[0] and self._quote.startswith(text[self._at : self._at + len(self._quote)]):
                return -1  # part of a quote
            if not self._in_text:
                if letter in ",}" and self._depth == 0:
                    return self._at
                self._depth += (letter in "{[") - (letter in "}]")
            self._at += 1
        return -1


def as_json(text: str, quote: str) -> str:
    """A complete value as JSON."""
    parts = text.split(quote)
    return "".join(
        json.dumps(part, ensure_ascii=False) if index % 2 else _WORD.sub(_word, part)
        for index, part in enumerate(parts)
    )


def _word(found: re.Match[str]) -> str:
    word, colon = found[1].rstrip(), found[2]
    return json.dumps(word, ensure_ascii=False) + colon if colon else WORDS.get(word, word)


def written(value: Any, quote: str) -> str:
    """A JSON value in this syntax; members are sorted by name, as in templates."""
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, list):
        return "[" + ",".join(written(one, quote) for one in value) + "]"
    if isinstance(value, dict):
        names = sorted(value, key=str.lower)
        return "{" + ",".join(f"{name}:{written(value[name], quote)}" for name in names) + "}"
    return json.dumps(value)
