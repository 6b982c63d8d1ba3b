"""The layout of a block outside the pool: the same bytes, whatever the number of ranks.

A block has the keys and values of all layers and heads, as planes [layers, kv_heads, sides], followed by those of a
draft model. A single rank has blocks in this layout in its pool, and copies them whole. With several ranks, each has a
box of the block, some of the layers and some of the heads, and copies that. A block of recurrent layers has the parts
of each layer one after another, and each rank has its heads of each part.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.models.model import Model, layers_of
from quire.ops import KVCache, KVShape
from quire.ops.kv_cache import LAYOUT
from quire.ops.recurrent import Part, RecurrentCache, RecurrentShape
from quire.ops.states import TILE
from quire.parallel.group import OneRank, share_of


class Split(NamedTuple):
    """How ranks share blocks: a pipeline stage has some of the layers, and a rank of a stage some of the heads."""

    stages: int = 1
    parts: int = 1


WHOLE = Split()

Piece = list[Tensor]
"""What one rank has of blocks: views [count, ...]."""


class Layers(NamedTuple):
    """The layers of a group.

    Attributes:
        numbers: the layers' numbers, ascending. total: number of layers in the model.
    """

    numbers: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, model: Model, group: int) -> Layers:
        """The layers of a KV group, on all ranks."""
        return cls(model.config.groups[group].layers, model.config.num_layers)

    def at(self, stage: int, stages: int) -> slice:
        """The part of them that one pipeline stage has."""
        own = layers_of(stage, stages, self.total)
        return slice(bisect_left(self.numbers, own.start), bisect_left(self.numbers, own.stop))


class Layout(Protocol):
    """The layout of a KV group's blocks."""

    @property
    def block_bytes(self) -> int:
        """Its size."""

    def has(self, split: Split) -> bool:
        """Whether blocks can be shared this way."""

    def num_pieces(self, split: Split) -> int:
        """The number of `pieces`."""

    def pieces(self, blocks: Tensor, split: Split) -> list[Piece]:
        """Views of blocks [count, block_bytes], one for each part that a different rank has, stage by stage."""


@dataclass(frozen=True)
class KVLayout:
    """The layout of a block of keys and values.

    Attributes:
        shape: of all layers and heads.
        drafts: what a draft model keeps for the same tokens, after the planes; each rank has all of it.
        layers: the group's layers; default: all layers of the model.
    """

    block_size: int
    shape: KVShape
    drafts: KVShape | None = None
    layers: Layers = field(default=Layers((), 0))

    @classmethod
    def of(cls, cache: KVCache, model: Model, group: int = 0) -> KVLayout:
        """The layout of whole blocks of a KV group, given one rank's cache."""
        layers = Layers.of(model, group)
        heads = model.config.layer_at(layers.numbers[0]).num_kv_heads
        shape = replace(cache.shape, layers=len(layers.numbers), kv_heads=heads)
        return cls(cache.block_size, shape, cache.draft_kv.shape if cache.draft_kv else None, layers)

    @property
    def id(self) -> str:
        """A description; engines can exchange blocks only if it is the same."""
        drafts = "" if self.drafts is None else f"|{self.drafts}"
        return f"{LAYOUT}|{self.block_size}|{self.shape}{drafts}"

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model's part at the end of a block."""
        return self.block_size * self.drafts.bytes_per_token if self.drafts else 0

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.shape.bytes_per_token + self.draft_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one layer, keys and values."""
        return self.block_size * self.shape.sides * self.shape.row_bytes

    def has(self, split: Split) -> bool:
        """See `Layout`."""
        return 0 < split.stages <= self._layers.total and 0 < split.parts <= self.shape.kv_heads

    def num_pieces(self, split: Split) -> int:
        """See `Layout`."""
        return 1 if split == WHOLE else split.stages * split.parts + bool(self.drafts)

    def pieces(self, blocks: Tensor, split: Split) -> list[Piece]:
        """See `Layout`: a part is some of the heads. The draft model's part is a piece of its own, the last one."""
        if split == WHOLE:
            return [[blocks]]
        shape, heads = self.shape, self.shape.kv_heads
        shares = [share_of(heads, part, split.parts, heads) for part in range(split.parts)]
        planes = blocks[:, : shape.layers * shape.kv_heads * self.head_bytes]
        planes = planes.view(len(blocks), shape.layers, shape.kv_heads, self.head_bytes)
        found = []
        for stage in range(split.stages):
            of_stage = planes[:, self._layers.at(stage, split.stages)]
            found += [[of_stage[:, :, own.start : own.stop]] for own in shares]
        return [*found, [blocks[:, -self.draft_bytes :]]] if self.draft_bytes else found

    @property
    def _layers(self) -> Layers:
        return self.layers if self.layers.total else Layers(tuple(range(self.shape.layers)), self.shape.layers)


@dataclass(frozen=True)
class RecurrentLayout:
    """The layout of a block of recurrent layers.

    Attributes:
        shape: of all layers and heads. layers: the group's layers.
    """

    shape: RecurrentShape
    layers: Layers

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    def has(self, split: Split) -> bool:
        """See `Layout`."""
        return 0 < split.stages <= self.layers.total and split.parts > 0

    def num_pieces(self, split: Split) -> int:
        """See `Layout`."""
        return split.stages * split.parts

    def pieces(self, blocks: Tensor, split: Split) -> list[Piece]:
        """See `Layout`: a rank has its share of each section of each part."""
        if split == WHOLE:
            return [[blocks]]
        parts, found = self.shape.bytes_of_parts(blocks), []
        for stage in range(split.stages):
            of_stage = [each[:, self.layers.at(stage, split.stages)] for each in parts]
            found += [self._of_rank(of_stage, rank, split.parts) for rank in range(split.parts)]
        return found

    def _of_rank(self, parts: list[Tensor], rank: int, ranks: int) -> Piece:
        piece = []
        for part, whole in zip(self.shape.parts, parts, strict=True):
            first, size = 0, _column_bytes(part)
            for columns, heads in part.sections or ((part.shape[part.shared],) * 2,):
                own = share_of(columns, rank, ranks, heads)
                piece.append(whole.narrow(2 + part.shared, (first + own.start) * size, len(own) * size))
                first += columns
        return piece

    def own(self, pool: Tensor, shape: RecurrentShape, layers: int) -> Piece:
        """Views of a rank's own pool, in the shape of its piece of whole blocks."""
        piece: Piece = []
        for part, own in zip(shape.parts, shape.bytes_of_parts(pool), strict=True):
            size = _column_bytes(part)
            lengths = [columns * size for columns, _ in part.sections or ((part.shape[part.shared], None),)]
            piece += torch.split(own[:, :layers], lengths, 2 + part.shared)
        return piece


def _column_bytes(part: Part) -> int:
    """The stride along the dimension that ranks share, in the terms of `RecurrentShape.bytes_of_parts`."""
    return part.dtype.itemsize if part.shared == len(part.shape) - 1 else 1


def layout_id(cache: KVCache, model: Model, group: int) -> str:
    """A description of the layout of a KV group's blocks."""
    if isinstance(cache, RecurrentCache):
        return (
            f"{LAYOUT}|{cache.block_size}|{model.config.recurrent} of {len(model.config.groups[group].layers)}|{TILE}"
        )
    return KVLayout.of(cache, model, group).id


@dataclass(frozen=True)
class Share:
    """A rank's part of each block.

    Attributes:
        number: its piece's index in `Layout.pieces`.
        saves: whether it is the first of the ranks that have this piece, and saves it for all of them.
        holds: what its blocks hold, if the layers are recurrent.
    """

    layout: KVLayout | RecurrentLayout
    split: Split = WHOLE
    number: int = 0
    saves: bool = True
    holds: RecurrentShape | None = None

    @classmethod
    def of(cls, cache: KVCache, model: Model, group: int = 0) -> Share:
        """The share of a rank, given its cache of a KV group."""
        width = model.stage.size
        stage, place = divmod(model.ranks.rank % (width * model.stages), width)
        if isinstance(cache, RecurrentCache) and model.config.recurrent is not None:
            layers = Layers.of(model, group)
            size = len(layers.numbers), cache.block_size, model.dtype, OneRank()
            whole = RecurrentLayout(model.config.recurrent.state_shape(*size), layers)
            return cls(whole, Split(model.stages, width), stage * width + place, holds=cache.holds)
        layout = KVLayout.of(cache, model, group)
        split = Split(model.stages, min(width, layout.shape.kv_heads))
        alike = width // split.parts  # adjacent ranks that have the same heads
        return cls(layout, split, stage * split.parts + place // alike, place % alike == 0)

    def pieces(self, pool: Tensor, slots: Tensor) -> list[tuple[int, bool, Piece, Piece]]:
        """What is copied between the rank's pool [blocks, bytes] and slots [count, block_bytes]: a piece's number,
        whether this rank saves it, and views of both, [blocks, ...] and [count, ...]."""
        theirs = self.layout.pieces(slots, self.split)
        if self.split == WHOLE:
            return [(0, self.saves, [pool], theirs[0])]
        own = theirs[self.number]
        if isinstance(self.layout, RecurrentLayout):
            shape, layers = self.holds or self.layout.shape, own[0].shape[1]
            return [(self.number, self.saves, self.layout.own(pool, shape, layers), own)]
        planes = pool[:, : own[0][0].numel()].view(len(pool), *own[0].shape[1:])
        found = [(self.number, self.saves, [planes], own)]
        if drafts := self.layout.draft_bytes:
            first = self.saves and self.number == 0
            found.append((len(theirs) - 1, first, [pool[:, -drafts:]], theirs[-1]))
        return found
