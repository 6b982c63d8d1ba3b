"""Which layers keep the same of a request: they share blocks and block tables (see `core.kv_group`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple


class LayerGroup(NamedTuple):
    """One KV group of a model.

    Attributes:
        window: how many tokens back its layers see, itself included; None: all of them.
        layers: their numbers, ascending.
        recurrent: they keep a state.
    """

    window: int | None
    layers: tuple[int, ...]
    recurrent: bool = False

    def within(self, layers: range) -> LayerGroup:
        """Those of its layers that are among these."""
        return self._replace(layers=tuple(layer for layer in self.layers if layer in layers))


class KVHeads(NamedTuple):
    """What a layer keeps of a position.

    Attributes:
        num_heads: of keys and values.
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
    """A group for each window, and each shape of a position, that layers have; the one that keeps most first. Layers
    that keep a state are the last.

    Args:
        windows: of each layer.
        heads: of each layer; None: all have the same.
        without: layers that keep nothing, since they read what others keep.
        recurrent: layers that keep a state.
    """
    all_kinds = zip(windows, heads or [KVHeads(0, 0)] * len(windows), strict=True)
    kinds = {index: kind for index, kind in enumerate(all_kinds) if index not in without and index not in recurrent}
    distinct = sorted(dict.fromkeys(kinds.values()), key=lambda kind: -math.inf if kind[0] is None else -kind[0])
    groups = [LayerGroup(kind[0], tuple(i for i, own in kinds.items() if own == kind)) for kind in distinct]
    return (*groups, LayerGroup(None, tuple(sorted(recurrent)), recurrent=True)) if recurrent else tuple(groups)
