"""Where steps run. An executor takes plans in order and answers each with a result to wait for."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from quire.core.step import SpanResult, StepPlan, StepResult
from quire.errors import DeviceLostError
from quire.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

STEP_FAILED = "the step that computed this request failed; the engine's log says why"


class PendingResult(Protocol):
    """A step that was submitted."""

    def wait(self) -> StepResult:
        """Its result, once it has run."""
        ...


class Executor(Protocol):
    """Runs steps somewhere: here, in a thread, on other ranks."""

    def submit(self, plan: StepPlan) -> PendingResult:
        """Start a step."""
        ...

    def close(self) -> None:
        """Free what it holds, once the steps that were submitted have run."""
        ...


class Submitted:
    """A step that was launched, or that failed to be; a step that fails ends each of its requests with an error."""

    def __init__(self, plan: StepPlan, launched: PendingResult | None) -> None:
        self._plan, self._launched = plan, launched

    def wait(self) -> StepResult:
        if self._launched is not None:
            try:
                return self._launched.wait()
            except Exception as error:
                _check_not_lost(error)
                _log_failure(self._plan)
        return StepResult(self._plan.number, [SpanResult([], error=STEP_FAILED) for _ in self._plan.spans])


class InlineExecutor:
    """Launches each step in the calling thread. A device that works by itself computes it while the caller goes on."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> PendingResult:
        return Submitted(plan, _launch(self._runner, plan))

    def close(self) -> None:
        del self._runner


class ThreadExecutor:
    """Runs each step in a thread of its own, one after the other: a CPU computes it while the caller goes on.

    The thread ends with this object, and a program that ends before waits for its steps: torch does not survive it if
    they go on while the interpreter is taken down.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "quire-runner")

    def submit(self, plan: StepPlan) -> PendingResult:
        return _InThread(self._thread.submit(_run, self._runner, plan))

    def close(self) -> None:
        self._thread.shutdown()
        del self._runner


class _InThread:
    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result()


def _run(runner: ModelRunner, plan: StepPlan) -> StepResult:
    return Submitted(plan, _launch(runner, plan)).wait()


def _launch(runner: ModelRunner, plan: StepPlan) -> PendingResult | None:
    """The step, launched; None where that failed. It cannot be told whose fault it is, and the engine goes on."""
    try:
        return runner.launch(plan)
    except Exception as error:
        _check_not_lost(error)
        _log_failure(plan)
        return None


def _check_not_lost(error: Exception) -> None:
    """Raises DeviceLostError after an error of a GPU's own: whatever it is told next fails too.

    Only a new process can use it again. Pinned memory that ran out is reported in the same way, and is no such error.
    """
    if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):
        raise DeviceLostError(
            f"the device failed, and nothing can run on it until this process ends: {error}"
        ) from error


def _log_failure(plan: StepPlan) -> None:
    logger.exception("step %d failed; its %d requests end with an error", plan.number, len(plan.spans))
