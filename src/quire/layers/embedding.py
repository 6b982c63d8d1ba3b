"""Token embedding."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.ops import Kernels


class Table(Protocol):
    """A matrix that is not in memory as numbers, such as a quantized one in a mapped file.

    Attributes:
        shape: rows and columns.
    """

    shape: torch.Size

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [n]. Returns fp32 [n, columns]. Raises IndexError for an id outside the table."""
        ...


class Embedding:
    """Looks up rows of a weight [vocabulary, hidden].

    The weight is kept as given and may be a view into a memory-mapped checkpoint: a lookup touches only the
    pages of its rows. So if the head is tied to the embedding, only the head's packed copy is in memory.

    Args:
        weight: see above; or a table, whose rows become numbers when they are looked up.
        dtype: of the results.
        kernels: implementation of the lookup.
        scale: factor of the rows.
    """

    def __init__(self, weight: torch.Tensor | Table, dtype: torch.dtype, kernels: Kernels, scale: float = 1.0) -> None:
        self.weight = weight
        self.dtype = dtype
        self._kernels, self._scale = kernels, scale
        self.vocab_size, self.hidden_size = weight.shape

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [tokens] int64, each in [0, vocabulary). Returns [tokens, hidden] in `dtype`."""
        if isinstance(self.weight, torch.Tensor):
            rows = self._kernels.embed(ids, self.weight, self.dtype)
        else:
            rows = self.weight.rows(ids).to(self.dtype)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)
