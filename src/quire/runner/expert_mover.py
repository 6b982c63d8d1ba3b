"""Experts move from rank to rank under running requests: what a rank will have is read while steps go on, and all ranks
use it from the same step on. No bit depends on it: see `ops/cpu/src/experts.cpp`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import msgspec
import torch

from quire.core.step import ExpertMove, StepPlan
from quire.errors import DeviceLostError
from quire.layers.experts import Arranged, ExpertsLayer
from quire.ops import Kernels

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 19
"""Nice value of the thread that reads experts: steps go first."""


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
        self._arranged: Future[Arranged] = Future()

    def follow(self, plan: StepPlan) -> None:
        """What the plan of the step at hand says of experts.

        Raises:
            DeviceLostError: what is to be used from this step on is not there: this rank can compute no step more.
        """
        self._use(plan.expert_version)
        if plan.expert_move is not None:
            self._prepare(plan.expert_move)

    def _prepare(self, move: ExpertMove) -> None:
        """Begin to read what this rank has not and will have; one that has begun is not begun again."""
        if move.version <= self.version or (self._move is not None and self._move.version == move.version):
            return
        self._move, self._arranged = move, Future()
        if move.layer not in self._layers:
            self.on_prepared(Prepared(move.version, 0.0))
            return
        given = move, self._layers[move.layer], self._arranged
        # Not a daemon: the interpreter's end would break it off inside a kernel, and abort the process.
        threading.Thread(target=self._read, args=given, name="quire-experts").start()

    def _read(self, move: ExpertMove, layer: ExpertsLayer, arranged: Future[Arranged]) -> None:
        begin, error = time.monotonic(), ""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            with torch.inference_mode(), self._kernels.threads(1):
                arranged.set_result(layer.arranged(move.slots))
        except Exception as failure:
            logger.exception("the experts of layer %d cannot be read", move.layer)
            arranged.set_exception(failure)
            error = f"{type(failure).__name__}: {failure}"
        self.on_prepared(Prepared(move.version, time.monotonic() - begin, error))

    def _use(self, version: int) -> None:
        """The experts as this move has arranged them."""
        if version == self.version:
            return
        move, self._move = self._move, None
        here = move is not None and move.layer in self._layers
        if move is None or move.version != version or here != self._arranged.done():
            raise DeviceLostError(f"the experts were never moved as version {version} says: a bug")
        if here:
            self._layers[move.layer].use(self._arranged.result())
        self.version = version
