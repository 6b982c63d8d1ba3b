"""A Redis in which servers say where they are, and routers find them: one place for any number of both.

Keys, all of which begin with `PREFIX`: `servers`, their URLs; `s:URL`, a server's role and its seal, which expires when
it is not written again. The seal is a hash keyed with the first API key that server and router have in common, so that
who may write to the Redis cannot have requests, and clients' keys, sent to a server of his own.
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
"""A server that says nothing for so long is not found any more."""


@dataclass(frozen=True, slots=True)
class Met:
    """A server that was found. `is_ours`: its seal is right."""

    url: str
    role: str
    is_ours: bool


class Meeting:
    """The servers and routers with one key.

    Args:
        url: of the Redis.
        option: by which it was given, for errors.
        key: the first API key.

    Raises (also each call):
        ConfigError: it can never be used so. DirectoryError (calls): it does not answer now.
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
        """Whether it can be used."""
        self._link.check()

    def join(self, url: str, role: str) -> None:
        """A server is there, for `LEASE_SECONDS`."""

        def write() -> None:
            with self._link.client.pipeline() as pipe:
                pipe.set(_key(url), f"{role}\n{self._seal(url, role)}", ex=LEASE_SECONDS)
                pipe.sadd(PREFIX + b"servers", url)
                pipe.execute()

        self._link.call(write)

    def leave(self, url: str) -> None:
        """It is there no longer."""
        self._link.call(lambda: self._link.client.delete(_key(url)))

    def found(self) -> list[Met]:
        """All that are there."""
        rows = self._link.call(lambda: self._list([PREFIX + b"servers"], [_key("")]))
        met = []
        for url, record in rows:
            name, (role, _, seal) = url.decode(errors="replace"), record.decode(errors="replace").partition("\n")
            met.append(Met(name, role, hmac.compare_digest(seal.encode(), self._seal(name, role).encode())))
        return met

    def close(self) -> None:
        """Ask no more."""
        self._link.client.close()

    def _seal(self, url: str, role: str) -> str:
        return blake3(f"{role}\n{url}".encode(), key=self._key).hexdigest()


def _key(url: str) -> bytes:
    return PREFIX + b"s:" + url.encode()
