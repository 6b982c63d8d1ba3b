"""Continuing a stream at another server: what the journal of its first one says (`server/journal.py`).

What precedes an entry is passed on when the entry is there, and so the client always has the events of the tokens that
are known, and no others. Entries are not read here.
"""

from __future__ import annotations

from quire.http_client import HttpError
from quire.server.journal import END, ENTRY, LOST, MAX_JOURNAL_BYTES

_MARK, _END = b"\n: quire-", b"\n\n"
MAX_WRITE_BYTES = 64 << 20
"""Most bytes before an entry: all that a server sends in one write."""


class CannotResumeError(Exception):
    """Another server cannot continue the stream; the message says why, for clients."""


class Journal:
    """The journal of one stream, through all of its servers.

    Attributes:
        has_ended: the last event has come.
        lost: the server says that it gives up, with this message.
        is_kept: false once it is larger than a server would accept.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self.lost = ""
        self.is_kept = True
        self._entries = bytearray()  # separated by commas
        self._rest = b""

    def body(self) -> bytes:
        """All entries, for the server that continues; nothing if there are none."""
        return b"[" + self._entries + b"]" if self._entries else b""

    def begin(self) -> None:
        """A server begins its part of the stream. What the last one sent behind its last entry is void."""
        self._rest, self.lost = b"", ""

    def events(self, data: bytes) -> bytes:
        """What is to be passed on, now that the server has sent this.

        Raises:
            HttpError: the server does not keep to the format.
        """
        rest, passed = self._rest + data, []
        while not self.lost and (end := self._end_of_comment(rest)) > 0:
            at = rest.rfind(_MARK, 0, end) + 1  # 0 if the rest begins with the comment
            if self._note(rest[at:end]):
                passed.append(rest[:at])
            rest = rest[end + len(_END) :]
        if len(rest) > MAX_WRITE_BYTES:
            raise HttpError("garbage", "its stream has no journal, although it says so")
        self._rest = rest
        return b"".join(passed)

    @staticmethod
    def _end_of_comment(data: bytes) -> int:
        """Where the first whole comment of a journal ends; -1: there is none."""
        start = 0 if data.startswith(_MARK[1:]) else data.find(_MARK)
        return -1 if start < 0 else data.find(_END, start + 1)

    def _note(self, comment: bytes) -> bool:
        """Whether what precedes the comment is for the client."""
        if comment.startswith(LOST):
            self.lost = comment[len(LOST) :].decode(errors="replace") or "it gives up"
        elif comment.startswith(END):
            self.has_ended = True
        elif entry := comment[len(ENTRY) :]:
            self.is_kept = self.is_kept and len(self._entries) + len(entry) + 3 <= MAX_JOURNAL_BYTES
            self._entries += b",%b" % entry if self._entries else entry
            if not self.is_kept:
                self._entries.clear()
        return not self.lost
