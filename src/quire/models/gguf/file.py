"""The header of a GGUF file: metadata and the positions of its tensors, all checked before they are used.

Format: "GGUF", version, number of tensors and of metadata pairs; the pairs (key, type, value); of each tensor its name,
dimensions (innermost first), type and offset; then the data, aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Numbers are little-endian. Counts and lengths are compared
with what is left of the file before anything is made for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quire.errors import CheckpointError, CorruptGgufError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
MAX_PAIRS = MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1 << 16
MAX_ITEMS = 1 << 23
"""Of all arrays together: several times those of the largest vocabulary."""
MAX_DEPTH = 4
"""Of arrays in arrays."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
TOKENIZER = "tokenizer."
"""How the keys of the tokenizer begin. In other texts, bytes that are not UTF-8 are replaced."""


@dataclass(frozen=True, slots=True)
class GgufType:
    """How numbers are stored: `numbers` of a row at a time, in `size` bytes."""

    name: str
    numbers: int
    size: int

    @property
    def bits(self) -> float:
        """Of a number."""
        return 8 * self.size / self.numbers


TYPES = {
    number: GgufType(*described)
    for number, described in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
        2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
        10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
    }.items()
}  # fmt: skip
"""By their numbers in files."""

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Types of numbers in metadata."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The position of a tensor: `num_bytes` from byte `start` of `file` on; `shape`: the outermost dimension first."""

    name: str
    type: GgufType
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says.

    Attributes:
        metadata: by key, numbers, truth values, texts, and lists of these; the tokenizer's are empty unless
            they were requested.
        tensors: by name.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(file: Path, tokenizer: bool = False) -> GgufHeader:
    """Read and check the header of a file.

    Args:
        tokenizer: also make the tokenizer's lists, of several 100,000 items; otherwise they are passed over.

    Raises:
        CorruptGgufError: it is no such file, or cut short, or a length, count, type or offset is wrong.
        CheckpointError: the file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            return _read(file, _Reader(file, stream, file.stat().st_size, tokenizer))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


class _Reader:
    """Reads a header piece by piece, and never more than is there.

    Attributes:
        position: bytes read. items: of arrays that may still come.
    """

    def __init__(self, file: Path, stream: BinaryIO, size: int, tokenizer: bool) -> None:
        self.file, self.size, self.tokenizer = file, size, tokenizer
        self._read, self._end = stream.read, min(size, MAX_HEADER_BYTES)
        self.position, self.items = 0, MAX_ITEMS

    def corrupt(self, what: str) -> CorruptGgufError:
        return CorruptGgufError(
            f"{self.file} is not a valid GGUF file: {what}. It may be cut short or damaged; download it again."
        )

    def bytes(self, count: int, what: str) -> bytes:
        left = self._end - self.position
        if count > left:
            cut = f"and {left} are left" if self._end == self.size else f"of a header of at most {self._end}"
            raise self.corrupt(f"{what} takes {count} bytes from byte {self.position} on, {cut} (size {self.size})")
        self.position += count
        found = self._read(count)
        if len(found) < count:
            raise self.corrupt("it has become shorter while it was read")
        return found

    def integer(self, size: int, what: str) -> int:
        return int.from_bytes(self.bytes(size, what), "little")

    def text(self, what: str, errors: str = "strict", most: int = MAX_HEADER_BYTES) -> str:
        length = self.integer(8, f"the length of {what}")
        if length > most:
            raise self.corrupt(f"{what} has {length} bytes, and at most {most} are allowed")
        try:
            return self.bytes(length, what).decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8 ({error.reason} at its byte {error.start})") from error

    def texts(self, count: int, what: str, errors: str, keep: bool) -> list[str]:
        """Like `text` for each of many, which is most of a header; without `keep` they are passed over."""
        found: list[str] = []
        read, end = self._read, self._end - self.position
        try:
            for index in range(count):
                length = int.from_bytes(read(8), "little")
                end -= 8 + length
                if end < 0:
                    raise self.corrupt(f"{what} has {count} texts, and text {index} has {length} bytes")
                data = read(length)
                if keep:
                    found.append(data.decode("utf-8", errors))
        except UnicodeDecodeError as error:
            raise self.corrupt(f"text {len(found)} of {what} is not UTF-8 ({error.reason})") from error
        self.position = self._end - end
        return found

    def numbers(self, kind: int, count: int, what: str, keep: bool = True) -> list[Any]:
        dtype = np.dtype(NUMBERS[kind])
        data = self.bytes(count * dtype.itemsize, what)
        found = np.frombuffer(data if keep else b"", np.uint8 if kind == BOOL else dtype)
        if dtype == np.float32:  # the shortest decimal number that is this one in fp32: 1e-05, as the converter read it
            return [float(text) for text in found.astype(str)]
        return list((found != 0).tolist() if kind == BOOL else found.tolist())


def _read(file: Path, reader: _Reader) -> GgufHeader:
    tensors, pairs = _read_counts(reader)
    metadata: dict[str, Any] = {}
    for index in range(pairs):
        key = reader.text(f"the key of pair {index}", most=MAX_KEY_BYTES)
        if key in metadata:
            raise reader.corrupt(f"the key {key!r} stands in it twice")
        metadata[key] = _read_value(reader, reader.integer(4, f"the type of {key!r}"), key, 0)
    found = [_read_tensor(reader, index) for index in range(tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.corrupt(f"general.alignment is {alignment!r}, not a power of 2 up to {MAX_ALIGNMENT}")
    start = -(-reader.position // alignment) * alignment
    return GgufHeader(file, metadata, _placed(reader, found, start, alignment))


def _read_counts(reader: _Reader) -> tuple[int, int]:
    """The numbers of tensors and of pairs."""
    magic = reader.bytes(4, "the name of the format")
    if magic != MAGIC:
        raise reader.corrupt(f"it begins with {magic!r}, not {MAGIC!r}")
    version = reader.integer(4, "the version")
    if version and not version & 0xFFFF:
        raise CorruptGgufError(f"{reader.file} is a GGUF file of a big-endian machine; download the usual one")
    if version not in VERSIONS:
        raise CorruptGgufError(
            f"{reader.file} is a GGUF file of version {version}; Quire reads versions 2 and 3. Convert the model anew, "
            "or choose a newer file."
        )
    tensors, pairs = reader.integer(8, "the number of tensors"), reader.integer(8, "the number of pairs")
    if tensors > MAX_TENSORS or pairs > MAX_PAIRS:
        raise reader.corrupt(f"it states {tensors} tensors and {pairs} pairs; at most {MAX_TENSORS} each are allowed")
    return tensors, pairs


def _read_value(reader: _Reader, kind: int, key: str, depth: int) -> Any:
    what = f"the value of {key!r}"
    if kind in NUMBERS:
        return reader.numbers(kind, 1, what)[0]
    errors = "strict" if key.startswith(TOKENIZER) else "replace"
    if kind == STRING:
        return reader.text(what, errors)
    if kind != ARRAY or depth == MAX_DEPTH:
        found = "an array in too many arrays" if kind == ARRAY else f"of the unknown type {kind}"
        raise reader.corrupt(f"{what} is {found}")
    item, count = reader.integer(4, f"the type of items of {key!r}"), reader.integer(8, f"the length of {key!r}")
    reader.items -= count
    if reader.items < 0:
        raise reader.corrupt(f"{what} has {count} items; all arrays together may have {MAX_ITEMS}")
    keep = reader.tokenizer or not key.startswith(TOKENIZER)
    if item in NUMBERS:
        return reader.numbers(item, count, what, keep)
    if item == STRING:
        return reader.texts(count, what, errors, keep)
    return [_read_value(reader, item, key, depth + 1) for _ in range(count)]


def _read_tensor(reader: _Reader, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of a tensor."""
    name = reader.text(f"the name of tensor {index}", most=MAX_KEY_BYTES)
    dimensions = reader.integer(4, f"the number of dimensions of {name!r}")
    if not 0 < dimensions <= MAX_DIMENSIONS:
        raise reader.corrupt(f"tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    *inner, kind, offset = struct.unpack(
        f"<{dimensions}QIQ", reader.bytes(8 * dimensions + 12, f"the entry of tensor {name!r}")
    )
    return name, tuple(reversed(inner)), kind, offset


def _placed(
    reader: _Reader, found: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
) -> dict[str, GgufTensor]:
    """The tensors, given where their data begin; each is aligned, within the file, and apart from others."""
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in found:
        if name in tensors:
            raise reader.corrupt(f"the tensor {name!r} stands in it twice")
        if kind not in TYPES:
            raise CorruptGgufError(
                f"{reader.file}: tensor {name!r} has type {kind}, which is not known, or no longer in use. Choose a "
                "file in another format, such as Q4_K_M."
            )
        form, numbers = TYPES[kind], math.prod(shape)
        if not numbers or shape[-1] % form.numbers:
            raise reader.corrupt(f"tensor {name!r} has the shape {list(shape)}, not rows of blocks of {form.numbers}")
        size = numbers // form.numbers * form.size
        if offset % alignment or start + offset + size > reader.size:
            raise reader.corrupt(
                f"tensor {name!r} has {size} bytes from byte {start} + {offset} on: its offset must be a multiple of "
                f"{alignment}, and the file has {reader.size} bytes"
            )
        tensors[name] = GgufTensor(name, form, shape, reader.file, start + offset, size)
    position, previous = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < position:
            raise reader.corrupt(f"tensor {tensor.name!r} at byte {tensor.start} overlaps {previous}, up to {position}")
        position, previous = tensor.start + tensor.num_bytes, repr(tensor.name)
    return tensors
