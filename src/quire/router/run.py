"""A router's process: it listens, checks its servers, discovers new ones, and drains before it exits."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable

from quire.log import event
from quire.names import is_server
from quire.router.app import create_app
from quire.router.config import RouterConfig
from quire.router.membership import begin, sources_of
from quire.router.metrics import RouterMetrics
from quire.router.servers import Servers
from quire.router.site import Site
from quire.server.auth import Tenants
from quire.server.transport import HttpServer, make_server, max_connections

logger = logging.getLogger(__name__)

FILES = 2
"""File descriptors of a client's connection: its request may need one to a server, which for lack of it would be taken
for down."""


def make_site(config: RouterConfig) -> Site:
    """Make a router's shared state, with the servers that were configured."""
    key = config.server_key or (config.api_key[0] if config.api_key else "")
    most = max_connections() // FILES
    servers = Servers(config.policy, key, cacert=config.cacert, max_connections=most, mixed=config.mixed)
    for url in filter(is_server, config.server):
        servers.add(url)
    for url in filter(is_server, config.prefill_server):
        servers.add(url, "prefill")
    return Site(
        config,
        servers,
        RouterMetrics(),
        Tenants(config.api_key, config.metrics_key),
        config.open_traces("quire route"),
    )


class Router:
    """One router."""

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config, self._listener = config, listener
        self._deadline = 0.0  # of a drain, on the monotonic clock

    async def run(self) -> int:
        """Serve until a signal ends it; returns the exit code.

        Raises:
            ConfigError: a source of servers is not valid.
        """
        self._site = site = make_site(self._config)
        tasks: list[asyncio.Task[None]] = []
        try:
            tasks = await begin(sources_of(self._config), site.servers)
            self._http = make_server(create_app(site), certificate=self._config.certificate(), files=FILES)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
            await self._http.serve(sockets=[self._listener])
            return 0
        finally:
            for task in tasks:
                task.cancel()
            await site.servers.close()
            if site.traces is not None:
                await asyncio.to_thread(site.traces.close)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal drains, the second one ends running requests."""
        if self._site.draining:
            self._deadline = time.monotonic()
            return
        seconds = self._config.drain_timeout
        text = f"{number.name}: no new requests; running ones have {seconds:g} s to finish (Ctrl-C ends them now)"
        event(logger, "draining", text, seconds=seconds, signal=number.name)
        self._site.draining = True
        self._deadline = time.monotonic() + seconds
        self._leaving = asyncio.create_task(leave(self._http, self._site, lambda: self._deadline))


async def leave(http: HttpServer, site: Site, deadline: Callable[[], float]) -> None:
    """Stop serving, see `HttpServer.drain`. Requests that run at the deadline end with an error."""

    def stop() -> None:
        site.stopping.set()
        http.cancel_requests()

    await http.drain(deadline, stop)
    event(logger, "stopped", "stopped")
