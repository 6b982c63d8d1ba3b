"""An HTTP process's client of the engines: sends requests, receives outputs, and survives the death of an engine.

Everything runs on one event loop. The supervisor reports the state of each replica. When an engine dies, its open
requests continue on another replica immediately, or on the replica's next engine, after the tokens that they have; so
their streams continue where they stopped. A server with one engine has one replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
from blake3 import blake3

from quire.core.pooling import PoolingParams
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.engine.frontend import Frontend, Prepared
from quire.engine.outputs import RequestOutput
from quire.engine.streams import Streams
from quire.errors import EngineClosedError
from quire.ipc import wire
from quire.ipc.board import Board
from quire.ipc.channel import Channel
from quire.ipc.link import ANSWER_SECONDS, LOOK_SECONDS, STALL_SECONDS, EngineLink, State
from quire.ipc.placement import Place, Placement
from quire.text.reply_syntax import ReplyForm
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""After this long a message of the supervisor is handled again, if that failed for lack of files or memory."""
Document = Literal["live", "requests", "steps", "stats", "prompts"]


@dataclass(slots=True)
class _Origin:
    """What an engine is told about a request besides the `Request`, see `wire.Add`.

    Attributes:
        link: the replica that has the request, or had it last.
        moved: it left a replica that hung, and has had no token since.
    """

    name: str
    owner: str
    arrived: float
    tokenize_seconds: float
    suspect: bool = False
    link: EngineLink | None = None
    prompt_names: bytes = b""
    moved: bool = False


class EngineClient:
    """The client of a server's engines.

    Args:
        directory: the server's private folder.
        worker: this process's index, unique for the lifetime of the server.
        replicas: number of the server's engines. workers: number of its HTTP processes.

    Attributes:
        links: the connection to each replica.
        cause: why the last engine died.
        draining: no new requests are accepted.
        located: set as soon as the checkpoint's `folder` is known.
    """

    def __init__(self, directory: Path, worker: int, replicas: int = 1, workers: int = 1) -> None:
        self.cause: str | None = None
        self.draining = False
        self.located = asyncio.Event()
        self.folder: Path | None = None
        self._directory, self._worker = directory, worker
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._name = f"http-{worker}"
        self.links = [EngineLink(self._context, directory, self._name, each, self._hear) for each in range(replicas)]
        key = blake3(os.fsencode(directory)).digest()  # its name is random and secret
        self._placement = Placement(self.links, key, workers == 1)
        self._control: Channel | None = None
        self._frontend: Frontend | None = None
        self._streams = Streams()
        self._outbox: list[Request] = []
        self._origins: dict[int, _Origin] = {}
        self._waiting: dict[int, EngineLink | None] = {}  # for which replica a request waits; None: for any
        self._numbers: dict[str, list[int]] = {}  # by the output's id
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self, on_drain: Callable[[float], None]) -> None:
        """Register with the supervisor, and handle its messages. `on_drain` is called with the drain timeout."""
        orders: asyncio.Queue[bytes] = asyncio.Queue()
        self._control = Channel(self._context, wire.control_address(self._directory), self._name, orders.put_nowait)
        self._control.send(wire.encode(wire.Hello(self._worker, os.getpid())))
        self._run(self._follow_supervisor(orders, on_drain))
        self._run(self._watch_pulses())

    async def close(self) -> None:
        """Disconnect. Open requests are not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._control is not None:
            self._control.close()
        for link in self.links:
            link.close()
        self._context.destroy(linger=0)

    @property
    def state(self) -> State:
        """The best state of any replica."""
        states = {link.state for link in self.links}
        best: tuple[State, ...] = ("ready", "restarting", "loading", "failed")
        return next(state for state in best if state in states)

    @property
    def info(self) -> wire.EngineInfo | None:
        """The description of an engine that is ready, or was last. What requests depend on is the same for all."""
        return next((link.info for link in self._best_first() if link.info is not None), None)

    @property
    def board(self) -> Board | None:
        """The board of an engine that is ready, or is likely to be ready next."""
        return self._best_first()[0].board

    @property
    def healthy(self) -> bool:
        """Whether any engine is ready and shows signs of life."""
        return any(link.healthy for link in self.links)

    @property
    def num_open(self) -> int:
        """Number of prompts that have not finished."""
        return len(self._numbers)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, if it has one. Raises EngineClosedError if no engine has been ready yet."""
        return self._ready().tokenizer

    def _best_first(self) -> list[EngineLink]:
        order = ("ready", "loading", "restarting", "failed")
        return sorted(self.links, key=lambda link: (not link.healthy, order.index(link.state)))

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
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        bad_words: list[list[int]] | None = None,
        reply: ReplyForm | None = None,
    ) -> Prepared:
        """Check a tokenized prompt against the model; `reply`: for a chat, the form of the reply.

        Raises:
            RequestError: one of its kinds.
            EngineClosedError: no engine has been ready yet.
        """
        return self._ready().check(text, token_ids, params, bad_words or [], reply)

    def pooled(self, prompt: Prepared, pooling: PoolingParams) -> Prepared:
        """See `Frontend.pooled`."""
        return self._ready().pooled(prompt, pooling)

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
        replayed: Callable[[RequestOutput], None] | None = None,
        leaves: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a prepared prompt; yields its output whenever it has grown. Closing this early aborts it.

        Args:
            name: the id that the client sees.
            owner: the tenant. Tenants share no cached prefixes.
            queue: who takes turns with others.
            arrived: when the call arrived, on the monotonic clock.
            prompt_names: see `wire.Add`.
            replica: number of the replica to run it on, if that is healthy; None: the one where it costs least.
            earlier: what another server has generated, see `Frontend.submit`. replayed: called with the output when
                it has that and nothing more.
            leaves: another server can take the request over, so that it does not wait for an engine that hangs.

        Raises:
            EngineClosedError: there is no engine to run it, or it `leaves` one that hangs.
        """
        frontend = self._ready()
        output = frontend.submit(prepared, tenant=owner, queue=queue, earlier=earlier)
        requests, self._outbox = self._outbox, []
        if earlier and replayed is not None:
            replayed(output)
        if not requests:
            yield frontend.hand_out(output)
            return
        for request in requests:
            self._origins[request.id] = _Origin(name, owner, arrived, tokenize_seconds)
        self._origins[requests[0].id].prompt_names = prompt_names
        self._numbers[output.request_id] = [request.id for request in requests]
        named = self.links[replica] if replica is not None and self.links[replica].healthy else None
        self._place(requests, self._chosen(requests[0], named))  # the choices share the prompt's blocks
        try:
            check = functools.partial(self._check_stalled, [request.id for request in requests] if leaves else [])
            async with contextlib.aclosing(self._streams.follow(output, frontend, check)) as stream:
                async for grown in stream:
                    yield grown
        finally:
            for number in self._numbers.pop(output.request_id):
                link = self._origins.pop(number).link
                if link is not None:
                    link.send(wire.Told(number, output.metrics.detokenize_seconds))

    def _check_stalled(self, numbers: Iterable[int]) -> None:
        """Raises EngineClosedError if one of these requests is at an engine that hangs."""
        if any((link := self._origins[number].link) is not None and link.stalled for number in numbers):
            raise EngineClosedError(f"the engine has shown no sign of life for {STALL_SECONDS:g} s")

    def end_all(self) -> None:
        """The server shuts down: open requests end with what they have (finish reason "abort"), new ones are refused.

        The engines, which may hang or be loading, are not involved; they exit, too.
        """
        self._ended = True
        if self._frontend is not None:
            self._streams.wake(self._frontend.end_all("abort"))

    def _add(self, request: Request) -> None:
        """Called by the frontend. `generate` sends the requests once their origin is recorded."""
        self._outbox.append(request)

    def _abort(self, number: int, reason: str) -> list[RequestUpdate]:
        origin = self._origins.get(number)
        if origin is not None and origin.link is not None:
            origin.link.send(wire.Abort(number, reason))
        return []

    def _chosen(self, request: Request, among: EngineLink | None = None) -> Place | None:
        """Choose a replica for a request; None if no engine is ready. `among`: the only one allowed."""
        able = [link for link in ([among] if among else self.links) if link.state == "ready"]
        able = [link for link in able if not link.stalled] or able
        return self._placement.choose(request, able) if able else None

    def _place(self, requests: Iterable[Request], place: Place | None) -> None:
        """Send requests to a replica; with None, they wait until an engine is ready."""
        for request in requests:
            if place is None:
                self._waiting[request.id] = None
                continue
            link, origin = place.link, self._origins[request.id]
            origin.link = link
            link.requests.add(request.id)
            self._placement.sent(request.id, place)
            link.send(_message(request, origin))
            place = Place(link, 1)  # the prompt's other choices share its blocks

    def _ready(self) -> Frontend:
        if self._ended:
            raise EngineClosedError("the server is leaving")
        if self._frontend is None or self.state == "failed":
            raise EngineClosedError(self.cause or "the model is still loading")
        return self._frontend

    # -- questions -----------------------------------------------------------------------------------------

    async def abort_named(self, name: str, owner: str) -> bool:
        """End the response with this name, whichever HTTP process serves it; False if there is none."""
        answers = await self._ask_all(lambda ticket: wire.AbortNamed(ticket, name, owner))
        return any(msgspec.json.decode(answer) for answer in answers.values())

    async def inspect(
        self, what: Document, since: int = 0, replica: int | None = None, seconds: float = ANSWER_SECONDS
    ) -> bytes:
        """One of the recorder's documents, as JSON, from the given replica, or by default from one that is ready.

        Raises:
            EngineClosedError: it does not answer within this many seconds, or there is none.
        """
        link = self._best_first()[0] if replica is None else self.links[replica]
        return (await self._ask_all(lambda ticket: wire.Inspect(ticket, what, since), [link], seconds))[link.replica]

    async def inspect_all(self, what: Document, seconds: float = ANSWER_SECONDS) -> dict[int, bytes]:
        """The same from each replica that answers within this many seconds.

        Raises:
            EngineClosedError: none does.
        """
        return await self._ask_all(lambda ticket: wire.Inspect(ticket, what), seconds=seconds)

    async def life(self, name: str) -> list[Any]:
        """How the time of each choice of a response was spent, from all engines that know it.

        Raises:
            EngineClosedError: none answers.
        """
        answers = await self._ask_all(lambda ticket: wire.Life(ticket, name))
        return [each for answer in answers.values() for each in msgspec.json.decode(answer)]

    async def reset_prefix_cache(self) -> int:
        """Evict cached blocks that no request uses; returns their number."""
        for link in self.links:
            self._placement.lost_cache(link)
        answers = await self._ask_all(wire.ResetPrefixCache)
        return sum(int(msgspec.json.decode(answer)) for answer in answers.values())

    async def _ask_all(
        self,
        question: Callable[[int], wire.ToEngine],
        links: Sequence[EngineLink] = (),
        seconds: float = ANSWER_SECONDS,
    ) -> dict[int, bytes]:
        """The engines' answers by replica. By default all healthy ones are asked.

        Raises:
            EngineClosedError: none answers.
        """
        asked = links or [link for link in self.links if link.healthy] or self._best_first()[:1]
        if all(link.state != "ready" for link in asked):
            raise EngineClosedError(self.cause or "the model is still loading")
        answers = await asyncio.gather(*(link.ask(question, seconds) for link in asked), return_exceptions=True)
        found = {link.replica: each for link, each in zip(asked, answers, strict=True) if isinstance(each, bytes)}
        for error in answers if not found else ():
            if isinstance(error, BaseException):
                raise error
        return found

    # -- listening -----------------------------------------------------------------------------------------

    def _hear(self, link: EngineLink, message: wire.Updates) -> None:
        if self._frontend is None:
            return
        updates = [update for update in message.updates if update.request in link.requests]  # others have left it
        for update in updates:
            origin = self._origins.get(update.request)
            if origin is not None and update.tokens:
                origin.suspect = origin.moved = False
            if update.finish_reason is not None:
                link.requests.discard(update.request)
            self._placement.heard(update)
        self._streams.wake(self._frontend.absorb(updates))

    async def _follow_supervisor(self, orders: asyncio.Queue[bytes], on_drain: Callable[[float], None]) -> None:
        while True:
            payload = await orders.get()
            try:
                message = wire.decode_from_supervisor(payload)
                while not await self._followed(message, on_drain):
                    await asyncio.sleep(AGAIN_SECONDS)
            except Exception:
                logger.exception("a message of the supervisor cannot be handled")

    async def _followed(self, message: wire.FromSupervisor, on_drain: Callable[[float], None]) -> bool:
        """Handle a message of the supervisor; False if files or memory are lacking for that now. It must not be lost,
        since then a new engine would never be asked.
        """
        try:
            if isinstance(message, wire.Drain):
                self.draining = True
                on_drain(message.seconds)
            elif isinstance(message, wire.EngineState):
                await self._take_state(self.links[message.replica], message)
        except (OSError, zmq.ZMQError) as error:
            logger.error("a message of the supervisor cannot be handled yet: %s", error)
            return False
        return True

    async def _take_state(self, link: EngineLink, message: wire.EngineState) -> None:
        if message.path is not None and not self.located.is_set():
            self.folder = Path(message.tokenizer or message.path)
            self._tokenizer = asyncio.create_task(asyncio.to_thread(Tokenizer.load_if_present, self.folder))
            self.located.set()
        link.begin(message.boot)
        self.cause = message.cause or self.cause
        if message.state in ("restarting", "failed"):
            link.state = message.state
            self._lose(link, message)
        if message.state == "ready" and message.info is not None and not link.is_open:
            await self._make_frontend(message.info)
            link.open(message.info)
            self._placement.opened(link)
            self._resume()
        link.state = message.state

    async def _make_frontend(self, info: wire.EngineInfo) -> None:
        """Create the frontend, with what the first engine reports."""
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
                causal=info.causal,
            )

    def _lose(self, link: EngineLink, message: wire.EngineState) -> None:
        """An engine died: its requests continue on other replicas.

        If it was not killed from outside, the requests of its last step may kill the next engine, too: they wait for
        the same replica's next engine, if there will be one.
        """
        self._placement.lost(link)
        lost = link.lose()
        if self._frontend is None:
            return
        if self.state == "failed":
            self._streams.wake(self._frontend.end_all("error", f"the engine is gone: {self.cause}"))
            return
        suspects = set(message.suspects) if message.culprit is None else set()
        for number in suspects & self._origins.keys():
            self._origins[number].suspect = True
        stays = suspects if message.state == "restarting" and not message.killed else set()
        self._waiting |= {number: link if number in stays else None for number in lost}
        if message.state == "failed":
            self._waiting = {number: None if at is link else at for number, at in self._waiting.items()}
        if message.culprit in self._origins:
            self._end(message.culprit, f"this request brought the engine down twice ({message.cause}); it is ended")
        self._resume()

    def _end(self, number: int, error: str) -> None:
        if self._frontend is not None:
            update = RequestUpdate(number, finish_reason="error", error=error)
            self._streams.wake(self._frontend.absorb([update]))

    def _resume(self) -> None:
        """Send waiting requests to engines that are ready now; they continue after the tokens that they have."""
        ready = [link for link in self.links if link.state == "ready"]
        able = {number for number, at in self._waiting.items() if (at in ready if at else ready)}
        if self._frontend is None or not able:
            return
        requests, ended = self._frontend.resume(able)
        self._streams.wake(ended)
        requests = [request for request in requests if request.id in self._origins]
        if requests:
            logger.info("open requests that go on: %d", len(requests))
        for request in requests:
            self._place([request], self._chosen(request, self._waiting[request.id]))
        for number in able:
            del self._waiting[number]

    async def _watch_pulses(self) -> None:
        while True:
            for link in self.links:
                link.look()
                if link.stalled and link.requests:
                    self._leave(link)
            await asyncio.sleep(LOOK_SECONDS)

    def _leave(self, link: EngineLink) -> None:
        """An engine hangs: its requests go on at other replicas at once. It is restarted later.

        A request may be why it hangs. So one that has come here like that, and has had no token since, stays, and is
        tried alone by the next engine. Requests that other servers can take over end here; see `generate`.
        """
        moved = {number for number in link.requests & self._origins.keys() if not self._origins[number].moved}
        if moved and any(other.state == "ready" and other.healthy for other in self.links):
            logger.warning("replica %d hangs; requests that go on elsewhere: %d", link.replica, len(moved))
            for number in moved:
                link.send(wire.Abort(number, "abort"))
                link.requests.discard(number)
                self._origins[number].moved = True
            self._placement.left(link, moved)
            self._waiting |= dict.fromkeys(moved)
            self._resume()
        self._streams.wake_all()


def _message(request: Request, origin: _Origin) -> wire.Add:
    return wire.Add(
        number=request.id,
        name=origin.name,
        owner=origin.owner,
        queue=request.owner,
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
        pooling=request.pooling,
        reasoning=request.reasoning,
        suspect=origin.suspect,
        prompt_names=origin.prompt_names,
    )
