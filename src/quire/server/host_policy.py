"""Which host names and origins a server without API keys accepts.

Without keys, anyone who reaches the port can use the server, and so can every web page open in a nearby browser:

- A page can point its own name at this server's address (DNS rebinding), and the browser then treats both as one
  origin. It cannot send any `Host` but its own name. So names must be known; addresses are accepted, since DNS
  rebinding needs a name.
- A page of another origin can send requests without reading the responses. Browsers reveal it by `Origin` (RFC 6454)
  and `Sec-Fetch-Site` (W3C Fetch Metadata; not sent to plain HTTP on other machines, nor by older browsers).

No page has an API key, so a server with keys needs none of this.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.server.errors import ApiError

MAX_NAME_LENGTH = 253
"""Longest DNS name (RFC 1035)."""

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]*\]|[a-z0-9._~!$&'()*+,;=%-]*)(?::(?P<port>[0-9]{0,5}))?", re.IGNORECASE)
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<host>[^/?#@]+)", re.IGNORECASE)
_PRIVATE = (".localhost", ".internal")
"""Endings of names that nobody can register, and so no web page can have: browsers and resolvers resolve the first to
this machine (RFC 6761, 6.3), and ICANN keeps the second for private networks, as in `host.docker.internal`.
"""
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Host(NamedTuple):
    """A host as in a `Host` header or an origin: a name in lower case or an address, and the port if given."""

    name: str
    port: int | None


def parse_host(value: bytes) -> Host | None:
    """A `Host` header's value (RFC 9110, 7.2); None if it is not one."""
    found = _HOST.fullmatch(value.decode("latin-1").strip(" \t"))
    if found is None:
        return None
    name, port = found["name"].lower(), int(found["port"]) if found["port"] else None
    if name.startswith("["):
        name = name[1:-1]
        if ":" not in name or not _is_address(name):
            return None
    elif name.endswith("."):
        name = name[:-1]  # the root of DNS: the same name
    return Host(name, port) if len(name) <= MAX_NAME_LENGTH and (port or 0) < 1 << 16 else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class HostPolicy:
    """Decides about requests to a server without keys.

    Args:
        bound: the host that the server was told to listen on.
        allowed: further names; "*" is every name.
        origins: web origins whose pages may use the server; "*" is all.
    """

    def __init__(self, bound: str, allowed: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        self._any = "*" in allowed
        self._allowed = frozenset(_names(allowed))
        self._names = self._allowed | {"localhost", *_names([bound, socket.gethostname()])}
        self._origins = frozenset(origins)

    def refusal(self, scope: Mapping[str, Any]) -> ApiError | None:
        """Why this ASGI request is refused, if it is. Its `Host` is known to be valid."""
        hosts = [parse_host(value) for name, value in scope["headers"] if name == b"host"]
        host = hosts[0] if hosts else None  # without one it is HTTP/1.0, which browsers do not use
        if host is not None and not self._is_known(host.name):
            return unknown_host(host.name)
        return foreign_page() if self._is_foreign(scope, host) else None

    def _is_known(self, name: str) -> bool:
        return self._any or name in self._names or name.endswith(_PRIVATE) or _is_address(name)

    def _is_foreign(self, scope: Mapping[str, Any], host: Host | None) -> bool:
        """Whether a browser sends this for a page whose origin is not allowed."""
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if self._origins & {"*", *given[:1]}:
            return False
        if given and not (len(given) == 1 and self._is_own(given[0], host, scope.get("scheme") == "https")):
            return True
        sites = [value for name, value in scope["headers"] if name == b"sec-fetch-site"]
        return any(site not in (b"same-origin", b"none") for site in sites)

    def _is_own(self, origin: str, host: Host | None, tls: bool) -> bool:
        """Whether a page of this origin is this server's: under the host of the request, or under an allowed name,
        whose `Host` a proxy may have changed. A server with https has no page under http; but a proxy may speak https
        for a server without.
        """
        found = _ORIGIN.fullmatch(origin)
        page = parse_host(found["host"].encode("latin-1")) if found else None
        if found is None or page is None or (tls and found["scheme"].lower() != "https"):
            return False
        default = _DEFAULT_PORTS[found["scheme"].lower()]
        same = host is not None and page.name == host.name and (page.port or default) == (host.port or default)
        return same or page.name in self._allowed


def _names(hosts: Iterable[str]) -> list[str]:
    """Names as they are compared, without those that are none, such as "*"."""
    found = (parse_host(host.encode("ascii", "replace")) for host in hosts if host != "*" and ":" not in host)
    return [host.name for host in found if host is not None and host.name]


def unknown_host(name: str) -> ApiError:
    """403: the request uses a name that this server does not know."""
    shown = name if 0 < len(name) <= 80 else "NAME"
    message = (
        f"this server has no API key, and so answers only under names that it knows: web pages could reach it under "
        f"names of their own. If it is meant to be reached under this one, start it with --allowed-host {shown} "
        "(--allowed-host '*' for any name), or give it an --api-key"
    )
    return ApiError(403, message, code="unknown_host")


def foreign_page() -> ApiError:
    """403: a page of another origin."""
    message = (
        "pages of other origins may not use this server; --cors-origin ORIGIN allows one, and --allowed-host NAME its "
        "own page behind a proxy that changes the Host header"
    )
    return ApiError(403, message, code="foreign_origin")
