"""A tokenizer's vocabulary as bytes, for the grammar library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

MAX_FORCED = 512
"""Most characters of a forced text that are tokenized at a time."""

END = "<end>"
"""Text of an additional token for the end of a reply, which the model does not have."""

UTF_8 = (*range(0xC0), *range(0xC2, 0xF5))
"""The bytes that occur in valid UTF-8."""


class Vocabulary:
    """What the library needs of a tokenizer; the names are the library's (`llguidance.TokenizerWrapper`).

    The model's tokens are followed by one more, which stands for the end of a reply, so that masks show where it may
    end, whichever tokens end the request. After it there is a token for each byte that no token of the model consists
    of: the library expects that any text can be tokenized. If only these are allowed, the model cannot continue.

    Attributes:
        size: number of the model's token ids.
        texts: the model's tokens that have a text.
        unspelled: the additional bytes, by id; none for most tokenizers.
        specials: special tokens by their text.
        markers: other added tokens by their text, without those of white space: a text that has one always has it as
            this token.

    Args:
        tokens: the bytes of each of the model's token ids; empty for one without a text.
        special_ids: tokens that no text is tokenized to.
        encode: tokenizes a text that follows another one.
        added_ids: tokens that are not made of others, special or not.
    """

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        encode: Callable[[str], list[int]],
        added_ids: Iterable[int] = (),
    ) -> None:
        self.size = self.eos_token_id = len(tokens)
        special = {*special_ids}
        missing = {bytes([byte]) for byte in UTF_8}.difference(
            token for id, token in enumerate(tokens) if id not in special
        )
        self.unspelled = dict(enumerate(sorted(missing), self.size + 1))
        self.tokens = [*tokens, END.encode(), *self.unspelled.values()]
        self.special_token_ids = [*special_ids, self.eos_token_id]
        self._encode = encode
        self.texts = frozenset(id for id, token in enumerate(tokens) if token and id not in special)
        self.specials = {tokens[id].decode(errors="replace"): id for id in special_ids}
        more = {tokens[id].decode(errors="replace"): id for id in added_ids if id not in special}
        self.markers = {text: id for text, id in more.items() if len(text) > 1 and not any(map(str.isspace, text))}
        self._ids = {self.tokens[id]: id for id in (*self.unspelled, *self.texts)}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text; if the tokenizer's result has other bytes, greedily.

        Only the first tokens of a long text are returned, since the library asks again after every token.
        """
        text = text[:MAX_FORCED]
        wanted = text.encode()
        ids = self._encode(text)
        if b"".join(self.tokens[token] for token in ids) == wanted:
            return ids
        return self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        """Take the longest token at each position."""
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next(size for size in sizes if text[at : at + size] in self._ids)
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids
