"""A tokenizer worker: a process that renders chat templates and tokenizes, for `tokenizer_pool.py`.

Untrusted requests and templates may take any time and memory, so they are processed here, in a process that can be
killed and has bounded memory. A worker does one job at a time, over a socket, and exits when the other end is closed.

Every message is a four-byte length and msgpack. The first one reports that the tokenizer is loaded (`Done`, with the
model's `ReplySyntax`), or why not (`Failed`); after that there are two for each `Job`: `Begun`, and its answer.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire import child
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import (
    ChatTemplateError,
    QuireError,
    RequestError,
    TokenizerError,
    TokenizerFailedError,
    TokenOutOfRangeError,
)
from quire.models.hub import TOKENIZER_FILE
from quire.text.chat_template import AS_THE_CHECKPOINT, ChatOptions
from quire.text.reply_grammar import ReplyRequest
from quire.text.reply_syntax import ReplySyntax
from quire.text.tokenizer import NO_TOKENIZER, Tokenizer

if TYPE_CHECKING:
    from quire.grammar.grammars import Grammars

LENGTH = struct.Struct(">I")
MAX_ID = (1 << 32) - 1

COMPILE_SECONDS = 3.0
"""Maximum CPU time for compiling a grammar. The engine compiles accepted ones again, while other grammars wait."""

TEMPLATE_SECONDS = 10.0
"""Maximum CPU time for finding out how a chat template writes replies, some dozen short chats: known ones take a
hundredth of it."""

COMPILED_BYTES = 64 << 20
"""Maximum memory of a compiled grammar, of which every running request may have its own: ordinary schemas take less
than 1 MiB, and 128 tools of 12 parameters 12 (with a vocabulary of 4,096 tokens)."""


class WorkerStart(msgspec.Struct):
    """A worker's arguments, read from its standard input.

    Attributes:
        socket: file descriptor of the inherited socket.
        folder: the checkpoint.
        memory_bytes: maximum growth of its memory while the tokenizer is loaded, and again after that.
        chats: how they are written where it is not as the checkpoint says.
    """

    socket: int
    folder: str
    memory_bytes: int
    chats: ChatOptions = AS_THE_CHECKPOINT


class Encode(msgspec.Struct, tag="encode"):
    """Answered by the token ids of each text: see `Tokenizer.encode_batch`."""

    texts: list[str]
    add_special_tokens: bool
    max_tokens: int | None
    parse_special: bool


class Render(msgspec.Struct, tag="render"):
    """Answered by a `RenderedChat`. `max_tokens`: see `Tokenizer.encode_batch`."""

    messages: list[Any]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    reply: ReplyRequest
    max_tokens: int | None


class BadWords(msgspec.Struct, tag="bad_words"):
    """Answered by token sequences."""

    words: list[str]


class Decode(msgspec.Struct, tag="decode"):
    """Answered by the text of these ids, including special tokens."""

    ids: list[int]


class TokenTexts(msgspec.Struct, tag="token_texts"):
    """Answered by the text of each id."""

    ids: list[int]


class CompileGrammar(msgspec.Struct, tag="compile"):
    """Answered by `Done` if the grammar can be used."""

    wanted: StructuredOutputsParams


class Ping(msgspec.Struct, tag="ping"):
    """Answered by `Done`, to show that the worker is alive."""


Job = Encode | Render | BadWords | Decode | TokenTexts | CompileGrammar | Ping


class Begun(msgspec.Struct, tag="begun"):
    """The job was received; its time is measured from now on."""


class Done(msgspec.Struct, tag="done"):
    """A job's result, in msgpack."""

    value: msgspec.Raw


class Failed(msgspec.Struct, tag="failed"):
    """The job failed. `kind` is a class of `quire.errors`, `param` the field that caused it, if a single one did."""

    kind: str
    message: str
    param: str | None = None


Answer = Done | Failed

_decode_job = msgspec.msgpack.Decoder(Job).decode
_encode = msgspec.msgpack.encode


def main() -> None:
    """Load the tokenizer, then serve jobs until the socket is closed."""
    from quire.grammar.grammars import Grammars  # imported late: processes that start a worker do not need it

    start = child.begin(WorkerStart)
    with socket.socket(fileno=start.socket) as connection, contextlib.suppress(ConnectionError):
        _limit_memory(start.memory_bytes)
        try:
            tokenizer = _load(Path(start.folder), start.chats)
            syntax = ReplySyntax(no_chats=NO_TOKENIZER) if tokenizer is None else _reply_syntax(tokenizer)
        except QuireError as error:
            _send(connection, _refusal(error))
            return
        _limit_memory(start.memory_bytes)
        _send(connection, _done(syntax))
        grammars = Grammars(
            lambda: None if tokenizer is None else tokenizer.vocabulary(tokenizer.vocab_size),
            COMPILE_SECONDS,
            COMPILED_BYTES,
        )
        while (body := _receive(connection)) is not None:
            _send(connection, Begun())
            _send(connection, _answer(tokenizer, grammars, body))


def _load(folder: Path, chats: ChatOptions) -> Tokenizer | None:
    """The checkpoint's tokenizer, warmed up; None if it has none: then every job is refused.

    Raises:
        TokenizerError, ChatTemplateError: it cannot be loaded, for any reason.
    """
    try:
        tokenizer = Tokenizer.load_if_present(folder, chats)
        if tokenizer is not None:
            tokenizer.warm_up()
    except (TokenizerError, ChatTemplateError):
        raise
    except MemoryError:
        raise TokenizerError(f"{folder / TOKENIZER_FILE} or a file beside it takes too much memory to load") from None
    except Exception as error:  # untrusted files: unexpected errors are their fault, too
        traceback.print_exception(error, file=sys.stderr)
        raise TokenizerError(
            f"{folder / TOKENIZER_FILE} and the files beside it cannot be used ({type(error).__name__}: {error}); "
            "download them again, or save them anew with transformers' save_pretrained"
        ) from error
    return tokenizer


class _TooSlow(BaseException):  # no handler of errors is meant
    """A chat template took its time."""


def _reply_syntax(tokenizer: Tokenizer) -> ReplySyntax:
    """How the model writes replies; chats are refused if the template takes too long to tell."""

    def stop(number: int, frame: object) -> None:
        raise _TooSlow

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    try:
        return tokenizer.reply_syntax
    except _TooSlow:
        tokenizer.refuse_chats(
            f"the chat template takes more than {TEMPLATE_SECONDS:g} s for a few short messages; correct or remove it"
        )
        return tokenizer.reply_syntax
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _limit_memory(growth: int) -> None:
    """Limit the growth of this process's memory, from its current size. Beyond it allocation fails in this process
    only, and a library may abort; core files are disabled, since they would contain users' texts.

    The limit is on private writable memory (RLIMIT_DATA), since threads and libraries reserve addresses that they
    never use. If the kernel does not report its size, there is no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        used = 1024 * int(status.split("VmData:")[1].split()[0])
        _, highest = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + growth, highest))


def _answer(tokenizer: Tokenizer | None, grammars: Grammars, body: bytes) -> Answer:
    """The answer to a job; does not raise."""
    try:
        job: Job = _decode_job(body)
        if isinstance(job, Ping):
            return _done(None)
        if tokenizer is None:
            raise _no_tokenizer(job)
        return _done(_work(tokenizer, grammars, job))
    except Exception as error:
        return _refusal(error)


def _work(tokenizer: Tokenizer, grammars: Grammars, job: Job) -> Any:
    match job:
        case Encode():
            return tokenizer.encode_batch(job.texts, job.add_special_tokens, job.max_tokens, job.parse_special)
        case Render():
            return tokenizer.apply_chat_template(
                job.messages,
                add_generation_prompt=job.add_generation_prompt,
                continue_final_message=job.continue_final_message,
                reply=job.reply,
                variables=job.variables,
                max_tokens=job.max_tokens,
            )
        case BadWords():
            return tokenizer.bad_word_ids(job.words)
        case CompileGrammar():
            return grammars.compile(job.wanted)
        case Decode():
            return tokenizer.decode(_checked(job.ids), skip_special_tokens=False)
        case TokenTexts():
            texts = {token: tokenizer.token_text(token) for token in set(_checked(job.ids))}
            return [texts[token] for token in job.ids]


def _checked(ids: list[int]) -> list[int]:
    """The ids, if they are in the range of the tokenizer's library."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token <= MAX_ID:
            raise TokenOutOfRangeError(f"the token id {token} lies outside the vocabulary; ids are from 0 on")
    return ids


def _no_tokenizer(job: Job) -> QuireError:
    if isinstance(job, Render):
        return ChatTemplateError("this checkpoint has no tokenizer, so no chat template; give token ids")
    return RequestError("this checkpoint has no tokenizer.json; give prompts as lists of token ids")


def _done(value: Any) -> Done:
    return Done(msgspec.Raw(_encode(value)))


def _refusal(error: Exception) -> Failed:
    """The answer for an error. Unexpected errors are logged, and not shown to clients."""
    if isinstance(error, MemoryError):
        error = RequestError("tokenizing this request takes more memory than it may have; send less text")
    elif not isinstance(error, QuireError) or isinstance(error, TokenizerFailedError):
        traceback.print_exception(error, file=sys.stderr)
        error = TokenizerFailedError("the tokenizer failed on this request; the server's log tells more")
    return Failed(type(error).__name__, str(error), getattr(error, "param", None))


def _send(connection: socket.socket, message: Begun | Answer) -> None:
    body = _encode(message)
    connection.sendall(LENGTH.pack(len(body)))
    connection.sendall(body)


def _receive(connection: socket.socket) -> bytes | None:
    """The next job; None if the other end was closed."""
    head = _read(connection, LENGTH.size)
    return None if head is None else _read(connection, LENGTH.unpack(head)[0])


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = connection.recv_into(left)
        if not count:
            return None
        left = left[count:]
    return bytes(data)


if __name__ == "__main__":
    main()
