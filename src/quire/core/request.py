"""A request as the scheduler sees it, and the updates and statistics that it reports."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import ClassVar, NamedTuple

from quire.core.draft_length import DraftState
from quire.core.pooling import PoolingParams
from quire.core.prefix_cache import KEY_BYTES
from quire.core.prefix_node import Node
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo, TokenLogprobs
from quire.core.structured_outputs import ReasoningBudget


class Event(NamedTuple):
    """Something that a request may wait for before it can be admitted.

    Attributes:
        kind: what the event is about: `prefix_leaders.BLOCK`, or a name chosen by whoever reports it.
        key: identifies the event among those of its kind.
    """

    kind: str
    key: Hashable


class Status(enum.Enum):
    """A request's state. `AWAITING`: not in line for admission until the event that it `awaits`."""

    WAITING = "waiting"
    AWAITING = "awaiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class FetchStats:
    """A transfer of blocks that a request waited for.

    Attributes:
        source: "host" (to the pool); "disk", "peer" (another engine, which computed them) or "remote" (another node,
            which had them), to the host tier.
        tokens: number of tokens requested; once it has ended, those that arrived.
        begin: when it began, on the caller's clock.
        seconds: its duration; None while it is in progress.
        moving: the part of `seconds` in which bytes arrived from another engine, which computed in the rest.
        engine: the other engines that they came from, if known.
        resumed: it was begun after a preemption, so the tokens are not the prompt's alone.
    """

    source: str
    tokens: int
    begin: float
    seconds: float | None = None
    moving: float = 0.0
    engine: str = ""
    resumed: bool = False


@dataclass(slots=True)
class RequestStats:
    """Times (seconds, on the caller's clock) and counts of one request.

    Attributes:
        arrived, admitted, first_token, finished: when each happened; None while it has not.
        prefill_seconds, decode_seconds: time in steps that computed its prompt, and its output.
        steps: number of steps that it took part in.
        preemptions: how often it was preempted.
        drafted, accepted: number of draft tokens that were verified, and accepted.
        fetches: transfers that were begun for it.
    """

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    fetches: list[FetchStats] = field(default_factory=list)

    def fetching(self, source: str, tokens: int, now: float) -> None:
        """A fetch has begun; consecutive ones from the same source are counted as one."""
        resumed = self.preemptions > 0
        if not self.fetches or (self.fetches[-1].source, self.fetches[-1].resumed) != (source, resumed):
            self.fetches.append(FetchStats(source, tokens, now, resumed=resumed))

    def fetched(self, tokens: int, seconds: float, moving: float = 0.0, engine: str = "") -> None:
        """The last fetch has ended."""
        last = self.fetches[-1]
        if tokens and engine and engine not in last.engine.split(" and "):
            last.engine = f"{last.engine} and {engine}" if last.engine else engine
        last.tokens = tokens + (0 if last.seconds is None else last.tokens)
        last.seconds = seconds + (last.seconds or 0.0)
        last.moving += moving


@dataclass(slots=True)
class RequestUpdate:
    """What one commit yielded for one request. The update with a `finish_reason` is the last one.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the token id that ended it, if one did.
        cached_tokens: prompt tokens that were found in the prefix cache at first admission.
        pooled: the result of pooling its prompt, in the last update.
    """

    request: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    cached_tokens: int = 0
    stats: RequestStats | None = None
    pooled: list[float] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence in the engine. Each of the `n` choices of a user's request is one.

    With `output_token_ids` and `num_scored` it resumes what another engine began, after those tokens.

    Three counters express prefix hits, chunks and resumption: `len(tokens)` is what is known, `num_pending` what steps
    in flight will add, and `num_computed` how many positions have their KV, or will have it once the steps in flight
    have run. If those verify drafts, the last two are upper bounds: `num_unverified_tokens` rows may yield no token.

    Attributes:
        id: the engine's number for it.
        owner: its API key's owner, "" if there is only one; owners take turns (see `turns.py`).
        order: its place in the order of service: (priority, turn, id).
        awaits: the event that it waits for, if any.
        max_tokens: longest output; 0 means that the prompt is only computed and scored.
        tokens: prompt and output token ids known so far.
        keys: the same as 64-bit key ids, for caches.
        tables: for each KV group, block ids from position 0 on; 0 where a window has passed. None while it has no
            blocks.
        num_sent: number of table entries that the runner knows.
        copies: beginnings of blocks to copy when the next span runs: (group, source, destination, tokens).
        num_committed: positions whose steps have committed since the last admission.
        num_published: full blocks published in the prefix cache since the last admission.
        num_passed: by group, number of leading blocks that no later token sees; they have been freed.
        marks: see `kv_group.States.marks`.
        tip: node of the last published block.
        high_water: most positions ever computed at a preemption; below it, the request is recomputing.
        draft_state: statistics about its drafts.
        num_in_flight: number of steps in flight with a span of this request; `last_step` is the newest one's number.
        num_scored: rows whose prompt log-probability has been requested from the runner.
        num_fetches: incomplete fetches begun for it since it was last admitted.
        num_waits: how often it waited for blocks from elsewhere since then, not counting loads that came whole.
        computed_here: nothing of it is had from elsewhere.
        pooling: how its prompt is pooled, if it is. `pooled`: the sum so far.
        reasoning: limit on its reply's reasoning, if any.
    """

    kind: ClassVar[str] = "block"  # see `prefix_leaders.BLOCK`

    id: int
    prompt_token_ids: InitVar[list[int]]
    params: SamplingParams
    _: KW_ONLY
    max_tokens: int
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: list[list[int]] = field(default_factory=list)
    scope: str = ""
    owner: str = ""
    arrived: InitVar[float] = 0.0
    output_token_ids: InitVar[Sequence[int]] = ()
    num_scored: int = 0
    awaits: Event | None = None
    pooling: PoolingParams | None = None
    reasoning: ReasoningBudget | None = None

    order: tuple[int, int, int] = field(init=False)
    status: Status = field(default=Status.WAITING, init=False)
    stats: RequestStats = field(init=False)
    draft_state: DraftState = field(init=False)
    known_to_runner: bool = field(default=False, init=False)

    tokens: list[int] = field(init=False)
    keys: array[int] = field(init=False)
    hashes: list[bytes] = field(default_factory=list, init=False)
    num_prompt: int = field(init=False)
    num_positions: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    num_pending: int = field(default=0, init=False)
    num_unverified_tokens: int = field(default=0, init=False)
    num_cached: int = field(default=0, init=False)
    num_fetches: int = field(default=0, init=False)
    num_waits: int = field(default=0, init=False)
    computed_here: bool = field(default=False, init=False)
    high_water: int = field(default=0, init=False)
    pooled: list[float] = field(default_factory=list, init=False)

    tables: list[list[int]] = field(default_factory=list, init=False)
    copies: list[tuple[int, int, int, int]] = field(default_factory=list, init=False)
    num_sent: int = field(default=0, init=False)
    num_committed: int = field(default=0, init=False)
    num_published: int = field(default=0, init=False)
    num_passed: list[int] = field(default_factory=list, init=False)
    marks: frozenset[int] = field(default=frozenset(), init=False)
    tip: Node | None = field(default=None, init=False)
    num_in_flight: int = field(default=0, init=False)
    last_step: int = field(default=-1, init=False)

    def __post_init__(self, prompt_token_ids: list[int], arrived: float, output_token_ids: Sequence[int]) -> None:
        self.order = (0, 0, self.id)
        self.stats = RequestStats(arrived)
        self.draft_state = DraftState(drafting_enabled=self.params.speculate)
        self.tokens = [*prompt_token_ids, *output_token_ids]
        self.keys = array("q", self.tokens)
        self.num_prompt = len(prompt_token_ids)
        self.num_positions = self.num_prompt + max(0, self.max_tokens - 1)

    @property
    def num_remaining(self) -> int:
        """Tokens that could be computed next: one for a decoding request, none if it must wait for a commit."""
        return min(len(self.tokens) + self.num_pending, self.num_positions) - self.num_computed

    @property
    def computes_all(self) -> bool:
        """Whether it needs every row of its prompt, so that it cannot use cached ones, whose hidden states are gone."""
        return self.params.prompt_logprobs is not None or (self.pooling is not None and self.pooling.method == "mean")

    @property
    def num_draftable(self) -> int:
        """Drafts that a step could verify besides its next token; its very last token is never a draft."""
        if not self.draft_state.drafting_enabled:
            return 0
        return max(0, self.num_positions - len(self.tokens) - self.num_pending)

    def key_bytes(self, start: int, end: int) -> bytes:
        """Key ids of positions `start` to `end` as bytes."""
        return self.keys[start:end].tobytes()

    def block_keys(self, first: int, last: int, block_size: int) -> list[bytes]:
        """Key ids of the full blocks `first` to `last - 1`, one entry per block."""
        data, size = self.key_bytes(first * block_size, last * block_size), block_size * KEY_BYTES
        return [data[start : start + size] for start in range(0, len(data), size)]

    def append(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        self.keys.extend(tokens)

    def ended(self, reason: str, error: str | None = None) -> RequestUpdate:
        """The update for an end that was not caused by a step."""
        return RequestUpdate(
            self.id, finish_reason=reason, error=error, cached_tokens=self.num_cached, stats=self.stats
        )

    def pool(self, start: int, pooled: list[float]) -> None:
        """Add the sum over a span from position `start` on. When a prompt is recomputed, the sum starts over."""
        if self.pooled and start:
            pooled = [before + more for before, more in zip(self.pooled, pooled, strict=True)]
        self.pooled = pooled

    def cut_at_end(self, update: RequestUpdate, end: int) -> None:
        """Find the stop token, or the length, that ends the request within a new update; the rest is dropped.

        Args:
            end: upper bound of the position after what was computed.
        """
        before = len(self.tokens) - self.num_prompt
        left = self.max_tokens - before
        for count, token in enumerate(update.tokens[:left], start=1):
            if token in self.stop_token_ids and before + count >= self.params.min_tokens:
                update.finish_reason = "stop"
                update.stop_reason = token if token in (self.params.stop_token_ids or ()) else None
                left = count
                break
        else:
            if len(update.tokens) < left or end < self.num_prompt:
                return
            update.finish_reason = "length"
            if self.pooling is not None:
                update.pooled = self.pooling.finished(self.pooled, self.num_prompt)
        update.tokens = update.tokens[:left]
        update.logprobs = update.logprobs and update.logprobs[:left]

    def restart(self) -> None:
        """Reset it for the queue: without blocks, unknown to the runner, and without results of steps in flight."""
        if self.status is Status.RUNNING:
            self.stats.preemptions += 1
        self.status = Status.WAITING
        self.known_to_runner = False
        self.high_water = max(self.high_water, self.num_computed)
        self.num_computed = self.num_committed = self.num_pending = self.num_unverified_tokens = 0
        self.num_in_flight = self.num_sent = self.num_published = 0
        self.tables, self.copies, self.tip = [], [], None

    def info(self) -> RequestInfo:
        """What the runner must know, including the output so far, in case it is a fresh runner."""
        return RequestInfo(
            request=self.id,
            params=self.params,
            choice=self.choice,
            prompt_token_ids=self.tokens[: self.num_prompt],
            output_token_ids=self.tokens[self.num_prompt :],
            stop_token_ids=self.stop_token_ids,
            bad_words=self.bad_words,
            drafting_enabled=self.draft_state.drafting_enabled,
            pooling=self.pooling,
            reasoning=self.reasoning,
        )
