"""Connections to several other engines, which come and go."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Generic, TypeVar

from quire.kv.importer import Prefiller

R = TypeVar("R", bound=Prefiller)


class Readers(Generic[R]):
    """The connections to other engines.

    Attributes:
        readers: each by the engine's name, or its URL.
    """

    def __init__(self) -> None:
        self.readers: dict[str, R] = {}
        self._closing: list[threading.Thread] = []

    def keep(self, names: Collection[str]) -> None:
        """Keep only these connections; the other engines have left."""
        for name in [each for each in self.readers if each not in names]:
            thread = threading.Thread(target=self.readers.pop(name).close, name="quire-node-closing", daemon=True)
            self._closing = [*(each for each in self._closing if each.is_alive()), thread]
            thread.start()  # closing may take a moment, which must not delay a step

    def drain(self) -> None:
        """Stop all reads that were ordered."""
        for reader in self.readers.values():
            reader.stop_reading()
        for thread in self._closing:
            thread.join()

    def close(self) -> None:
        """Close all connections."""
        for reader in self.readers.values():
            reader.close()
        for thread in self._closing:
            thread.join()
