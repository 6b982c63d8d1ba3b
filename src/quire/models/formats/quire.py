"""A folder made by `quire quantize --to int8` or `int4`: a checkpoint with the model's names, whose weights are views
of the mapped file.

It has the base model's small files; `model.safetensors`, with the tensors of each coded weight (`ops.coded`) as NAME
and a part, and all others unchanged; and a record of how it was made, `quire_quantization.json`. The codes of a weight
of 6 bits lie four in three bytes, little-endian; they are unpacked when it is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from quire.errors import CheckpointError, ConfigError, CorruptSafetensorsError, TensorShapeError
from quire.models.checkpoint import Checkpoint, content_hash
from quire.models.fields import Fields, has_file
from quire.models.formats.quantizing import QUANTIZATIONS, Quantization
from quire.models.formats.stored import Contents, WeightOnDisk, find_parts, matrix
from quire.ops import CodedWeight
from quire.ops.coded import Scheme
from quire.version import __version__

RECORD_FILE = "quire_quantization.json"
FORMAT_VERSION = 3
"""Version of the record and of the tensors; others are refused."""

EIGHT = {".codes": ("I8",), ".scales": ("BF16",)}
SIX = {".codes_of_6_bits": ("U8",), ".scales": ("I8",), ".block_scales": ("BF16",)}
FOUR = {
    ".codes_of_4_bits": ("U8",),
    ".scales": ("U8",),
    ".offsets": ("U8",),
    ".block_scales": ("BF16",),
    ".block_offsets": ("BF16",),
}
"""The parts of a weight, and their types. The first one says which it is."""
KINDS = EIGHT, SIX, FOUR
RAISED = 32
"""What is added to codes of 6 bits, so that they are from 0 to 63."""


@dataclass(frozen=True, slots=True)
class Record:
    """How such a folder was made.

    Attributes:
        quantization: "int8" or "int4".
        base: folder of the model that it was made from, which need not exist any more.
        base_hash: hash of that folder's content.
        content_hash: hash of this folder's content.
        quire_version: version of Quire that wrote it.
    """

    quantization: Quantization
    base: str
    base_hash: str
    content_hash: str
    quire_version: str = __version__
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write it into the folder."""
        (folder / RECORD_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Raises CheckpointError where the content of the folder or its base model has changed since."""
        if _hash_of(folder) != self.content_hash:
            raise CheckpointError(
                f"{folder}: config.json or the weights have changed since the folder was quantized, or the copy is not "
                f"complete. Copy it anew, or quantize {self.base} again."
            )
        base = Path(self.base)
        if _hash_of(base) not in (None, self.base_hash):
            raise CheckpointError(
                f"{folder} was quantized from {base}, which has changed since: its config.json or weights are others. "
                f"Quantize it again, or, to go on with the old weights, change 'base' in {folder / RECORD_FILE}."
            )


def read_record(folder: Path) -> Record | None:
    """The record of a folder; None if it has none.

    Raises:
        CheckpointError: its version is another one, or a field is wrong.
    """
    file = folder / RECORD_FILE
    if not has_file(file, CheckpointError):
        return None
    fields = Fields.read(file)
    found = fields.integer("format_version")
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} was quantized in format version {found}, and Quire {__version__} reads version "
            f"{FORMAT_VERSION}. Quantize the model again: quire quantize MODEL --to int4 --output DIR"
        )
    quantization: Quantization = "int4" if fields.choice("quantization", QUANTIZATIONS) == "int4" else "int8"
    base, base_hash, own_hash, version = (
        fields.text(name) for name in ("base", "base_hash", "content_hash", "quire_version")
    )
    return Record(quantization, base, base_hash, own_hash, version)


def _hash_of(folder: Path) -> str | None:
    """Hash of a folder's content, empty if it is damaged; None if it does not exist any more or cannot be read."""
    try:
        return content_hash(folder) if os.path.isfile(folder / "config.json") else None
    except CorruptSafetensorsError:
        return ""
    except (OSError, CheckpointError):
        return None


def choose_quantization(folder: Path, record: Record | None, asked: Quantization | None) -> Quantization | None:
    """How a folder's weights are to be quantized; None where they stay as they are.

    Raises:
        ConfigError: they are quantized already, and not so.
    """
    if record is None:
        return asked
    if asked not in (None, record.quantization):
        raise ConfigError(
            f"{folder} is quantized to {record.quantization}, but {asked} was asked for; leave out quantization, or "
            f"give the model that it was made from, {record.base}"
        )
    return None


@dataclass(frozen=True, kw_only=True)
class QuireWeight(WeightOnDisk):
    """A weight of such a folder; `scheme` is that of its parts."""

    scheme: Scheme

    def coded(self) -> CodedWeight:
        """See `WeightOnDisk`."""
        codes, *rest = self.parts
        found = self.part(codes)
        if codes in SIX:
            found = _unpacked(found)
        return CodedWeight(self.scheme, found, **{part.removeprefix("."): self.part(part) for part in rest})


def read(checkpoint: Checkpoint) -> Contents:
    """The weights of a folder.

    Raises:
        CheckpointError: one of its kinds, for weights whose tensors do not fit.
    """
    weights: list[WeightOnDisk] = []
    for name in checkpoint.entries:
        for kind in KINDS:
            codes = next(iter(kind))
            if name.endswith(codes):
                weights.append(_weight(checkpoint, name.removesuffix(codes), kind))
    return Contents(weights)


def _weight(checkpoint: Checkpoint, name: str, kind: Mapping[str, Collection[str]]) -> QuireWeight:
    parts = find_parts(checkpoint, name, kind)
    (codes, *_), (outputs, bytes_a_row) = kind, matrix(next(iter(parts.values())))
    bits = 8 if kind is EIGHT else 6 if kind is SIX else 4
    inputs = bytes_a_row * 8 // bits
    sizes = {part: inputs // matrix(entry)[1] for part, entry in parts.items() if part != codes}
    for part, each in sizes.items():
        alike = sizes[".scales" if part == ".offsets" else ".block_scales" if part == ".block_offsets" else part]
        if parts[part].shape != (outputs, inputs // max(each, 1)) or inputs % max(each, 1) or each != alike or not each:
            entry = parts[part]
            raise TensorShapeError(
                f"{entry.file}: {entry.name!r} is {list(entry.shape)}, which does not fit {outputs} x {inputs} "
                f"codes of {bits} bits. Quantize the model again."
            )
    of_codes: Literal[4, 8] = 4 if bits == 4 else 8
    scheme = Scheme(f"int{bits}", of_codes, sizes[".scales"], None, sizes.get(".block_scales"), "group")
    return QuireWeight(name=name, shape=(outputs, inputs), parts=parts, scheme=scheme)


def kind_of(scheme: Scheme | None) -> Mapping[str, Collection[str]]:
    """The parts that a weight in a scheme is stored in; None: whole."""
    if scheme is None:
        return {"": ()}
    return FOUR if scheme.bits == 4 else EIGHT if scheme.block is None else SIX


def parts_of(weight: CodedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a weight, by their parts."""
    kind = kind_of(weight.scheme)
    (codes, *rest), found = kind, weight.codes
    if kind is SIX:
        found = _packed(found)
    tensors: dict[str, Any] = {codes: found} | {part: getattr(weight, part.removeprefix(".")) for part in rest}
    return {part: tensor.contiguous() for part, tensor in tensors.items()}


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 6 bits, int8 [out, in] from -32 to 31, as uint8 [out, in * 3 / 4]."""
    a, b, c, d = (codes + RAISED).view(torch.uint8).view(len(codes), -1, 4).unbind(-1)
    return torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], dim=-1).flatten(1)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """What `_packed` packed."""
    a, b, c = packed.view(len(packed), -1, 3).unbind(-1)
    codes = torch.stack([a & 63, (a >> 6 | b << 2) & 63, (b >> 4 | c << 4) & 63, c >> 2], dim=-1)
    return codes.flatten(1).view(torch.int8) - RAISED
