"""A batch: a file of requests, one per line, and a file of their answers, in OpenAI's format.

The answer file is the only state. A line is appended for each answered request, and a truncated line is removed when
the batch resumes. So a batch may be killed at any byte, and repeats only the requests that were in progress.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.errors import BatchError, ConfigError

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
MAX_LINE_BYTES = 64 << 20
MAX_ID_LENGTH = 512


class Line(msgspec.Struct):
    """One request of a batch. `body` is passed on as it is."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Named(msgspec.Struct):
    custom_id: str


class _Streams(msgspec.Struct):
    stream: Any = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


class _Done(msgspec.Struct):
    """The parts of a written answer that are read again."""

    id: str
    custom_id: str
    response: dict[str, msgspec.Raw] | None
    error: dict[str, msgspec.Raw] | None


class Answer(NamedTuple):
    """A server's response to a request; its body is JSON."""

    status: int
    request_id: str
    body: bytes


Post = Callable[[str, bytes], Awaitable[Answer]]
"""Sends a request to a server; raises `BatchError` if it cannot be answered."""


class Place(NamedTuple):
    """Where a request is in the file of requests."""

    number: int
    start: int
    size: int


@dataclass(slots=True)
class Counts:
    """Progress of a batch. `failed`: answers other than 200, and lines that are no requests."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0


def read_line(data: bytes, number: int) -> Line:
    """The request in a line.

    Raises:
        BatchError: it is not a request; the message says why.
    """
    where = f"line {number}"
    try:
        line = msgspec.json.decode(data, type=Line)
        streams = msgspec.json.decode(line.body, type=_Streams).stream
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BatchError(
            f"{where} is not a request (an object with custom_id, method, url and body): {error}"
        ) from error
    if not 0 < len(line.custom_id) <= MAX_ID_LENGTH:
        raise BatchError(f"{where}: custom_id must have 1 to {MAX_ID_LENGTH} characters")
    if line.method != "POST" or line.url not in URLS:
        raise BatchError(f"{where} asks for {line.method[:16]} {line.url[:80]}; allowed are POST and {', '.join(URLS)}")
    if streams not in (None, False):
        raise BatchError(f"{where} has stream, which a batch does not support; leave it out")
    return line


def _custom_id(data: bytes) -> str:
    """What a line that is no request calls itself; "" if that is not known."""
    try:
        name = msgspec.json.decode(data, type=_Named).custom_id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
    return name if len(name) <= MAX_ID_LENGTH else ""


class Requests:
    """The requests of a file, read one by one.

    Attributes:
        places: where each request is, by its custom_id; a line without one has one made from its number.
        problems: why lines are no requests, by that id.

    Raises:
        BatchError: two requests have one custom_id, a line is too long, or it is no regular file. OSError: it cannot be
            read.
    """

    def __init__(self, path: Path) -> None:
        self.places: dict[str, Place] = {}
        self.problems: dict[str, str] = {}
        self._file = path.open("rb")
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise BatchError(
                "this is no regular file, and requests are read again from where they are; save them in one"
            )
        start = 0
        for number, data in enumerate(iter(lambda: self._file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(data) > MAX_LINE_BYTES:
                raise BatchError(f"line {number} has more than {MAX_LINE_BYTES} bytes, which is the limit")
            if data.strip():
                self._add(data, Place(number, start, len(data)))
            start += len(data)

    def _add(self, data: bytes, place: Place) -> None:
        try:
            name = read_line(data, place.number).custom_id
        except BatchError as error:
            name = _custom_id(data) or f"line-{place.number}"
            if name not in self.places:  # otherwise that is the problem
                self.problems[name] = str(error)
        if name in self.places:
            first = self.places[name].number
            also = " (a line without one is called by its number)" if {name} & self.problems.keys() else ""
            raise BatchError(
                f"lines {first} and {place.number} have the same custom_id, {name[:80]!r}{also}; each needs its own"
            )
        self.places[name] = place

    def read(self, name: str) -> Line:
        """The request of this custom_id."""
        place = self.places[name]
        return read_line(os.pread(self._file.fileno(), place.size, place.start), place.number)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Answers:
    """The answer file: what it has, and what is appended.

    Attributes:
        done: the answered custom_ids, and whether the status was 200.

    Raises:
        BatchError: another process is writing it, or it has other contents. ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.done: dict[str, bool] = {}
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"the answer file {path} cannot be written: {error.strerror or error}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise ConfigError(
                    f"the answer file {path} is no regular file, and a batch resumes from it; name another"
                )
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchError(f"{path} is being written by another batch; give each its own file") from None
            self._take_up(path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take_up(self, path: Path) -> None:
        """Read the complete lines, and remove a truncated one."""
        whole = 0
        with path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                if not data.endswith(b"\n"):
                    break
                whole += len(data)
                try:
                    answer = msgspec.json.decode(data, type=_Done)
                except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                    raise BatchError(f"{path}, line {number} is not a batch response; give another file") from error
                status = (answer.response or {}).get("status_code")
                self.done[answer.custom_id] = status is not None and bytes(status) == b"200"
        os.ftruncate(self._descriptor, whole)

    def add(self, name: str, answer: Answer | None, problem: str = "") -> None:
        """Append an answer, or why there is none.

        Raises:
            BatchError: the file cannot be written; what of the line is there is removed when the batch resumes.
        """
        digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
        line = {
            "id": f"batch_req_{digest}",
            "custom_id": name,
            "response": answer
            and {
                "status_code": answer.status,
                "request_id": answer.request_id,
                "body": msgspec.Raw(answer.body),
            },
            "error": None if answer else {"code": "invalid_request", "message": problem},
        }
        data = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise BatchError(f"the answer file cannot be written: {error.strerror or error}") from error
        self.done[name] = answer is not None and answer.status == 200

    def close(self) -> None:
        """Sync and close the file."""
        with suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)


async def run(
    requests: Requests, answers: Answers, post: Post, concurrency: int, tell: Callable[[Counts], None]
) -> Counts:
    """Answer all requests that have no answer yet, up to `concurrency` at a time.

    Args:
        tell: called with the progress whenever it changes.

    Raises:
        BatchError: from `post`; requests in progress are given up, and the batch can be resumed. ConfigError: the
            answers belong to other requests.
    """
    strange = next((name for name in answers.done if name not in requests.places), None)
    if strange is not None:
        raise ConfigError(
            f"the output file has an answer to {strange[:80]!r}, which is not a request of this batch; it seems to "
            "belong to another input file: give another output file, or remove that line"
        )
    counts = Counts(len(requests.places), len(answers.done), len(answers.done) - sum(answers.done.values()))
    tell(counts)
    todo = (name for name in requests.places if name not in answers.done)
    async with asyncio.TaskGroup() as group:
        for _ in range(max(1, concurrency)):
            group.create_task(_work(todo, requests, answers, post, counts, tell))
    return counts


async def _work(
    todo: Iterator[str],
    requests: Requests,
    answers: Answers,
    post: Post,
    counts: Counts,
    tell: Callable[[Counts], None],
) -> None:
    """Process one request after the other; all workers share `todo`."""
    for name in todo:
        answer, problem = None, requests.problems.get(name, "")
        if not problem:
            line = requests.read(name)
            answer = await post(line.url, bytes(line.body))
        answers.add(name, answer, problem)
        counts.completed += 1
        counts.failed += not answers.done[name]
        counts.tokens += _tokens(answer)
        tell(counts)


def _tokens(answer: Answer | None) -> int:
    if answer is None:
        return 0
    try:
        usage = msgspec.json.decode(answer.body, type=_Counted).usage
    except (msgspec.DecodeError, RecursionError):
        return 0
    return (usage and usage.completion_tokens) or 0
