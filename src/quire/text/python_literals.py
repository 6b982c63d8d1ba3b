"""Python literals in tool calls: finds their end, and converts them to JSON.

Nothing is evaluated, and the work is linear in the length of the text.
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
    """Finds the end of an argument given in pieces."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""
        self._escaped = False

    def end(self, text: str) -> int:
        """Index of the comma or bracket after the value; -1 if not there yet. `text` is all of it so far."""
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
    """A Python literal (str, bool, None, number, list, dict) as JSON; JSON is unchanged."""
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
