"""Drafts on the host: proposed before a step, verified by it, and followed by the proposer after it.

The host must know a step's tokens before it can launch the next step, so it waits for the device. `device_drafter`
avoids that.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.core.step import DRAFT, FROM_PREVIOUS, RequestInfo, Span, SpanResult
from quire.errors import DeviceLostError
from quire.runner.device import is_lost
from quire.runner.draft_context import DraftContext
from quire.runner.drafts import Branch, Computed, Drafts, Row, Wanted
from quire.runner.host_forward import Forwarded
from quire.runner.proposer import Proposer
from quire.runner.sampler import Sampled
from quire.runner.verify import Verified

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_DRAFTS = Drafts([])


@dataclass(slots=True)
class _Text:
    """A request's number of tokens, and the last one.

    Attributes:
        drafted: False once a row with drafts has failed: these may have caused it, so it gets no more drafts.
    """

    length: int
    last: int
    drafted: bool = True


@dataclass(slots=True)
class Outcome:
    """The results of a step, or of a part of it.

    Attributes:
        results: one per span.
        row_starts: first row of each span in `features`, and the end of the last one.
        features: [rows, width], see `Forwarded`.
        drafts: by request, the drafts that its span verified.
        paths: by index of a span with drafts, its accepted rows, in order of position; empty if the first one failed.
    """

    spans: Sequence[Span]
    results: Sequence[SpanResult]
    row_starts: Sequence[int]
    features: Tensor
    drafts: Mapping[int, Drafts]
    paths: Mapping[int, list[int]]


class Guard:
    """Calls a proposer and ignores its errors, since without drafts only speed is lost; unless the device has failed.

    Args:
        ranks: number of ranks of the model. With several, drafts must be the same on all, so an error fails the step.
    """

    def __init__(self, ranks: int) -> None:
        self._alone = ranks == 1
        self._failures: set[str] = set()  # calls that have failed

    def __call__(self, what: str, call: Callable[[], T]) -> T | None:
        """The result of `call`; None if it fails."""
        try:
            return call()
        except DeviceLostError:
            raise
        except Exception as error:
            if is_lost(error) or not self._alone:
                raise
            level = logging.DEBUG if what in self._failures else logging.ERROR  # it may fail in every step
            self._failures.add(what)
            logger.log(level, "the proposer failed to %s: there are no drafts, or worse ones", what, exc_info=True)
            return None


class Drafter:
    """Fills in the drafts that plans ask for, with a proposer.

    Args:
        proposer: drafts tokens.
        context: the proposer's view of the runner.
        rejection: see `Speculation`.

    Attributes:
        waits: whether the host must know a step's result before the next one is launched. If so, steps without drafts
            are sampled as if there were no drafter.
    """

    waits = True

    def __init__(self, proposer: Proposer, context: DraftContext, rejection: bool) -> None:
        self._proposer, self._context, self._rejection = proposer, context, rejection
        self._texts: dict[int, _Text] = {}
        self._ask = Guard(context.ranks)

    def start(self, info: RequestInfo) -> None:
        """Add a request; it is followed if it may get drafts."""
        if not info.drafting_enabled:
            return
        tokens = [*info.prompt_token_ids, *info.output_token_ids]
        self._texts[info.request] = _Text(len(tokens), tokens[-1])
        self._ask("start a request", lambda: self._proposer.start(info))

    def end(self, request: int) -> None:
        """Remove a request; an unknown one is ignored."""
        if self._texts.pop(request, None) is not None:
            self._ask("end a request", lambda: self._proposer.end(request))

    @property
    def following(self) -> bool:
        """Whether any request is followed; if not, steps need not involve the drafter."""
        return bool(self._texts)

    def drop_drafting(self, requests: Sequence[int]) -> None:
        """Stop following requests; unknown ones are ignored."""
        known = [request for request in requests if request in self._texts]
        if known:  # the next step needs their last tokens, as if they had never been followed
            self._context.set_last(known, [self._texts[request].last for request in known])
        for request in known:
            self.end(request)

    def resolve(self, spans: list[Span]) -> tuple[list[Span], dict[int, Drafts]]:
        """Replace placeholders in spans by true starts and ids. Returns the spans, and by request, their drafts."""
        known, wanted = [], []
        for span in spans:
            text = self._texts.get(span.request) if span.tokens[-1] < 0 else None
            if text is not None:
                given, span = len(span.tokens), self._known(span, text)
                count, position = given - len(span.tokens), span.start + len(span.tokens)
                if count and text.drafted:
                    wanted.append(Wanted(span.request, position, span.tokens[-1], count))
            known.append(span)
        drafts = self._forced(wanted) if wanted else {}
        drafts |= self._propose([want for want in wanted if want.request not in drafts])
        for span in known if drafts else ():
            if span.request in drafts:
                guesses = drafts[span.request].tokens
                span.tokens += guesses
                span.num_sampled += len(guesses)
        return known, drafts

    def _known(self, span: Span, text: _Text) -> Span:
        """The span with a true start, and without placeholders."""
        tokens = [text.last if token == FROM_PREVIOUS else token for token in span.tokens if token != DRAFT]
        start = text.length - 1 if span.start_follows else span.start
        return Span(span.request, start, tokens, 1, span.targets)

    def _forced(self, wanted: list[Wanted]) -> dict[int, Drafts]:
        """By request, the tokens that its grammar forces, which are better than any proposer's."""
        made = {want.request: self._context.sampler.forced(want.request)[: want.count] for want in wanted}
        return {request: Drafts(tokens) for request, tokens in made.items() if tokens}

    def _propose(self, wanted: list[Wanted]) -> dict[int, Drafts]:
        """The proposer's drafts, by request; invalid or surplus ones are dropped."""

        def ask() -> dict[int, Drafts]:
            proposed = self._proposer.propose(wanted, self._context)
            pairs = zip(wanted, proposed, strict=True)
            vocab_size = self._context.vocab_size
            return {want.request: _usable(drafts, want.count, vocab_size) for want, drafts in pairs if drafts.tokens}

        if not wanted:
            return {}
        found = self._ask("propose drafts", ask) or {}
        return {request: drafts for request, drafts in found.items() if drafts.tokens}

    def sample(
        self,
        spans: Sequence[Span],
        row_starts: Sequence[int],
        made: Forwarded,
        drafts: Mapping[int, Drafts],
        logits: Callable[[Tensor], Tensor],
    ) -> tuple[Sampled | None, Tensor]:
        """Sample the last rows of spans, including those of `drafts`.

        Returns:
            The sampled rows, in the order of the spans; and the drafts that were known on the device only,
            [sampled spans, most], of which a span has `num_sampled - 1`, valid on the host once the device is done.
        """
        rows: list[int] = []
        places: list[Row] = []
        verified: list[Verified] = []
        for index, span in enumerate(spans):
            if not span.num_sampled:
                continue
            own = drafts.get(span.request, NO_DRAFTS)
            first, known = row_starts[index + 1] - span.num_sampled, len(span.tokens) - len(own.tokens)
            if self._rejection and own.tokens and own.parents is None:  # trees are verified exactly
                verified.append(Verified(len(rows), own.tokens, own.distributions))
            for row, ahead in enumerate(drafts_before(own)):
                rows.append(first + row)
                places.append(Row(span.request, span.start + known + len(ahead), ahead))
        hidden = made.hidden
        if len(rows) < row_starts[-1]:
            [picked] = self._context.upload(np.array(rows))
            hidden = hidden.index_select(0, picked)
        sampled = self._context.sampler.launch_with_drafts(logits(hidden[: len(rows)]), places, verified)
        return sampled, torch.empty(0, 0)

    def settle(self, outcome: Outcome) -> None:
        """A step has run: record its tokens, move the KV of accepted rows into place, and tell the proposer."""
        computed = []
        others: dict[int, int] = {}  # the last tokens of requests that are not followed
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
                if outcome.drafts:  # otherwise the sampler has them
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


def _usable(drafts: Drafts, count: int, vocab_size: int) -> Drafts:
    """The first `count` drafts, up to one that is not a token of the model.

    Raises:
        TypeError, ValueError: they are not valid `Drafts`.
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
    """The accepted rows (0: the last known token, j: draft j), each of whose drafts equals the token sampled before it.

    Args:
        sampled: one token per row.
    """
    path = [0]
    for row, draft in enumerate(drafts.tokens, start=1):
        parent = drafts.parent(row)
        if parent == path[-1] and sampled[parent] == draft:
            path.append(row)
    return path


def drafts_before(drafts: Drafts) -> list[list[int]]:
    """Per row, the drafts on the path to it, including its own; none for row 0."""
    before: list[list[int]] = [[]]
    for row, draft in enumerate(drafts.tokens, start=1):
        before.append([*before[drafts.parent(row)], draft])
    return before


def branch_of(span: Span, drafts: Drafts) -> Branch | None:
    """The tree of drafts that a span verifies; None if it has no branches."""
    if drafts.parents is None or drafts.parents == list(range(len(drafts.tokens))):
        return None
    paths: list[list[int]] = [[0]]
    for row, parent in enumerate(drafts.parents, start=1):
        paths.append([*paths[parent], row])
    return Branch(span.request, span.start, span.tokens, range(len(span.tokens)), paths)
