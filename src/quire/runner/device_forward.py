"""A step's forward pass on a GPU, whose kernels read the step's shape on the device.

A step is described by one array of 32-bit integers, sent in one copy. Positions, slots and lengths are computed from it
on the device, with data that is there already: the block tables, and each request's last sampled token, which the host
need not know yet. Launches depend only on two padded counts, of tokens and of spans, so that a step is recorded once
per size as a CUDA graph, and replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import Span
from quire.models.model import Model
from quire.ops import KVCache, RaggedBatch
from quire.ops.ragged import DeviceSpans, DeviceTrees
from quire.runner import recorded_sampling
from quire.runner.device import Device
from quire.runner.drafts import Branch
from quire.runner.graphs import Graphs, aligned
from quire.runner.host_forward import NO_BRANCHES, Blocks, Forwarded, RowsAhead, forward, tree_end, tree_rows
from quire.runner.sampling_table import STATE

LARGEST_GRAPH = 1024
LARGEST_SMALL_GRAPH = 2048
SMALL_MODEL = 2 * 10**9
"""Most tokens of a step that is recorded, in general and for models with at most `SMALL_MODEL` parameters. Computing
larger steps takes longer than launching their kernels."""

AT_LAST = -1
"""Placeholder for a span's start: the position of its request's last known token, if only the device knows it."""

CHUNK = 64
"""The number of tokens of a step with prompts is padded to a multiple of this."""


class Size(NamedTuple):
    """Padded counts of a step's tokens and spans, and the padded length of paths in trees; 0 without trees."""

    tokens: int
    spans: int
    paths: int = 0


class DeviceForward:
    """Runs spans through the model, with the block tables of all requests on the device.

    Args:
        kv: one cache per KV group.
        most_spans: most spans of a step.
        width: number of blocks of the longest context.
        graphs, spare: `mode` and `spare` of `Graphs`.
        aux_layers: see `HostForward`.
        largest: most tokens of a step that is recorded.
        keeps: number of tokens per request in `recent`.

    Attributes:
        kernels, vocab_size: the target model's.
        graphs: the recorded steps, and passes of a drafting model.
        recent: [requests + 1, keeps] int64, recent tokens for each row of the tables, by position modulo `keeps`: the
            last known ones, followed by drafts. The last row belongs to no request.
        lengths: [requests] int32, number of known tokens. The caller maintains both if spans start at `AT_LAST`, or
            sample more than one token.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[KVCache],
        device: Device,
        most_spans: int,
        width: int,
        graphs: str = "off",
        spare: int = 0,
        aux_layers: Sequence[int] = (),
        keeps: int = 1,
        largest: int = LARGEST_GRAPH,
    ) -> None:
        self._model, self._kv, self._device, self._aux_layers = model, kv, device, aux_layers
        self.kernels, self.vocab_size = model.kernels, model.vocab_size
        self._size = kv[0].block_size
        self._most_spans, self._largest = most_spans, largest
        self.graphs = Graphs(device, model.ranks, graphs, spare)
        # Twice the spans, since preempted requests keep their row. Growing the tables means recording graphs again.
        with device.active():
            shape = len(kv), 2 * most_spans, width  # groups, requests, blocks
            self._tables = torch.zeros(shape, dtype=torch.int32, device=device.torch)
            self.recent = torch.zeros(2 * most_spans + 1, keeps, dtype=torch.int64, device=device.torch)
            self.lengths = torch.zeros(2 * most_spans, dtype=torch.int32, device=device.torch)

    @property
    def keeps_lengths(self) -> bool:
        """Whether `recent` and `lengths` are maintained."""
        return self.recent.shape[1] > 1

    @property
    def samples(self) -> bool:
        """Whether `sample` is recorded."""
        return self.graphs.mode != "off" and self._model.ranks.size == 1 and not self.keeps_lengths

    @property
    def last_tokens(self) -> Tensor:
        """See `HostForward`; only if no other tokens are kept."""
        return self.recent[:, 0]

    def set_blocks(self, rows: Sequence[int], starts: Sequence[int], blocks: Sequence[Blocks]) -> None:
        """Set entries in some rows of the tables, each from its start on."""
        if max(rows) >= len(self.lengths):
            self._grow(max(rows) + 1)
        groups, height, width = self._tables.shape
        lengths = [len(part[0]) for part in blocks]
        firsts = np.array(rows) * width + np.array(starts)
        places = np.repeat(firsts - np.cumsum([0, *lengths[:-1]]), lengths) + np.arange(sum(lengths))
        places = (np.arange(groups)[:, None] * (height * width) + places).ravel()
        by_group = (part[group] for group in range(groups) for part in blocks)
        values = np.fromiter(chain.from_iterable(by_group), np.int32, len(places))
        where, what = self._device.upload(places, values)
        self._tables.view(-1).index_copy_(0, where, what)

    def _grow(self, height: int) -> None:
        """Add rows, and drop all graphs, since they read the old tables."""
        more = max(height, 2 * len(self.lengths)) - len(self.lengths)
        tables = torch.nn.functional.pad(self._tables, (0, 0, 0, more))
        recent = torch.nn.functional.pad(self.recent, (0, 0, 0, more))
        lengths = torch.nn.functional.pad(self.lengths, (0, more))
        self.graphs.clear()
        self._tables, self.recent, self.lengths = tables, recent, lengths  # all or none, whatever fails

    def slots(self, row: int, positions: Sequence[int]) -> list[Tensor]:
        """See `HostForward.slots`."""
        blocks, offsets = self._device.upload(*np.divmod(positions, self._size))
        return [table[row].index_select(0, blocks) * self._size + offsets for table in self._tables]

    def batches(
        self,
        spans: list[Span],
        rows: NDArray[np.int64],
        row_starts: NDArray[np.int64],
        branches: Mapping[int, Branch] = NO_BRANCHES,
    ) -> list[RaggedBatch]:
        """The spans as one batch per group, without padding; see `__call__`."""
        size = Size(int(row_starts[-1]), len(spans), path_width(branches))
        return self._batches(self._sent(described(size, spans, rows, row_starts, branches)), size, self._tables)[0]

    def __call__(
        self,
        spans: list[Span],
        rows: NDArray[np.int64],
        row_starts: NDArray[np.int64],
        branches: Mapping[int, Branch] = NO_BRANCHES,
    ) -> Forwarded:
        """Compute the spans: see `HostForward`.

        The result is padded with rows after those of the spans, and is overwritten by the next step.

        Args:
            rows: the row in the tables of each span's request.
            row_starts: first row of each span, and the end of the last one.
            branches: trees of drafts, by request.
        """
        size = self.size_of(int(row_starts[-1]), len(spans), path_width(branches))
        return self._step(size, described(size, spans, rows, row_starts, branches))

    def _step(self, size: Size, sent: NDArray[np.int32]) -> Forwarded:
        def run(inputs: Tensor) -> Forwarded:
            return self._forward(self._batches(inputs, size, self._tables)[0])

        return self.graphs(("step", size), sent, run, records=self.records(size))

    def sample(
        self, hidden: Tensor, state: NDArray[Any], keys: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Sample a token for each request of a step of decodes.

        Args:
            hidden: [padded, hidden], of `Forwarded`.
            state, keys, rows: see `recorded_sampling.described`.

        Returns:
            The tokens and `rows`, both [requests] int64, which may be overwritten by the next call.
        """
        count = len(hidden)
        sent = recorded_sampling.described(count, state, keys, rows)
        run = functools.partial(recorded_sampling.sample, self._model)
        tokens, places = self.graphs(("sampling", count), sent, run, hidden, records=self.records(Size(count, count)))
        return tokens[: len(rows)], places[: len(rows)]

    def size_of(self, tokens: int, spans: int, paths: int = 0) -> Size:
        """See `padded`; `paths`: of trees, see `Size`."""
        return padded(tokens, spans, self._most_spans)._replace(paths=paths)

    def records(self, size: Size) -> bool:
        """Whether steps of this size are recorded."""
        return size.tokens <= self._largest

    def no_features(self) -> Tensor:
        """One row of zeros, as `Forwarded.features` are."""
        width = self._model.config.layer.hidden_size * max(1, len(self._aux_layers))
        return torch.zeros(1, width, dtype=self._model.dtype, device=self._device.torch)

    def record(self, sizes: set[Size], report: Callable[[float], None]) -> None:
        """Record these sizes, or as many as fit; `report` is called with the progress."""
        for index, size in enumerate(sorted(sizes, reverse=True)):
            if self.graphs.full:
                break
            report(index / len(sizes))
            made = self._step(size, nothing(size))
            if self.samples and size.tokens == size.spans:
                none = np.zeros(0, np.int64)
                self.sample(made.hidden, np.zeros(0, STATE), none, none)
        report(1.0)

    # -- computing -----------------------------------------------------------------------------------------

    def _batches(self, inputs: Tensor, size: Size, tables: Tensor) -> tuple[list[RaggedBatch], DeviceSpans]:
        """The kernels' input, for each group's table, and the first one's spans; `inputs` as from `described`."""
        row_starts, starts, table_rows, tokens, span_of_row, *rest = (inputs[place] for place in _places(size))
        if self.keeps_lengths:
            starts = torch.where(starts == AT_LAST, self.lengths.index_select(0, table_rows) - 1, starts)
        contexts = torch.empty_like(starts)
        trees = DeviceTrees(rest[1], rest[2], rest[3].view(size.tokens, size.paths)) if rest else None
        spans = [DeviceSpans(row_starts, starts, contexts, table_rows, table, trees) for table in tables]
        batches = [self._placed(tokens, span_of_row, each) for each in spans]
        if rest:
            torch.maximum(contexts, rest[0], out=contexts)
        return batches, spans[0]

    def batch(self, inputs: Tensor, size: Size) -> tuple[RaggedBatch, DeviceSpans]:
        """A step for a drafting model, whose KV is in the first group's blocks; `inputs` as from `described`."""
        [batch], spans = self._batches(inputs, size, self._tables[:1])
        return batch, spans

    def _sent(self, description: NDArray[np.int32]) -> Tensor:
        inputs = torch.empty(len(description), dtype=torch.int32, device=self._device.torch)
        self._device.write(inputs, description)
        return inputs

    def _placed(self, tokens: Tensor, span_of_row: Tensor, spans: DeviceSpans) -> RaggedBatch:
        ids, positions, slots = self._model.kernels.place(tokens, span_of_row, self.recent, spans, self._size)
        return RaggedBatch(ids, positions, slots, [], [], spans.block_tables[:0], self._size, spans)

    def decodes(self, table_rows: Tensor, starts: Tensor, tokens: Tensor, goes: Tensor | None = None) -> RaggedBatch:
        """A batch of one token per request for a draft model, of which the host knows only the number of requests.

        Args:
            table_rows: [requests] int32, their rows of the tables.
            starts: [requests] int32, positions.
            tokens: [requests] int64, ids.
            goes: [requests] bool, which have a row, the first ones; the others' starts must be 0. None: all.
        """
        row_starts = torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device)
        span_of_row = row_starts[:-1]
        if goes is not None:
            span_of_row = span_of_row.masked_fill(goes.logical_not(), 0)
            row_starts = torch.minimum(row_starts, goes.sum(dtype=torch.int32))
        spans = DeviceSpans(row_starts, starts, torch.empty_like(starts), table_rows, self._tables[0])
        return self._placed(tokens.to(torch.int32), span_of_row, spans)

    def rows_ahead(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> RowsAhead:
        """See `HostForward.rows_ahead`."""
        table_rows, *starts = self._device.upload(rows.astype(np.int32), *positions.astype(np.int32))

        def batch(index: int, tokens: Tensor) -> RaggedBatch:
            count = len(tokens)
            return self.decodes(table_rows[:count], starts[index][:count], tokens.to(self._device.torch))

        return batch

    def _forward(self, batches: Sequence[RaggedBatch]) -> Forwarded:
        return forward(self._model, batches, self._kv, self._aux_layers)


def nothing(size: Size) -> NDArray[np.int32]:
    """The description of a step without rows, which writes to the null block alone."""
    places = _places(size)
    sent = np.zeros(places[-1].stop, np.int32)
    if size.paths:
        sent[places[_DEPTHS]] = -1
    return sent


def described(
    size: Size,
    spans: Sequence[Span],
    rows: NDArray[np.int64],
    begins: NDArray[np.int64],
    branches: Mapping[int, Branch] = NO_BRANCHES,
) -> NDArray[np.int32]:
    """A step's description: row starts, starts and table rows of the spans, tokens, and each row's span.

    With trees: each span's least context length, as a row's ancestors may be stored after it; and `DeviceTrees`.
    """
    count, real = len(spans), int(begins[-1])
    sent = nothing(size)
    row_starts, starts, table_rows, tokens, span_of_row, *rest = (sent[place] for place in _places(size))
    row_starts[: count + 1], row_starts[count + 1 :] = begins, real
    starts[:count] = [span.start for span in spans]
    table_rows[:count] = rows
    tokens[:real] = np.fromiter(chain.from_iterable(span.tokens for span in spans), np.int32, real)
    span_of_row[:real] = np.repeat(np.arange(count), np.diff(begins))
    if rest:
        reach, bases, depths, paths = rest
        by_span = {index: branches[span.request] for index, span in enumerate(spans) if span.request in branches}
        for index, branch in by_span.items():
            starts[index] = branch.base + branch.slots[0]  # its first row's slot, instead of its position
            bases[index], reach[index] = branch.base, tree_end(branch)
        depths[:real], ancestors = tree_rows(by_span, begins)
        paths.reshape(size.tokens, size.paths)[:real, : ancestors.shape[1]] = ancestors
    return sent


def path_width(branches: Mapping[int, Branch]) -> int:
    """The padded length of paths in these trees; 0 if there are none."""
    if not branches:
        return 0
    return padded_path(max(len(path) for branch in branches.values() for path in branch.paths))


def padded_path(length: int) -> int:
    """A power of two from 4 on."""
    return max(4, 1 << (length - 1).bit_length())


def padded(tokens: int, spans: int, most_spans: int) -> Size:
    """The padded size of a step, so that there are few sizes to record, and little padding.

    Only steps of decodes alone have as many tokens as spans, which kernels make use of.
    """
    if tokens == spans:
        count = padded_decodes(tokens)
        return Size(count, count)
    spans = next((count for count in (16, 64) if spans <= count <= most_spans), max(spans, most_spans))
    return Size(-(-max(tokens, spans + 1) // CHUNK) * CHUNK, spans)


def padded_decodes(count: int) -> int:
    """Round up to 1, 2, 4, or a multiple of 8; from 128 on, to steps of at most an eighth."""
    if count <= 4:
        return 1 << (count - 1).bit_length()
    step = 1 << max(3, count.bit_length() - 4)
    return -(-count // step) * step


def largest_graph(parameters: int, most_tokens: int) -> int:
    """Most tokens of a step that is recorded, for a model with this many parameters and steps of at most `most_tokens`,
    before they are padded."""
    largest = LARGEST_SMALL_GRAPH if parameters <= SMALL_MODEL else LARGEST_GRAPH
    return min(largest, -(-most_tokens // CHUNK) * CHUNK)


def decode_sizes(most_spans: int, largest: int = LARGEST_GRAPH) -> set[Size]:
    """All recorded sizes of steps of decodes alone."""
    return {padded(count, count, most_spans) for count in range(1, min(most_spans, largest) + 1)}


def all_sizes(most_spans: int, largest: int = LARGEST_GRAPH) -> set[Size]:
    """All recorded sizes, with at most `largest` tokens."""
    decodes = decode_sizes(most_spans, largest)
    spans = {1, *(count for count in (17, 65) if count <= most_spans)}
    mixed = {padded(tokens, count, most_spans) for count in spans for tokens in range(count + 1, largest + 1)}
    return {size for size in decodes | mixed if size.tokens <= largest}


@functools.lru_cache(4096)  # a draft model's batches have any size
def _places(size: Size) -> list[slice]:
    """The slices of a step's inputs: see `described`."""
    lengths = [size.spans + 1, size.spans, size.spans, size.tokens, size.tokens]
    if size.paths:
        lengths += [size.spans, size.spans, size.tokens, size.tokens * size.paths]
    return aligned(lengths)


_DEPTHS = 7
"""Where in `_places` those of `DeviceTrees` are."""
