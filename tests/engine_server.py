"""A supervisor of one engine process, as small as tests need it."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from quire.ipc import wire
from quire.ipc.board import Board
from quire.ipc.client import EngineClient
from quire.ipc.engine_process import EngineStart, main
from tests.forks import FORKS, tell


def run_engine(start: bytes) -> None:
    """What `python -m quire.ipc.engine_process` does with this on its standard input."""
    tell(start)
    sys.exit(main())


class EngineServer:
    """One engine process at a time, and clients of it in this process."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.directory, self.config = directory, {"model": "demo", "threads": 1} | config
        self.fault: str | None = None
        self.boot = 0
        self.state = wire.EngineState(boot=0, state="loading")
        self.failure: str | None = None
        self.clients: list[EngineClient] = []
        self._context = zmq.asyncio.Context()
        self._workers: list[int] = []

    async def __aenter__(self) -> EngineServer:
        self._control = self._context.socket(zmq.ROUTER)
        self._control.bind(wire.control_address(self.directory))
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *exception: object) -> None:
        for client in self.clients:
            await client.close()
        self.process.kill()
        await self.exit_code()
        self._listener.cancel()
        self._context.destroy(linger=0)

    def boot_engine(self) -> None:
        """Start the next engine, without waiting for it."""
        self.boot += 1
        self.board = Board.create(wire.board_path(self.directory, 0, self.boot))
        start = EngineStart(directory=str(self.directory), boot=self.boot, config=self.config, fault=self.fault)
        self.process = FORKS.Process(target=run_engine, args=(msgspec.json.encode(start),))
        self.process.start()

    async def exit_code(self) -> int | None:
        """The engine's, once it has ended."""
        await asyncio.to_thread(self.process.join)
        return self.process.exitcode

    async def client(self) -> EngineClient:
        """A client that says hello."""
        client = EngineClient(self.directory, len(self.clients))
        self.clients.append(client)
        await client.start(lambda seconds: None)
        return client

    async def ready_client(self) -> EngineClient:
        if not self.boot:
            self.boot_engine()
        client = await self.client()
        await until(lambda: client.state == "ready")
        return client

    def kill(self) -> None:
        self.process.kill()

    async def replace_engine(self) -> None:
        """After the engine's death: tell the clients, and start another one."""
        await self.exit_code()
        suspects, culprit = self.board.suspects()
        self.boot_engine()
        await self._tell(
            wire.EngineState(boot=self.boot, state="restarting", cause="killed", suspects=suspects, culprit=culprit)
        )

    async def tell_failed(self) -> None:
        await self._tell(wire.EngineState(boot=self.boot, state="failed", cause="it died too often"))

    async def tell_engine(self, message: Any) -> None:
        await self._control.send_multipart((wire.engine_name(0, self.boot).encode(), wire.encode(message)))

    async def tell_ready(self) -> None:
        """Tell the clients once more that the engine is ready."""
        await self._tell(wire.EngineState(boot=self.boot, state="ready", info=self.clients[0].info))

    def dealer(self, address: str, identity: str) -> zmq.asyncio.Socket:
        """A socket that says what nobody should."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        socket.connect(address)
        return socket

    async def _tell(self, state: wire.EngineState) -> None:
        self.state = state
        for worker in self._workers:
            await self._control.send_multipart((f"http-{worker}".encode(), wire.encode(state)))

    async def _listen(self) -> None:
        while True:
            _, payload = await self._control.recv_multipart()
            match wire.decode_to_supervisor(payload):
                case wire.Hello(worker=worker):
                    self._workers.append(worker)
                    self.state.boot = self.boot
                    await self._tell(self.state)
                case wire.Located(path=path, tokenizer=own):
                    await self._tell(wire.EngineState(boot=self.boot, state="loading", path=path, tokenizer=own))
                case wire.EngineReady(info=info):
                    await self._tell(wire.EngineState(boot=self.boot, state="ready", path=info.path, info=info))
                case wire.EngineFailed(message=message):
                    self.failure = message


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        await asyncio.sleep(0.01)
