"""What the routes of a router share: it is made once and passed."""

from __future__ import annotations

import asyncio
import time
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

KEPT_DECISIONS = 100
"""Of the last requests, where each went and why, for the page."""


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
    decisions: deque[tuple[float, str, Choice, bool]] = field(default_factory=lambda: deque(maxlen=KEPT_DECISIONS))
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

    def routed(self, summary: RequestSummary, choice: Choice, again: bool) -> None:
        """A request goes to a server. `again`: its stream goes on there."""
        self.metrics.routed(again)
        self.decisions.append((time.time(), summary.request_id, choice, again))
        if self.config.log_requests:
            more = f"{summary.route}; then " if summary.route else ""
            summary.route = more + choice.described()

    def begun_unseen(self, sending: Any) -> None:
        """The first token of a whole answer is there, as far as one can tell."""
        if not sending.begun:
            sending.begun = True
            load = sending.choice.server.load
            load.begun(sending.sent, self.servers.clock(), sending.choice.missing, computed=0)
