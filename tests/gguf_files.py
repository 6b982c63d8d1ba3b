"""Writes GGUF files, valid ones and others, byte by byte; and checkpoints with the numbers of a valid one."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.models.gguf.file import TYPES

Array = np.ndarray[Any, Any]
NUMBERS = {form.name: number for number, form in TYPES.items()}
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
    "NVFP4": [],
}
"""Where scales in fp16 are in the block of a type."""


@dataclass(frozen=True)
class Stored:
    """A tensor: its type, its shape (the outermost dimension first), and its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def plain(array: Array) -> Stored:
    return Stored("F32", array.shape, array.astype("<f4").tobytes())


def half(array: Array) -> Stored:
    return Stored("F16", array.shape, array.astype("<f2").tobytes())


def random_blocks(kind: str, shape: tuple[int, ...], generator: np.random.Generator, scale: float = 0.01) -> Stored:
    """Any bytes are a valid block but for its scales in fp16, and exponents of MXFP4."""
    form = TYPES[NUMBERS[kind]]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // form.numbers, form.size), dtype=np.uint8)
    for at in HALVES[kind]:
        drawn = generator.normal(0, scale, blocks.shape[:-1]).astype("<f2")
        blocks[..., at : at + 2] = drawn[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(110, 130, blocks.shape[:-1])
    return Stored(kind, shape, blocks.tobytes())


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_of(value: Any) -> bytes:
    """A value with its type."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    items = [value_of(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    offsets: Mapping[str, int] | None = None,
    pairs: Sequence[bytes] = (),
) -> bytes:
    """A file.

    Args:
        offsets: of tensors that do not follow the one before.
        pairs: further keys with their values.
    """
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata) + len(pairs))
    head += b"".join(text(key) + value_of(value) for key, value in metadata.items()) + b"".join(pairs)
    position, data = 0, b""
    for name, tensor in tensors.items():
        position = len(data)
        at = (offsets or {}).get(name, position)
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        head += text(name) + dims + struct.pack("<IQ", NUMBERS[tensor.kind], at)
        data += tensor.data + bytes(-len(tensor.data) % 32)
    return head + bytes(-len(head) % 32) + data


def write(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], **options: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gguf_bytes(metadata, tensors, **options))
    return file


LLAMA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 64,
}
"""The metadata of a tiny Llama."""


def llama(kind: str = "Q4_K", table: str = "Q6_K", layers: int = 1, seed: int = 0) -> dict[str, Stored]:
    """Its tensors, with matrices of a type, and a tied table of another."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, kind: str = kind) -> Stored:
        return random_blocks(kind, (rows, 256), generator, 0.001)

    tensors = {"token_embd.weight": matrix(64, table), "output_norm.weight": plain(np.ones(256))}
    for layer in range(layers):
        rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256}
        rows |= {"ffn_gate": 256, "ffn_up": 256, "ffn_down": 256}
        tensors |= {f"blk.{layer}.{name}.weight": matrix(count) for name, count in rows.items()}
        tensors |= {f"blk.{layer}.{name}_norm.weight": plain(generator.normal(1, 0.1, 256)) for name in ("attn", "ffn")}
    return tensors
