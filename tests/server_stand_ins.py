"""Stand-ins for a server's child processes, for the supervisor's tests: they speak its wire and do what they are told.

`python -m tests.server_stand_ins engine`, `... http LOG MANNERS`, or `... supervise LOG MANNERS` for a supervisor of
such children. What an HTTP stand-in hears goes to the file LOG, a JSON object a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire import child
from quire.config import EngineConfig
from quire.ipc import wire
from quire.ipc.board import PATIENCE, PULSE, Board
from quire.ipc.engine_process import EngineStart
from quire.server.config import HttpStart, ServerConfig
from quire.server.processes import listen
from quire.server.serve_options import ServeOptions
from quire.server.supervisor import Supervisor


def engine_info(boot: int) -> wire.EngineInfo:
    return wire.EngineInfo(
        boot=boot,
        path="/models/stand-in",
        architecture="StandIn",
        dtype="bfloat16",
        kernels="plain torch",
        fingerprint="fp_0",
        threads=1,
        vocab_size=300,
        max_model_len=256,
        eos_token_ids=[0],
        sampling_defaults={},
        num_blocks=64,
        block_size=16,
        kv_bytes_per_token=1024,
        full_length_requests=4,
        parameters=1000,
        weight_bytes=2000,
        notes=["a note about the checkpoint"],
        memory_plan=[("weights", "2 kB"), ("longest context", "256 tokens")],
        config={"model": "demo", "max_model_len": 256, "num_kv_blocks": 64},
    )


def control_socket(directory: str, identity: str) -> zmq.Socket[bytes]:
    control: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    control.setsockopt(zmq.IDENTITY, identity.encode())
    control.connect(wire.control_address(Path(directory)))
    return control


def engine() -> int:
    """An engine. Its `fault` is one of: "fail:TEXT" cannot start, "invalid:TEXT" since an option is not valid,
    "exit:CODE" dies while it loads, "load" never comes to an end of it, "again:TEXT" cannot start a second time,
    "still" shows no pulse once it is ready, "deaf" does not hear Stop."""
    start = child.begin(EngineStart)
    board = Board(wire.board_path(Path(start.directory), start.replica, start.boot))
    control = control_socket(start.directory, start.name)
    manner, _, text = (start.fault or "").partition(":")
    Path(start.directory, f"{start.name}.start").write_bytes(msgspec.json.encode(start))
    if manner == "second":  # only the second replica has the manners that follow
        manner, _, text = text.partition(":") if start.replica == 1 else ("", "", "")
    control.send(wire.encode(wire.Located("/models/stand-in")))
    board.set_phase("reading weights", 0.4)
    if manner in ("fail", "invalid") or (manner == "again" and start.boot > 1):
        control.send(wire.encode(wire.EngineFailed(text, manner == "invalid")))
        zmq.Context.instance().destroy(linger=20_000)  # until the message is on its way
        return 1
    if manner == "exit":
        return int(text)
    while manner == "load":
        time.sleep(0.05)
    board.begin([7, 8], 8 if start.boot > 1 else -1)
    if manner == "still":
        board.fields[PATIENCE] = 0
    control.send(wire.encode(wire.EngineReady(engine_info(start.boot))))
    while True:
        if manner != "still":
            board.fields[PULSE] += 1
        if control.poll(50):
            message = wire.decode_from_supervisor(control.recv())
            if isinstance(message, wire.ClientGone):
                Path(start.directory, f"gone-{message.worker}").touch()
            if isinstance(message, wire.Stop) and manner != "deaf":
                return 0


def http(log: str, manners: str) -> int:
    """An HTTP process. MANNERS may be "exit" (before it says hello), "stay" (at a drain),
    "last words" (stays until a drain's time is over), "still" (no pulse)."""
    start = child.begin(HttpStart)
    if manners == "exit":
        return 3
    control = control_socket(start.directory, f"http-{start.worker}")
    control.send(wire.encode(wire.Hello(start.worker, os.getpid())))
    _write(log, start.worker, {"start": msgspec.to_builtins(start)})
    listener = socket.socket(fileno=start.fd)
    listener.settimeout(0.02)
    board = Board(wire.http_board_path(Path(start.directory), start.worker))
    if manners == "still" and start.worker == 0:
        board.fields[PATIENCE] = 0
    while True:
        board.fields[PULSE] += manners != "still"
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        while control.poll(20):
            message = wire.decode_from_supervisor(control.recv())
            _write(log, start.worker, msgspec.to_builtins(message))
            if (
                isinstance(message, wire.Drain)
                and manners != "stay"
                and (message.seconds == 0 or manners != "last words")
            ):
                return 0


def _write(log: str, worker: int, what: Any) -> None:
    with open(log, "ab") as file:  # one write a line: several processes share the file
        file.write(msgspec.json.encode({"worker": worker, "pid": os.getpid(), "what": what}) + b"\n")


class QuietScreen:
    """Remembers what it was shown."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.info: wire.EngineInfo | None = None
        self.is_closed = False

    def listening(self) -> None:
        self.phases.append(("listening", 0))

    def loading(self, phase: str, percent: int) -> None:
        self.phases.append((phase, percent))

    def ready(self, info: wire.EngineInfo, seconds: float) -> None:
        self.info = info

    def close(self) -> None:
        self.is_closed = True


def stand_in_options(
    log: Path, manners: str = "", fault: str | None = None, replicas: int = 1, **server: Any
) -> ServeOptions:
    """A server of stand-ins."""
    command = [sys.executable, "-m", "tests.server_stand_ins"]
    return ServeOptions(
        server=ServerConfig(**{"port": 0, **server}),
        engine=EngineConfig(model="demo", data_parallel_size=replicas, disk_kv_path="kv", host_kv_memory="1MiB")
        if replicas > 1
        else EngineConfig(model="demo"),
        origins={"port": "flag"},
        fault=fault,
        engine_command=[*command, "engine"],
        http_command=[*command, "http", str(log), manners],
    )


def supervise(log: str, manners: str) -> int:
    options = stand_in_options(Path(log), manners)
    with listen("127.0.0.1", 0) as listener:
        return asyncio.run(Supervisor(options, listener, QuietScreen(), time.monotonic()).run())


def main() -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return {"engine": engine, "http": http, "supervise": supervise}[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
