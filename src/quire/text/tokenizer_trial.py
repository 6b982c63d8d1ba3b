"""Loads a checkpoint's tokenizer in a sandboxed process before this process does.

A tokenizer comes with the checkpoint, so it is untrusted: loading it may panic, crash, exhaust memory or never end. So
a tokenizer worker (`tokenizer_worker.py`) loads it first, with bounded memory and a deadline. If that succeeds, it is
safe to load here.

The trial runs concurrently with its owner, which may load weights meanwhile. Tokenizers shipped with Quire skip it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import msgspec

from quire import child, errors
from quire.errors import TokenizerError, TokenizerFailedError
from quire.models.fields import has_file
from quire.models.hub import ASSETS, TOKENIZER_FILE
from quire.text.chat_template import AS_THE_CHECKPOINT, ChatOptions
from quire.text.reply_syntax import ReplySyntax
from quire.text.tokenizer_worker import LENGTH, Answer, Done, Failed, WorkerStart

MEMORY_BYTES = 2 << 30
"""Maximum growth of the process. A tokenizer of 200,000 tokens, a file of 18 MB, takes a tenth of it."""

DEADLINE = 60.0
"""Seconds from the start. That tokenizer takes two on one core."""


DO = "download it again, or save it anew with transformers' save_pretrained"

_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class TokenizerTrial:
    """One trial, a context manager that ends its process on exit.

    Args:
        folder: the checkpoint; without a tokenizer, nothing is done.
        chats: how chats are written where it is not as the checkpoint says.

    Raises:
        TokenizerError: the tokenizer's path is not a file.
        TokenizerFailedError: the process cannot be started.
    """

    def __init__(
        self,
        folder: Path,
        chats: ChatOptions = AS_THE_CHECKPOINT,
        *,
        deadline: float = DEADLINE,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._file, self._seconds, self._memory = folder / TOKENIZER_FILE, deadline, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        if not has_file(self._file, TokenizerError) or folder.parent == ASSETS:
            return
        self._end = time.monotonic() + deadline
        self._socket, theirs = socket.socketpair()
        self._socket.shutdown(socket.SHUT_WR)  # no jobs will come: after loading it exits, and frees its memory
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self._socket.close)
            try:
                self._process = child.spawn_quietly(
                    child.python("quire.text.tokenizer_worker"),
                    WorkerStart(theirs.fileno(), str(folder), memory_bytes, chats),
                    fds=[theirs.fileno()],
                    environment={"TOKENIZERS_PARALLELISM": "false"},
                )
            except OSError as error:
                raise TokenizerFailedError(
                    f"no process to try the tokenizer in: {error.strerror or error}; look at the limits of this user"
                ) from error
            except UnicodeEncodeError:
                raise TokenizerError(f"the folder {str(folder)!r} has a name that is no Unicode; rename it") from None
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def check(self) -> str:
        """Wait for its end; returns why chats are refused, "" if they are not.

        Raises:
            TokenizerError, ChatTemplateError: the checkpoint's files are not valid; the message names the file.
        """
        if self._process is None:
            return ""
        self._socket.settimeout(max(0.1, self._end - time.monotonic()))  # an answer already there is read even then
        try:
            answer = self._read_answer()
        except TimeoutError:
            raise TokenizerError(f"{self._file} took longer than {self._seconds:g} s to load; {DO}") from None
        except (OSError, EOFError):
            raise TokenizerError(f"{self._file} cannot be loaded: {self._how_it_ended()}; {DO}") from None
        if isinstance(answer, Failed):
            raise getattr(errors, answer.kind, TokenizerError)(answer.message)
        return msgspec.msgpack.decode(answer.value, type=ReplySyntax).no_chats if isinstance(answer, Done) else ""

    def _read_answer(self) -> Answer:
        """The answer. Raises OSError or EOFError if there is none."""
        with self._socket.makefile("rb") as stream:
            head = stream.read(LENGTH.size)
            body = stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
        if not body:
            raise EOFError
        answer: Answer = _decode_answer(body)
        return answer

    def _how_it_ended(self) -> str:
        """How a process without an answer ended."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = None if self._process is None else self._process.wait(self._seconds)
        if code == -signal.SIGABRT:  # Rust aborts when it runs out of memory, and C libraries on any error
            return f"the process that tried it gave up; it may take more than {self._memory >> 20} MiB of memory"
        ended = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"the process that tried it ended with {ended}"
