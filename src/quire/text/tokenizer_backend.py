"""Wraps the `tokenizers` library; no other module calls it.

It is written in Rust. A panic becomes a `BaseException` that is not an `Exception`, which would pass every handler
that fails a single request. So every call goes through `_call`, which turns anything raised by the library into an
error of Quire.

A tokenizer.json is untrusted: its normalizer and its decoder may expand short text to long text. The output of
decoders is bounded here, at load time, since they run in processes that cannot be killed, a few tokens per call. Of
normalizers only the expansion of a short text is checked, since they run where time and memory are bounded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import tokenizers

from quire.errors import TokenizerError, TokenizerFailedError

P = ParamSpec("P")
T = TypeVar("T")

MAX_TOKEN_TEXT = 4096
"""Maximum characters of a decoded token. The longest ones of known vocabularies have some hundreds."""

MAX_DECODERS = 64
"""Maximum decoders in a chain. Known tokenizers have up to four."""

MAX_TOKENS_A_BYTE = 64
"""Maximum tokens per byte of text. Unicode's compatibility forms expand a byte to up to 11."""

SPACED = frozenset({"BPEDecoder", "CTC", "WordPiece"})
"""Decoders that insert or drop spaces depending on adjacent tokens, so a token has no text of its own."""

SPLITTING = frozenset({"ByteLevel", "Digits", "Split"})
"""Pre-tokenizers that only split a text, unless a `Split` removes what it finds."""

NFC_SHRINKS = 3.5
"""The most bytes that become one in Unicode's normal form C: U+1FBE U+0308 U+0301 becomes U+0390."""


def _byte_letters() -> dict[str, int]:
    """The characters for bytes in byte-level vocabularies (Radford et al. 2019); printable bytes are their own."""
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_letters()

TRIED_TEXT = "".join(map(chr, range(32, 127))) + "\n\tÄ中"
"""Encoded as a check when a tokenizer is loaded, besides the texts that its normalizer replaces."""


def _call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the library.

    Raises:
        TokenizerFailedError: it raised anything but an exit of this process or a MemoryError.
    """
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerFailedError(f"the tokenizer failed: {_words(error)}") from error


def _words(error: BaseException) -> str:
    """The library's message, as one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."


class Backend:
    """One tokenizer of the library. Safe to use from several threads.

    Attributes:
        added: text of the added tokens, which are not in the model's vocabulary, by id.
        special: text of the special tokens, by id.
        vocab_size: number of ids, including added tokens.

    Args:
        source: content of `tokenizer.json`.
        name: its name in error messages.
        listed: `added_tokens_decoder` of `tokenizer_config.json`: tokens to add if the source lacks them.
        special_is_text: special tokens in a text are encoded as ordinary text.

    Raises:
        TokenizerError: the source is not valid, or not safe to use.
    """

    def __init__(self, source: str, name: str, listed: Any = None, special_is_text: bool = True) -> None:
        self._name = name
        try:
            self._library: tokenizers.Tokenizer = _call(tokenizers.Tokenizer.from_str, source)
            self._check_model()
            self._add_tokens(listed or {})
            # Padding and truncation would silently change prompts.
            _call(self._library.no_padding)
            _call(self._library.no_truncation)
            self._library.encode_special_tokens = special_is_text
            added = _call(self._library.get_added_tokens_decoder)
            self.decoder: Any = _state(self._library.decoder)
            self._normalizer = _state(self._library.normalizer)
            self._splits = _chain(_state(self._library.pre_tokenizer), "pretokenizers")
            self.vocab_size: int = _call(self._library.get_vocab_size, with_added_tokens=True)
        except TokenizerFailedError as error:
            raise TokenizerError(
                f"{name} is not a valid tokenizer ({error}); download it again, or save it anew with "
                "transformers' save_pretrained"
            ) from error
        self.added = {token: about.content for token, about in added.items()}
        self._strips = any(about.lstrip or about.rstrip for about in added.values())
        self.special = {token: about.content for token, about in added.items() if about.special}

    # -- use -----------------------------------------------------------------------------------------------

    def encode(self, text: str) -> tokenizers.Encoding:
        """Ids and offsets of a text, without the post-processor's tokens. Raises TokenizerFailedError."""
        return _call(self._library.encode, text, add_special_tokens=False)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        """Ids of many texts, in parallel and without the GIL. Raises TokenizerFailedError."""
        return _call(self._library.encode_batch_fast, texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of ids; unknown ones have none. Raises TokenizerFailedError."""
        return _call(self._library.decode, ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, text: str) -> int | None:
        """The id of a token. Raises TokenizerFailedError."""
        return _call(self._library.token_to_id, text)

    def id_to_token(self, token: int) -> str | None:
        """The token of an id, as in the vocabulary. Raises TokenizerFailedError."""
        return _call(self._library.id_to_token, token)

    @property
    def spells_bytes(self) -> bool:
        """Whether the decoder maps each character of a token to a byte."""
        return any(decoder.get("type") == "ByteLevel" for decoder in _chain(self.decoder, "decoders"))

    @property
    def spaced_by(self) -> str:
        """What makes a token's text depend on adjacent tokens, as the end of a sentence; "" if nothing does."""
        kinds = [str(decoder.get("type")) for decoder in _chain(self.decoder, "decoders")]
        if not kinds:
            return "has no decoder, so that a space stands between any two"
        return next((f"has a decoder of type {kind}" for kind in kinds if kind in SPACED), "")

    def bytes_a_token(self, model: Mapping[str, Any]) -> float | None:
        """The most bytes of a text that one token can stand for; None if there is no such bound.

        There is one for byte-level BPE, whose tokens spell every byte of a text, if no other part of the tokenizer
        drops or merges text.

        Args:
            model: the model, as in the source.
        """
        vocabulary, normalizer = model.get("vocab"), (self._normalizer or {"type": None}).get("type")
        is_byte_level = model.get("type") == "BPE" and BYTE_OF.keys() <= set(vocabulary or ())
        kinds = {each.get("type") for each in self._splits}
        splits = "ByteLevel" in kinds <= SPLITTING and all(each.get("behavior") != "Removed" for each in self._splits)
        if not (is_byte_level and splits and normalizer in (None, "NFC")) or self._strips:
            return None
        longest = max([*map(len, vocabulary or ()), *(len(text.encode()) for text in self.added.values())])
        return longest * (NFC_SHRINKS if normalizer else 1.0)

    # -- checks --------------------------------------------------------------------------------------------

    def check_decoding(self, vocabulary: Any) -> None:
        """Check the maximum length of a decoded token.

        Args:
            vocabulary: the model's, as in the source: a mapping by text, or a list of pairs that begin with the text.

        Raises:
            TokenizerError: a token is too long, or the decoder can expand one too much.
        """
        chain = _chain(self.decoder, "decoders")
        if len(chain) > MAX_DECODERS:
            raise TokenizerError(f"{self._name} chains {len(chain)} decoders; at most {MAX_DECODERS} are allowed")
        growth = 1.0
        for decoder in chain:
            growth *= self._growth(decoder)
        texts = [text if isinstance(text, str) else text[0] for text in vocabulary]
        longest = max([*texts, *self.added.values()], key=len, default="")
        if len(longest) * growth > MAX_TOKEN_TEXT:
            times = f" and the decoder may make it {growth:g} times as long" if growth > 1 else ""
            raise TokenizerError(
                f"{self._name}: the token {longest[:20]!r}... has {len(longest)} characters{times}; the text of a "
                f"token may have {MAX_TOKEN_TEXT}. Remove the token, or what makes it longer"
            )

    def check_encoding(self) -> None:
        """Check the encoding of a short text with what the normalizer replaces. A failure to encode it is no error.

        Raises:
            TokenizerError: it gives too many tokens.
        """
        text = " ".join([TRIED_TEXT, *_patterns(self._normalizer)])
        most = MAX_TOKENS_A_BYTE * len(text.encode())
        size, normalized = 0, text
        with contextlib.suppress(TokenizerFailedError):
            for normalizer in _steps(self._library.normalizer):  # one by one: together they could take hours
                normalized = _call(normalizer.normalize_str, normalized)
                if (size := len(normalized)) > most:
                    break
            else:
                size = len(self.encode_batch([text], add_special_tokens=True)[0].ids)
        if size > most:
            raise TokenizerError(
                f"{self._name} makes more than {MAX_TOKENS_A_BYTE} tokens or characters of a byte of text ({size} of "
                f"{len(text.encode())} bytes); look at its normalizer and its post-processor"
            )

    def _growth(self, decoder: Mapping[str, Any]) -> float:
        """The factor by which a decoder can lengthen a text."""
        kind = decoder.get("type")
        if kind == "Replace":
            pattern = decoder.get("pattern", {}).get("String")
            if pattern is None:
                raise TokenizerError(
                    f"{self._name}: its decoder replaces a regular expression, whose time has no bound; give the "
                    "decoder a pattern that is a plain string"
                )
            content = len(decoder.get("content", ""))
            return max(1.0, content / len(pattern) if pattern else content + 1.0)
        if kind in ("BPEDecoder", "CTC"):
            replaced = decoder.get("suffix" if kind == "BPEDecoder" else "word_delimiter_token")
            return 1.0 if replaced else 3.0  # a space between all characters
        if kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip", "WordPiece"):
            return 1.0
        raise TokenizerError(f"{self._name} has a decoder of type {kind!r}, which Quire does not know")

    def _check_model(self) -> None:
        dropout = getattr(self._library.model, "dropout", None)
        if dropout:
            raise TokenizerError(
                f"{self._name}: model.dropout is {dropout:g}, so a text would have other tokens each time it is "
                "encoded; it is meant for training: set it to null"
            )

    def _add_tokens(self, listed: Any) -> None:
        """Add the tokens that `tokenizer_config.json` lists and `tokenizer.json` lacks."""
        where = f"added_tokens_decoder beside {self._name}"
        if not isinstance(listed, dict):
            raise TokenizerError(f"{where} is not an object; make it one, or remove it")
        known = _call(self._library.get_added_tokens_decoder)
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        try:
            missing = sorted((int(key), about) for key, about in listed.items() if int(key) not in known)
            for token, about in missing:
                given = {flag: bool(about[flag]) for flag in flags if flag in about}
                added = _call(tokenizers.AddedToken, about["content"], **given)
                _call(self._library.add_special_tokens if added.special else self._library.add_tokens, [added])
                found = self.token_to_id(about["content"])
                if found != token:
                    raise TokenizerError(
                        f"{where} gives {about['content']!r} the id {token}, but it would be {found}; correct it"
                    )
        except (KeyError, TypeError, ValueError, TokenizerFailedError) as error:
            raise TokenizerError(f"{where} is not valid ({error!r}); correct it, or remove it") from error


def _state(part: Any) -> Any:
    """The description of a normalizer or decoder, as parsed by the library; None if there is none."""
    return None if part is None else json.loads(_call(part.__getstate__))


def _steps(normalizer: Any) -> Iterator[Any]:
    """The chain of normalizers."""
    if isinstance(normalizer, tokenizers.normalizers.Sequence):
        for index in range(len(normalizer)):
            yield from _steps(normalizer[index])
    elif normalizer is not None:
        yield normalizer


def _chain(part: Any, members: str) -> list[Mapping[str, Any]]:
    """The links of a chain of decoders or the like; `members` is the field of a `Sequence` that has them."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [found for each in part[members] for found in _chain(each, members)]


def _patterns(normalizer: Any) -> list[str]:
    """The plain strings that a normalizer replaces."""
    return [found for each in _chain(normalizer, "normalizers") if (found := each.get("pattern", {}).get("String"))]
