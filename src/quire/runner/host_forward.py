"""A step's forward pass on a CPU, whose kernels read the step's shape on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import FROM_PREVIOUS, Span
from quire.models.model import AuxHiddenStates, Model
from quire.ops import KVCache, RaggedBatch
from quire.ops.ragged import Trees
from quire.runner.drafts import Branch

NO_BRANCHES: Mapping[int, Branch] = {}

Blocks = Sequence[Sequence[int]]
"""Block ids of one request, the same number for each KV group."""


class Forwarded(NamedTuple):
    """The result of a forward pass.

    Attributes:
        hidden: [tokens, hidden] after the last norm.
        finite: [tokens] whether each row of `hidden` is finite.
        features: [tokens, width] input for a drafting head: the inputs of some layers, or `hidden` itself.
    """

    hidden: Tensor
    finite: Tensor
    features: Tensor


RowsAhead = Callable[[int, Tensor], RaggedBatch]
"""Makes the batch with this index, of one row per request, for the first requests: their tokens [rows] int64."""


def forward(
    model: Model, batches: Sequence[RaggedBatch], kv: Sequence[KVCache], aux_layers: Sequence[int]
) -> Forwarded:
    """Run the model; `aux_layers` are the layers whose inputs are features."""
    aux = AuxHiddenStates(aux_layers) if aux_layers else None
    hidden = model.forward(batches, kv, aux)
    return Forwarded(hidden, model.kernels.finite_rows(hidden), aux.features() if aux else hidden)


class HostForward:
    """Runs spans through the model, with the block tables of all requests.

    Args:
        kv: one cache per KV group.
        aux_layers: layers whose inputs are `Forwarded.features`.

    Attributes:
        last_tokens: [requests] int64, the last sampled token of each row of the tables.
    """

    def __init__(self, model: Model, kv: Sequence[KVCache], aux_layers: Sequence[int] = ()) -> None:
        self._model, self._kv, self._aux_layers = model, kv, aux_layers
        self._size = kv[0].block_size
        # [groups, requests, blocks]: one array, so that a step gathers all tables at once
        self._tables = np.zeros((len(kv), 16, 64), np.int64)
        self.last_tokens = torch.zeros(self._tables.shape[1], dtype=torch.int64)

    def set_blocks(self, rows: Sequence[int], starts: Sequence[int], blocks: Sequence[Blocks]) -> None:
        """Set entries in some rows of the tables, each from its start on."""
        self._grow(max(rows) + 1, max(start + len(part[0]) for start, part in zip(starts, blocks, strict=True)))
        for row, start, part in zip(rows, starts, blocks, strict=True):
            self._tables[:, row, start : start + len(part[0])] = part

    def _grow(self, height: int, width: int) -> None:
        """Grow the tables to at least this size, doubling dimensions that are too small."""
        rows, columns = (
            0 if need <= have else max(need - have, have)
            for need, have in zip((height, width), self._tables.shape[1:], strict=True)
        )
        if rows or columns:
            tables = np.pad(self._tables, ((0, 0), (0, rows), (0, columns)))
            last_tokens = torch.nn.functional.pad(self.last_tokens, (0, rows))
            self._tables, self.last_tokens = tables, last_tokens  # both or none, whatever fails

    def slots(self, row: int, positions: Sequence[int]) -> list[Tensor]:
        """The slots of positions of a row's request, by group: see `RaggedBatch.slots`."""
        blocks, offsets = np.divmod(positions, self._size)
        return [torch.from_numpy(table[row, blocks] * self._size + offsets) for table in self._tables]

    def __call__(
        self,
        spans: list[Span],
        rows: NDArray[np.int64],
        row_starts: NDArray[np.int64],
        branches: Mapping[int, Branch] = NO_BRANCHES,
    ) -> Forwarded:
        """Compute the spans.

        Args:
            rows: the row in the tables of each span's request.
            row_starts: first row of each span, and the end of the last one.
            branches: trees of drafts, by request.
        """
        return forward(self._model, self.batches(spans, rows, row_starts, branches), self._kv, self._aux_layers)

    def batches(
        self,
        spans: list[Span],
        rows: NDArray[np.int64],
        row_starts: NDArray[np.int64],
        branches: Mapping[int, Branch] = NO_BRANCHES,
    ) -> list[RaggedBatch]:
        """The spans as one batch per group; see `__call__`."""
        size = self._size
        tokens = list(chain.from_iterable(span.tokens for span in spans))
        ends = [span.start + len(span.tokens) for span in spans]
        rows_of = rows if len(tokens) == len(spans) else rows.repeat(np.diff(row_starts))  # [tokens]
        if FROM_PREVIOUS in tokens:  # -1 after a failed step: the result is not used
            last = self.last_tokens.numpy()[rows_of].clip(min=0).tolist()
            tokens = [last[i] if token == FROM_PREVIOUS else token for i, token in enumerate(tokens)]
        positions = np.array([*chain.from_iterable(map(range, (span.start for span in spans), ends))])
        places, contexts, trees = positions, np.array(ends), None
        if branches:
            by_span = {index: branches[span.request] for index, span in enumerate(spans) if span.request in branches}
            places = positions.copy()
            trees = _trees(by_span, row_starts, positions, places, contexts)
        blocks, offsets = np.divmod(places, size)
        ids, absolute, lengths = torch.from_numpy(np.array(tokens)), torch.from_numpy(positions), -(-contexts // size)
        return [
            RaggedBatch(
                token_ids=ids,
                positions=absolute,
                slots=torch.from_numpy(table[rows_of, blocks] * size + offsets),
                row_starts=row_starts.tolist(),
                context_lens=contexts.tolist(),
                block_tables=torch.from_numpy(_heads(table, rows, lengths)),
                block_size=size,
                trees=trees,
            )
            for table in self._tables
        ]

    def rows_ahead(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> RowsAhead:
        """Prepare batches of one row per request for a draft model, whose KV is in the first group's blocks.

        Args:
            rows: the row in the tables of each request.
            positions: [batches, requests] ascending; those beyond a request's blocks must not be used.
        """
        size, table = self._size, self._tables[0]
        blocks, offsets = np.divmod(positions, size)
        blocks = blocks.clip(max=table.shape[1] - 1)
        slots = table[rows, blocks] * size + offsets
        tables = torch.from_numpy(_heads(table, rows, blocks[-1] + 1))  # may be longer than a request's context

        def batch(index: int, tokens: Tensor) -> RaggedBatch:
            count = len(tokens)
            here = positions[index, :count]
            return RaggedBatch(
                token_ids=tokens,
                positions=torch.from_numpy(here),
                slots=torch.from_numpy(slots[index, :count]),
                row_starts=list(range(count + 1)),
                context_lens=[position + 1 for position in here.tolist()],
                block_tables=tables[:count],
                block_size=size,
            )

        return batch


def _heads(table: NDArray[np.int64], rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first `lengths` entries of some rows, [rows, longest], with zeros after them."""
    width = lengths.max()
    heads: NDArray[np.int64] = table[:, :width][rows]
    if len(rows) > 1:
        heads *= np.arange(width) < lengths[:, None]
    return heads


def tree_end(branch: Branch) -> int:
    """The end of all positions that a tree's rows are stored at or attend to."""
    return branch.base + 1 + max(max(branch.slots), *map(max, branch.paths))


def tree_rows(
    branches: Mapping[int, Branch], row_starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each row's depth in its tree, or -1 [tokens], and its path, padded with 0 [tokens, width].

    Args:
        branches: trees, by index of the span.
    """
    width = max(len(path) for branch in branches.values() for path in branch.paths)
    depths, paths = np.full(row_starts[-1], -1), np.zeros((row_starts[-1], width), np.int64)
    for index, branch in branches.items():
        for row, path in enumerate(branch.paths, start=row_starts[index]):
            depths[row], paths[row, : len(path)] = len(path) - 1, path
    return depths, paths


def _trees(
    branches: Mapping[int, Branch],
    row_starts: NDArray[np.int64],
    positions: NDArray[np.int64],
    places: NDArray[np.int64],
    contexts: NDArray[np.int64],
) -> Trees:
    """The trees of a batch, by index of the span. Sets the positions, places and contexts of their rows and spans."""
    depths, paths = tree_rows(branches, row_starts)
    for index, branch in branches.items():
        rows = slice(row_starts[index], row_starts[index + 1])
        contexts[index] = tree_end(branch)
        places[rows] = branch.base + np.array(branch.slots)
        positions[rows] = branch.base + depths[rows]
    bases = contexts.copy()
    bases[list(branches)] = [branch.base for branch in branches.values()]
    return Trees(torch.from_numpy(bases), torch.from_numpy(paths))
