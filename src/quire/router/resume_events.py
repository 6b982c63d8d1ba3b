"""Resuming a stream of named events (Anthropic's Messages, OpenAI's Responses) on another server, as `resume.py` does.

The second stream has the same events in the same order; only the pieces of texts are cut elsewhere. So events that are
no pieces are counted, and as many left out, and of each text as many characters. Ids and numbers are made those of the
first stream, but for the id of a stored response at its end: that is the one under which it is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.router.resume import EVENT_END, KEPT_BYTES, CannotResumeError

NAMED_PATHS = ("/v1/messages", "/v1/responses")
_LAST = (b"message_stop", b"response.completed", b"response.incomplete", b"response.failed", b"error")
_GONE = frozenset({"shutting_down", "engine_failed", "engine_unavailable", "engine_restarting"})
_PRINT = "system_fingerprint"


def _bodies(data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of whole events."""
    for event in data.split(EVENT_END):
        if b"data: " in event:
            yield msgspec.json.decode(event.partition(b"data: ")[2])


def _framed(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _piece(event: dict[str, Any]) -> tuple[str, dict[str, Any], str] | None:
    """The text that an event adds to, by a name, and the object and the key of what it adds; None: it is no piece."""
    if event["type"] == "content_block_delta":
        [key] = [key for key in event["delta"] if key != "type"]
        return f"{event['index']}", event["delta"], key
    if event["type"].endswith(".delta"):
        return f"{event['output_index']}", event, "delta"
    return None


def _head(event: dict[str, Any]) -> dict[str, Any]:
    """The message or response that an event describes."""
    found: dict[str, Any] = event.get("response") or event.get("message") or {}
    return found if isinstance(found, dict) else {}


class EventsPosition:
    """How much of a stream has been sent to the client; see `StreamPosition`."""

    def __init__(self) -> None:
        self.has_sent = self.has_finished = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._characters: Counter[str] = Counter()
        self._num_others = self._num_events = 0
        self._head: dict[str, Any] = {}

    def sent(self, events: bytes) -> None:
        """Take note of whole events that were sent."""
        self.has_sent = True
        self._kept.append(events)
        self._kept_bytes += len(events)
        last = events[events.rfind(b"event: ") + len(b"event: ") :].partition(b"\n")[0]
        self.has_finished = self.has_finished or last in _LAST
        if self._kept_bytes > KEPT_BYTES:
            self._count()

    def _count(self) -> None:
        data, self._kept, self._kept_bytes = b"".join(self._kept), [], 0
        for event in _bodies(data):
            self._head = self._head or _head(event)
            self._num_events += 1
            if (piece := _piece(event)) is None:
                self._num_others += 1
            else:
                name, part, key = piece
                self._characters[name] += len(part[key])

    def follow(self) -> EventsContinuation:
        """What cuts the sent part from a second stream."""
        self._count()
        return EventsContinuation(self._head, self._characters.copy(), self._num_others, self._num_events)

    def before_loss(self, data: bytes) -> tuple[bytes, str | None]:
        """Events before the one that announces the server's end, and its message; or all of them, and None."""
        at = data.find(b"event: response.failed\n")
        if at >= 0:
            error = _head(next(_bodies(data[at:]))).get("error") or {}
            if error.get("code") in _GONE:
                return data[:at], str(error["message"])
        return data, None


class EventsContinuation:
    """Cuts from a stream the part that has been sent already.

    Args:
        head: the message or response of the first stream, as it began.
        characters: of each text, that were sent. others, events: how many events that are no pieces, and of all.
    """

    def __init__(self, head: dict[str, Any], characters: Counter[str], others: int, events: int) -> None:
        self._first, self._left, self._others, self._events = head, characters, others, events
        self._second: dict[str, Any] = {}

    def events(self, data: bytes) -> bytes:
        """The part of these whole events that is new to the client.

        Raises:
            CannotResumeError: the second server has another model or other kernels.
        """
        return b"".join([_framed(event) for event in map(self._renamed, _bodies(data)) if self._cut(event)])

    def _renamed(self, event: dict[str, Any]) -> dict[str, Any]:
        """The event with the ids of the first stream."""
        if not self._second:
            self._second = dict(_head(event))
            if self._first and self._first.get(_PRINT) != self._second.get(_PRINT):
                raise CannotResumeError("the server died, and the others compute in another way; try again")
        ours, theirs = (str(head.get("id", "")).rpartition("_")[2] for head in (self._first, self._second))
        if not (ours and theirs):
            return event
        if ours != theirs:  # ids are random, so nothing else reads like one
            encoded = msgspec.json.encode(event).replace(theirs.encode(), ours.encode())
            event = msgspec.json.decode(encoded)
        if "created_at" in _head(event):
            _head(event)["created_at"] = self._first.get("created_at")
        if _head(event).get("store") and event["type"].encode() in _LAST:
            _head(event)["id"] = self._second["id"]
        return event

    def _cut(self, event: dict[str, Any]) -> bool:
        """Remove from the event what the client has; whether anything is left."""
        piece = _piece(event)
        if piece is None and self._others and event["type"].encode() not in _LAST:
            self._others -= 1
            return False
        if piece is not None:
            name, part, key = piece
            cut = min(self._left[name], len(part[key]))
            part[key] = part[key][cut:]
            self._left[name] -= cut
            if cut and not part[key]:
                return False
        if "sequence_number" in event:
            event["sequence_number"] = self._events
        self._events += 1
        return True
