"""Safetensors: tensors as views of the mapped file, and writing. What a file holds: see `safetensors_header`.

Each tensor gets a mapping of its own, so dropping the tensor gives its pages back: nothing else holds the file in
memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.errors import CheckpointError, TensorDtypeError
from quire.models.safetensors_header import ITEM_BYTES, TensorEntry

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
