"""What a model asks of any kind of recurrent layer, which stands in a layer in place of attention."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.layers.weights import LayerWeights
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch
from quire.ops.recurrent import RecurrentShape
from quire.parallel.group import Group


class RecurrentLayer(Protocol):
    """One layer. Of attention's `query_factors` there are none."""

    query_factors: None

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """x: [tokens, hidden]. Same shape and type. Of rotary `tables` nothing is needed.

        Raises:
            TypeError: the cache is that of another kind of layer.
        """
        ...


class RecurrentConfig(Protocol):
    """Sizes of a recurrent layer."""

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by name, with their shapes."""
        ...

    def state_shape(self, layers: int, block_size: int, dtype: torch.dtype, group: Group) -> RecurrentShape:
        """What a rank keeps of so many layers."""
        ...

    def layer(self, weights: LayerWeights, layer: int, eps: float) -> RecurrentLayer:
        """Such a layer.

        Args:
            weights: gives the layer's parts by name.
            layer: which layer of its cache this is.
            eps: of its norm, if it has one.
        """
        ...

    def cut_by(self, ranks: int) -> str:
        """What so many ranks would cut, in words; "": nothing, so they can share it."""
        ...

    @property
    def width(self) -> int:
        """Numbers of a token that ranks bring together at once."""
        ...

    @property
    def row(self) -> int:
        """Numbers that a step works with for each of its tokens: what its products yield."""
        ...
