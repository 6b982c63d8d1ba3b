"""What the routes of a router share: it is made once and passed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.log import RequestSummary
from quire.router.config import RouterConfig
from quire.router.metrics import RouterMetrics
from quire.router.servers import Choice, Servers
from quire.server.auth import Tenants, authorization_of
from quire.server.generation import LARGE_BODIES
from quire.server.transport import Bodies

if TYPE_CHECKING:
    from quire.server.traces import Traces

KEPT_SENDINGS = 100
"""Of the last requests, where each went, why, and when, for the page."""

KEPT_NAMES = 1024
"""Of the prompt of each."""


@dataclass(slots=True)
class Sending:
    """A request at one server: its place in the server's load. Times are seconds of the router's clock.

    Attributes:
        again: its stream goes on there.
        names: of its prompt, the first ones; see `fleet/prompt.py`.
        arrived: when the request came to the router. sent: when it was sent. first: when the first bytes of the answer
            came; None: not yet. ended: when the answer had passed, or had broken off; None: not yet.
        lost: why it broke off.
        begun: the server's load has been told of the first token.
    """

    request: str
    choice: Choice
    again: bool
    names: list[bytes]
    arrived: float
    sent: float
    first: float | None = None
    ended: float | None = None
    lost: str = ""
    begun: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Site:
    """The parts of a router.

    Attributes:
        traces: where requests are traced; None: nowhere.
        stopping: set when a drain's time is over.
        draining: no new requests are taken.
    """

    config: RouterConfig
    servers: Servers
    metrics: RouterMetrics
    tenants: Tenants
    traces: Traces | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False
    sendings: deque[Sending] = field(default_factory=lambda: deque(maxlen=KEPT_SENDINGS))
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(LARGE_BODIES * self.config.max_body_bytes)

    @property
    def server(self) -> RouterConfig:
        """The options, as what is around the routes of a server and of a router asks for them."""
        return self.config

    def key_for(self, scope: Mapping[str, Any]) -> bytes:
        """The `Authorization` header for the servers: their key, or what the client sent."""
        if self.config.server_key is not None:
            return b"Bearer " + self.config.server_key.encode()
        return next(iter(authorization_of(scope)), b"")

    def routed(self, summary: RequestSummary, sending: Sending) -> None:
        """A request goes to a server."""
        self.metrics.routed(sending.again)
        self.sendings.append(sending)
        if self.config.log_requests:
            more = f"{summary.route}; then " if summary.route else ""
            summary.route = more + sending.choice.described()

    def begun_unseen(self, sending: Sending) -> None:
        """The first token of a whole answer is there, as far as one can tell."""
        if not sending.begun:
            sending.begun = True
            load = sending.choice.engine.load
            load.begun(sending.sent, self.servers.clock(), sending.choice.missing, computed=0)
