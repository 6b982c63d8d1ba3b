"""The log of every process of Quire: lines of text for people, or of JSON for programs.

Logging never fails and never blocks. Lines go through a bounded queue to a thread, so a stopped terminal, or a pipe
that is broken or not read, costs log lines and not requests. This module imports nothing of Quire.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

MAX_WAITING = 10_000
"""Lines that may wait for a slow reader of the log; further ones are dropped, counted and reported."""

FLUSH_SECONDS = 1.0
"""How long an ending process waits until its last lines are written."""

ERASE_LINE = "\r\x1b[K"
"""Moves a terminal's cursor to the beginning of its line, and erases that."""

MAX_LABEL = 64
"""Characters that are shown of a text that a client chose."""

_THIRD_PARTY = ("asyncio", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "fastapi", "multipart")


def configure(format: Literal["text", "json"] = "text", debug: bool = False, stream: TextIO | None = None) -> None:
    """Set up logging for this process, instead of what an earlier call set up.

    The level of Quire's loggers is INFO, or DEBUG with `debug`; that of all others is WARNING.

    Args:
        stream: where lines go; default: standard error as it is now.
    """
    handler = LineHandler(stream or sys.stderr, erase=format == "text")
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, LineHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("quire").setLevel(logging.DEBUG if debug else logging.INFO)
    for name in _THIRD_PARTY:  # some install handlers of their own
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
    logging.raiseExceptions = False  # a bad record is not worth a traceback
    logging.captureWarnings(True)


def in_use() -> tuple[Literal["text", "json"], bool]:
    """`format` and `debug` of this process, to configure a child process alike."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]
    as_json = any(isinstance(formatter, JsonFormatter) for formatter in formatters)
    return "json" if as_json else "text", logging.getLogger("quire").isEnabledFor(logging.DEBUG)


def flush() -> None:
    """Wait until all lines so far are written, at most `FLUSH_SECONDS`."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def event(
    logger: logging.Logger, name: str, text: str, /, *, level: int = logging.INFO, exc_info: Any = None, **fields: Any
) -> None:
    """Log one event. `text` is for people; a line of JSON also has `name` and `fields`."""
    logger.log(level, "%s", text, extra={"event_name": name, "event_fields": fields}, exc_info=exc_info)


def sanitize(text: str, limit: int | None = MAX_LABEL) -> str:
    r"""The first `limit` characters of a text, on one line. Characters that are not printable (line ends, terminal
    codes, marks of writing direction, lone surrogates) are escaped, as `\n`, `\x1b` and so on.
    """
    if limit is not None and len(text) > limit:
        text = text[:limit] + "..."
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# -- requests, and statistics ---------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestSummary:
    """The content of a request's line in the log, gathered until the request ends.

    Attributes:
        request_id: the id in the response's header and body.
        path, model, user: as the client sent them; "" if unknown.
        key: the name of its API key; "" if there is none.
        route: in a router: the server that it was sent to, and the estimated cost on each.
        fetches: blocks that were fetched for it: from where, how many tokens, in how many seconds; see `FetchStats`.
        output_tokens: of all choices.
        queue_seconds: from arrival to the first step of its first prompt.
        first_token_seconds: from arrival; None if there was no token.
        total_seconds: from arrival to its end.
        reason: why it ended: "stop", "length", "abort", "disconnect", "timeout", "error", "refused 429", ...;
            "" before that, and for requests that are not logged.
        error: what went wrong, if anything did.
    """

    request_id: str
    path: str = ""
    model: str = ""
    key: str = ""
    user: str = ""
    route: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fetches: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    output_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float | None = None
    total_seconds: float = 0.0
    reason: str = ""
    error: str | None = None

    def end(self, reason: str, error: str | None = None) -> None:
        """Set why it ended, unless that is set already: later reasons are consequences of the first."""
        if not self.reason:
            self.reason, self.error = reason, error

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, per second since the first; None if there were fewer than two."""
        if self.first_token_seconds is None or self.output_tokens < 2:
            return None
        seconds = self.total_seconds - self.first_token_seconds
        return (self.output_tokens - 1) / seconds if seconds > 0 else None


def request_line(summary: RequestSummary) -> str:
    """A request's line in the log, as text."""
    first, rate = summary.first_token_seconds, summary.tokens_per_second
    asked = [summary.path, summary.model, summary.key, f"user {summary.user}" if summary.user else ""]
    head = ", ".join(sanitize(part) for part in asked if part)
    ran = summary.prompt_tokens > 0
    parts = [
        _prompt(summary) if ran else None,
        f"{summary.output_tokens} out" if ran else None,
        f"first token {_duration(first)}" if first is not None else "no token" if ran else None,
        f"{_rate(rate)} tok/s" if rate is not None else None,
        f"{_duration(summary.total_seconds)} in all",
        sanitize(summary.route, None) or None,
        sanitize(summary.reason) + (f": {sanitize(summary.error, 200)}" if summary.error else ""),
    ]
    return f"{sanitize(summary.request_id, None)}  {head}{': ' if head else ''}" + ", ".join(filter(None, parts))


def _prompt(summary: RequestSummary) -> str:
    came_from = prompt_origins(summary.prompt_tokens, summary.cached_tokens, summary.fetches)
    return came_from or f"{summary.prompt_tokens} prompt ({summary.cached_tokens} cached)"


_SOURCES = {"host": "host memory", "disk": "the disk", "peer": "another engine", "remote": "another node"}


def prompt_origins(prompt: int, cached: int, fetches: Sequence[Mapping[str, Any]]) -> str:
    """Where the tokens of a prompt came from, for display; "" if nothing was fetched.

    Everything that is fetched passes through host memory; only tokens that were there before are counted as host
    memory's. What was fetched again after a preemption is counted separately.

    Args:
        prompt: number of tokens. cached: those that were not computed.
        fetches: see `RequestSummary`.
    """
    came = [fetch for fetch in fetches if fetch["tokens"] and fetch["seconds"] is not None]
    if not came:
        return ""
    first, again = ([fetch for fetch in came if fetch["resumed"] is resumed] for resumed in (False, True))
    loaded = sum(fetch["tokens"] for fetch in first if fetch["source"] == "host")
    parts = [f"{max(0, cached - loaded):,} of {prompt:,} prompt tokens cached here", *_told_fetches(first)]
    parts += [f"{prompt - cached:,} computed", *(f"{each} after a preemption" for each in _told_fetches(again))]
    return ", ".join(parts)


def _told_fetches(fetches: Sequence[Mapping[str, Any]]) -> list[str]:
    """The number of tokens from each source, and the seconds."""
    others = [fetch for fetch in fetches if fetch["source"] != "host"]
    found = [(fetch["engine"] or _SOURCES[fetch["source"]], fetch["tokens"], fetch["seconds"]) for fetch in others]
    loads = [fetch for fetch in fetches if fetch["source"] == "host"]
    own = sum(fetch["tokens"] for fetch in loads) - sum(fetch["tokens"] for fetch in others)
    if own > 0:
        found.append((_SOURCES["host"], own, sum(fetch["seconds"] for fetch in loads)))
    return [f"{tokens:,} from {sanitize(name, None)} in {_duration(seconds)}" for name, tokens, seconds in found]


def log_request(logger: logging.Logger, summary: RequestSummary) -> None:
    """Write a request's line."""
    fields = {name: getattr(summary, name) for name in RequestSummary.__slots__}
    event(logger, "request", request_line(summary), **fields, tokens_per_second=summary.tokens_per_second)


def statistics_line(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> str:
    """What an engine did between two readings of its counters, as text.

    Rates are per second of wall-clock time: prompt tokens computed, and tokens sampled.

    Args:
        before, after: fields of `EngineStats`, and `held_blocks`. A counter that is lower than before is that of a
            restarted engine, and counts from zero.
        seconds: the time between them.
    """
    fields = statistics_fields(before, after, seconds)
    hits = fields["hit_rate"]
    return (
        f"running {fields['running']}, waiting {fields['waiting']}, KV {100 * fields['kv_use']:.0f} %, "
        f"prefill {_rate(fields['prefill_tokens_per_second'])} tok/s, "
        f"decode {_rate(fields['decode_tokens_per_second'])} tok/s, "
        + (f"prefix hits {100 * hits:.0f} %" if hits is not None else "no new prompts")
    )


def statistics_fields(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The numbers of `statistics_line`: shares are from 0 to 1, rates per second."""

    def grown(name: str) -> float:
        now, then = after.get(name, 0), before.get(name, 0)
        return float(now - then if now >= then else now)

    span = max(seconds, 1e-9)
    sampled, prompts = grown("output_tokens"), grown("prompt_tokens")
    computed = grown("prefill_tokens") + grown("decode_tokens")
    return {
        "running": int(after.get("running", 0)),
        "waiting": int(after.get("waiting", 0)),
        "kv_use": kv_use(after),
        "prefill_tokens_per_second": max(0.0, computed - sampled) / span,
        "decode_tokens_per_second": sampled / span,
        "hit_rate": min(1.0, grown("cached_tokens") / prompts) if prompts else None,
    }


def kv_use(stats: Mapping[str, Any]) -> float:
    """The share of KV blocks that requests hold, without blocks that are only cached. With several KV groups, it is the
    largest share, as the engine reports it.
    """
    total = stats.get("num_blocks", 0)
    of_all = stats.get("held_blocks", 0) / total if total > 0 else 0.0
    share: float = stats.get("kv_use", of_all)
    return min(1.0, max(0.0, share))


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


# -- formatting and writing lines ------------------------------------------------------------------------------


class TextFormatter(logging.Formatter):
    """`12:00:01.250 info   text`, followed by an indented traceback; so no text can look like another line."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():7} {sanitize(record.getMessage(), None)}"
        return "\n".join([head, *(f"    {sanitize(line, None)}" for line in _traceback(record))])


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (ISO 8601, UTC), level, logger, event, text, the event's fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event_name", "log"),
            "text": record.getMessage(),
        }
        for name, value in getattr(record, "event_fields", {}).items():
            line.setdefault(name, value)
        if lines := _traceback(record):
            line["traceback"] = lines
        return json.dumps(_finite(line), default=str)  # ASCII only: line ends and surrogates are escaped


def _finite(value: Any) -> Any:
    """The value with NaN and infinity, which JSON does not have, replaced by None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _traceback(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[0] is None:
        return []
    return "".join(traceback.format_exception(*record.exc_info)).splitlines()


class LineHandler(logging.Handler):
    """Writes lines to a stream from its own thread.

    Args:
        erase: on a terminal, each line takes the place of what stands on the last one. That may be a progress bar, of
            this process or another one, which is drawn again below.
    """

    def __init__(self, stream: TextIO, erase: bool = False) -> None:
        super().__init__()
        self._stream = stream
        self._descriptor = _descriptor(stream)
        at_terminal = self._descriptor is not None and os.isatty(self._descriptor)
        self._before = ERASE_LINE if erase and at_terminal else ""
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line. It is lost if it cannot be formatted or the queue is full."""
        try:
            self._lines.put_nowait(self.format(record))
        except Exception:  # the queue is full, or the record is not valid
            self._dropped += 1

    def handle(self, record: logging.LogRecord) -> bool:
        """Like the base class's, without its lock, since the queue has its own."""
        if kept := bool(self.filter(record)):
            self.emit(record)
        return kept

    def flush(self) -> None:
        """Wait until all lines so far are written, at most `FLUSH_SECONDS`."""
        deadline = time.monotonic() + FLUSH_SECONDS
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left := deadline - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left)

    def close(self) -> None:
        """Write the remaining lines and end the thread; if nobody reads the log, it ends with the process."""
        self.flush()
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        super().close()

    def _write_all(self) -> None:
        while not self._closed and (line := self._lines.get()) is not None:
            self._write(line)
            if self._dropped and self._lines.empty():
                dropped, self._dropped = self._dropped, 0
                self._write(f"({dropped} log lines were lost: the log was not read in time, or they were not valid)")
            self._lines.task_done()

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # broken, full or closed: nobody could be told
            if self._descriptor is None:
                self._stream.write(line + "\n")
                return
            left = memoryview(f"{self._before}{line}\n".encode(errors="backslashreplace"))
            while left:
                left = left[os.write(self._descriptor, left) :]


def _descriptor(stream: TextIO) -> int | None:
    """The stream's file descriptor, which is written to directly: if a thread is blocked in Python's buffer at exit, it
    holds the buffer's lock, which is a fatal error. None for a stream in memory.
    """
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None
