"""Parses the bodies of /v1/embeddings, /v1/score and /v1/rerank, by the rules of `protocol.py`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from quire.core.sampling_params import MAX_CACHE_SALT_LENGTH, MAX_INT32, SamplingParams
from quire.errors import SamplingParamsError
from quire.server.body import BodyFields, decode, has_more_strings, ignored_names, shorten, wrong_type, wrong_value
from quire.server.errors import api_error, invalid
from quire.server.limits import MAX_LABEL_LENGTH, MAX_NAME_LENGTH, TOKENS_PER_MESSAGE, Limits
from quire.server.pooling_fields import EMBEDDING, INSTRUCTION, LABELS, RERANK, SCORE, UNSUPPORTED
from quire.server.prompts import Prompt, read_prompts
from quire.server.protocol import (
    DEFAULT_LIMITS,
    GenerationCall,
    check_unsupported,
    prompt_price,
    read_fields,
    read_model,
    shape_of,
    text_price,
)

MAX_INPUTS = 2048
"""Inputs of one call, as at OpenAI; pairs of one score."""
MAX_DIMENSIONS = 1 << 20
JUDGE_TOKENS = 128
"""Approximate tokens around a query and a document when a chat model judges them."""
_EMBEDDING, _SCORE, _RERANK = (shape_of(table, UNSUPPORTED) for table in (EMBEDDING, SCORE, RERANK))


@dataclass(slots=True, kw_only=True)
class PooledCall(GenerationCall):
    """What the three routes have in common.

    Attributes:
        truncate: most tokens of each text; -1: as many as the context has; None: all.
        keeps_last: of a text that has more, the last ones are kept rather than the first.
    """

    truncate: int | None = None
    keeps_last: bool = False


@dataclass(slots=True, kw_only=True)
class EmbeddingCall(PooledCall):
    """POST /v1/embeddings.

    Attributes:
        base64: embeddings are returned as base64 of 32-bit little-endian numbers.
        dimensions: embeddings are truncated to this many; None: they are not.
        prompt_name: see `LLM.embed`.
    """

    prompts: list[Prompt]
    base64: bool = False
    dimensions: int | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    prompt_name: str | None = None

    @property
    def num_choices(self) -> int:
        """Prompts."""
        return len(self.prompts)

    def price(self) -> int:
        """Prompt tokens, estimated from above without tokenizing."""
        return sum(map(prompt_price, self.prompts))


@dataclass(slots=True, kw_only=True)
class ScoreCall(PooledCall):
    """POST /v1/score and /v1/rerank.

    Attributes:
        pairs: queries and documents to compare.
        instruction: the criterion for a chat model. labels: its words for yes and no.
        ranks: the response is sorted and has the best `top_n`, with their documents if `return_documents` is set.
    """

    pairs: list[tuple[str, str]]
    instruction: str = INSTRUCTION
    labels: tuple[str, str] = LABELS
    ranks: bool = False
    top_n: int = 0
    return_documents: bool = True

    @property
    def num_choices(self) -> int:
        """Upper bound on the number of prompts."""
        return len(self.pairs)

    def price(self) -> int:
        """Prompt tokens, estimated from above without tokenizing."""
        more = JUDGE_TOKENS + TOKENS_PER_MESSAGE + text_price(len(self.instruction.encode()))
        return sum(text_price(len(query.encode()) + len(text.encode())) + more for query, text in self.pairs)


def parse_embedding(body: bytes, limits: Limits = DEFAULT_LIMITS) -> EmbeddingCall:
    """The call in a body of POST /v1/embeddings. Raises `ApiError`."""
    given = read_fields(_EMBEDDING, body)
    check_unsupported(given, UNSUPPORTED)
    encoding = given.text("encoding_format", MAX_LABEL_LENGTH) or "float"
    if encoding not in ("float", "base64"):
        raise wrong_value("encoding_format", encoding, "float or base64")
    return EmbeddingCall(
        **_common(given, _EMBEDDING.names),
        prompts=read_prompts(given.raw("input"), dataclasses.replace(limits, prompts=MAX_INPUTS), where="input"),
        base64=encoding == "base64",
        dimensions=given.integer("dimensions", 1, MAX_DIMENSIONS),
        add_special_tokens=given.boolean("add_special_tokens", default=True),
        prompt_name=given.text("prompt_name", MAX_NAME_LENGTH),
    )


def parse_score(body: bytes, limits: Limits = DEFAULT_LIMITS) -> ScoreCall:
    """The call in a body of POST /v1/score. Raises `ApiError`."""
    given = read_fields(_SCORE, body)
    check_unsupported(given, UNSUPPORTED)
    first, second = (_either(given, *names, limits) for names in (("text_1", "queries"), ("text_2", "documents")))
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}; text_1 must be one text, or as many"
        raise invalid(message, "text_1")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    return ScoreCall(**_common(given, _SCORE.names), **_judging(given, limits), pairs=pairs)


def parse_rerank(body: bytes, limits: Limits = DEFAULT_LIMITS) -> ScoreCall:
    """The call in a body of POST /v1/rerank. Raises `ApiError`."""
    given = read_fields(_RERANK, body)
    check_unsupported(given, UNSUPPORTED)
    query = given.raw("query")
    if query is None:
        raise invalid("query is missing; it must be a string", "query", "missing_parameter")
    texts = read_prompts(query, limits, text_only=True, where="query")
    return ScoreCall(
        **_common(given, _RERANK.names),
        **_judging(given, limits),
        pairs=[(str(texts[0]), document) for document in _documents(given.raw("documents"), limits)],
        ranks=True,
        top_n=given.integer("top_n", 0, MAX_INT32) or 0,
        return_documents=given.boolean("return_documents", default=True),
    )


def _common(given: BodyFields, known: frozenset[str]) -> dict[str, Any]:
    """Fields that all three routes read alike."""
    options = {
        "priority": given.integer("priority", -MAX_INT32 - 1, MAX_INT32),
        "cache_salt": given.text("cache_salt", MAX_CACHE_SALT_LENGTH),
    }
    asked: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        params = SamplingParams(max_tokens=0, seed=0, speculate=False, **asked)
    except SamplingParamsError as error:
        raise api_error(error) from None
    side, truncate = (
        given.text("truncation_side", MAX_LABEL_LENGTH),
        given.integer("truncate_prompt_tokens", -1, MAX_INT32),
    )
    if side not in (None, "left", "right"):
        raise wrong_value("truncation_side", side, "left or right")
    if truncate == 0:
        raise wrong_value("truncate_prompt_tokens", truncate, "-1 or at least 1")
    return {
        "model": read_model(given),
        "params": params,
        "truncate": truncate,
        "keeps_last": side == "left",
        "user": given.text("user", MAX_LABEL_LENGTH),
        "ignored": ignored_names(given.unknown(known)),
    }


def _either(given: BodyFields, name: str, alias: str, limits: Limits) -> list[str]:
    """Texts in one of two fields of the same meaning."""
    if given.has(name) and given.has(alias):
        raise invalid(f"{name} and {alias} mean the same, so give one of them", alias)
    where = alias if given.has(alias) else name
    texts = read_prompts(given.raw(where), dataclasses.replace(limits, prompts=MAX_INPUTS), where=where)
    for text in texts:
        if not isinstance(text, str):
            raise invalid(f"{where} must be a string or a list of strings", where, "invalid_type")
    return [str(text) for text in texts]


def _judging(given: BodyFields, limits: Limits) -> dict[str, Any]:
    """The fields about how a chat model judges."""
    labels = given.get("labels")
    if labels is None:
        labels = [*LABELS]
    fine = isinstance(labels, list) and len(labels) == 2 and all(isinstance(one, str) for one in labels)
    if not fine or not all(0 < len(one) <= MAX_NAME_LENGTH for one in labels):
        raise wrong_type("labels", labels, f"two strings of at most {MAX_NAME_LENGTH} characters")
    return {"labels": tuple(labels), "instruction": given.text("instruction", limits.text) or INSTRUCTION}


class _Document(msgspec.Struct):
    text: str


def _documents(raw: Raw | None, limits: Limits) -> list[str]:
    """Documents to rank: strings, or objects with a text."""
    allowed = "a list of strings, or of objects with a text"
    if raw is None:
        raise invalid(f"documents is missing; it must be {allowed}", "documents", "missing_parameter")
    data = bytes(raw)
    if has_more_strings(data, 4 * MAX_INPUTS):
        raise invalid(f"documents has more than {MAX_INPUTS} documents", "documents")
    found = decode(data, list[str | _Document], where="documents")
    texts = [one if isinstance(one, str) else one.text for one in found]
    if not 0 < len(texts) <= MAX_INPUTS:
        raise invalid(f"documents has {shorten(len(texts))} documents; allowed are 1 to {MAX_INPUTS}", "documents")
    size = sum(map(len, texts))
    if size > limits.text:
        raise invalid(f"documents have {size} characters; at most {limits.text} are allowed", "documents")
    return texts
