"""Mooncake Store (extra `mooncake`) as a store of KV blocks: a master knows where values are, nodes have the memory.

Each node contributes some of its memory. Observed with version 0.3.13.post1: putting a name that exists keeps the old
value without an error; after a `kill -9` of the node that has a value, the value still appears to exist for ten seconds
(`client_ttl`). Everything that is read is checked, so both are cache misses. Nothing is encrypted: anyone who can reach
the ports of the master and of the nodes can read and write all of it.
"""

from __future__ import annotations

import importlib
import socket
import urllib.parse
from collections.abc import Sequence
from typing import Any

from quire.config import parse_size
from quire.errors import ConfigError
from quire.kv.directory.base import DirectoryError

MEMORY = "64MiB"
"""Memory that a node contributes, unless the URL says otherwise."""

BUFFER_BYTES = 32 << 20
"""Mooncake's buffer for transfers."""

CONNECT_SECONDS = 1.0

OPTIONS = {"memory", "protocol"}


class MooncakeStore:
    """See `store.BlockStore`.

    Args:
        url: mooncake://HOST:PORT of the master, with `?memory=256MiB` for what this node contributes, and
            `?protocol=rdma`.
        cluster: identifies the cluster's key, so that clusters can share a master and never see each other's blocks.
        host: address of this machine for other nodes.

    Raises:
        ConfigError: the URL is not valid, or Mooncake is not installed.
    """

    def __init__(self, url: str, cluster: str, host: str) -> None:
        self.where, self._prefix, self._host = f"kv_directory {url}", f"quire/{cluster}/", host
        try:
            parts = urllib.parse.urlsplit(url)
            options = dict(urllib.parse.parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            port = parts.port
            self._memory = parse_size(options.get("memory", MEMORY))
        except ValueError as error:
            raise ConfigError(f"{self.where}: {error}; such as mooncake://10.0.0.1:50051?memory=1GiB") from error
        self._protocol = options.get("protocol", "tcp")
        wrong = not parts.hostname or port is None or parts.username or parts.path.strip("/")
        if wrong or options.keys() - OPTIONS or self._protocol not in ("tcp", "rdma"):
            raise ConfigError(f"{self.where}: allowed: mooncake://HOST:PORT[?memory=SIZE&protocol=tcp|rdma]")
        self._address = parts.hostname, port
        self._master = f"{parts.hostname}:{port}"
        try:
            self._library: Any = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise ConfigError(
                f"{self.where} needs Mooncake ({error}): pip install '.[mooncake]', and Debian's libibverbs1"
            ) from error
        self._store: Any = None

    def connect(self) -> None:
        self.close()
        try:  # without a master, Mooncake would try for a minute and a half
            socket.create_connection(self._address, CONNECT_SECONDS).close()
        except OSError as error:
            raise DirectoryError(f"{self.where} cannot be reached ({error})") from error
        store = self._library.MooncakeDistributedStore()
        found = store.setup(self._host, "P2PHANDSHAKE", self._memory, BUFFER_BYTES, self._protocol, "", self._master)
        if found != 0:
            raise DirectoryError(f"{self.where} cannot be reached (Mooncake's error {found}; its log says why)")
        self._store = store

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        if not names:
            return []
        found = self._store.batch_is_exist(self._keys(names))
        if any(each < 0 for each in found):
            raise DirectoryError(f"{self.where} does not answer as it should (Mooncake's error {min(found)})")
        return [each == 1 for each in found]

    def put(self, names: Sequence[bytes], values: Sequence[bytes]) -> None:
        # A full store is not an error: what it does not keep is a miss.
        self._store.put_batch(self._keys(names), list(values))

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        return [bytes(value) if value else None for value in self._store.get_batch(self._keys(names))]

    def remove(self, names: Sequence[bytes]) -> None:
        for key in self._keys(names):
            self._store.remove(key)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _keys(self, names: Sequence[bytes]) -> list[str]:
        return [self._prefix + name.hex() for name in names]
