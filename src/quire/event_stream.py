"""Server-sent events, as clients read them."""

from __future__ import annotations

from collections.abc import Iterator

from quire.http_client import HttpError

MAX_EVENT_BYTES = 4 << 20
"""Longest event of a stream."""


class EventStream:
    """Splits bytes, as they arrive, into the data of events. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that these bytes complete.

        Raises:
            HttpError: an event is too long.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise HttpError("garbage", f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
