"""Ranks on other machines, which look like local ones here. A thread forwards their links' messages, and what ranks
write into the memory that each machine has a copy of (`Mirror`), between machines.

All connections are to the first machine, which relays between the others; so there is one port, and a lost machine is
one connection that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.config import EngineConfig
from quire.curve import Address, read_token
from quire.engine.machine import Machine, RemoteRank, groups_of, how_it_ended, meets
from quire.engine.machine_messages import (
    ALIVE_SHARE,
    Alive,
    Carried,
    Exited,
    FromFirst,
    Hello,
    Refused,
    Seats,
    ToFirst,
    Written,
    doorkeeper,
    listening,
)
from quire.engine.rank import RankStart
from quire.errors import ConfigError
from quire.ops.cpu.mirror import Mirror
from quire.runner.start import OnLoad
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.ray_machines import RayMachines

logger = logging.getLogger(__name__)

CHUNK = 1 << 18
"""Bytes of a link that are forwarded at a time."""

LOOK_SECONDS = 1.0
"""Interval between checks of machines that are joining."""

EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class _Host:
    """A machine that has joined.

    Attributes:
        peer: the first frame of its messages. descriptor: the connection's.
        ranks: how many it contributes; which ones is known when all have joined.
    """

    def __init__(self, peer: bytes, descriptor: int, hello: Hello, address: str, ranks: int) -> None:
        self.peer, self.descriptor, self.ranks = peer, descriptor, range(ranks)
        self.name = f"{hello.host or 'unknown'} ({address})"


class Hosts:
    """The other machines, as the first one sees them.

    Args:
        config: the engine's options.

    Attributes:
        here: the ranks of the first machine, when the others have joined.

    Raises:
        ConfigError: this machine does not have the address, the port is taken, or the token cannot be read.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._groups = config, groups_of(config)
        self.here = range(config.num_ranks)
        by_ray = config.distributed_executor_backend == "ray" and not config.token_file
        token = secrets.token_hex(32).encode() if by_ray else read_token(config.token_file or "", "token_file")
        self._token = token
        self._address = Address(config.master_addr, config.master_port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hosts: dict[bytes, _Host] = {}
        self._tunnels: dict[int, socket.socket] = {}  # by rank: the end that represents its process
        self._processes: dict[int, RemoteRank] = {}
        self._mirrors: dict[int, Mirror] = {}
        self._handlers: dict[object, Callable[[], None]] = {}
        self._poller = zmq.Poller()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._refused = 0
        self._started: RayMachines | None = None
        try:
            self._socket = listening(self._context, token, config.collective_timeout_s)
            door = doorkeeper(self._context, token)
            monitor = self._socket.get_monitor_socket(EVENTS)
            self._bind()
        except BaseException:
            self.close()
            raise
        self._on(monitor, lambda: self._connection(monitor))  # in this order, see `_turn`
        self._on(door.socket, door.answer)
        self._on(self._socket, self._messages)
        self._on(self._wake, lambda: emptied(self._wake))

    def _bind(self) -> None:
        try:
            self._socket.bind(self._address.resolved("master_addr"))
        except zmq.ZMQError as error:
            raise ConfigError(
                f"ranks cannot join at master_addr={self._address.host}, master_port={self._address.port}: "
                f"{error.strerror}; choose an address of this machine and a free port"
            ) from error

    def _on(self, source: object, call: Callable[[], None]) -> None:
        self._handlers[source] = call
        self._poller.register(source, zmq.POLLIN)

    # -- until all have joined -----------------------------------------------------------------------------------

    def wait_joined(self, report: OnLoad) -> None:
        """Wait until all machines have joined.

        Raises:
            ConfigError: too few have joined in time.
        """
        others, seconds = self._config.nnodes - 1, self._config.join_timeout_s
        how = f"quire rank --join {self._address} --token-file FILE"
        logger.info("ranks of other machines join at %s (ZeroMQ, CURVE); on each: %s", self._address, how)
        end = time.monotonic() + seconds
        if self._config.distributed_executor_backend == "ray":
            from quire.engine.ray_machines import RayMachines

            self._started = RayMachines(self._config, self._address, self._token)
        while len(self._hosts) < others:
            if self._started is not None:
                self._started.check()
            report(f"waiting for machines to join at {self._address}", len(self._hosts) / others)
            if (left := end - time.monotonic()) <= 0:
                raise ConfigError(
                    f"only {len(self._hosts)} of {others} other machines (nnodes={others + 1}) joined within "
                    f"{seconds:g} seconds (join_timeout_s); on each of them, run: {how}"
                )
            self._turn(min(left, LOOK_SECONDS))
        first = self.here.stop - sum(len(host.ranks) for host in self._hosts.values())
        self.here = range(first)
        for host in self._hosts.values():
            host.ranks, first = range(first, first + len(host.ranks)), first + len(host.ranks)
            logger.info("%s of %d: on %s", named(host.ranks), self._config.num_ranks, host.name)

    def _join(self, peer: bytes, descriptor: int, address: str, hello: Hello) -> None:
        config, name = self._config, f"{hello.host} ({address})"
        missing = config.nnodes - 1 - len(self._hosts)
        left = config.num_ranks - 1 - sum(len(host.ranks) for host in self._hosts.values())
        most, ranks = left - (missing - 1), hello.ranks or config.num_ranks // config.nnodes
        why = ""
        if hello.version != __version__:
            why = f"this machine has Quire {hello.version}, and the first one {__version__}; install that here"
        elif missing <= 0 or self._thread is not None:
            why = f"all {config.nnodes} machines (nnodes) of the engine at {self._address} are there"
        elif not 1 <= ranks <= most:
            why = (
                f"--ranks {ranks}: of the engine's {config.num_ranks} ranks, this machine may bring "
                f"{'1' if most == 1 else f'1 to {most}'}, as there are {config.nnodes} machines (nnodes)"
            )
        if why:
            logger.warning("%s cannot join: %s", name, why)
            self._send(peer, Refused(why))
            return
        self._hosts[peer] = _Host(peer, descriptor, hello, address, ranks)
        logger.info("%s has joined", name)

    # -- with all of them ----------------------------------------------------------------------------------------

    def start(self, starts: Sequence[RankStart], machine: Machine) -> list[tuple[socket.socket, RemoteRank]]:
        """Start the ranks on the other machines; returns an end of each one's link, and its process."""
        made = []
        self._mirrors = machine.mirrors
        for host in self._hosts.values():
            for rank in host.ranks:
                own, self._tunnels[rank] = socket.socketpair()
                self._processes[rank] = RemoteRank(host.name)
                self._on(self._tunnels[rank].fileno(), lambda rank=rank: self._carry(rank))  # type: ignore[misc]
                made.append((own, self._processes[rank]))
            self._send(host.peer, Seats([start for start in starts if start.rank in host.ranks]))
        bell = machine.bell
        self._on(bell, lambda: emptied(bell))
        self._thread = threading.Thread(target=self._run, name="quire-hosts", daemon=True)
        self._thread.start()
        return made

    def _run(self) -> None:
        interval = self._config.collective_timeout_s * ALIVE_SHARE
        said = time.monotonic()
        try:
            while not self._stop.is_set():
                if time.monotonic() - said >= interval:
                    said = time.monotonic()
                    for host in self._hosts.values():
                        self._send(host.peer, Alive())
                self._tell()
                self._turn(interval)
        except Exception:
            logger.exception("the other machines are let go: a bug")
        finally:
            for host in list(self._hosts.values()):
                self._lose(host, "was let go")

    def _tell(self) -> None:
        """Send the others what ranks of this machine have written. The bell rings for what they write after this."""
        for group, mirror in self._mirrors.items():
            mirror.doze()
            for rank, news in mirror.news():
                self._pass_on(Written(group, rank), news)

    def _pass_on(self, what: Written, news: bytes | bytearray | memoryview, source: _Host | None = None) -> None:
        """Send to all machines with ranks of the group, except the one it comes from."""
        for host in self._hosts.values():
            if host is not source and meets(host.ranks, self._groups[what.group]):
                self._send(host.peer, what, news)

    def _carry(self, rank: int) -> None:
        """Forward what this side has written into a rank's link."""
        data = received(self._tunnels[rank])
        peer = next((host.peer for host in self._hosts.values() if rank in host.ranks), None)
        if peer is not None:
            self._send(peer, Carried(rank), data)
        if not data:
            self._end_of_link(rank)

    def _end_of_link(self, rank: int) -> None:
        if tunnel := self._tunnels.pop(rank, None):
            del self._handlers[tunnel.fileno()]
            self._poller.unregister(tunnel.fileno())
            tunnel.close()

    # -- what comes ----------------------------------------------------------------------------------------------

    def _turn(self, seconds: float) -> None:
        """Wait for messages and handle them: lost machines first, since others may get their descriptors."""
        ready = dict(self._poller.poll(int(seconds * 1000)))
        for source, call in [*self._handlers.items()]:
            if source in ready and source in self._handlers:
                call()

    def _connection(self, monitor: zmq.Socket[bytes]) -> None:
        event = recv_monitor_message(monitor)
        if event["event"] != zmq.EVENT_DISCONNECTED:
            self._refused += 1
            if self._refused == 1:
                logger.warning("somebody tried to join at %s with another token, and was refused", self._address)
            return
        for host in [host for host in self._hosts.values() if host.descriptor == event["value"]]:
            how = f"or it was silent for {self._config.collective_timeout_s:g} seconds (collective_timeout_s)"
            self._lose(host, f"is lost: the connection to its machine was closed, {how}")

    def _lose(self, host: _Host, how: str) -> None:
        del self._hosts[host.peer]
        if self._thread is None:
            logger.warning("%s has left", host.name)
            return
        for rank in host.ranks:
            self._processes[rank].ended(how, True)
            self._end_of_link(rank)

    def _messages(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self._take_in(bytes(peer.buffer), frames)

    def _take_in(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        host = self._hosts.get(peer)
        try:
            message = msgspec.msgpack.decode(frames[0].buffer, type=ToFirst)
            if isinstance(message, Hello):
                self._join(
                    peer,
                    int(frames[0].get(zmq.SRCFD)),
                    str(frames[0].get("Peer-Address")).removeprefix("::ffff:"),
                    message,
                )
            elif host is not None:
                self._take_in_from(host, message, frames[-1].buffer)
        except (msgspec.MsgspecError, ValueError, LookupError) as error:
            logger.error("what a machine says cannot be used, and it is let go: %s", error)
            self._send(peer, Refused(f"the first machine cannot use what this one says: {error}"))
            if host is not None:
                self._lose(host, "is lost: its machine said what cannot be used")

    def _take_in_from(self, host: _Host, message: Carried | Written | Exited, body: memoryview) -> None:
        if isinstance(message, Written):
            if mirror := self._mirrors.get(message.group):
                mirror.bring(message.rank, body)
            self._pass_on(message, body, host)
        elif message.rank not in host.ranks:
            raise ValueError(f"rank {message.rank} is not one of its own")
        elif isinstance(message, Exited):
            self._processes[message.rank].ended(*how_it_ended(message.code, message.out_of_memory))
            self._end_of_link(message.rank)
        elif tunnel := self._tunnels.get(message.rank):
            with contextlib.suppress(OSError):  # closed by this side
                tunnel.sendall(body)

    def _send(self, peer: bytes, message: FromFirst, body: bytes | bytearray | memoryview = b"") -> None:
        self._socket.send_multipart([peer, msgspec.msgpack.encode(message), body], zmq.NOBLOCK)

    def close(self) -> None:
        """Release the other machines, which wait for the next engine."""
        self._stop.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        self._context.destroy(linger=200)
        if self._started is not None:
            self._started.close()
            self._started = None
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1


def named(ranks: range) -> str:
    """The machine, for messages."""
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"


def received(link: socket.socket) -> bytes:
    """The bytes that have arrived; empty if it is closed."""
    try:
        return link.recv(CHUNK)
    except OSError:
        return b""


def emptied(bell: int) -> None:
    """Drain the bell; all ranks are checked anyway."""
    with contextlib.suppress(BlockingIOError):
        os.read(bell, 8)
