"""Moves experts between ranks while requests run: a rank reads its new experts piece by piece during steps, and all
ranks use them from the same step on. No result depends on the placement: see `ops/cpu/src/experts.cpp`.
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
    """A rank's report that it is prepared for a move.

    Attributes:
        seconds: how long reading took.
        error: why the experts cannot be read; "" if they have been.
    """

    version: int
    seconds: float
    error: str = ""


class ExpertMover:
    """A rank's part in moves, one at a time.

    A background thread reads the rank's new experts, at most one piece per step. So no step waits for a disk, and a
    step loses at most the processor time and memory bandwidth of reading one expert. (The thread has no lower priority:
    if it were preempted while it holds the GIL, steps would wait. Its loops yield instead, see `Kernels.giving_way`.)

    Args:
        layers: this rank's layers with experts, by number.
        kernels: for which experts are packed.

    Attributes:
        version: of the last move that is in effect; 0 if there is none.
        on_prepared: called from another thread when a move's experts have been read, or cannot be.
    """

    def __init__(self, layers: Mapping[int, ExpertsLayer], kernels: Kernels) -> None:
        self._layers, self._kernels = layers, kernels
        self.version = 0
        self.on_prepared: Callable[[Prepared], None] = lambda prepared: None
        self._move: ExpertMove | None = None
        self._reading: _Reading | None = None  # None: the current move's layer is not on this rank
        self._piece: Future[None] | None = None  # the last one that was submitted
        # Not a daemon, which would be killed inside a kernel when the interpreter exits, and abort the process.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-experts")

    def follow(self, plan: StepPlan) -> None:
        """Carry out what a plan says about experts.

        Raises:
            DeviceLostError: experts to be used from this step on have not been read: this rank cannot continue.
        """
        self._use(plan.expert_version)
        if plan.expert_move is not None:
            self._prepare(plan.expert_move)
        if self._reading is not None and not self._reading.ended and (self._piece is None or self._piece.done()):
            self._piece = self._reader.submit(self._read, self._reading)

    def _prepare(self, move: ExpertMove) -> None:
        """Begin a move, unless it has begun already."""
        if move.version <= self.version or (self._move is not None and self._move.version == move.version):
            return
        layer = self._layers.get(move.layer)
        self._move, self._reading = move, None if layer is None else _Reading(move, layer)
        if layer is None:
            self.on_prepared(Prepared(move.version, 0.0))

    def _read(self, reading: _Reading) -> None:
        """Read one piece."""
        with self._kernels.giving_way():
            reading.read_next()
        if reading.ended:
            self.on_prepared(Prepared(reading.version, reading.seconds, reading.error))

    def _use(self, version: int) -> None:
        """Use the placement of the move with this version."""
        if version == self.version:
            return
        move, reading, self._move, self._reading = self._move, self._reading, None, None
        if move is None or move.version != version or (reading is not None and reading.arranged is None):
            raise DeviceLostError(f"the experts were never moved as version {version} says: a bug")
        if reading is not None and reading.arranged is not None:
            reading.layer.use(reading.arranged)
        self.version = version


class _Reading:
    """The reading of a layer's new experts.

    Attributes:
        arranged: the layer's new placement, once all experts have been read.
        ended: all have been read, or cannot be; `error` says why.
        seconds: time spent reading.
    """

    def __init__(self, move: ExpertMove, layer: ExpertsLayer) -> None:
        self.version, self.layer = move.version, layer
        self.arranged: Arranged | None = None
        self.ended, self.error, self.seconds = False, "", 0.0
        self._number = move.layer
        self._pieces: Generator[None, None, Arranged] = layer.arrange(move.slots)

    def read_next(self) -> None:
        """Read one more piece."""
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
