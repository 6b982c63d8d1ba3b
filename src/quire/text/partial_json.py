"""JSON of which a part is there: what there is of it, as a whole value, or as a text that grows."""

from __future__ import annotations

import json
import re
from typing import Any

_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
"""The first half of a surrogate pair at the end of a text."""

_MEMBER = re.compile(
    r',?\s*(?:"(?:[^"\\]|\\.)*(?:"\s*:?\s*)?)?(?:-?\d*\.?\d*(?:[eE][+-]?\d*)?|t|tr|tru|f|fa|fal|fals|n|nu|nul)\\?',
    re.DOTALL,
)
"""The beginning of a member, before there is a value that could be kept."""

_OPENING = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"', re.DOTALL)
_LETTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*'
)
"""What comes before an object's first text, and whole letters of a text."""

CLOSERS = {"{": "}", "[": "]"}


class MemberText:
    """The text that is the only member of an object, as its JSON is written."""

    def __init__(self) -> None:
        self._left, self._begun = "", False

    def take(self, piece: str) -> str:
        """What the next piece of JSON adds to the text."""
        self._left += piece
        if not self._begun:
            opening = _OPENING.match(self._left)
            if opening is None:
                return ""
            self._left, self._begun = self._left[opening.end() :], True
        letters = _LETTERS.match(self._left)
        written = "" if letters is None else letters[0]
        self._left = self._left[len(written) :]
        return str(json.loads(f'"{written}"', strict=False))


def completed(text: str) -> Any:
    """The value of JSON text that may have been cut anywhere: strings, lists and objects that are open are closed, and
    a member that is not there yet is left out. The work is linear in the length of the text.

    Raises:
        ValueError: the text does not begin JSON. RecursionError: it nests too deeply.
    """
    try:
        return json.loads(text)
    except ValueError:
        candidates = _candidates(text)
    for candidate in candidates:
        try:
            return json.loads(candidate)
        except ValueError:
            continue
    raise ValueError("this is not the beginning of JSON")


def _candidates(text: str) -> list[str]:
    """The text closed where it was cut, and without the member in which it was."""
    open_ones: list[str] = []  # what closes them
    in_string = escaped = False
    escape, whole = -1, 0
    for at, letter in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif letter == "\\":
                escaped, escape = True, at
            elif letter == '"':
                in_string = False
        elif letter == '"':
            in_string = True
        elif letter in CLOSERS:
            open_ones.append(CLOSERS[letter])
            whole = at + 1
        elif letter in ",]}":
            if letter != "," and open_ones:
                open_ones.pop()
            whole = at + (letter != ",")
    end = "".join(reversed(open_ones))
    without = [text[:whole] + end] if _MEMBER.fullmatch(text, whole) else []
    if in_string:
        after_escape = len(text) - escape
        is_cut = escape >= 0 and (escaped or (text[escape + 1] == "u" and after_escape < 6))
        text = _HALF_PAIR.sub("", text[:escape] if is_cut else text) + '"'
    return [text + end, *without]
