"""The files of a GGUF model: one, or several that `llama-gguf-split` has made of one, NAME-00001-of-00003.gguf."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import CheckpointNotFoundError, CorruptGgufError, MissingTensorError

if TYPE_CHECKING:  # it imports numpy, which most models do not need
    from quire.models.gguf.file import GgufHeader, GgufTensor

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
BESIDE = re.compile(r"(mmproj|mtp|.*[-._]mmproj)\b.*\.gguf", re.IGNORECASE)
"""Files beside a model's: a vision tower's, and layers that predict further tokens."""
COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
MAX_PARTS = 1 << 10
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Small files that may lie beside a model."""


def cache() -> Path:
    """The folder that holds the folders made here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire" / "gguf"


def has_model(folder: Path) -> bool:
    """Whether a folder's model is in GGUF files alone, and the folder is none of those made here."""
    names = os.listdir(folder)
    if folder.absolute().parent == cache() or any(name.endswith(".safetensors") for name in names):
        return False
    return any(name.endswith(SUFFIX) for name in names)


def parts_of(file: Path) -> list[Path]:
    """All files of the model that a file belongs to, in order.

    Raises:
        CorruptGgufError: its name says that it is a part of more parts than there can be.
        MissingTensorError: parts are missing.
    """
    found = PART.fullmatch(file.name)
    if found is None:
        return [file]
    number, count = int(found["number"]), int(found["count"])
    if not 0 < number <= count <= MAX_PARTS:
        raise CorruptGgufError(f"{file} is part {number} of {count} by its name; from 1 to {MAX_PARTS} are allowed")
    parts = [file.with_name(f"{found['stem']}-{each:05}-of-{count:05}{SUFFIX}") for each in range(1, count + 1)]
    missing = [part.name for part in parts if not os.path.isfile(part)]
    if missing:
        raise MissingTensorError(
            f"{file} is one of {count} parts, of which {len(missing)} are not in its folder, such as {missing[0]}. "
            "Download them, too."
        )
    return parts


def stored_files(folder: Path) -> list[Path]:
    """The GGUF files of a checkpoint's folder; none if it has safetensors, which are then read.

    Raises:
        CheckpointNotFoundError: there is more than one model.
    """
    return [] if any(folder.glob("*.safetensors")) else model_files(folder)[0]


def model_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files of the model in a folder, and the names of those beside it; both may be empty.

    Raises:
        CheckpointNotFoundError: there is more than one model.
    """
    names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    beside = names_beside(folder)
    models: dict[str, str] = {}
    for name in names:
        if name not in beside:
            found = PART.fullmatch(name)
            models.setdefault(f"{found['stem']} {found['count']}" if found else name, name)
    if len(models) > 1:
        raise CheckpointNotFoundError(
            f"{folder} has several GGUF models: {', '.join(models.values())}. Give the path of one of these files."
        )
    return [part for name in models.values() for part in parts_of(folder / name)], beside


def names_beside(folder: Path) -> list[str]:
    """The names of files that are not a model's own."""
    return sorted(name for name in os.listdir(folder) if BESIDE.fullmatch(name))


def read_model(files: Sequence[Path], tokenizer: bool = False) -> GgufHeader:
    """The metadata of the first file, and the tensors of all; `tokenizer`: see `read_gguf`.

    Raises:
        CorruptGgufError: a file's header is not valid, or the parts are not those of one model.
        CheckpointError: a file cannot be read.
    """
    from quire.models.gguf.file import GgufHeader, read_gguf

    headers = [read_gguf(file, tokenizer) for file in files]
    metadata = headers[0].metadata
    for index, header in enumerate(headers):
        count, number = header.metadata.get(COUNT, 1), header.metadata.get(NUMBER, 0)
        if count not in (0, len(files)) or number != index:
            raise CorruptGgufError(
                f"{header.file} says that it is part {number} (from 0) of {count}, but its name says part {index} of "
                f"{len(files)}. Give files of several parts their names back: NAME-00001-of-0000N{SUFFIX} and so on."
            )
    tensors = _joined(header.tensors.values() for header in headers)
    said = metadata.get(TENSORS, len(tensors))
    if said != len(tensors):
        raise CorruptGgufError(f"{files[0]} says that there are {said} tensors in all parts, which have {len(tensors)}")
    return GgufHeader(files[0], metadata, tensors)


def _joined(parts: Iterable[Iterable[GgufTensor]]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for tensor in (tensor for part in parts for tensor in part):
        if tensor.name in tensors:
            raise CorruptGgufError(f"{tensor.name!r} is in {tensors[tensor.name].file} and in {tensor.file}")
        tensors[tensor.name] = tensor
    return tensors
