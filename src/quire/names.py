"""DNS names each of whose addresses is a server: dns+http://NAME[:PORT][/PREFIX], for routers and decode engines."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

DNS = "dns+"
"""Prefix of the URL of a DNS name, each of whose addresses is a server."""

DNS_SECONDS = 5.0
"""How often such a name is resolved."""

MAX_SERVERS = 1024
"""Most servers that a name may have."""


def is_server(url: str) -> bool:
    """Whether a URL is that of a single server, as opposed to a DNS name that lists servers."""
    return not url.startswith(DNS)


def name_of(url: str) -> tuple[str, int]:
    """The name in a dns+http URL, and the port."""
    parts = urlsplit(url.removeprefix(DNS))
    return str(parts.hostname), parts.port or 80


def addresses(name: str, port: int) -> Sequence[str]:
    """The addresses of a name, from the machine's resolver: the IPv4 ones if there are any, otherwise the IPv6 ones.

    Raises:
        OSError: the name has no address, or the resolver does not answer.
    """
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    by_family = [
        [str(at[0]) for kind, *_, at in found if kind == family] for family in (socket.AF_INET, socket.AF_INET6)
    ]
    return by_family[0] or by_family[1]


def servers(url: str, addresses: Iterable[str]) -> list[str]:
    """The URLs of the servers at these addresses of a dns+http URL's name, in order, each once.

    Raises:
        ValueError: they are too many.
    """
    _, port = name_of(url)
    found = sorted(set(addresses))
    if len(found) > MAX_SERVERS:
        raise ValueError(f"{url} has {len(found)} addresses; at most {MAX_SERVERS} are allowed")
    hosts = [f"[{each}]" if ":" in each else each for each in found]
    return [f"http://{host}:{port}{urlsplit(url.removeprefix(DNS)).path}" for host in hosts]
