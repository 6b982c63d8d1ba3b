"""Transports of KV blocks between engines (docs/kv.md, "Transports")."""

from __future__ import annotations

from importlib.util import find_spec

from quire.errors import ConfigError
from quire.kv.transport.base import Region, Transport

TRANSPORTS = "shared_memory", "socket", "mooncake", "nixl"
"""All transports. The first two are always installed, fenced, and protected against unauthorized readers."""

LIBRARIES = {"mooncake": "mooncake", "nixl": "nixl_cu12"}
"""Modules of optional packages that a transport needs."""


def installed() -> list[str]:
    """Transports whose library is installed; `open_transport` may still find that the library itself lacks one."""
    return [name for name in TRANSPORTS if name not in LIBRARIES or find_spec(LIBRARIES[name])]


def open_transport(name: str, region: Region, token: bytes, host: str = "127.0.0.1") -> Transport:
    """Open a transport by name, importing its library.

    Args:
        token: the cluster key, which "socket" needs.
        host: this machine's address for other engines: "socket" listens there, on any free port; "mooncake" tells it
            the others.

    Raises:
        ConfigError: the name is unknown, or the transport is not installed or cannot start.
        TransferError: it cannot offer this region.
    """
    if name == "shared_memory":
        from quire.kv.transport.shared import SharedMemoryTransport

        return SharedMemoryTransport(region)
    if name == "socket":
        from quire.kv.transport.socket import SocketTransport

        return SocketTransport(region, token, host)
    if name == "mooncake":
        from quire.kv.transport.mooncake import MooncakeTransport

        return MooncakeTransport(region, host)
    if name == "nixl":
        from quire.kv.transport.nixl import NixlTransport

        return NixlTransport(region)
    raise ConfigError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")
