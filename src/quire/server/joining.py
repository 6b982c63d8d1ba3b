"""Registers a server with a router, and renews that until the server stops."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from quire.address import Address
from quire.http_client import HttpClient, HttpError
from quire.log import event
from quire.server.http_options import HttpOptions
from quire.server.processes import host_and_port, scheme_of, url_of
from quire.typed_json import BAD_JSON

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0
POLL_SECONDS = 0.1
ANSWER_SECONDS = 5.0
JOINED = "joined"


def url_for(router: str, listener: socket.socket, place: HttpOptions) -> str:
    """The URL at which the router reaches this server. If it listens on all addresses, this is the one from which it
    would reach the router; with https it is the host name, if one was given, since certificates are for names.
    """
    host, port = listener.getsockname()[:2]
    parts = urlsplit(router)
    if host not in ("0.0.0.0", "::"):
        named = place.ssl_certfile is not None
        return f"https://{host_and_port(place.host, port)}" if named else url_of(listener, place)
    try:
        with socket.socket(listener.family, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))  # this sends nothing
            host = probe.getsockname()[0]
    except OSError:
        return url_of(listener, place)
    return f"{scheme_of(place)}://{host_and_port(host, port)}"


class Registration:
    """A server at a router, by its `/admin/join`."""

    def __init__(self, router: str, key: str, url: str, role: str, cacert: str | None) -> None:
        self._router, self._said = router, {"url": url, "role": role}
        self._headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        self._client = HttpClient(Address(router), cacert=cacert)

    async def say(self, leaves: bool) -> str:
        """Register, renew, or with `leaves` deregister; returns "joined", or what is wrong."""
        router, said = self._router, msgspec.json.encode({**self._said, "leaves": leaves})
        fetch = self._client.fetch
        try:
            status, body = await fetch("POST", "/admin/join", self._headers, body=said, seconds=ANSWER_SECONDS)
            found = msgspec.json.decode(body)
        except (HttpError, *BAD_JSON) as error:
            return f"the router {router} cannot be reached ({error})"
        if status in (401, 403):
            return f"the router {router} does not take this server's key: give both the same first --api-key"
        if status != 200:
            return f"the router {router} does not take this server ({status})"
        if not isinstance(found, dict):
            return f"{router} is no router of Quire's: give the URL of 'quire route'"
        refused = found.get("state") == "refused"
        return f"the router {router} sends nothing here: {found.get('reason')}" if refused else JOINED

    def close(self) -> None:
        """Close the connection."""
        self._client.break_off()


async def keep_joined(
    router: str, key: str, url: str, role: str, leaving: Callable[[], bool], cacert: str | None = None
) -> None:
    """Register and keep renewing, in case the router was restarted, until `leaving` returns true. Never raises.

    Args:
        router: its URL, which has been checked.
        cacert: see `quire.tls.client_context`.
    """
    host, told = Registration(router, key, url, role, cacert), ""
    try:
        while not leaving():
            now = await host.say(leaves=False)
            if now != told:
                told = now
                text = f"joined the router {router} as {url}" if now == JOINED else now
                level = logging.INFO if now == JOINED else logging.WARNING
                event(logger, "join", text, level=level, router=router)
            for _ in range(int(JOIN_SECONDS / POLL_SECONDS)):
                if leaving():
                    break
                await asyncio.sleep(POLL_SECONDS)
        await host.say(leaves=True)
    finally:
        host.close()
