"""ServerConfig: every option of the server, and the message with which an HTTP process starts.

Its fields are flags and YAML keys, like those of `EngineConfig`. Child processes get options only through these two:
none from the environment, and no secrets on a command line.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec

from quire.config import option
from quire.errors import ConfigError
from quire.kv.directory.base import masked
from quire.models.hub import EMBEDDED_MODELS, HUB_NAME
from quire.server.http_options import HttpOptions, check_each

MIN_STALL_SECONDS = 5.0

_NAME = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]{0,254}[^\s\x00-\x1f\x7f])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpOptions):
    """Options of one server."""

    served_model_name: tuple[str, ...] = option((), "what requests call the model; default: its folder's or hub name")
    api_workers: int = option(1, "number of HTTP processes on the port", low=1, high=64)
    tokenizer_workers: int = option(1, "tokenizer processes per HTTP process", low=1, high=64)
    tokenizer_deadline: float = option(
        10.0, "seconds that rendering or tokenizing one request may take", low=0.1, high=3600.0
    )
    max_queued_requests: int = option(1024, "requests that may wait for their first token", low=1, high=10**6)
    max_queued_tokens: int = option(1_000_000, "tokens that those may hold together, as estimated", low=1, high=10**12)
    request_timeout: float | None = option(
        None, "seconds after which a request is ended; default: never", low=0.001, high=10**7
    )
    restart_limit: int = option(
        5,
        "restarts within an hour, of each engine and of HTTP processes, before giving up",
        low=0,
        high=10**6,
    )
    stall_restart_s: float = option(
        60.0,
        "restart a process that shows no sign of life for so many seconds (an engine in a large step is given longer); "
        "0: never",
        low=0.0,
        high=10**6,
    )
    join: str | None = option(
        None,
        "URL of a router (quire route) that should send requests here; router and server need the same first --api-key",
    )
    admin: bool = option(False, "offer /reset_prefix_cache, /debug/requests and /debug/steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.stall_restart_s < MIN_STALL_SECONDS:
            raise ConfigError(
                f"stall_restart_s={self.stall_restart_s:g} is less than {MIN_STALL_SECONDS:g}, for which any process "
                "may be silent on a busy machine; give more, or 0 for never"
            )
        if self.join is not None and self.uds is not None:
            raise ConfigError("join needs a port that the router can reach, but uds is set; leave one of them out")
        if self.join is not None and not self.join.startswith(("http://", "https://")):
            raise ConfigError(
                f"join={masked(self.join)!r} is not a router's URL; give one such as http://127.0.0.1:8080"
            )
        if self.join is not None and not self.api_key:
            raise ConfigError(
                "join needs api_key, since a router accepts servers that have its key; give both the same one"
            )
        check_each("served_model_name", self.served_model_name, _NAME, "1 to 256 printable characters")

    def model_names(self, model: str) -> tuple[str, ...]:
        """The names of `model`, the engine's option, in requests; never empty.

        Of a folder, clients see only the last part of its path.
        """
        if self.served_model_name:
            return self.served_model_name
        if model in EMBEDDED_MODELS or HUB_NAME.fullmatch(model):
            return (model,)
        return (Path(model).expanduser().absolute().resolve().name or model,)


class HttpStart(msgspec.Struct, kw_only=True):
    """The supervisor's message to an HTTP process, as JSON on its standard input.

    Attributes:
        directory: the server's private folder.
        worker: this process's index, unique in the life of the server.
        fd: the listening socket, inherited.
        server: the server's options.
        model_names: names of the model in requests; responses have the first.
        engine_options: every field of `EngineConfig`, before the memory plan.
        replicas: number of engines.
        origins: where each option came from: "flag", "file" or "preset"; absent means "default".
    """

    directory: str
    worker: int
    fd: int
    server: ServerConfig
    model_names: tuple[str, ...]
    engine_options: dict[str, Any] = {}
    replicas: int = 1
    origins: dict[str, str] = {}
