"""Every route that runs no request: health, models, versions, configuration, metrics, the live view, the page."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as PathParameter
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from quire.core.sampling_params import NEUTRAL, suggested
from quire.errors import EngineClosedError
from quire.kv.directory.base import masked
from quire.models.hub import describe
from quire.server.auth import METRICS_PATH, forbidden, tenant_of
from quire.server.context import AppContext
from quire.server.engine_metrics import EngineReading
from quire.server.errors import ApiError
from quire.server.http_options import KEY_OPTIONS
from quire.server.replies import json_reply, models_list
from quire.version import __version__

if TYPE_CHECKING:
    from quire.ipc.client import EngineClient
    from quire.ipc.link import EngineLink

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
STATS_SECONDS = 5.0
"""How long `/metrics` waits for the engine's part: less than Prometheus waits for a response."""
ROUTER_SECONDS = 2.0
"""How long a router's requests wait for an engine, which may be in a long step; the server responds without it then. A
router regards a server that does not respond for five seconds as lost."""
MEASURED_TOKENS = 4096
"""Prompt tokens that must have been computed before `/load` reports the prefill speed."""
Since = Annotated[int, Query(ge=0, le=2**62, description="Only steps from this number on.")]
SinceEvents = Annotated[
    str,
    Query(
        pattern=r"^(-1|\d{1,18})(,(-1|\d{1,18}))*$",
        description="Of each engine, only events from this number on; -1, or where it is left out: all that is there.",
    ),
]
Engine = Annotated[int | None, Query(ge=0, le=2**31, description="Which replica's; default: one that is ready.")]


def static_files() -> StaticFiles:
    """The page's files, for mounting."""
    return StaticFiles(directory=STATIC)


# -- always there ------------------------------------------------------------------------------------------


def open_router(context: AppContext) -> APIRouter:
    """Routes that work in any state of the engine."""
    router = APIRouter()
    _add_health(router, context)
    _add_documents(router)
    router.include_router(_report_router(context))

    @router.get("/version", summary="The version of Quire", tags=["server"])
    async def version() -> Response:
        return json_reply({"version": __version__})

    @router.get(
        METRICS_PATH,
        summary="Metrics for Prometheus",
        tags=["server"],
        dependencies=[Depends(_check_scraper)],  # they include everybody's requests
    )
    async def metrics() -> Response:
        return await _metrics(context)

    return router


def _report_router(context: AppContext) -> APIRouter:
    """What the server reports about itself. Only for the operator, since it has paths and everybody's requests."""
    router = APIRouter(tags=["server"], dependencies=[Depends(_check_operator)])

    @router.get("/server_info", summary="Every option, its value, and where it came from")
    async def server_info() -> Response:
        return json_reply(_server_info(context))

    @router.get("/load", summary="For routers: how fast prompts are computed, and how much there is to do")
    async def load() -> Response:
        return json_reply(await _load(context), headers=_NOT_CACHED)

    @router.get("/load/prompts", summary="For routers: which of their prompts were cached and evicted since an event")
    async def prompts(since: SinceEvents = "-1") -> Response:
        document = {"engines": await _prompts(context.client, [*map(int, since.split(","))])}
        return json_reply(document, headers=_NOT_CACHED)

    @router.get(
        "/load/requests/{request_id:path}",
        summary="How the time of a response was spent: a document for each choice, none if it is not remembered",
    )
    async def life(request_id: Annotated[str, PathParameter(description="The response's id.")]) -> Response:
        return json_reply(await context.client.life(request_id), headers=_NOT_CACHED)

    return router


def _add_health(router: APIRouter, context: AppContext) -> None:
    async def health() -> Response:
        """200 only while the engine makes progress; otherwise 503 with its state."""
        found = _health(context)
        return json_reply(found, 200 if found["status"] == "ok" else 503, _NOT_CACHED)

    async def live() -> Response:
        """200 while this process responds at all."""
        return json_reply({"status": "ok"}, headers=_NOT_CACHED)

    for path, endpoint, summary in (
        ("/health", health, "Readiness: can requests be served?"),
        ("/live", live, "Liveness: does the server answer?"),
    ):
        router.add_api_route(path, endpoint, methods=["GET"], summary=summary, tags=["server"])
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


_NOT_CACHED = {"cache-control": "no-store"}


def _health(context: AppContext) -> dict[str, Any]:
    """The body of `/health`. It needs no key, so it has nothing secret."""
    client = context.client
    if client.draining:
        return {"status": "draining"}
    if client.state in ("restarting", "failed"):
        return {"status": client.state} | _phase(context)
    if not context.is_ready:
        return {"status": "loading"} | _phase(context)
    kv = {"kv_port": client.info.kv_transfer["remote_port"]} if client.info and client.info.kv_transfer else {}
    return {"status": "ok" if client.healthy else "stalled"} | kv | _replicas(client)


def _replicas(client: EngineClient) -> dict[str, Any]:
    """Each replica's state, if there are several."""
    return {"replicas": _states(client)} if len(client.links) > 1 else {}


def _states(client: EngineClient) -> list[str]:
    return [link.state if link.healthy or link.state != "ready" else "stalled" for link in client.links]


def _phase(context: AppContext) -> dict[str, Any]:
    if context.client.state == "failed":
        return {}
    phase, percent = context.loading_phase()
    return {"phase": phase, "percent": percent}


def _server_info(context: AppContext) -> dict[str, Any]:
    """The resolved configuration. Keys are counted, never shown."""
    info = context.client.info
    server = {field.name: getattr(context.server, field.name) for field in dataclasses.fields(context.server)}
    for name in KEY_OPTIONS:
        server[name] = f"{len(server[name])} set"
    engine = dict(context.engine_options) if info is None else dict(info.config)
    for name in ("data_parallel_size", "disk_kv_path"):  # replicas get different ones
        if name in context.engine_options:
            engine[name] = context.engine_options[name]
    described = {} if info is None else msgspec.to_builtins(info)
    described.pop("config", None)
    return {
        "version": __version__,
        "models": list(context.model_names),
        "state": context.client.state,
        **_replicas(context.client),
        "replies": None if context.pool is None else context.pool.reply_syntax.described,
        "server_options": {name: _option(context, name, value) for name, value in server.items()},
        "engine_options": {name: _option(context, name, value) for name, value in engine.items()},
        "engine": described,
    }


def _option(context: AppContext, name: str, value: Any) -> dict[str, Any]:
    """An option's value and origin. What was not given and the engine filled in comes from its memory plan."""
    if name == "kv_directory" and value is not None:
        value = masked(value)
    origin = context.origins.get(name, "default")
    given = context.engine_options.get(name, value)
    if origin == "default" and given is None and value is not None:
        origin = "found at start"
    return {"value": value, "origin": origin}


async def _stats(context: AppContext, seconds: float = STATS_SECONDS) -> dict[int, dict[str, Any]]:
    """Each engine's statistics, by its number, without engines that do not answer."""
    client = context.client
    if not client.healthy:
        return {}
    try:
        told = await client.inspect_all("stats", seconds)
    except EngineClosedError:  # all have died or are stuck: report what is known here
        logger.debug("no statistics from the engines", exc_info=True)
        return {}
    return {replica: msgspec.json.decode(stats) for replica, stats in told.items()}


async def _load(context: AppContext) -> dict[str, Any]:
    """What a router needs to know of this server besides its models: of each engine, and the sum."""
    info, stats = context.client.info, await _stats(context, ROUTER_SECONDS)

    def total(name: str) -> Any:
        return sum(each.get(name, 0) for each in stats.values())

    engines = [_engine_load(link, stats.get(link.replica)) for link in context.client.links]
    rates = [each["prefill_tokens_per_second"] for each in engines if each["prefill_tokens_per_second"]]
    return {
        "engines": engines,
        "checkpoint": info.checkpoint if info is not None else None,
        "fingerprint": info.fingerprint if info is not None else None,
        "kv_transfer": info.kv_transfer if info is not None else {},
        "block_size": info.block_size if info is not None else None,
        "num_blocks": total("num_blocks") or None,
        "running": total("running"),
        "waiting": total("waiting"),
        "prefill_tokens_per_second": sum(rates) / len(rates) * len(stats) if rates else None,
        **{name: total(name) for name in ("held_blocks", "cached_blocks", "prompt_tokens", "cached_tokens")},
        "kv_tiers": _tiers([each.get("kv_tiers", {}) for each in stats.values()]),
    }


def _engine_load(link: EngineLink, stats: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a router needs to know of one engine. `engine`: which one it is; None if it did not answer."""
    stats = stats or {}
    computed, seconds = stats.get("prefill_tokens", 0), stats.get("prefill_seconds", 0.0)
    return {
        "engine": f"{link.boot}.{stats['pid']}" if "pid" in stats else None,
        "up": link.healthy,
        "stalled": link.stalled,
        "num_blocks": stats.get("num_blocks"),
        "running": stats.get("running", 0),
        "waiting": stats.get("waiting", 0),
        "prefill_tokens_per_second": computed / seconds if computed >= MEASURED_TOKENS and seconds else None,
    }


async def _prompts(client: EngineClient, since: Sequence[int]) -> list[msgspec.Raw | None]:
    """Each engine's report of its cache, see `fleet/cached_prompts.py`; None if it does not answer."""
    numbers = [since[link.replica] if link.replica < len(since) else -1 for link in client.links]
    asked = (client.inspect("prompts", number, replica, ROUTER_SECONDS) for replica, number in enumerate(numbers))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return [msgspec.Raw(answer) if isinstance(answer, bytes) else None for answer in answers]


def _tiers(counts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Statistics of each tier, of all engines together."""
    sums: dict[str, dict[str, int]] = {}
    for tier, events in (item for each in counts for item in each.items()):
        of_tier = sums.setdefault(tier, {})
        for event, blocks in events.items():
            of_tier[event] = of_tier.get(event, 0) + blocks
    return sums


async def _metrics(context: AppContext) -> Response:
    stats = await _stats(context)
    engines = [
        EngineReading(stats.get(link.replica), link.state, max(0, link.boot - 1)) for link in context.client.links
    ]
    body, media_type = context.metrics.render(engines)
    return Response(body, media_type=media_type)


def _add_documents(router: APIRouter) -> None:
    """The web page and the API reference, which load nothing from other hosts."""

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return _file("index.html")

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """The page loads its files by relative URLs, which work under any prefix."""
        return RedirectResponse("static/docs/index.html")

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return json_reply(request.app.openapi())


def _file(name: str) -> Response:
    path = STATIC / name
    if not path.is_file():
        raise ApiError(404, "the web page is not part of this installation", code="unknown_url")
    return FileResponse(path)


# -- models ------------------------------------------------------------------------------------------------


def model_router(context: AppContext) -> APIRouter:
    """`/v1/models`: the served models, in OpenAI's format and Anthropic's at once."""
    router = APIRouter(prefix="/v1/models", tags=["models"])
    since = datetime.fromtimestamp(int(context.started), UTC).isoformat().replace("+00:00", "Z")

    def described(name: str) -> dict[str, Any]:
        info = context.client.info
        return {
            "id": name,
            "object": "model",
            "created": int(context.started),
            "owned_by": "quire",
            "type": "model",
            "display_name": name,
            "created_at": since,
            "lifecycle": "active",
            "root": context.model_names[0],
            "parent": None,
            "max_model_len": info.max_model_len if info is not None else None,
            "sampling_defaults": NEUTRAL | info.sampling_defaults if info is not None else None,
            "sampling_suggestions": suggested(info.parameters, info.sampling_defaults) if info is not None else None,
            "description": describe(Path(info.path)) if info is not None else None,
        }

    @router.head("", include_in_schema=False)
    @router.get("", summary="The served models")
    async def models() -> Response:
        return json_reply(models_list([described(name) for name in context.model_names]))

    @router.head("/{id:path}", include_in_schema=False)
    @router.get("/{id:path}", summary="One model")
    async def model(id: Annotated[str, PathParameter(description="The model's name.")]) -> Response:
        context.check_model(id)
        return json_reply(described(id))

    return router


# -- the operator's ----------------------------------------------------------------------------------------


def operator_router(context: AppContext) -> APIRouter:
    """The live view, and with `--admin` the routes that show all requests or change the engine."""
    router = APIRouter(tags=["operator"])
    operators = [Depends(_check_operator)]

    async def document(what: Any, since: int = 0, engine: int | None = None) -> Response:
        return json_reply(await _document(context, what, since, engine), headers=_NOT_CACHED)

    # With several tenants the view would show them each other's requests, so it is the operator's, if it is on at all.
    if context.server.admin or context.tenants.count <= 1:

        @router.get("/view", summary="The live view's data", dependencies=operators)
        async def view(since: Since = 0, engine: Engine = None) -> Response:
            return await document("live", since, engine)

    else:

        @router.get("/view", include_in_schema=False)
        async def no_view() -> Response:
            message = "with several API keys the live view is off unless the server is started with --admin"
            raise ApiError(403, message, code="view_is_off")

    if context.server.admin:

        @router.post("/reset_prefix_cache", summary="Forget every cached block no request uses", dependencies=operators)
        async def reset_prefix_cache() -> Response:
            return json_reply({"blocks": await context.client.reset_prefix_cache()})

        @router.get("/debug/requests", summary="Requests in the engine", dependencies=operators)
        async def debug_requests() -> Response:
            return json_reply(_joined(await context.client.inspect_all("requests")), headers=_NOT_CACHED)

        @router.get("/debug/steps", summary="The engine's last steps", dependencies=operators)
        async def debug_steps(since: Since = 0, engine: Engine = None) -> Response:
            return await document("steps", since, engine)

    return router


async def _document(context: AppContext, what: Any, since: int, engine: int | None) -> bytes:
    """One engine's document; with several, also which engine it is and the state of all.

    Raises:
        ApiError: 400, there is no such engine.
    """
    links = context.client.links
    if engine is not None and engine >= len(links):
        raise ApiError(
            400, f"engine={engine} does not exist; this server has engines 0 to {len(links) - 1}", param="engine"
        )
    if len(links) == 1:
        return await context.client.inspect(what, since, engine)
    if engine is None:
        engine = next((link.replica for link in links if link.healthy), 0)
    document = await context.client.inspect(what, since, engine)
    return msgspec.json.encode({"engine": engine, "engines": _states(context.client)})[:-1] + b"," + document[1:]


def _joined(documents: Mapping[int, bytes]) -> bytes | dict[str, Any]:
    """The requests of all engines; with several, each names its engine."""
    if len(documents) == 1:
        return next(iter(documents.values()))
    decoded = {replica: msgspec.json.decode(document) for replica, document in documents.items()}
    requests = [{"engine": replica, **each} for replica, found in decoded.items() for each in found["requests"]]
    return {"now": max(found["now"] for found in decoded.values()), "requests": requests}


def _check_scraper(request: Request) -> None:
    """Raises `ApiError` (403) for whoever may not read the metrics."""
    tenant = tenant_of(request.scope)
    if not (tenant.is_operator or tenant.is_scraper):
        raise forbidden(", or a --metrics-key")


def _check_operator(request: Request) -> None:
    """Raises `ApiError` (403) for any tenant but the operator."""
    if not tenant_of(request.scope).is_operator:
        raise forbidden()
