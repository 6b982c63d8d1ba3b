"""Special tokens in the strings of a chat's messages, which are to stay text.

Before rendering, the first character of each special token in a user's strings is replaced by a private-use character
that occurs nowhere else. The rendered text is encoded with special tokens active; the stretches between the control
tokens that were found then get their characters back and are encoded with special tokens inert. Tokenizers split at
special tokens anyway, so the result is the same. Chats without such strings, which is nearly all, are encoded in one
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ChatTemplateError

PRIVATE_USE = range(0xE000, 0xF900)


def replacements(given: Any, source: str, specials: Sequence[str]) -> dict[str, str]:
    """A private-use character for the first character of each special token, if a string of a JSON value needs it.

    Args:
        source: the template's.

    Raises:
        ChatTemplateError: no character is left.
    """
    strings = _strings(given)
    if not any(_spots(text, specials) for text in strings):
        return {}
    used = set(source).union(*strings)
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    firsts = sorted({text[0] for text in specials})
    try:
        return {first: next(free) for first in firsts}
    except StopIteration:
        raise ChatTemplateError("the messages use all private-use characters; remove some") from None


def defused(given: Any, specials: Sequence[str], replaced: Mapping[str, str]) -> Any:
    """A JSON value with the first character of every special token in its strings replaced."""
    return _map_strings(given, lambda text: _defuse(text, specials, replaced))


def _spots(text: str, specials: Sequence[str]) -> list[int]:
    """Where special tokens begin in a text, including those that following text could complete.

    The latter only for tokens that do not begin with a letter, since otherwise plain words would be changed.
    """
    spots = []
    for special in specials:
        at = text.find(special)
        while at >= 0:
            spots.append(at)
            at = text.find(special, at + 1)
        for length in range(1, 1 if special[0].isalnum() else len(special)):
            if text.endswith(special[:length]):
                spots.append(len(text) - length)
    return spots


def _defuse(text: str, specials: Sequence[str], replaced: Mapping[str, str]) -> str:
    """The text with the first character of every special token replaced."""
    spots = _spots(text, specials)
    if not spots:
        return text
    letters = list(text)
    for spot in spots:
        letters[spot] = replaced[text[spot]]
    return "".join(letters)


def _strings(value: Any) -> list[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in (*value, *value.values()) for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []


def _map_strings(value: Any, change: Any) -> Any:
    """A JSON value with all its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value
