"""Reads tensors of safetensors files as views of the mapped file, and writes such files. For the header see
`safetensors_header`.

Each tensor has its own mapping, so its pages are freed with it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.errors import CheckpointError, TensorDtypeError
from quire.models.safetensors_header import ITEM_BYTES, TensorEntry
from quire.ops.memory import map_file

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Allowed types of weights."""
_WHOLE = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64}
_NAMES = {dtype: name for name, dtype in (FLOAT_DTYPES | _WHOLE).items()}

ALIGNMENT = 64
"""Tensors in a written file begin at multiples of this, where vectors are loaded fastest."""
ENTRY_BYTES = 128
"""Most bytes of a tensor's entry in a header, besides its name."""
WRITE_BYTES = 16 << 20
"""Bytes that are written at a time, between reports of progress."""

AHEAD_BYTES = 128 << 10
"""Bytes that the system is asked to read ahead at a time: of a longer range, Linux reads only the beginning."""


def map_tensor(entry: TensorEntry, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
    """A tensor as a view of the mapped file: pages are read when they are touched, and unmapped with the tensor.

    The mapping is private, so writes do not reach the file.

    Args:
        dtypes: allowed types.

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
    try:
        with entry.file.open("rb") as stream:
            data = map_file(stream.fileno(), entry.start, entry.num_bytes)
    except OSError as error:
        raise CheckpointError(f"{entry.file} cannot be read: {error.strerror or error}") from error
    if entry.start % ITEM_BYTES[entry.dtype]:  # a header of odd length: copy, since kernels may rely on alignment
        data = data.clone()
    return data.view(dtype).view(entry.shape)


def read_ahead(entry: TensorEntry) -> None:
    """Ask the system to read a tensor's part of the file, so that later accesses need not wait for the disk.

    This waits only while the disk's queue is full. If the system has no such call, or the file is gone, nothing
    happens.
    """
    advise = getattr(os, "posix_fadvise", None)  # not on macOS
    if advise is None:
        return
    with contextlib.suppress(OSError), entry.file.open("rb") as stream:
        for start in range(entry.start, entry.start + entry.num_bytes, AHEAD_BYTES):
            advise(stream.fileno(), start, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


class Writer:
    """Writes a new file tensor by tensor, so that it may be larger than memory. The header is written on exit.

    Tensors whose size is a multiple of `ALIGNMENT` should come first: since the header is padded, they are all aligned,
    and kernels can use them in the mapped file.

    Args:
        header_bytes: room for the header, which is known only at the end: see `header_room`.
        progress: called with the number of bytes written so far.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, file: Path, header_bytes: int, progress: Callable[[int], None] | None = None) -> None:
        self._progress = progress or (lambda written: None)
        self._start = -(-(8 + header_bytes) // ALIGNMENT) * ALIGNMENT
        self._entries: dict[str, Any] = {}
        self._written = 0
        self._stream = file.open("xb")
        self._stream.seek(self._start)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a contiguous tensor: floats, or whole numbers of 8, 32 or 64 bits."""
        start = self._written
        for part in torch.split(tensor.detach().flatten().view(torch.uint8), WRITE_BYTES):
            self._written += self._stream.write(part.numpy().data)
            self._progress(self._written)
        dtype, shape = _NAMES[tensor.dtype], list(tensor.shape)
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, self._written]}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stream as stream:
            if kind is None:
                header = json.dumps(self._entries, separators=(",", ":")).encode()
                room = self._start - 8
                if len(header) > room:
                    raise OSError(errno.EFBIG, f"the header takes {len(header)} bytes, and {room} were left for it")
                stream.seek(0)
                stream.write(room.to_bytes(8, "little") + header.ljust(room))


def header_room(names: Iterable[str]) -> int:
    """Most bytes of a header for tensors with these names."""
    return sum(len(json.dumps(name)) + ENTRY_BYTES for name in names)


def write_file(
    file: Path,
    described: Mapping[str, torch.Tensor],
    progress: Callable[[int, int], None],
    make: Callable[[str], torch.Tensor],
) -> None:
    """Write a new file.

    Args:
        described: by name, the types and shapes of the tensors; they may be on the device "meta".
        progress: called with (bytes written, total bytes).
        make: makes the tensor of a name, contiguous, just before it is written.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    total = sum(tensor.nbytes for tensor in described.values())
    with Writer(file, header_room(described), lambda written: progress(written, total)) as writer:
        for name in sorted(described, key=lambda name: not is_aligned(described[name])):
            writer.add(name, make(name))


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor that follows this one in a file is aligned if this one is."""
    return tensor.nbytes % ALIGNMENT == 0
