"""Addresses of servers. Nothing that takes long to import, since every command reads the options of routers."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit


class Address:
    """A server's address.

    Args:
        url: http(s)://HOST[:PORT][/PREFIX], or unix:PATH for a Unix socket.

    Attributes:
        uds: the path of the Unix socket; None if the server has a host and a port.
        endpoint: host and port, as a gateway names it; "" for a Unix socket.

    Raises:
        ValueError: this is not such a URL.
    """

    def __init__(self, url: str) -> None:
        self.uds = _socket_path(url)
        wrong = f"{url.rpartition('@')[2]!r:.200} is not a server's URL; write one such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url if self.uds is None else "http://localhost")
            port = parts.port
        except ValueError as error:  # a port or an IPv6 address that is none
            raise ValueError(wrong) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(wrong)
        if parts.username or parts.password:
            raise ValueError(f"{url.rpartition('@')[2]!r} has a password before it; keys are given by --server-key")
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.endpoint = f"{shown}:{self.port}" if self.uds is None else ""
        self.name = f"{self.endpoint}{self.prefix}" if self.uds is None else url
        self.url = f"{parts.scheme}://{self.name}" if self.uds is None else url
        self._head = f"{{}} {self.prefix}{{}} HTTP/1.1\r\nhost: {shown}:{self.port}\r\n"

    def request(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
        """A request as bytes."""
        lines = [self._head.format(method, path).encode("latin-1")]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines += (b"content-length: %d\r\n\r\n" % len(body), body)
        return b"".join(lines)


def _socket_path(url: str) -> str | None:
    """The path in a unix:PATH URL; None for other URLs. Raises ValueError if the path is not absolute."""
    if not url.startswith("unix:"):
        return None
    path = url.removeprefix("unix:")
    if not path.startswith("/") or path.startswith("//") or not path.isprintable():
        raise ValueError(f"{url!r} is no Unix socket of a server; write its absolute path, as in unix:/run/quire.sock")
    return path
