"""The engines that compute prompts for this one: those of single servers, and those at all addresses of DNS names.

They are all that is ever connected to: a request may name one of them, and no other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from quire.kv import wire
from quire.kv.importer import Prefiller
from quire.kv.mailbox import Ended, Mailbox, Servers
from quire.kv.readers import Readers
from quire.kv.tiers.orders import Prefill
from quire.names import DNS_SECONDS, addresses, is_server, name_of, servers

logger = logging.getLogger(__name__)

Unmet = Literal["role", "not allowed", "unreachable"]
"""Why an engine that a request names is not asked: this one asks none, not that one, or it cannot be reached."""


class Importer(Readers[Prefiller]):
    """All prefill engines of this one.

    Args:
        urls: `prefill_url`'s; see there.
        connect: makes the connection to one server.
        mailbox: gets `Servers` as names change, and an `Ended` for reads that cannot be ordered.
    """

    def __init__(self, urls: Sequence[str], connect: Callable[[str], Prefiller], mailbox: Mailbox) -> None:
        super().__init__()
        self._connect, self._mailbox = connect, mailbox
        self._listed: dict[str, Sequence[str]] = {"": [url for url in urls if is_server(url)]}
        self._follow()
        watched = [url for url in urls if not is_server(url)]
        self._watch = NameWatch(watched, mailbox) if watched else None

    @property
    def prefillers(self) -> list[Prefiller]:
        """The connections there are now."""
        return list(self.readers.values())

    @property
    def ready(self) -> bool:
        """Whether any engine accepts orders."""
        return any(each.ready for each in self.readers.values())

    @property
    def unwanted(self) -> int:
        """Blocks that engines told of when nobody waited for them any more."""
        return sum(each.unwanted for each in self.readers.values())

    def listed(self, news: Servers) -> None:
        """Follow a name's servers."""
        self._listed[news.url] = news.servers
        self._follow()

    def _follow(self) -> None:
        wanted = dict.fromkeys(url for listed in self._listed.values() for url in listed)
        self.keep(wanted)
        for url in wanted:
            if url not in self.readers:
                self.readers[url] = self._connect(url)

    def unmet(self, engine: str, host: str) -> Unmet | None:
        """Why the engine that a request names cannot be asked; None if it can, or if none is named and any can be.

        Args:
            engine, host: its name and its host, as far as the request has them.
        """
        named = [each for each in self.readers.values() if each.is_called(engine) or host in each.hosts]
        if (engine or host) and not named:
            return "not allowed"
        return None if any(each.ready for each in named or self.readers.values()) else "unreachable"

    def order(self, order: Prefill) -> None:
        """Order blocks to be computed and read into slots: by the engine named, or else by the least busy one."""
        slots, names = [slot for slot, _ in order.blocks], [name for _, name in order.blocks]
        want = wire.Want(order.number, names, order.tokens, order.priority, order.owner, order.scope)

        def rank(each: Prefiller) -> tuple[bool, bool, int]:
            return not each.is_called(order.engine), order.host not in each.hosts, each.load

        if not any(prefiller.order(want, slots) for prefiller in sorted(self.readers.values(), key=rank)):
            self._mailbox.post(Ended("read", order.number, 0, 0.0))

    def close(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.close()
        super().close()


class NameWatch:
    """Resolves names in a thread of its own, and posts what changes. While a name cannot be resolved, its servers stay
    as they were.

    Args:
        urls: dns+http URLs.
        mailbox: gets `Servers`.
    """

    def __init__(self, urls: Sequence[str], mailbox: Mailbox) -> None:
        self._mailbox, self._stopping = mailbox, threading.Event()
        self._known: dict[str, Sequence[str]] = {}
        self._problems: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, args=[urls], name="quire-names", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread as soon as the resolver has answered."""
        self._stopping.set()

    def _run(self, urls: Sequence[str]) -> None:
        while not self._stopping.is_set():
            for url in urls:
                self._look(url)
            self._stopping.wait(DNS_SECONDS)

    def _look(self, url: str) -> None:
        try:
            found = servers(url, addresses(*name_of(url)))
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            if self._problems.get(url) != problem:
                logger.warning("prefill_url %s: %s; the servers stay as they were", url, problem)
            self._problems[url] = problem
            return
        self._problems.pop(url, None)
        if self._known.get(url) != found and not self._stopping.is_set():
            self._known[url] = found
            logger.info("prefill_url %s: %s", url, ", ".join(found))
            self._mailbox.post(Servers(url, found))
