"""A ZeroMQ socket on an event loop, without `zmq.asyncio`, whose futures take longer than the message itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)


class Channel:
    """A DEALER socket that passes every message to a function, on the event loop that is running when it is created.

    Args:
        identity: its name for the other side.
        receive: called with each message. Its errors are logged, and do not affect later messages.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str, receive: Callable[[bytes], None]
    ) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)  # messages are bounded by the requests that they belong to
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, message: bytes) -> None:
        """Queue a message; never waits."""
        if not self._socket.closed:
            self._socket.send(message, zmq.NOBLOCK)
            self._loop.call_soon(self._drain)  # the descriptor is edge-triggered, and sending may consume an event

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def _drain(self) -> None:
        """Receive all pending messages."""
        while not self._socket.closed:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._receive(message)
            except Exception:
                logger.exception("a message could not be handled")
