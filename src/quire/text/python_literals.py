"""Values in tool calls that are written as Python's: where one ends, and what it is as JSON.

What a model writes is data: nothing here is evaluated, and the work is linear in the length of the text.
"""

from __future__ import annotations

import re

WORDS = {"True": "true", "False": "false", "None": "null"}
_PART = re.compile(
    r'"(?P<double>(?:[^"\\]|\\.)*)"|' r"'(?P<single>(?:[^'\\]|\\.)*)'|" r"\b(?P<word>True|False|None)\b",
    re.DOTALL,
)
_ODD = re.compile(r'\\x(?P<code>[0-9a-fA-F]{2})|\\(?P<escaped>.)|(?P<bare>["\x00-\x1f])', re.DOTALL)


class PythonScanner:
    """Finds the end of an argument that comes in pieces."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""
        self._escaped = False

    def end(self, text: str) -> int:
        """Where the comma or bracket behind the value stands; -1: not yet. `text` is all of it so far."""
        for index in range(self._at, len(text)):
            letter = text[index]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == self._quote:
                    self._quote = ""
            elif letter in "\"'":
                self._quote = letter
            elif letter in ",)" and self._depth == 0:
                return index
            elif letter in "([{":
                self._depth += 1
            elif letter in ")]}":
                self._depth -= 1
        self._at = len(text)
        return -1


def as_json(text: str) -> str:
    """A value of Python's (texts in either quotes, True, None, numbers, lists, dicts) as JSON; JSON stays as it is."""
    return _PART.sub(_part, text.strip())


def _part(found: re.Match[str]) -> str:
    if found["word"]:
        return WORDS[found["word"]]
    return '"' + _ODD.sub(_escaped, found["double"] if found["double"] is not None else found["single"]) + '"'


def _escaped(found: re.Match[str]) -> str:
    if found["code"]:
        return f"\\u00{found['code']}"
    if found["bare"] is not None:
        return '\\"' if found["bare"] == '"' else f"\\u{ord(found['bare']):04x}"
    letter = found["escaped"]
    if letter in '"\\/bfnrtu':
        return "\\" + letter
    return letter if letter == "'" else "\\\\" + letter
