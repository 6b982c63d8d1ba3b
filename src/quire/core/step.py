"""A step's plan and result: everything that passes between scheduler and runner.

A step is a list of spans: *run these tokens of this request from this position*. A whole prompt, a chunk of one, a
decoded token, and a row of drafted tokens to verify differ only in length.

Spans are mutable, slotted classes for speed, since hundreds are made every step; none is changed after `schedule` has
returned it. Imported from anywhere; imports nothing above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.pooling import PoolingParams
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import ReasoningBudget, StructuredOutputsParams

FROM_PREVIOUS = -1
"""Placeholder for a token id in a span: the token that the request's previous step samples."""

DRAFT = -2
"""Placeholder for a token id in a span: a draft by the runner's proposer, which this step verifies."""


@dataclass(slots=True)
class Span:
    """Run `tokens` of one request from position `start`.

    Attributes:
        request: the engine's own number of the request.
        start: position of the first token. With `start_follows` it is an upper bound.
        tokens: ids; `FROM_PREVIOUS` for the previous step's sample, `DRAFT` for drafts.
        num_sampled: how many of the last rows are sampled: 0 for part of a prompt, usually 1, and 1 + drafts if drafts
            are verified.
        targets: the prompt tokens that rows 0, 1, ... should predict; empty unless the request asks for prompt
            log-probabilities. The last one may belong to the next span.
        num_pooled: how many of the last rows are pooled, see `PoolingParams`.
        table_start: `blocks`, if any, replace the request's block tables from this index on.
        blocks: block ids added to the tables since the request's last span, the same number for each KV group.
        copies: beginnings of blocks to copy before this step computes anything: (group, source, destination, tokens).
        start_follows: a step in flight verifies drafts of the request; the true start is after those it accepts.
    """

    request: int
    start: int
    tokens: list[int]
    num_sampled: int = 0
    targets: Sequence[int] = ()
    num_pooled: int = 0
    table_start: int = 0
    blocks: Sequence[Sequence[int]] = ()
    copies: Sequence[tuple[int, int, int, int]] = ()
    start_follows: bool = False


class Move(NamedTuple):
    """A full block between a KV group's pool and the host tier.

    Attributes:
        block: id in the pool.
        slot: number in the tier.
        hash: the block's name, see `block_hash.part_name`; its bytes are verified with it.
    """

    block: int
    slot: int
    hash: bytes
    group: int = 0


@dataclass(slots=True)
class RequestInfo:
    """What the runner must know about a request besides its spans; sent with its first span, and its first after a gap.

    Attributes:
        request: the engine's own number of the request.
        params: how to sample. `params.seed` is set.
        choice: which of the `n` choices this is; part of the noise key.
        prompt_token_ids: the prompt (for penalties).
        output_token_ids: tokens generated before, if the request is resumed on a fresh runner.
        stop_token_ids: ids that end the request, so that `min_tokens` can mask them.
        bad_words: token sequences of which the last token must not follow the others.
        drafting_enabled: whether it may be drafted later; otherwise its tokens need not be followed.
        pooling: how its prompt is pooled, if it is.
        reasoning: limit on its reply's reasoning, if any.
    """

    request: int
    params: SamplingParams
    choice: int
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: list[list[int]] = field(default_factory=list)
    drafting_enabled: bool = True
    pooling: PoolingParams | None = None
    reasoning: ReasoningBudget | None = None


@dataclass(slots=True)
class ExpertMove:
    """A new placement of one layer's experts.

    Attributes:
        version: counts up by one.
        slots: the expert in each slot, see `ExpertSlots`.
    """

    version: int
    layer: int
    slots: list[int]


@dataclass(slots=True)
class StepPlan:
    """Everything that a runner needs for a step.

    Attributes:
        number: counts up by one. A gap means that steps were given up: the runner forgets all requests, and everything
            it needs is sent again from there on.
        spans: at most one per request.
        started: requests that the runner has not seen yet, or not since a gap.
        ended: requests that the runner can forget before it runs this step.
        num_tokens: the sum of the spans' lengths.
        drop_drafting: requests that get no drafts from this step on, so that they need not be followed. No step in
            flight verifies drafts of theirs.
        expert_move: begin to read the experts that this rank gets; they are used from a later plan on.
        expert_version: moves of experts up to this version are in effect.
        expert_loads: pipeline stages exchange how many tokens each expert got.
        saves: blocks to copy into the host tier before this step writes anything.
        loads: blocks to copy from there afterwards, and to verify; before the spans' copies. A plan may have moves but
            no spans.
        compiles: grammars that coming requests need, which other ranks begin to compile in the background. None stands
            for the vocabulary alone.
    """

    number: int
    spans: list[Span]
    started: list[RequestInfo] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    num_tokens: int = 0
    drop_drafting: list[int] = field(default_factory=list)
    expert_move: ExpertMove | None = None
    expert_version: int = 0
    expert_loads: bool = False
    saves: list[Move] = field(default_factory=list)
    loads: list[Move] = field(default_factory=list)
    compiles: list[StructuredOutputsParams | None] = field(default_factory=list)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: first the token that is there, then the most likely ones.

    `ids`, `values` (natural log, of the raw distribution) and `ranks` (1 is the most likely) run in parallel.
    """

    ids: list[int]
    values: list[float]
    ranks: list[int]


@dataclass(slots=True)
class SpanResult:
    """The result of one span.

    Attributes:
        tokens: the sampled ids: accepted drafts, and one more. Empty if the first row of a span with drafts failed, so
            that it must be computed again.
        logprobs: one entry per sampled token, if requested.
        prompt_logprobs: one entry per target, if requested.
        error: why the request must end (its logits were not finite), if it must.
        num_drafted: number of drafts verified; may be fewer than the span has room for.
        pooled: for pooled rows, the sum of their hidden states times `UNIT`, or the log-probability of each label.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    num_drafted: int = 0
    pooled: list[float] | None = None


@dataclass(slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        spans: one result per span, in the plan's order.
        seconds: how long it ran.
        began: when it began, on the monotonic clock.
        drafting: seconds spent on proposing drafts.
        bad_loads: slots of the host tier whose bytes differed from what was saved.
        loading: seconds spent on loads. saving: and on saves, as far as the device does not make them by itself.
    """

    number: int
    spans: list[SpanResult]
    seconds: float = 0.0
    began: float = 0.0
    drafting: float = 0.0
    bad_loads: list[int] = field(default_factory=list)
    loading: float = 0.0
    saving: float = 0.0
