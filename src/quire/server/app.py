"""The app of one HTTP process: its routes, and the middleware in front of them.

From the outside in: request id, headers, log line and unexpected errors (`EdgeMiddleware`), CORS if enabled, API keys
(`AuthMiddleware`), the router, and for the API's own routes a gate that is closed while no request can be served.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import EngineClosedError, QuireError
from quire.log import event, log_request
from quire.server import request_log, routes_info
from quire.server.auth import AuthMiddleware, Tenants
from quire.server.context import AppContext, stop_error
from quire.server.dialects import instead_of
from quire.server.errors import ANTHROPIC, ApiError, api_error
from quire.server.host_policy import HostPolicy
from quire.server.http_options import HttpOptions
from quire.server.metrics import ROUTES, HttpMetrics
from quire.server.openapi import openapi_document
from quire.server.prefix import PrefixMiddleware
from quire.server.replies import error_reply, send_error
from quire.version import __version__

if TYPE_CHECKING:
    from quire.server.traces import Traces

logger = logging.getLogger(__name__)

EXPOSED_HEADERS = (
    "x-request-id", "request-id", "x-quire-ignored", "x-quire-clamped", "x-quire-loosened", "retry-after",
)  # fmt: skip
"""Response headers that pages of other origins may read."""

UNVERSIONED = frozenset({"chat", "completions", "embeddings", "messages", "models", "responses"})
"""The first part of OpenAI's and Anthropic's paths after `/v1`."""

GONE = 499
"""Status in the metrics of a client that left before there was one."""

_NO_TELEMETRY = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)
_ALWAYS = [(b"x-content-type-options", b"nosniff")]
_CONTENT_POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_PAGE_HEADERS = [
    (b"content-security-policy", _CONTENT_POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-cache"),
]


def create_app(context: AppContext, generation: APIRouter | None = None) -> FastAPI:
    """Make the ASGI app, middleware included.

    Args:
        generation: the routes that run requests; default: those of `routes_generate`.
    """
    if generation is None:
        from quire.server.routes_generate import router_for

        generation = router_for(context)
    app = FastAPI(
        title="Quire",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,  # type: ignore[arg-type]
    )
    gate = [Depends(_gate(context))]
    app.include_router(routes_info.open_router(context))
    app.include_router(routes_info.model_router(context), dependencies=gate)
    app.include_router(generation, dependencies=gate)
    app.include_router(routes_info.operator_router(context), dependencies=gate)
    app.mount("/static", routes_info.static_files(), name="static")
    app.openapi = lambda: openapi_document(app, context.tenants.count > 0, context.server.root_path)  # type: ignore[method-assign]
    _add_error_handlers(app, context)
    for layer in middleware(context):
        app.add_middleware(layer.cls, *layer.args, **layer.kwargs)
    return app


def middleware(context: Surroundings) -> list[Middleware]:
    """The middleware of a server or a router, the innermost first."""
    server = context.server

    def on_refused(scope: Scope, error: ApiError) -> None:
        context.metrics.rejected("unauthorized")
        request_log.note_error(scope, error)

    policy = HostPolicy(server.host, server.allowed_host, server.cors_origin)
    layers = [Middleware(AuthMiddleware, tenants=context.tenants, on_refused=on_refused, policy=policy)]
    if server.cors_origin:  # pages of other origins; they send the key in a header, so no cookies are involved
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(server.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED_HEADERS),
        )
        layers.append(cors)
    layers.append(Middleware(EdgeMiddleware, context=context))
    if server.root_path is not None:
        layers.append(Middleware(PrefixMiddleware, root_path=server.root_path))
    return layers


def _gate(context: AppContext) -> Callable[[], Awaitable[None]]:
    """A dependency that admits a request only while it can be served."""

    async def gate() -> None:
        await context.wait_for_the_rest()
        error = context.not_ready()
        if error is not None:
            context.metrics.rejected("draining" if context.client.draining else "not_ready")
            raise error

    return gate


# -- errors ------------------------------------------------------------------------------------------------


def _add_error_handlers(app: FastAPI, context: AppContext) -> None:
    """Return every exception of a route in OpenAI's error format."""

    async def own(request: Request, error: Exception) -> Response:
        answer = api_error(error)
        if isinstance(error, EngineClosedError):  # it died between the gate and the question
            answer = context.not_ready() or answer
        elif answer.status >= 500 and not isinstance(error, ApiError):
            _log_unexpected(request_log.summary_of(request.scope).request_id, error)
        return replied(request, answer)

    async def of_the_router(request: Request, error: Exception) -> Response:
        return replied(request, _routing_error(request, error))

    async def of_a_query(request: Request, error: Exception) -> Response:
        return replied(request, _query_error(error))

    def replied(request: Request, answer: ApiError) -> Response:
        request_log.note_error(request.scope, answer)
        return error_reply(answer, request.scope["path"])

    app.add_exception_handler(ApiError, own)
    app.add_exception_handler(QuireError, own)
    app.add_exception_handler(HTTPException, of_the_router)
    app.add_exception_handler(RequestValidationError, of_a_query)


def _routing_error(request: Request, error: Exception) -> ApiError:
    """404 or 405."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    path = _shown(request.scope["path"])
    if status == 405:
        allowed = f"; allowed: {headers['Allow']}" if "Allow" in headers else ""
        message = f"{path} does not take {_shown(request.method)}{allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    if status == 404:
        message = f"there is nothing at {path}; {_instead(request)}"
        return ApiError(404, message, code="unknown_url", headers=headers)
    return ApiError(status, "the request could not be served", headers=headers)


def _instead(request: Request) -> str:
    """What to ask for instead of a path that is not there."""
    asked = request.scope["path"]
    plain = re.sub("/+", "/", asked).rstrip("/")  # a base URL that ends with a slash makes two
    if plain != asked and plain in ROUTES:
        return f"use {plain}"
    return instead_of(asked) or "/docs lists what this server offers"


def _query_error(error: Exception) -> ApiError:
    """400 for a URL parameter of the wrong type. The message omits the value, which may be anything."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    name = str(found[0]["loc"][-1]) if found else None
    text = str(found[0].get("msg", "not valid")) if found else "a parameter is not valid"
    return ApiError(400, f"{name}: {text}" if name else text, param=name)


def _shown(text: str) -> str:
    """A part of the request as messages may show it: short, printable ASCII."""
    cut = text if len(text) <= 80 else text[:77] + "..."
    return cut.encode("ascii", "backslashreplace").decode() if cut.isprintable() else repr(cut)


class Surroundings(Protocol):
    """The part of a server's or a router's shared state that the middleware needs."""

    @property
    def server(self) -> HttpOptions: ...

    @property
    def metrics(self) -> HttpMetrics: ...

    @property
    def tenants(self) -> Tenants: ...

    @property
    def stopping(self) -> asyncio.Event: ...

    @property
    def traces(self) -> Traces | None: ...


class EdgeMiddleware:
    """The outermost layer: sets request ids and response headers, catches unexpected errors, and logs one line for each
    call for text and each refused request.
    """

    def __init__(self, app: ASGIApp, context: Surroundings) -> None:
        self.app = app
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        arrived = time.monotonic()
        _add_version(scope)
        summary = request_log.begin(scope)
        own = [(b"x-request-id", summary.request_id.encode())]
        if scope["path"].startswith(ANTHROPIC):
            own.append((b"request-id", summary.request_id.encode()))  # which Anthropic's clients report
        headers = [*own, *_ALWAYS, *(_PAGE_HEADERS if _is_page(scope["path"]) else ())]
        status = GONE

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        async def fail(error: ApiError) -> None:
            request_log.note_error(scope, error)
            if status == GONE:
                await send_error(error, send_on, scope["path"])

        metrics, traces = self.context.metrics, self.context.traces
        metrics.request_received()
        if traces is not None:
            traces.begin(scope)
        try:
            await self.app(scope, receive, send_on)
        except ClientDisconnect:
            summary.end("disconnect")
            metrics.disconnected()
        except asyncio.CancelledError:
            if not self.context.stopping.is_set():
                raise
            await fail(stop_error())
        except Exception as error:
            _log_unexpected(summary.request_id, error)
            await fail(api_error(error))
        finally:
            summary.total_seconds = time.monotonic() - arrived
            metrics.request_done(_route_of(scope), status, summary)
            if traces is not None:
                traces.end(scope, summary)
            if summary.reason and self.context.server.log_requests:
                log_request(logger, summary)


def _log_unexpected(request_id: str, error: Exception) -> None:
    """Log the error's details, which the client does not get, under the request's id."""
    text = f"request {request_id}: an unexpected {type(error).__name__}"
    event(logger, "internal_error", text, level=logging.ERROR, exc_info=error, request_id=request_id)


def _add_version(scope: Scope) -> None:
    """Rewrite `/chat/completions` to `/v1/chat/completions`, so that a base URL without `/v1` works. This comes first,
    so that keys, the router and the log see one path.
    """
    if scope["path"][1:].partition("/")[0] in UNVERSIONED:
        scope["path"] = "/v1" + scope["path"]
        if scope.get("raw_path"):
            scope["raw_path"] = b"/v1" + scope["raw_path"]


def _is_page(path: str) -> bool:
    return path in ("/", "/docs") or path.startswith("/static/")


def _route_of(scope: Scope) -> str:
    """The template of the route that matched; never the path itself, which the client chose."""
    if scope["path"].startswith("/static/"):
        return "/static"
    return str(getattr(scope.get("route"), "path", "other")).replace(":path", "")
