"""Presents a checkpoint with other names, fused tensors or other orders as one in the layout that the model expects.

Families name the same parts differently, fuse some of them into one tensor, have other towers besides the text model,
and rotate other pairs of a head's dimensions. All of that is undone here when tensors are read, so that nothing else
knows of it. The model's names are those of Llama's checkpoints.

A head's dimensions may be permuted if queries and keys have the same order, since that does not change their products.
So the pairs that a family rotates are moved to where the kernels rotate them: dimension i and i + head_dim / 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quire.errors import TensorShapeError, UnexpectedTensorError
from quire.layers.embedding import Table
from quire.models.checkpoint import Checkpoint, of_rows
from quire.models.safetensors_file import FLOAT_DTYPES
from quire.models.safetensors_header import TensorEntry
from quire.ops import StoredWeight

EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Names of a layer's experts in one tensor, "PREFIX.experts.gate_up_proj" [experts, outputs, inputs], and in separate
ones, "PREFIX.experts.0.gate_proj.weight"."""
JOINED_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_bias)?")
HEADS = re.compile(r".*\.self_attn\.(q|k)_(proj|norm)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Layout:
    """The differences from the layout that the model expects.

    Attributes:
        renamed: (pattern, replacement) of names, applied one after the other. Names that are right already must not
            change.
        skipped: prefixes of tensors that do not belong to the text model; they are reported at start.
        joined: by suffix of a fused tensor's name, such as "qkv_proj", its parts and their rows, in order.
        by_heads: the same if the parts are interleaved by head: (suffix, number of heads, parts and their rows per
            head).
        experts_by_turns: in a tensor of all experts, the rows of gate and up alternate.
        experts_transposed: in a tensor of all experts, weights are [experts, inputs, outputs].
        order: of a head's dimensions: the i-th is the checkpoint's order[i]; None if it is unchanged.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    joined: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    by_heads: tuple[tuple[str, int, tuple[tuple[str, int], ...]], ...] = ()
    experts_by_turns: bool = False
    experts_transposed: bool = False
    order: tuple[int, ...] | None = None

    def name(self, stored: str) -> str:
        """The model's name of a tensor."""
        for pattern, replacement in self.renamed:
            stored = re.sub(pattern, replacement, stored)
        return stored


TABLE = "embed_tokens.weight"
WITHOUT_HEAD = Layout(renamed=((r"^(?=(embed_tokens|layers|norm)\.)", "model."),))
"""A model that was saved without its head, such as Qwen3-Embedding, whose table is called `TABLE`."""


def partly_turned(head_dim: int, turning: int, interleaved: bool = False) -> tuple[int, ...] | None:
    """The order of a head's dimensions if only the first `turning` are rotated; None if it is the kernels' already.

    Args:
        interleaved: dimensions 2i and 2i + 1 are a pair, not i and i + turning / 2.
    """
    if turning == head_dim and not interleaved:
        return None
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + turning // 2) for i in range(turning // 2)]
    pairs += [(i, i + (head_dim - turning) // 2) for i in range(turning, (head_dim + turning) // 2)]
    return tuple(first for first, _ in pairs) + tuple(second for _, second in pairs)


class LaidOutCheckpoint(Checkpoint):
    """A checkpoint with the names and tensors that the model expects.

    Attributes:
        passed_over: the entries of tensors that do not belong to the text model.

    Raises:
        UnexpectedTensorError: two tensors would have the same name.
        TensorShapeError: a fused tensor does not have the rows of all its parts.
    """

    def __init__(self, base: Checkpoint, layout: Layout) -> None:
        self._base, self._layout = base, layout
        self.folder, self.config, self.generation = base.folder, base.config, base.generation
        self.entries: dict[str, TensorEntry] = {}
        self.passed_over: list[TensorEntry] = []
        self._transposed: set[str] = set()
        self._heads: dict[str, int] = {}  # by stored tensor whose parts are interleaved by head
        self._parts: dict[str, tuple[str, tuple[int | slice, ...]]] = {}  # by name: stored tensor, index in it
        for stored, entry in base.entries.items():
            if stored.startswith(layout.skipped):
                self.passed_over.append(entry)
            else:
                self._add(stored, entry)

    def tensor(self, name: str, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
        """A tensor: see `Checkpoint`. A copy if heads' dimensions are permuted."""
        stored, where = self._parts[name]
        tensor = self._base.tensor(stored, dtypes)
        if (heads := self._heads.get(stored)) is not None:
            tensor = tensor.view(heads, -1, *tensor.shape[1:])[where].flatten(0, 1)
        else:
            tensor = (tensor.mT if stored in self._transposed else tensor)[where].contiguous()
        order = self._layout.order
        if order is None or not HEADS.fullmatch(name):
            return tensor
        return tensor.view(-1, len(order), *tensor.shape[1:])[:, list(order)].reshape(tensor.shape)

    def coded(self, name: str, rows: range | None = None) -> StoredWeight | None:
        """See `Checkpoint`; with the model's name, its outputs of a fused tensor, and permuted heads.

        None for one of several experts in a tensor.
        """
        stored, where = self._parts[name]
        if stored in self._transposed or any(isinstance(index, int) for index in where):
            return None
        return of_rows(self._outputs_of(name, self._base.coded(stored), stored, where), rows)

    def _outputs_of(
        self, name: str, weight: StoredWeight | None, stored: str, where: tuple[int | slice, ...]
    ) -> StoredWeight | None:
        """The outputs of a stored weight that a name means, in its order."""
        order = self._layout.order
        if weight is None or (not where and (order is None or not HEADS.fullmatch(name))):
            return weight
        rows = torch.arange(weight.out_features)
        if (heads := self._heads.get(stored)) is not None:
            rows = rows.view(heads, -1)[where].flatten()
        elif where:
            rows = rows[where]
        if order is None or not HEADS.fullmatch(name):
            return weight.outputs(rows if heads else range(int(rows[0]), int(rows[-1]) + 1))
        return weight.outputs(rows.view(-1, len(order))[:, list(order)].flatten())

    def table(self, name: str) -> Table | None:
        """See `Checkpoint`."""
        stored, where = self._parts[name]
        return None if where else self._base.table(stored)

    def _add(self, stored: str, entry: TensorEntry) -> None:
        name = self._layout.name(stored)
        for end, parts in self._layout.joined:
            if (found := re.fullmatch(rf"(.*){re.escape(end)}\.(weight|bias)", name)) is not None:
                names = [(f"{found[1]}{part}.{found[2]}", rows) for part, rows in parts]
                self._add_parts(names, stored, entry, ())
                return
        for end, heads, parts in self._layout.by_heads:
            if name.replace(end, parts[-1][0]) in self._base.entries:
                continue  # they are separate already
            if (found := re.fullmatch(rf"(.*){re.escape(end)}\.(weight|bias)", name)) is not None:
                self._add_by_heads(found[1], found[2], heads, parts, stored, entry)
                return
        found = JOINED_EXPERTS.fullmatch(name)
        if found is not None and len(entry.shape) == (2 if found[3] else 3):
            self._add_experts(found[1], EXPERTS[found[2]], "bias" if found[3] else "weight", stored, entry)
            return
        self._add_part(name, stored, entry, ())

    def _add_experts(self, prefix: str, called: Sequence[str], kind: str, stored: str, entry: TensorEntry) -> None:
        """Add all experts of a layer, which are in one tensor."""
        if self._layout.experts_transposed and kind == "weight":
            self._transposed.add(stored)
            entry = replace(entry, shape=(entry.shape[0], *entry.shape[:0:-1]))
        rows, rest = divmod(entry.shape[1], len(called))
        for expert in range(entry.shape[0]):
            if self._layout.experts_by_turns and not rest:
                for place, part in enumerate(called):
                    turns = (expert, slice(place, None, len(called)))
                    self._add_part(f"{prefix}{expert}.{part}.{kind}", stored, entry, turns)
                continue
            names = [(f"{prefix}{expert}.{part}.{kind}", rows + rest) for part in called]
            self._add_parts(names, stored, entry, (expert,))

    def _add_parts(
        self, names: Sequence[tuple[str, int]], stored: str, entry: TensorEntry, where: tuple[int, ...]
    ) -> None:
        """Add the parts of a tensor, each with this many consecutive rows."""
        rows = sum(count for _, count in names)
        shape = entry.shape[len(where) :]
        if not shape or shape[0] != rows:
            raise TensorShapeError(
                f"{entry.file}: {stored!r} is {list(entry.shape)}; it holds {', '.join(name for name, _ in names)}, "
                f"which have {rows} rows together. Is config.json that of these weights?"
            )
        first = 0
        for name, count in names:
            self._add_part(name, stored, entry, (*where, slice(first, first + count)))
            first += count

    def _add_by_heads(
        self, prefix: str, kind: str, heads: int, parts: Sequence[tuple[str, int]], stored: str, entry: TensorEntry
    ) -> None:
        """Add the parts of a tensor that are interleaved by head."""
        rows = sum(count for _, count in parts)
        if not entry.shape or entry.shape[0] != heads * rows:
            raise TensorShapeError(
                f"{entry.file}: {stored!r} is {list(entry.shape)}; it holds {', '.join(name for name, _ in parts)} of "
                f"{heads} heads, which have {heads * rows} rows together. Is config.json that of these weights?"
            )
        self._heads[stored], first = heads, 0
        for part, count in parts:
            share = replace(entry, shape=(heads * count, *entry.shape[1:]), num_bytes=entry.num_bytes * count // rows)
            self._add_part(f"{prefix}{part}.{kind}", stored, share, ())
            self._parts[f"{prefix}{part}.{kind}"] = stored, (slice(None), slice(first, first + count))
            first += count

    def _add_part(self, name: str, stored: str, entry: TensorEntry, where: tuple[int | slice, ...]) -> None:
        if name in self.entries:
            raise UnexpectedTensorError(
                f"{entry.file}: {stored!r} and {self._parts[name][0]!r} both hold what the model calls {name!r}; "
                "remove the one that does not belong to this checkpoint"
            )
        shape = _shape_of(entry.shape, where)
        share = 1 if entry.shape == shape else math.prod(shape) / max(math.prod(entry.shape), 1)
        self.entries[name] = replace(entry, name=name, shape=shape, num_bytes=round(entry.num_bytes * share))
        self._parts[name] = stored, where


def _shape_of(shape: tuple[int, ...], where: tuple[int | slice, ...]) -> tuple[int, ...]:
    counts = [
        len(range(*index.indices(size))) for index, size in zip(where, shape, strict=False) if isinstance(index, slice)
    ]
    return (*counts, *shape[len(where) :])
