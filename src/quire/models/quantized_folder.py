"""A folder made by `quire quantize`: a checkpoint with packed linear weights, which are mapped and used as they are.

It has the base model's small files; `model.safetensors`, with two tensors for each packed product (`NAME.packed` and
`NAME.scales`, see `quire.ops.quantized`; weights that read the same input are one product) and all other tensors
unchanged; and a record of how it was made, `quire_quantization.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.errors import CheckpointError, ConfigError, CorruptSafetensorsError, MissingTensorError, TensorShapeError
from quire.models.checkpoint import Checkpoint, content_hash
from quire.models.fields import Fields, has_file
from quire.models.safetensors_file import PACKED_DTYPES
from quire.ops.quantized import GROUP_SIZES, SCHEMES, Quantization, QuantizedWeight, Scheme, layout
from quire.version import __version__

RECORD_FILE = "quire_quantization.json"
FORMAT_VERSION = 2
"""Version of the record and of the packed tensors; others are refused."""
PACKED, SCALES = ".packed", ".scales"


@dataclass(frozen=True, slots=True)
class Record:
    """How a quantized folder was made.

    Attributes:
        scheme, group: see `Quantization`.
        base: folder of the model that it was made from, which need not exist any more.
        base_hash: hash of that folder's content.
        content_hash: hash of this folder's content.
        quire_version: version of Quire that wrote it.
    """

    scheme: Scheme
    group: int | None
    base: str
    base_hash: str
    content_hash: str
    quire_version: str
    format_version: int = FORMAT_VERSION

    @property
    def how(self) -> Quantization:
        return Quantization(self.scheme, self.group)

    def write(self, folder: Path) -> None:
        """Write it into the folder."""
        (folder / RECORD_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Record | None:
    """The record of a folder; None if it has none.

    Raises:
        CheckpointError: its version is another one, or the content of the folder or its base model has changed since.
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
    scheme: Scheme = "int4" if fields.choice("scheme", SCHEMES) == "int4" else "int8"
    group = fields.integer("group") if scheme == "int4" else None
    if group not in (None, *GROUP_SIZES):
        raise fields.error("group", f"one of {', '.join(map(str, GROUP_SIZES))}")
    base, base_hash, own_hash, written_by = (
        fields.text(name) for name in ("base", "base_hash", "content_hash", "quire_version")
    )
    record = Record(scheme, group, base, base_hash, own_hash, written_by)
    _check_unchanged(folder, record)
    return record


def _check_unchanged(folder: Path, record: Record) -> None:
    if _hash_of(folder) != record.content_hash:
        raise CheckpointError(
            f"{folder}: config.json or the weights have changed since the folder was quantized, or the copy is not "
            f"complete. Copy it anew, or quantize {record.base} again."
        )
    base = Path(record.base)
    if _hash_of(base) not in (None, record.base_hash):
        raise CheckpointError(
            f"{folder} was quantized from {base}, which has changed since: its config.json or weights are others. "
            f"Quantize it again, or, to go on with the old weights, change 'base' in {folder / RECORD_FILE}."
        )


def _hash_of(folder: Path) -> str | None:
    """Hash of a folder's content, empty if it is damaged; None if it does not exist any more or cannot be read."""
    try:
        return content_hash(folder) if os.path.isfile(folder / "config.json") else None
    except CorruptSafetensorsError:
        return ""
    except (OSError, CheckpointError):
        return None


def choose_quantization(
    folder: Path, record: Record | None, scheme: Scheme | None, group: int | None
) -> Quantization | None:
    """The quantization of the model in a folder, given the folder's record and the options.

    Raises:
        ConfigError: they contradict each other.
    """
    if record is None:
        if group is not None and scheme != "int4":
            raise ConfigError(
                f"quantization_group_size={group} is for int4, but quantization={scheme or 'none'}; "
                "set quantization=int4, or leave the group size out"
            )
        return Quantization.of(scheme, group)
    if scheme not in (None, record.scheme) or group not in (None, record.group):
        asked = " ".join(str(part) for part in (scheme, group and f"in groups of {group}") if part)
        raise ConfigError(
            f"{folder} is quantized to {record.how}, but {asked} was asked for; leave out quantization and "
            f"quantization_group_size, or give the model that it was made from, {record.base}"
        )
    return record.how


def product_name(names: Sequence[str]) -> str:
    """The name of the product of several concatenated weights: "a.q_proj+k_proj" for "a.q_proj" and "a.k_proj"."""
    return "+".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])


def read_weight(
    checkpoint: Checkpoint, name: str, how: Quantization, out_features: int, in_features: int
) -> QuantizedWeight:
    """A product's weight as views of the mapped file, after checking types and shapes.

    Raises:
        MissingTensorError, TensorShapeError: a tensor is missing, or its type or shape is wrong.
    """
    wanted = layout(how, out_features, in_features)
    for suffix, dtype, shape in (
        (PACKED, wanted.packed_dtype, wanted.packed),
        (SCALES, wanted.scales_dtype, wanted.scales),
    ):
        entry = checkpoint.entries.get(name + suffix)
        if entry is None:
            raise MissingTensorError(
                f"{checkpoint.folder}: tensor {name + suffix!r} is missing. Is the copy complete? If it is, "
                "quantize the model again."
            )
        if PACKED_DTYPES.get(entry.dtype) != dtype or entry.shape != shape:
            raise TensorShapeError(
                f"{checkpoint.folder}: {name + suffix!r} is {entry.dtype} {list(entry.shape)}, and {how} of "
                f"{out_features} x {in_features} is {dtype} {list(shape)}. Quantize the model again."
            )
    packed, scales = (checkpoint.tensor(name + suffix, PACKED_DTYPES) for suffix in (PACKED, SCALES))
    return QuantizedWeight(how, packed, scales, in_features, out_features)
