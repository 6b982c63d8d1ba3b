"""The record of each request that was sent."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Times are of one clock, in seconds.

    Attributes:
        asked_input: tokens (or words) of its prompt.
        asked_output: tokens that it asked for.
        due: when it should have been sent, in an open loop.
        sent: when it was sent.
        end: when its stream ended, or it failed.
        times: when each chunk with tokens arrived; `counts` has the numbers of tokens.
        prompt_tokens, cached_tokens, output_usage: reported by the server, or None.
        error: the kind of failure, from a small set; None on success. `message` says more.
    """

    asked_input: int
    asked_output: int
    turn: int = 0
    due: float | None = None
    sent: float = 0.0
    end: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("L"))
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_usage: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""

    @property
    def counted(self) -> int:
        """Tokens counted in the chunks."""
        return sum(self.counts)

    @property
    def output_tokens(self) -> int:
        """Generated tokens: by usage, or else as counted."""
        return self.counted if self.output_usage is None else self.output_usage

    @property
    def input_tokens(self) -> int:
        """The prompt's tokens: by usage, or else as sent."""
        return self.asked_input if self.prompt_tokens is None else self.prompt_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there was none."""
        return self.times[0] - self.sent if self.times else None

    @property
    def e2e(self) -> float:
        """Seconds from sending to the end."""
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there are fewer than two."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    def gaps(self) -> list[tuple[float, int]]:
        """(seconds per token, tokens) for each chunk after the first: a chunk's gap is divided among its tokens."""
        pairs = zip(self.times, self.times[1:], self.counts[1:], strict=False)
        return [((after - before) / count, count) for before, after, count in pairs]

    def as_json(self, start: float) -> dict[str, Any]:
        """The record for a report with details; times in milliseconds since `start`."""

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(1000 * seconds, 3)

        return {
            "turn": self.turn,
            "due_ms": None if self.due is None else ms(self.due - start),
            "sent_ms": ms(self.sent - start),
            "end_ms": ms(self.end - start),
            "ttft_ms": ms(self.ttft),
            "tpot_ms": ms(self.tpot),
            "e2e_ms": ms(self.e2e),
            "chunk_ms": [ms(at - start) for at in self.times],
            "chunk_tokens": list(self.counts),
            "prompt_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "message": self.message or None,
        }
