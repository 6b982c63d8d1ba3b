"""The router's ASGI app: its routes, inside the same middleware as a server's (`server/app.py`, `server/auth.py`).

Requests for text are looked up in a table of paths and go straight to `Relay`, without a web framework: this path has
to be fast. Everything else is small.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.http_client import HttpError, NoAnswerError
from quire.router.metrics import ROUTES
from quire.router.relay import RESUMABLE_PATHS, Relay, no_server, parsed, unknown_model
from quire.router.servers import Server
from quire.router.site import Site
from quire.router.status import life_of, status_document
from quire.server import request_log
from quire.server.app import middleware
from quire.server.auth import METRICS_PATH, forbidden, tenant_of
from quire.server.body import check_media_type
from quire.server.context import stop_error
from quire.server.errors import ApiError, invalid
from quire.server.replies import models_list, send_error, send_json
from quire.server.transport import read_body
from quire.typed_json import BAD_JSON
from quire.version import __version__

STATIC = Path(__file__).parent / "static"
PAGES = {"/": ("index.html", "text/html; charset=utf-8"), "/static/router.js": ("router.js", "text/javascript")}
TEXT_PATHS = (
    *RESUMABLE_PATHS,
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
PASSED_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
"""Any server of the model can answer these."""
ANSWER_SECONDS = 60.0
ANSWER_BYTES = 64 << 20
"""Largest response that is passed on in one piece: the tokens of the largest body, with their texts."""
RESPONSES, MODELS = "/v1/responses/", "/v1/models/"
DRAIN, UNDRAIN, JOIN, ABORT = "/admin/drain/", "/admin/undrain/", "/admin/join", "/abort/"
LIFE = "/router/requests/"
MAX_JOIN_BYTES = 4096

_PREFIXES = {
    "/admin/": "/admin",
    "/static/": "/static",
    ABORT: "/abort/{request_id}",
    LIFE: "/router/requests/{request_id}",
    RESPONSES: "/v1/responses/{response_id}",
    MODELS: "/v1/models/{id}",
}
"""What routes that end with a name are counted as."""

_CANCELLED = b'"status":"cancelled"'

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class _Route(NamedTuple):
    """The route that `EdgeMiddleware` counts a request under."""

    path: str


def create_app(site: Site) -> ASGIApp:
    """Make the ASGI app, middleware included."""
    app: ASGIApp = RouterApp(site)
    for layer in middleware(site):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


class RouterApp:
    """Finds a request's handler, and returns errors in OpenAI's format."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("HEAD", "/health"): self._health,
            ("GET", "/live"): self._live,
            ("HEAD", "/live"): self._live,
            ("GET", "/version"): self._version,
            ("GET", METRICS_PATH): self._metrics,
            ("GET", "/router/status"): self._status,
            ("POST", JOIN): self._join,
        }
        self._routes |= {(method, path): self._page for path in PAGES for method in ("GET", "HEAD")}
        self._routes |= {("POST", path): self._text for path in TEXT_PATHS}
        self._routes |= {("POST", path): self._passed for path in PASSED_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        handler = self._routes.get((method, path)) or self._prefixed(method, path)
        scope["route"] = _Route(counted_as(path) if handler else "other")
        try:
            if handler is None:
                raise self._unknown(method, path)
            await handler(scope, receive, send)
        except ApiError as error:
            request_log.note_error(scope, error)
            await send_error(error, send, path)

    def _prefixed(self, method: str, path: str) -> Handler | None:
        """Find the handler of a route that ends with a name."""
        if method == "GET" and path.startswith(LIFE):
            return self._life
        if method == "GET" and path.startswith(MODELS):
            return self._model
        if path.startswith(RESPONSES) and method in ("GET", "POST", "DELETE"):
            return self._response
        if method != "POST":
            return None
        admin: tuple[tuple[str, Handler], ...] = ()
        if self._site.config.admin:
            admin = ((DRAIN, self._drain), (UNDRAIN, self._undrain))
        for prefix, handler in (*admin, (ABORT, self._abort)):
            if path.startswith(prefix):
                return handler
        return None

    def _unknown(self, method: str, path: str) -> ApiError:
        allowed = sorted({verb for verb, known in self._routes if known == path})
        if allowed:
            headers = {"allow": ", ".join(allowed)}
            message = f"this path does not take {method[:16]}; allowed: {headers['allow']}"
            return ApiError(405, message, code="method_not_allowed", headers=headers)
        if path.startswith((DRAIN, UNDRAIN)):
            return ApiError(404, "this needs a router with --admin, and its --api-key", code="unknown_url")
        paths = ", ".join(sorted({known for _, known in self._routes}))
        return ApiError(404, f"there is nothing at this path; a router has {paths}", code="unknown_url")

    # -- requests for text ---------------------------------------------------------------------------------

    async def _text(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._site.draining:
            self._site.metrics.rejected("draining")
            raise stop_error()
        await Relay(self._site, scope).run(receive, send)

    async def _passed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a small request on to a server of its model; if it continues a response, to one that has stored it."""
        site = self._site
        request = Request(scope, receive)
        check_media_type(request.headers)
        with site.bodies.holding(tenant_of(scope).queue) as fits:
            body = await read_body(request, site.config.max_body_bytes, fits)
        prompt, servers = await parsed(body), site.servers
        while not (able := servers.able(prompt.model)):
            if not servers.has_new:
                raise no_server() if servers.has_model(prompt.model) else unknown_model(servers.by_name.values())
            await servers.wait_for_change(0.25)
        for server in sorted(able, key=lambda one: one.running):
            status, answer = await self._asked(server, scope, body)
            if not (prompt.follows and status in (400, 404)):
                break
        await _send_json(send, status, answer)

    async def _abort(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Abort a request on whichever server runs it: clients choose ids, so the router keeps no list of them."""
        for server in list(self._site.servers.by_name.values()):
            if server.state == "up":
                status, answer = await self._asked(server, scope, b"")
                if status == 200:
                    return await _send_json(send, status, answer)
        raise ApiError(404, "no response of this id is being made under this key", code="unknown_response")

    async def _response(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask servers for a stored response, to return, cancel or delete it.

        One whose stream went on elsewhere may be at several servers; where it did not end, it is cancelled.
        """
        answers: list[tuple[int, bytes]] = []
        error = no_server()
        for server in list(self._site.servers.by_name.values()):
            if server.state not in ("up", "aside"):
                continue
            try:
                answers.append(await self._asked(server, scope, b""))
            except ApiError as failed:
                error = failed
                continue
            if scope["method"] == "GET" and answers[-1][0] == 200 and _CANCELLED not in answers[-1][1]:
                break
        if not answers:
            raise error
        await _send_json(send, *min(answers, key=lambda found: (found[0] != 200, _CANCELLED in found[1])))

    async def _asked(self, server: Server, scope: Scope, body: bytes) -> tuple[int, bytes]:
        """Pass a request on to one server; returns its status and body."""
        key = self._site.key_for(scope)
        headers = [(b"content-type", b"application/json"), *([(b"authorization", key)] if key else [])]
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if query := scope.get("query_string"):
            path = f"{path.partition('?')[0]}?{query.decode('latin-1')}"
        try:
            return await server.upstream.fetch(
                scope["method"], path, headers, body=body, seconds=ANSWER_SECONDS, most=ANSWER_BYTES
            )
        except NoAnswerError as error:  # which says something about the request, and nothing about the server's health
            raise ApiError(502, f"the server's answer cannot be passed on: {error}", code="no_answer") from None
        except HttpError as error:
            self._site.servers.failed(server, str(error))
            raise ApiError(502, "the server went away; try again", code="server_lost") from None

    # -- status ----------------------------------------------------------------------------------

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, models_list(list(self._cards().values())))

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        cards, name = self._cards(), scope["path"].removeprefix(MODELS)
        if name not in cards:
            raise ApiError(404, f"no server has this model; there are: {', '.join(cards)}", code="model_not_found")
        await send_json(send, cards[name])

    def _cards(self) -> dict[str, dict[str, Any]]:
        """The servers' descriptions of their models, by name."""
        cards: dict[str, dict[str, Any]] = {}
        for server in self._site.servers.by_name.values():
            for name, card in server.models.items() if server.is_up else ():
                cards.setdefault(name, {key: value for key, value in card.items() if key != "checkpoint"})
        return cards

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 while at least one server accepts requests."""
        site = self._site
        if site.draining:
            return await send_json(send, {"status": "draining"}, 503)
        up = sum(one.is_up for one in site.servers.by_name.values())
        found = {"status": "ok" if up else "no server", "servers_up": up, "servers": len(site.servers.by_name)}
        await send_json(send, found, 200 if up else 503, {"cache-control": "no-store"})

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"status": "ok"})

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"version": __version__})

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = tenant_of(scope)
        if not (tenant.is_operator or tenant.is_scraper):
            raise forbidden(", or a --metrics-key")
        body, kind = self._site.metrics.render(self._site.servers.by_name.values())
        await _send_file(send, body, kind)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, kind = PAGES[scope["path"]]
        await _send_file(send, (STATIC / name).read_bytes(), kind)

    async def _status(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_operator(scope)
        document = status_document(self._site)
        await send_json(send, document, headers={"cache-control": "no-store"})

    async def _life(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Where a request's time went, as seen by the router and by the servers that handled it."""
        _check_operator(scope)
        found = await life_of(self._site, scope["path"].removeprefix(LIFE), self._site.key_for(scope))
        if found is None:
            raise ApiError(404, "no request of this id is remembered", code="unknown_request")
        await send_json(send, found, headers={"cache-control": "no-store"})

    # -- for the operator ------------------------------------------------------------------------------------

    async def _drain(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._set_draining(scope, send, scope["path"].removeprefix(DRAIN), True)

    async def _undrain(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._set_draining(scope, send, scope["path"].removeprefix(UNDRAIN), False)

    async def _set_draining(self, scope: Scope, send: Send, name: str, draining: bool) -> None:
        """Stop or resume sending new requests to a server; its running requests continue."""
        _check_operator(scope)
        server = self._site.servers.by_name.get(name)
        if server is None:
            known = ", ".join(self._site.servers.by_name) or "none"
            raise ApiError(404, f"there is no server of that name; there are: {known}", code="unknown_server")
        server.draining = draining
        self._site.servers.regroup()
        found = {"server": name, "draining": draining, "waiting": server.waiting, "running": server.running}
        await send_json(send, found)

    async def _join(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A server registers or renews its registration; with "leaves", it deregisters."""
        _check_operator(scope)
        if not self._site.tenants.count:
            message = "servers may join a router that has an --api-key; this one has none"
            raise ApiError(403, message, code="joining_is_off")
        body = await read_body(Request(scope, receive), MAX_JOIN_BYTES)
        try:
            asked = msgspec.json.decode(body, type=Joining)
            server = self._site.servers.add(asked.url, "prefill" if asked.role == "prefill" else "serve", "joined")
        except (*BAD_JSON, ValueError) as error:
            raise invalid(f"a server joins with its url and its role: {error}") from None
        if asked.leaves and server.origin == "joined":
            self._site.servers.remove(server.name)
        await send_json(send, {"server": server.name, "state": server.state, "reason": server.reason})


class Joining(msgspec.Struct):
    """The body that a server sends to `/admin/join`."""

    url: str
    role: str = "serve"
    leaves: bool = False


def counted_as(path: str) -> str:
    """The label of a path in the metrics, one of `ROUTES`."""
    return path if path in ROUTES else next(route for prefix, route in _PREFIXES.items() if path.startswith(prefix))


def _check_operator(scope: Scope) -> None:
    if not tenant_of(scope).is_operator:
        raise forbidden()


async def _send_json(send: Send, status: int, body: bytes) -> None:
    await _send_file(send, body, "application/json", status)


async def _send_file(send: Send, body: bytes, kind: str, status: int = 200) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
