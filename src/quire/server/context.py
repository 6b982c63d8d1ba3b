"""Shared state of the routes of one HTTP process, created once and passed around; there are no globals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.server.auth import Tenants
from quire.server.body import shorten
from quire.server.errors import ApiError

if TYPE_CHECKING:
    from quire.ipc.client import EngineClient
    from quire.server.config import ServerConfig
    from quire.server.metrics import Metrics
    from quire.server.traces import Traces
    from quire.text.tokenizer_pool import TokenizerPool

RETRY_LOADING, RETRY_RESTARTING, RETRY_DRAINING = 2, 1, 5
"""`Retry-After` in seconds while the engine loads, restarts, and while the server drains."""


TOKENIZERS = "starting the tokenizers"
REST_SECONDS = 10.0
"""How long a request waits for an HTTP process that is not ready although its engine is."""


@dataclass(slots=True)
class AppContext:
    """The parts of one HTTP process.

    Attributes:
        server: the server's options.
        client: the connection to the engines.
        metrics: this process's share of `/metrics`.
        model_names: names of the model in requests; responses have the first.
        tenants: the API keys.
        engine_options: engine options as the user gave them. Those in effect, after the memory plan, are in
            `client.info.config`.
        origins: where each engine and server option came from: "flag", "file", "preset"; absent means "default".
        pool: the tokenizer workers; None until the checkpoint's folder is known.
        traces: the OpenTelemetry exporter, if any.
        started: when this process started, in Unix time (`created` of the models).
        stopping: set when the drain timeout is over; see `stop`.
    """

    server: ServerConfig
    client: EngineClient
    metrics: Metrics
    model_names: tuple[str, ...]
    tenants: Tenants
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    pool: TokenizerPool | None = None
    traces: Traces | None = None
    started: float = field(default_factory=time.time)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: an engine and the tokenizers are ready, and the server is not draining."""
        return self.client.state == "ready" and self.pool is not None and not self.client.draining

    async def wait_for_the_rest(self) -> None:
        """Wait a little if only this process is not ready: another one may have returned 200 already."""
        end = time.monotonic() + REST_SECONDS
        while self.is_starting and self.loading_phase()[0] in ("ready", TOKENIZERS) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    @property
    def is_starting(self) -> bool:
        """Whether this process has not been ready yet."""
        return not self.client.draining and (self.client.state == "loading" or self.pool is None)

    def stop(self) -> None:
        """End running requests with what they have when the drain timeout is over; others get a 503."""
        self.stopping.set()
        self.client.end_all()

    def not_ready(self) -> ApiError | None:
        """A 503 with `Retry-After` that says why no request can be served now; None if one can."""
        if self.is_ready:
            return None
        client = self.client
        if client.draining:
            return stop_error()
        if client.state == "failed":
            return _unavailable(
                "the engine has failed and will not be restarted; see the server's log", "engine_failed"
            )
        if client.state == "restarting":
            return _unavailable("the engine is being restarted; try again", "engine_restarting", RETRY_RESTARTING)
        phase, percent = self.loading_phase()
        return _unavailable(f"the model is loading ({phase}, {percent} %); try again", "model_loading", RETRY_LOADING)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; None is the served one.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.model_names:
            message = f"the model {shorten(name)} does not exist; this server has: {', '.join(self.model_names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def loading_phase(self) -> tuple[str, int]:
        """The phase of loading, and its percentage."""
        if self.client.state == "ready":
            return TOKENIZERS, 100
        board = self.client.board
        phase, percent = board.phase if board is not None else ("", 0)
        return phase or "starting", percent


def _unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return ApiError(503, message, code=code, headers=headers)


def stop_error() -> ApiError:
    """503 for requests that have not ended, or not begun, when the server stops."""
    headers = {"retry-after": str(RETRY_DRAINING), "connection": "close"}
    message = "the server is shutting down; try again"
    return ApiError(503, message, code="shutting_down", headers=headers)
