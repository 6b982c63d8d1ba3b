"""Drafts that stay on the device, so that the next step can be launched before the host knows which were accepted.

The device has each request's last tokens, followed by drafts, and the number of known tokens (`DeviceForward.recent`,
`lengths`). A step reads its tokens and positions there, and writes the accepted ones. The host gets them one step
later, and uses upper bounds until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.step import DRAFT, FROM_PREVIOUS, RequestInfo, Span
from quire.runner.device_forward import AT_LAST
from quire.runner.draft_context import DeviceContext
from quire.runner.drafter import Guard, Outcome
from quire.runner.drafts import Ahead, Asked, Computed, Drafts, Placed
from quire.runner.host_forward import Forwarded
from quire.runner.proposer import DeviceProposer
from quire.runner.sampler import Sampled


@dataclass(slots=True)
class _Text:
    """What the host knows of a request's tokens.

    Attributes:
        length: number of tokens after the settled steps.
        coming: upper bound of the number of tokens that later steps add.
        computed: number of tokens that the settled steps have computed; of a prompt, the launched ones.
        drafted: see `drafter`: False once a row with drafts has failed.
    """

    length: int
    coming: int = 0
    computed: int = 0
    drafted: bool = True


class DeviceDrafter:
    """Like `Drafter`, but a step is launched before the host knows the result of the previous one.

    A request whose masks depend on tokens on the host gets no drafts, so that its next step is planned as without
    speculation.

    Attributes:
        waits, following: see `Drafter`. The device's tables are maintained for all requests.
    """

    waits, following = False, True

    def __init__(self, proposer: DeviceProposer, context: DeviceContext) -> None:
        self._proposer, self._context = proposer, context
        self._texts: dict[int, _Text] = {}
        self._ask = Guard(context.ranks)

    def start(self, info: RequestInfo) -> None:
        """Add a request."""
        self._texts[info.request] = _Text(len(info.prompt_token_ids) + len(info.output_token_ids))
        if info.drafting_enabled:
            self._ask("start a request", lambda: self._proposer.start(info))

    def end(self, request: int) -> None:
        """Remove a request; an unknown one is ignored."""
        if self._texts.pop(request, None) is not None:
            self._ask("end a request", lambda: self._proposer.end(request))

    def drop_drafting(self, requests: Sequence[int]) -> None:
        """Stop following requests."""
        self._ask("end a request", lambda: [self._proposer.end(request) for request in requests])

    # -- before a step -------------------------------------------------------------------------------------

    def resolve(self, spans: Sequence[Span]) -> tuple[list[Span], dict[int, Drafts]]:
        """Set the number of drafts in each span; their ids are in the device's tables, so spans have placeholders."""
        resolved = [_without_drafts(span) for span in spans]
        self._tell([span for span in resolved if span.num_sampled and span.tokens[-1] >= 0])
        asked, restarted = [], []
        for span, given in zip(resolved, spans, strict=True):
            text = self._texts[span.request]
            if span.start != AT_LAST and span.tokens[-1] >= 0 and span.start != text.computed:
                restarted.append((span.request, span.start))
            if len(span.tokens) == span.num_sampled:
                may = text.drafted and not self._context.sampler.needs_host(span.request, text.length)
                count = len(given.tokens) - len(span.tokens) if may else 0
                asked.append(Asked(span.request, text.length, text.length + text.coming, count))
            else:
                text.computed = span.start + len(span.tokens)
        self._ask("begin again", lambda: [self._proposer.restart(*each) for each in restarted])
        counts = self._propose(asked)
        for span in resolved:
            count = counts.get(span.request, 0)
            span.tokens += [FROM_PREVIOUS] * count
            span.num_sampled += count
            self._texts[span.request].coming += span.num_sampled
        return resolved, {}

    def _tell(self, spans: Sequence[Span]) -> None:
        """Send the device what the host knows exactly."""
        if spans:
            ends = np.array([span.start + len(span.tokens) for span in spans])
            self._context.tell([span.request for span in spans], ends, np.array([span.tokens[-1] for span in spans]))

    def _propose(self, asked: Sequence[Asked]) -> dict[int, int]:
        """Write drafts after requests' tokens on the device; returns their number by request."""

        def ask() -> dict[int, int]:
            lines = self._proposer.propose(asked, self._context)
            if lines is None:
                return {}
            counts = {each.request: each.drafts for each in asked}
            tokens = lines.tokens[:, : max(counts.values())]
            self._context.put_drafts(lines.requests, tokens)
            return {request: min(counts[request], tokens.shape[1]) for request in lines.requests}

        return self._ask("propose drafts", ask) or {}

    # -- a step --------------------------------------------------------------------------------------------

    def sample(
        self,
        spans: Sequence[Span],
        row_starts: Sequence[int],
        made: Forwarded,
        drafts: Mapping[int, Drafts],
        logits: Callable[[Tensor], Tensor],
    ) -> tuple[Sampled | None, Tensor]:
        """See `Drafter`; also writes accepted tokens on the device, and tells the proposer."""
        chosen = [index for index, span in enumerate(spans) if span.num_sampled]
        placed, sampled, verified = None, None, torch.empty(0, 0)
        if chosen:
            rows = _Rows(self._context, [spans[i] for i in chosen], [row_starts[i + 1] for i in chosen])
            sampled = self._sample(rows, logits(made.hidden.index_select(0, rows.picked)))
            placed, [verified] = rows.placed(), self._context.download(rows.drafts)
            self._put_accepted(rows, sampled.tokens, made.finite.index_select(0, rows.picked))
            self._context.sampler.goes_on(sampled)
        computed = [
            Computed(span.request, span.start, span.tokens, None, range(first, first + len(span.tokens)))
            for span, first in zip(spans, row_starts, strict=False)
            if len(span.tokens) > span.num_sampled
        ]
        self._ask("follow a step", lambda: self._proposer.follow(computed, placed, made.features, self._context))
        return sampled, verified

    def _sample(self, rows: _Rows, logits: Tensor) -> Sampled:
        places = []
        for span in rows.spans:
            text = self._texts[span.request]
            end = text.length + text.coming  # an upper bound; exact for requests that need the host
            places += [(span.request, position) for position in range(end - span.num_sampled, end)]
        return self._context.sampler.launch_ahead(logits, places, rows.ahead())

    def _put_accepted(self, rows: _Rows, tokens: Tensor, finite: Tensor) -> None:
        """Accept drafts as long as they equal the sampled tokens, up to a failed row: see `Part` in `model_runner`.

        All memory is allocated before lengths change, so that a step that runs out of memory can be retried.

        Args:
            tokens, finite: of each row.
        """
        sampled = tokens[rows.grid]  # [spans, most]
        counts = (finite & (tokens >= 0))[rows.grid]
        if rows.drafts.shape[1]:
            columns = torch.arange(sampled.shape[1], device=tokens.device)
            counts[:, 1:] &= (sampled[:, :-1] == rows.drafts) & (columns[1:] < rows.counts[:, None])
            counts = counts.to(torch.int32).cumprod(1)
        put = self._context.putting(rows.ends, rows.places, sampled, counts.sum(1, dtype=torch.int32))
        requests = [span.request for span in rows.spans]
        self._context.sampler.count(requests, torch.where(counts > 0, sampled, -1))
        put()

    # -- after a step --------------------------------------------------------------------------------------

    def settle(self, outcome: Outcome) -> None:
        """The results of a step, or of a part of it, are on the host."""
        settled = []
        for span, result in zip(outcome.spans, outcome.results, strict=True):
            text = self._texts.get(span.request)
            if text is None or not span.num_sampled:
                continue
            text.coming -= span.num_sampled
            text.drafted &= result.error is None and bool(result.tokens)
            text.length += len(result.tokens)
            text.computed = text.length - 1
            if result.error is None:
                self._context.sampler.take(span.request, result.tokens, counted=True)
            settled.append((span.request, text.length))
        self._ask("settle a step", lambda: [self._proposer.settle(*each) for each in settled])


def _without_drafts(span: Span) -> Span:
    """A copy of a span without drafts, and with `AT_LAST` as its start if only the device knows it."""
    tokens = [token for token in span.tokens if token != DRAFT]
    sampled = span.num_sampled - (len(span.tokens) - len(tokens))
    return Span(span.request, AT_LAST if span.start_follows else span.start, tokens, sampled, span.targets)


class _Rows:
    """The sampled rows of a step, as index tensors on the device.

    Args:
        spans: the spans that sample.
        stops: the end of each span's rows.

    Attributes:
        ends: the requests' lengths.
        counts: [spans] int64, number of sampled rows.
        picked: [rows] int64, indices among the step's rows.
        grid: [spans, most] int64, indices into `picked`, padded with each span's last one.
        places: [spans, most] int64, see `DeviceContext.places`.
        drafts: [spans, most - 1] int64, the drafts after each request's last known token.
    """

    def __init__(self, context: DeviceContext, spans: Sequence[Span], stops: Sequence[int]) -> None:
        self.spans = spans
        lengths = np.array([span.num_sampled for span in spans])
        starts = np.cumsum(lengths) - lengths
        of_row = np.repeat(np.arange(len(spans)), lengths)
        offsets = np.arange(len(of_row)) - starts[of_row]
        picked = (np.array(stops) - lengths)[of_row] + offsets
        grid = starts[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        sent = context.upload(lengths, of_row, offsets, picked, grid)
        self.counts, self._of_row, self._offsets, self.picked, self.grid = sent
        self.ends = context.ends([span.request for span in spans])
        self.places = context.places(self.ends, grid.shape[1])
        self.drafts = context.recent.view(-1)[self.places[:, :-1]]
        self._positions = self.ends.lengths[self._of_row] + self._offsets

    def ahead(self) -> Ahead:
        """The rows for the sampler."""
        drafts = self.drafts[self._of_row]
        if drafts.shape[1]:
            columns = torch.arange(drafts.shape[1], device=drafts.device)
            drafts = torch.where(columns < self._offsets[:, None], drafts, -1)
        return Ahead(self._positions, drafts)

    def placed(self) -> Placed:
        """The rows for the proposer."""
        return Placed(self.picked, self.ends.rows[self._of_row], self._positions - 1)
