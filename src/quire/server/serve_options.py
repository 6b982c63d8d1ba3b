"""The options of a server and all its processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from quire import child
from quire.config import EngineConfig
from quire.server.config import ServerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server and its processes.

    Attributes:
        origins: where each option came from: "flag", "file" or "preset"; absent: "default".
        fault: an injected fault, see `quire.ipc.faults`.
        engine_command, http_command: what the children run.
    """

    server: ServerConfig
    engine: EngineConfig
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fault: str | None = None
    engine_command: Sequence[str] = tuple(child.python("quire.ipc.engine_process"))
    http_command: Sequence[str] = tuple(child.python("quire.server.http_process"))

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in requests."""
        return self.server.model_names(self.engine.model)
