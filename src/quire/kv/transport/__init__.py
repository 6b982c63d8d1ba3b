"""Ways for blocks between engines (docs/kv.md, "Transports")."""

from __future__ import annotations

from importlib.util import find_spec

from quire.errors import ConfigError
from quire.kv.transport.base import Region, Transport

TRANSPORTS = "shared_memory", "socket", "mooncake", "nixl"
"""All that there are. The first two are always there, fenced, and closed to those without the right to read."""

LIBRARIES = {"mooncake": "mooncake", "nixl": "nixl_cu12"}
"""Modules that a transport needs, of packages that are not installed with Quire."""


def installed() -> list[str]:
    """Transports whose library is there; it may yet lack one of its own, which `open_transport` says."""
    return [name for name in TRANSPORTS if name not in LIBRARIES or find_spec(LIBRARIES[name])]


def open_transport(name: str, region: Region, token: bytes, host: str = "127.0.0.1", port: int = 0) -> Transport:
    """A transport by its name; only then is its library imported.

    Args:
        token: the cluster key, which "socket" needs.
        host: of this machine, as others reach it: what "socket" listens at, and "mooncake" tells others.
        port: where "socket" listens; 0: any that is free. Others choose their own.

    Raises:
        ConfigError: there is no transport of this name, it is not installed, or cannot start.
        TransferError: it cannot offer this region.
    """
    if name == "shared_memory":
        from quire.kv.transport.shared import SharedMemoryTransport

        return SharedMemoryTransport(region)
    if name == "socket":
        from quire.kv.transport.socket import SocketTransport

        return SocketTransport(region, token, host, port)
    if name == "mooncake":
        from quire.kv.transport.mooncake import MooncakeTransport

        return MooncakeTransport(region, host)
    if name == "nixl":
        from quire.kv.transport.nixl import NixlTransport

        return NixlTransport(region)
    raise ConfigError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")
