"""Drafts on their way through a step: proposed before it, verified by it, and told to the proposer after it.

Where drafts are made here, the host must know a step's tokens before it begins the next one: a device that works by
itself is waited for. `device_drafter` does without.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.core.step import DRAFT, FROM_PREVIOUS, RequestInfo, Span, SpanResult
from quire.models.model import Model
from quire.ops import Kernels, KVCache, RaggedBatch
from quire.ops.sampling import Filters
from quire.runner.device_forward import DeviceForward
from quire.runner.host_forward import HostForward, RowsAhead
from quire.runner.proposer import Branch, Computed, DraftContext, Drafts, Proposer, Row, Wanted
from quire.runner.sampler import Sampler

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Text:
    """What the host knows of a request's tokens: how many there are, and the last one.

    Attributes:
        drafted: False once a row failed beside drafts: they may have spoilt it, so there are no more of them.
    """

    length: int
    last: int
    drafted: bool = True


@dataclass(slots=True)
class Outcome:
    """What a step made of its spans, or of some of them.

    Attributes:
        results: one a span.
        row_starts: first row of each span in `features`, and one entry more.
        features: [rows, width], see `Forwarded`.
        drafts: by request, what its span verified.
        paths: by index of a span that verified drafts, the rows whose tokens count, in the order of positions; none
            where the first one failed.
    """

    spans: Sequence[Span]
    results: Sequence[SpanResult]
    row_starts: Sequence[int]
    features: Tensor
    drafts: Mapping[int, Drafts]
    paths: Mapping[int, list[int]]


class Guard:
    """Calls a proposer: one that fails costs speed and nothing else, unless the device has failed."""

    def __init__(self) -> None:
        self._failures: set[str] = set()  # what it failed to do

    def __call__(self, what: str, call: Callable[[], T]) -> T | None:
        """What `call` returns; None where it fails."""
        try:
            return call()
        except torch.AcceleratorError:
            raise
        except Exception:
            level = logging.DEBUG if what in self._failures else logging.ERROR  # it may fail in every step
            self._failures.add(what)
            logger.log(level, "the proposer failed to %s: there are no drafts, or worse ones", what, exc_info=True)
            return None


class Drafter:
    """Stands between the plans, which say how many drafts there may be, and the proposer, which says which.

    Args:
        proposer: guesses.
        context: what it may use.

    Attributes:
        waits: whether the host must know what came of a step before the next one is launched.
        seconds: spent on proposing and following since the last step.
    """

    waits = True

    def __init__(self, proposer: Proposer, context: RunnerContext) -> None:
        self._proposer, self._context = proposer, context
        self._texts: dict[int, _Text] = {}
        self._ask = Guard()
        self.seconds = 0.0

    def start(self, info: RequestInfo) -> None:
        """A request is new to the runner; one that is not followed gets no drafts."""
        if not info.followed:
            return
        tokens = [*info.prompt_token_ids, *info.output_token_ids]
        self._texts[info.request] = _Text(len(tokens), tokens[-1])
        self._ask("start a request", lambda: self._proposer.start(info))

    def end(self, request: int) -> None:
        """Forget it; one that is not known is ignored."""
        if self._texts.pop(request, None) is not None:
            self._ask("end a request", lambda: self._proposer.end(request))

    @property
    def following(self) -> bool:
        """Whether there is a request that may be drafted; without any, steps need not come by here."""
        return bool(self._texts)

    def let_go(self, requests: Sequence[int]) -> None:
        """Follow some no longer; one that is not known is ignored."""
        known = [request for request in requests if request in self._texts]
        if known:  # the next step finds their last tokens where it would if they had never been followed
            self._context.set_last(known, [self._texts[request].last for request in known])
        for request in known:
            self.end(request)

    def resolve(self, spans: list[Span]) -> tuple[list[Span], dict[int, Drafts]]:
        """Spans with true starts and ids in place of what stood for them; by request, the drafts that they verify."""
        begin, texts = time.monotonic(), self._texts
        known = [span if span.tokens[-1] >= 0 or span.request not in texts else self._known(span) for span in spans]
        wanted = [
            Wanted(span.request, span.start + len(span.tokens), span.tokens[-1], len(given.tokens) - len(span.tokens))
            for span, given in zip(known, spans, strict=True)
            if len(span.tokens) < len(given.tokens) and self._texts[span.request].drafted
        ]
        drafts = self._propose(wanted) if wanted else {}
        for span in known if drafts else ():
            if span.request in drafts:
                guesses = drafts[span.request].tokens
                span.tokens += guesses
                span.num_sampled += len(guesses)
        self.seconds += time.monotonic() - begin
        return known, drafts

    def _known(self, span: Span) -> Span:
        """The span with a true start, and without placeholders."""
        text = self._texts[span.request]
        tokens = [text.last if token == FROM_PREVIOUS else token for token in span.tokens if token != DRAFT]
        start = text.length - 1 if span.start_follows else span.start
        return Span(span.request, start, tokens, 1, span.targets)

    def _propose(self, wanted: list[Wanted]) -> dict[int, Drafts]:
        """By request; a proposer that fails proposes nothing, and one that says too much is not listened to."""

        def ask() -> dict[int, Drafts]:
            proposed = self._proposer.propose(wanted, self._context)
            pairs = zip(wanted, proposed, strict=True)
            return {want.request: _usable(drafts, want.count, self._context.vocab_size) for want, drafts in pairs}

        found = self._ask("propose drafts", ask) or {}
        return {request: drafts for request, drafts in found.items() if drafts.tokens}

    def settle(self, outcome: Outcome) -> None:
        """A step has run: take in its tokens, put accepted rows into place, and tell the proposer."""
        begin = time.monotonic()
        computed = []
        others: dict[int, int] = {}  # the last tokens of those that are not followed
        for index, (span, result) in enumerate(zip(outcome.spans, outcome.results, strict=True)):
            if result.error is not None:
                continue
            next_token, path, text = None, outcome.paths.get(index), self._texts.get(span.request)
            if text is None:
                if outcome.drafts and result.tokens:
                    self._context.sampler.take(span.request, result.tokens)
                    others[span.request] = result.tokens[-1]
                continue
            if path is not None and not path:
                text.drafted = False
                continue
            if result.tokens:
                next_token = result.tokens[-1]
                text.last = next_token
                text.length += len(result.tokens)
                if outcome.drafts:  # else the sampler knows
                    self._context.sampler.take(span.request, result.tokens)
            first = outcome.row_starts[index]
            tokens: list[int] = span.tokens
            rows: Sequence[int] = range(first, outcome.row_starts[index + 1])
            if path is not None:
                tokens, rows = [tokens[row] for row in path], [first + row for row in path]
                if path[-1] >= len(path):
                    places = range(span.start, span.start + len(path))
                    self._context.move(span.request, [span.start + row for row in path], places)
            computed.append(Computed(span.request, span.start, tokens, next_token, rows))
        if others:
            self._context.set_last(list(others), list(others.values()))
        self._ask("follow a step", lambda: self._proposer.follow(computed, outcome.features, self._context))
        self.seconds += time.monotonic() - begin

    def take_seconds(self) -> float:
        """`seconds`, and from 0 again."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def _usable(drafts: Drafts, count: int, vocab_size: int) -> Drafts:
    """The first drafts, as many as may be verified, up to one that is no token of the model's.

    Raises:
        TypeError, ValueError: they are not what `Drafts` says.
    """
    tokens = list(map(operator.index, drafts.tokens))
    parents, distributions = drafts.parents, drafts.distributions
    wrong = (i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
    count = min(count, next(wrong, count))
    if parents is not None:
        parents = list(map(operator.index, parents))
        if len(parents) != len(tokens) or any(not 0 <= parent <= row for row, parent in enumerate(parents)):
            raise ValueError(f"parents are {parents}; of {len(tokens)} drafts each must continue an earlier row")
    if distributions is not None and distributions.shape != (len(tokens), vocab_size):
        raise ValueError(f"distributions are {list(distributions.shape)}; they must be {[len(tokens), vocab_size]}")
    if len(tokens) > count:
        parents = None if parents is None else parents[:count]
        distributions = None if distributions is None else distributions[:count]
    return Drafts(tokens[:count], parents, distributions)


def accepted_path(sampled: Sequence[int], drafts: Drafts) -> list[int]:
    """Rows, 0 the last known token's and j draft j's, along which each draft is what was sampled before it.

    Args:
        sampled: a token a row.
    """
    path = [0]
    for row, draft in enumerate(drafts.tokens, start=1):
        parent = drafts.parent(row)
        if parent == path[-1] and sampled[parent] == draft:
            path.append(row)
    return path


def drafts_before(drafts: Drafts) -> list[list[int]]:
    """Per row, the drafts on the way to it, its own the last; none for row 0."""
    before: list[list[int]] = [[]]
    for row, draft in enumerate(drafts.tokens, start=1):
        before.append([*before[drafts.parent(row)], draft])
    return before


class Line:
    """See `DraftLine`. What depends on no token is made for all drafts at once.

    Args:
        filters: how to sample each draft, see `Sampler.filters_ahead`; None: that depends on the drafts before it.
        rows: how to compute each, see `HostForward.rows_ahead`; None: as any other batch.
    """

    def __init__(
        self,
        context: DraftContext,
        wanted: Sequence[Wanted],
        lead: int,
        kernels: Kernels | None = None,
        filters: Sequence[Filters] | None = None,
        rows: RowsAhead | None = None,
    ) -> None:
        self._context, self._wanted, self._lead = context, wanted, lead
        self._kernels, self._filters, self._rows = kernels, filters, rows
        self._going = wanting(wanted)
        self._drawn: list[Tensor] = []  # a draft each: [requests that wanted it] int64, -1: no token was left

    @property
    def rows(self) -> list[Row]:
        """See `DraftLine`."""
        depth = len(self._drawn)
        ahead = zip(*(tokens.clamp(min=0).tolist() for tokens in self._drawn), strict=False) if depth else repeat(())
        return [
            Row(want.request, want.position + depth, tokens)
            for want, tokens in zip(self._wanted[: self._going[depth]], ahead, strict=False)
        ]

    def draw(self, logits: Tensor) -> int:
        """See `DraftLine`."""
        if self._kernels is not None and self._filters is not None:
            tokens = self._kernels.sample(logits, self._filters[len(self._drawn)])
        else:
            tokens = torch.tensor(self._context.draw(logits, self.rows))
        self._drawn.append(tokens)
        return self._going[len(self._drawn)]

    def batch(self) -> RaggedBatch:
        """See `DraftLine`."""
        depth = len(self._drawn)
        tokens = self._drawn[-1].clamp(min=0)
        if len(tokens) > self._going[depth]:
            tokens = tokens[: self._going[depth]]
        if self._rows is not None:
            return self._rows.batch(depth - 1, tokens)
        wanted = self._wanted[: len(tokens)]
        starts = [want.position + depth - 1 - self._lead for want in wanted]
        return self._context.batch([want.request for want in wanted], starts, [[token] for token in tokens.tolist()])

    def drafts(self) -> list[list[int]]:
        """See `DraftLine`."""
        drawn = [tokens.tolist() for tokens in self._drawn]
        lines = [[tokens[i] for tokens in drawn[: want.count]] for i, want in enumerate(self._wanted)]
        return [line[: line.index(-1)] if -1 in line else line for line in lines]


def wanting(wanted: Sequence[Wanted]) -> list[int]:
    """How many want at least 1, 2, ... drafts, up to a number that nobody wants; the most comes first in `wanted`."""
    return [sum(want.count > depth for want in wanted) for depth in range(wanted[0].count + 1)]


def kept_behind(kv: KVCache) -> KVCache:
    """What a proposer keeps in these blocks; raises RuntimeError where they were made without it."""
    if kv.behind is None:
        raise RuntimeError("these blocks have no room for what drafts: make them with Speculation.kv_shape behind")
    return kv.behind


class RunnerContext:
    """A runner as proposers see it: see `DraftContext`."""

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        sampler: Sampler,
        forward: HostForward | DeviceForward,
        row_of: Callable[[int], int],
    ) -> None:
        self.sampler, self.vocab_size = sampler, model.vocab_size
        self._kernels, self._kv = model.kernels, kv
        self._forward, self._row_of = forward, row_of

    @property
    def kv(self) -> KVCache:
        """See `DraftContext.kv`; raises what `kept_behind` does."""
        return kept_behind(self._kv)

    def batch(self, requests: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> RaggedBatch:
        """See `DraftContext.batch`."""
        spans = [Span(*span) for span in zip(requests, starts, map(list, tokens), strict=True)]
        return self._batch(spans, {})

    def tree_batch(self, branches: Sequence[Branch]) -> RaggedBatch:
        """See `DraftContext.tree_batch`."""
        spans = [Span(branch.request, branch.base, list(branch.tokens)) for branch in branches]
        return self._batch(spans, {branch.request: branch for branch in branches})

    def _batch(self, spans: list[Span], branches: Mapping[int, Branch]) -> RaggedBatch:
        rows = np.array([self._row_of(span.request) for span in spans])
        return self._forward.batch(spans, rows, np.cumsum([0, *(len(span.tokens) for span in spans)]), branches)

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """See `DraftContext.draw`."""
        tokens: list[int] = self.sampler.draw(logits, rows).tolist()
        return tokens

    def line(self, wanted: Sequence[Wanted], lead: int) -> Line:
        """See `DraftContext.line`."""
        requests, positions = [want.request for want in wanted], [want.position for want in wanted]
        filters = self.sampler.filters_ahead(requests, positions, wanting(wanted)[:-1])
        rows, most = None, wanted[0].count
        if isinstance(self._forward, HostForward) and most > 1:
            table_rows = np.array([self._row_of(request) for request in requests])
            ahead = np.arange(most - 1)[:, None] - lead
            rows = self._forward.rows_ahead(table_rows, ahead + positions)
        return Line(self, wanted, lead, self._kernels, filters, rows)

    def distributions(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """See `DraftContext.distributions`."""
        return self.sampler.distributions(logits, rows)

    def candidates(self, logits: Tensor, rows: Sequence[Row], width: int) -> tuple[Tensor, Tensor]:
        """See `DraftContext.candidates`."""
        return self.sampler.candidates(logits, rows, width)

    def set_last(self, requests: Sequence[int], tokens: Sequence[int]) -> None:
        """Say which token was sampled last for some requests, where the runner itself did not see it."""
        last = self._forward.last_tokens
        rows, values = (torch.tensor(x, device=last.device) for x in ([self._row_of(r) for r in requests], tokens))
        last.index_copy_(0, rows, values)

    def move(self, request: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Put the model's keys and values from positions of a request to others: accepted rows of a tree."""
        slots = self._forward.slots(self._row_of(request), [*sources, *destinations])
        self._kernels.move_rows(self._kv, *slots.chunk(2))


def branch_of(span: Span, drafts: Drafts) -> Branch | None:
    """The tree that a span verifies; None: its rows continue one another."""
    if drafts.parents is None or drafts.parents == list(range(len(drafts.tokens))):
        return None
    paths: list[list[int]] = [[0]]
    for row, parent in enumerate(drafts.parents, start=1):
        paths.append([*paths[parent], row])
    return Branch(span.request, span.start, span.tokens, range(len(span.tokens)), paths)
