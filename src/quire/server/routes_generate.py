"""The routes for text: completions, chats, embeddings, scores, tokenizing, detokenizing, and aborting."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from quire.server.admission import Admission
from quire.server.auth import tenant_of
from quire.server.context import AppContext
from quire.server.errors import ApiError
from quire.server.generation import LARGE_BODIES, GeneratedAnswer, Shared
from quire.server.messages import CountTokens, Messages
from quire.server.messages_protocol import parse_count, parse_messages
from quire.server.pooling import Pooling
from quire.server.pooling_protocol import parse_embedding, parse_rerank, parse_score
from quire.server.protocol import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from quire.server.replies import json_reply
from quire.server.request_log import REQUEST_ID
from quire.server.routes_responses import add_routes as add_responses
from quire.server.tokenizing import Detokenize, Tokenize
from quire.server.transport import Bodies


def router_for(context: AppContext) -> APIRouter:
    """The routes of one HTTP process."""
    server, metrics = context.server, context.metrics
    bound = Admission(server.max_queued_requests, server.max_queued_tokens, server.api_workers, metrics.queue)
    shared = Shared(context, bound, Bodies(LARGE_BODIES * server.max_body_bytes))
    router = APIRouter(tags=["text"])

    @router.post("/v1/completions", summary="Continue a text")
    async def completions(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_completion)

    @router.post("/v1/chat/completions", summary="Answer in a chat")
    async def chat_completions(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_chat)

    @router.post("/v1/messages", summary="Answer in a chat, as Anthropic's interface does")
    async def messages(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_messages, Messages)

    @router.post("/v1/messages/count_tokens", summary="The tokens of such a chat")
    async def count_tokens(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_count, CountTokens)

    add_responses(router, shared)

    @router.post("/v1/embeddings", summary="The embeddings of texts")
    async def embeddings(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_embedding, Pooling)

    @router.post("/v1/score", summary="How well texts fit together")
    @router.post("/score", include_in_schema=False)
    async def score(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_score, Pooling)

    @router.post("/v1/rerank", summary="Documents in the order of how well they fit a query")
    @router.post("/v2/rerank", include_in_schema=False)
    @router.post("/rerank", include_in_schema=False)
    async def rerank(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_rerank, Pooling)

    @router.post("/tokenize", summary="The tokens of a text or a chat")
    async def tokens_of(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_tokenize, Tokenize)

    @router.post("/detokenize", summary="The text of tokens")
    async def text_of(request: Request) -> Response:
        return GeneratedAnswer(shared, parse_detokenize, Detokenize)

    @router.post("/abort/{request_id:path}", summary="End a response that is being made")
    async def abort(request_id: Annotated[str, Path(description="The response's id.")], request: Request) -> Response:
        return json_reply(await _abort(context, request_id, tenant_of(request.scope).owner))

    return router


async def _abort(context: AppContext, request_id: str, owner: str) -> dict[str, bool]:
    """Abort a request of this tenant.

    Raises:
        ApiError: 404: it does not exist, has ended, or belongs to another tenant.
    """
    if not REQUEST_ID.fullmatch(request_id) or not await context.client.abort_named(request_id, owner):
        raise ApiError(404, "no running request with this id was sent with this key", code="unknown_response")
    return {"aborted": True}
