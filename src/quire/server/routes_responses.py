"""The routes of stored responses, as OpenAI's clients ask for them."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response
from starlette.types import Scope

from quire.server.auth import tenant_of
from quire.server.body import shorten
from quire.server.errors import NOT_STORED, ApiError, invalid
from quire.server.generation import GeneratedAnswer, Generation, Parse, Shared
from quire.server.openai_responses import InputTokens, Responses, cancel
from quire.server.openai_responses_protocol import parse_response
from quire.server.replies import json_reply
from quire.server.response_store import ResponseStore

_Id = Annotated[str, Path(description="The response's id.")]


def add_routes(router: APIRouter, shared: Shared) -> None:
    """The routes of one HTTP process, with its own store."""
    store = ResponseStore()
    keeps = shared.context.server.api_workers == 1

    def kind(shared: Shared, parse: Parse, scope: Scope) -> Generation:
        return Responses(shared, parse, scope, store)

    def parser(request: Request) -> Parse:
        find = functools.partial(_items, store, tenant_of(request.scope).owner)
        return functools.partial(parse_response, find=find, keeps=keeps)

    @router.post("/v1/responses", summary="Answer in a chat, as OpenAI's newer interface does")
    async def create(request: Request) -> Response:
        return GeneratedAnswer(shared, parser(request), kind)

    @router.post("/v1/responses/input_tokens", summary="Count the prompt's tokens")
    async def count(request: Request) -> Response:
        return GeneratedAnswer(shared, parser(request), InputTokens)

    @router.get("/v1/responses/{response_id}", summary="A stored response, as it is now")
    async def retrieve(response_id: _Id, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise invalid("a stored response is not streamed; leave out stream", "stream", "unsupported_parameter")
        return json_reply(store.find(response_id, tenant_of(request.scope).owner).answer)

    @router.delete("/v1/responses/{response_id}", summary="Forget a stored response, and end it")
    async def delete(response_id: _Id, request: Request) -> Response:
        owner = tenant_of(request.scope).owner
        if not store.find(response_id, owner).done.is_set():
            await cancel(shared, store, response_id, owner)
        store.delete(response_id, owner)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel", summary="End a response that is being made")
    async def end(response_id: _Id, request: Request) -> Response:
        return json_reply(await cancel(shared, store, response_id, tenant_of(request.scope).owner))

    @router.get("/v1/responses/{response_id}/input_items", summary="The input of a stored response, page by page")
    async def input_items(
        response_id: _Id,
        request: Request,
        order: Annotated[Literal["asc", "desc"], Query(description="desc: the last item first.")] = "desc",
        limit: Annotated[int, Query(ge=1, le=100, description="Most items of a page.")] = 20,
        after: Annotated[str | None, Query(description="The id of the item before the page.")] = None,
    ) -> Response:
        found = store.find(response_id, tenant_of(request.scope).owner)
        return json_reply(_page(msgspec.json.decode(found.input), order, limit, after))


def _page(items: list[dict[str, Any]], order: str, limit: int, after: str | None) -> dict[str, Any]:
    """A page of a response's input, in OpenAI's format.

    Raises:
        ApiError: 400: there is no item `after`.
    """
    named = _named(items)
    if order == "desc":
        named.reverse()
    ids = [item["id"] for item in named]
    if after is not None and after not in ids:
        raise invalid(f"after is {shorten(after)}, which is not the id of an item", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = named[start : start + limit]
    first, last = (page[at]["id"] if page else None for at in (0, -1))
    more = start + limit < len(named)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}


def _named(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items, each with an id of its own: one that repeats would lead from page to page in a circle."""
    named: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(items):
        id = item.get("id", "item_")
        if id in named or id.startswith("item_"):
            id = f"item_{index}"
        named[id] = {"type": "message", **item, "id": id}
    return list(named.values())


def _items(store: ResponseStore, owner: str, response_id: str) -> bytes:
    """The items up to the end of a stored response.

    Raises:
        ApiError: 400 as OpenAI's, if there is none of this id, or if it has not ended.
    """
    param = "previous_response_id"
    try:
        stored = store.find(response_id, owner)
    except ApiError as error:
        raise invalid(f"{param} is {shorten(response_id)}; {error.message}", param, NOT_STORED) from None
    if not stored.done.is_set():
        raise invalid(f"{param} is {shorten(response_id)}, which has not ended yet; wait for it, or cancel it", param)
    return stored.items
