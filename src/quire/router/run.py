"""A router's process: it listens, looks at its servers and its file of servers, and drains when it is told to leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from pathlib import Path

from quire.errors import ConfigError
from quire.log import event
from quire.router.app import create_app
from quire.router.config import MAX_SERVERS, RouterConfig
from quire.router.metrics import RouterMetrics
from quire.router.servers import Role, Servers
from quire.router.site import Site
from quire.router.upstream import Address
from quire.server.auth import Tenants
from quire.server.config import open_traces
from quire.server.transport import HttpServer, make_server

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 4.0
"""How long requests have to send their last events when a drain's time is over."""
MAX_FILE_BYTES = 1 << 20


def read_servers_file(path: Path) -> dict[str, Role]:
    """Servers by URL, of a file with one a line: "URL", or "prefill URL"; # begins a comment.

    Raises:
        ConfigError: it cannot be read, or a line is something else.
    """
    try:
        text = path.read_text(encoding="utf-8")[:MAX_FILE_BYTES]
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise ConfigError(f"--servers-file {path} cannot be read: {reason}") from error
    listed: dict[str, Role] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        role: Role = "prefill" if words[0] == "prefill" and len(words) == 2 else "serve"
        try:
            if len(words) > (2 if role == "prefill" else 1):
                raise ValueError(f"{line.strip()!r} is neither 'URL' nor 'prefill URL'")
            Address(words[-1])
        except ValueError as error:
            raise ConfigError(f"--servers-file {path}, line {number}: {error}") from None
        listed[words[-1]] = role
    if len(listed) > MAX_SERVERS:
        raise ConfigError(f"--servers-file {path} names {len(listed)} servers; at most {MAX_SERVERS} are allowed")
    return listed


def make_site(config: RouterConfig) -> Site:
    """The parts of a router, with the servers that were given."""
    key = config.server_key or (config.api_key[0] if config.api_key else "")
    servers = Servers(config.policy, key)
    for url in config.server:
        servers.add(url)
    for url in config.prefill_server:
        servers.add(url, "prefill")
    return Site(
        config,
        servers,
        RouterMetrics(),
        Tenants(config.api_key, config.metrics_key),
        open_traces(config.otlp_traces_endpoint, "quire route"),
    )


class Router:
    """One router."""

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config, self._listener = config, listener
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal ends it; the exit code.

        Raises:
            ConfigError: the file of servers is not valid.
        """
        self._site = site = make_site(self._config)
        tasks = []
        try:
            if self._config.servers_file is not None:
                path = Path(self._config.servers_file).expanduser()
                site.servers.set_listed(read_servers_file(path))
                tasks.append(asyncio.create_task(watch_file(path, site.servers)))
            self._http = make_server(create_app(site))
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
        """The first one drains, the second ends what runs."""
        if self._site.draining:
            self._hurry.set()
            return
        seconds = self._config.drain_timeout
        text = f"{number.name}: no new requests; running ones have {seconds:g} s to end (Ctrl-C ends them now)"
        event(logger, "draining", text, seconds=seconds, signal=number.name)
        self._site.draining = True
        self._leaving = asyncio.create_task(leave(self._http, self._site, seconds, self._hurry))


async def leave(http: HttpServer, site: Site, seconds: float, hurry: asyncio.Event) -> None:
    """Let what runs come to its end, then end what is left, then stop serving."""
    while not http.started:
        await asyncio.sleep(POLL_SECONDS)
    http.stop_listening()
    tasks = http.server_state.tasks
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while tasks and not hurry.is_set():
                await asyncio.sleep(POLL_SECONDS)
    site.stopping.set()
    for task in list(tasks):
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_SECONDS):
            while tasks:
                await asyncio.sleep(POLL_SECONDS)
    event(logger, "stopped", "stopped")
    http.should_exit = True


async def watch_file(path: Path, servers: Servers) -> None:
    """Read the file of servers again when it has changed; one that is not valid changes nothing."""
    last = _stamp(path)
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        stamp = _stamp(path)
        if stamp == last:
            continue
        last = stamp
        try:
            servers.set_listed(read_servers_file(path))
        except ConfigError as error:
            text = f"{error}; the servers stay as they were"
            event(logger, "servers_file", text, level=logging.ERROR)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
