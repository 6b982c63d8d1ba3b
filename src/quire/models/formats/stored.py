"""Weights that a checkpoint stores as several tensors (codes, scales, zero points), presented as plain weights.

A format's reader finds them by the names of their tensors, and what these tensors say of themselves (types and shapes)
counts, so that a model may mix formats and groups. All is checked before any weight is read.
"""

from __future__ import annotations

import contextlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from quire.errors import (
    CheckpointError,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from quire.layers.embedding import Table
from quire.models.checkpoint import Checkpoint, of_rows
from quire.models.fields import Fields
from quire.models.safetensors_file import FLOAT_DTYPES, map_tensor
from quire.models.safetensors_header import TensorEntry
from quire.ops import CodedWeight, StoredWeight
from quire.ops.coded import CodedTable

TYPES = FLOAT_DTYPES | {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # exponents of 2
}
FLOATS = tuple(FLOAT_DTYPES)
EXPONENTS = ("U8", "F8_E8M0")
EXPONENT_OF_1 = 127

OF_ACTIVATIONS = re.compile(r"\.(input|output|activation)_(global_)?(scale|zero_point)(_inv|_ub)?$")
OF_CACHE = re.compile(r"\.(k|v|q|kv|prob_output)_(global_)?(scale|zero_point)$|\.[kv]_proj\.output_scale$")


@dataclass(frozen=True, kw_only=True)
class WeightOnDisk(ABC):
    """A weight [out, in] and the tensors that it is stored as.

    Attributes:
        name: the plain weight's.
        shape: the plain weight's.
        parts: its tensors, by their part in it.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, TensorEntry]

    @abstractmethod
    def coded(self) -> StoredWeight | None:
        """As it is stored; None if there is no such form."""

    def restored(self) -> torch.Tensor:
        """Its numbers, fp32. A kind that may have no coded form has a method of its own."""
        coded = self.coded()
        if coded is None:
            raise TypeError(f"{type(self).__name__} has no coded form, and no `restored` of its own")
        return coded.restored()

    def part(self, name: str) -> torch.Tensor:
        """One of its tensors, a view of the file."""
        return map_tensor(self.parts[name], TYPES)

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return sum(entry.num_bytes for entry in self.parts.values())


@dataclass(frozen=True)
class Contents:
    """What a reader finds in a checkpoint.

    Attributes:
        weights: those that are stored in its format.
        unused: names of tensors that are not used, such as scales of activations.
        notes: for the user.
    """

    weights: Sequence[WeightOnDisk]
    unused: Collection[str] = ()
    notes: Sequence[str] = field(default_factory=tuple)


class StoredCheckpoint(Checkpoint):
    """Presents a checkpoint as one with plain weights, in fp32.

    Args:
        base: the checkpoint.
        config: its configuration, without what says how weights are stored.
        contents: what a reader found in it.
        quantization: see `Checkpoint`.

    Raises:
        UnexpectedTensorError: a weight is there twice.
    """

    def __init__(self, base: Checkpoint, config: Fields, contents: Contents, quantization: str | None = None) -> None:
        self.folder, self.generation, self.config = base.folder, base.generation, config
        self.quantization = quantization
        self.notes = tuple(contents.notes)
        self._stored = {weight.name: weight for weight in contents.weights}
        gone = {entry.name for weight in contents.weights for entry in weight.parts.values()} | set(contents.unused)
        self.entries = {name: entry for name, entry in base.entries.items() if name not in gone}
        for name, weight in self._stored.items():
            first = next(iter(weight.parts.values()))
            if name in self.entries:
                raise UnexpectedTensorError(
                    f"{first.file}: {first.name!r} and {name!r} are the same weight; remove the one that does not "
                    "belong to this checkpoint"
                )
            size = weight.num_bytes
            self.entries[name] = replace(first, name=name, dtype="F32", shape=weight.shape, num_bytes=size)

    def tensor(self, name: str, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
        """A tensor: see `Checkpoint`. What this format stores is restored in fp32."""
        weight = self._stored.get(name)
        if weight is None:
            return super().tensor(name, dtypes)
        with _naming(weight):
            return weight.restored()

    def coded(self, name: str, rows: range | None = None) -> StoredWeight | None:
        """See `Checkpoint`."""
        weight = self._stored.get(name)
        if weight is None:
            return None
        with _naming(weight):
            return of_rows(weight.coded(), rows)

    def table(self, name: str) -> Table | None:
        """See `Checkpoint`."""
        coded = self.coded(name)
        return CodedTable(coded) if isinstance(coded, CodedWeight) else None


@contextlib.contextmanager
def _naming(weight: WeightOnDisk) -> Iterator[None]:
    """Errors name the file and the weight."""
    try:
        yield
    except CheckpointError as error:
        first = next(iter(weight.parts.values()))
        raise CheckpointError(f"{first.file}: {first.name!r}: {error}") from error


def find_parts(base: Checkpoint, prefix: str, wanted: Mapping[str, Collection[str]]) -> dict[str, TensorEntry]:
    """The tensors of a weight, by their part in it, each PREFIX and its part.

    Args:
        base: the checkpoint.
        prefix: of their names.
        wanted: by part, the allowed types. A part that ends with "?" may be absent.

    Raises:
        MissingTensorError, TensorDtypeError: one is missing, or of another type.
    """
    found: dict[str, TensorEntry] = {}
    for part, types in wanted.items():
        name, optional = part.removesuffix("?"), part.endswith("?")
        entry = base.entries.get(prefix + name)
        if entry is None:
            if optional:
                continue
            beside = next(iter(found.values()), None)
            there = f"{beside.file}: {beside.name!r} is there, but " if beside else ""
            raise MissingTensorError(
                f"{there}{prefix + name!r}, which belongs to the same weight, is missing from {base.folder}. "
                "Is the download complete?"
            )
        if entry.dtype not in types:
            raise TensorDtypeError(
                f"{entry.file}: {entry.name!r} is of type {entry.dtype}; in this format it is {' or '.join(types)}"
            )
        found[name] = entry
    return found


def check_shape(entry: TensorEntry, *allowed: tuple[int, ...], why: str) -> None:
    """Raise TensorShapeError unless a tensor has one of these shapes.

    Args:
        why: what prescribes them, such as "'NAME' of [3, 5]".
    """
    if entry.shape not in allowed:
        shapes = " or ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
        raise TensorShapeError(f"{entry.file}: {entry.name!r} is {list(entry.shape)}, not {shapes}, as {why} needs")


def matrix(entry: TensorEntry) -> tuple[int, int]:
    """The shape of a tensor that must be a matrix that is not empty. Raises TensorShapeError."""
    if len(entry.shape) != 2 or not math.prod(entry.shape):
        raise TensorShapeError(
            f"{entry.file}: {entry.name!r} is of type {entry.dtype}, but {list(entry.shape)} is not a matrix"
        )
    return entry.shape[0], entry.shape[1]


def scale_numbers(scales: torch.Tensor) -> torch.Tensor:
    """Scales in fp32, whether they are floats or exponents of 2."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape), scales.int() - EXPONENT_OF_1)
    return scales.float()


def unused_scales(base: Checkpoint) -> tuple[list[str], tuple[str, ...]]:
    """Names of scales of activations and of the KV cache, which are not used, and a note if there are the latter.

    Quire quantizes activations and the cache, if at all, with scales of its own.
    """
    unused = [name for name in base.entries if OF_ACTIVATIONS.search(name)]
    cached = [name for name in base.entries if OF_CACHE.search(name)]
    if not cached:
        return unused, ()
    note = (
        f"{len(cached)} scales for a KV cache in fp8, such as {cached[0]!r}, are not used: kv_cache_dtype says its type"
    )
    return [*unused, *cached], (note,)
