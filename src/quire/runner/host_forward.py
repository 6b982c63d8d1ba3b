"""A step's forward pass where kernels read its shape on the host: the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import FROM_PREVIOUS, Span
from quire.models.model import Model
from quire.ops import KVCache, RaggedBatch


class HostForward:
    """Runs spans through the model; keeps the block tables of all requests.

    Attributes:
        last_tokens: [requests] int64, the last sampled token of each row of the tables.
    """

    def __init__(self, model: Model, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        self._tables = np.zeros((16, 64), np.int64)  # [requests, blocks]; grows, so that a step gathers them at once
        self.last_tokens = torch.zeros(len(self._tables), dtype=torch.int64)

    def set_blocks(self, rows: Sequence[int], starts: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Entries of some rows of the tables, each from its start on."""
        self._grow(max(rows) + 1, max(start + len(part) for start, part in zip(starts, blocks, strict=True)))
        for row, start, part in zip(rows, starts, blocks, strict=True):
            self._tables[row, start : start + len(part)] = part

    def _grow(self, height: int, width: int) -> None:
        """More room, at least twice as much in a direction that lacks it."""
        rows, columns = (
            0 if need <= have else max(need - have, have)
            for need, have in zip((height, width), self._tables.shape, strict=True)
        )
        if rows or columns:
            self._tables = np.pad(self._tables, ((0, rows), (0, columns)))
            self.last_tokens = torch.nn.functional.pad(self.last_tokens, (0, rows))

    def __call__(
        self, spans: list[Span], rows: NDArray[np.int64], row_starts: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [tokens, hidden] after the last norm, and whether each is finite [tokens].

        Args:
            rows: which row of the tables belongs to each span's request.
            row_starts: first row of each span, and one entry more.
        """
        hidden = self._model.forward(self.batch(spans, rows, row_starts), self._kv)
        return hidden, self._model.kernels.finite_rows(hidden)

    def batch(self, spans: list[Span], rows: NDArray[np.int64], row_starts: NDArray[np.int64]) -> RaggedBatch:
        """All spans one after the other; see `__call__`."""
        size = self._kv.block_size
        starts = np.array([span.start for span in spans])
        lengths = np.diff(row_starts)
        tokens = np.array(list(chain.from_iterable(span.tokens for span in spans)), np.int64)
        span_of_row = np.repeat(np.arange(len(spans)), lengths)  # [tokens]
        previous = (tokens == FROM_PREVIOUS).nonzero()[0]
        if len(previous):  # a step that failed left -1: nobody will see what this one makes of it
            tokens[previous] = self.last_tokens.numpy()[rows[span_of_row[previous]]].clip(min=0)
        positions = np.arange(len(tokens)) + (starts - row_starts[:-1])[span_of_row]
        blocks, offsets = np.divmod(positions, size)
        return RaggedBatch(
            token_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(self._tables[rows[span_of_row], blocks] * size + offsets),
            row_starts=row_starts.tolist(),
            context_lens=(starts + lengths).tolist(),
            block_tables=torch.from_numpy(self._heads(rows, -(-(starts + lengths) // size))),
            block_size=size,
        )

    def _heads(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first `lengths` entries of some rows, [rows, longest], with zeros behind them."""
        width = lengths.max()
        heads: NDArray[np.int64] = self._tables[:, :width][rows]
        heads *= np.arange(width) < lengths[:, None]
        return heads
