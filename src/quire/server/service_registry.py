"""A registry of servers in a Redis: servers register there and routers find them, any number of both.

Keys, all of which begin with `PREFIX`: `servers`, their URLs; `s:URL`, a server's role and signature, which expires
unless it is renewed. The signature is a hash keyed with the first API key, which server and router share, so that
someone who can write to the Redis cannot divert requests, and clients' keys, to a server of their own.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from blake3 import blake3

from quire.kv.directory.redis import LIST
from quire.kv.directory.redis_link import RedisLink

PREFIX = b"quire:{fleet}:"
SCHEMES = "redis://", "rediss://", "unix://"
LEASE_SECONDS = 15
"""How long a registration lasts unless it is renewed."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered server. `is_ours`: its signature is valid."""

    url: str
    role: str
    is_ours: bool


class ServiceRegistry:
    """The servers with one key.

    Args:
        url: the Redis' URL.
        option: the option that gave it, for errors.
        key: the first API key.

    Raises (also each call):
        ConfigError: it cannot be used this way. DirectoryError (calls): it does not answer now.
    """

    def __init__(self, url: str, option: str, key: str) -> None:
        self._link = RedisLink(url, option)
        self._key = blake3(key.encode(), derive_key_context="quire 2026 seals of servers in a Redis").digest()
        self._list = self._link.client.register_script(LIST)

    @property
    def where(self) -> str:
        """The option and the URL, without a password."""
        return self._link.where

    def check(self) -> None:
        """Check that it can be used."""
        self._link.check()

    def join(self, url: str, role: str) -> None:
        """Register a server for `LEASE_SECONDS`."""

        def write() -> None:
            with self._link.client.pipeline() as pipe:
                pipe.set(_key(url), f"{role}\n{self._signature(url, role)}", ex=LEASE_SECONDS)
                pipe.sadd(PREFIX + b"servers", url)
                pipe.execute()

        self._link.call(write)

    def leave(self, url: str) -> None:
        """Deregister a server."""
        self._link.call(lambda: self._link.client.delete(_key(url)))

    def found(self) -> list[Registered]:
        """All registered servers."""
        rows = self._link.call(lambda: self._list([PREFIX + b"servers"], [_key("")]))
        found = []
        for url, record in rows:
            name, (role, _, signature) = url.decode(errors="replace"), record.decode(errors="replace").partition("\n")
            is_ours = hmac.compare_digest(signature.encode(), self._signature(name, role).encode())
            found.append(Registered(name, role, is_ours))
        return found

    def close(self) -> None:
        """Close the connection."""
        self._link.client.close()

    def _signature(self, url: str, role: str) -> str:
        return blake3(f"{role}\n{url}".encode(), key=self._key).hexdigest()


def _key(url: str) -> bytes:
    return PREFIX + b"s:" + url.encode()
