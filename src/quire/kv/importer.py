"""The decode side: has prompts computed by another engine, and reads their blocks into this engine's host tier.

There is a thread that speaks the protocol of `kv/wire.py`, and one that reads blocks. If either fails, its reads end,
and those blocks are computed here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.curve import Address, Curve
from quire.errors import ConfigError, QuireError
from quire.kv import wire
from quire.kv.host import HostTier
from quire.kv.mailbox import Ended, Late, Mailbox, Progressed
from quire.kv.transport.base import Link, Range, TransferError, Transport
from quire.names import DNS, is_server
from quire.ops.threads import step_aside

logger = logging.getLogger(__name__)

READ_SECONDS = 60.0
"""Timeout for reading the blocks of one message, which takes long where all cores are busy with other work."""

REST_SECONDS = 1.0
"""After a `Gone`, an engine is not asked for anything for this long."""

LOOK_SECONDS, MOST_LOOK_SECONDS = 0.5, 2.0
"""Seconds between attempts to reach an engine: at first, and at most."""

LEAVE_MS = 200
"""Milliseconds to send a connection's last message."""

FORGOTTEN_SECONDS = wire.SILENCE_SECONDS
"""After saying nothing for this long, as when it was stopped, this engine may be given up by the other one, whose slots
may then have other blocks than it announced."""

ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
REFUSING = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class UnreachableError(QuireError):
    """A prefill engine cannot be used now; the message says why."""


class Reading:
    """A read of blocks that another engine computes.

    Attributes:
        slots: one for each of the blocks.
        count: blocks that have been read. moving: seconds that reading them took.
        over: no more is to be read. gone: the other engine does not have the rest.
        late: a transport may still write into the slots; `Ended` follows when it no longer can.
    """

    def __init__(self, want: wire.Want, slots: Sequence[int]) -> None:
        self.want, self.slots, self.begin = want, slots, time.monotonic()
        self.count, self.moving = 0, 0.0
        self.over = self.late = self.gone = False


class Prefiller:
    """The connection to one prefill engine.

    Args:
        url: its server's URL, or HOST:PORT where it listens for importers.
        curve, identity, transports: see `Exporter`.
        tier: the host tier into whose slots blocks are read.
        mailbox: gets `Progressed`, `Late` and `Ended`.
        own: the name of this engine's exporter; "" if it has none.

    Raises:
        ConfigError: the URL is not valid.

    Attributes:
        state: for display.
        engine: its name; "" until it has been reached.
        hosts: the host in its URL, and its address once that is known.
        unwanted: number of blocks that it announced when they were no longer wanted.
    """

    what = "prefill engine"
    steps_aside = True  # a decode engine's streams are to keep their pace while blocks come, which takes others longer

    def __init__(
        self,
        url: str,
        curve: Curve,
        identity: dict[str, str],
        tier: HostTier,
        transports: Sequence[Transport],
        mailbox: Mailbox,
        own: str = "",
    ) -> None:
        check_url(url)
        self.hosts = {host_of(url)}
        self.url, self.state, self.engine, self._own = url, "not connected yet", "", own
        self._welcome, self._resting_until = False, 0.0
        self._spoke = 0.0  # when the last heartbeat was sent
        self._curve, self._identity, self._tier, self._mailbox = curve, identity, tier, mailbox
        self._transports = {each.name: each for each in transports}
        self.unwanted = 0
        self._late: list[tuple[Reading, Link]] = []  # each with the link by which it may still come
        self._readings: dict[int, Reading] = {}
        self._lock = threading.Lock()  # for the readings and `_welcome`
        self._outbox = Mailbox()
        self._stopping = False
        self._link: Link | None = None
        self._reader = ThreadPoolExecutor(1, "quire-import", step_aside if self.steps_aside else None)
        self._thread = threading.Thread(target=self._run, name="quire-importer", daemon=True)
        self._thread.start()

    # -- called by the engine -----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether it accepts orders."""
        return self._welcome and time.monotonic() >= self._resting_until

    def is_called(self, engine: str) -> bool:
        """Whether this is the name of the engine there."""
        return bool(engine) and self.engine == engine

    @property
    def load(self) -> int:
        """Prompt tokens of the reads in progress."""
        with self._lock:
            return sum(len(each.want.tokens) for each in self._readings.values())

    def order(self, want: wire.Want, slots: Sequence[int]) -> bool:
        """Order blocks to be computed and read into slots; False if it cannot take orders now."""
        with self._lock:
            if not self.ready:
                return False
            self._readings[want.number] = Reading(want, slots)
        self._outbox.post(want)
        return True

    def stop_reading(self) -> None:
        """Stop all reads that were ordered, without telling the mailbox."""
        with self._lock:
            readings, self._readings = self._readings, {}
        for number, reading in readings.items():
            reading.over = True
            self._outbox.post(wire.Cancel(number))
        self._reader.submit(int).result()

    def close(self) -> None:
        """Close the connection and stop reading."""
        self._stopping = True
        self._outbox.post(None)
        self._thread.join()
        self._reader.shutdown()
        self._outbox.close()

    # -- in the thread that speaks ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause, told = LOOK_SECONDS, ""
        while not self._stopping:
            try:
                self._session()
                pause, told = LOOK_SECONDS, ""
            except UnreachableError as error:
                self.state = str(error)
                if self.state != told:
                    logger.warning("prefill engine %s: %s; prompts are computed here meanwhile", self.url, error)
                told = self.state
                pause = min(2 * pause, MOST_LOOK_SECONDS)
            except Exception:
                logger.exception("prefill engine %s: an error here; prompts are computed here meanwhile", self.url)
            self._give_up()
            end = time.monotonic() + pause
            while not self._stopping and time.monotonic() < end:
                self._outbox.take(0.2)
                self._settle()

    def _session(self) -> None:
        """Find the engine, say hello, and exchange messages until it is gone."""
        address = self._found()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        connection = self._curve.connecting(context)
        connection.sndhwm = connection.rcvhwm = 0
        monitor = connection.get_monitor_socket()
        try:
            resolved = address.resolved("prefill_url")
            self.hosts |= {Address.read(resolved.removeprefix("tcp://"), "prefill_url").host}
            connection.connect(resolved)
            self._speak(connection, monitor)
        except ConfigError as error:
            raise UnreachableError(str(error)) from error
        finally:
            connection.disable_monitor()
            context.destroy(linger=LEAVE_MS)

    def _found(self) -> Address:
        """The address where it listens for importers, as its server tells it."""
        if "://" not in self.url:
            return Address.read(self.url, "prefill_url")
        try:
            with urllib.request.urlopen(f"{self.url.rstrip('/')}/health", timeout=wire.SILENCE_SECONDS) as answer:
                port = json.loads(answer.read(65536)).get("kv_port")
        except urllib.error.HTTPError as error:
            raise UnreachableError(f"its server is not ready (HTTP status {error.code})") from error
        except (OSError, ValueError, AttributeError) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UnreachableError(f"its server does not answer ({why})") from error
        if not isinstance(port, int) or not 0 < port < 65536:
            raise UnreachableError("its server reports no kv_port; start it with --role prefill")
        return Address(host_of(self.url), port)

    def _speak(self, connection: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for each in (connection, monitor, self._outbox):
            poller.register(each, zmq.POLLIN)
        name = f"{socket.gethostname()}:{os.getpid()}"
        connection.send(wire.encode(wire.Hello(wire.PROTOCOL, self._identity, name)))
        heard = self._spoke = time.monotonic()
        steps = 0
        while not self._stopping:
            ready = dict(poller.poll(int(wire.BEAT_SECONDS * 1000 / 2)))
            self._settle()
            now = time.monotonic()
            self._check_known()  # before messages are read, which may promise what no longer holds
            if monitor in ready:
                self._watch(recv_monitor_message(monitor)["event"])
            with contextlib.suppress(zmq.Again):
                while True:
                    message = self._read(connection.recv(zmq.NOBLOCK))
                    heard = now
                    if isinstance(message, wire.Beat) and message.steps != steps:
                        steps = message.steps
                        self._progressed()
            if now - heard > wire.SILENCE_SECONDS:
                raise UnreachableError(f"it has been silent for {wire.SILENCE_SECONDS:g} seconds")
            for say in self._outbox.take():
                if isinstance(say, UnreachableError):
                    raise say
                if say is not None:
                    connection.send(wire.encode(say))
            if now - self._spoke >= wire.BEAT_SECONDS:
                self._spoke = now
                connection.send(wire.encode(wire.Beat()))
        connection.send(wire.encode(wire.Bye()))

    def _check_known(self) -> None:
        """Raises UnreachableError if the other engine may have given this one up."""
        if time.monotonic() - self._spoke > FORGOTTEN_SECONDS:
            raise UnreachableError(f"this engine said nothing for {FORGOTTEN_SECONDS:g} seconds")

    def _watch(self, event: int) -> None:
        if event & REFUSING:
            raise UnreachableError("it does not accept this cluster key; give both the same --cluster-key-file")
        if event & ENDS:
            raise UnreachableError("the connection has ended")

    def _read(self, payload: bytes) -> wire.FromExporter:
        """Take in a message."""
        try:
            message: wire.FromExporter = wire.decode_from_exporter(payload)
        except msgspec.DecodeError as error:
            raise UnreachableError(f"it sent a message that cannot be read: {error}") from error
        if isinstance(message, wire.Refused):
            raise UnreachableError(message.message)
        if isinstance(message, wire.Welcome):
            self._connect(message)
        elif isinstance(message, wire.Have | wire.Gone):
            reading = self._readings.get(message.number)
            if reading is None:  # given up in the meantime
                self.unwanted += len(message.offsets) if isinstance(message, wire.Have) else 0
                self._outbox.post(wire.Cancel(message.number))
            else:
                self._reader.submit(self._carry_out, reading, message)
        return message

    def _connect(self, welcome: wire.Welcome) -> None:
        """Connect to its host tier by the first transport that works."""
        if welcome.name == self._own:
            raise UnreachableError("it is this engine itself; name another one with --prefill-url")
        if welcome.block_bytes != (own := [each.block_bytes for each in self._tier.groups]):
            raise UnreachableError(f"its blocks have {welcome.block_bytes} bytes, and {own} here")
        self.engine, whys = welcome.name, []
        for name, transport in self._transports.items():
            if name in welcome.transports:
                if self._late and not transport.fenced:
                    whys.append(f"{name}: what it failed to read may still arrive")
                    continue
                try:
                    self._link = transport.connect(welcome.transports[name])
                except TransferError as error:
                    whys.append(f"{name}: {error}")
                    continue
                self.transport = transport
                self.state = f"ready, by {name}"
                logger.info("%s %s (%s): %s", self.what, self.url, welcome.name, self.state)
                self._welcome = True
                return
        names = ", ".join(welcome.transports) or "none"
        raise UnreachableError(f"no transport to its blocks: {'; '.join(whys) or f'it has {names}'}")

    def _progressed(self) -> None:
        with self._lock:
            for number in self._readings:
                self._mailbox.post(Progressed(number))

    def _give_up(self) -> None:
        """The engine is gone: end all reads with what they have so far."""
        with self._lock:
            self._welcome = False
            readings, self._readings = self._readings, {}
            for reading in readings.values():
                reading.over = True
        if self._link is not None:
            self._link.close()  # ends a read in progress
            self._reader.submit(int).result()
            self._link = None
        for reading in readings.values():
            self._end(reading)

    # -- in the thread that reads -------------------------------------------------------------------------------

    def _carry_out(self, reading: Reading, message: wire.Have | wire.Gone) -> None:
        number = reading.want.number
        if isinstance(message, wire.Have) and not reading.over:
            try:
                self._fetch(reading, message)
            except Exception as error:
                reading.over = True
                self._outbox.post(UnreachableError(f"blocks could not be read by {self.transport.name} ({error})"))
                if self._link is not None and not self._link.settled():
                    reading.late = True
                    self._late.append((reading, self._link))
                    self._mailbox.post(Late(number))
        if isinstance(message, wire.Gone):
            reading.gone = True
            if reading.want.tokens:  # the engine is overloaded, or the request has ended
                self._resting_until = time.monotonic() + REST_SECONDS
        with self._lock:
            reading.over |= isinstance(message, wire.Gone) or reading.count == len(reading.slots)
            if not reading.over or self._readings.pop(number, None) is None:
                return
        self._outbox.post(wire.Cancel(number))
        self._end(reading)

    def _fetch(self, reading: Reading, message: wire.Have) -> None:
        """Read the blocks of a message, and confirm that."""
        own = reading.slots[message.first : message.first + len(message.offsets)]
        if message.first != reading.count or not len(own) == len(message.offsets) == len(message.checks):
            raise TransferError(f"blocks from {message.first} on were announced, but {reading.count} is next")
        if (link := self._link) is None:
            raise TransferError("the connection has ended")
        ranges = [Range(there, *self._tier.place(here)) for there, here in zip(message.offsets, own, strict=True)]
        begin = time.monotonic()
        link.read(coalesced(ranges), READ_SECONDS)
        self._check_known()
        reading.moving += time.monotonic() - begin
        for here, check in zip(own, message.checks, strict=True):
            self._tier.checks[here] = check
        reading.count += len(own)
        self._outbox.post(wire.Got(reading.want.number, reading.count))
        self._mailbox.post(Progressed(reading.want.number))

    def _end(self, reading: Reading) -> None:
        if reading.late:
            return
        kind: Literal["read", "gone"] = "gone" if reading.gone else "read"
        seconds = time.monotonic() - reading.begin
        self._mailbox.post(Ended(kind, reading.want.number, reading.count, seconds, reading.moving, self.url))

    def _settle(self) -> None:
        """Report failed reads whose slots can no longer be written to."""
        for late in [late for late in self._late if late[1].settled()]:
            self._late.remove(late)
            self._mailbox.post(Ended("read", late[0].want.number, 0, 0.0))


def check_url(url: str) -> None:
    """Check a prefill engine's URL, or that of a name of several.

    Raises:
        ConfigError: it is not valid.
    """
    if "://" not in url:
        Address.read(url, "prefill_url")
        return
    single = is_server(url)
    try:
        parts = urllib.parse.urlsplit(url.removeprefix(DNS))
        fine = parts.scheme in (("http", "https") if single else ("http",)) and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(
            f"prefill_url {url!r} is neither the URL of a server, such as http://10.0.0.1:8000, nor HOST:PORT, nor "
            f"{DNS}http://NAME:PORT for all addresses of a name"
        )


def host_of(url: str) -> str:
    """The host in a prefill engine's URL."""
    return (urllib.parse.urlsplit(url).hostname or "") if "://" in url else Address.read(url, "prefill_url").host


def coalesced(ranges: Sequence[Range]) -> list[Range]:
    """Merge adjacent ranges."""
    found: list[Range] = []
    for each in ranges:
        last = found[-1] if found else None
        if last and last.source + last.length == each.source and last.target + last.length == each.target:
            found[-1] = last._replace(length=last.length + each.length)
        else:
            found.append(each)
    return found
