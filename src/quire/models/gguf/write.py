"""Writes a GGUF file: the reverse of `file`, whose docstring describes the format."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.models.gguf.file import ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, STRING, TYPES, GgufType

BY_NAME = {form.name: number for number, form in TYPES.items()}
"""The numbers of types."""
VERSION = 3
UNSIGNED, SIGNED, FLOAT = 4, 5, 6
"""Types of numbers in metadata, of 32 bits, that are written."""
FORMATS = {BOOL: "<?", UNSIGNED: "<I", SIGNED: "<i", FLOAT: "<f"}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of a file that is to be written: its name, its type's, and its shape, the outermost dimension first."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def form(self) -> GgufType:
        return TYPES[BY_NAME[self.type]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.form.numbers * self.form.size


class GgufWriter:
    """A new file, whose header is there from the start; tensors may be written in any order.

    Args:
        metadata: numbers, truth values, texts, and lists of one of these by key.
        tensors: in their order in the file.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, file: Path, metadata: Mapping[str, Any], tensors: Sequence[Planned]) -> None:
        described, self._starts, position = [], {}, 0
        for tensor in tensors:
            described.append(_described(tensor, position))
            self._starts[tensor.name] = position
            position += _aligned(tensor.num_bytes)
        head = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
        head += b"".join(_text(key) + _value(value) for key, value in metadata.items()) + b"".join(described)
        self._first = _aligned(len(head))
        self._stream = file.open("xb")
        self._stream.write(head)
        self._stream.truncate(self._first + position)
        self._stream.flush()

    def write(self, name: str, data: torch.Tensor) -> None:
        """Write a tensor's bytes: contiguous, of any type."""
        self._stream.seek(self._first + self._starts[name])
        self._stream.write(data.detach().flatten().view(torch.uint8).numpy().data)
        self._stream.flush()

    def __enter__(self) -> GgufWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _aligned(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _described(tensor: Planned, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
    return _text(tensor.name) + dimensions + struct.pack("<IQ", BY_NAME[tensor.type], offset)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """A value after its type."""
    if isinstance(value, list):
        kind = _kind(value[0]) if value else UNSIGNED
        kind = SIGNED if kind == UNSIGNED else kind  # as llama.cpp expects kinds of tokens
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_item(each, kind) for each in value)
    kind = _kind(value)
    return struct.pack("<I", kind) + _item(value, kind)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, str):
        return STRING
    if isinstance(value, float):
        return FLOAT
    return SIGNED if value < 0 else UNSIGNED


def _item(value: Any, kind: int) -> bytes:
    return _text(value) if kind == STRING else struct.pack(FORMATS[kind], value)
