"""Tokenizer workers: template rendering and tokenizing, in processes that a deadline can kill.

One pool serves one HTTP process. Jobs are queued in the order of arrival; each worker does one at a time. Large and
small jobs alternate, and with two or more workers one is always free of large jobs, so that a prompt of 100,000 tokens
does not delay short ones. With a single worker they wait for it, but not for all of a long list of prompts. Callers
must bound the number of queued jobs.

Failures are isolated per job. The worker of a job that exceeds the deadline is killed and replaced; the job fails if
the worker spent the time on it. The job of a worker that was stopped, is stuck or died is retried once. Idle workers
are pinged periodically, so that jobs rarely meet a dead one. A caller that gives up frees its worker within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire import child, errors
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import (
    EngineClosedError,
    QuireError,
    RequestError,
    TokenizerFailedError,
    TokenizerTimeoutError,
    TokenizerUnavailableError,
    UnknownTemplateVariableError,
)
from quire.text.chat_template import AS_THE_CHECKPOINT, ChatOptions
from quire.text.reply_grammar import ReplyRequest
from quire.text.reply_syntax import ReplySyntax
from quire.text.tokenizer import RenderedChat, check_text
from quire.text.tokenizer_worker import (
    LENGTH,
    Answer,
    BadWords,
    CompileGrammar,
    Decode,
    Encode,
    Failed,
    Job,
    Ping,
    Render,
    TokenTexts,
    WorkerStart,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

LARGE_BYTES = 64 << 10
"""A job larger than this is large. Long lists of texts are split into jobs of about this size."""

MAX_JOB_BYTES = 8 << 20
"""Maximum bytes of a text or a chat. The tokenizer takes about 150 bytes of memory for each."""

MEMORY_BYTES = 2 << 30
"""Maximum growth of a worker's memory: enough for `MAX_JOB_BYTES`."""

START_SECONDS = 60.0
"""Timeout for loading the tokenizer."""

PING_SECONDS = 5.0
"""Interval of pings to an idle worker."""

BEGIN_SECONDS = 10.0
"""Timeout for accepting a job; after it the worker is considered stopped or stuck."""

WORKED_SHARE = 0.1
"""A job over its deadline fails if its worker had a CPU for at least this share of the time (not all of it, since the
machine may be busy). A stopped worker had none, so its job is retried."""

ABANDONED_SECONDS = 1.0
"""How long a worker may continue an abandoned job: about the time it takes to replace the worker."""

LONGEST_PAUSE = 5.0
"""Maximum seconds between attempts to start a worker."""

_KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, QuireError)}
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


@dataclass(slots=True, eq=False)
class _Queued:
    """A job: its message and the future of its result, cancelled when the caller gives up."""

    body: bytes
    large: bool
    result: asyncio.Future[bytes]
    retried: bool = False


class TokenizerPool:
    """The tokenizer workers of one process.

    Args:
        folder: the checkpoint. Without a tokenizer, every job is refused with a `RequestError`.
        workers: number of processes.
        deadline: seconds per job, from when a worker accepts it.
        memory_bytes: maximum growth of a worker's memory.
        log: called with a line when a worker dies or cannot start.

    Methods that tokenize raise the errors of `Tokenizer`'s, and:
        TokenizerTimeoutError: the job exceeded its deadline while a worker was busy with it.
        TokenizerUnavailableError: two workers were stopped or killed during this job, or none can be started.
        TokenizerFailedError: two workers crashed on this job.
        EngineClosedError: the pool was closed.
    """

    def __init__(
        self,
        folder: Path,
        workers: int,
        deadline: float,
        *,
        memory_bytes: int = MEMORY_BYTES,
        chats: ChatOptions = AS_THE_CHECKPOINT,
        log: Callable[[str], None] = logger.warning,
    ) -> None:
        self.deadline = deadline
        self.reply_syntax = ReplySyntax()  # known once a worker is up
        self._chats = chats
        self._folder, self._num_workers, self._memory, self._log = folder, workers, memory_bytes, log
        self._waiting: tuple[deque[_Queued], deque[_Queued]] = (deque(), deque())  # small and large jobs
        self._slots: list[asyncio.Task[None]] = []
        self._workers: set[_Worker] = set()
        self._bell = asyncio.Event()  # set when there may be work for a free worker
        self._num_busy = self._num_large = 0  # running jobs, and the large ones among them
        self._took_large = False  # whether the last job taken was large

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return sorted(worker.pid for worker in self._workers)

    @property
    def num_waiting(self) -> int:
        """Number of queued jobs."""
        return sum(map(len, self._waiting))

    async def start(self) -> None:
        """Start the workers, and wait for the first of them.

        Raises:
            TokenizerError, ChatTemplateError: the checkpoint's files are not valid.
            TokenizerFailedError: the worker cannot be started.
        """
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slots = [asyncio.create_task(self._keep(first)) for _ in range(self._num_workers)]
        try:
            await first
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill the workers; queued jobs fail. Idempotent."""
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        self._fail_all(_closed())

    # -- jobs ----------------------------------------------------------------------------------------------

    async def encode(
        self,
        texts: list[str],
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        parse_special: bool = False,
    ) -> list[list[int]]:
        """The token ids of each text; see `Tokenizer.encode_batch`."""
        sizes = [check_text(text, index if len(texts) > 1 else None) for index, text in enumerate(texts)]
        large = sum(sizes) > LARGE_BYTES
        parts = _parts(texts, sizes)
        given = add_special_tokens, max_tokens, parse_special
        jobs = [self._ask(Encode(part, *given), list[list[int]], large) for part in parts]
        return list(itertools.chain.from_iterable(await _all(jobs)))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        reply: ReplyRequest | None = None,
        max_tokens: int | None = None,
    ) -> RenderedChat:
        """A chat rendered with the checkpoint's template; see `Tokenizer.apply_chat_template`."""
        job = Render(
            list(messages),
            add_generation_prompt,
            continue_final_message,
            dict(variables or {}),
            reply or ReplyRequest(),
            max_tokens,
        )
        return await self._ask(job, RenderedChat)

    async def bad_words(self, words: list[str]) -> list[list[int]]:
        """Token sequences of bad words; see `Tokenizer.bad_word_ids`."""
        return await self._ask(BadWords(list(words)), list[list[int]]) if words else []

    async def compile_grammar(self, wanted: StructuredOutputsParams) -> None:
        """Check that a grammar can be used; see `Grammars.compile`."""
        await self._ask(CompileGrammar(wanted), type(None))

    async def decode(self, ids: list[int]) -> str:
        """The text of ids, including special tokens."""
        return await self._ask(Decode(ids), str)

    async def token_texts(self, ids: list[int]) -> list[str]:
        """The text of each id after another one."""
        return await self._ask(TokenTexts(ids), list[str])

    async def _ask(self, job: Job, kind: type[T], large: bool = False) -> T:
        if not self._slots:
            raise _closed()
        body = _encoded(job)
        queued = _Queued(body, large or len(body) > LARGE_BYTES, asyncio.get_running_loop().create_future())
        self._waiting[queued.large].append(queued)
        self._bell.set()
        try:
            answer = _decode_answer(await queued.result)
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # a worker already took it
                self._waiting[queued.large].remove(queued)
            raise
        if isinstance(answer, Failed):
            raise _error(answer)
        return msgspec.msgpack.decode(answer.value, type=kind)

    # -- workers -------------------------------------------------------------------------------------------

    async def _keep(self, first: asyncio.Future[None]) -> None:
        """Run one worker, and replace it when it dies; `first` is set when a worker is up, or to its error."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                worker = await _Worker.start(self._folder, self._memory, self._bell, self._chats)
            except QuireError as error:
                pause = min(LONGEST_PAUSE, 2 * pause or 0.1)
                self._cannot_start(error, first)
                continue
            pause = 0.0
            self.reply_syntax = worker.reply_syntax
            self._workers.add(worker)
            if not first.done():
                first.set_result(None)
            try:
                while job := await self._next(worker):
                    await self._do(job, worker)
            finally:
                self._workers.remove(worker)
                await worker.kill()
            self._log(f"tokenizer worker {worker.pid} {worker.end}; starting another")

    def _cannot_start(self, error: QuireError, first: asyncio.Future[None]) -> None:
        if not first.done():
            first.set_exception(error)
            return
        self._log(f"a tokenizer worker cannot be started: {error}")
        if not self._workers:  # queued jobs would wait forever
            self._fail_all(TokenizerUnavailableError("no tokenizer worker can be started; try again"))

    def _fail_all(self, error: QuireError) -> None:
        for jobs in self._waiting:
            while jobs:
                job = jobs.popleft()
                if not job.result.done():
                    job.result.set_exception(error)

    async def _next(self, worker: _Worker) -> _Queued | None:
        """The next job for this worker; None if it has died."""
        while not worker.dead:
            if job := self._pop():
                return job
            self._bell.clear()
            try:
                async with asyncio.timeout(PING_SECONDS):  # `wait_for` may swallow a cancellation in Python 3.11
                    await self._bell.wait()
            except TimeoutError:
                await self._ping(worker)
        return None

    async def _ping(self, worker: _Worker) -> None:
        """Ping an idle worker; one that does not answer is dead."""
        try:
            await worker.begin(_PING)
            async with asyncio.timeout(BEGIN_SECONDS):
                await worker.receive()
        except TimeoutError:
            worker.dead, worker.end = True, NO_LIFE
        except (OSError, EOFError):
            worker.dead = True

    def _pop(self) -> _Queued | None:
        """The next job for a free worker: large and small ones alternate, each in the order of arrival."""
        for large in (not self._took_large, self._took_large):
            if large and self._num_large >= max(1, self._num_workers - 1):
                continue
            while jobs := self._waiting[large]:
                job = jobs.popleft()
                if not job.result.done():
                    self._took_large = large
                    return job
        return None

    async def _do(self, job: _Queued, worker: _Worker) -> None:
        """Run a job on a worker. Afterwards the job is done or queued again; the worker may be dead."""
        self._num_busy += 1
        self._num_large += job.large
        try:
            await self._try(job, worker)
        except asyncio.CancelledError:
            if not job.result.done():
                job.result.set_exception(_closed())
            raise
        finally:
            self._num_busy -= 1
            self._num_large -= job.large
            self._bell.set()

    async def _try(self, job: _Queued, worker: _Worker) -> None:
        try:
            answer = await self._answer(job, worker)
            if not job.result.done():
                job.result.set_result(answer)
        except TimeoutError:
            worker.dead = True
            if job.result.done():
                worker.end = "was killed: its job was given up"
            elif worker.worked_for(WORKED_SHARE * self.deadline):
                worker.end = "was killed: its job took too long"
                job.result.set_exception(self._too_late())
            else:
                worker.end = NO_LIFE
                self._retry(job, worker)
        except (OSError, EOFError):
            worker.dead = True
            await worker.kill()  # so that its exit code is known
            self._retry(job, worker)

    async def _answer(self, job: _Queued, worker: _Worker) -> bytes:
        """The answer. Raises TimeoutError at the deadline, or earlier if the caller gave up."""
        await worker.begin(job.body)
        asking = asyncio.create_task(worker.receive())
        try:
            await asyncio.wait({asking, job.result}, timeout=self.deadline, return_when=asyncio.FIRST_COMPLETED)
            if job.result.done() and not asking.done():
                await asyncio.wait({asking}, timeout=min(ABANDONED_SECONDS, self.deadline))
            if not asking.done():
                raise TimeoutError
            return asking.result()
        finally:
            asking.cancel()

    def _retry(self, job: _Queued, worker: _Worker) -> None:
        """The worker is gone: put the job at the head of the queue, unless it was retried before."""
        if job.result.done():
            return
        if not job.retried:
            job.retried = True
            self._waiting[job.large].appendleft(job)
        elif worker.was_killed:
            text = "two tokenizer workers were stopped or killed while they were at this request; try again"
            job.result.set_exception(TokenizerUnavailableError(text))
        else:
            text = "two tokenizer workers died of this request; it may need too much memory"
            job.result.set_exception(TokenizerFailedError(text))

    def _too_late(self) -> TokenizerTimeoutError:
        return TokenizerTimeoutError(
            f"rendering and tokenizing this request took longer than {self.deadline:g} s, which is all it may take "
            "(tokenizer_deadline); send less text"
        )


class _Worker:
    """A worker process, as seen by the pool.

    Attributes:
        dead: whether it takes no more jobs.
        end: how it exited, for the log.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        bell: asyncio.Event,
    ) -> None:
        self.pid = process.pid
        self.dead = False
        self.end = ""
        self.reply_syntax = ReplySyntax()
        self._process = process
        self._begun: float | None = None  # its CPU time when the current job began
        self._reader, self._writer = streams
        self._watch = asyncio.create_task(self._notice_death(bell))

    @classmethod
    async def start(cls, folder: Path, memory_bytes: int, bell: asyncio.Event, chats: ChatOptions) -> _Worker:
        """Start a process and wait until it has loaded the tokenizer.

        Raises:
            QuireError: the error it reported for the checkpoint; a TokenizerFailedError if it reported none.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                streams = await asyncio.open_unix_connection(sock=ours)
                try:
                    process = await child.spawn(
                        child.python("quire.text.tokenizer_worker"),
                        WorkerStart(theirs.fileno(), str(folder), memory_bytes, chats),
                        fds=[theirs.fileno()],
                        # Otherwise the library starts a thread per core in each worker.
                        environment={"TOKENIZERS_PARALLELISM": "false"},
                    )
                except BaseException:
                    streams[1].close()
                    raise
        except OSError as error:
            raise TokenizerFailedError(f"no process for a tokenizer worker: {error.strerror or error}") from error
        worker = cls(process, streams, bell)
        try:
            async with asyncio.timeout(START_SECONDS):
                loaded = _decode_answer(await worker.receive())
        except (OSError, EOFError) as error:
            await worker.kill()
            what = f"needed more than {START_SECONDS:g} s" if isinstance(error, TimeoutError) else worker.end
            raise TokenizerFailedError(f"a tokenizer worker that loads the tokenizer {what}") from None
        except BaseException:
            await worker.kill()
            raise
        if isinstance(loaded, Failed):
            await worker.kill()
            raise _error(loaded)
        worker.reply_syntax = msgspec.msgpack.decode(loaded.value, type=ReplySyntax)
        return worker

    async def begin(self, body: bytes) -> None:
        """Send it a job. Raises TimeoutError if it does not accept it, OSError or EOFError if it is gone."""
        self._begun = None
        async with asyncio.timeout(BEGIN_SECONDS):
            self._writer.write(LENGTH.pack(len(body)))
            self._writer.write(body)
            await self._writer.drain()
            await self.receive()  # `Begun`
        self._begun = child.cpu_seconds(self.pid)

    def worked_for(self, seconds: float) -> bool:
        """Whether it used this much CPU time since it began the current job; true if its CPU time is unknown."""
        return self._begun is not None and not child.cpu_seconds(self.pid) - self._begun < seconds

    @property
    def was_killed(self) -> bool:
        """Whether it was killed, by the pool or from outside, rather than exiting itself, as it does out of memory."""
        return self.end == NO_LIFE or self._process.returncode == -signal.SIGKILL

    async def receive(self) -> bytes:
        """The next message from the worker."""
        size: int = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
        return await self._reader.readexactly(size)

    async def kill(self) -> None:
        """Kill the process if it is running, and wait until it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # `Process.kill` may take the exit code from its watcher
        await self._watch
        self._writer.close()

    async def _notice_death(self, bell: asyncio.Event) -> None:
        code = await self._process.wait()
        if not self.end:
            self.end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        self.dead = True
        bell.set()


NO_LIFE = "was killed: it showed no sign of life"
_PING = msgspec.msgpack.encode(Ping())


def _parts(texts: Sequence[str], sizes: Iterable[int]) -> list[list[str]]:
    """The texts in parts of `LARGE_BYTES` or a little more. Raises `RequestError` for a text that is too long."""
    parts: list[list[str]] = []
    room = 0
    for text, size in zip(texts, sizes, strict=True):
        _check_size(size)
        if room <= 0 or size > room:
            parts.append([])
            room = LARGE_BYTES
        parts[-1].append(text)
        room -= size
    return parts


def _encoded(job: Job) -> bytes:
    """The job's message. Raises `RequestError` if it cannot be encoded."""
    try:
        body = msgspec.msgpack.encode(job)
    except UnicodeEncodeError:
        raise RequestError("the request holds half of a surrogate pair; text must be valid Unicode") from None
    except OverflowError:
        raise RequestError("the request holds a whole number of more than 64 bits; write it as a string") from None
    except RecursionError:
        raise RequestError("the request nests too deep; flatten it") from None
    except TypeError as error:
        raise RequestError(f"the request holds what JSON does not have: {error}") from None
    _check_size(len(body))
    return body


def _check_size(size: int) -> None:
    if size > MAX_JOB_BYTES:
        raise RequestError(f"the text has {size} bytes; at most {MAX_JOB_BYTES} are tokenized at once: send less text")


async def _all(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; if one fails, the others are cancelled."""
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _error(answer: Failed) -> QuireError:
    error = _KINDS.get(answer.kind, TokenizerFailedError)(answer.message)
    if isinstance(error, RequestError | UnknownTemplateVariableError):
        error.param = answer.param
    return error


def _closed() -> EngineClosedError:
    return EngineClosedError("the tokenizer workers were closed")
