"""A request's id, and the summary for its line in the log, which is filled in while the request is handled.

The id is the client's `x-request-id` if that is valid, or a new one; it is in the response's header and body and in the
log. It is only a label: the engine uses numbers of its own, and two requests may have the same id.
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
"""Valid ids from clients: visible in a log, and harmless in a URL's path, a header, a terminal and HTML."""
MAX_LOGGED = 256
"""Maximum characters of a path, a model's name or a `user` in the log."""
_PREFIXES = {
    "/v1/completions": "cmpl",
    "/v1/chat/completions": "chatcmpl",
    "/v1/embeddings": "embd",
    "/v1/messages": "msg",
}
_SUMMARY = "quire.summary"


def make_id(path: str = "") -> str:
    """A new id, with the prefix of OpenAI's responses of this route."""
    return f"{_PREFIXES.get(path, 'req')}-{secrets.token_hex(12)}"


def begin(scope: MutableMapping[str, Any]) -> RequestSummary:
    """Create the id and the summary of an ASGI request."""
    path = scope["path"]
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    own = given[0].decode("latin-1") if len(given) == 1 else ""
    request_id = own if REQUEST_ID.fullmatch(own) else make_id(path)
    summary = scope[_SUMMARY] = RequestSummary(request_id=request_id, path=path[:MAX_LOGGED])
    return summary


def summary_of(scope: Mapping[str, Any]) -> RequestSummary:
    """The summary of this request."""
    summary = scope.get(_SUMMARY)
    if not isinstance(summary, RequestSummary):
        raise TypeError("a request was not begun")
    return summary


def note_call(scope: Mapping[str, Any], model: str | None, user: str | None) -> None:
    """Note the model and the user that the body names."""
    summary = summary_of(scope)
    summary.model, summary.user = (model or "")[:MAX_LOGGED], (user or "")[:MAX_LOGGED]


def note_error(scope: Mapping[str, Any], error: ApiError) -> bool:
    """Note the error with which the request is answered; False if the request has no summary."""
    summary = scope.get(_SUMMARY)
    if isinstance(summary, RequestSummary):
        summary.end("error" if error.status == 500 else f"refused {error.status}", error.message)
    return summary is not None


def log_unread(request_id: str, error: ApiError) -> None:
    """Log what was refused before it was a request."""
    log_request(logger, RequestSummary(request_id=request_id, reason=f"refused {error.status}", error=error.message))
