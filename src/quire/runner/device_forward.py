"""A step's forward pass on a GPU, whose kernels read the step's shape on the device.

A step is described by one array of 32-bit integers, sent in one copy. Positions, slots and lengths are computed from it
on the device, with data that is there already: the block tables, and each request's last sampled token, which the host
need not know yet. Launches depend only on two padded counts, of tokens and of spans, so that a step is recorded once
per size as a CUDA graph, and replayed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import Span
from quire.models.model import Model
from quire.ops import KVCache, RaggedBatch
from quire.ops.ragged import DeviceSpans, DeviceTrees
from quire.runner.device import Device
from quire.runner.host_forward import NO_BRANCHES, Blocks, Forwarded, RowsAhead, forward, tree_end, tree_rows
from quire.runner.proposer import Branch

logger = logging.getLogger(__name__)

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
    """Padded counts of a step's tokens and spans."""

    tokens: int
    spans: int


@dataclass(slots=True)
class _Graph:
    """A recorded step of one size: write `inputs`, call `replay`, and read `made`."""

    inputs: Tensor
    replay: Callable[[], None]
    made: Forwarded


class DeviceForward:
    """Runs spans through the model, with the block tables of all requests on the device.

    Args:
        kv: one cache per KV group.
        most_spans: most spans of a step.
        width: number of blocks of the longest context.
        graphs: "lazy", "eager" or "off"; see `EngineConfig.cuda_graphs`.
        spare: bytes that must be free to record another graph: for it, and for steps without one.
        aux_layers: see `HostForward`.
        largest: most tokens of a step that is recorded.
        keeps: number of tokens per request in `recent`.

    Attributes:
        graphs: see above.
        recent: [requests, keeps] int64, recent tokens for each row of the tables, by position modulo `keeps`: the last
            known ones, followed by drafts.
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
        self._size = kv[0].block_size
        self._most_spans, self.graphs, self._spare, self._largest = most_spans, graphs, spare, largest
        self._recorded: dict[Size, _Graph] = {}
        self._full = False  # no memory for more graphs
        # Twice the spans, since preempted requests keep their row. Growing the tables means recording graphs again.
        with device.active():
            shape = len(kv), 2 * most_spans, width  # groups, requests, blocks
            self._tables = torch.zeros(shape, dtype=torch.int32, device=device.torch)
            self.recent = torch.zeros(2 * most_spans, keeps, dtype=torch.int64, device=device.torch)
            self.lengths = torch.zeros(2 * most_spans, dtype=torch.int32, device=device.torch)

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
        self._recorded, self._full = {}, False
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
        size = Size(int(row_starts[-1]), len(spans))
        if not branches:
            return self._batches(self._write(self._inputs(size), size, spans, rows, row_starts), size)
        by_span = {index: branches[span.request] for index, span in enumerate(spans) if span.request in branches}
        bases, ends = np.zeros((2, len(spans)), np.int32)
        spans = list(spans)
        for index, branch in by_span.items():  # its first row's slot, instead of its position
            spans[index] = replace(spans[index], start=branch.base + branch.slots[0])
            bases[index], ends[index] = branch.base, tree_end(branch)
        depths, paths = (table.astype(np.int32) for table in tree_rows(by_span, row_starts))
        inputs = self._write(self._inputs(size), size, spans, rows, row_starts)
        reach, *trees = self._device.upload(ends, bases, depths, paths)
        return self._batches(inputs, size, DeviceTrees(*trees), reach)

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
            branches: trees of drafts, by request; these use no graph.
        """
        if branches:
            return self._forward(self.batches(spans, rows, row_starts, branches))
        size = padded(int(row_starts[-1]), len(spans), self._most_spans)
        graph = self._recorded.get(size)
        if graph is not None:
            self._write(graph.inputs, size, spans, rows, row_starts)
            graph.replay()
            return graph.made
        inputs = self._write(self._inputs(size), size, spans, rows, row_starts)
        made = self._run(inputs, size)  # this step itself, which also compiles kernels
        if self.graphs != "off" and size.tokens <= self._largest and not self._full:
            self._record(inputs, size)
        return made

    def record(self, sizes: set[Size], report: Callable[[float], None]) -> None:
        """Record these sizes, or as many as fit; `report` is called with the progress."""
        for index, size in enumerate(sorted(sizes, reverse=True)):
            if self._full:
                break
            report(index / len(sizes))
            inputs = self._inputs(size)
            inputs.zero_()  # no span has a row, so only the null block is written
            self._run(inputs, size)
            self._record(inputs, size)
        report(1.0)

    @property
    def num_graphs(self) -> int:
        """Number of recorded sizes."""
        return len(self._recorded)

    def _record(self, inputs: Tensor, size: Size) -> None:
        begin = time.perf_counter()
        self._device.release()  # cached memory cannot be used for recording
        try:
            enough = self._device.memory()[0] >= self._spare
            recorded = self._device.record(lambda: self._run(inputs, size)) if enough else None
        except torch.OutOfMemoryError:
            recorded = None
        if not self._all_ranks(recorded is not None):
            recorded = None
        if recorded is None:
            self._full = True
            logger.warning(
                "no memory for more than %d CUDA graphs: steps of other sizes take longer to launch; a lower "
                "gpu_memory_utilization or max_num_batched_tokens leaves more",
                self.num_graphs,
            )
            return
        self._recorded[size] = _Graph(inputs, *recorded)
        seconds = time.perf_counter() - begin
        logger.debug("recorded a step of %d tokens in %d spans in %.0f ms", *size, seconds * 1000)

    def _all_ranks(self, recorded: bool) -> bool:
        """Whether all ranks have recorded a step. NCCL wants a collective in a graph on all of them, or on none."""
        ranks = self._model.ranks
        if ranks.size == 1:
            return recorded
        return all(part.item() for part in ranks.exchange([torch.tensor([recorded], dtype=torch.uint8)]))

    # -- computing -----------------------------------------------------------------------------------------

    def _inputs(self, size: Size) -> Tensor:
        """Memory for a step's description; see `_write`."""
        return torch.empty(_places(size)[-1].stop, dtype=torch.int32, device=self._device.torch)

    def _write(
        self, inputs: Tensor, size: Size, spans: list[Span], rows: NDArray[np.int64], begins: NDArray[np.int64]
    ) -> Tensor:
        """Send a step's description: row starts, starts and table rows of the spans, tokens, and each row's span."""
        count, real = len(spans), int(begins[-1])
        sent = np.zeros(len(inputs), np.int32)
        row_starts, starts, table_rows, tokens, span_of_row = (sent[place] for place in _places(size))
        row_starts[: count + 1], row_starts[count + 1 :] = begins, real
        starts[:count] = [span.start for span in spans]
        table_rows[:count] = rows
        tokens[:real] = np.fromiter(chain.from_iterable(span.tokens for span in spans), np.int32, real)
        span_of_row[:real] = np.repeat(np.arange(count), np.diff(begins))
        self._device.write(inputs, sent)
        return inputs

    def _run(self, inputs: Tensor, size: Size) -> Forwarded:
        """The forward pass, given the inputs of `_write`. Its launches depend only on `size`."""
        return self._forward(self._batches(inputs, size))

    def _batches(
        self, inputs: Tensor, size: Size, trees: DeviceTrees | None = None, reach: Tensor | None = None
    ) -> list[RaggedBatch]:
        """The kernels' input. `reach` [spans]: least context lengths, as a row's ancestors may be stored after it."""
        row_starts, starts, table_rows, tokens, span_of_row = (inputs[place] for place in _places(size))
        if self.recent.shape[1] > 1:  # otherwise lengths are not maintained
            starts = torch.where(starts == AT_LAST, self.lengths.index_select(0, table_rows) - 1, starts)
        contexts = torch.empty_like(starts)
        batches = [
            self._placed(tokens, span_of_row, DeviceSpans(row_starts, starts, contexts, table_rows, table, trees))
            for table in self._tables
        ]
        if reach is not None:
            torch.maximum(contexts, reach, out=contexts)
        return batches

    def _placed(self, tokens: Tensor, span_of_row: Tensor, spans: DeviceSpans) -> RaggedBatch:
        ids, positions, slots = self._model.kernels.place(tokens, span_of_row, self.recent, spans, self._size)
        return RaggedBatch(ids, positions, slots, [], [], spans.block_tables[:0], self._size, spans)

    def decodes(self, table_rows: Tensor, starts: Tensor, tokens: Tensor) -> RaggedBatch:
        """A batch of one token per request for a draft model, of which the host knows only the number of requests.

        Args:
            table_rows: [requests] int32, their rows of the tables.
            starts: [requests] int32, positions.
            tokens: [requests] int64, ids.
        """
        row_starts = torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device)
        spans = DeviceSpans(row_starts, starts, torch.empty_like(starts), table_rows, self._tables[0])
        return self._placed(tokens.to(torch.int32), row_starts[:-1], spans)

    def rows_ahead(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> RowsAhead:
        """See `HostForward.rows_ahead`."""
        table_rows, *starts = self._device.upload(rows.astype(np.int32), *positions.astype(np.int32))

        def batch(index: int, tokens: Tensor) -> RaggedBatch:
            count = len(tokens)
            return self.decodes(table_rows[:count], starts[index][:count], tokens.to(self._device.torch))

        return batch

    def _forward(self, batches: Sequence[RaggedBatch]) -> Forwarded:
        return forward(self._model, batches, self._kv, self._aux_layers)


def padded(tokens: int, spans: int, most_spans: int) -> Size:
    """The padded size of a step, so that there are few sizes to record, and little padding.

    Only steps of decodes alone have as many tokens as spans, which kernels make use of.
    """
    if tokens == spans:
        count = _padded_decodes(tokens)
        return Size(count, count)
    spans = next((count for count in (16, 64) if spans <= count <= most_spans), max(spans, most_spans))
    return Size(-(-max(tokens, spans + 1) // CHUNK) * CHUNK, spans)


def _padded_decodes(count: int) -> int:
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
    """The slices of a step's inputs, each aligned to 16 bytes, for which kernels are compiled."""
    places, start = [], 0
    for length in (size.spans + 1, size.spans, size.spans, size.tokens, size.tokens):
        places.append(slice(start, start + length))
        start += -(-length // 4) * 4
    return places
