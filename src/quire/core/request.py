"""A request as the scheduler sees it, and what it tells the outside."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.draft_length import DraftState
from quire.core.pooling import PoolingParams
from quire.core.prefix_cache import KEY_BYTES, Node
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo, TokenLogprobs
from quire.core.structured_outputs import ReasoningBudget


class Event(NamedTuple):
    """What a request may wait for before it stands in line.

    Attributes:
        kind: who brings it: `prefix_leaders.BLOCK`, or whatever others name theirs.
        key: which one of the kind.
    """

    kind: str
    key: Hashable


class Status(enum.Enum):
    """Where a request is. `AWAITING`: not in line before the event that it `awaits`."""

    WAITING = "waiting"
    AWAITING = "awaiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class FetchStats:
    """Blocks that a request waited for, from a tier.

    Attributes:
        source: "host": to the pool; "disk", "peer" (another engine, which computed them) or "remote" (another node,
            which had them): to the host tier.
        tokens: that are asked for, and once that has ended, all that came.
        begin: when it began, on the caller's clock.
        seconds: that it took; None while it goes on.
        moving: of these, the seconds in which bytes came from another engine; the rest it computed.
    """

    source: str
    tokens: int
    begin: float
    seconds: float | None = None
    moving: float = 0.0


@dataclass(slots=True)
class RequestStats:
    """Times (seconds, on the caller's clock) and counts of one request.

    Attributes:
        arrived, admitted, first_token, finished: when each happened; None while it has not.
        prefill_seconds, decode_seconds: time inside steps that computed its prompt, and its output.
        steps: steps that it took part in.
        preemptions: how often it lost its blocks.
        drafted, accepted: draft tokens that were verified for it, and those of them that it sampled too.
        fetches: that were begun for it.
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
        """A fetch has begun; one that follows another from the same place goes on with that."""
        if not self.fetches or self.fetches[-1].source != source:
            self.fetches.append(FetchStats(source, tokens, now))

    def fetched(self, tokens: int, seconds: float, moving: float = 0.0) -> None:
        """The fetch that was begun last has ended."""
        last = self.fetches[-1]
        last.tokens = tokens + (0 if last.seconds is None else last.tokens)
        last.seconds = seconds + (last.seconds or 0.0)
        last.moving += moving


@dataclass(slots=True)
class RequestUpdate:
    """What one commit yielded for one request. The one with a `finish_reason` is the last.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the token id that ended it, if one did.
        cached_tokens: prompt tokens that were found in the prefix cache at first admission.
        pooled: what its prompt was pooled to, at its end.
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


class Request:
    """One sequence on its way through the engine. The `n` choices of a user's request are one of these each.

    With `output_token_ids` and `num_scored` it resumes what another engine began: it goes on after those tokens.

    Three counters carry prefix hits, chunks and resumption: `len(tokens)` is what is known, `num_pending` what
    steps in flight will add, and `num_computed` how many positions have their KV, or will once the steps
    in flight have run. Where those verify drafts, the last two are upper bounds: `num_unverified_tokens` rows
    may yield none.

    Attributes:
        id: the engine's own number.
        owner: whose it is: owners take turns (see `turns.py`). "" where there is one only.
        order: its place in the order of service: (priority, turn, id).
        awaits: the event that it waits for; None: it waits for none.
        max_tokens: longest output; 0: the prompt is computed and scored, and nothing sampled.
        tokens: prompt and output token ids known so far.
        keys: the same as 64-bit key ids, for caches.
        tables: a KV group each, block ids from position 0 on; 0 where a window has passed. None while it has no blocks.
        num_sent: how many entries of its tables the runner knows.
        copies: beginnings of blocks to copy when the next span runs: (group, source, destination, tokens).
        num_committed: positions whose steps have committed since the last admission.
        num_published: full blocks offered to the prefix cache since the last admission.
        num_passed: by group, how many blocks no later token sees: those of them that there were are given back.
        marks: see `kv_group.States.marks`.
        tip: node of the last published block.
        high_water: most positions ever computed at a preemption; below it, the request is recomputing.
        draft_state: how well drafts of it have done.
        num_in_flight: steps in flight that hold a span of this request; `last_step` is the newest one's number.
        num_scored: rows whose prompt log-probability was asked for already.
        num_fetches: fetches that it has begun since it was last admitted, and that have not brought all they were to.
        pooling: how its prompt is pooled; None: it is not. `pooled`: what has been pooled so far.
        reasoning: how long its reply may reason; None: as long as it likes.
    """

    __slots__ = (
        "awaits",
        "bad_words",
        "choice",
        "copies",
        "draft_state",
        "hashes",
        "high_water",
        "id",
        "keys",
        "known_to_runner",
        "last_step",
        "marks",
        "max_tokens",
        "num_cached",
        "num_committed",
        "num_computed",
        "num_fetches",
        "num_in_flight",
        "num_passed",
        "num_pending",
        "num_prompt",
        "num_published",
        "num_scored",
        "num_sent",
        "num_unverified_tokens",
        "order",
        "owner",
        "params",
        "pooled",
        "pooling",
        "reasoning",
        "scope",
        "stats",
        "status",
        "stop_token_ids",
        "tables",
        "tip",
        "tokens",
    )

    def __init__(
        self,
        id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        choice: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        bad_words: list[list[int]] | None = None,
        scope: str = "",
        owner: str = "",
        arrived: float = 0.0,
        output_token_ids: Sequence[int] = (),
        num_scored: int = 0,
        awaits: Event | None = None,
        pooling: PoolingParams | None = None,
        reasoning: ReasoningBudget | None = None,
    ) -> None:
        self.id = id
        self.params = params
        self.choice = choice
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.bad_words = bad_words or []
        self.scope = scope
        self.owner = owner
        self.order = (0, 0, id)
        self.awaits: Event | None = awaits
        self.status = Status.WAITING
        self.stats = RequestStats(arrived)

        self.tokens = [*prompt_token_ids, *output_token_ids]
        self.num_prompt = len(prompt_token_ids)
        self.keys = array("q", self.tokens)
        self.hashes: list[bytes] = []
        self.num_computed = 0
        self.num_pending = 0
        self.num_unverified_tokens = 0
        self.num_cached = 0
        self.high_water = 0
        self.num_scored = num_scored
        self.num_fetches = 0
        self.pooling = pooling
        self.reasoning = reasoning
        self.pooled: list[float] = []
        self.known_to_runner = False
        self.draft_state = DraftState(drafting_enabled=params.speculate)

        self.tables: list[list[int]] = []
        self.num_sent = 0
        self.copies: list[tuple[int, int, int, int]] = []
        self.num_committed = 0
        self.num_published = 0
        self.num_passed: list[int] = []
        self.marks: frozenset[int] = frozenset()
        self.tip: Node | None = None
        self.num_in_flight = 0
        self.last_step = -1

    @property
    def num_positions(self) -> int:
        """Positions that are computed in all: the prompt's, and the output's but the last, whose KV is not needed."""
        return self.num_prompt + max(0, self.max_tokens - 1)

    @property
    def num_remaining(self) -> int:
        """Tokens that could be computed next: one for a decoding request, none when it must wait for a commit."""
        return min(len(self.tokens) + self.num_pending, self.num_positions) - self.num_computed

    @property
    def computes_all(self) -> bool:
        """Whether it needs every row of its prompt, so that cached ones, whose hidden states are gone, are no use."""
        return self.params.prompt_logprobs is not None or (self.pooling is not None and self.pooling.method == "mean")

    @property
    def num_draftable(self) -> int:
        """Drafts that a step could verify beside its next token: the last token of all is never a draft."""
        if not self.draft_state.drafting_enabled:
            return 0
        return max(0, self.num_positions - len(self.tokens) - self.num_pending)

    def key_bytes(self, start: int, end: int) -> bytes:
        """Key ids of positions `start` to `end` as bytes."""
        return self.keys[start:end].tobytes()

    def block_keys(self, first: int, last: int, block_size: int) -> list[bytes]:
        """Key ids of the full blocks `first` to `last - 1`, one entry each."""
        data, size = self.key_bytes(first * block_size, last * block_size), block_size * KEY_BYTES
        return [data[start : start + size] for start in range(0, len(data), size)]

    def append(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        self.keys.extend(tokens)

    def ended(self, reason: str, error: str | None = None) -> RequestUpdate:
        """The update that says that it has ended without a step's doing."""
        return RequestUpdate(
            self.id, finish_reason=reason, error=error, cached_tokens=self.num_cached, stats=self.stats
        )

    def pool(self, start: int, pooled: list[float] | None) -> None:
        """Take in what was pooled of a span from position `start` on. A prompt that is computed again begins anew."""
        if pooled is not None and self.pooled and start:
            pooled = [before + more for before, more in zip(self.pooled, pooled, strict=True)]
        self.pooled = pooled or self.pooled

    def cut_at_end(self, update: RequestUpdate, end: int) -> None:
        """Find the stop token, or the length, that ends it in an update that it has not got yet; the rest is dropped.

        Args:
            end: position after what was computed, at most.
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
        """Back to the queue, without blocks, unknown to the runner: whatever steps in flight would bring is lost."""
        if self.status is Status.RUNNING:
            self.stats.preemptions += 1
        self.status = Status.WAITING
        self.known_to_runner = False
        self.high_water = max(self.high_water, self.num_computed)
        self.num_computed = self.num_committed = self.num_pending = self.num_unverified_tokens = 0
        self.num_in_flight = self.num_sent = self.num_published = 0
        self.tables, self.copies, self.tip = [], [], None

    def info(self) -> RequestInfo:
        """What the runner must know, with the output so far in case it is a fresh runner."""
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
