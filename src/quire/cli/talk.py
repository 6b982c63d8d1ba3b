"""The interface through which a chat gets answers, and its implementation with a model in this process; `remote.py` has
the one with a server."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.cli.options import sampling_params
from quire.cli.report import rate, verified
from quire.text.reply import Reply, ReplyEvent

if TYPE_CHECKING:
    from quire.llm import LLM

Messages = Sequence[Mapping[str, Any]]
Show = Callable[[ReplyEvent], None]
"""Called with the parts of an answer, as they are generated."""


class ToolUse(NamedTuple):
    """The functions that an answer may call.

    Attributes:
        tools: in OpenAI's format.
        choice: "auto", "required" (exactly one call) or "none".
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"

    @property
    def fields(self) -> dict[str, Any]:
        """The request's fields in OpenAI's format; empty without tools."""
        if not self.tools:
            return {}
        one = {"parallel_tool_calls": False} if self.choice == "required" else {}
        return {"tools": self.tools, "tool_choice": self.choice, **one}


NO_TOOLS = ToolUse()


@dataclass(kw_only=True)
class Answer:
    """One answer, complete or not.

    Attributes:
        reply: its reasoning, content and tool calls.
        reason: why it ended: "stop", "length", "abort" (Ctrl-C) or "error".
        error: what went wrong, with the reason "error".
        prompt_tokens, cached_tokens, output_tokens, reasoning_tokens: None if the server did not report them.
        first_seconds: from the question to the first text; None if there was none.
        seconds: from the question to the end.
    """

    reply: Reply = field(default_factory=Reply)
    reason: str
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    first_seconds: float | None = None
    seconds: float = 0.0

    @property
    def context_used(self) -> int | None:
        """Tokens of prompt and answer."""
        if self.prompt_tokens is None or self.output_tokens is None:
            return None
        return self.prompt_tokens + self.output_tokens


class Talker(Protocol):
    """Answers a chat's messages.

    Attributes:
        context: longest conversation in tokens; None if the server did not report it.
        more_context: how to make it longer, for people.
        refused: sampling parameters that it cannot use.
        suggested: sampling parameters for those that are not set; see `sampling_params.suggested`.
    """

    context: int | None
    more_context: str
    refused: tuple[str, ...]
    suggested: dict[str, float]

    def answer(self, messages: Messages, fields: Mapping[str, Any], show: Show, use: ToolUse = NO_TOOLS) -> Answer:
        """Answer, and show the answer as it is generated. Ctrl-C ends it with the reason "abort".

        Raises:
            QuireError: there is no answer. A PromptTooLongError: the conversation does not fit.
        """

    def session(self) -> list[tuple[str, str]]:
        """Rows of statistics since the start."""


class LocalTalker:
    """A model in this process."""

    refused: tuple[str, ...] = ()
    more_context = "a larger --max-model-len would hold more, up to what the model was made for"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.context: int | None = llm.max_model_len
        self.suggested = llm.sampling_suggestions

    def answer(self, messages: Messages, fields: Mapping[str, Any], show: Show, use: ToolUse = NO_TOOLS) -> Answer:
        request = self.llm.add_chat(messages, sampling_params(fields), **use.fields)
        shown = 0
        with _interrupt() as interrupted:
            while True:
                for output in self.llm.abort(request) if interrupted() else self.llm.step():
                    [choice] = output.outputs
                    events = choice.events or []
                    for event in events[shown:]:
                        show(event)
                    shown = len(events)
                    if output.finished:
                        return Answer(
                            reply=choice.reply,
                            reason=choice.finish_reason or "error",
                            error=choice.error,
                            prompt_tokens=len(output.prompt_token_ids),
                            cached_tokens=output.cached_tokens,
                            output_tokens=len(choice.token_ids),
                            reasoning_tokens=choice.reasoning_tokens,
                            first_seconds=output.metrics.time_to_first_token,
                            seconds=output.metrics.total_seconds,
                        )

    def session(self) -> list[tuple[str, str]]:
        stats = self.llm.stats
        speculation = [("session: speculation", verified(stats))] if stats.verifications else []
        return [
            ("session: prefill", rate(stats.prefill_tokens, stats.prefill_seconds)),
            ("session: decode", rate(stats.decode_tokens, stats.decode_seconds)),
            *speculation,
            ("session: cached tokens", f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens"),
            ("session: KV blocks used", f"{stats.peak_blocks:,} of {stats.num_blocks:,} at most"),
        ]


@contextmanager
def _interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed, since a step must not be interrupted.

    A second Ctrl-C within 1.5 seconds ends the program, in case a step hangs.
    """
    pressed: list[float] = []

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if pressed and now - pressed[-1] < 1.5:
            raise KeyboardInterrupt
        pressed.append(now)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
