"""An HTTP process of the server: `python -m quire.server.http_process`, started by the supervisor.

It serves `/health` and `/live` on the inherited listening socket before the rest is imported, and everything else as
soon as the app exists, a moment later.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from quire import child, log
from quire.ipc import wire
from quire.ipc.board import PATIENCE, PULSE, Board
from quire.server.config import HttpStart
from quire.server.replies import send_json
from quire.server.transport import make_server, raise_file_limit

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from quire.server.worker import HttpWorker

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5


class EarlyApp:
    """Stands in for the app until it exists, and then passes everything on to it."""

    def __init__(self) -> None:
        self._app: asyncio.Future[ASGIApp] = asyncio.get_running_loop().create_future()

    def hand_over(self, app: ASGIApp) -> None:
        """Pass requests to the app from now on."""
        self._app.set_result(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._app.done() and scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            if scope["path"] == "/live":
                return await send_json(send, {"status": "ok"})
            if scope["path"] == "/health":
                return await send_json(send, {"status": "loading", "phase": "starting", "percent": 0}, 503)
        await (await asyncio.shield(self._app))(scope, receive, send)


def _import_worker() -> type[HttpWorker]:
    from quire.server.worker import HttpWorker

    return HttpWorker


async def beat(board: Board) -> None:
    """Advance the pulse while the event loop turns. A process whose loop is stuck is killed and replaced."""
    board.fields[PATIENCE] = 0
    while True:
        board.fields[PULSE] += 1
        await asyncio.sleep(BEAT_SECONDS)


async def run(start: HttpStart) -> int:
    """Serve until told to stop; returns the exit code."""
    listener = socket.socket(fileno=start.fd)
    listener.set_inheritable(False)  # otherwise children of this process would keep the port open
    beating = asyncio.create_task(beat(Board(wire.http_board_path(Path(start.directory), start.worker))))
    early = EarlyApp()
    server = make_server(early, certificate=start.server.certificate())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    worker_class = await asyncio.to_thread(_import_worker)
    worker = worker_class(start, server)
    early.hand_over(worker.app)
    try:
        return await worker.run(serving)
    finally:
        beating.cancel()


def main() -> int:
    """Run the process; returns its exit code."""
    start = child.begin(HttpStart)
    log.configure(start.server.log_format, start.server.debug)
    raise_file_limit()
    try:
        return uvloop.run(run(start))
    except Exception as error:
        text = f"HTTP process {start.worker} failed: {type(error).__name__}: {error}"
        shown = error if start.server.debug else None
        log.event(logger, "http_process_failed", text, level=logging.ERROR, exc_info=shown)
        return 1
    finally:
        log.flush()


if __name__ == "__main__":
    sys.exit(main())
