"""The interface of recurrent layers, which replace attention."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.layers.weights import LayerWeights
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch
from quire.ops.recurrent import RecurrentShape
from quire.parallel.group import Group


class RecurrentLayer(Protocol):
    """One layer. There are no `query_factors` as in attention."""

    query_factors: None

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """x: [tokens, hidden]. Same shape and type. Rotary `tables` are not used.

        Raises:
            TypeError: the cache is for another kind of layer.
        """
        ...


class RecurrentConfig(Protocol):
    """Sizes of a recurrent layer."""

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by name, with their shapes."""
        ...

    def state_shape(self, layers: int, block_size: int, dtype: torch.dtype, group: Group) -> RecurrentShape:
        """Shape of a rank's states of this many layers."""
        ...

    def layer(self, weights: LayerWeights, layer: int, eps: float) -> RecurrentLayer:
        """Create a layer.

        Args:
            weights: gives the layer's parts by name.
            layer: which layer of its cache this is.
            eps: of its norm, if it has one.
        """
        ...

    def cut_by(self, ranks: int) -> str:
        """What cannot be divided among this many ranks, in words; "" if they can share the layer."""
        ...

    @property
    def width(self) -> int:
        """Numbers per token that ranks gather at once."""
        ...

    @property
    def row(self) -> int:
        """Numbers per token in a step's working memory: outputs of the projections."""
        ...
