"""Which replica of a server a request goes to."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.request import Request, RequestUpdate
from quire.ipc.link import EngineLink


class Placement:
    """Chooses among the engines of one server, for one HTTP process."""

    def __init__(self, links: Sequence[EngineLink], worker: int) -> None:
        self._links = links

    def choose(self, request: Request, able: Sequence[EngineLink]) -> EngineLink:
        """The one of `able` that takes it."""
        return min(able, key=lambda link: len(link.requests))

    def sent(self, link: EngineLink, request: Request) -> None:
        """The request goes there."""

    def heard(self, link: EngineLink, update: RequestUpdate) -> None:
        """What came of one."""

    def lost(self, link: EngineLink) -> None:
        """The engine died, with all that it had cached."""

    def lost_cache(self, link: EngineLink) -> None:
        """What nobody uses there was dropped."""
