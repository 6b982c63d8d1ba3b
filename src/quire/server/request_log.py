"""A request's id, and what its line in the log is made of: gathered on its way in, written at its end.

The id is the client's own `x-request-id`, if it sends a valid one, or made here. The answer's header, its body and the
log carry the same. It is a label: what the engine knows a request by is made elsewhere, and two requests may share one.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping, MutableMapping
from typing import Any

from quire.log import RequestSummary, log_request
from quire.server.errors import ApiError

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:;,=+/@~-]{0,127}")
"""Ids that are taken from clients: visible in a log, and harmless in a URL's path, a header, a terminal and HTML."""
MAX_LOGGED = 256
"""Characters of a path, a model's name or a `user` that go into the log."""
_PREFIXES = {
    "/v1/completions": "cmpl",
    "/v1/chat/completions": "chatcmpl",
    "/v1/embeddings": "embd",
    "/v1/messages": "msg",
}
_SUMMARY = "quire.summary"


def make_id(path: str = "") -> str:
    """A new id, with the prefix that OpenAI's answers of this route have."""
    return f"{_PREFIXES.get(path, 'req')}-{secrets.token_hex(12)}"


def begin(scope: MutableMapping[str, Any]) -> RequestSummary:
    """Give a request of ASGI its id and its summary."""
    path = scope["path"]
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    own = given[0].decode("latin-1") if len(given) == 1 else ""
    request_id = own if REQUEST_ID.fullmatch(own) else make_id(path)
    summary = scope[_SUMMARY] = RequestSummary(request_id=request_id, path=path[:MAX_LOGGED])
    return summary


def summary_of(scope: Mapping[str, Any]) -> RequestSummary:
    """What is known of this request so far, to be added to."""
    summary = scope.get(_SUMMARY)
    if not isinstance(summary, RequestSummary):
        raise TypeError("a request was not begun")
    return summary


def note_call(scope: Mapping[str, Any], model: str | None, user: str | None) -> None:
    """The body has been read: what it says of itself."""
    summary = summary_of(scope)
    summary.model, summary.user = (model or "")[:MAX_LOGGED], (user or "")[:MAX_LOGGED]


def note_error(scope: Mapping[str, Any], error: ApiError) -> bool:
    """The request is answered with this error; False where nothing began that it could be noted for."""
    summary = scope.get(_SUMMARY)
    if isinstance(summary, RequestSummary):
        summary.end("error" if error.status == 500 else f"refused {error.status}", error.message)
    return summary is not None


def log_unread(request_id: str, error: ApiError) -> None:
    """The line of what was refused before it was a request."""
    log_request(logger, RequestSummary(request_id=request_id, reason=f"refused {error.status}", error=error.message))
