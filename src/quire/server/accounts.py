"""What one call received and when: for the metrics, the queue bound and its line in the log."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import RequestMetrics, RequestOutput
from quire.log import RequestSummary
from quire.server.admission import Ticket
from quire.server.metrics import Metrics


class Account:
    """One running call, created when its prompts go to the engine.

    Attributes:
        first_token_seconds: time to first token; None until then.
        num_open: prompts that have not ended.
        failure: what went wrong with a choice, for the client; None if nothing did.

    Args:
        arrived: on the monotonic clock. tokenize_seconds: what rendering and tokenizing took.
        params: of every prompt, as they were asked for.
    """

    def __init__(
        self,
        metrics: Metrics,
        ticket: Ticket,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        arrived: float,
        tokenize_seconds: float,
    ) -> None:
        self.first_token_seconds: float | None = None
        self.num_open = len(prompts)
        self.failure: str | None = None
        self._metrics, self._ticket = metrics, ticket
        self._params = params
        self._arrived = arrived
        self._tokenize_seconds = tokenize_seconds
        self._prompt_tokens = [len(prompt) for prompt in prompts]
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._closed = [False] * len(prompts)
        self._counts = [[0] * params.n for _ in prompts]  # tokens so far, by prompt and choice
        self._times = [[0.0] * params.n for _ in prompts]  # of the last one

    def take(self, index: int, output: RequestOutput, now: float) -> None:
        """Count what is new in a prompt's output."""
        self._outputs[index] = output
        counts, times = self._counts[index], self._times[index]
        for choice in output.outputs:
            if choice.finish_reason == "error":
                self.failure = choice.error or "the engine failed on this request"
            count = len(choice.token_ids)
            before = counts[choice.index]
            if count == before:
                continue
            if not times[choice.index]:
                self._began(index, now)
                self._metrics.token_gap(0.0, count - before - 1)
            else:
                self._metrics.token_gap(now - times[choice.index], count - before)
            counts[choice.index], times[choice.index] = count, now
        if output.finished:
            self._ticket.begun(index)  # one that only scores its prompt has no token
            self._close(index, output, now)

    def replay(self, index: int, output: RequestOutput) -> None:
        """Take over what another server generated of a prompt's output, and measured."""
        self._outputs[index] = output
        for choice in output.outputs:
            self._counts[index][choice.index] = len(choice.token_ids)

    def _began(self, index: int, now: float) -> None:
        """A choice of this prompt has its first token."""
        self._ticket.begun(index)
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self._arrived
            self._metrics.first_token(self.first_token_seconds)

    def close(self) -> None:
        """End the call; prompts that have not ended count as aborted. A second call does nothing."""
        now = time.monotonic()
        for index, output in enumerate(self._outputs):
            self._close(index, output, now)

    def _close(self, index: int, output: RequestOutput | None, now: float) -> None:
        if self._closed[index]:
            return
        self._closed[index] = True
        self.num_open -= 1
        counts = self._counts[index]
        reasons = [choice.finish_reason or "abort" for choice in output.outputs] if output else ["abort"] * len(counts)
        self._metrics.finished(
            reasons,
            output.metrics if output else RequestMetrics(),
            prompt_tokens=self._prompt_tokens[index],
            cached_tokens=output.cached_tokens if output else 0,
            output_tokens=counts,
            e2e_seconds=now - self._arrived,
            tokenize_seconds=self._tokenize_seconds,
            max_tokens=self._params.max_tokens,
        )

    @property
    def has_nothing(self) -> bool:
        """Whether it was aborted before any choice had a token."""
        return not any(map(any, self._counts)) and "abort" in self.finish_reason

    @property
    def finish_reason(self) -> str:
        """The finish reasons of the choices, each once."""
        reasons = [choice.finish_reason or "abort" for output in self._outputs if output for choice in output.outputs]
        return ", ".join(dict.fromkeys(reasons)) or "abort"

    def add_to(self, summary: RequestSummary) -> None:
        """Add the token counts to the call's line in the log."""
        summary.prompt_tokens = sum(self._prompt_tokens)
        summary.cached_tokens = sum(output.cached_tokens for output in self._outputs if output)
        metrics = [output.metrics for output in self._outputs if output and output.metrics]
        summary.queue_seconds = self._tokenize_seconds + (metrics[0].queue_seconds if metrics else 0.0)
        summary.fetches = [dataclasses.asdict(fetch) for each in metrics for fetch in each.fetches]
        summary.output_tokens = sum(sum(counts) for counts in self._counts)
        summary.first_token_seconds = self.first_token_seconds
