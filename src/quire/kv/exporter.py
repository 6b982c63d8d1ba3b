"""The prefill side: tells other engines which of the blocks they want are in this engine's host tier.

`kv/tiers/exports.py` decides what is computed, saved and pinned; this is the thread that speaks the protocol of
`kv/wire.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from quire.curve import Address, Curve, Doorkeeper
from quire.errors import ConfigError
from quire.kv import wire
from quire.kv.host import HostTier
from quire.kv.mailbox import Dropped, Mailbox, Released, Wanted
from quire.kv.tiers.orders import Gone, Have
from quire.kv.transport.base import Transport

logger = logging.getLogger(__name__)

MAX_WANTS = 4096
"""Open `Want`s of all importers together; further ones are refused at once with `Gone`."""


class _Importer:
    """A connected importer.

    Attributes:
        wants: its open `Want`s: its number for each, and ours.
    """

    def __init__(self, name: str) -> None:
        self.name, self.heard = name, time.monotonic()
        self.wants: dict[int, int] = {}


class Exporter:
    """Listens for importers, in a thread of its own.

    Args:
        host, port: where to listen; port 0 is any free one.
        curve: encryption and authentication by the cluster's key.
        identity: see `wire.Hello`.
        tier: the host tier whose slots are read.
        transports: the transports by which they can be read.
        mailbox: gets `Wanted`, `Released` and `Dropped`.

    Attributes:
        address: where it listens. name: this engine's name, another one after each start.
        steps: number of steps computed; set by the engine.

    Raises:
        ConfigError: the port is taken, or there is no such address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        curve: Curve,
        identity: dict[str, str],
        tier: HostTier,
        transports: Sequence[Transport],
        mailbox: Mailbox,
    ) -> None:
        self._identity, self._tier, self._mailbox = identity, tier, mailbox
        self._transports = {each.name: each.address for each in transports}
        self._importers: dict[bytes, _Importer] = {}
        self._known: dict[int, tuple[bytes, int]] = {}  # by our number: the importer and its number
        self._refused: set[tuple[str, str]] = set()  # importers refused so far; each is logged once
        self._next = 0
        self.steps = 0
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = Doorkeeper(self._context, curve)
        self._socket = curve.listening(self._context)
        self._socket.sndhwm = 0  # no limit, so that nothing is dropped; `MAX_WANTS` bounds it
        self._outbox = Mailbox()  # from the engine
        try:
            self._socket.bind(Address(host, port).resolved("kv_host") if port else f"tcp://{_bare(host)}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_host={host} kv_port={port}: cannot listen there ({error}); choose a free port, or 0 for any"
            ) from error
        bound = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.address = Address(host, int(bound.rpartition(":")[2]))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quire-exporter", daemon=True)
        self._thread.start()

    # -- called by the engine -----------------------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        """Its name and address, as fields of `kv_transfer_params`."""
        return {"remote_engine_id": self.name, "remote_host": self.address.host, "remote_port": self.address.port}

    def announce(self, news: Have | Gone) -> None:
        """Tell the importer that blocks can be read, until they are released or dropped; or that no more will come."""
        if isinstance(news, Gone):
            self._outbox.post(wire.Gone(news.number))
            return
        offsets = [self._tier.place(slot)[0] for slot in news.slots]
        checks = [self._tier.checks[slot] for slot in news.slots]
        self._outbox.post(wire.Have(news.number, news.first, offsets, checks))

    def all_gone(self) -> None:
        """Tell all importers that no more blocks of any `Want` will come."""
        for number in list(self._known):
            self.announce(Gone(number))

    def close(self) -> None:
        """Stop listening, and end the thread."""
        self._stopping = True
        self._outbox.post(None)
        self._thread.join()
        self._outbox.close()
        self._context.destroy(linger=0)

    # -- in the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._door.socket, self._outbox):
            poller.register(each, zmq.POLLIN)
        beat = time.monotonic()
        while not self._stopping:
            ready = dict(poller.poll(int(wire.BEAT_SECONDS * 1000 / 2)))
            try:
                if self._door.socket in ready:
                    self._door.answer()
                if self._socket in ready:
                    self._take_in()
                self._tell()
                if time.monotonic() - beat >= wire.BEAT_SECONDS:
                    beat = time.monotonic()
                    self._beat(beat)
            except Exception:
                logger.exception("the exporter of KV blocks has met an error, and goes on")

    def _take_in(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                who, payload = self._socket.recv_multipart(zmq.NOBLOCK)[:2]
                try:
                    message = wire.decode_from_importer(payload)
                except msgspec.DecodeError as error:
                    logger.warning("an importer of KV blocks says what cannot be read: %s", error)
                    continue
                self._handle(who, message)

    def _handle(self, who: bytes, message: wire.FromImporter) -> None:
        if isinstance(message, wire.Hello):
            self._greet(who, message)
            return
        importer = self._importers.get(who)
        if importer is None:
            return  # it was given up; it will notice, and say hello again
        importer.heard = time.monotonic()
        if isinstance(message, wire.Want):
            self._want(who, importer, message)
        elif isinstance(message, wire.Got) and (number := importer.wants.get(message.number)) is not None:
            self._mailbox.post(Released(number, message.count))
        elif isinstance(message, wire.Cancel) and (number := importer.wants.pop(message.number, None)) is not None:
            del self._known[number]
            self._mailbox.post(Dropped(number))
        elif isinstance(message, wire.Bye):
            self._forget(who)

    def _forget(self, who: bytes) -> None:
        """Forget an importer and its `Want`s."""
        for number in self._importers.pop(who).wants.values():
            del self._known[number]
            self._mailbox.post(Dropped(number))

    def _greet(self, who: bytes, hello: wire.Hello) -> None:
        ours, theirs = {"protocol": str(wire.PROTOCOL)}, {"protocol": str(hello.protocol)}
        why = wire.difference(ours, theirs) or wire.difference(self._identity, hello.identity)
        if why is not None:
            level = logging.DEBUG if (hello.name, why) in self._refused else logging.WARNING
            self._refused.add((hello.name, why))
            logger.log(level, "engine %s cannot use KV blocks of this one: %s", hello.name, why)
            self._send(who, wire.Refused(why))
            return
        self._importers[who] = _Importer(hello.name)
        logger.info("engine %s may read KV blocks of this one", hello.name)
        sizes = [each.block_bytes for each in self._tier.groups]
        self._send(who, wire.Welcome(self.name, sizes, self._transports))

    def _want(self, who: bytes, importer: _Importer, want: wire.Want) -> None:
        if len(self._known) >= MAX_WANTS or want.number in importer.wants or not want.hashes:
            self._send(who, wire.Gone(want.number))
            return
        self._next += 1
        importer.wants[want.number] = self._next
        self._known[self._next] = who, want.number
        self._mailbox.post(Wanted(self._next, want))

    def _tell(self) -> None:
        """Send the engine's announcements, with the importers' own numbers."""
        for news in self._outbox.take():
            if news is not None and news.number in self._known:  # otherwise it has been dropped
                who, theirs = self._known[news.number]
                self._send(who, msgspec.structs.replace(news, number=theirs))

    def _beat(self, now: float) -> None:
        for who, importer in list(self._importers.items()):
            if now - importer.heard > wire.SILENCE_SECONDS:
                logger.warning("engine %s, which reads KV blocks of this one, is gone", importer.name)
                self._forget(who)
            else:
                self._send(who, wire.Beat(self.steps))

    def _send(self, who: bytes, message: wire.FromExporter) -> None:
        with contextlib.suppress(zmq.Again):  # it does not read, and will be given up after a while
            self._socket.send_multipart([who, wire.encode(message)], zmq.NOBLOCK)


def _bare(host: str) -> str:
    """The host as ZeroMQ expects it."""
    resolved = Address(host, 1).resolved("kv_host")
    return resolved.removeprefix("tcp://").removesuffix(":1")
