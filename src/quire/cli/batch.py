"""Process a file of requests in OpenAI's batch format: one JSON object per line, with custom_id, method, url and body.

  quire batch requests.jsonl answers.jsonl                         the model that the first request names
  quire batch requests.jsonl answers.jsonl --model ./qwen3 -- --max-num-seqs 64
  quire batch requests.jsonl answers.jsonl --url http://127.0.0.1:8000

Without --url a server is started for the batch, with the options of 'quire serve' that follow --. Answers are written
in the order of completion. Repeat the command to resume a batch that was interrupted, even by kill -9.

Exit codes: 0 every request got a 200; 1 some did not (their lines say why), or the batch cannot continue; 2 an option
or the request file is invalid; 130 Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from quire import child
from quire.address import Address
from quire.cli.terminal import note
from quire.errors import BatchError, ConfigError
from quire.http_client import HttpClient, HttpError, NoAnswerError
from quire.server.batch_lines import Answer, Answers, Counts, Requests
from quire.server.batch_lines import run as run_batch
from quire.server.http_options import read_keys
from quire.tls import CACERT
from quire.typed_json import BAD_JSON

CONCURRENCY = 128
CONNECT_SECONDS = 10.0
BUSY = (429, 502, 503)
"""Statuses of a server that may answer later."""
ATTEMPTS = 12
"""Attempts in a row, 429s apart, after which a server stays away."""
BUSY_SECONDS = 3600.0
"""How long a server may refuse requests with 429 and answer none: one that is busy answers those that it has taken."""
LATE_ATTEMPTS = 3
"""Attempts at a request that takes too long. It may always do so, and must not keep the batch from its end."""
LONGEST_WAIT = 30.0
MAX_ANSWER_BYTES = 256 << 20
READY_SECONDS, LEAVE_SECONDS = 1800.0, 15.0
MAX_LINE_BYTES = 16 << 20
"""Longest line of a server's log."""


class _FirstBody(msgspec.Struct):
    model: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire batch`."""
    parser.usage = "quire batch IN.jsonl OUT.jsonl [--url URL | --model MODEL] [options] [-- options of quire serve]"
    parser.epilog = "options of 'quire serve' go after --"
    parser.add_argument("words", nargs="*", metavar="FILE", help="the request file and the answer file")
    parser.add_argument("-i", "--input-file", metavar="FILE", help="the request file, as for 'vllm run-batch'")
    parser.add_argument("-o", "--output-file", metavar="FILE", help="the answer file, likewise")
    parser.add_argument("--url", help="use this running server, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="its API key, or @FILE to read it from a file")
    parser.add_argument("--cacert", metavar="FILE", help=CACERT)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, GGUF file, org/name on the Hub, or 'demo' (default: the model of the first request)",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        default=CONCURRENCY,
        help=f"concurrent requests (default: {CONCURRENCY})",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Answer all requests; see the module's docstring for the exit codes."""
    files = [name for name in (args.input_file, args.output_file) if name is not None]
    if len(files) == 1 or len(files) + len(args.words) < 2:
        raise ConfigError("a batch needs two files; give IN.jsonl with the requests and OUT.jsonl for the answers")
    source, target, *options = files + args.words
    if args.url and (args.model or options):
        raise ConfigError(
            "--url uses a running server, but --model and options after -- start one; leave one of them out"
        )
    if not 1 <= args.concurrency <= 4096:
        raise ConfigError(f"--concurrency is {args.concurrency}; it must be from 1 to 4096")
    if os.path.exists(target) and os.path.samefile(source, target):
        raise ConfigError("the request file and the answer file are the same; give another answer file")
    requests = _requests(Path(source))
    answers = Answers(Path(target))
    try:
        counts = asyncio.run(_run(args, options, requests, answers))
    except KeyboardInterrupt:
        so_far = f"{len(answers.done)} of {len(requests.places)} requests answered"
        note(f"interrupted: {so_far}; repeat the command to resume")
        raise
    finally:
        answers.close()
        requests.close()
    print(_report(counts), file=sys.stderr)
    return int(counts.failed > 0)


def _requests(path: Path) -> Requests:
    try:
        return Requests(path)
    except BatchError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _report(counts: Counts) -> str:
    failed = f", {counts.failed} with errors" if counts.failed else ""
    return f"{counts.completed} of {counts.total} requests answered{failed}"


async def _run(args: argparse.Namespace, options: list[str], requests: Requests, answers: Answers) -> Counts:
    with _progress(len(requests.places), args.quiet) as tell:
        if len(answers.done) == len(requests.places):  # no server is needed
            return await run_batch(requests, answers, _nobody, 1, tell)
        async with contextlib.AsyncExitStack() as stack:
            url, key = args.url, read_keys([args.api_key], "api_key")[0] if args.api_key else ""
            if url is None:
                url, key = await stack.enter_async_context(_server(args.model or _first_model(requests), options))
            asker = await stack.enter_async_context(contextlib.aclosing(_Asker(url, key, args.cacert)))
            try:
                return await run_batch(requests, answers, asker.post, args.concurrency, tell)
            except* BatchError as errors:
                first = next(iter(errors.exceptions))
                raise BatchError(f"{first}; repeat the command to resume") from None


async def _nobody(url: str, body: bytes) -> Answer:
    raise BatchError("there is no server")


def _first_model(requests: Requests) -> str:
    """The model that the first request names."""
    for name in requests.places:
        if name not in requests.problems:
            model = ""
            with contextlib.suppress(msgspec.DecodeError):
                model = msgspec.json.decode(requests.read(name).body, type=_FirstBody).model
            if model:
                return model
            break
    raise ConfigError(
        "no model was given, and the first request names none; add --model MODEL, or --url URL of a server"
    )


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Any]:
    """Yields a function that shows the progress."""
    if quiet or not sys.stderr.isatty():
        yield lambda counts: None
        return
    from quire.progress import BatchProgress

    with BatchProgress(total) as bar:
        yield lambda counts: bar.update(counts.completed, counts.tokens)


class _Asker:
    """Sends requests to a server, with retries while it is busy or cannot be reached."""

    def __init__(self, url: str, key: str, cacert: str | None = None) -> None:
        self._headers = [(b"user-agent", b"quire-batch"), (b"content-type", b"application/json")]
        if key:
            self._headers.append((b"authorization", f"Bearer {key}".encode()))
        self._client = HttpClient(Address(url), cacert=cacert, connect_seconds=CONNECT_SECONDS, kept=1 << 20)
        self._told = False  # that the server cannot be reached
        self._answered = time.monotonic()  # when it last answered a request

    async def aclose(self) -> None:
        self._client.break_off()
        await asyncio.sleep(0)

    async def post(self, url: str, body: bytes) -> Answer:
        """The answer to one request.

        Raises:
            BatchError: the server cannot be reached, or refuses the key.
        """
        request = self._client.address.request("POST", url, self._headers, body)
        away, late, patience = 0, 0, 0.125
        while True:
            patience = min(LONGEST_WAIT, 2 * patience)
            status, wait = 0, patience
            try:
                found = await self._client.ask(request)
                try:
                    status, data = found.status, await found.whole(MAX_ANSWER_BYTES)
                finally:
                    self._client.release(found)
            except NoAnswerError as error:
                raise BatchError(f"the server cannot be used: {error}") from error
            except HttpError as error:
                trouble = f"{self._client.address.url}: {error}"
                if not self._told:
                    self._told = True
                    note(f"{trouble}; trying again")
            else:
                if status in (401, 403):
                    raise BatchError(f"the server refuses the API key ({status}); give its key with --api-key")
                late += (is_late := _is_late(status, data))
                if late == LATE_ATTEMPTS or not (is_late or status in BUSY):
                    self._answered = time.monotonic()
                    return Answer(status, found.header(b"x-request-id"), _json(data))
                trouble = f"the server answers {status}"
                with contextlib.suppress(ValueError):
                    wait = min(LONGEST_WAIT, max(wait, float(found.header(b"retry-after"))))
            away = 0 if status == 429 else away + 1
            if away == ATTEMPTS:
                raise BatchError(f"{trouble}, after {ATTEMPTS} attempts")
            if status == 429 and time.monotonic() - self._answered > BUSY_SECONDS:
                raise BatchError(f"{trouble}, and has answered no request for {BUSY_SECONDS:g} s")
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))


def _is_late(status: int, body: bytes) -> bool:
    """Whether a request took longer than a proxy allows (504), or the server (--request-timeout)."""
    return status == 504 or (status == 503 and b'"request_timeout"' in body)


def _json(body: bytes) -> bytes:
    """A response's body as JSON on one line; if it is not JSON, as a JSON string."""
    try:
        return msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.json.encode(body.decode(errors="replace"))


@contextlib.asynccontextmanager
async def _server(model: str, options: list[str]) -> AsyncIterator[tuple[str, str]]:
    """Run a server of this model; yields its URL and its random API key."""
    key = secrets.token_urlsafe(24)
    with tempfile.NamedTemporaryFile("w", suffix=".key") as file:  # readable only by this user
        file.write(key)
        file.flush()
        own = ["--host", "127.0.0.1", "--port", "0", "--log-format", "json", "--no-log-requests"]
        command = [*child.python("quire.cli.main"), "serve", model, *options, *own, "--api-key", f"@{file.name}"]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
            preexec_fn=child.die_with_parent,
        )
        log = cast(asyncio.StreamReader, process.stderr)
        try:
            url = await _ready(log)
            reading = asyncio.create_task(_to_end(log))
            try:
                yield url, key
            finally:
                reading.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), LEAVE_SECONDS)
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _ready(log: asyncio.StreamReader) -> str:
    """A server's URL, read from its log once it accepts requests.

    Raises:
        BatchError: it exited, or takes too long.
    """
    last = "it says nothing"
    try:
        async with asyncio.timeout(READY_SECONDS):
            async for line in log:
                try:
                    said = msgspec.json.decode(line, type=dict[str, Any])
                except BAD_JSON:  # a library's own words
                    said = {"text": line.decode(errors="replace").strip()}
                if said.get("event") == "started":
                    return str(said["url"])
                last = str(said.get("text") or last)
    except TimeoutError:
        raise BatchError(f"the server was not ready within {READY_SECONDS:g} s") from None
    raise BatchError(f"the server has ended: {last.removeprefix('quire: error: ')}")


async def _to_end(log: asyncio.StreamReader) -> None:
    """Read what a server says, so that the pipe never fills."""
    while await log.read(1 << 16):
        pass
