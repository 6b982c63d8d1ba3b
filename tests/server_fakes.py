"""Stand-ins for the server's tests: an engine's client and a tokenizer pool that need neither engine nor model.

Tokens are bytes: the fake tokenizer's ids are the UTF-8 bytes of the text, so it needs no vocabulary, and every text
survives the round trip. The fake engine answers with lower-case letters that depend on prompt, seed and choice only,
so that a test can foretell them (`expected_ids`), and can be told to wait, to fail, or to be in any state.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvicorn.server
import uvloop
from starlette.types import ASGIApp

from quire.core.request import RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.engine.frontend import Prepared
from quire.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.errors import (
    ChatTemplateError,
    EmptyPromptError,
    EngineClosedError,
    PromptTooLongError,
    TokenOutOfRangeError,
)
from quire.ipc.wire import EngineInfo
from quire.server.auth import Tenants
from quire.server.config import ServerConfig
from quire.server.context import AppContext
from quire.server.metrics import Metrics
from quire.server.transport import make_server
from quire.text.known_formats import KNOWN
from quire.text.reply_grammar import ReplyRequest, reply_grammar
from quire.text.reply_syntax import ReplyForm, ReplySyntax
from quire.text.tokenizer import RenderedChat
from quire.tls import ServerCertificate

VOCAB_SIZE = 300


class HurriedAsyncio:
    """asyncio as uvicorn's server sees it in these tests: every tenth of a second it looks whether it shall leave, and
    so whoever ends one would wait for two or three of them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = cast(Any, HurriedAsyncio())


def expected_ids(prompt: Sequence[int], count: int, *, seed: int = 0, choice: int = 0) -> list[int]:
    """The letters that the fake engine answers with when nothing stops it."""
    start = sum(prompt) + seed + 7 * choice
    return [97 + (start + position * 3) % 26 for position in range(count)]


def expected_text(prompt: str, count: int, *, seed: int = 0, choice: int = 0) -> str:
    return bytes(expected_ids(list(prompt.encode()), count, seed=seed, choice=choice)).decode()


def engine_info(**changes: Any) -> EngineInfo:
    """What a ready engine says of itself."""
    fields: dict[str, Any] = {
        "boot": 1,
        "path": "/somewhere/private/demo",
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "kernels": "plain torch",
        "fingerprint": "fp_0123456789abcdef",
        "threads": 1,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 256,
        "eos_token_ids": [0],
        "sampling_defaults": {},
        "num_blocks": 64,
        "block_size": 16,
        "kv_bytes_per_token": 1024,
        "full_length_requests": 4,
        "parameters": 1000,
        "weight_bytes": 2000,
        "notes": [],
        "memory_plan": [("weights", "2 kB"), ("KV", "1 MB")],
        "config": {"model": "demo", "max_model_len": 256, "max_num_seqs": 64},
    }
    return EngineInfo(**fields | changes)


@dataclass
class FakeBoard:
    """The part of `quire.ipc.board.Board` that routes read."""

    phase: tuple[str, int] = ("reading weights", 40)
    pulse: int = 1


@dataclass
class Script:
    """How the fake engine answers one prompt.

    Attributes:
        ids: the tokens, in place of `expected_ids`; all choices get the same ones.
        burst: tokens a yield.
        seconds: the pause before each yield.
        gate: waited for before the yield that would pass `gate_at` tokens.
        fail_at: after that many tokens every choice ends with `finish_reason="error"` and this `error`.
        cached: prompt tokens that are said to have come from the prefix cache.
        raises: raised in place of the first yield.
    """

    ids: list[int] | None = None
    burst: int = 1
    seconds: float = 0.0
    gate: asyncio.Event | None = None
    gate_at: int = 0
    fail_at: int | None = None
    error: str = "the engine gave up on this request"
    cached: int = 0
    raises: Exception | None = None


@dataclass
class Call:
    """One `generate` that the fake engine saw."""

    name: str
    owner: str
    prepared: Prepared
    output: RequestOutput
    tokenize_seconds: float = 0.0
    queue: str = ""
    earlier: int = 0  # tokens that another server had generated
    ended: bool = False  # it came to its end
    aborted: bool = False  # its reader closed it before, or somebody aborted it by name


@dataclass
class FakeEngineClient:
    """`EngineClient` without an engine.

    Attributes:
        script: how prompts are answered; a function of the prompt's tokens may choose.
        calls: every `generate` so far. `open_calls` are those that neither ended nor were aborted.
    """

    state: str = "ready"
    info: EngineInfo | None = field(default_factory=engine_info)
    tokenizer: None = None
    board: FakeBoard | None = field(default_factory=FakeBoard)
    healthy: bool = True
    cause: str | None = None
    draining: bool = False
    folder: Path | None = None
    located: asyncio.Event = field(default_factory=asyncio.Event)
    script: Script | Callable[[list[int]], Script] = field(default_factory=Script)
    calls: list[Call] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    inspected: list[tuple[str, int]] = field(default_factory=list)
    documents: dict[str, Any] = field(default_factory=dict)  # what `inspect` answers, by name
    resets: int = 0

    @classmethod
    def loading(cls) -> FakeEngineClient:
        return cls(state="loading", info=None)

    def _check_ready(self) -> None:
        if self.state != "ready":
            raise EngineClosedError(self.cause or "the model is still loading")

    @property
    def links(self) -> list[Any]:
        boot = self.info.boot if self.info else 1
        return [
            SimpleNamespace(replica=0, state=self.state, boot=boot, info=self.info, healthy=self.healthy, stalled=False)
        ]

    @property
    def open_calls(self) -> list[Call]:
        return [call for call in self.calls if not call.ended and not call.aborted]

    @property
    def num_open(self) -> int:
        return len(self.open_calls)

    async def start(self, on_drain: Callable[[float], None]) -> None:
        self.on_drain = on_drain

    async def close(self) -> None:
        pass

    def prepare(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        bad_words: Sequence[list[int]] = (),
        reply: object = None,
    ) -> Prepared:
        self._check_ready()
        assert self.info is not None
        params.check_against(self.info.vocab_size)
        if not token_ids:
            raise EmptyPromptError("the prompt is empty; give at least one token")
        if not all(0 <= token < self.info.vocab_size for token in token_ids):
            raise TokenOutOfRangeError(
                f"the prompt has the token id {max(token_ids)}; allowed are 0 to {VOCAB_SIZE - 1}"
            )
        room, asked = self.info.max_model_len - len(token_ids), params.max_tokens
        if room < (0 if asked == 0 else 1):
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, but the context holds {self.info.max_model_len}"
            )
        most = room if asked is None else min(asked, room)
        clamped = asked if asked is not None and asked > room else None
        prepared = Prepared(text, token_ids, params, most, list(bad_words), clamped)
        self.prepared.append(prepared)
        return prepared

    async def generate(
        self,
        prepared: Prepared,
        *,
        name: str,
        owner: str = "",
        queue: str = "",
        arrived: float,
        tokenize_seconds: float = 0.0,
        prompt_names: bytes = b"",
        replica: int | None = None,
        earlier: Sequence[RequestUpdate] = (),
        replayed: Callable[[RequestOutput], None] = lambda output: None,
        leaves: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_ready()
        script = self.script(prepared.token_ids) if callable(self.script) else self.script
        output = _empty_output(name, prepared, script.cached)
        call = Call(name, owner, prepared, output, tokenize_seconds, queue=queue)
        self.calls.append(call)
        for update in earlier:
            call.earlier += len(update.tokens)
            for token in update.tokens:
                self._append(output.outputs[update.request], token, prepared.params)
            output.outputs[update.request].finish_reason = update.finish_reason
        if earlier:
            replayed(output.hand_out())
        begun = time.monotonic()
        try:
            if script.raises is not None:
                raise script.raises
            while not output.finished:
                await self._pause(script, len(output.outputs[0].token_ids), call)
                output.begin_deltas()
                if output.metrics.time_to_first_token is None:
                    output.metrics.time_to_first_token = time.monotonic() - begun
                for choice in output.outputs:
                    self._advance(call, choice, script)
                if output.finished:
                    output.metrics.total_seconds = time.monotonic() - begun
                    call.ended = not call.aborted
                yield output.hand_out()
        finally:
            if not call.ended:
                call.aborted = True

    async def _pause(self, script: Script, done: int, call: Call) -> None:
        """Wait as the script says; an abort by name ends the wait."""
        if script.seconds:
            await asyncio.sleep(script.seconds)
        while script.gate is not None and done >= script.gate_at and not script.gate.is_set() and not call.aborted:
            await asyncio.sleep(0.002)

    def _advance(self, call: Call, choice: CompletionOutput, script: Script) -> None:
        """One yield's worth of tokens for one choice, or its end."""
        if choice.finished:
            return
        params, prompt = call.prepared.params, call.prepared.token_ids
        if call.aborted:
            choice.finish_reason = "abort"
            return
        ids = script.ids
        if ids is None:
            ids = expected_ids(prompt, call.prepared.max_tokens, seed=params.seed or 0, choice=choice.index)
        done = len(choice.token_ids)
        most = min(call.prepared.max_tokens, 0 if params.max_tokens == 0 else len(ids))
        for token in ids[done : min(done + script.burst, most)]:
            if script.fail_at is not None and len(choice.token_ids) >= script.fail_at:
                choice.finish_reason, choice.error = "error", script.error
                return
            self._append(choice, token, params)
            if choice.finished:
                return
        if script.fail_at is not None and len(choice.token_ids) >= script.fail_at:
            choice.finish_reason, choice.error = "error", script.error
        elif len(choice.token_ids) >= most:
            choice.finish_reason = "length" if most == call.prepared.max_tokens or most == 0 else "stop"

    def _append(self, choice: CompletionOutput, token: int, params: SamplingParams) -> None:
        choice.token_ids.append(token)
        before, text = choice.text, _text(token)
        choice.text += text
        if choice.logprobs is not None:
            choice.logprobs.append(_logprobs(token, params.logprobs or 0))
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + choice.logprobs[-1][token].logprob
        for stop in params.stop_strings:
            if stop in choice.text:
                end = choice.text.index(stop) + (len(stop) if params.include_stop_str_in_output else 0)
                choice.text = choice.text[:end]
                choice.finish_reason, choice.stop_reason = "stop", stop
        # Text that was handed out and then turned out to be a stop string's head is taken back here; the real
        # engine holds it back instead. Tests that stream use stop strings of one character.
        choice.delta += choice.text[len(before) :]

    async def abort_named(self, name: str, owner: str) -> bool:
        found = [call for call in self.open_calls if (call.name, call.owner) == (name, owner)]
        for call in found:
            call.aborted = True
        return bool(found)

    def end_all(self) -> None:
        for call in self.open_calls:
            call.aborted = True
        self.cause, self.state = "the server is leaving", "failed"

    async def inspect(self, what: str, since: int = 0, replica: int | None = None, seconds: float = 30.0) -> bytes:
        self._check_ready()
        self.inspected.append((what, since))
        return json.dumps(self.documents.get(what, {"what": what, "since": since})).encode()

    async def inspect_all(self, what: str, seconds: float = 1.0) -> dict[int, bytes]:
        try:
            return {0: await asyncio.wait_for(self.inspect(what), seconds)}
        except TimeoutError:
            raise EngineClosedError("the engine did not answer") from None

    async def reset_prefix_cache(self) -> int:
        self.resets += 1
        return 12


def _empty_output(name: str, prepared: Prepared, cached: int) -> RequestOutput:
    params = prepared.params
    choices = [CompletionOutput(index) for index in range(params.n)]
    if params.logprobs is not None:
        for choice in choices:
            choice.logprobs, choice.cumulative_logprob = [], 0.0
    output = RequestOutput(name, prepared.text, prepared.token_ids, choices, seed=params.seed or 0)
    output.cached_tokens = cached
    output.metrics = RequestMetrics()
    if params.prompt_logprobs is not None:
        scored = [_logprobs(token, params.prompt_logprobs) for token in prepared.token_ids[1:]]
        output.prompt_logprobs = [None, *scored]
    return output


def _text(token: int) -> str:
    return chr(token)


def _logprobs(token: int, count: int) -> dict[int, Logprob]:
    """The token itself, then others of falling likelihood."""
    result = {token: Logprob(-0.5, 1, _text(token))}
    for rank in range(2, count + 1):
        other = 97 + (token + rank) % 26
        result.setdefault(other, Logprob(-float(rank), rank, _text(other)))
    return result


@dataclass
class FakeTokenizerPool:
    """`TokenizerPool` without processes: bytes are tokens.

    Attributes:
        seconds: how long each call takes.
        gate: waited for by each call.
        raises: raised by the next calls, e.g. a timeout.
        has_template: without one, `render` says what the real pool would.
        unused: variables that its template does not use.
    """

    seconds: float = 0.0
    gate: asyncio.Event | None = None
    raises: Exception | None = None
    has_template: bool = True
    unused: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)
    reply_syntax: ReplySyntax = KNOWN["hermes"]

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _work(self, what: str) -> None:
        self.calls.append(what)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.gate is not None:
            await self.gate.wait()
        if self.raises is not None:
            raise self.raises

    async def encode(
        self,
        texts: list[str],
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        parse_special: bool = False,
    ) -> list[list[int]]:
        await self._work("encode")
        return [list(text.encode()) for text in texts]

    async def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
        reply: ReplyRequest | None = None,
        max_tokens: int | None = None,
    ) -> RenderedChat:
        await self._work("render")
        if not self.has_template:
            raise ChatTemplateError("this checkpoint has no chat template; use /v1/completions")
        text = "".join(f"<{message['role']}>{message.get('content') or ''}\n" for message in messages)
        if add_generation_prompt:
            text += "<assistant>"
        elif continue_final_message:
            text = text.removesuffix("\n")
        made = reply_grammar(ReplyForm(self.reply_syntax), reply or ReplyRequest())
        unused = {name: "it is not used" for name in variables or {} if name in self.unused}
        return RenderedChat(text, list(text.encode()), made.form, made.structured, made.loosened, unused)

    async def bad_words(self, words: list[str]) -> list[list[int]]:
        await self._work("bad_words")
        return [list(word.encode()) for word in words]

    async def decode(self, ids: list[int]) -> str:
        await self._work("decode")
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    async def token_texts(self, ids: list[int]) -> list[str]:
        await self._work("token_texts")
        return [_text(token) for token in ids]


# -- an app on a port ----------------------------------------------------------------------------------------


def app_context(
    client: FakeEngineClient | None = None,
    pool: FakeTokenizerPool | None = None,
    *,
    model_names: tuple[str, ...] = ("demo",),
    **options: Any,
) -> AppContext:
    """What an app is made of, with fakes for what would need a model. `options` are fields of `ServerConfig`."""
    server = ServerConfig(**options)
    context = AppContext(
        server=server,
        client=cast(Any, client or FakeEngineClient()),
        metrics=Metrics(),
        model_names=model_names,
        tenants=Tenants(server.api_key, server.metrics_key),
        engine_options={"model": "demo", "max_model_len": None, "max_num_seqs": 64},
        origins={"model": "flag", "api_key": "file"},
    )
    context.pool = cast(Any, pool or FakeTokenizerPool())
    return context


class AppThread:
    """An app on a real server and a free port, in a thread of its own with uvloop; to be used with `with`.

    Attributes:
        port: where it listens, on 127.0.0.1. url: the same for clients.
        certificate: with one it speaks https. listener: in place of a port of its own.
        at_end: what the app needs when it has served, by itself or since it was told to end.
    """

    def __init__(
        self,
        app: Callable[[], ASGIApp],
        at_end: Callable[[], Awaitable[None]] | None = None,
        certificate: ServerCertificate | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._make_app = app
        self._at_end = at_end
        self._certificate = certificate
        self._socket = listener or socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._socket.getsockname()[1]) if listener is None else 0
        self.url = f"{'http' if certificate is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._up = threading.Event()

    def __enter__(self) -> AppThread:
        self._thread.start()
        assert self._up.wait(60), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not end"

    def call(self, work: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
        """Run something on the server's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    @property
    def num_tasks(self) -> int:
        """Requests that are being answered."""
        return len(self.server.server_state.tasks)

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.server = make_server(self._make_app(), graceful_seconds=1, certificate=self._certificate)
            serving = asyncio.create_task(self.server.serve(sockets=[self._socket]))
            while not self.server.started and not serving.done():
                await asyncio.sleep(0.005)
            self._up.set()
            await serving
            if self._at_end is not None:
                await self._at_end()

        uvloop.run(serve())


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
