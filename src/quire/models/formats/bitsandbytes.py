"""Checkpoints of bitsandbytes: nf4, fp4 and int8.

In 4 bits NAME is uint8 [numbers / 2, 1], all numbers of a matrix one after another, two in a byte, the first in its
upper half. Beside it are NAME.quant_map, the 16 numbers that codes stand for, NAME.absmax, the scales of blocks of
them, and NAME.quant_state.bitsandbytes__nf4 (or fp4), JSON with the shape and the size of a block. Scales may be codes
in turn (`bnb_4bit_use_double_quant`): of nested_quant_map, with nested_absmax, to which nested_offset is added. The 16
numbers are no whole ones, so weights are restored when they are read.

In int8 MODULE.weight is int8 [out, in], and MODULE.SCB the largest number of each output, which 127 stands for. While
bitsandbytes keeps outliers among activations in 16 bits, here each 256 activations have a scale of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.formats.stored import TYPES, Contents, WeightOnDisk, check_shape, find_parts, matrix
from quire.models.safetensors_file import map_tensor
from quire.models.safetensors_header import TensorEntry
from quire.ops.coded import CodedWeight, Scheme

INT8 = Scheme("bitsandbytes int8", 8, 0)
MOST = 127.0
STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
MAX_STATE_BYTES = 1 << 16
NUMBERS, NESTED_NUMBERS = 16, 256
FORMAT = "weight_format"
NOTE = "weights in 4 bits of bitsandbytes are restored when they are read, in the data type of the computation"


@dataclass(frozen=True, kw_only=True)
class In4Bits(WeightOnDisk):
    """nf4 or fp4.

    Attributes:
        block: numbers that share a scale.
        nested_block: scales that share one; None if they are floats.
        offset: is added to such scales.
    """

    block: int
    nested_block: int | None
    offset: float

    def coded(self) -> None:
        """See `WeightOnDisk`."""

    def restored(self) -> torch.Tensor:
        """See `WeightOnDisk`."""
        pairs, numbers = self.part("codes").flatten(), self.part("quant_map").float()
        count, scales = math.prod(self.shape), self._scales()
        if not bool(scales.isfinite().all() & numbers.isfinite().all()):
            raise CheckpointError("some of its scales are not finite")
        found = numbers[torch.stack([pairs >> 4, pairs & 15], dim=1).flatten().int()]
        found = torch.nn.functional.pad(found[:count], (0, -count % self.block)).view(-1, self.block)
        return (found * scales[:, None]).flatten()[:count].view(self.shape)

    def _scales(self) -> torch.Tensor:
        stored = self.part("absmax")
        if self.nested_block is None:
            return stored.float()
        scales = self.part("nested_quant_map").float()[stored.int()]
        units = self.part("nested_absmax").float().repeat_interleave(self.nested_block)[: len(scales)]
        return scales * units + self.offset


@dataclass(frozen=True, kw_only=True)
class InInt8(WeightOnDisk):
    """int8 with a scale for each output."""

    def coded(self) -> CodedWeight:
        """See `WeightOnDisk`; the codes are a view of the file."""
        if FORMAT in self.parts and int(self.part(FORMAT)) != 0:
            raise CheckpointError(f"its {FORMAT} is {int(self.part(FORMAT))}, the layout of a kernel; only 0 is read")
        weight = CodedWeight(INT8, self.part("weight"), factors=self.part("SCB").float().flatten() / MOST)
        weight.check_finite()
        return weight


def read(base: Checkpoint, section: Fields) -> Contents:
    """Find the weights.

    Raises:
        CheckpointError: one of its kinds: a weight's tensors are missing, or do not fit.
    """
    states = [name for name in base.entries if name.endswith(STATES)]
    in_4_bits = [_in_4_bits(base, name) for name in states]
    return Contents([*in_4_bits, *_in_int8(base)], notes=(NOTE,) if in_4_bits else ())


def _in_4_bits(base: Checkpoint, state_name: str) -> In4Bits:
    name, _, state_part = state_name.partition(".quant_state")
    wanted = {".absmax": ("F32", "U8"), ".quant_map": ("F32",), f".quant_state{state_part}": ("U8",)}
    codes = find_parts(base, name, {"": ("U8",)})[""]
    found = find_parts(base, name, wanted)
    state = _read_state(found[f".quant_state{state_part}"])
    shape, block = _shape_of(state), state.integer("blocksize")
    parts = {
        "codes": codes,
        "absmax": found[".absmax"],
        "quant_map": found[".quant_map"],
        "state": base.entries[state_name],
    }
    count, why = math.prod(shape), f"a weight of {list(shape)} in blocks of {block}"
    check_shape(codes, (-(-count // 2), 1), (-(-count // 2),), (1, -(-count // 2)), why=why)
    check_shape(parts["absmax"], (-(-count // block),), why=why)
    check_shape(parts["quant_map"], (NUMBERS,), why="4 bits")
    if parts["absmax"].dtype == "F32":
        return In4Bits(name=name, shape=shape, parts=parts, block=block, nested_block=None, offset=0.0)
    nested = find_parts(base, name, {".nested_absmax": ("F32",), ".nested_quant_map": ("F32",)})
    parts |= {part.removeprefix("."): entry for part, entry in nested.items()}
    nested_block, scales = state.integer("nested_blocksize"), -(-count // block)
    check_shape(
        parts["nested_absmax"], (-(-scales // nested_block),), why=f"{scales} scales in blocks of {nested_block}"
    )
    check_shape(parts["nested_quant_map"], (NESTED_NUMBERS,), why="8 bits")
    offset = state.picked(["nested_offset"]).get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise state.error("nested_offset", "a finite number")
    return In4Bits(name=name, shape=shape, parts=parts, block=block, nested_block=nested_block, offset=float(offset))


def _read_state(entry: TensorEntry) -> Fields:
    """JSON in a tensor."""
    try:
        if entry.num_bytes > MAX_STATE_BYTES:
            raise ValueError(f"{entry.num_bytes} bytes; at most {MAX_STATE_BYTES} are read")
        values = json.loads(bytes(map_tensor(entry, TYPES).flatten().tolist()))
        if not isinstance(values, dict):
            raise ValueError(f"a JSON {type(values).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{entry.file}: {entry.name!r} holds no description of its weight: {error}") from error
    return Fields(values, f"{entry.file}, {entry.name}")


def _shape_of(state: Fields) -> tuple[int, int]:
    shape = state.picked(["shape"]).get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n <= 1 << 24 for n in shape)):
        raise state.error("shape", "two whole numbers, those of outputs and inputs")
    return shape[0], shape[1]


def _in_int8(base: Checkpoint) -> Iterator[InInt8]:
    for name, entry in base.entries.items():
        if entry.dtype == "I8" and name.endswith(".weight"):
            wanted = {"weight": ("I8",), "SCB": ("F32", "F16", "BF16"), f"{FORMAT}?": ("U8", "I8", "I32", "I64")}
            parts, shape = find_parts(base, name.removesuffix("weight"), wanted), matrix(entry)
            check_shape(parts["SCB"], (shape[0],), (shape[0], 1), (1, shape[0]), why=f"{name!r} of {list(shape)}")
            if FORMAT in parts:
                check_shape(parts[FORMAT], (), (1,), why="one number")
            yield InInt8(name=name, shape=shape, parts=parts)
