"""Where steps run. An executor takes plans in order and answers each with a result to wait for."""

from __future__ import annotations

import logging
from typing import Protocol

from quire.core.step import SpanResult, StepPlan, StepResult
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


class Done:
    """A result that is there already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class Failed:
    """The result of a step that did not run to its end: each of its requests has an error."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def wait(self) -> StepResult:
        return StepResult(self._plan.number, [SpanResult([], error=STEP_FAILED) for _ in self._plan.spans])


class InlineExecutor:
    """Runs each step at once, in the calling thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> PendingResult:
        try:
            return Done(self._runner.run(plan))
        except Exception:
            # It cannot be told whose fault it is: every request of this step ends, and the engine goes on.
            logger.exception("step %d failed; its %d requests end with an error", plan.number, len(plan.spans))
            return Failed(plan)
