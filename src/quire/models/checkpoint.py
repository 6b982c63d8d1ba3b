"""A checkpoint: a Hugging Face folder of `config.json`, `generation_config.json` and `*.safetensors`, or a folder that
`gguf.folder` has made, with `*.gguf`.

No code in it is ever run, and no tensor is read before its header has been checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import blake3
import torch

from quire.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptSafetensorsError,
    MissingTensorError,
    ModelConfigError,
    NoSafetensorsError,
    UnexpectedTensorError,
)
from quire.layers.embedding import Table
from quire.models.fields import Fields, has_file
from quire.models.gguf.file import GgufTensor, read_gguf
from quire.models.gguf.folder import notes_of
from quire.models.gguf.parts import read_model, stored_files
from quire.models.gguf.tensors import GgufTensors
from quire.models.hub import resolve
from quire.models.identify import identify
from quire.models.safetensors_file import FLOAT_DTYPES, map_tensor
from quire.models.safetensors_header import TensorEntry, read_header
from quire.ops import StoredWeight

__all__ = ["Checkpoint", "choose_dtype", "content_hash", "resolve"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20
HASH_SAMPLES, HASH_SAMPLE_BYTES = 3, 4096
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Checkpoint:
    """A folder whose headers and configuration have been read; its tensors are mapped when asked for.

    Attributes:
        folder: its path.
        config: fields of config.json.
        generation: fields of generation_config.json; empty if the file is absent.
        entries: every tensor by name.
        notes: on how its weights are stored, for the user.
        quantization: "int8" or "int4" where Quire quantized its weights, which have the model's names then; else None.

    Raises:
        CheckpointError: one of its kinds, for whatever is wrong with the folder.
    """

    notes: tuple[str, ...] = ()
    quantization: str | None = None
    _gguf: GgufTensors | None = None

    def __init__(self, folder: Path) -> None:
        if not os.path.isdir(folder):
            raise CheckpointNotFoundError(f"no checkpoint: the folder {folder.absolute()} does not exist")
        self.folder = folder
        if not has_file(folder / "config.json"):
            raise ModelConfigError(
                identify(folder)
                or f"{folder} has no config.json, so its architecture is not known. Give the folder of a "
                "Hugging Face checkpoint."
            )
        self.config = Fields.read(folder / "config.json")
        self.generation = Fields.read(folder / "generation_config.json")
        if gguf := stored_files(folder):
            self._gguf = GgufTensors(read_model(gguf))
            self.entries, self.notes = self._gguf.entries, (*self._gguf.notes, *notes_of(folder))
        else:
            self.entries = _read_entries(folder)

    @property
    def types(self) -> dict[str, str]:
        """The type of each tensor as it is stored, by name."""
        if self._gguf is not None:
            return {name: form.name for name, form in self._gguf.types.items()}
        return {name: entry.dtype for name, entry in self.entries.items()}

    def tensor(self, name: str, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
        """A tensor as a view of its mapped file: pages are read when touched, and freed with the view."""
        if self._gguf is not None:
            return self._gguf.tensor(name)
        return map_tensor(self.entries[name], dtypes)

    def coded(self, name: str, rows: range | None = None) -> StoredWeight | None:
        """A tensor, or some of its rows, as it is stored, if that is in MXFP4, in fp8 or coded; otherwise None."""
        return of_rows(None if self._gguf is None else self._gguf.coded(name), rows)

    def table(self, name: str) -> Table | None:
        """A matrix whose rows are restored when they are read, if it is quantized and need not be restored whole."""
        return None if self._gguf is None else self._gguf.table(name)


def of_rows(weight: StoredWeight | None, rows: range | None) -> StoredWeight | None:
    """Some outputs of a weight; `rows`: None: all."""
    return weight if weight is None or rows is None else weight.outputs(rows)


def content_hash(folder: Path) -> str:
    """A hash of a checkpoint: its configuration, the header of each weight file, and samples of each tensor.

    A tensor of up to 12 KiB is hashed whole, such as a norm's weight; of a larger one its beginning, middle and end
    are, which training or quantizing anew changes. Hashing all of it would take seconds at every start.

    Raises:
        CheckpointError: a weight file is damaged or cannot be read.
    """
    hasher = blake3.blake3()
    for path in sorted(folder.glob("*.safetensors")):
        _hash_tensors(hasher, path, read_header(path).values())
    for path in stored_files(folder):
        _hash_tensors(hasher, path, (_as_entry(tensor) for tensor in read_gguf(path).tensors.values()))
    for file in (folder / "config.json", *sorted(folder.glob("*quant*_config.json"))):  # see `formats.choose`
        if has_file(file):
            hasher.update(file.read_bytes())
    return hasher.hexdigest(length=16)


def _hash_tensors(hasher: blake3.blake3, path: Path, entries: Iterable[TensorEntry]) -> None:
    hasher.update(path.name.encode())
    with path.open("rb") as file:
        for entry in sorted(entries, key=lambda entry: entry.start):
            hasher.update(f"|{entry.name}|{entry.dtype}|{entry.shape}|".encode())
            for index in range(HASH_SAMPLES):
                start = max(0, entry.num_bytes - HASH_SAMPLE_BYTES) * index // (HASH_SAMPLES - 1)
                hasher.update(os.pread(file.fileno(), min(HASH_SAMPLE_BYTES, entry.num_bytes), entry.start + start))


def _as_entry(tensor: GgufTensor) -> TensorEntry:
    return TensorEntry(tensor.name, tensor.type.name, tensor.shape, tensor.file, tensor.start, tensor.num_bytes)


def choose_dtype(checkpoint: Checkpoint, requested: str, on_cpu: bool = True) -> tuple[torch.dtype, str | None]:
    """The data type to compute in, and a note for the user if it is an unexpected or slow one.

    "auto" is the type in config.json (`dtype`, formerly `torch_dtype`), or that of the largest tensor. If it is fp16,
    fp32 is used on a CPU, which represents the weights exactly, since fp16 products are about ten times slower than
    bf16 ones there.

    Raises:
        ModelConfigError: the type in config.json is unknown.
        CheckpointError: `requested` is not a data type.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise CheckpointError(f"dtype must be auto, {', '.join(DTYPES)}; found {requested!r}")
        slow = "fp16 products are slow on a CPU; bfloat16 or float32 is faster"
        return DTYPES[requested], slow if on_cpu and requested == "float16" else None
    fields = checkpoint.config
    field = "dtype" if "dtype" in fields else "torch_dtype"
    if field in fields:
        dtype = DTYPES[fields.choice(field, DTYPES)]
    else:
        floats = [entry for entry in checkpoint.entries.values() if entry.dtype in FLOAT_DTYPES]
        largest = max(floats, key=lambda entry: entry.num_bytes, default=None)
        dtype = torch.float32 if largest is None else FLOAT_DTYPES[largest.dtype]
    halves = sum(kind == "F16" and len(checkpoint.entries[name].shape) > 1 for name, kind in checkpoint.types.items())
    if dtype == torch.bfloat16 and halves:
        return dtype, (
            f"{halves} of the checkpoint's weights are fp16, and are rounded to bfloat16 (dtype='float32' holds them "
            "exactly)"
        )
    if dtype == torch.float16 and on_cpu:
        return torch.float32, (
            "the checkpoint is fp16; computing in float32, which holds its weights exactly and is faster "
            "on a CPU, with twice the memory (dtype='float16' keeps fp16, 'bfloat16' is fastest but rounds)"
        )
    return dtype, None


def _read_entries(folder: Path) -> dict[str, TensorEntry]:
    files, promised = _weight_files(folder)
    entries: dict[str, TensorEntry] = {}
    for file in files:
        try:
            header = read_header(file)
        except CorruptSafetensorsError as error:
            if pointer := identify(folder):
                raise CorruptSafetensorsError(pointer) from error
            raise
        for name, entry in header.items():
            if name in entries:
                raise UnexpectedTensorError(
                    f"tensor {name!r} stands in {entries[name].file.name} and again in {file.name} of "
                    f"{folder}; remove the file that does not belong to this checkpoint"
                )
            entries[name] = entry
    broken = [name for name, file in promised.items() if name not in entries or entries[name].file.name != file]
    if broken:
        raise MissingTensorError(
            f"{folder / INDEX_FILE} says that {promised[broken[0]]} holds {broken[0]!r}, which it does not "
            f"({len(broken)} such tensors). Download the checkpoint again."
        )
    return entries


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The single file, or else those in the index, or else all in the folder, as in transformers.

    Also returns the index, the name of each tensor's file; empty if there is none.
    """
    if has_file(folder / SINGLE_FILE, CheckpointError):
        return [folder / SINGLE_FILE], {}
    if has_file(folder / INDEX_FILE, CheckpointError):
        promised = _read_index(folder / INDEX_FILE)
        return [folder / name for name in sorted(set(promised.values()))], promised
    files = sorted(file for file in folder.glob("*.safetensors") if has_file(file, CheckpointError))
    if not files:
        raise NoSafetensorsError(
            identify(folder)
            or f"{folder} holds no *.safetensors file, and Quire reads no other format. Convert the "
            "checkpoint with transformers' save_pretrained, or choose one that has such files."
        )
    return files, {}


def _read_index(index: Path) -> dict[str, str]:
    """The name of each tensor's file. All are checked to be files in the index's own folder."""
    weight_map = Fields.read(index, max_bytes=MAX_INDEX_BYTES).mapping("weight_map")
    for tensor, name in weight_map.items():
        if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {tensor!r} in {name!r}; it must be the plain name of a *.safetensors file "
                "in the same folder"
            )
        if not os.path.isfile(index.parent / name):
            missing = sum(file == name for file in weight_map.values())
            raise MissingTensorError(
                f"{index} names {name}, which is not in the folder, so {missing} tensors are missing, "
                f"such as {tensor!r}. Download the checkpoint again."
            )
    return weight_map
