"""What a user gets back: one `RequestOutput` a prompt, which grows while the request runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.request import FetchStats
from quire.text.reply import Reply, ReplyEvent


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural log) in the model's own distribution, before any filter.

    Attributes:
        rank: 1 is the most likely token.
        decoded_token: its text; None where the model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    Attributes:
        index: which of the `n` choices.
        text: everything so far; `delta` is what is new since the output was last handed out.
        token_ids: sampled ids, up to the one that completed a stop string.
        logprobs: one dict a token, by token id; always holds the sampled one. None unless asked for.
        cumulative_logprob: the sum over the sampled tokens; None unless `logprobs` were asked for.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or stop token id that ended it.
        error: what went wrong, with `finish_reason="error"`.
        events: of a chat: what the reply is made of, in order (reasoning, content, tool calls); else None.
        reasoning_tokens: of `token_ids`, those that are reasoning or its end marker.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    delta: str = ""
    events: list[ReplyEvent] | None = None
    reasoning_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def reply(self) -> Reply:
        """What the events add up to; of what is no chat, all text is content."""
        return Reply(content=self.text) if self.events is None else Reply.of(self.events)


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds, and counts. With several choices: times of the first one, sums of the counts.

    Attributes:
        queue_seconds: from arrival to the first step.
        time_to_first_token: from arrival to the first sampled token; None if there was none.
        prefill_seconds, decode_seconds: in steps that computed the prompt, and the output.
        detokenize_seconds: spent on turning tokens into text.
        total_seconds: from arrival to the end.
        steps: steps that held a span of the request.
        preemptions: how often it lost its blocks and was computed again.
        drafted, accepted: draft tokens that were verified for it, and those of them that it sampled too.
        fetches: of the first choice: blocks that it waited for, from a tier.
    """

    queue_seconds: float = 0.0
    time_to_first_token: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    detokenize_seconds: float = 0.0
    total_seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    fetches: list[FetchStats] = field(default_factory=list)


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of one prompt.

    Attributes:
        prompt: its text; None where token ids were given.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    cached_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """All that belongs to one prompt.

    Attributes:
        request_id: the user's, or one that was made.
        prompt: its text; None where token ids were given.
        prompt_logprobs: one entry a prompt token; None for the first, which nothing predicts.
        cached_tokens: prompt tokens found in the prefix cache.
        seed: what the noise was keyed with: the user's, or the one drawn at admission.
        clamped_from: the `max_tokens` that was asked for, where the context has less left; else None.
        metrics: filled when the request has ended.
        pooled: of a prompt that is pooled, what came of it (see `PoolingParams`), when the request has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cached_tokens: int = 0
    clamped_from: int | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    pooled: list[float] | None = None
    _handed_out: bool = field(default=False, init=False, repr=False, compare=False)

    def hand_out(self) -> RequestOutput:
        """The output as it goes to its reader: what comes after begins new deltas."""
        self._handed_out = True
        return self

    def begin_deltas(self) -> None:
        """Something is about to be added: deltas that the reader has seen are cleared."""
        if self._handed_out:
            self._handed_out = False
            for output in self.outputs:
                output.delta = ""

    @property
    def finished(self) -> bool:
        """All choices have ended."""
        return all(output.finished for output in self.outputs)
