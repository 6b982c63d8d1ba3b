"""What an endpoint picker has said of where a request may go.

A gateway with the Gateway API Inference Extension asks a picker before it forwards a request, and puts the answer into
headers (the extension's proposal 004, endpoint picker protocol). They choose among the servers that the router would
send the request to anyway, and an address that is not theirs is never asked, so they are taken from every client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from quire.log import sanitize

DESTINATION = b"x-gateway-destination-endpoint"
"""Endpoints, such as 10.0.0.1:8000,10.0.0.2:8000: the first one that can take the request is to get it."""
SUBSET = b"x-gateway-destination-endpoint-subset"
"""Endpoints besides which none may get the request."""
SERVED = b"x-gateway-destination-endpoint-served"
"""In the answer: which of the endpoints named as destinations gave it."""


class Endpoint(Protocol):
    """What an address has."""

    @property
    def endpoint(self) -> str:
        """Host and port."""


class Reached(Protocol):
    """What a server has."""

    @property
    def address(self) -> Endpoint:
        """Where it is."""

    @property
    def works(self) -> bool:
        """Whether it takes requests now."""


Server = TypeVar("Server", bound=Reached)


class Picked(NamedTuple):
    """Endpoints, each as `Address.endpoint` has it.

    Attributes:
        first: which are preferred to all others, the best first.
        among: besides which none may be used; None: there is no such limit.
    """

    first: tuple[str, ...] = ()
    among: frozenset[str] | None = None

    def allows(self, endpoint: str) -> bool:
        """Whether this endpoint may get the request at all."""
        return self.among is None or endpoint in self.among

    def prefers(self, endpoint: str) -> bool | None:
        """Whether this endpoint is a preferred one; None: there are none."""
        return endpoint in self.first if self.first else None

    def best_of(self, servers: Sequence[Server]) -> Sequence[Server]:
        """Those at the first preferred endpoint that can take a request now; if there is none, all."""
        if not self.first:
            return servers
        ready: dict[str, list[Server]] = {}
        for one in servers:
            if one.works:
                ready.setdefault(one.address.endpoint, []).append(one)
        return next((ready[endpoint] for endpoint in self.first if endpoint in ready), servers)

    def described(self, endpoint: str) -> str:
        """For the log: whether what was chosen is what was picked."""
        if not self.first:
            return ""
        named = sanitize(", ".join(self.first))
        return " as picked" if self.prefers(endpoint) else f", since none that was picked can take it ({named})"


NOTHING_PICKED = Picked()


def read_picked(headers: Iterable[tuple[bytes, bytes]]) -> Picked:
    """Read a request's headers, whose names are in lower case. Repeated ones are one list, as in HTTP."""
    lists: dict[bytes, list[str]] = {}
    for name, value in headers:
        if name in (DESTINATION, SUBSET):
            parts = [part.strip() for part in value.decode("latin-1").split(",")]
            lists.setdefault(name, []).extend(filter(None, parts))
    if not lists:
        return NOTHING_PICKED
    among = lists.get(SUBSET)
    return Picked(tuple(lists.get(DESTINATION, ())), None if among is None else frozenset(among))
