"""One HTTP process's end of the wire: requests to the engine, growing outputs back, across the engine's restarts.

Everything runs on one event loop. The supervisor says which engine is up; its requests go there. When it dies, the
open ones wait and are sent to the next one with the tokens that they have, so their streams go on where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.engine.frontend import Frontend, Prepared
from quire.engine.outputs import RequestOutput
from quire.engine.streams import Streams
from quire.errors import EngineClosedError
from quire.ipc import wire
from quire.ipc.board import Board
from quire.ipc.channel import Channel
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

STALL_SECONDS = 8.0
"""An engine whose pulse stands still for so long is not healthy."""

PULSE_INTERVAL = 1.0
ANSWER_SECONDS = 30.0
"""A question to the engine waits at most so long: a step may be in the way."""

State = Literal["loading", "ready", "restarting", "failed"]


@dataclass(slots=True)
class _Origin:
    """Where a request came from, for the engine's books."""

    name: str
    owner: str
    arrived: float
    tokenize_seconds: float
    suspect: bool = False


class EngineClient:
    """Talks to a server's engine, whichever one is up.

    Args:
        directory: the server's private folder.
        worker: this process's index, unique in the life of the server.

    Attributes:
        state: of the engine. cause: why the last one died.
        info: of the engine that is ready, or was last.
        board: the present engine's, once it has one.
        draining: no new requests are taken.
        located: set as soon as `folder`, the checkpoint's, is known.
    """

    def __init__(self, directory: Path, worker: int) -> None:
        self.state: State = "loading"
        self.cause: str | None = None
        self.info: wire.EngineInfo | None = None
        self.board: Board | None = None
        self.draining = False
        self.located = asyncio.Event()
        self.folder: Path | None = None
        self._directory, self._worker = directory, worker
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._name = f"http-{worker}"
        self._control: Channel | None = None
        self._engine: Channel | None = None
        self._frontend: Frontend | None = None
        self._streams = Streams()
        self._outbox: list[Request] = []
        self._origins: dict[int, _Origin] = {}
        self._numbers: dict[str, list[int]] = {}  # by the output's id
        self._tickets = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulse = (-1, time.monotonic())
        self._boot = 0
        self._ended = False

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self, on_drain: Callable[[float], None]) -> None:
        """Say hello to the supervisor, and listen from now on. `on_drain` gets the seconds that are left."""
        orders: asyncio.Queue[bytes] = asyncio.Queue()
        self._control = Channel(self._context, wire.control_address(self._directory), self._name, orders.put_nowait)
        self._control.send(wire.encode(wire.Hello(self._worker, os.getpid())))
        self._run(self._follow_supervisor(orders, on_drain))
        self._run(self._watch_pulse())

    async def close(self) -> None:
        """Leave. Open requests are left as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in (self._control, self._engine):
            if channel is not None:
                channel.close()
        self._context.destroy(linger=0)

    @property
    def healthy(self) -> bool:
        """The engine is ready and shows signs of life."""
        return self.state == "ready" and time.monotonic() - self._pulse[1] < STALL_SECONDS

    @property
    def num_open(self) -> int:
        """Prompts that have not finished."""
        return len(self._numbers)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's, if it has one; once the engine is ready."""
        return self._ready().tokenizer

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the engine's client failed", exc_info=task.exception())

    # -- requests ------------------------------------------------------------------------------------------

    def prepare(
        self, text: str | None, token_ids: list[int], params: SamplingParams, bad_words: list[list[int]] | None = None
    ) -> Prepared:
        """Check a tokenized prompt against the model.

        Raises:
            RequestError: one of its kinds.
            EngineClosedError: no engine has been ready yet.
        """
        return self._ready().check(text, token_ids, params, bad_words or [])

    async def generate(
        self, prepared: Prepared, *, name: str, owner: str = "", arrived: float, tokenize_seconds: float = 0.0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a prepared prompt; hands out its output whenever it has grown. Closing this early aborts it.

        Args:
            name: the id that the client sees.
            owner: the tenant. Tenants share no cached prefixes.
            arrived: when the call came in, on the monotonic clock.

        Raises:
            EngineClosedError: there is no engine to run it.
        """
        frontend = self._ready()
        output = frontend.submit(prepared, tenant=owner)
        requests, self._outbox = self._outbox, []
        for request in requests:
            self._origins[request.id] = _Origin(name, owner, arrived, tokenize_seconds)
        self._numbers[output.request_id] = [request.id for request in requests]
        self._send_all(requests)
        try:
            async with contextlib.aclosing(self._streams.follow(output, frontend, lambda: None)) as stream:
                async for grown in stream:
                    yield grown
        finally:
            for number in self._numbers.pop(output.request_id):
                del self._origins[number]
                self._post(wire.Told(number, output.metrics.detokenize_seconds))

    def end_all(self) -> None:
        """The server leaves: open requests end with what they have (finish reason "abort"), and none begins any more.

        The engine is not asked, since it may be wedged or on its way up; it leaves too.
        """
        self._ended = True
        if self._frontend is not None:
            self._streams.wake(self._frontend.end_all("abort"))

    def _add(self, request: Request) -> None:
        """The frontend's door: requests are sent when their origin is known."""
        self._outbox.append(request)

    def _abort(self, number: int, reason: str) -> list[RequestUpdate]:
        self._post(wire.Abort(number, reason))
        return []

    def _send_all(self, requests: list[Request]) -> None:
        """To the engine that is up; where none is, they go to the next one."""
        if self.state == "ready":
            for request in requests:
                self._post(_message(request, self._origins[request.id]))

    def _ready(self) -> Frontend:
        if self._ended:
            raise EngineClosedError("the server is leaving")
        if self._frontend is None or self.state == "failed":
            raise EngineClosedError(self.cause or "the model is still loading")
        return self._frontend

    def _post(self, message: wire.ToEngine) -> None:
        """Tell the engine; a message to one that is gone is void."""
        if self._engine is not None:
            self._engine.send(wire.encode(message))

    # -- questions -----------------------------------------------------------------------------------------

    async def abort_named(self, name: str, owner: str) -> bool:
        """End the response with this name, wherever in the server it is served; False if there is none."""
        return bool(msgspec.json.decode(await self._ask(lambda ticket: wire.AbortNamed(ticket, name, owner))))

    async def inspect(self, what: Literal["live", "requests", "steps", "stats"], since: int = 0) -> bytes:
        """One of the recorder's documents, as JSON."""
        return await self._ask(lambda ticket: wire.Inspect(ticket, what, since))

    async def reset_prefix_cache(self) -> int:
        """Forget cached blocks that no request uses; how many they were."""
        return int(msgspec.json.decode(await self._ask(wire.ResetPrefixCache)))

    async def _ask(self, question: Callable[[int], wire.ToEngine]) -> bytes:
        """The engine's answer.

        Raises:
            EngineClosedError: there is no engine, or it did not answer, or it is stuck: then nothing is asked, or
                questions would pile up.
        """
        if self.state != "ready":
            raise EngineClosedError(self.cause or "the model is still loading")
        if not self.healthy:
            raise EngineClosedError(f"the engine has shown no sign of life for {STALL_SECONDS:g} s")
        ticket = next(self._tickets)
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        self._post(question(ticket))
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            raise EngineClosedError(f"the engine did not answer within {ANSWER_SECONDS:g} s") from None
        finally:
            del self._answers[ticket]

    # -- listening -----------------------------------------------------------------------------------------

    def _hear_engine(self, payload: bytes) -> None:
        message = wire.decode_from_engine(payload)
        if isinstance(message, wire.Reply):
            answer = self._answers.get(message.ticket)
            if answer is not None and not answer.done():
                answer.set_result(message.value)
        elif self._frontend is not None:
            for update in message.updates:
                origin = self._origins.get(update.request)
                if origin is not None and update.tokens:
                    origin.suspect = False
            self._streams.wake(self._frontend.absorb(message.updates))

    async def _follow_supervisor(self, orders: asyncio.Queue[bytes], on_drain: Callable[[float], None]) -> None:
        while True:
            payload = await orders.get()
            try:
                message = wire.decode_from_supervisor(payload)
                if isinstance(message, wire.Drain):
                    self.draining = True
                    on_drain(message.seconds)
                elif isinstance(message, wire.EngineState):
                    await self._take_state(message)
            except Exception:
                logger.exception("a message of the supervisor cannot be handled")

    async def _take_state(self, message: wire.EngineState) -> None:
        if message.path is not None and not self.located.is_set():
            self.folder = Path(message.path)
            self._tokenizer = asyncio.create_task(asyncio.to_thread(Tokenizer.load_if_present, self.folder))
            self.located.set()
        if message.boot != self._boot:
            self._boot = message.boot
            self.board = Board(wire.board_path(self._directory, message.boot))
            self._pulse = (-1, time.monotonic())
        self.cause = message.cause or self.cause
        if message.state in ("restarting", "failed"):
            self._lose_engine(message)
        if message.state == "ready" and message.info is not None and self._engine is None:
            await self._take_engine(message.info)
            self.state = "ready"
            self._resume()
        self.state = message.state

    async def _take_engine(self, info: wire.EngineInfo) -> None:
        self.info = info
        if self._frontend is None:
            self._frontend = Frontend(
                tokenizer=await self._tokenizer,
                vocab_size=info.vocab_size,
                max_model_len=info.max_model_len,
                eos_token_ids=info.eos_token_ids,
                defaults=info.sampling_defaults,
                add=self._add,
                abort=self._abort,
                first_number=self._worker << wire.WORKER_SHIFT,
            )
        address = wire.engine_address(self._directory, info.boot)
        self._engine = Channel(self._context, address, self._name, self._hear_engine)

    def _lose_engine(self, message: wire.EngineState) -> None:
        """The engine died. What it was asked is void; its requests wait for the next one."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineClosedError("the engine died before it answered"))
        if self._frontend is None:
            return
        if message.state == "failed":
            self._streams.wake(self._frontend.end_all("error", f"the engine is gone: {self.cause}"))
            return
        if message.culprit in self._origins:
            text = f"this request brought the engine down twice ({message.cause}); it is ended"
            self._end(message.culprit, text)
        elif message.culprit is None:
            for number in message.suspects:
                if number in self._origins:
                    self._origins[number].suspect = True

    def _end(self, number: int, error: str) -> None:
        if self._frontend is not None:
            update = RequestUpdate(number, finish_reason="error", error=error)
            self._streams.wake(self._frontend.absorb([update]))

    def _resume(self) -> None:
        """Give the new engine what the old one left."""
        if self._frontend is None:
            return
        requests, ended = self._frontend.resume()
        self._streams.wake(ended)
        requests = [request for request in requests if request.id in self._origins]
        if requests:
            logger.info("%d open requests go on", len(requests))
        self._send_all(requests)

    async def _watch_pulse(self) -> None:
        while True:
            pulse = -1 if self.board is None else self.board.pulse
            if pulse != self._pulse[0]:
                self._pulse = (pulse, time.monotonic())
            await asyncio.sleep(PULSE_INTERVAL)


def _message(request: Request, origin: _Origin) -> wire.Add:
    return wire.Add(
        number=request.id,
        name=origin.name,
        owner=origin.owner,
        prompt_token_ids=request.tokens[: request.num_prompt],
        params=request.params,
        max_tokens=request.max_tokens,
        choice=request.choice,
        stop_token_ids=sorted(request.stop_token_ids),
        bad_words=request.bad_words,
        scope=request.scope,
        arrived=origin.arrived,
        tokenize_seconds=origin.tokenize_seconds,
        output_token_ids=request.tokens[request.num_prompt :],
        num_scored=request.num_scored,
        suspect=origin.suspect,
    )
