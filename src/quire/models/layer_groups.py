"""Which layers keep the same positions of a request: they share blocks and block tables (see `core.kv_group`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class LayerGroup(NamedTuple):
    """One KV group of a model.

    Attributes:
        window: how many tokens back its layers see, itself included; None: all of them.
        layers: their numbers, ascending.
    """

    window: int | None
    layers: tuple[int, ...]

    def within(self, layers: range) -> LayerGroup:
        """Those of its layers that are among these."""
        return self._replace(layers=tuple(layer for layer in self.layers if layer in layers))


def layer_groups(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """A group for each window of the layers `windows`, the one that keeps most first."""
    distinct = sorted(set(windows), key=lambda window: -math.inf if window is None else -window)
    return tuple(LayerGroup(window, tuple(i for i, own in enumerate(windows) if own == window)) for window in distinct)
