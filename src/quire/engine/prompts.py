"""What users give as prompts."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from quire.errors import RequestError, TokenOutOfRangeError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or either in a dictionary as in vLLM: `{"prompt": ...}`, `{"prompt_token_ids": ...}`. With the text,
`"parse_special": False` makes the special tokens in it ordinary text.
"""

Plain = str | Sequence[int]
"""A prompt without the dictionary."""


class LiteralText(str):
    """A text in which special tokens are text."""


def plain_prompt(prompt: Prompt) -> Plain:
    """The prompt in a dictionary. If it has both, token ids are used, and the text is taken as theirs.

    Raises:
        RequestError: it has neither, or a field that would be ignored.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    given = {name: value for name, value in prompt.items() if value is not None}
    parses = given.pop("parse_special", True)
    if not isinstance(parses, bool):
        raise RequestError(f"'parse_special' of a prompt is a {type(parses).__name__}; it must be True or False")
    if other := sorted(map(str, given.keys() - {"prompt", "prompt_token_ids"})):
        raise RequestError(
            f"a prompt has the field {other[0]!r}; only 'prompt', 'prompt_token_ids' and 'parse_special' are allowed"
        )
    if not given:
        raise RequestError("a prompt is a dictionary without 'prompt' or 'prompt_token_ids'; give one of them")
    name, kind = ("prompt_token_ids", list | tuple) if "prompt_token_ids" in given else ("prompt", str)
    found: Plain = given[name]
    if not isinstance(found, kind):
        raise RequestError(
            f"{name!r} of a prompt is a {type(found).__name__}; 'prompt' must be text, 'prompt_token_ids' a list"
        )
    return found if parses or not isinstance(found, str) else LiteralText(found)


def checked_token_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain integers.

    Raises:
        RequestError: something in the list is not an integer.
    """
    if not isinstance(prompt, list | tuple):
        raise RequestError(f"a prompt is a {type(prompt).__name__}; it must be a string or a list of token ids")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise TokenOutOfRangeError(f"the prompt has {token!r}, which is not a token id; token ids are integers")
    return [operator.index(token) for token in prompt]
