"""A rank other than the first: `python -m quire.engine.rank`, started by the engine, or by `quire rank` on another
machine.

It runs the same plans as the first rank, with its own part of the model, and samples the same tokens.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from quire import child, log
from quire.config import EngineConfig
from quire.core.step import StepPlan
from quire.engine.link import Begin, Computed, Failed, Link, Loaded, Ready, Timed
from quire.errors import DeviceLostError, QuireError, StepGivenUpError
from quire.grammar.grammars import Grammars

if TYPE_CHECKING:
    from quire.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class RankStart(msgspec.Struct, kw_only=True):
    """The first rank's message to another one, on its standard input.

    Attributes:
        config: fields of `EngineConfig`.
        path: the checkpoint's folder; "": the one in `config`, on a machine with its own files.
        checkpoints: the result of `contents` on the first machine.
        threads: of this rank. local_ranks: number of ranks on its machine.
        link: descriptor of its end of the socket pair, which it inherits.
        memory, stage_memory, store, bell: see `join`. host_memory: see `start_runner`.
        matrix_bytes: see `SharedGroup`.
        log_format, debug: see `log.configure`.
    """

    config: dict[str, Any]
    path: str
    checkpoints: dict[str, str]
    rank: int
    matrix_bytes: int
    log_format: Literal["text", "json"]
    debug: bool
    threads: int = 1
    local_ranks: int = 1
    link: int = -1
    memory: int = -1
    stage_memory: int = -1
    store: int = -1
    bell: int = -1
    host_memory: int = -1


def main() -> int:
    """Load, run plans until there are no more, and exit; returns 1 if it could not start, or must not continue."""
    start = child.begin(RankStart, dies_with_parent=False)
    log.configure(start.log_format, start.debug)
    link = Link(socket.socket(fileno=start.link))
    threading.Thread(target=_leave_with_first, args=(start.link,), name="quire-first-rank", daemon=True).start()
    try:
        runner = _load(start, link)
    except Exception as error:
        known = isinstance(error, QuireError)
        if not known:
            logger.exception("rank %d cannot start", start.rank)
        message = str(error) if known else f"rank {start.rank} cannot start: {type(error).__name__}: {error}"
        link.send(msgspec.msgpack.encode(Failed(message, known)))
        return 1
    if runner is None:
        return 0
    answers = link if runner.model.replicas > 1 and runner.model.stage.rank == 0 else None
    profile = link if start.config["profile"] is not None else None
    return _compute(start.rank, runner, link, answers, profile)


def _compute(rank: int, runner: ModelRunner, link: Link, answers: Link | None, profile: Link | None) -> int:
    """Run all plans. If this rank cannot run one, it is given up, and the first rank decides what follows.

    Args:
        answers: where to send results, if the first rank has other requests.
        profile: where to send the times of steps, if a timeline is drawn.
    """
    decoder, failed = msgspec.msgpack.Decoder(StepPlan), False
    while (encoded := link.receive()) is not None:
        begin, plan = time.monotonic(), None
        try:
            if not encoded:
                runner.drain()
            else:
                plan = decoder.decode(encoded)
                _begin_compiling(runner.grammars, plan)
                _answer(runner, plan, answers)
            failed = False
            if profile is not None:
                timed = Timed(plan.number if plan else -1, begin, time.monotonic() - begin)
                profile.send(msgspec.msgpack.encode(timed))
        except DeviceLostError as error:
            logger.error("rank %d ends: %s", rank, error)
            return 1
        except msgspec.MsgspecError:
            logger.exception("rank %d ends: a plan cannot be read", rank)
            return 1
        except StepGivenUpError:  # by another rank, whose own log says why
            failed = True
        except Exception as error:
            if runner.device.asynchronous:  # the others wait for a step that this one has not begun
                logger.exception("rank %d ends: a step failed", rank)
                return 1
            # Plans that depend on the failed one may be on their way.
            level = logging.DEBUG if failed else logging.WARNING
            logger.log(level, "rank %d: a step failed: %s: %s", rank, type(error).__name__, error, exc_info=True)
            failed = True
    return 0


def _begin_compiling(grammars: Grammars | None, plan: StepPlan) -> None:
    """Compile the plan's grammars, whatever the result: a request's matcher waits for its grammar, and an invalid one
    never starts.
    """
    if grammars is not None:
        grammars.ended()
        for wanted in plan.compiles:
            grammars.begin(wanted)


def _answer(runner: ModelRunner, plan: StepPlan, answers: Link | None) -> None:
    """Run a plan, and send its result if somebody waits for it."""
    answer = Computed(plan.number, None)
    try:
        step = runner.launch(plan)
        if answers is not None:
            answer.result = step.wait()
    except Exception as error:
        answer.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        if answers is not None:
            answers.send(msgspec.msgpack.encode(answer))


def _leave_with_first(link: int) -> None:
    """Exit when the first rank has closed its end, or is gone, since nothing computed here is of use."""
    closed = select.poll()
    closed.register(link, select.POLLRDHUP)
    closed.poll()
    log.flush()
    os._exit(0)


def _silent(phase: str, share: float) -> None:
    """Ignores progress: the first rank reports it."""


def _load(start: RankStart, link: Link) -> ModelRunner | None:
    """Start the runner; None if the first rank has given up."""
    from quire.engine.loading import check_contents, join, load, open_grammars
    from quire.models.hub import resolve, tokenizer_folder
    from quire.runner.device import open_device
    from quire.runner.start import measure, start_runner

    config = EngineConfig(**start.config)
    path = Path(start.path) if start.path else resolve(config.model, config.revision)
    check_contents(config, path, start.checkpoints)
    device = open_device(config.device, start.rank)
    descriptors = start.memory, start.stage_memory, start.store
    group, stage = join(config, start.rank, device, *descriptors, start.matrix_bytes, start.bell)
    model, speculation = load(config, path, device, group, stage, _silent)
    link.send(msgspec.msgpack.encode(Loaded(model.kernels.describe(model.dtype))))
    if link.receive() is None:  # `Measure`
        return None
    link.send(msgspec.msgpack.encode(measure(config, model, device, speculation, start.local_ranks)))
    message = link.receive()
    if message is None:
        return None
    begin = msgspec.msgpack.decode(message, type=Begin)
    starting = config, model, device, begin.plan, start.threads, _silent, speculation
    grammars = open_grammars(tokenizer_folder(config, path), model.vocab_size)
    runner = start_runner(*starting, kv_key=begin.kv_key, host_fd=start.host_memory, grammars=grammars).runner
    if runner.mover is not None:
        runner.mover.on_prepared = lambda prepared: link.send(msgspec.msgpack.encode(prepared))
    gc.collect()
    gc.freeze()  # as in the engine: all ranks would wait for one that collects garbage
    link.send(msgspec.msgpack.encode(Ready()))
    return runner


if __name__ == "__main__":
    code = main()
    log.flush()
    os._exit(code)
