"""What lies where in a block outside the pool: the same bytes, whatever the number of ranks.

A block has the keys and values of all layers and heads: planes [layers, kv_heads, sides], and after them those of a
model that drafts. That is how one rank has it in its pool, and one rank copies it as a whole. Of several, each has a
box of it, some of the layers and some of the heads, and copies that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from quire.models.model import Model, layers_of
from quire.ops import KVCache, KVShape
from quire.ops.kv_cache import LAYOUT
from quire.ops.recurrent import RecurrentCache
from quire.ops.states import TILE


class Split(NamedTuple):
    """How ranks share blocks: stages have some of the layers each, and ranks of a stage some of the heads."""

    stages: int = 1
    parts: int = 1


WHOLE = Split()


@dataclass(frozen=True)
class Layout:
    """A block.

    Attributes:
        shape: of all layers and heads.
        drafts: what another model keeps of the same tokens, after the planes; each rank has all of it.
    """

    block_size: int
    shape: KVShape
    drafts: KVShape | None = None

    @classmethod
    def of(cls, cache: KVCache, model: Model, group: int = 0) -> Layout:
        """Of the blocks of which a rank has its part in a cache, that of a KV group."""
        layers = model.config.groups[group].layers
        heads = model.config.layer_at(layers[0]).num_kv_heads
        shape = replace(cache.shape, layers=len(layers), kv_heads=heads)
        return cls(cache.block_size, shape, cache.draft_kv.shape if cache.draft_kv else None)

    @property
    def id(self) -> str:
        """In words: blocks of two engines whose bytes are to be exchanged have the same."""
        drafts = "" if self.drafts is None else f"|{self.drafts}"
        return f"{LAYOUT}|{self.block_size}|{self.shape}{drafts}"

    @property
    def draft_bytes(self) -> int:
        """At the end of a block."""
        return self.block_size * self.drafts.bytes_per_token if self.drafts else 0

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.shape.bytes_per_token + self.draft_bytes

    @property
    def head_bytes(self) -> int:
        """Of one head in a layer, keys and values."""
        return self.block_size * self.shape.sides * self.shape.row_bytes

    def has(self, split: Split) -> bool:
        """Whether blocks can be shared so."""
        return 0 < split.stages <= self.shape.layers and split.parts > 0 and not self.shape.kv_heads % split.parts

    def num_pieces(self, split: Split) -> int:
        """How many `pieces` there are."""
        return 1 if split == WHOLE else split.stages * split.parts + bool(self.drafts)

    def pieces(self, blocks: Tensor, split: Split) -> list[Tensor]:
        """Of blocks [count, block_bytes], views [count, ...] of all that different ranks have: for each stage, the
        parts of its heads; and last, what drafts."""
        if split == WHOLE:
            return [blocks]
        shape, each = self.shape, self.shape.kv_heads // split.parts
        planes = blocks[:, : shape.layers * shape.kv_heads * self.head_bytes]
        planes = planes.view(len(blocks), shape.layers, shape.kv_heads, self.head_bytes)
        found = []
        for stage in range(split.stages):
            layers = layers_of(stage, split.stages, shape.layers)
            of_stage = planes[:, layers.start : layers.stop]
            found += [of_stage[:, :, part * each : (part + 1) * each] for part in range(split.parts)]
        return [*found, blocks[:, -self.draft_bytes :]] if self.draft_bytes else found


def layout_id(cache: KVCache, model: Model, group: int) -> str:
    """What lies where in a block of any KV group, in words."""
    if isinstance(cache, RecurrentCache):
        return (
            f"{LAYOUT}|{cache.block_size}|{model.config.recurrent} of {len(model.config.groups[group].layers)}|{TILE}"
        )
    return Layout.of(cache, model, group).id


@dataclass(frozen=True)
class Share:
    """What a rank has of each block.

    Attributes:
        number: of its piece, see `Layout.pieces`.
        saves: it is the first of those that have the same, and saves it for all of them.
    """

    layout: Layout
    split: Split = WHOLE
    number: int = 0
    saves: bool = True

    @classmethod
    def of(cls, cache: KVCache, model: Model, group: int = 0) -> Share:
        """Of a rank that has its part in a cache, that of a KV group."""
        layout, width = Layout.of(cache, model, group), model.stage.size
        split = Split(model.stages, min(width, layout.shape.kv_heads))
        alike = width // split.parts  # ranks next to each other that have the same heads
        stage, place = divmod(model.ranks.rank % (width * model.stages), width)
        return cls(layout, split, stage * split.parts + place // alike, place % alike == 0)

    def pieces(self, pool: Tensor, slots: Tensor) -> list[tuple[int, bool, Tensor, Tensor]]:
        """What moves between the rank's pool [blocks, bytes] and slots [count, block_bytes]: a piece's number, whether
        this rank saves it, and views of both, [blocks, ...] and [count, ...]."""
        theirs = self.layout.pieces(slots, self.split)
        if self.split == WHOLE:
            return [(0, self.saves, pool, slots)]
        own = theirs[self.number]
        planes = pool[:, : own[0].numel()].view(len(pool), *own.shape[1:])
        found = [(self.number, self.saves, planes, own)]
        if drafts := self.layout.draft_bytes:
            first = self.saves and self.number == 0
            found.append((len(theirs) - 1, first, pool[:, -drafts:], theirs[-1]))
        return found
