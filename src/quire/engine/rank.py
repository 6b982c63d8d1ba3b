"""A rank but the first: `python -m quire.engine.rank`, started by the engine.

It computes the same plans as the first rank does, with its own part of the model, and samples the same tokens.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec

from quire import child, log
from quire.config import EngineConfig
from quire.core.step import StepPlan
from quire.engine.link import Begin, Failed, Link, Loaded, Ready
from quire.errors import DeviceLostError, QuireError, StepGivenUpError

logger = logging.getLogger(__name__)


class RankStart(msgspec.Struct, kw_only=True):
    """What the first rank tells another one on its standard input.

    Attributes:
        config: fields of `EngineConfig`.
        path: the checkpoint's folder.
        threads: of this rank.
        link, memory: descriptors that it inherits: its end of the sockets, and the group's memory.
        matrix_bytes: see `SharedGroup`.
    """

    config: dict[str, Any]
    path: str
    threads: int
    rank: int
    size: int
    link: int
    memory: int
    matrix_bytes: int


def main() -> int:
    """Load, compute plans until there are no more, and leave; 1 if it could not start, or must not go on."""
    start = child.begin(RankStart, dies_with_parent=False)
    log.configure("text", debug=False)
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
    decoder = msgspec.msgpack.Decoder(StepPlan)
    while (encoded := link.receive()) is not None:
        plan = decoder.decode(encoded)
        try:
            runner.launch(plan).wait()
        except DeviceLostError as error:
            logger.error("rank %d ends: %s", start.rank, error)
            return 1
        except StepGivenUpError:  # by another rank; the first one decides what comes of its requests
            continue
        except Exception as error:
            logger.warning("rank %d: a step failed: %s: %s", start.rank, type(error).__name__, error, exc_info=True)
    return 0


def _leave_with_first(link: int) -> None:
    """When the first rank has closed its end, or is gone, whatever is computed here is of no use."""
    closed = select.poll()
    closed.register(link, select.POLLRDHUP)
    closed.poll()
    log.flush()
    os._exit(0)


def _silent(phase: str, share: float) -> None:
    """The first rank tells how far starting is."""


def _load(start: RankStart, link: Link) -> Any:
    """What computes plans; None: the first rank has given up."""
    from quire.engine.loading import load
    from quire.ops.cpu.group import SharedGroup
    from quire.runner.device import open_device
    from quire.runner.start import start_runner

    config = EngineConfig(**start.config)
    group = SharedGroup(start.memory, start.matrix_bytes, start.rank, start.size, config.collective_timeout_s)
    device = open_device(config.device)
    model, speculation = load(config, Path(start.path), device, group, _silent)
    link.send(msgspec.msgpack.encode(Loaded()))
    message = link.receive()
    if message is None:
        return None
    begin = msgspec.msgpack.decode(message, type=Begin)
    runner = start_runner(config, model, device, start.threads, _silent, speculation, begin.plan).runner
    link.send(msgspec.msgpack.encode(Ready()))
    return runner


if __name__ == "__main__":
    code = main()
    log.flush()
    os._exit(code)
