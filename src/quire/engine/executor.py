"""Where steps run. An executor takes plans in order and answers each with a result to wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from quire.core.step import StepPlan, StepResult
from quire.errors import DeviceLostError, StepFailedError
from quire.runner.device import is_lost
from quire.runner.model_runner import LaunchedStep, ModelRunner

T = TypeVar("T")


class PendingResult(Protocol):
    """A step that was submitted."""

    def wait(self) -> StepResult:
        """Its result, once it has run.

        Raises:
            StepFailedError: it came to nothing. The runner refuses all plans from there on up to a gap.
            DeviceLostError: no step can run any more in this process.
        """
        ...


class Executor(Protocol):
    """Runs steps somewhere: here, in a thread, on other ranks."""

    def submit(self, plan: StepPlan) -> PendingResult:
        """Start a step; raises what `PendingResult.wait` does."""
        ...

    def close(self) -> None:
        """Free what it holds, once the steps that were submitted have run."""
        ...


class InlineExecutor:
    """Launches each step in the calling thread. A device that works by itself computes it while the caller goes on."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> PendingResult:
        return _Launched(attempt(lambda: self._runner.launch(plan)))

    def close(self) -> None:
        del self._runner


class _Launched:
    def __init__(self, step: LaunchedStep) -> None:
        self._step = step

    def wait(self) -> StepResult:
        return attempt(self._step.wait)


class ThreadExecutor:
    """Runs each step in a thread of its own, one after the other: a CPU computes it while the caller goes on.

    The thread ends with this object, and a program that ends before waits for its steps: torch does not survive it if
    they go on while the interpreter is taken down.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "quire-runner")
        self._thread.submit(int)  # it starts now: Ctrl-C may interrupt `submit`, and a thread that starts is lost then

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
    return attempt(lambda: runner.launch(plan).wait())


def attempt(call: Callable[[], T]) -> T:
    """What the runner's `call` returns; any error of it is one of those that `PendingResult.wait` names."""
    try:
        return call()
    except DeviceLostError:
        raise
    except Exception as error:
        if is_lost(error):
            raise DeviceLostError(
                f"the device failed, and nothing can run on it until this process ends: {error}"
            ) from error
        raise StepFailedError(f"{type(error).__name__}: {error}") from error
