"""Groups of layers with the same KV layout and window, which share blocks and block tables (see `core.kv_group`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple


class LayerGroup(NamedTuple):
    """One KV group of a model.

    Attributes:
        window: number of positions that a token sees, including itself; None for all.
        layers: numbers of its layers, ascending.
        recurrent: whether its layers keep a state.
    """

    window: int | None
    layers: tuple[int, ...]
    recurrent: bool = False

    def within(self, layers: range) -> LayerGroup:
        """The group with only those of its layers that are in `layers`."""
        return self._replace(layers=tuple(layer for layer in self.layers if layer in layers))


class KVHeads(NamedTuple):
    """The KV of a position in a layer.

    Attributes:
        num_heads: number of KV heads.
        head_dim: width of each.
    """

    num_heads: int
    head_dim: int


def layer_groups(
    windows: Sequence[int | None],
    heads: Sequence[KVHeads] | None = None,
    without: Collection[int] = (),
    recurrent: Collection[int] = (),
) -> tuple[LayerGroup, ...]:
    """A group per window and KV shape, the one that keeps most first. Layers that keep a state are last.

    Args:
        windows: of each layer.
        heads: of each layer; None if all are the same.
        without: layers without their own KV, which read other layers'.
        recurrent: layers that keep a state.
    """
    all_kinds = zip(windows, heads or [KVHeads(0, 0)] * len(windows), strict=True)
    kinds = {index: kind for index, kind in enumerate(all_kinds) if index not in without and index not in recurrent}
    distinct = sorted(dict.fromkeys(kinds.values()), key=lambda kind: -math.inf if kind[0] is None else -kind[0])
    groups = [LayerGroup(kind[0], tuple(i for i, own in kinds.items() if own == kind)) for kind in distinct]
    return (*groups, LayerGroup(None, tuple(sorted(recurrent)), recurrent=True)) if recurrent else tuple(groups)
