"""Safetensors: a header that is checked before it is used, tensors as views of the mapped file, and writing.

Format: eight bytes of header length (little-endian), a JSON object {name: {dtype, shape, data_offsets}}, then
the data, without holes (https://huggingface.co/docs/safetensors). Each tensor gets a mapping of its own, so
dropping the tensor gives its pages back: nothing else holds the file in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from quire.errors import CheckpointError, CorruptSafetensorsError, TensorDtypeError

MAX_HEADER_BYTES = 100_000_000
"""The bound of the safetensors library itself."""
MAX_DIMENSIONS = 16

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types that weights may have."""
PACKED_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "F32": torch.float32, "F16": torch.float16}
"""The types of quantized weights' tensors."""

ALIGNMENT = 64
"""A written file's tensors begin at multiples of this, as vectors are loaded fastest."""
WRITE_BYTES = 16 << 20
"""Bytes that are written at a time: progress is told between."""

AHEAD_BYTES = 128 << 10
"""Bytes that the system is asked to read ahead at a time: of a longer range, Linux reads only the begin."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `num_bytes` from byte `start` of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, every one checked against the file's length.

    Raises:
        CorruptSafetensorsError: saying where the header, an offset or the length is wrong.
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


def map_tensor(entry: TensorEntry, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
    """The tensor as a view of the mapped file: pages are read when touched, and unmapped with the tensor.

    The mapping is private, so a write would never reach the file.

    Args:
        dtypes: the types that it may have.

    Raises:
        TensorDtypeError: it has another type.
        CheckpointError: the file can no longer be read, or has become shorter.
    """
    dtype = dtypes.get(entry.dtype)
    if dtype is None:
        raise TensorDtypeError(
            f"{entry.file}: tensor {entry.name!r} has dtype {entry.dtype}; Quire reads "
            f"{', '.join(sorted(dtypes))}. Use a checkpoint that is not quantized."
        )
    if entry.num_bytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    skip = entry.start % mmap.ALLOCATIONGRANULARITY
    length, offset = skip + entry.num_bytes, entry.start - skip
    try:
        with entry.file.open("rb") as stream:
            view = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_COPY, offset=offset)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{entry.file} cannot be read: {error}") from error
    if skip % ITEM_BYTES[entry.dtype]:  # a header of odd length: copy, since kernels may rely on alignment
        data = bytearray(view[skip:])
        return torch.frombuffer(data, dtype=dtype).view(entry.shape)
    return torch.frombuffer(view, dtype=dtype, count=math.prod(entry.shape), offset=skip).view(entry.shape)


def read_ahead(entry: TensorEntry) -> None:
    """Ask the system to read a tensor's part of the file, so that whoever touches it later waits for no disk.

    This waits only while the disk's queue is full. It is advice: where the system has no such call, or the file is
    gone, nothing happens.
    """
    advise = getattr(os, "posix_fadvise", None)  # not on macOS
    if advise is None:
        return
    with contextlib.suppress(OSError), entry.file.open("rb") as stream:
        for start in range(entry.start, entry.start + entry.num_bytes, AHEAD_BYTES):
            advise(stream.fileno(), start, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


def write_file(
    file: Path,
    tensors: Mapping[str, torch.Tensor],
    progress: Callable[[int, int], None],
    make: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write a new file.

    Tensors of a multiple of `ALIGNMENT` bytes come first, and the header is padded, so that they are all aligned:
    a mapped file's can then be computed with where they lie.

    Args:
        tensors: contiguous ones, of any of the types that are read.
        progress: told (bytes written, bytes in all) as it goes on.
        make: the tensor of a name, called when its turn comes; then `tensors` only says types and shapes, and may be
            on the device "meta". So a file may be larger than memory.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    names = {dtype: name for name, dtype in (FLOAT_DTYPES | PACKED_DTYPES).items()}
    ordered = sorted(tensors.items(), key=lambda item: item[1].nbytes % ALIGNMENT > 0)
    entries: dict[str, Any] = {}
    total = 0
    for name, tensor in ordered:
        offsets = [total, total + tensor.nbytes]
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        total += tensor.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    written = 0
    with file.open("xb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for name, described in ordered:
            tensor = make(name) if make else described
            for part in torch.split(tensor.detach().flatten().view(torch.uint8), WRITE_BYTES):
                written += stream.write(part.numpy().data)
                progress(written, total)


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
