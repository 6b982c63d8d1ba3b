"""Collects as wheels what a machine with a GPU, torch and Triton lacks to run Quire: `make gpu-bundle`.

    python scripts/gpu_bundle.py build/gpu-bundle

Which packages these are is found by running: an engine makes two tokens, and the sections of gpu-check are imported, in
a process that refuses to import what only the server and the command line need. What it has loaded then, less what
comes with torch, is downloaded for Python 3.12 on x86-64, in the versions that are installed here.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

SERVERS_OWN = (
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "uvloop",
    "httptools",
    "zmq",
    "prometheus_client",
    "httpx2",
)
COMMAND_LINES_OWN = ("rich", "huggingface_hub")
PRESENT = ("torch", "triton", "numpy")
"""What a machine with a GPU has, together with what these need."""

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES = 40 * 2**20
"""The bundle travels with the repository, 64 MiB in all."""

RUN = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError("refused: " + name)

sys.meta_path.insert(0, Refuse())
import quire.models.random_checkpoint
import quire.engine.engine
import quire.ops.triton.kernels
import quire.runner.model_runner
from quire.llm import LLM
from quire.core.sampling_params import SamplingParams
with LLM("demo", device="cpu", max_model_len=64, num_kv_blocks=16) as llm:
    llm.generate("def", SamplingParams(max_tokens=2, seed=0))
import importlib
import benchmarks.gpu.first_token
from benchmarks.gpu.worker import SECTIONS
for module in sorted({{section[0] for section in SECTIONS.values()}}):
    importlib.import_module("benchmarks.gpu." + module)
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the wheels go; what lies there is removed")
    folder = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    wanted = [f"{name}=={metadata.version(name)}" for name in sorted(lacking(engine_modules()))]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, "-d", str(folder), *wanted], check=True)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > MOST_BYTES:
        sys.exit(f"error: the bundle has {size:,} bytes; at most {MOST_BYTES:,} may travel")
    print(f"{folder}: {', '.join(wanted)}; {size / 2**20:.1f} MiB")


def engine_modules() -> set[str]:
    """Top-level modules that an engine loads until it has made two tokens, the server's packages being refused.

    Raises:
        CalledProcessError: the engine needs one of them after all.
    """
    code = RUN.format(refused=SERVERS_OWN + COMMAND_LINES_OWN)
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


def lacking(modules: set[str]) -> set[str]:
    """The distributions that hold these modules, less what comes with torch, Triton and numpy, and Quire itself."""
    owners = metadata.packages_distributions()
    found = {_normal(owner) for module in modules for owner in owners.get(module, ())}
    return found - {"quire"} - _with_needs(PRESENT)


def _with_needs(names: tuple[str, ...]) -> set[str]:
    """Distributions and all that they need, as far as it is installed here."""
    todo, found = list(names), set[str]()
    while todo:
        name = _normal(todo.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs if "extra ==" not in need]
    return found


def _normal(name: str) -> str:
    """As package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
