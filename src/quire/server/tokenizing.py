"""POST /tokenize and /detokenize, in vLLM's format. They wait in the same queue as calls for text."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import TokenOutOfRangeError
from quire.server.auth import tenant_of
from quire.server.errors import api_error
from quire.server.generation import Shared, ignored_header, read_call, render
from quire.server.limits import Limits
from quire.server.protocol import DetokenizeCall, TokenizeCall, parse_detokenize, parse_tokenize
from quire.server.replies import json_reply

C = TypeVar("C", TokenizeCall, DetokenizeCall)


async def tokenize(shared: Shared, request: Request) -> Response:
    """The tokens of a text or a chat. Raises `ApiError`."""

    async def work(call: TokenizeCall) -> dict[str, Any]:
        tokens = await _tokens(shared, call)
        texts = await shared.pool.token_texts(tokens) if call.return_token_strs else None
        info = shared.context.client.info
        longest = info.max_model_len if info is not None else None
        return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": texts}

    return await _answer(shared, request, parse_tokenize, work)


async def detokenize(shared: Shared, request: Request) -> Response:
    """The text of tokens. Raises `ApiError`."""

    async def work(call: DetokenizeCall) -> dict[str, Any]:
        info = shared.context.client.info
        largest = max(call.tokens, default=0)
        if info is not None and largest >= info.vocab_size:
            message = f"tokens has the token id {largest}, but the model's ids are 0 to {info.vocab_size - 1}"
            raise TokenOutOfRangeError(message, param="tokens")
        return {"prompt": await shared.pool.decode(call.tokens)}

    return await _answer(shared, request, parse_detokenize, work)


async def _tokens(shared: Shared, call: TokenizeCall) -> list[int]:
    if call.prompt is not None:
        [tokens] = await shared.pool.encode([call.prompt], call.add_special_tokens)
        return tokens
    return (await render(shared.pool, call)).token_ids


async def _answer(
    shared: Shared,
    request: Request,
    parse: Callable[[bytes, Limits], C],
    work: Callable[[C], Coroutine[Any, Any, dict[str, Any]]],
) -> Response:
    """Read the call, wait for a place in the queue, and do the work."""
    try:
        call = await read_call(shared, request, parse)
        ticket = shared.admission.enter(1, call.price(), tenant_of(request.scope).owner)
        try:
            return json_reply(await work(call), headers=ignored_header(call.ignored))
        finally:
            ticket.leave()
    except Exception as error:
        answer = api_error(error)
        if answer.code == "internal_error":
            raise
        shared.count_refused(answer)
        raise answer from None
