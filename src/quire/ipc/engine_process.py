"""The engine as a separate process: `python -m quire.ipc.engine_process`, started by a server's supervisor.

Its loop receives messages of HTTP processes, runs a step, and sends each process the updates of its requests.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import zmq

from quire import child, log
from quire.config import EngineConfig
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan, StepResult
from quire.errors import INVALID, QuireError, RankLostError, RequestError
from quire.fleet.cached_prompts import CachedPrompts
from quire.ipc import wire
from quire.ipc.board import NUM_IN_STEP, NUM_OPEN, PATIENCE, PULSE, START_SECONDS, Board
from quire.models.hub import resolve, tokenizer_folder
from quire.text.tokenizer_trial import TokenizerTrial

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.kv.wire import Want

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 1000
"""Timeout of an idle engine's poll, so that its pulse continues."""

DOWNLOAD_SECONDS = 7 * 24 * 3600
"""Patience while a checkpoint may be downloaded, which gives no sign of life."""

WAIT_POLL_MS = 20
"""Timeout of the poll of an engine that waits for blocks from elsewhere, whose deadlines it must check."""

PREFILL_WORKER = (1 << 22) - 1
"""Stands for the worker index in the numbers of requests whose prompts are computed for other engines."""

STATISTICS_INTERVAL = 10.0
"""Seconds between two log lines with statistics, while there is work."""


class EngineStart(msgspec.Struct, kw_only=True):
    """The supervisor's message to an engine, on its standard input.

    Attributes:
        directory: the server's private folder.
        replica: number of its replica. boot: its number among that replica's engines.
        config: fields of `EngineConfig`.
        sharers: number of engines that share the machine's cores. neighbours: see `Engine`.
        fault: a fault to inject, see `faults.py`.
    """

    directory: str
    replica: int = 0
    boot: int
    config: dict[str, Any]
    sharers: int = 1
    neighbours: int = 0
    log_format: Literal["text", "json"] = "text"
    debug: bool = False
    fault: str | None = None

    @property
    def name(self) -> str:
        """See `wire.engine_name`."""
        return wire.engine_name(self.replica, self.boot)


class EngineProcess:
    """The engine, its sockets and its board. As the engine's observer it passes each step on to board and recorder.

    A request that was in the step in which an earlier engine died is a suspect. Suspects run first, one at a time and
    alone (on probation), and are cleared by their next token. All other requests wait outside the engine until then, so
    if the engine dies again, the one on probation is to blame.

    An error in handling one message or request affects nothing else. An error in the loop itself ends the engine, whose
    state is unknown then; the supervisor starts another one.
    """

    def __init__(self, start: EngineStart, board: Board, control: zmq.Socket[bytes]) -> None:
        self._start, self._board, self._control = start, board, control
        self._board.set_phase("importing torch", 0.0)
        from quire.engine.recorder import Recorder
        from quire.ipc.patience import Patience

        self._recorder = Recorder()
        self._numbers: dict[int, int] = {}  # the wire's number to the engine's
        self._requests: dict[int, Request] = {}  # by the engine's number
        self._adds: dict[int, wire.Add] = {}  # the same
        self._outside: dict[int, wire.Add] = {}  # by the wire's number: suspects, and who waits for them
        self._on_probation: int | None = None  # the wire's number
        self._in_flight: deque[tuple[list[int], float]] = deque()  # of each step: requests (wire numbers), patience
        self._gone: set[int] = set()  # HTTP processes that died; their messages may still arrive
        self._next_id = 0
        self._stopping = False
        self.engine = self._load()
        self._prompts = CachedPrompts(f"{start.boot}.{os.getpid()}")
        self.engine.tiers.follow(self._prompts.gone)
        self._patience = Patience(self.engine.model, self.engine.device.asynchronous)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # never drop: the queue is bounded by the requests' outputs
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(wire.engine_address(Path(start.directory), start.replica, start.boot))
        gc.collect()
        gc.freeze()  # these objects stay, and scanning them would sometimes stop the engine for 80 ms
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(control, zmq.POLLIN)
        if self.engine.tiers.mailbox is not None:
            self._poller.register(self.engine.tiers.mailbox, zmq.POLLIN)
        self.engine.wait_seconds = 0.0  # the poller waits instead
        self._last_statistics = (time.monotonic(), self._recorder.stats(self.engine))

    def _load(self) -> Engine:
        config = EngineConfig(**self._start.config)
        self._board.set_phase("finding the checkpoint", 0.0)
        self._board.fields[PATIENCE] = DOWNLOAD_SECONDS
        path = resolve(config.model, config.revision)
        config = config.at(path, tokenizer := tokenizer_folder(config, path))
        self._board.fields[PATIENCE] = START_SECONDS
        with TokenizerTrial(tokenizer) as trial:
            trial.check()  # HTTP processes will load it as soon as they know the folder
        self._control.send(wire.encode(wire.Located(config.model, config.tokenizer)))
        from quire.engine.engine import Engine
        from quire.ops.threads import usable_threads

        if config.threads is None and self._start.sharers > 1:
            config = replace(config, threads=max(1, usable_threads() // (self._start.sharers * config.num_ranks)))
        engine = Engine(config, self._board.set_phase, self, neighbours=self._start.neighbours)
        for cache in (*engine.kv_cache, engine.kv_cache[0].draft_kv):
            if cache is not None:
                cache.pulse = self._board.fields  # PULSE is field 0
        if self._start.fault is not None:
            from quire.ipc.faults import FaultyExecutor

            engine.executor = FaultyExecutor(engine.executor, self._start.fault)
        return engine

    def info(self) -> wire.EngineInfo:
        """The engine's description, for the other processes."""
        from quire.engine import fingerprint

        engine, plan, model = self.engine, self.engine.memory_plan, self.engine.model
        return wire.EngineInfo(
            boot=self._start.boot,
            path=str(engine.path),
            architecture=model.architecture,
            dtype=str(model.dtype).removeprefix("torch."),
            kernels=model.kernels.describe(model.dtype),
            fingerprint=fingerprint.system(engine.fingerprint),
            threads=engine.threads,
            vocab_size=model.vocab_size,
            max_model_len=engine.max_model_len,
            eos_token_ids=list(model.eos_token_ids),
            sampling_defaults=engine.sampling_defaults,
            num_blocks=plan.num_usable,
            block_size=plan.block_size,
            kv_bytes_per_token=plan.kv_bytes_per_token,
            full_length_requests=int(plan.full_length_requests),
            parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            notes=list(engine.notes),
            memory_plan=plan.table(),
            config=self._start.config
            | {
                "threads": engine.threads,
                "prefix_cache": engine.config.prefix_cache,
                "enable_chunked_prefill": engine.config.enable_chunked_prefill,
                "max_model_len": engine.max_model_len,
                "num_kv_blocks": plan.num_blocks - 1,  # as the option counts: without the null block
                "dtype": str(model.dtype).removeprefix("torch."),
                "quantization": model.quantization,
            },
            kv_transfer=engine.tiers.exporter.told() if engine.tiers.exporter else {},
            checkpoint=engine.fingerprint["checkpoint"],
            causal=model.causal,
        )

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            Exception: a bug. The board names the requests that may have caused it: those of the current step, or all.
        """
        self._control.send(wire.encode(wire.EngineReady(self.info())))
        self._board.set_phase("ready", 1.0)
        self._board.fields[PATIENCE] = 0
        try:
            while not self._stopping:
                self._receive()
                self._exchange()
                self._let_in()
                self._tell_open()
                self.engine.check_ranks()
                if not self.engine.idle:
                    self._send(self.engine.step())
                self._tell_statistics()
        except Exception as error:
            if isinstance(error, RankLostError) and error.outside:
                self._board.end()  # no request is to blame
            elif not self._board.fields[NUM_IN_STEP]:
                self._begin([add.number for add in self._adds.values()])
            raise

    def _receive(self) -> None:
        """Handle all pending messages; wait for one if there is nothing else to do."""
        busy = not (self.engine.idle or self.engine.blocked) or bool(self._outside)
        wait = WAIT_POLL_MS if self.engine.awaits_tiers and not self._outside else 0
        ready = dict(self._poller.poll(wait if busy else IDLE_POLL_MS))
        if not busy:
            self._board.fields[PULSE] += 1
        if self._control in ready:
            with _contained("the supervisor"):
                self._handle_control(wire.decode_from_supervisor(self._control.recv()))
        while self._socket in ready:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._board.fields[PULSE] += 1
            with _contained(frames[0]):
                client, payload = frames
                self._handle(client, wire.decode_to_engine(payload))

    def _handle_control(self, message: wire.FromSupervisor) -> None:
        if isinstance(message, wire.Stop):
            self._stopping = True
        elif isinstance(message, wire.ClientGone):
            self._gone.add(message.worker)
            for number in [*self._numbers, *self._outside]:
                if number >> wire.WORKER_SHIFT == message.worker:
                    self._abort(number, "abort")

    def _handle(self, client: bytes, message: wire.ToEngine) -> None:
        match message:
            case wire.Add():
                self._take_in(message)
            case wire.Abort():
                self._abort(message.number, message.reason)
            case wire.Told():
                self._recorder.told(message.number, message.detokenize_seconds)
            case wire.AbortNamed():
                found = self._abort_named(message.name, message.owner)
                self._reply(client, message.ticket, msgspec.json.encode(found))
            case wire.Inspect(what="prompts"):
                self._reply(client, message.ticket, msgspec.json.encode(self._prompts.told(message.since)))
            case wire.Inspect():
                document = self._recorder.document(self.engine, message.what, message.since)
                self._reply(client, message.ticket, document)
            case wire.Life():
                self._reply(client, message.ticket, msgspec.json.encode(self._recorder.life(self.engine, message.name)))
            case wire.ResetPrefixCache():
                cleared = sum(kv.cache.clear() for kv in self.engine.scheduler.kvs)
                self._reply(client, message.ticket, msgspec.json.encode(cleared))

    def _reply(self, client: bytes, ticket: int, value: bytes) -> None:
        self._socket.send_multipart((client, wire.encode(wire.Reply(ticket, value))))

    def _exchange(self) -> None:
        """Exchange messages with other engines: a prompt that one of them wants is a request like any other."""
        if self.engine.idle:  # otherwise each step does it
            self.engine.exchange()
        tiers = self.engine.tiers
        asked, tiers.to_compute = tiers.to_compute, []
        for number, want in asked:
            with _contained("another engine"):
                self._take_in(_wanted(number, want))
        dropped, tiers.dropped = tiers.dropped, []
        for number in dropped:
            self._abort(PREFILL_WORKER << wire.WORKER_SHIFT | number, "abort")

    # -- requests ------------------------------------------------------------------------------------------

    def _take_in(self, add: wire.Add) -> None:
        if add.number >> wire.WORKER_SHIFT in self._gone or add.number in self._numbers or add.number in self._outside:
            return  # its HTTP process is gone, or this is a duplicate
        if add.suspect or self._on_probation is not None:
            self._outside[add.number] = add
        else:
            self._add(add)

    def _let_in(self) -> None:
        """Add the next suspect, alone; without suspects, add all requests that wait outside."""
        if not self._outside or self._on_probation is not None:
            return
        suspect = next((add for add in self._outside.values() if add.suspect), None)
        if suspect is not None:
            self._set_aside()
            self._on_probation = suspect.number
            self._add(self._outside.pop(suspect.number))
            return
        waiting, self._outside = sorted(self._outside.values(), key=lambda add: add.arrived), {}
        for add in waiting:
            self._add(add)

    def _set_aside(self) -> None:
        """Remove all requests from the engine; they will continue later after the tokens that they have."""
        for number, add in self._adds.items():
            request = self._requests[number]
            self._outside[add.number] = msgspec.structs.replace(
                add,
                output_token_ids=request.tokens[request.num_prompt :],
                num_scored=request.num_scored,
                suspect=False,
            )
            self.engine.abort(number)
            del self._recorder.records[number]
        self.engine.take_updates()  # dropped: these requests have not ended
        for table in (self._adds, self._requests, self._numbers):
            table.clear()

    def _add(self, add: wire.Add) -> None:
        """Add a request to the engine; if it is refused, it ends."""
        from quire.engine.recorder import Record

        number = self._next_id
        self._next_id += 1
        self._begin([add.number])
        try:
            request = _request(number, add)
            if add.suspect:
                request.computed_here = True  # a suspect must not kill other engines, too
            self.engine.add(request)
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("request %s cannot be taken in", add.name)
                error = RequestError("the engine could not take in this request; its log says why")
            self._recorder.reasons["failed"] += 1
            self._end(RequestUpdate(add.number, finish_reason="error", error=str(error)))
        else:
            self._numbers[add.number], self._requests[number], self._adds[number] = number, request, add
            self._recorder.records[number] = Record(add.name, add.number, add.choice, add.tokenize_seconds)
        self._tell_board()

    def _tell_board(self) -> None:
        """Update the board: the requests of the steps in flight, and how long these may take."""
        self._board.fields[PATIENCE] = math.ceil(sum(seconds for _, seconds in self._in_flight))
        if self._in_flight:
            self._begin(list(dict.fromkeys(chain.from_iterable(numbers for numbers, _ in self._in_flight))))
        else:
            self._board.end()

    def _tell_open(self) -> None:
        """Update the number of requests on the board."""
        self._board.fields[NUM_OPEN] = len(self._adds) + len(self._outside)

    def _begin(self, numbers: list[int]) -> None:
        """Put the requests that are worked on next on the board."""
        on_probation = self._on_probation
        self._board.begin(numbers, on_probation if on_probation is not None and on_probation in numbers else -1)

    def _abort(self, number: int, reason: str) -> None:
        if number in self._numbers:
            self.engine.abort(self._numbers[number], reason)
            self._send(self.engine.take_updates())
        elif self._outside.pop(number, None):
            self._recorder.reasons["aborted"] += reason == "abort"
            self._end(RequestUpdate(number, finish_reason=reason))

    def _abort_named(self, name: str, owner: str) -> bool:
        adds = [*self._adds.values(), *self._outside.values()]
        numbers = [add.number for add in adds if add.name == name and add.owner == owner]
        for number in numbers:
            self._abort(number, "abort")
        return bool(numbers)

    # -- results -------------------------------------------------------------------------------------------

    def _send(self, updates: list[RequestUpdate]) -> None:
        """Send each HTTP process the updates of its requests, with the numbers that it knows."""
        by_worker: dict[int, list[RequestUpdate]] = defaultdict(list)
        for update in updates:
            add = self._adds[update.request]
            if add.prompt_names:
                self._name_prompt(add, self._requests[update.request])
            if update.finish_reason is not None:
                self._recorder.ended(self._requests.pop(update.request), update)
                del self._adds[update.request], self._numbers[add.number]
            if update.tokens or update.finish_reason is not None:
                self._clear(add.number)
            update.request = add.number
            by_worker[add.number >> wire.WORKER_SHIFT].append(update)
        self._tell_open()  # first: a process that knows of an end must not count the request as another process's
        for worker, some in by_worker.items():
            self._send_to(worker, some)

    def _name_prompt(self, add: wire.Add, request: Request) -> None:
        """Record which names of a request's prompt are cached, once it has its first token or has ended."""
        blocks = request.hashes[: request.num_prompt // self.engine.config.block_size]
        self._prompts.computed(add.prompt_names, blocks, self.engine.tiers.holds)
        add.prompt_names = b""

    def _end(self, update: RequestUpdate) -> None:
        """Report the end of a request that is not in the engine."""
        self._clear(update.request)
        self._send_to(update.request >> wire.WORKER_SHIFT, [update])

    def _clear(self, number: int) -> None:
        """End a request's probation, since it has a token or has ended."""
        if number == self._on_probation:
            self._on_probation = None

    def _send_to(self, worker: int, updates: list[RequestUpdate]) -> None:
        if worker == PREFILL_WORKER:
            self.engine.prefilled(
                [each.request - (worker << wire.WORKER_SHIFT) for each in updates if each.finish_reason]
            )
            return
        self._socket.send_multipart((f"http-{worker}".encode(), wire.encode(wire.Updates(updates))))

    def planned(self, plan: StepPlan, begin: float, seconds: float) -> None:
        """See `StepObserver`."""
        numbers = [self._adds[span.request].number for span in plan.spans]
        self._in_flight.append((numbers, self._patience.seconds(plan)))
        self._tell_board()
        self._recorder.planned(plan, begin, seconds)

    def committed(self, plan: StepPlan, result: StepResult, updates: list[RequestUpdate]) -> None:
        """See `StepObserver`."""
        self._in_flight.popleft()
        self._tell_board()
        self._recorder.committed(plan, result, self._requests)

    def given_up(self) -> None:
        """See `StepObserver`."""
        self._in_flight.clear()
        self._tell_board()
        self._recorder.given_up()

    def _tell_statistics(self) -> None:
        now = time.monotonic()
        before, old = self._last_statistics
        if now - before >= STATISTICS_INTERVAL:
            new = self._recorder.stats(self.engine)
            if new["steps"] > old["steps"]:
                of_which = f"replica {self._start.replica}: " if self._start.sharers > 1 else ""
                text = of_which + log.statistics_line(old, new, now - before)
                log.event(logger, "statistics", text, replica=self._start.replica, **new)
            self._last_statistics = (now, new)


@contextlib.contextmanager
def _contained(sender: object) -> Iterator[None]:
    """Log errors in handling a message, and continue."""
    try:
        yield
    except Exception:
        logger.exception("a message of %r cannot be handled", sender)


def _wanted(number: int, want: Want) -> wire.Add:
    """The request that computes a prompt for another engine. It is computed here: the other one may be among those that
    compute this engine's long prompts, and would be asked in turn."""
    return wire.Add(
        number=PREFILL_WORKER << wire.WORKER_SHIFT | number,
        name=f"prefill-{number}",
        queue=want.owner,
        prompt_token_ids=want.tokens,
        params=SamplingParams(seed=0, priority=want.priority, kv_transfer_params={"do_remote_decode": True}),
        max_tokens=0,
        scope=want.scope,
        arrived=time.monotonic(),
    )


def _request(number: int, add: wire.Add) -> Request:
    return Request(
        number,
        add.prompt_token_ids,
        add.params,
        max_tokens=add.max_tokens,
        choice=add.choice,
        stop_token_ids=frozenset(add.stop_token_ids),
        bad_words=add.bad_words,
        scope=add.scope,
        owner=add.queue,
        arrived=add.arrived,
        output_token_ids=add.output_token_ids,
        num_scored=add.num_scored,
        pooling=add.pooling,
        reasoning=add.reasoning,
    )


def main() -> int:
    """Load and serve; returns 1 if the engine could not start, or failed."""
    start = child.begin(EngineStart)
    log.configure(start.log_format, start.debug)
    logging.getLogger("quire.engine.engine").setLevel(logging.WARNING)  # its notes are in the start screen
    directory = Path(start.directory)
    control: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    control.setsockopt(zmq.IDENTITY, start.name.encode())
    control.connect(wire.control_address(directory))
    try:
        process = EngineProcess(start, Board(wire.board_path(directory, start.replica, start.boot)), control)
    except Exception as error:
        if start.debug or not isinstance(error, QuireError):
            logger.exception("the engine cannot start")
        known = isinstance(error, QuireError)
        message = str(error) if known else f"the engine cannot start: {type(error).__name__}: {error}"
        control.send(wire.encode(wire.EngineFailed(message, isinstance(error, INVALID))))
        zmq.Context.instance().destroy(linger=2000)  # time to send the message
        return 1
    try:
        process.run()
    except RankLostError as error:
        logger.error("the engine ends: %s", error)
        return 1
    except Exception:
        logger.exception("the engine failed")
        return 1
    finally:
        with contextlib.suppress(Exception):  # it may be in an invalid state
            process.engine.close()
    zmq.Context.instance().destroy(linger=0)
    return 0


if __name__ == "__main__":
    code = main()
    log.flush()
    os._exit(code)  # a normal exit of torch takes most of a second, and everything is written
