"""The state that a router's routes share; made once and passed to them."""

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
"""How many recent requests are kept for the page: where each went, why, and when."""

KEPT_NAMES = 1024
"""How many chunk names of each one's prompt are kept."""


@dataclass(slots=True)
class Sending:
    """One request on one server: its share of the server's load. Times are seconds of the router's clock.

    Attributes:
        again: its stream is resumed there.
        names: of the first chunks of its prompt; see `fleet/prompt.py`.
        arrived: when the request reached the router. sent: when it was sent to the server. first: when the first bytes
            of the response came, or None. ended: when the response was complete or broke off, or None.
        lost: why the response broke off.
        begun: the first token has been counted in the server's load.
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
    """A router's shared state.

    Attributes:
        traces: where requests are traced; None if they are not.
        stopping: set when the drain timeout is over.
        draining: no new requests are accepted.
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
        """The options, under the name that the middleware shared with servers expects."""
        return self.config

    def key_for(self, scope: Mapping[str, Any]) -> bytes:
        """The `Authorization` header for the servers: the configured key, or else the client's header."""
        if self.config.server_key is not None:
            return b"Bearer " + self.config.server_key.encode()
        return next(iter(authorization_of(scope)), b"")

    def routed(self, summary: RequestSummary, sending: Sending) -> None:
        """Record that a request is sent to a server."""
        self.metrics.routed(sending.again, sending.choice.as_picked)
        self.sendings.append(sending)
        if self.config.log_requests:
            more = f"{summary.route}; then " if summary.route else ""
            summary.route = more + sending.choice.described()

    def begun_unseen(self, sending: Sending) -> None:
        """Count the first token of a non-streaming response, whose time is estimated."""
        if not sending.begun:
            sending.begun = True
            load = sending.choice.engine.load
            load.begun(sending.sent, self.servers.clock(), sending.choice.missing, computed=0)
