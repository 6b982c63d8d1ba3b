"""The plan of one step and what came of it: all that passes between deciding and computing.

A step is a list of spans: *run these tokens of this request from this position*. A whole prompt, a chunk
of one, one decoded token, and a row of drafted tokens to verify are the same thing with another length.

Spans are mutable and slotted because hundreds are made every step; none is changed after `schedule`
has returned it. This module is a leaf: anyone may import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.pooling import PoolingParams
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import ReasoningBudget, StructuredOutputsParams

FROM_PREVIOUS = -1
"""Stands for a token id in a span: the token that this request's previous step sampled."""

DRAFT = -2
"""Stands for a token id in a span: one that the runner's proposer may guess, to be verified by this step."""


@dataclass(slots=True)
class Span:
    """Run `tokens` of one request from position `start`.

    Attributes:
        request: the engine's own number of the request.
        start: position of the first token. With `start_follows` it is an upper bound.
        tokens: ids; `FROM_PREVIOUS` where the previous step's sample goes, `DRAFT` where drafts may.
        num_sampled: how many of the last rows are sampled: 0 for part of a prompt, usually 1,
            1 + drafts when drafts are verified.
        targets: the prompt tokens that rows 0, 1, ... should have predicted; empty unless the request asks
            for prompt log-probabilities. The last one may lie in the next span.
        num_pooled: how many of the last rows are pooled, see `PoolingParams`.
        table_start: `blocks`, if there are any, replace the request's block tables from this index on.
        blocks: block ids that are new in the tables since the request's last span: as many for each KV group.
        copies: (group, source, destination, tokens): beginnings of blocks to copy before anything of this step is
            computed.
        start_follows: a step in flight verifies drafts of the request: the true start is after what it accepts.
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
        block: of the pool.
        slot: of the tier.
        hash: the block's name, see `block_hash.part_name`: its bytes are checked with it.
    """

    block: int
    slot: int
    hash: bytes
    group: int = 0


@dataclass(slots=True)
class RequestInfo:
    """What the runner must know of a request beside its spans; sent with its first span, and its first after a gap.

    Attributes:
        request: the engine's own number of the request.
        params: how to sample. `params.seed` is set.
        choice: which of the `n` choices this is: part of the noise key.
        prompt_token_ids: the prompt (penalties count it).
        output_token_ids: tokens made before, when a request is resumed on a fresh runner.
        stop_token_ids: ids that end the request, so that `min_tokens` can mask them.
        bad_words: token sequences of which the last token must not follow the others.
        drafting_enabled: whether it may be drafted later; else its tokens need not be followed.
        pooling: how its prompt is pooled; None: it is not.
        reasoning: how long its reply may reason; None: as long as it likes.
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
    """Experts of one layer that are to be on other ranks.

    Attributes:
        version: counts up by one.
        slots: the expert in each slot, see `ExpertSlots`.
    """

    version: int
    layer: int
    slots: list[int]


@dataclass(slots=True)
class StepPlan:
    """All that a step needs.

    Attributes:
        number: counts up by one. Before a gap steps may have been given up: a runner that sees one forgets all it
            knows of requests, and all that it needs is sent again from there on.
        spans: at most one a request.
        started: requests that the runner has not seen yet, or not since a gap.
        ended: requests that the runner may forget before it runs this step.
        num_tokens: the sum of the spans' lengths.
        drop_drafting: requests that get no drafts from this step on, so that they need not be followed. No step in
            flight verifies any of theirs.
        expert_move: begin to read the experts that this rank gets; it has them when a later plan says so.
        expert_version: the moves of experts up to this one are in force.
        expert_loads: stages of a pipeline tell each other how many tokens each expert has got.
        saves: blocks to be copied into the host tier before anything of this step is written.
        loads: blocks to be copied from there after that, and checked; before the spans' own copies. A plan may have
            moves and no spans.
        compiles: grammars that requests to come need: other ranks begin to compile them beside their steps. None: one
            needs no more than the vocabulary.
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
    """Log-probabilities at one position: the token that stands there first, then the best ones.

    `ids`, `values` (natural log, of the raw distribution) and `ranks` (1 is the most likely) run in parallel.
    """

    ids: list[int]
    values: list[float]
    ranks: list[int]


@dataclass(slots=True)
class SpanResult:
    """What one span yielded.

    Attributes:
        tokens: the sampled ids: the drafts that were accepted, and one more. None at all where the first row failed
            beside drafts: it is to be computed again.
        logprobs: one entry a sampled token, when asked for.
        prompt_logprobs: one entry a target, when asked for.
        error: why this request must end (its logits were not finite); None when all is well.
        num_drafted: drafts that were verified; fewer than the span has room for where the proposer had fewer.
        pooled: of the rows that are pooled: the sum of their hidden states in parts of `UNIT`, or the
            log-probability of each label.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    num_drafted: int = 0
    pooled: list[float] | None = None


@dataclass(slots=True)
class StepResult:
    """What a step yielded.

    Attributes:
        spans: one result a span, in the plan's order.
        seconds: how long it ran.
        began: when, on the monotonic clock.
        drafting: seconds of it that went into proposing drafts.
        bad_loads: slots of the host tier whose bytes are not those that were saved there.
        loading: seconds of it that went into loads.
    """

    number: int
    spans: list[SpanResult]
    seconds: float = 0.0
    began: float = 0.0
    drafting: float = 0.0
    bad_loads: list[int] = field(default_factory=list)
    loading: float = 0.0
