"""The JSON behind the router's page: servers, where requests went and why, what is cached where, request timelines."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any
from urllib.parse import quote

import msgspec

from quire.http_client import HttpError
from quire.router.servers import Server
from quire.router.site import Sending, Site
from quire.typed_json import BAD_JSON
from quire.version import __version__

MAX_PROMPTS = 20
"""Rows of the cache map: beginnings of prompts, most recent first."""

MAX_COLUMNS = 32
"""Columns of the cache map: servers."""

ANSWER_SECONDS = 2.0
"""Timeout for asking a server about a request."""


def status_document(site: Site) -> dict[str, Any]:
    """The state of the router, its servers and recent requests."""
    servers, now = site.servers, site.servers.clock()
    return {
        "version": __version__,
        "policy": site.config.policy,
        "draining": site.draining,
        "bytes_per_token": round(servers.bytes_per_token, 2),
        "servers": [one.described(now, servers.chunks(one)) for one in servers.by_name.values()],
        "requests": [_sending(one, now) for one in reversed(site.sendings)],
        "pool": _pool(site),
    }


def _sending(one: Sending, now: float) -> dict[str, Any]:
    choice = one.choice
    return {
        "seconds_ago": round(now - one.sent, 1),
        "request": one.request,
        "server": choice.engine.name,
        "prefill": choice.prefill.name if choice.prefill else None,
        "prompt_tokens": choice.tokens,
        "resumed": one.again,
        "as_picked": choice.as_picked,
        "first_s": None if one.first is None else round(one.first - one.arrived, 5),
        "total_s": None if one.ended is None else round(one.ended - one.arrived, 5),
        "lost": one.lost,
        "costs": [
            {
                "server": cost.server,
                "held": cost.held,
                "compute_s": round(cost.compute, 5),
                "others_s": round(cost.others, 5),
                "fetch_s": round(cost.fetch, 5),
                "queue_s": round(cost.queue, 5),
                "total_s": round(cost.total, 5),
            }
            for cost in choice.decision.shown
        ],
    }


def _pool(site: Site) -> list[dict[str, Any]]:
    """The cache map: for each recent distinct prompt prefix, how often it came, how often it was cached, and how much
    of it each server has."""
    servers = site.servers
    alike: dict[bytes, list[Sending]] = {}
    for one in reversed(site.sendings):
        alike.setdefault(one.names[0], []).append(one)
    rows = []
    for group in islice(alike.values(), MAX_PROMPTS):
        longest = max(group, key=lambda one: len(one.names))
        held = {
            name: servers.held(server, longest.names) for name, server in islice(servers.by_name.items(), MAX_COLUMNS)
        }
        rows.append(
            {
                "request": longest.request,
                "prompt_tokens": longest.choice.tokens,
                "requests": len(group),
                "hits": sum(one.choice.decision.chosen.held > 0 for one in group),
                "held": {name: tokens for name, tokens in held.items() if tokens},
            }
        )
    return rows


async def life_of(site: Site, request: str, key: bytes) -> dict[str, Any] | None:
    """A request's time on each server it was sent to, in order, with each server's own report; None if it is unknown.

    Seconds count from the request's arrival at the router. Servers have other clocks, so their times are placed
    relative to when the router sent the request.

    Args:
        key: the `Authorization` header for the servers.
    """
    stays = [one for one in site.sendings if one.request == request]
    if not stays:
        return None
    told = await asyncio.gather(*(_told(one.choice.server, request, key) for one in stays))
    arrived = stays[0].arrived
    return {
        "request": request,
        "stays": [
            {
                "server": one.choice.server.name,
                "prefill": one.choice.prefill.name if one.choice.prefill else None,
                "resumed": one.again,
                "lost": one.lost,
                "sent": one.sent - arrived,
                "first": None if one.first is None else one.first - arrived,
                "ended": (site.servers.clock() if one.ended is None else one.ended) - arrived,
                "choices": choices,
            }
            for one, choices in zip(stays, told, strict=True)
        ],
    }


async def _told(server: Server, request: str, key: bytes) -> list[Any]:
    """What a Quire server remembers about a request; empty for other servers, or if it does not answer."""
    if not server.is_quire or server.state == "down":
        return []
    headers = [(b"authorization", key)] if key else []
    path = f"/load/requests/{quote(request, safe='')}"
    try:
        status, body = await server.upstream.fetch("GET", path, headers, seconds=ANSWER_SECONDS)
        found = msgspec.json.decode(body) if status == 200 else []
    except (HttpError, *BAD_JSON):
        return []
    return found if isinstance(found, list) else []
