"""A vocabulary as bytes: which text each token adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_FORCED = 512
"""Characters of a text that is tokenized because nothing else may come."""

END = "<end>"
"""Text of the token that the vocabulary has for the end, and that the model does not have."""


class Vocabulary:
    """What the library must know of a tokenizer; names are the library's (`llguidance.TokenizerWrapper`).

    After the model's tokens comes one more, which stands for the end of a reply: so it is known where that may be,
    whatever ends the request.

    Attributes:
        size: ids of the model.
        texts: ids that add to a text.
        specials: special tokens by their text.

    Args:
        tokens: what each of the model's ids adds to a text; nothing for one that has no text.
        special_ids: tokens that no text makes.
        encode: the tokens of a text as it stands after another one.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], encode: Callable[[str], list[int]]) -> None:
        self.tokens = [*tokens, END.encode()]
        self.size = self.eos_token_id = len(tokens)
        self.special_token_ids = [*special_ids, self.eos_token_id]
        self._encode = encode
        special = set(self.special_token_ids)
        self.texts = frozenset(id for id, token in enumerate(self.tokens) if token and id not in special)
        self.specials = {tokens[id].decode(errors="replace"): id for id in special_ids}
        self._ids = {self.tokens[id]: id for id in self.texts}
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
        """The longest token at each place; the rest is left out where there is none."""
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids
