"""Experts move from rank to rank under running requests: what a rank will have is read while steps go on, a piece at a
time, and all ranks use it from the same step on. No bit depends on it: see `ops/cpu/src/experts.cpp`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import torch

from quire.core.step import ExpertMove, StepPlan
from quire.errors import DeviceLostError
from quire.layers.experts import Arranged, ExpertsLayer
from quire.ops import Kernels

logger = logging.getLogger(__name__)


class Prepared(msgspec.Struct, tag=True):
    """What a rank says of a move that it has prepared for.

    Attributes:
        seconds: that reading took.
        error: why the experts cannot be read; "": they are there.
    """

    version: int
    seconds: float
    error: str = ""


class ExpertMover:
    """A rank's side of moves, one at a time.

    A thread of its own reads what this rank has not and will have. With each step it begins one more piece, at most: so
    no step waits for a disk, and what reading takes from the steps in processor time and memory rate is an expert's
    worth, however many move. (It has no lower priority: one that is put aside while it holds Python's lock would hold
    up the steps. Its loops give way instead, see `Kernels.giving_way`.)

    Args:
        layers: those with experts that this rank has, by number.
        kernels: what the experts are packed for.

    Attributes:
        version: of the last move that is in force; 0: none.
        on_prepared: told, by another thread, when what a move needs is there, or cannot be read.
    """

    def __init__(self, layers: Mapping[int, ExpertsLayer], kernels: Kernels) -> None:
        self._layers, self._kernels = layers, kernels
        self.version = 0
        self.on_prepared: Callable[[Prepared], None] = lambda prepared: None
        self._move: ExpertMove | None = None
        self._reading: _Reading | None = None  # None: the layer of the move at hand is not here
        self._piece: Future[None] | None = None  # the last one that was begun
        # Not a daemon: the interpreter's end would break it off inside a kernel, and abort the process.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-experts")

    def follow(self, plan: StepPlan) -> None:
        """What the plan of the step at hand says of experts.

        Raises:
            DeviceLostError: what is to be used from this step on is not there: this rank can compute no step more.
        """
        self._use(plan.expert_version)
        if plan.expert_move is not None:
            self._prepare(plan.expert_move)
        if self._reading is not None and not self._reading.ended and (self._piece is None or self._piece.done()):
            self._piece = self._reader.submit(self._read, self._reading)

    def _prepare(self, move: ExpertMove) -> None:
        """A move begins; one that has begun is not begun again."""
        if move.version <= self.version or (self._move is not None and self._move.version == move.version):
            return
        layer = self._layers.get(move.layer)
        self._move, self._reading = move, None if layer is None else _Reading(move, layer)
        if layer is None:
            self.on_prepared(Prepared(move.version, 0.0))

    def _read(self, reading: _Reading) -> None:
        """One piece."""
        with self._kernels.giving_way():
            reading.go_on()
        if reading.ended:
            self.on_prepared(Prepared(reading.version, reading.seconds, reading.error))

    def _use(self, version: int) -> None:
        """The experts as this move has arranged them."""
        if version == self.version:
            return
        move, reading, self._move, self._reading = self._move, self._reading, None, None
        if move is None or move.version != version or (reading is not None and reading.arranged is None):
            raise DeviceLostError(f"the experts were never moved as version {version} says: a bug")
        if reading is not None and reading.arranged is not None:
            reading.layer.use(reading.arranged)
        self.version = version


class _Reading:
    """A layer's experts, which are being read.

    Attributes:
        arranged: what the layer will use, once all are there.
        ended: all are there, or cannot be read: then `error` says why.
        seconds: that reading took.
    """

    def __init__(self, move: ExpertMove, layer: ExpertsLayer) -> None:
        self.version, self.layer = move.version, layer
        self.arranged: Arranged | None = None
        self.ended, self.error, self.seconds = False, "", 0.0
        self._number = move.layer
        self._pieces: Generator[None, None, Arranged] = layer.arrange(move.slots)

    def go_on(self) -> None:
        """Read one piece more."""
        begin = time.monotonic()
        try:
            with torch.inference_mode():
                next(self._pieces)
        except StopIteration as end:
            self.arranged, self.ended = end.value, True
        except Exception as failure:
            logger.exception("the experts of layer %d cannot be read", self._number)
            self.error, self.ended = f"{type(failure).__name__}: {failure}", True
        self.seconds += time.monotonic() - begin
