"""The header of a safetensors file: its tensors and their positions, checked before they are used.

Format: eight bytes of header length (little-endian), a JSON object {name: {dtype, shape, data_offsets}}, then
the data, without holes (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from quire.errors import CheckpointError, CorruptSafetensorsError

MAX_HEADER_BYTES = 100_000_000
"""The bound of the safetensors library itself."""
MAX_DIMENSIONS = 16

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The position of a tensor: `num_bytes` from byte `start` of `file` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, all checked against the file's length.

    Raises:
        CorruptSafetensorsError: the header, an offset or the length is wrong.
        CheckpointError: the file cannot be read.
    """
    try:
        size, length, raw = _read_raw_header(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    entries = {
        name: _read_entry(file, name, value, 8 + length, size)
        for name, value in _parse_header(file, raw).items()
        if name != "__metadata__"
    }
    _check_layout(file, list(entries.values()), 8 + length, size)
    return entries


def _read_raw_header(file: Path) -> tuple[int, int, bytes]:
    """The file's size, the header's length, and the header."""
    size = file.stat().st_size
    if size < 8:
        raise _corrupt(file, f"it has {size} bytes, fewer than the 8 that state the header's length")
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise _corrupt(
                file,
                f"its first 8 bytes state a header of {length} bytes, but the file has {size} bytes "
                f"and a header at most {MAX_HEADER_BYTES}",
            )
        return size, length, stream.read(length)


def _corrupt(file: Path, what: str) -> CorruptSafetensorsError:
    return CorruptSafetensorsError(
        f"{file} is not a valid safetensors file: {what}. It may be cut short or damaged; download it again."
    )


def _parse_header(file: Path, raw: bytes) -> dict[str, Any]:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a name stands in it twice")
        return result

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _corrupt(file, f"its header is a JSON {type(header).__name__}, not an object")
    return header


def _read_entry(file: Path, name: str, value: Any, data_start: int, size: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise _corrupt(file, f"the entry of tensor {name!r} is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _corrupt(file, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _whole_numbers(shape) or len(shape) > MAX_DIMENSIONS:
        raise _corrupt(file, f"tensor {name!r} has the shape {shape!r}, not a list of whole numbers")
    if not _whole_numbers(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data_start:
        raise _corrupt(file, f"tensor {name!r} has offsets {offsets!r}, outside the {size - data_start} bytes of data")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise _corrupt(
            file,
            f"tensor {name!r} is {dtype} of shape {shape}, {math.prod(shape) * ITEM_BYTES[dtype]} bytes, "
            f"but its offsets {offsets} span {end - begin}",
        )
    if max(shape, default=0) > size:  # readers may do something for each row
        raise _corrupt(file, f"tensor {name!r} is empty, but its shape {shape} is larger than the file of {size} bytes")
    return TensorEntry(name, dtype, tuple(shape), file, data_start + begin, end - begin)


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(file: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    """Tensors follow each other without overlap or hole, and the file ends where the last one ends."""
    position, previous = data_start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != position:
            what = "overlaps" if entry.start < position else "leaves a hole after"
            raise _corrupt(
                file,
                f"tensor {entry.name!r} at byte {entry.start} {what} {previous}, which ends at {position}",
            )
        position, previous = entry.start + entry.num_bytes, repr(entry.name)
    if position != size:
        raise _corrupt(file, f"its tensors end at byte {position}, but the file has {size} bytes")
