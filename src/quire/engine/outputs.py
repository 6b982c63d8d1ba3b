"""What a user gets back: one `RequestOutput` per prompt, which grows while the request runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.core.request import FetchStats, RequestStats
from quire.text.reply import Reply, ReplyEvent


@dataclass(slots=True)
class Logprob:
    """One token's log-probability in the model's distribution, before temperature, penalties and filters.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: by probability; 1 is the most likely token.
        decoded_token: its text; None if the model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, one of `n`.

    Attributes:
        index: from 0 to `n` - 1.
        text: the text so far.
        delta: the part of `text` that is new since the output was last yielded or returned.
        token_ids: sampled token ids, up to the one that completed a stop string.
        logprobs: for each token a dict by token id, which always contains the sampled one. None unless requested.
        cumulative_logprob: sum of the sampled tokens' log-probabilities. None unless `logprobs` were requested.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for other ends.
        error: what went wrong, with `finish_reason="error"`.
        events: for a chat, the parts of the reply in order (reasoning, content, tool calls); otherwise None.
        reasoning_tokens: the number of `token_ids` that are reasoning or its end marker.
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
        """Whether it has ended; `finish_reason` says why."""
        return self.finish_reason is not None

    @property
    def completed(self) -> bool:
        """Whether it has ended, and not with an error."""
        return self.finish_reason not in (None, "error")

    @property
    def reply(self) -> Reply:
        """The parsed reply: reasoning, content and tool calls. Without a chat, all text is content."""
        return Reply(content=self.text) if self.events is None else Reply.of(self.events)


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds, and counts. With several choices, times are the first one's and counts are sums.

    Attributes:
        queue_seconds: from arrival to the first step.
        time_to_first_token: from arrival to the first sampled token; None if there was none.
        prefill_seconds: in steps that computed the prompt.
        decode_seconds: in steps that computed the output.
        detokenize_seconds: turning tokens into text.
        total_seconds: from arrival to the end.
        steps: steps in which the request took part.
        preemptions: how often it lost its KV blocks and was recomputed.
        drafted: draft tokens that were verified for it.
        accepted: draft tokens that were accepted.
        fetches: blocks that the first choice waited for, from a KV tier or another engine.
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

    @classmethod
    def of(cls, stats: Mapping[int, RequestStats]) -> RequestMetrics:
        """From the statistics of each choice that has them."""
        first = stats.get(0) or next(iter(stats.values()), None)
        if first is None:
            return cls()
        end = max(choice.finished or choice.arrived for choice in stats.values())
        return cls(
            queue_seconds=(first.admitted if first.admitted is not None else end) - first.arrived,
            time_to_first_token=None if first.first_token is None else first.first_token - first.arrived,
            prefill_seconds=first.prefill_seconds,
            decode_seconds=first.decode_seconds,
            total_seconds=end - first.arrived,
            steps=sum(choice.steps for choice in stats.values()),
            preemptions=sum(choice.preemptions for choice in stats.values()),
            drafted=sum(choice.drafted for choice in stats.values()),
            accepted=sum(choice.accepted for choice in stats.values()),
            fetches=first.fetches,
        )


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of one prompt.

    Attributes:
        prompt: its text; None if token ids were given.
        prompt_token_ids: its token ids.
        embedding: [dimensions] floats, normalized to length 1 if the checkpoint's configuration says so.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    cached_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt: its completions, which grow while the request runs, and its statistics.

    Attributes:
        request_id: the given one, or a generated one.
        prompt: its text; None if token ids were given.
        prompt_token_ids: its token ids.
        outputs: one completion for each of `n`.
        seed: the seed of the sampling: the given one, or a random one; the same request with it gives the same tokens.
        prompt_logprobs: for each prompt token a dict by token id; None for the first token, which nothing predicts.
            None unless requested.
        cached_tokens: prompt tokens found in the prefix cache.
        clamped_from: the requested `max_tokens`, if the context has room for fewer; otherwise None.
        metrics: times and counts, set when the request has ended.
        pooled: for embeddings and scores, the pooled value (see `PoolingParams`), set when the request has ended.
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
        """Called when the output goes to its reader: later text starts new deltas."""
        self._handed_out = True
        return self

    def begin_deltas(self) -> None:
        """Called before text is added: clears deltas that the reader has seen."""
        if self._handed_out:
            self._handed_out = False
            for output in self.outputs:
                output.delta = ""

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(output.finished for output in self.outputs)
