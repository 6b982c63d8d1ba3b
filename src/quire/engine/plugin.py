"""A KV connector that is installed, found by its entry point: see docs/kv.md."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.core.external import External
from quire.curve import read_token
from quire.engine.elsewhere import Elsewhere, names_key
from quire.engine.installed import find
from quire.errors import ConfigError
from quire.kv.connector import Connector
from quire.kv.mover import Mover, NamedMover

GROUP = "quire.kv_connectors"
"""The group of entry points."""


class Plugin(Elsewhere):
    """KV is where an installed connector keeps it.

    Args:
        config: has its name, and its own options.
        hash_key: see `Elsewhere`.

    Raises:
        ConfigError: there is no such connector, or it cannot be made.
    """

    def __init__(self, config: EngineConfig, hash_key: bytes | None) -> None:
        shared = None if config.cluster_key_file is None else read_token(config.cluster_key_file, "--cluster-key-file")
        super().__init__(config, hash_key or (None if shared is None else names_key(shared)))
        name, options = config.kv_connector or "", dict(config.kv_connector_extra_config or {})
        make = find("kv_connector", name, GROUP)
        try:
            made = make(options)
        except Exception as error:
            raise ConfigError(
                f"kv_connector={name} cannot be made with kv_connector_extra_config={options}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Connector):
            raise ConfigError(
                f"kv_connector={name} made a {type(made).__name__}; it must make a quire.kv.connector.Connector"
            )
        self._connector = made
        self.notes.append(f"KV connector: {name} ({type(made).__module__}.{type(made).__qualname__})")

    def connector(self) -> External | None:
        """See `Elsewhere`."""
        return self._connector

    def mover(self) -> Mover | None:
        """See `Elsewhere`."""
        return NamedMover(self._connector, self.key)

    def waits(self, wait_seconds: float) -> bool:
        """See `Elsewhere`."""
        return self._connector.waits and self._connector.wait(wait_seconds)

    def close(self) -> None:
        """See `Elsewhere`."""
        super().close()
        self._connector.close()
