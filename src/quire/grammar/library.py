"""Calls the llguidance library; no other module does.

The library is written in Rust, compiles without holding the GIL, and cannot be interrupted. Its time and memory are
bounded by its own `LIMITS`, and by what is refused before it is called.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.grammar.json_schema import enforced_schema
from quire.grammar.structural_tag import literal_pattern, structural_tag_grammars
from quire.grammar.vocabulary import Vocabulary

WHITESPACE = r"\x20{1,2}|\r?\n[\x20\t]{0,64}"
"""White space allowed in JSON: one or two spaces, or a line break with indentation. With any amount, some models
never stop."""

Compiled: TypeAlias = llguidance.LLMatcher
Executor: TypeAlias = llguidance.LLExecutor
Tokenizer: TypeAlias = llguidance.LLTokenizer

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=20_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Limits on compiling, on a step (about 15 ms) and on a matcher's memory. A request that exceeds them fails. What
compiling may take is mostly the lexer's fuel: some 180 bytes and 1.7 µs each."""

MOST_BYTES = 256 << 20
"""More than a compiled grammar takes within these limits."""


MAX_RULES = 2_000
"""Most rules and groups of a user's grammar: the library recurses into them, and a stack of 8 MiB overflows at about
3,000."""

_RULE = re.compile(r"^[ \t]*[?!]?\w[^:\n]*:|\(", re.MULTILINE)


def library_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Convert a vocabulary for the library, which takes a second for 150,000 tokens."""
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))


def executor() -> Executor:
    """A thread pool for masks, on half of the cores, since steps are computed at the same time, but at most 8."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return llguidance.LLExecutor(min(8, max(1, processors // 2)))


def compiled(wanted: StructuredOutputsParams, tokenizer: Tokenizer, vocabulary: Vocabulary) -> Compiled:
    """Compile a grammar. Returns a matcher in its initial state, to be copied.

    Args:
        tokenizer: the vocabulary, converted by `library_tokenizer`.

    Raises:
        SamplingParamsError: it is not valid, or too large, or needs a text that the model's tokens cannot spell.
    """
    text = grammar_text(wanted, vocabulary.specials, vocabulary.markers)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask may take long or exceed the limits: better here than in a step
    why = why_not(matcher.get_error()) if matcher.is_error() else no_way_on(matcher, vocabulary)
    if why is not None:
        raise SamplingParamsError(f"structured_outputs.{wanted.kind} cannot be used: {why}")
    return matcher


def allocated() -> int | None:
    """Bytes that this process has allocated; None where the C library does not tell. It is not accounted by thread, so
    a difference includes what others allocated meanwhile."""
    info = _mallinfo()
    return None if info is None else info()


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    )


@functools.cache
def _mallinfo() -> Callable[[], int] | None:
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if call is None:
        return None
    call.restype = _Mallinfo

    def info() -> int:
        found = call()
        return int(found.uordblks + found.hblkhd)

    return info


def no_way_on(matcher: Compiled, vocabulary: Vocabulary) -> str | None:
    """Why no token of the model leads to an allowed text; None if one does."""
    if not vocabulary.unspelled:
        return None
    forced = [vocabulary.unspelled[token] for token in matcher.compute_ff_tokens() if token in vocabulary.unspelled]
    if not forced:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if bits[: vocabulary.size + 1].any():
            return None
        some = b"".join(byte for token, byte in vocabulary.unspelled.items() if bits[token])
        return f"it needs one of the bytes {some[:20].hex(' ')}, which the model's tokens cannot spell"
    text = b"".join(forced[:20])
    return f"it needs {text.decode(errors='backslashreplace')!r}, which the model's tokens cannot spell"


def grammar_text(
    wanted: StructuredOutputsParams, specials: Mapping[str, int], markers: Mapping[str, int] | None = None
) -> str:
    """Translate a grammar into the library's language; `specials` and `markers` are the vocabulary's.

    Raises:
        SamplingParamsError: it is not valid, as far as that is checked here.
    """
    if wanted.json is not None or wanted.json_object:
        schema = str(wanted.json) if wanted.json is not None else '{"type":"object"}'
        spaces: dict[str, Any] = {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}
        if wanted.disable_any_whitespace:
            spaces = {"whitespace_flexible": False}
        return llguidance.LLMatcher.grammar_from_json_schema(enforced_schema(schema, spaces))
    if wanted.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return llguidance.LLMatcher.grammar_from_regex("|".join(map(literal_pattern, wanted.choice)))
    if wanted.structural_tag is not None:
        return structural_tag_grammars(str(wanted.structural_tag), specials, WHITESPACE, _lark, markers)
    return llguidance.LLMatcher.grammar_from_lark(_lark(wanted.grammar or ""))


def _lark(text: str) -> str:
    """Convert a user's grammar to Lark."""
    if "%json" in text:
        raise SamplingParamsError("a grammar with %json is not supported: give the schema as structured_outputs.json")
    _check_rules(text.count("::="))  # of GBNF, whose conversion takes time quadratic in their number
    try:
        lark = str(any_to_lark(text))
    except Exception as error:  # a user's text may cause any error in the converter
        raise SamplingParamsError(f"the grammar cannot be read as GBNF: {in_words(str(error))}") from None
    _check_rules(len(_RULE.findall(lark)))
    return lark


def _check_rules(count: int) -> None:
    if count > MAX_RULES:
        raise SamplingParamsError(
            f"the grammar has {count} rules and groups; at most {MAX_RULES} are allowed: make it smaller"
        )


def why_not(text: str) -> str:
    """The library's error message, in terms that a user understands."""
    if text.startswith("oneOf constraints"):
        return "oneOf is enforced only where no two of its options can hold at once; write anyOf"
    if "symbols.len()" in text:  # the library's panic beyond 65,000
        return "it has too many parts; make it smaller"
    if text.startswith("NoExtension"):
        return "no text meets it that the model's tokens can spell"
    return in_words(text)


def in_words(text: str) -> str:
    """The library's message as one line of limited length."""
    text = " ".join(text.removesuffix("<non-verbose/>").split())
    return text if len(text) <= 300 else text[:300] + "..."
