"""Addresses of servers. Nothing that takes long to import, since every command reads the options of routers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from quire.errors import ConfigError


class Address:
    """A server's address.

    Args:
        url: http(s)://HOST[:PORT][/PREFIX][/v1], or unix:PATH for a Unix socket.

    Attributes:
        uds: the absolute path of the Unix socket; None if the server has a host and a port.
        prefix: what precedes the paths of its routes, such as "/llm"; "" for nothing.
        endpoint: host and port, as a gateway names it; "" for a Unix socket.

    Raises:
        ConfigError: this is not such a URL.
    """

    def __init__(self, url: str) -> None:
        self.uds = _socket_path(url)
        wrong = f"{url.rpartition('@')[2]!r:.200} is not a server's URL; write one such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url if self.uds is None else "http://localhost")
            port = parts.port
        except ValueError as error:  # a port or an IPv6 address that is none
            raise ConfigError(wrong) from error
        if parts.username or parts.password:
            shown = url.rpartition("@")[2]
            raise ConfigError(f"{shown!r} has a password before it; keys are given by --api-key, or by --server-key")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
            raise ConfigError(wrong)
        if self.uds is None and re.search(r"[^!-~]", url):  # a space, or no ASCII
            raise ConfigError(wrong)
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.endpoint = f"{shown}:{self.port}" if self.uds is None else ""
        self.name = f"{self.endpoint}{self.prefix}" if self.uds is None else f"unix:{self.uds}"
        self.url = f"{parts.scheme}://{self.name}" if self.uds is None else self.name
        self._head = f"{{}} {self.prefix}{{}} HTTP/1.1\r\nhost: {shown}:{self.port}\r\n"

    def request(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
        """A request as bytes. Its path is that of a route, without the address's prefix."""
        lines = [self._head.format(method, path).encode("latin-1")]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines += (b"content-length: %d\r\n\r\n" % len(body), body)
        return b"".join(lines)


def _socket_path(url: str) -> str | None:
    """The absolute path in a unix:PATH or unix://PATH URL; None for other URLs."""
    if not url.startswith("unix:"):
        return None
    path = url.removeprefix("unix:").removeprefix("//")
    if not path or not path.isprintable():
        raise ConfigError(f"{url!r} is no Unix socket of a server; write its path, as in unix:/run/quire.sock")
    return os.path.abspath(path)
