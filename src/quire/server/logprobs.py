"""Log-probabilities in the shapes of OpenAI's two routes, and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.outputs import Logprob

LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have; in OpenAI's API it means "very unlikely"."""

LOOKAHEAD = 4
"""Characters of a prompt that no token's own text stands for, like a character spread over several tokens."""

Entry = Mapping[int, Logprob]
TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes]


def ranked(entry: Entry, most: int) -> list[tuple[int, Logprob]]:
    """The `most` likeliest tokens of a position, best first."""
    best = sorted(entry.items(), key=lambda item: item[1].rank)
    return [item for item in best[:most] if item[1].rank <= most]


def clamped(value: float) -> float:
    """A log-probability as a JSON number."""
    return value if value > LEAST else LEAST


class CompletionLogprobs:
    """The four lists of `logprobs` of a completion's choice, filled token by token.

    `text_offset` counts characters of the returned text. It adds up the tokens' own texts, and so is exact unless
    tokens are left out of the text (special ones) or share a character.
    """

    def __init__(self, most: int, offset: int, token_text: TokenText) -> None:
        self.offset = offset
        self._most = most
        self._token_text = token_text
        self.lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, token: int, entry: Entry | None, offset: int | None = None) -> None:
        """Append a token. `entry` is None for a prompt's first token; `offset` is its place in the text, if known."""
        text = self._text(token, None if entry is None else entry.get(token))
        lists = self.lists
        lists["tokens"].append(text)
        lists["text_offset"].append(self.offset if offset is None else offset)
        self.offset += len(text)
        if entry is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(clamped(entry[token].logprob))
        top: dict[str, float] = {}
        for other, found in (*ranked(entry, self._most), (token, entry[token])):
            top.setdefault(
                self._text(other, found), clamped(found.logprob)
            )  # of tokens with equal texts, the likelier one is kept
        lists["top_logprobs"].append(top)

    def add_prompt(self, text: str, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> None:
        """Append the tokens of an echoed prompt; what follows begins after its text."""
        texts = [self._token_text(token) for token in token_ids]
        for token, entry, at in zip(token_ids, entries, offsets(text, texts), strict=False):
            self.add(token, entry, at)
        self.offset = len(text)

    def _text(self, token: int, found: Logprob | None) -> str:
        known = None if found is None else found.decoded_token
        return self._token_text(token) if known is None else known


def offsets(text: str, pieces: Sequence[str]) -> list[int]:
    """Offsets of tokens in a text that has them in order, though not all literally.

    A token that is not in the text (a BOS token, a part of a character) gets the offset of what follows.
    """
    found, position = [], 0
    for piece in pieces:
        for candidate in (piece, piece[1:] if piece.startswith(" ") else ""):  # some texts lose their first space
            at = text.find(candidate, position, position + len(candidate) + LOOKAHEAD) if candidate else -1
            if at >= 0:
                found.append(at)
                position = at + len(candidate)
                break
        else:
            found.append(position)
    return found


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], most: int, token_text: TokenText, token_bytes: TokenBytes
) -> dict[str, Any]:
    """`logprobs` of a chat's choice, for these tokens. The bytes of all of them make up its text, even if some are only
    part of a character.
    """

    def shown(token: int, found: Logprob) -> dict[str, Any]:
        text = token_text(token) if found.decoded_token is None else found.decoded_token
        own = token_bytes(token) if "\ufffd" in text else text.encode()
        return {"token": text, "logprob": clamped(found.logprob), "bytes": list(own)}

    content = []
    for token, entry in zip(token_ids, entries, strict=False):
        item = shown(token, entry[token])
        item["top_logprobs"] = [shown(other, found) for other, found in ranked(entry, most)]
        content.append(item)
    return {"content": content, "refusal": None}


def prompt_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry | None], most: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token an object by token id; null for the first token."""
    result: list[dict[str, dict[str, Any]] | None] = []
    for token, entry in zip(token_ids, entries, strict=False):
        if entry is None:
            result.append(None)
            continue
        items = {token: entry[token], **dict(ranked(entry, most))}
        result.append(
            {
                str(other): {
                    "logprob": clamped(found.logprob),
                    "rank": found.rank,
                    "decoded_token": found.decoded_token,
                }
                for other, found in items.items()
            }
        )
    return result
