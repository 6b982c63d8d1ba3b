"""What tests compile from C++: kept in build/tests until its sources, the options or the compiler change."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "tests"
KERNELS = ROOT / "src" / "quire" / "ops" / "cpu" / "src"
CPP = ROOT / "tests" / "cpp"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # `make sanitize` sets it


def compiled(name: str, sources: Sequence[Path], options: Sequence[str], compiler: str = "g++") -> Path:
    """The program or library that these are compiled to. Raises CalledProcessError with what the compiler says."""
    digest = hashlib.sha256(repr((_version(compiler), options, [path.name for path in sources])).encode())
    for path in [*sources, *sorted(KERNELS.glob("*.h")), *sorted(CPP.glob("*.h"))]:
        digest.update(path.read_bytes())
    made = FOLDER / f"{name}-{digest.hexdigest()[:16]}"
    if not made.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        for old in FOLDER.glob(f"{name}-*"):
            old.unlink(missing_ok=True)
        partial = FOLDER / f"{os.getpid()}.partial"
        subprocess.run(
            [compiler, *options, f"-I{KERNELS}", *map(str, sources), "-o", str(partial)],
            check=True,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
        )
        partial.rename(made)
    return made


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout
