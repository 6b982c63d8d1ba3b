"""Where steps run. An executor takes plans in order and answers each with a result to wait for."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from concurrent.futures import Future
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
            except torch.AcceleratorError as error:
                raise _lost(error) from error
            except Exception:
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
    """Runs each step in a thread of its own, one after the other: a CPU computes it while the caller goes on."""

    def __init__(self, runner: ModelRunner) -> None:
        self._plans: queue.SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(runner, self._plans), name="quire-runner", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._plans.put, None)  # an engine that nobody closed lets its thread end all the same

    def submit(self, plan: StepPlan) -> PendingResult:
        future: Future[StepResult] = Future()
        self._plans.put((plan, future))
        return _InThread(future)

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()


class _InThread:
    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result()


def _work(runner: ModelRunner, plans: queue.SimpleQueue[tuple[StepPlan, Future[StepResult]] | None]) -> None:
    while (job := plans.get()) is not None:
        plan, future = job
        try:
            future.set_result(Submitted(plan, _launch(runner, plan)).wait())
        except BaseException as error:  # whoever waits must not wait for ever
            future.set_exception(error)
        del job, plan, future  # what waits for the next plan holds nothing of this one


def _launch(runner: ModelRunner, plan: StepPlan) -> PendingResult | None:
    """The step, launched; None where that failed. It cannot be told whose fault it is, and the engine goes on."""
    try:
        return runner.launch(plan)
    except torch.AcceleratorError as error:
        raise _lost(error) from error
    except Exception:
        _log_failure(plan)
        return None


def _lost(error: torch.AcceleratorError) -> DeviceLostError:
    """Whatever a GPU is told after an error of its own fails too: only a new process can use it again."""
    return DeviceLostError(f"the device failed, and nothing can run on it until this process ends: {error}")


def _log_failure(plan: StepPlan) -> None:
    logger.exception("step %d failed; its %d requests end with an error", plan.number, len(plan.spans))
