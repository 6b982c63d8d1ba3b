"""The main part of an HTTP process: the app, the start of the tokenizer workers, and the shutdown.

Importing this takes most of the process's start, so `http_process` does it while it already serves `/health`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from pathlib import Path

from starlette.types import ASGIApp

from quire import log
from quire.curve import read_token
from quire.ipc.client import EngineClient
from quire.server.app import create_app
from quire.server.auth import Tenants
from quire.server.config import HttpStart
from quire.server.context import AppContext
from quire.server.errors import ApiError
from quire.server.metrics import Metrics
from quire.server.request_log import log_unread
from quire.server.transport import HttpServer
from quire.text.chat_template import ChatOptions
from quire.text.tokenizer_pool import TokenizerPool

logger = logging.getLogger(__name__)


class HttpWorker:
    """Runs an HTTP process once everything is imported. Create it in a running event loop.

    Args:
        start: the supervisor's message.
        http: the server, which is already listening.

    Attributes:
        app: the app to serve from now on.
    """

    def __init__(self, start: HttpStart, http: HttpServer) -> None:
        directory = Path(start.directory)
        server, cluster_key = start.server, start.engine_options.get("cluster_key_file")
        secret = None if cluster_key is None else read_token(cluster_key, "--cluster-key-file", quiet=True)
        self.context = AppContext(
            server=server,
            client=EngineClient(directory, start.worker, start.replicas, server.api_workers),
            metrics=Metrics(directory / "metrics", worker=start.worker, model_name=start.model_names[0]),
            model_names=start.model_names,
            tenants=Tenants(server.api_key, server.metrics_key, secret),
            engine_options=start.engine_options,
            origins=start.origins,
            traces=server.open_traces(f"quire {start.model_names[0]}", start.model_names[0]),
        )
        self.app: ASGIApp = create_app(self.context)
        self._http = http
        http.config.on_refused = self._refused
        self._deadline = math.inf  # of a drain, on the monotonic clock
        self._leaving: asyncio.Task[None] | None = None
        self._exit_code = 0

    def _refused(self, request_id: str, error: ApiError) -> None:
        """Count what was refused before it was a request."""
        self.context.metrics.rejected("invalid" if error.status == 400 else "other")
        if self.context.server.log_requests:
            log_unread(request_id, error)

    async def run(self, serving: asyncio.Task[None]) -> int:
        """Run until `serving`, the server's task, has ended; returns the exit code."""
        await self.context.client.start(self._drain)
        loading = asyncio.create_task(self._load_tokenizers())
        loading.add_done_callback(self._loaded)
        try:
            await serving
        finally:
            loading.cancel()
            await asyncio.wait([loading])
            if self.context.pool is not None:
                await self.context.pool.close()
            await self.context.client.close()
            if self.context.traces is not None:
                await asyncio.to_thread(self.context.traces.close)
        return self._exit_code

    async def _load_tokenizers(self) -> None:
        """Start the tokenizer workers as soon as the checkpoint's folder is known."""
        client, server = self.context.client, self.context.server
        await client.located.wait()
        if client.folder is None:
            raise RuntimeError("the checkpoint was located, but not where")
        chats = ChatOptions.of(self.context.engine_options)
        pool = TokenizerPool(client.folder, server.tokenizer_workers, server.tokenizer_deadline, chats=chats)
        try:
            await pool.start()
        except BaseException:
            await pool.close()
            raise
        self.context.pool = pool
        level = logging.WARNING if pool.reply_syntax.lost else logging.INFO
        log.event(logger, "reply_format", f"replies: {pool.reply_syntax.described}", level=level)

    def _loaded(self, loading: asyncio.Task[None]) -> None:
        """End this process if the tokenizers cannot start, since it could serve nothing."""
        if loading.cancelled() or loading.exception() is None:
            return
        error = loading.exception()
        log.event(logger, "tokenizers_failed", f"the tokenizers do not start: {error}", level=logging.ERROR)
        self._exit_code = 1
        self._http.should_exit = True

    # -- leaving -------------------------------------------------------------------------------------------

    def _drain(self, seconds: float) -> None:
        """Stop, as the supervisor asks. A second call can only shorten the time left."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._http.drain(lambda: self._deadline, self.context.stop))
