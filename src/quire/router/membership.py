"""Service discovery: where a router finds its servers while it runs, which is a file or a DNS name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from quire.address import Address
from quire.errors import ConfigError
from quire.kv.directory.base import DirectoryError
from quire.log import event
from quire.names import DNS_SECONDS, MAX_SERVERS, addresses, is_server, name_of
from quire.names import servers as servers_of
from quire.router.config import RouterConfig
from quire.router.servers import Role, Servers

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""How often a file is checked."""

MAX_FILE_BYTES = 1 << 20

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Source(Protocol):
    """A list of servers that may change."""

    pause: float

    async def look(self, servers: Servers) -> None:
        """Update the servers to the current list; on an error they stay as they were.

        Raises:
            ConfigError: the list is not valid, or can never be read. DirectoryError: the source does not answer now.
        """


def sources_of(config: RouterConfig) -> list[Source]:
    """The sources that were configured, in addition to single servers.

    Raises:
        ConfigError: one cannot be used.
    """
    found: list[Source] = []
    if config.servers_file is not None:
        found.append(FileSource(Path(config.servers_file).expanduser()))
    given: list[tuple[Role, tuple[str, ...]]] = [("serve", config.server), ("prefill", config.prefill_server)]
    for role, urls in given:
        found += [DnsSource(url, role) for url in urls if not is_server(url)]
    return found


async def begin(sources: Sequence[Source], servers: Servers) -> list[asyncio.Task[None]]:
    """Check every source once, then keep checking in the background.

    Raises:
        ConfigError: a source can never be used.
    """
    watching = []
    for source in sources:
        problem = ""
        try:
            await source.look(servers)
        except DirectoryError as error:  # it may answer later
            problem = _tell(error)
        watching.append(asyncio.create_task(watch(source, servers, problem)))
    return watching


async def watch(source: Source, servers: Servers, problem: str = "") -> None:
    """Check a source periodically. Each problem is logged once; `problem` is the one that has been logged already."""
    while True:
        await asyncio.sleep(source.pause)
        try:
            await source.look(servers)
        except (ConfigError, DirectoryError) as error:
            if str(error) != problem:
                problem = _tell(error)
        except Exception as error:  # a bug ends only this check
            event(logger, "servers_source", "servers cannot be looked up", level=logging.ERROR, exc_info=error)
        else:
            problem = ""


def _tell(error: Exception) -> str:
    text = f"{error}; the servers stay as they were"
    event(logger, "servers_source", text, level=logging.ERROR)
    return str(error)


class FileSource:
    """A file with one server per line; see `read_servers_file`.

    A change counts once two looks in turn have found it: while a file is written it is empty, or lacks its last lines.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.pause = path, WATCH_SECONDS
        self._last: dict[str, Role] | None = None

    async def look(self, servers: Servers) -> None:
        """Read the file; what it lists is taken once two readings agree."""
        listed, before = read_servers_file(self._path), self._last
        self._last = listed
        if before in (None, listed):
            servers.set_listed(listed, "file")


def read_servers_file(path: Path) -> dict[str, Role]:
    """Read servers from a file with one per line, "URL" or "prefill URL"; # begins a comment.

    Raises:
        ConfigError: it cannot be read, or a line is something else.
    """
    try:
        text = path.read_text(encoding="utf-8")[:MAX_FILE_BYTES]
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not a text file (UTF-8)"
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


async def resolve(name: str, port: int) -> Sequence[str]:
    """The addresses of a name, without holding up the event loop."""
    return await asyncio.to_thread(addresses, name, port)


class DnsSource:
    """A DNS name, each of whose addresses is a server.

    Args:
        url: dns+http://NAME[:PORT][/PREFIX].
    """

    def __init__(self, url: str, role: Role, resolve: Resolve = resolve) -> None:
        self._url, self._role, self._resolve, self.pause = url, role, resolve, DNS_SECONDS

    async def look(self, servers: Servers) -> None:
        """Resolve the name; its addresses are the servers."""
        try:
            async with asyncio.timeout(DNS_SECONDS):
                found = servers_of(self._url, await self._resolve(*name_of(self._url)))
        except TimeoutError:
            raise DirectoryError(f"{self._url}: no answer for this name within {DNS_SECONDS:g} s") from None
        except OSError as error:
            raise DirectoryError(f"{self._url}: {error.strerror or type(error).__name__}") from None
        except ValueError as error:
            raise DirectoryError(str(error)) from None
        servers.set_listed(dict.fromkeys(found, self._role), self._url)
