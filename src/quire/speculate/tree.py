"""Confidence-based trees of drafts: EAGLE-2 (https://arxiv.org/abs/2406.16858).

A node's value is the product of the confidences on its path from the root, an estimate of its acceptance probability.
The tree grows layer by layer from its most valuable nodes, and the most valuable nodes overall are verified. Nodes
that cannot have such a descendant are not expanded, which does not change the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.runner.drafts import Branch, Drafts


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Limits of a tree; the number of verified nodes is given per step.

    Attributes:
        width: nodes expanded in each layer, and candidates per node.
        depth: maximum drafts on a path.
    """

    width: int
    depth: int

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("depth", self.depth)):
            if value < 1:
                raise ValueError(f"the tree's {name} is {value}; it must be at least 1")


@dataclass(slots=True)
class _Node:
    """A draft; `path` holds the slots from the root's to its own, once it is expanded."""

    token: int
    parent: int
    value: float
    layer: int
    path: tuple[int, ...] = ()


class GrowingTree:
    """The tree of one request. Node 0 is its root, the last known token, expanded from the start.

    Args:
        count: maximum verified nodes, without the root. Slots are at most this.
        shape: its limits.
    """

    def __init__(self, count: int, shape: TreeShape) -> None:
        self._count, self._shape = count, shape
        self._nodes = [_Node(-1, 0, 0.0, 0, (0,))]
        self._last_layer: list[int] = []  # its node numbers

    def add(self, parent: int, tokens: Sequence[int], log_confidences: Sequence[float]) -> None:
        """Add candidates after an expanded node. Invalid ones (-1, or no confidence at all) are skipped."""
        above = self._nodes[parent]
        for token, confidence in zip(tokens, log_confidences, strict=True):
            value = above.value + min(confidence, 0.0)
            if token >= 0 and value > -math.inf:  # excludes NaN, too
                self._last_layer.append(len(self._nodes))
                self._nodes.append(_Node(token, parent, value, above.layer + 1))

    def grow(self) -> list[int]:
        """Numbers of the nodes to expand next, the most valuable first; empty if the tree is complete.

        They get consecutive slots, as the rows of a span must; slots of nodes that will not be expanded further are
        reused. If no run of slots is long enough, fewer nodes are expanded.
        """
        last_layer, self._last_layer = set(self._last_layer), []
        # A node's children come after it, so the last of the best cannot have one among them.
        chosen = [node for node in self._best(self._count - 1) if node in last_layer][: self._shape.width]
        if not chosen or self._nodes[chosen[0]].layer >= self._shape.depth:
            return []
        paths = [self._nodes[self._nodes[number].parent].path for number in chosen]
        slots = self._free_slots({slot for path in paths for slot in path}, len(chosen))
        for number, path, slot in zip(chosen, paths, slots, strict=False):
            self._nodes[number].path = (*path, slot)
        return chosen[: len(slots)]

    def _free_slots(self, taken: set[int], count: int) -> range:
        """The first run of `count` free slots, or the longest one."""
        ends = [*sorted(taken), self._count + 1]
        runs = [range(before + 1, after) for before, after in itertools.pairwise(ends)]  # the root's slot is taken
        return next((run[:count] for run in runs if len(run) >= count), max(runs, key=len))

    def parent(self, node: int) -> int:
        """Number of the parent node."""
        return self._nodes[node].parent

    def tokens(self, node: int) -> list[int]:
        """Tokens on the path from below the root to the node."""
        tokens: list[int] = []
        while node:
            tokens.append(self._nodes[node].token)
            node = self._nodes[node].parent
        return tokens[::-1]

    def branch(self, request: int, base: int, chosen: Sequence[int]) -> Branch:
        """The rows of nodes chosen by `grow`; the root is at position `base`."""
        nodes = [self._nodes[number] for number in chosen]
        paths = [node.path for node in nodes]
        return Branch(request, base, [node.token for node in nodes], [path[-1] for path in paths], paths)

    def drafts(self) -> Drafts:
        """The most valuable nodes, ordered by layer."""
        chosen = sorted(self._best(self._count))
        rows = {0: 0} | {number: row for row, number in enumerate(chosen, 1)}
        parents = [rows[self._nodes[number].parent] for number in chosen]
        tokens = [self._nodes[number].token for number in chosen]
        return Drafts(tokens, None if parents == list(range(len(parents))) else parents)

    def _best(self, count: int) -> list[int]:
        """The most valuable nodes without the root; of equal ones the earlier, so parents before children."""
        order = sorted(range(1, len(self._nodes)), key=lambda number: (-self._nodes[number].value, number))
        return order[:count]
