"""A machine that contributes ranks to an engine on another one; `hosts.py` is the other side."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.config import EngineConfig
from quire.curve import Address, Context, Socket
from quire.engine.hosts import emptied, named, received
from quire.engine.machine import Machine, out_of_memory_kills
from quire.engine.machine_messages import (
    ALIVE_SHARE,
    Carried,
    Exited,
    FromFirst,
    Hello,
    Refused,
    Seats,
    ToFirst,
    Written,
    connecting,
)
from quire.engine.rank import RankStart
from quire.errors import ConfigError
from quire.version import __version__

RETRY_SECONDS = 0.5
"""Interval between attempts to connect."""

ENDS = zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED
REFUSING = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH

REFUSALS = 3
"""After this many failed handshakes in a row the token is wrong; fewer may come from an engine that ends meanwhile."""

LEAVE_SECONDS = 2.0
"""How long a rank may take to exit after its engine, before it is killed."""


class Joining:
    """Contributes ranks of this machine to the engine at an address.

    Args:
        address: the first machine's.
        token: see `read_token`.
        ranks: how many; 0: as many as the first machine says.
        model: the checkpoint's folder here; "": the one in the engine's options.
        tell: called with messages for the user.
    """

    def __init__(self, address: Address, token: bytes, ranks: int, model: str, tell: Callable[[str], None]) -> None:
        self._address, self._token, self._ranks, self._model, self._tell = address, token, ranks, model, tell

    def run_once(self) -> None:
        """Wait for an engine, and serve it until it ends.

        Raises:
            ConfigError: it refuses this machine; the message says why.
        """
        context: Context = zmq.Context()
        try:
            connection, monitor = self._connected(context)
            hello = Hello(__version__, socket.gethostname(), self._ranks)
            connection.send_multipart([msgspec.msgpack.encode(hello), b""])
            self._tell(f"joined the engine at {self._address}; it begins when all machines have")
            for message, _ in _messages(connection, monitor):
                if isinstance(message, Refused):
                    raise ConfigError(message.message)
                if isinstance(message, Seats):
                    self._serve(message, connection, monitor)
                    break
            self._tell(f"the engine at {self._address} has ended")
        finally:
            context.destroy(linger=200)

    def _connected(self, context: Context) -> tuple[Socket, Socket]:
        """A connection to an engine, once there is one, and the monitor that reports its end."""
        self._tell(f"looking for an engine at {self._address}")
        refusals = 0
        while True:
            connection = connecting(context, self._token)
            monitor = connection.get_monitor_socket()
            connection.connect(self._address.resolved("--join"))
            event = recv_monitor_message(monitor)["event"]
            while event not in (*ENDS, zmq.EVENT_HANDSHAKE_SUCCEEDED):
                refusals += event in REFUSING
                event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return connection, monitor
            if refusals >= REFUSALS:
                raise ConfigError(
                    f"{self._address} does not accept this token; give --join the engine's master_addr and "
                    "master_port, and both machines the same --token-file"
                )
            connection.disable_monitor()
            connection.close()
            monitor.close()
            time.sleep(RETRY_SECONDS)

    def _serve(self, seats: Seats, connection: Socket, monitor: Socket) -> None:
        starts = [msgspec.structs.replace(start, path=self._model) for start in seats.starts]
        config, own = EngineConfig(**starts[0].config), range(starts[0].rank, starts[-1].rank + 1)
        self._tell(f"{named(own)} of {config.num_ranks} of the engine at {self._address}: {config.model}")
        machine = Machine(config, own, starts[0].matrix_bytes)
        session = _Session(machine, connection, config.collective_timeout_s)
        try:
            session.start(starts)
            session.run(monitor)
        finally:
            session.close()


def _messages(connection: Socket, monitor: Socket) -> Iterator[tuple[FromFirst, memoryview]]:
    """The first machine's messages, until the connection ends."""
    poller = zmq.Poller()
    poller.register(connection, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if connection in ready:
            yield _message(connection)
        elif recv_monitor_message(monitor)["event"] in ENDS:
            return


def _message(connection: Socket, flags: int = 0) -> tuple[FromFirst, memoryview]:
    """The next message. With `zmq.NOBLOCK`, raises zmq.Again if there is none."""
    head, body = connection.recv_multipart(flags, copy=False)
    return msgspec.msgpack.decode(head.buffer, type=FromFirst), body.buffer


class _Session:
    """The ranks of this machine, for one engine.

    Args:
        timeout: seconds after which a silent engine, or a rank that does not read, is regarded as lost.
    """

    def __init__(self, machine: Machine, connection: Socket, timeout: float) -> None:
        self._machine, self._connection, self._timeout = machine, connection, timeout
        self._links: dict[int, socket.socket] = {}  # by rank
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._out_of_memory = out_of_memory_kills()
        self._poller = zmq.Poller()

    def start(self, starts: Sequence[RankStart]) -> None:
        for start in starts:
            link, self._processes[start.rank] = self._machine.start(start)
            link.settimeout(self._timeout)
            self._links[start.rank] = link
            self._poller.register(link, zmq.POLLIN)
        self._machine.all_started()

    def run(self, monitor: Socket) -> None:
        """Run until the engine ends, or is lost."""
        self._poller.register(self._connection, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        if self._machine.bell >= 0:
            self._poller.register(self._machine.bell, zmq.POLLIN)
        heard = time.monotonic()
        while True:
            self._tell()
            ready = dict(self._poller.poll(int(self._timeout * ALIVE_SHARE * 1000)))
            if self._connection in ready:
                self._take_in()
                heard = time.monotonic()
            elif time.monotonic() - heard > self._timeout:
                return
            if self._machine.bell in ready:
                emptied(self._machine.bell)
            for rank, link in [*self._links.items()]:
                if link.fileno() in ready:
                    self._carry(rank, link)
            if monitor in ready and recv_monitor_message(monitor)["event"] in ENDS:
                return

    def _tell(self) -> None:
        """Send the others what ranks of this machine have written. The bell rings for what they write after this."""
        for group, mirror in self._machine.mirrors.items():
            mirror.doze()
            for rank, news in mirror.news():
                self._send(Written(group, rank), news)

    def _take_in(self) -> None:
        """Handle all messages of the first machine."""
        with contextlib.suppress(zmq.Again):
            while True:
                message, body = _message(self._connection, zmq.NOBLOCK)
                if isinstance(message, Written):
                    self._machine.mirrors[message.group].bring(message.rank, body)
                elif isinstance(message, Carried) and (link := self._links.get(message.rank)):
                    with contextlib.suppress(OSError):  # it has ended or hangs: tell the others, which wait for it
                        link.sendall(body) if len(body) else link.shutdown(socket.SHUT_RDWR)
                elif isinstance(message, Refused):
                    raise ConfigError(message.message)

    def _carry(self, rank: int, link: socket.socket) -> None:
        """Forward a rank's message, or its end."""
        if data := received(link):
            self._send(Carried(rank), data)
            return
        self._poller.unregister(link)
        self._links.pop(rank).close()
        code = _code_of(self._processes[rank])
        self._send(Exited(rank, code, out_of_memory_kills() > self._out_of_memory))

    def _send(self, message: ToFirst, body: bytes | bytearray = b"") -> None:
        with contextlib.suppress(zmq.Again):  # the connection has ended, as the monitor will report
            self._connection.send_multipart([msgspec.msgpack.encode(message), body], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop all ranks, or kill them."""
        for link in self._links.values():
            link.close()
        end = time.monotonic() + LEAVE_SECONDS
        for process in self._processes.values():
            _code_of(process, max(0.0, end - time.monotonic()))
        self._machine.close()


def _code_of(process: subprocess.Popen[bytes], seconds: float = LEAVE_SECONDS) -> int:
    """How an unresponsive rank ended; it is killed after this many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
