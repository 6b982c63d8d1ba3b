"""A drafting model's passes where kernels read a step's shape on the device: recorded, as the target's steps are.

`rows` computes the rows of known tokens, and `chains` drafts from the last of these, without the host: it samples a
token, computes it in the next row, and so on. A step has one of each; or `nodes` computes a tree's, a layer at a time.
Launches depend only on padded counts, so that each size is recorded once as a CUDA graph, and replayed (`graphs`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import Span
from quire.ops import KVCache
from quire.ops.sampling import Filters, keys_at
from quire.runner.device_forward import DeviceForward, Size, described, nothing, padded_decodes, path_width
from quire.runner.drafts import Branch, DraftingModel
from quire.runner.graphs import aligned
from quire.runner.host_forward import HostForward


class ChainSize(NamedTuple):
    """What the launches of `DraftPasses.chains` depend on.

    Attributes:
        requests: their padded number.
        drafts: most drafts of a request.
        filtered: whether some request has top-k or top-p.
    """

    requests: int
    drafts: int
    filtered: bool = False


class DraftPasses:
    """Runs a drafting model on requests' own blocks.

    Args:
        forward: has the block tables, and the graphs.
        kv: the drafting model's cache.
        model: drafts.
        lead: the KV of a token at position p is stored at p - lead.
    """

    def __init__(self, forward: DeviceForward, kv: KVCache, model: DraftingModel, lead: int) -> None:
        self._forward, self._kv, self._model, self._lead = forward, kv, model, lead

    # -- rows of known tokens ------------------------------------------------------------------------------

    def rows(self, hidden: Tensor, spans: Sequence[Span], rows: NDArray[np.int64]) -> Tensor:
        """Compute spans; tokens may be placeholders, see `DeviceContext.recent`.

        Args:
            hidden: [tokens, hidden], a head's input; empty if `lead` is 0.
            rows: the row in the block tables of each span's request.

        Returns [at least spans, hidden], the output of each span's row whose draft would be the request's next token:
        that is the last row, unless only the device knows the request's length. The next call may overwrite it.
        """
        row_starts = np.cumsum([0, *(len(span.tokens) for span in spans)])
        size = self._forward.size_of(int(row_starts[-1]), len(spans))
        return self._rows(size, described(size, spans, rows, row_starts), hidden)

    def _rows(self, size: Size, sent: NDArray[np.int32], hidden: Tensor) -> Tensor:
        forward, given = self._forward, [_with_rows(hidden, size.tokens)] if self._lead else []

        def run(inputs: Tensor, hidden: Tensor = hidden[:0]) -> Tensor:
            batch, spans = forward.batch(inputs, size)
            out = self._model.forward(hidden, batch, self._kv)
            firsts, row = spans.row_starts[:-1], spans.row_starts.diff() - 1
            if forward.keeps_lengths:
                ends = forward.lengths.index_select(0, spans.table_rows) - 1 - self._lead
                # negative: that step failed, and this result is not used
                row = torch.minimum((ends - spans.starts).clamp(min=0), row)
            return out.index_select(0, (firsts + row).clamp(min=0))

        return forward.graphs(("rows", size), sent, run, *given, records=forward.records(size))

    def nodes(self, hidden: Tensor, branches: Sequence[Branch], rows: NDArray[np.int64]) -> Tensor:
        """Compute rows of trees, one tree per request.

        Args:
            hidden: [nodes, hidden], the outputs of the nodes' parents.
            rows: the row in the block tables of each tree's request.

        Returns [at least nodes, hidden]. The next call may overwrite it.
        """
        spans = [Span(branch.request, branch.base, list(branch.tokens)) for branch in branches]
        row_starts = np.cumsum([0, *(len(span.tokens) for span in spans)])
        by_request = {branch.request: branch for branch in branches}
        size = self._forward.size_of(int(row_starts[-1]), len(spans), path_width(by_request))
        return self._nodes(size, described(size, spans, rows, row_starts, by_request), hidden)

    def _nodes(self, size: Size, sent: NDArray[np.int32], hidden: Tensor) -> Tensor:
        given = [_with_rows(hidden, size.tokens)] if self._lead else []

        def run(inputs: Tensor, hidden: Tensor = hidden[:0]) -> Tensor:
            return self._model.forward(hidden, self._forward.batch(inputs, size)[0], self._kv)

        return self._forward.graphs(("nodes", size), sent, run, *given, records=self._forward.records(size))

    # -- drafts --------------------------------------------------------------------------------------------

    def chains(
        self,
        out: Tensor,
        counts: Sequence[int],
        rows: NDArray[np.int64],
        state: NDArray[Any],
        positions: Sequence[int] = (),
    ) -> Tensor:
        """Draft one token after the other.

        Args:
            out: [at least requests, hidden] from `rows`.
            counts: number of drafts of each request, in descending order.
            rows: the requests' rows in the block tables.
            state: their rows of the `SamplingTable`; none may be edited.
            positions: of their first drafts; not used if the device knows the lengths.

        Returns [requests, most] int64, padded with -1, which is also a draft if all tokens are masked. The next call
        may overwrite it.
        """
        count, vocab = len(counts), self._forward.vocab_size
        filtered = bool((state["top_k"] < vocab).any() or (state["top_p"] < 1).any())
        size = ChainSize(padded_decodes(count), counts[0], filtered)
        sent = _no_chains(size, vocab)
        fields = _on_host(size, sent)
        fields["rows"][:count] = rows
        fields["positions"][: len(positions)] = positions
        fields["going"][:] = (np.array(counts)[:, None] > np.arange(size.drafts)).sum(0)
        for name in ("temperature", "log_min_p", "top_k", "top_p"):
            fields[name][:count] = state[name]
        fields["stream"][:count] = state["stream"].view(np.int64)
        return self._chains(size, sent, out)[:count]

    def _chains(self, size: ChainSize, sent: NDArray[np.int32], out: Tensor) -> Tensor:
        def run(inputs: Tensor, out: Tensor) -> Tensor:
            return self._drawn(size, _on_device(size, inputs), out)

        return self._forward.graphs(("chains", size), sent, run, _with_rows(out, size.requests))

    def _drawn(self, size: ChainSize, fields: dict[str, Tensor], out: Tensor) -> Tensor:
        forward, rows, positions = self._forward, fields["rows"], fields["positions"]
        if forward.keeps_lengths:
            positions = forward.lengths.index_select(0, rows)
        heat, min_p, top_k, top_p = (fields[name] for name in ("temperature", "log_min_p", "top_k", "top_p"))
        filters = Filters(heat, min_p, top_k, top_p, fields["stream"], size.filtered, size.filtered)
        order = torch.arange(size.requests, dtype=torch.int32, device=rows.device)
        drafts: list[Tensor] = []
        for depth in range(size.drafts):
            goes = order < fields["going"][depth]
            if depth:
                starts = (positions + (depth - 1 - self._lead)).masked_fill(goes.logical_not(), 0)
                batch = forward.decodes(rows, starts, drafts[-1].clamp(min=0), goes)
                out = self._model.forward(out, batch, self._kv)
            keys = keys_at(fields["stream"], positions.long() + depth)
            drawn = forward.kernels.sample(self._model.logits(out), dataclasses.replace(filters, keys=keys))
            drafts.append(drawn.masked_fill(goes.logical_not(), -1))
        return torch.stack(drafts, dim=1)

    def next_rows(self, out: Tensor, tokens: Tensor, rows: NDArray[np.int64], starts: Sequence[int]) -> Tensor:
        """Compute one drafted row of each request: a part of `chains`, for drafts that are sampled by the caller.

        Args:
            out: [requests, hidden], of the rows before.
            tokens: [requests] int64 on the device, their drafts.
            rows: the requests' rows in the block tables.
            starts: positions; if the device knows the lengths, counted from these.

        Returns [requests, hidden]. The next call may overwrite it.
        """
        forward, count = self._forward, len(tokens)
        places = aligned([padded_decodes(count), padded_decodes(count), 1])
        sent = np.zeros(places[-1].stop, np.int32)
        sent[places[0]][:count], sent[places[1]][:count], sent[places[2]] = rows, starts, count

        def run(inputs: Tensor, out: Tensor, tokens: Tensor) -> Tensor:
            rows, starts, count = (inputs[place] for place in places)
            goes = torch.arange(len(rows), dtype=torch.int32, device=rows.device) < count
            if forward.keeps_lengths:
                starts = forward.lengths.index_select(0, rows) + starts
            batch = forward.decodes(rows, starts.masked_fill(goes.logical_not(), 0), tokens, goes)
            return self._model.forward(out, batch, self._kv)

        size = padded_decodes(count)
        given = _with_rows(out, size), F.pad(tokens, (0, size - count))
        return forward.graphs(("next", size), sent, run, *given)[:count]

    # -- at start ------------------------------------------------------------------------------------------

    def record(self, sizes: set[Size], chains: set[ChainSize], report: Callable[[float], None]) -> None:
        """Record these sizes, or as many as fit; `report` is called with the progress.

        Args:
            sizes: of `rows`, and with paths, of `nodes`.
        """
        forward = self._forward
        hidden = self._model.fuse(forward.no_features()) if self._lead else forward.no_features()[:, :0]
        out, done = hidden, 0
        for size in sorted(sizes, reverse=True):
            if forward.graphs.full:
                return
            report(done / (len(sizes) + len(chains)))
            out = (self._nodes if size.paths else self._rows)(size, nothing(size), hidden)
            done += 1
        for chain in sorted(chains, reverse=True):
            if forward.graphs.full:
                return
            report(done / (len(sizes) + len(chains)))
            self._chains(chain, _no_chains(chain, forward.vocab_size), out)
            done += 1
        report(1.0)


def row_sizes(forward: DeviceForward, most: int, drafts: int) -> set[Size]:
    """Sizes of `rows` where each of up to `most` requests decodes with drafts: the last token and accepted ones, and as
    many again where a step is launched before the last one's result is known."""
    each = range(1, (2 if forward.keeps_lengths else 1) * (1 + drafts) + 1)
    return {forward.size_of(count * requests, requests) for count in each for requests in range(1, most + 1)}


def chain_sizes(most: int, drafts: Sequence[int], filtered: bool) -> set[ChainSize]:
    """Sizes of `chains` of up to `most` requests, for these numbers of drafts; `filtered`: also with filters."""
    counts = {padded_decodes(count) for count in range(1, most + 1)}
    return {
        ChainSize(count, number, filters)
        for count in counts
        for number in drafts
        for filters in ((False, True) if filtered else (False,))
    }


def passes_of(
    forward: HostForward | DeviceForward, kv: Sequence[KVCache], model: DraftingModel | None, needs_next_token: bool
) -> DraftPasses | None:
    """The passes of what drafts, if it is a model, and kernels read spans on the device; see `Speculation`."""
    own = kv[0].draft_kv
    if model is None or own is None or not isinstance(forward, DeviceForward):
        return None
    return DraftPasses(forward, own, model, int(needs_next_token))


_FIELDS: tuple[tuple[str, type[np.generic], torch.dtype], ...] = (
    ("rows", np.int32, torch.int32),
    ("positions", np.int32, torch.int32),
    ("temperature", np.float32, torch.float32),
    ("log_min_p", np.float32, torch.float32),
    ("top_k", np.int64, torch.int64),
    ("top_p", np.float64, torch.float64),
    ("stream", np.int64, torch.int64),
    ("going", np.int32, torch.int32),
)
"""What `DraftPasses.chains` sends: [requests] each, but `going` [drafts], how many requests want each draft."""


@functools.lru_cache(1024)
def _places(size: ChainSize) -> list[slice]:
    """Where each of `_FIELDS` lies among 32-bit words."""
    lengths = [np.dtype(kind).itemsize // 4 * size.requests for _, kind, _ in _FIELDS[:-1]]
    return aligned([*lengths, size.drafts])


def _on_host(size: ChainSize, words: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    pairs = zip(_FIELDS, _places(size), strict=True)
    return {name: words[place].view(kind) for (name, kind, _), place in pairs}


def _on_device(size: ChainSize, words: Tensor) -> dict[str, Tensor]:
    pairs = zip(_FIELDS, _places(size), strict=True)
    return {name: words[place].view(kind) for (name, _, kind), place in pairs}


def _no_chains(size: ChainSize, vocab_size: int) -> NDArray[np.int32]:
    """What is sent for no requests, which writes to the null block alone."""
    words = np.zeros(_places(size)[-1].stop, np.int32)
    fields = _on_host(size, words)
    fields["log_min_p"][:], fields["top_k"][:], fields["top_p"][:] = -np.inf, vocab_size, np.inf
    return words


def _with_rows(x: Tensor, count: int) -> Tensor:
    """The first rows of x, or all and zeros."""
    return x[:count] if len(x) >= count else F.pad(x, (0, 0, 0, count - len(x)))
