"""Where steps run. An executor takes plans in order, and returns a function for each that waits for its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from quire.core.step import StepPlan, StepResult
from quire.errors import DeviceLostError, StepFailedError
from quire.runner.device import is_lost
from quire.runner.model_runner import ModelRunner

T = TypeVar("T")


PendingResult = Callable[[], StepResult]
"""Waits until a submitted step has run, and returns its result.

Raises:
    StepFailedError: it failed. The runner refuses all later plans up to a gap in their numbers.
    DeviceLostError: no more steps can run in this process.
"""


class Executor(Protocol):
    """Runs steps: in this thread, in another one, or on other ranks."""

    def submit(self, plan: StepPlan) -> PendingResult:
        """Start a step; raises what a `PendingResult` does."""
        ...

    def close(self) -> None:
        """Free its resources, once the submitted steps have run."""
        ...


class InlineExecutor:
    """Launches each step in the calling thread. A GPU computes it while the caller continues."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> PendingResult:
        step = attempt(lambda: self._runner.launch(plan))
        return lambda: attempt(step.wait)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a device that has failed has nothing left to do
            self._runner.device.mark().wait()
        del self._runner


class RunnerThread:
    """A thread that calls a runner, one call after the other.

    It ends with this object. A program that exits before waits for its calls: torch crashes if they run while the
    interpreter shuts down.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "quire-runner")
        # Start it now: Ctrl-C may interrupt `submit`, and would lose a thread that is starting.
        self._thread.submit(int)

    def submit(self, call: Callable[[], T]) -> Callable[[], T]:
        """A function that waits for this call, and returns or raises as `attempt` does."""
        return self._thread.submit(attempt, call).result

    def close(self) -> None:
        """End the thread once all calls have ended."""
        self._thread.shutdown()


class ThreadExecutor:
    """Runs steps in a separate thread, one after the other: a CPU computes them while the caller continues."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._thread = runner, RunnerThread()

    def submit(self, plan: StepPlan) -> PendingResult:
        runner = self._runner
        return self._thread.submit(lambda: runner.launch(plan).wait())

    def close(self) -> None:
        self._thread.close()
        del self._runner


def now(call: Callable[[], T]) -> Callable[[], T]:
    """As `RunnerThread.submit`, but called at once in this thread; raises what that would raise later."""
    made = attempt(call)
    return lambda: made


def attempt(call: Callable[[], T]) -> T:
    """The result of the runner's `call`; its errors become those of a `PendingResult`."""
    try:
        return call()
    except DeviceLostError:
        raise
    except Exception as error:
        if is_lost(error):
            raise DeviceLostError(f"the device failed, and this process can no longer use it: {error}") from error
        raise StepFailedError(f"{type(error).__name__}: {error}") from error
