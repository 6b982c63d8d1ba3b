"""A vocabulary as bytes: which text each token adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_FORCED = 512
"""Characters of a text that is tokenized because nothing else may come."""

END = "<end>"
"""Text of the token that the vocabulary has for the end, and that the model does not have."""

UTF_8 = (*range(0xC0), *range(0xC2, 0xF5))
"""The bytes that texts have."""


class Vocabulary:
    """What the library must know of a tokenizer; names are the library's (`llguidance.TokenizerWrapper`).

    After the model's tokens comes one more, which stands for the end of a reply: so it is known where that may be,
    whatever ends the request. Behind it stand the bytes that no token of the model is alone: the library expects that
    any text can be spelled, and goes past what cannot. Where only these may come, the model cannot go on.

    Attributes:
        size: ids of the model.
        texts: the model's ids that add to a text.
        unspelled: the bytes behind the end, by id; none for most tokenizers.
        specials: special tokens by their text.

    Args:
        tokens: what each of the model's ids adds to a text; nothing for one that has no text.
        special_ids: tokens that no text makes.
        encode: the tokens of a text as it stands after another one.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], encode: Callable[[str], list[int]]) -> None:
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
        self._ids = {self.tokens[id]: id for id in (*self.unspelled, *self.texts)}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text: as the tokenizer makes them, where they are that text byte for byte.

        Of a long text the first ones: the library asks again after every token, for all that must come.
        """
        text = text[:MAX_FORCED]
        wanted = text.encode()
        ids = self._encode(text)
        if b"".join(self.tokens[token] for token in ids) == wanted:
            return ids
        return self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token at each place."""
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next(size for size in sizes if text[at : at + size] in self._ids)
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids
