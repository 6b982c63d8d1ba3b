"""A GGUF model as a checkpoint's folder: links to its files, and the small files that follow from its metadata.

So nothing else knows of the format but `checkpoint`, which reads the tensors. The folder is in the user's cache. Its
name has a hash of all that its content depends on: the files' headers, times and sizes, and the code that makes it. Of
several processes that make it at once, the first one's stays. A small file that lies beside the model, such as its
publisher's tokenizer.json, is linked in place of the one that would be made.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import blake3

from quire.errors import CheckpointError, CheckpointNotFoundError
from quire.models.gguf.families import describe
from quire.models.gguf.file import GgufHeader
from quire.models.gguf.metadata import Said
from quire.models.gguf.parts import COMPANIONS, SUFFIX, cache, model_files, names_beside, parts_of, read_model
from quire.models.gguf.tokenizer import ending_files, tokenizer_files

HEAD_BYTES = 1 << 20
"""Of each file, from the beginning, that are part of the hash."""
CODE = sorted(Path(__file__).parent.glob("*.py"))
NOTES, UNFINISHED = "gguf_notes.json", ".unfinished"
STEM = 60
"""Most letters of the model's name in that of its folder."""


def folder_of(path: Path) -> Path:
    """The checkpoint's folder of a GGUF file (any part of one), or of a folder with such files.

    Raises:
        CheckpointError: one of its kinds: the model is damaged or not supported, or the cache cannot be written.
    """
    folder = path.parent if os.path.isfile(path) else path
    files, beside = (parts_of(path), names_beside(folder)) if os.path.isfile(path) else model_files(path)
    if not files:
        raise CheckpointNotFoundError(
            f"{path} has GGUF files, but none of a language model: {', '.join(beside)}. Download the model's file, too."
        )
    files = [file.absolute() for file in files]
    companions = [file for name in COMPANIONS if os.path.isfile(file := files[0].parent / name)]
    try:
        folder = cache() / f"{files[0].stem[:STEM]}-{_key(files, companions, beside)}"
        if folder.is_dir():
            return folder
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    header = read_model(files, tokenizer=True)
    made = _made(header, companions, beside)
    try:
        return _write(folder, files, companions, made)
    except OSError as error:
        raise CheckpointError(
            f"{folder}, where files that follow from {files[0].name} are kept, cannot be written: "
            f"{error.strerror or error}. Set XDG_CACHE_HOME to a folder that can be."
        ) from error


def _key(files: Sequence[Path], companions: Sequence[Path], beside: Sequence[str]) -> str:
    hasher = blake3.blake3()
    for file in files:
        stat = file.stat()
        hasher.update(f"|{file}|{stat.st_size}|{stat.st_mtime_ns}|".encode())
        with file.open("rb") as stream:
            hasher.update(stream.read(HEAD_BYTES))
    for other in (*companions, *beside):
        hasher.update(f"|{other}|".encode())
    for file in CODE:
        hasher.update(file.read_bytes())
    return hasher.hexdigest(length=8)


def _made(header: GgufHeader, companions: Sequence[Path], beside: Sequence[str]) -> dict[str, str]:
    """The small files that follow from the metadata, by name, and the notes."""
    fields, _ = describe(Said(header))
    made, notes = {"config.json": json.dumps(fields, indent=2)}, []
    try:
        made |= ending_files(header.metadata)
        made |= tokenizer_files(header.metadata)
    except CheckpointError as error:
        notes.append(f"{error}; until then prompts are token ids")
    if companions:
        notes.append(
            f"{', '.join(file.name for file in companions)} beside {header.file.name}: used instead of its own"
        )
    if beside:
        notes.append(f"{', '.join(beside)} beside {header.file.name}: not used; requests with images are refused")
    return made | {NOTES: json.dumps(notes)}


def notes_of(folder: Path) -> tuple[str, ...]:
    """Messages for the user about how a folder was made."""
    try:
        notes = json.loads((folder / NOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return tuple(map(str, notes))


def _write(folder: Path, files: Sequence[Path], companions: Sequence[Path], made: dict[str, str]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=UNFINISHED, dir=folder.parent))
    try:
        for name, content in made.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_text(content, encoding="utf-8")
        for file in (*files, *companions):
            (partial / file.name).unlink(missing_ok=True)
            (partial / file.name).symlink_to(file)
        partial.chmod(0o755)
        partial.rename(folder)
        _remove_abandoned(folder.parent)
    except OSError:
        if not folder.is_dir():  # another process has made it meanwhile
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders whose model is no longer there, and what was not finished an hour ago."""
    for folder in parent.iterdir():
        with suppress(OSError):  # another process removes it, too
            unfinished = folder.suffix == UNFINISHED and time.time() - folder.stat().st_mtime > 3600
            if unfinished or any(not file.exists() for file in folder.glob(f"*{SUFFIX}")):
                shutil.rmtree(folder)
