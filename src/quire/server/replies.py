"""Short responses, JSON and errors, for routes and for middleware in front of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Send

from quire.server.errors import ApiError


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response. Bytes are sent as they are."""
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return Response(body, status, headers, media_type="application/json")


def error_reply(error: ApiError, path: str = "") -> Response:
    """An error in the format of this path: Anthropic's or OpenAI's."""
    return json_reply(error.body(path), error.status, error.headers)


def models_list(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The response of `/v1/models`: OpenAI's list, which is also Anthropic's only page."""
    first, last = (cards[at]["id"] if cards else None for at in (0, -1))
    return {"object": "list", "data": cards, "has_more": False, "first_id": first, "last_id": last}


async def send_json(send: Send, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    """Send a JSON response over ASGI."""
    body = msgspec.json.encode(content)
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    raw += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(error: ApiError, send: Send, path: str = "") -> None:
    """Send `error_reply` over ASGI."""
    await send_json(send, error.body(path), error.status, error.headers)
