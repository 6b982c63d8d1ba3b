"""Calls whose prompts are pooled: embeddings, scores and ranks.

An embedding model, as its checkpoint says, scores texts by the cosine of their embeddings. Any other model is asked
through its chat template whether the document meets the query, and the score is the probability of "yes" against "no":
as Qwen3-Reranker was trained, and as vLLM scores it.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import math
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.core.pooling import PoolingParams
from quire.engine.frontend import Prepared
from quire.engine.outputs import RequestOutput
from quire.errors import CheckpointError
from quire.models.pooling import PoolingConfig
from quire.server.body import wrong_value
from quire.server.errors import ApiError, invalid
from quire.server.generation import Generation
from quire.server.pooling_protocol import EmbeddingCall, PooledCall, ScoreCall
from quire.server.responses import Responder
from quire.server.streaming import all_of

_encode = msgspec.json.Encoder().encode

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""The words that Qwen3-Reranker was trained with."""


class Pooling(Generation):
    """One call whose response needs only the prompts."""

    async def _prepare(self, call: Any) -> list[Prepared]:
        """The prompts, checked, with the pooling of each."""
        self._config = await self._read_config()
        if isinstance(call, EmbeddingCall):
            self._config.check_dimensions(call.dimensions)
        wanted = await self._wanted(call)
        prepared = await super()._prepare(call)
        client = self._context.client
        return [client.pooled(prompt, wanted) for prompt in prepared]

    def _prompt_field(self, call: Any) -> str | None:
        return "input" if isinstance(call, EmbeddingCall) else None

    async def _read_config(self) -> PoolingConfig:
        """The checkpoint's pooling configuration; small files, read for each call."""
        info = self._context.client.info
        if info is None:
            raise self._context.not_ready() or ApiError(503, "the model is still loading; try again")
        try:
            return await asyncio.to_thread(PoolingConfig.read, Path(info.path))
        except CheckpointError as error:
            what = str(error).replace(info.path, "the checkpoint")
            raise ApiError(400, f"this model cannot be used for embeddings: {what}", code="no_embeddings") from error

    async def _wanted(self, call: EmbeddingCall | ScoreCall) -> PoolingParams:
        if isinstance(call, ScoreCall) and not self._config.declared:
            encoded = await self._shared.pool.encode([*call.labels], False)
            if any(len(ids) != 1 for ids in encoded):
                message = (
                    f"{' and '.join(call.labels)} must be one token each for this model to score texts with; "
                    "say with 'labels' which two words it is to choose from"
                )
                raise invalid(message, "labels")
            return PoolingParams("labels", tuple(ids[0] for ids in encoded))
        if isinstance(call, ScoreCall) and not self._config.compares_by_cosine:
            message = f"this model compares by {self._config.similarity}; scores are cosines here, so embed the texts"
            raise ApiError(400, message, code="no_scores")
        return PoolingParams(self._config.method)

    async def _tokenize(self, call: Any, max_tokens: int | None = None) -> list[tuple[str | None, list[int], None]]:
        most = self._most(call)
        max_tokens = max_tokens if most is None else None
        if not isinstance(call, ScoreCall):
            call = dataclasses.replace(call, prompts=self._config.prompted(call.prompts, call.prompt_name))
            found = [(text, token_ids) for text, token_ids, _ in await super()._tokenize(call, max_tokens)]
            return await self._cut(call, found, most, call.add_special_tokens)
        if self._config.declared:
            texts = _texts(call, self._config)
            encoded = await self._shared.pool.encode(texts, max_tokens=max_tokens)
            return await self._cut(call, [*zip(texts, encoded, strict=True)], most)
        if most is not None:
            raise invalid(
                "truncate_prompt_tokens would leave out the end of the question that this model is asked; shorten the "
                "documents",
                "truncate_prompt_tokens",
            )
        return await all_of([self._judged(call.instruction, *pair, max_tokens) for pair in call.pairs])

    def _most(self, call: PooledCall) -> int | None:
        """Most tokens of each text that are embedded; None if a text that is too long is refused."""
        info = self._context.client.info
        if call.truncate is None or info is None:
            return None
        if call.truncate > info.max_model_len:
            allowed = f"at most {info.max_model_len}, the context's length, or -1 for that"
            raise wrong_value("truncate_prompt_tokens", call.truncate, allowed)
        return info.max_model_len if call.truncate == -1 else call.truncate

    async def _cut(
        self, call: PooledCall, found: list[tuple[str | None, list[int]]], most: int | None, adds: bool = True
    ) -> list[tuple[str | None, list[int], None]]:
        """The prompts, each with at most so many tokens, of which those that the tokenizer adds to a text are some."""
        if most is None or all(len(token_ids) <= most for _, token_ids in found):
            return [(text, token_ids, None) for text, token_ids in found]
        added: tuple[list[int], list[int]] = ([], [])
        if adds and any(text is not None for text, _ in found):
            [plain], [whole] = [await self._shared.pool.encode(["a"], add) for add in (False, True)]
            at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), len(whole))
            added = whole[:at], whole[at + len(plain) :]
        return [
            (text, token_ids, None)
            if len(token_ids) <= most
            else (None, kept(token_ids, most, call.keeps_last, *(added if text is not None else ([], []))), None)
            for text, token_ids in found
        ]

    async def _judged(
        self, instruction: str, query: str, document: str, max_tokens: int | None
    ) -> tuple[str, list[int], None]:
        """A prompt after which a chat model's next token is "yes" or "no"."""
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        without = {"enable_thinking": False}  # left out for a model that never reasons
        chat = await self._shared.pool.render(messages, variables=without, max_tokens=max_tokens)
        return chat.text, chat.token_ids, None

    def _responder(self, call: Any) -> Responder:
        return _Responder(call, self._config, self._id, self._context.model_names[0])


class _Responder(Responder):
    """Builds the response of a call, which is never streamed, of up to 2,048 embeddings."""

    takes_long = True

    def __init__(self, call: EmbeddingCall | ScoreCall, config: PoolingConfig, response_id: str, model: str) -> None:
        self._call, self._config = call, config
        self._head = {"id": response_id, "created": int(time.time()), "model": model}

    def full(self, outputs: list[RequestOutput]) -> bytes:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        self._head["usage"] = {"prompt_tokens": count, "total_tokens": count}
        pooled = [output.pooled or [] for output in outputs]
        if isinstance(self._call, EmbeddingCall):
            return self._embeddings(self._call, pooled)
        scores = self._scores(self._call, pooled)
        if self._call.ranks:
            return self._ranks(self._call, scores)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return _encode({**self._head, "object": "list", "data": data})

    def _embeddings(self, call: EmbeddingCall, pooled: list[list[float]]) -> bytes:
        made = [self._config.embedding(one, call.dimensions) for one in pooled]
        shown = map(_base64 if call.base64 else list, made)
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(shown)]
        return _encode({**self._head, "object": "list", "data": data})

    def _scores(self, call: ScoreCall, pooled: list[list[float]]) -> list[float]:
        if not self._config.declared:
            return [probability(yes, no) for yes, no in pooled]
        made = [self._config.embedding(one) for one in pooled]
        by_text = dict(zip(_texts(call, self._config), made, strict=True))
        return [_cosine(by_text[query], by_text[text]) for query, text in _prompted(call, self._config)]

    def _ranks(self, call: ScoreCall, scores: list[float]) -> bytes:
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": call.pairs[index][1]}} if call.return_documents else {})
            for index in order[: call.top_n or None]
        ]
        return _encode({**self._head, "results": results})


def kept(
    token_ids: list[int], most: int, last: bool, before: Sequence[int] = (), after: Sequence[int] = ()
) -> list[int]:
    """The first tokens of a text, or the `last` ones, with those that the tokenizer adds `before` and `after` it.

    Raises:
        ApiError: there is room for no token of the text.
    """
    added = len(before) + len(after)
    if most <= added:
        raise invalid(
            f"truncate_prompt_tokens is {most}, and the tokenizer adds {added} tokens to each text; allowed are at "
            f"least {added + 1}",
            "truncate_prompt_tokens",
        )
    room = most - added
    own = token_ids[len(before) : len(token_ids) - len(after)]
    return [*before, *(own[-room:] if last else own[:room]), *after]


def probability(yes: float, no: float) -> float:
    """Of "yes" against "no", by their logits."""
    return 1 / (1 + math.exp(min(no - yes, 700.0)))  # beyond that the exponential is no double


def _prompted(call: ScoreCall, config: PoolingConfig) -> list[tuple[str, str]]:
    """A call's pairs, with the checkpoint's prompts prepended to queries and documents."""
    query, document = config.before("query"), config.before("document")
    return [(query + asked, document + text) for asked, text in call.pairs]


def _texts(call: ScoreCall, config: PoolingConfig) -> list[str]:
    """The texts of a call's pairs, each once, as they are embedded."""
    return list(dict.fromkeys(text for pair in _prompted(call, config) for text in pair))


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    lengths = math.sqrt(math.fsum(x * x for x in first)) * math.sqrt(math.fsum(x * x for x in second))
    return math.fsum(x * y for x, y in zip(first, second, strict=True)) / (lengths or 1.0)


def _base64(embedding: array[float]) -> str:
    if sys.byteorder == "big":
        embedding.byteswap()
    return base64.b64encode(embedding).decode()
