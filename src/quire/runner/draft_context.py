"""The proposers' view of a runner: batches in a request's own blocks, and sampling with the request's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import Span
from quire.models.model import Model
from quire.ops import KVCache, RaggedBatch
from quire.ops.sampling import Filters
from quire.runner.device import Device
from quire.runner.device_forward import DeviceForward
from quire.runner.draft_passes import DraftPasses
from quire.runner.drafts import Ahead, Asked, Branch, Ends, Row, Wanted
from quire.runner.host_forward import HostForward, RowsAhead
from quire.runner.sampler import Sampler


class DraftContext:
    """What a proposer may use of its runner.

    Args:
        kv: one cache per KV group; a draft model's cache is in the first one's blocks.
        row_of: returns a request's row in the block tables.
        passes: of the drafting model; None if kernels read spans on the host.

    Attributes:
        vocab_size: the target model's.
        ranks: number of the target model's ranks.
        upload, download: see `Device`.
        passes: see above. If there are any, `rows`, `nodes` and `chains` take the place of
            `batch`, `tree_batch` and `line`.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[KVCache],
        sampler: Sampler,
        forward: HostForward | DeviceForward,
        row_of: Callable[[int], int],
        device: Device,
        passes: DraftPasses | None = None,
    ) -> None:
        self.passes = passes
        self.sampler, self.vocab_size, self.kernels = sampler, model.vocab_size, model.kernels
        self.ranks = model.ranks.size
        self.row_of, self._kv, self._tables = row_of, kv, forward
        self.upload, self.download = device.upload, device.download

    @property
    def kv(self) -> KVCache:
        """The draft model's KV cache: see `Speculation.kv_shape`.

        Raises:
            RuntimeError: the blocks were allocated without it.
        """
        cache = self._kv[0].draft_kv
        if cache is None:
            raise RuntimeError(
                "these blocks have no room for what drafts: make them with draft_kv=Speculation.kv_shape"
            )
        return cache

    def batch(self, requests: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> RaggedBatch:
        """One span per request: `tokens` from position `start` on, in the request's own blocks, for use with `kv`."""
        return self._batch([Span(*span) for span in zip(requests, starts, map(list, tokens), strict=True)], {})

    def rows(
        self, hidden: Tensor, requests: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Compute the rows of `batch`, see `DraftPasses.rows`."""
        spans = [Span(*span) for span in zip(requests, starts, map(list, tokens), strict=True)]
        return self._recorded.rows(hidden, spans, self.rows_of(requests))

    def nodes(self, hidden: Tensor, branches: Sequence[Branch]) -> Tensor:
        """Compute the rows of `tree_batch`, see `DraftPasses.nodes`."""
        return self._recorded.nodes(hidden, branches, self.rows_of([branch.request for branch in branches]))

    def chains(
        self, out: Tensor, requests: Sequence[int], counts: Sequence[int], positions: Sequence[int] = ()
    ) -> Tensor | None:
        """Draft chains of tokens from the result of `rows`, see `DraftPasses.chains`.

        None if the logits of a request are edited, since this depends on its tokens.
        """
        state = self.sampler.unedited(requests)
        return None if state is None else self._recorded.chains(out, counts, self.rows_of(requests), state, positions)

    def next_rows(self, out: Tensor, tokens: Tensor, requests: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Compute the rows of the latest drafts, see `DraftPasses.next_rows`."""
        return self._recorded.next_rows(out, tokens.to(out.device), self.rows_of(requests), starts)

    @property
    def _recorded(self) -> DraftPasses:
        if self.passes is None:
            raise RuntimeError(f"there are no passes of a model that drafts: {self.kv} is read on the host")
        return self.passes

    def tree_batch(self, branches: Sequence[Branch]) -> RaggedBatch:
        """The same for trees of drafts."""
        spans = [Span(branch.request, branch.base, list(branch.tokens)) for branch in branches]
        return self._batch(spans, {branch.request: branch for branch in branches})

    def _batch(self, spans: list[Span], branches: Mapping[int, Branch]) -> RaggedBatch:
        row_starts = np.cumsum([0, *(len(span.tokens) for span in spans)])
        return self._tables.batches(spans, self.rows_of([span.request for span in spans]), row_starts, branches)[0]

    def rows_of(self, requests: Sequence[int]) -> NDArray[np.int64]:
        """Requests' rows in the block tables."""
        return np.array([self.row_of(request) for request in requests], np.int64)

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """Sample a token per row from logits [rows, vocabulary] fp32, with the request's parameters and noise.

        So equal logits give the tokens that the request itself will sample. -1 means that all tokens are masked. The
        logits may be overwritten; no request advances.
        """
        tokens: list[int] = self.sampler.draw(logits, rows).tolist()
        return tokens

    def line(self, wanted: Sequence[Wanted], lead: int) -> Line:
        """Sample drafts one after the other.

        Args:
            wanted: in order of descending counts, so that the requests that want another draft are always the first.
            lead: the KV of a token at position p is stored at p - lead.
        """
        requests, positions = [want.request for want in wanted], [want.position for want in wanted]
        filters = self.sampler.filters_ahead(requests, positions, wanting(wanted)[:-1])
        return Line(self, wanted, lead, filters)

    def rows_ahead(self, wanted: Sequence[Wanted], lead: int) -> RowsAhead:
        """Batches for drafts that are followed by others: see `line` and `HostForward.rows_ahead`."""
        firsts = np.array([want.position - lead for want in wanted])
        rows = self.rows_of([want.request for want in wanted])
        return self._tables.rows_ahead(rows, np.arange(wanted[0].count - 1)[:, None] + firsts)

    def distributions(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """The distributions of `draw`: [rows, vocabulary] fp32, after edits, temperature and filters."""
        return self.sampler.distributions(logits, rows)

    def candidates(self, logits: Tensor, rows: Sequence[Row], width: int) -> tuple[Tensor, Tensor]:
        """The `width` tokens that each row's request will most likely sample: ids and log-confidences [rows, width].

        They depend on the request's temperature and noise; the first one is usually the result of `draw`.
        """
        return self.sampler.candidates(logits, rows, width)

    # -- for the drafter -----------------------------------------------------------------------------------

    def set_last(self, requests: Sequence[int], tokens: Sequence[int]) -> None:
        """Set the last sampled tokens of requests for which the runner does not have them."""
        self._tables.last_tokens.index_copy_(0, *self.upload(self.rows_of(requests), np.array(tokens, np.int64)))

    def move(self, request: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy a request's KV between positions: that of a tree's accepted rows."""
        slots = self._tables.slots(self.row_of(request), [*sources, *destinations])
        for kv, own in zip(self._kv, slots, strict=True):
            self.kernels.move_rows(kv, *own.chunk(2))


class Line:
    """Successive drafts of several requests. What does not depend on tokens is prepared once for all drafts.

    Args:
        filters: how to sample each draft, see `Sampler.filters_ahead`; None if it depends on earlier drafts.
    """

    def __init__(
        self,
        context: DraftContext,
        wanted: Sequence[Wanted],
        lead: int,
        filters: Sequence[Filters] | None = None,
    ) -> None:
        self._context, self._wanted, self._lead, self._filters = context, wanted, lead, filters
        self._rows: RowsAhead | None = None
        self._going = wanting(wanted)
        self._drawn: list[Tensor] = []  # one per draft: [requests] int64, -1 if all was masked

    @property
    def rows(self) -> list[Row]:
        """The next draft's row of each request that wants one."""
        depth = len(self._drawn)
        ahead = zip(*(tokens.clamp(min=0).tolist() for tokens in self._drawn), strict=False) if depth else repeat(())
        return [
            Row(want.request, want.position + depth, tokens)
            for want, tokens in zip(self._wanted[: self._going[depth]], ahead, strict=False)
        ]

    def draw(self, logits: Tensor) -> int:
        """Sample the next drafts, see `DraftContext.draw`. Returns the number of requests that want another one."""
        if self._filters is not None:
            tokens = self._context.kernels.sample(logits, self._filters[len(self._drawn)])
        else:
            tokens = torch.tensor(self._context.draw(logits, self.rows))
        self._drawn.append(tokens)
        return self._going[len(self._drawn)]

    def _latest(self) -> Tensor:
        """The latest drafts of the requests that want another one."""
        tokens, going = self._drawn[-1].clamp(min=0), self._going[len(self._drawn)]
        return tokens[:going] if len(tokens) > going else tokens

    def batch(self) -> RaggedBatch:
        """The batch of the latest drafts of the requests that want another one."""
        if self._rows is None:
            self._rows = self._context.rows_ahead(self._wanted, self._lead)
        return self._rows(len(self._drawn) - 1, self._latest())

    def recorded(self, out: Tensor) -> Tensor:
        """The output of this batch's rows, if the context has passes, given the output `out` of the rows before."""
        going, before = self._wanted[: self._going[len(self._drawn)]], len(self._drawn) - 1 - self._lead
        starts = [want.position + before for want in going]
        return self._context.next_rows(out, self._latest(), [want.request for want in going], starts)

    def drafts(self) -> list[list[int]]:
        """The drafts by request, up to one where all tokens were masked."""
        drawn = [tokens.tolist() for tokens in self._drawn]
        lines = [[tokens[i] for tokens in drawn[: want.count]] for i, want in enumerate(self._wanted)]
        return [line[: line.index(-1)] if -1 in line else line for line in lines]


def wanting(wanted: Sequence[Wanted]) -> list[int]:
    """The number of requests that want at least 1, 2, ... drafts, the last one 0. Counts in `wanted` are descending."""
    return [sum(want.count > depth for want in wanted) for depth in range(wanted[0].count + 1)]


class DeviceContext(DraftContext):
    """The same if lengths and drafts are known on the device only."""

    _tables: DeviceForward

    @property
    def recent(self) -> Tensor:
        """[requests, size] int64: recent tokens for each row of the block tables, by position modulo `size`.

        In `batch`, the token -1 is replaced by the recent one at the row's position, -2 by the next one.
        """
        return self._tables.recent

    def ends(self, requests: Sequence[int]) -> Ends:
        """The lengths of these requests."""
        [rows] = self.upload(self.rows_of(requests).astype(np.int32))
        return Ends(rows, self._tables.lengths.index_select(0, rows).long())

    def draw_ahead(self, logits: Tensor, asked: Sequence[Asked], ends: Ends, drafts: Tensor) -> Tensor:
        """Like `draw`: tokens [requests] after `drafts` [requests, count], without the host."""
        places = [(each.request, each.most + drafts.shape[1]) for each in asked]
        return self.sampler.draw_ahead(logits, places, Ahead(ends.lengths + drafts.shape[1], drafts))

    # -- for the drafter: the tables -----------------------------------------------------------------------

    def tell(self, requests: Sequence[int], lengths: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        """Set these requests' lengths, and their last tokens."""
        rows, keeps = self.rows_of(requests), self.recent.shape[1]
        places = rows * keeps + (lengths - 1) % keeps
        sent = self.upload(rows, lengths.astype(np.int32), places, last)
        self._tables.lengths.index_copy_(0, *sent[:2])
        self.recent.view(-1).index_copy_(0, *sent[2:])

    def places(self, ends: Ends, count: int) -> Tensor:
        """Indices into `recent` of the positions after the known tokens: [requests, count] int64."""
        keeps = self.recent.shape[1]
        positions = ends.lengths[:, None] + torch.arange(count, device=ends.lengths.device)
        return ends.rows[:, None].long() * keeps + positions % keeps

    def put_drafts(self, requests: Sequence[int], tokens: Tensor) -> None:
        """Write drafts [requests, count] after the known tokens; invalid ids become -1."""
        tokens = torch.where((tokens >= 0) & (tokens < self.vocab_size), tokens, -1)
        places = self.places(self.ends(requests), tokens.shape[1])
        self.recent.view(-1).index_copy_(0, places.flatten(), tokens.flatten())

    def putting(self, ends: Ends, places: Tensor, tokens: Tensor, counts: Tensor) -> Callable[[], None]:
        """A function that writes tokens [requests, most] into these places, and extends lengths by `counts`. Calling it
        allocates no memory.

        Args:
            counts: [requests] int32.
        """
        rows, lengths = ends.rows.long(), ends.lengths.to(torch.int32) + counts
        places, tokens, recent = places.flatten(), tokens.flatten(), self.recent.view(-1)

        def put() -> None:
            recent.index_copy_(0, places, tokens)
            self._tables.lengths.index_copy_(0, rows, lengths)

        return put
