"""Names for what tokens depend on: the checkpoint's content, and the kernels that compute with it."""

from __future__ import annotations

from pathlib import Path

import blake3

from quire.models.model import Model

SAMPLES, SAMPLE_BYTES = 64, 4096


def checkpoint(folder: Path) -> str:
    """A hash of a checkpoint: its configuration, and each weight file's length, head, tail and samples between.

    Hashing gigabytes whole would take seconds at every start. Files that differ between the samples alone are
    not told apart.
    """
    hasher = blake3.blake3()
    for path in [*sorted(folder.glob("*.safetensors")), folder / "config.json"]:
        if not path.is_file():
            continue
        size = path.stat().st_size
        hasher.update(f"{path.name}|{size}|".encode())
        with path.open("rb") as file:
            for index in range(SAMPLES + 1):
                file.seek(max(0, size - SAMPLE_BYTES) * index // SAMPLES)
                hasher.update(file.read(SAMPLE_BYTES))
    return hasher.hexdigest(length=16)


def system(folder: Path, model: Model) -> str:
    """One short name for all of it, as responses carry it."""
    text = f"{checkpoint(folder)}|{model.dtype}|{model.kernels.describe(model.dtype)}"
    return "qr-" + blake3.blake3(text.encode()).hexdigest(length=8)
