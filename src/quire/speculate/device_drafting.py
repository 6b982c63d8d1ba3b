"""Drafts of a second model with overlapping steps on a device: like `drafting`, without trees.

The host knows only an upper bound of a request's length. So the model's rows are computed up to it, from the tokens
on the device at these positions, and those beyond the actual end are computed again. The row of the last known token
is selected on the device, and each draft is fed into the next row there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.step import RequestInfo
from quire.runner.draft_context import DeviceContext
from quire.runner.drafts import Asked, Computed, DraftingModel, Lines, Placed
from quire.runner.proposer import DeviceProposer
from quire.speculate.drafting import CHUNK, NOTHING


def kept_tokens(most: int) -> int:
    """Number of a request's recent tokens to keep, if a step verifies at most `most` drafts: a power of two.

    It covers those that may wait, those that the step in flight may add, and drafts.
    """
    return 1 << (CHUNK + 2 * (most + 1) - 1).bit_length()


@dataclass(slots=True)
class _Request:
    """How far a request has been followed.

    Attributes:
        followed: the model's rows before this position are valid.
        ahead: so are the rows of tokens of steps that are not settled yet.
    """

    followed: int = 0
    ahead: bool = False


class DeviceDraftingProposer(DeviceProposer):
    """Drafts chains of tokens with a model.

    Args:
        model: the drafting model.
        lead: see `DraftingProposer`.
        most: maximum drafts per request and step.
    """

    def __init__(self, model: DraftingModel, lead: int, most: int) -> None:
        self._model, self._lead, self._most = model, lead, most
        self.keeps = kept_tokens(most)
        self._requests: dict[int, _Request] = {}
        self._hidden = torch.empty(0, 0)  # [requests * keeps, hidden]: a head's input, like `DeviceContext.recent`

    def start(self, info: RequestInfo) -> None:
        """See `DeviceProposer`. Requests without speculation are not followed; drafts after such a prefix are worse."""
        if info.params.speculate:
            self._requests[info.request] = _Request()

    def end(self, request: int) -> None:
        """See `DeviceProposer`; unknown requests are ignored."""
        self._requests.pop(request, None)

    def restart(self, request: int, start: int) -> None:
        """See `DeviceProposer`."""
        if request in self._requests:
            self._requests[request] = _Request(start)

    def settle(self, request: int, length: int) -> None:
        """See `DeviceProposer`."""
        state = self._requests.get(request)
        if state is not None and state.ahead:
            state.followed, state.ahead = length - self._lead, False

    # -- following -----------------------------------------------------------------------------------------

    def follow(
        self, computed: Sequence[Computed], placed: Placed | None, features: Tensor, context: DeviceContext
    ) -> None:
        """See `DeviceProposer`: prompts at once; sampled tokens when drafts are wanted or enough tokens wait."""
        hidden = self._model.fuse(features) if self._lead else NOTHING
        if not self._has_room(context):
            grown = hidden.new_zeros(len(context.recent) * self.keeps, hidden.shape[1])
            if len(self._hidden):
                grown[: len(self._hidden)] = self._hidden
            self._hidden = grown
        if self._lead and computed:
            hidden = hidden.clone()  # which `context.rows` may overwrite: see `Graphs`
        try:
            self._follow_prompts([each for each in computed if each.request in self._requests], hidden, context)
        finally:  # even after a failure the next step continues from here
            if self._lead and placed is not None:
                places = placed.table_rows.long() * self.keeps + placed.positions % self.keeps
                self._keep(hidden, placed.picked, places)

    def _follow_prompts(self, computed: Sequence[Computed], hidden: Tensor, context: DeviceContext) -> None:
        """Compute all rows whose tokens are in the prompts; a head's last row waits for the next token."""
        batch: list[tuple[int, int, list[int]]] = []  # request, start and tokens of each
        picked: list[int] = []  # their rows of `hidden`
        waited: list[tuple[int, int]] = []  # rows of the batch whose input was waiting, and where
        kept: list[tuple[int, int]] = []  # rows of `hidden` to store, and where
        for each in computed:
            state, place = self._requests[each.request], context.row_of(each.request) * self.keeps
            if state.followed != each.start - self._lead:  # it begins here, or earlier tokens were not followed
                state.followed = each.start
            tokens = each.tokens[state.followed + self._lead - each.start :]
            if tokens:
                batch.append((each.request, state.followed, tokens))
                if state.followed < each.start:
                    waited.append((len(picked), place + state.followed % self.keeps))
                first = each.rows[0] + state.followed - each.start
                picked += (max(0, row) for row in range(first, first + len(tokens)))
            state.followed = each.start + len(each.tokens) - self._lead
            kept.append((each.rows[-1], place + state.followed % self.keeps))
        if batch:
            fed = self._fed(hidden, picked, waited, context) if self._lead else NOTHING
            context.rows(fed, *zip(*batch, strict=True))
        if self._lead and kept:
            self._keep(hidden, *context.upload(*np.array(kept).T))

    def _has_room(self, context: DeviceContext) -> bool:
        """Whether there is room for all rows that may wait."""
        return not self._lead or len(self._hidden) >= len(context.recent) * self.keeps

    def _fed(self, hidden: Tensor, picked: list[int], waited: list[tuple[int, int]], context: DeviceContext) -> Tensor:
        """Rows of `hidden`, some replaced by waiting ones."""
        rows, at, places = context.upload(np.array(picked), *np.array(waited, np.int64).reshape(-1, 2).T)
        return hidden.index_select(0, rows).index_copy_(0, at, self._hidden.index_select(0, places))

    def _keep(self, hidden: Tensor, rows: Tensor, places: Tensor) -> None:
        """Store rows of `hidden` in these places."""
        self._hidden.index_copy_(0, places, hidden.index_select(0, rows))

    # -- drafting ------------------------------------------------------------------------------------------

    def propose(self, asked: Sequence[Asked], context: DeviceContext) -> Lines | None:
        """See `DeviceProposer`. Lagging requests catch up, too."""
        known = [each for each in asked if each.request in self._requests]
        lags = [each.most - self._lead - self._requests[each.request].followed for each in known]
        late = CHUNK // 2 if max(lags, default=0) >= CHUNK else max(lags, default=0) + 1
        wanted = [each for each, lag in zip(known, lags, strict=True) if each.drafts and lag > 0]
        wanted.sort(key=lambda each: -each.drafts)
        others = [each for each, lag in zip(known, lags, strict=True) if not each.drafts and lag >= late]
        if not self._has_room(context) or not (wanted or others):
            return None
        out = self._catch_up([*wanted, *others], context)
        if not wanted:
            return None
        requests = [each.request for each in wanted]
        tokens = context.chains(out, requests, [each.drafts for each in wanted])
        return Lines(requests, self._lines(wanted, out, context) if tokens is None else tokens)

    def _catch_up(self, asked: Sequence[Asked], context: DeviceContext) -> Tensor:
        """Compute all rows that may be known. A failure is not retried.

        Returns the output of the row of each request's last known token, [at least requests, hidden].
        """
        starts, counts = [], []
        for each in asked:
            state, stop = self._requests[each.request], each.most - self._lead
            starts.append(max(state.followed, stop + self._most + 1 - self.keeps))  # earlier ones are no longer kept
            counts.append(stop - starts[-1])
            state.followed, state.ahead = each.certain - self._lead, each.most > each.certain
        hidden = NOTHING
        if self._lead:
            firsts = np.cumsum(counts) - counts
            positions = np.arange(sum(counts)) + np.repeat(np.array(starts) - firsts, counts)
            rows = np.repeat(context.rows_of([each.request for each in asked]), counts)
            [places] = context.upload(rows * self.keeps + positions % self.keeps)
            hidden = self._hidden.index_select(0, places)
        placeholders = [[-1 - self._lead] * count for count in counts]
        return context.rows(hidden, [each.request for each in asked], starts, placeholders)

    def _lines(self, asked: Sequence[Asked], out: Tensor, context: DeviceContext) -> Tensor:
        """Chains of drafts, from `out` of the last known rows; requests that want most come first.

        For requests with edits: these depend on the number of tokens, and so do the launches.
        """
        ends = context.ends([each.request for each in asked])
        drafts = torch.full((len(asked), asked[0].drafts), -1, device=out.device)
        for depth in range(asked[0].drafts):
            count = sum(each.drafts > depth for each in asked)
            if depth:
                fed = drafts[:count, depth - 1].clamp(min=0)
                requests = [each.request for each in asked[:count]]
                out = context.next_rows(out[:count], fed, requests, [depth - 1 - self._lead] * count)
            logits = self._model.logits(out[:count])
            drafts[:count, depth] = context.draw_ahead(logits, asked[:count], ends.first(count), drafts[:count, :depth])
        return drafts
