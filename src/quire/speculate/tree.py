"""Growing a tree of drafts where the model is most confident: EAGLE-2 (https://arxiv.org/abs/2406.16858).

A node's value is the product of the confidences on its way from the root: about the chance that it is accepted. The
tree grows layer by layer from its most valuable nodes, and the most valuable ones of all are verified. Only nodes that
can still bring one of those are expanded: that changes no result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.runner.proposer import Branch, Drafts


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How far a tree grows; how many of its nodes are verified, each step says.

    Attributes:
        width: nodes that are expanded in each layer, and candidates that each of them gives.
        depth: most drafts that follow one another.
    """

    width: int
    depth: int

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("depth", self.depth)):
            if value < 1:
                raise ValueError(f"the tree's {name} is {value}; it must be at least 1")


@dataclass(slots=True)
class _Node:
    """One draft; `path` are the slots from the root's to its own, once it is expanded."""

    token: int
    parent: int
    value: float
    layer: int
    path: tuple[int, ...] = ()


class GrowingTree:
    """The tree of one request. Node 0 is its root, the last known token; it is expanded when the tree is made.

    Args:
        count: most nodes that are verified, the root not among them. Slots run from 0 to at most this.
        shape: how far it grows.
    """

    def __init__(self, count: int, shape: TreeShape) -> None:
        self._count, self._shape = count, shape
        self._nodes = [_Node(-1, 0, 0.0, 0, (0,))]
        self._last_layer: list[int] = []  # numbers of its nodes

    def add(self, parent: int, tokens: Sequence[int], log_confidences: Sequence[float]) -> None:
        """Candidates after an expanded node. One that cannot be (-1, or no confidence at all) is left out."""
        above = self._nodes[parent]
        for token, confidence in zip(tokens, log_confidences, strict=True):
            value = above.value + min(confidence, 0.0)
            if token >= 0 and value > -math.inf:  # not a NaN either
                self._last_layer.append(len(self._nodes))
                self._nodes.append(_Node(token, parent, value, above.layer + 1))

    def grow(self) -> list[int]:
        """Numbers of the nodes to expand next, the most valuable first; none when the tree has grown.

        They get slots one after the other, as the rows of a span must; those of nodes that nothing grows from any
        more are used again. Where no so long run of them is free, fewer nodes are expanded.
        """
        last_layer, self._last_layer = set(self._last_layer), []
        # A node's children come after it, so the last of the best cannot bring one.
        chosen = [node for node in self._best(self._count - 1) if node in last_layer][: self._shape.width]
        if not chosen or self._nodes[chosen[0]].layer >= self._shape.depth:
            return []
        paths = [self._nodes[self._nodes[number].parent].path for number in chosen]
        slots = self._free_slots({slot for path in paths for slot in path}, len(chosen))
        for number, path, slot in zip(chosen, paths, slots, strict=False):
            self._nodes[number].path = (*path, slot)
        return chosen[: len(slots)]

    def _free_slots(self, taken: set[int], count: int) -> range:
        """The first run of so many slots that are not taken, or the longest that there is."""
        ends = [*sorted(taken), self._count + 1]
        runs = [range(before + 1, after) for before, after in itertools.pairwise(ends)]  # the root's slot is taken
        return next((run[:count] for run in runs if len(run) >= count), max(runs, key=len))

    def parent(self, node: int) -> int:
        """Number of the node that it continues."""
        return self._nodes[node].parent

    def tokens(self, node: int) -> list[int]:
        """From below the root to the node, its own the last."""
        tokens: list[int] = []
        while node:
            tokens.append(self._nodes[node].token)
            node = self._nodes[node].parent
        return tokens[::-1]

    def branch(self, request: int, base: int, chosen: Sequence[int]) -> Branch:
        """The rows of nodes that `grow` has chosen, the root's being at position `base`."""
        nodes = [self._nodes[number] for number in chosen]
        paths = [node.path for node in nodes]
        return Branch(request, base, [node.token for node in nodes], [path[-1] for path in paths], paths)

    def drafts(self) -> Drafts:
        """The most valuable nodes, layer by layer."""
        chosen = sorted(self._best(self._count))
        rows = {0: 0} | {number: row for row, number in enumerate(chosen, 1)}
        parents = [rows[self._nodes[number].parent] for number in chosen]
        tokens = [self._nodes[number].token for number in chosen]
        return Drafts(tokens, None if parents == list(range(len(parents))) else parents)

    def _best(self, count: int) -> list[int]:
        """The most valuable nodes but the root; of equal ones those that came first, so parents before children."""
        order = sorted(range(1, len(self._nodes)), key=lambda number: (-self._nodes[number].value, number))
        return order[:count]
