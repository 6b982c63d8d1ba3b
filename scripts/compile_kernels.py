"""Compiles the C++ kernels by hand, in place of installing Quire: with sanitizers, for another kind of machine, or
to be told of every warning (all are errors here).

    python scripts/compile_kernels.py build/kernels                          # as `make` does
    python scripts/compile_kernels.py build/kernels --isa avx2 -- -g         # one instruction set, a flag more
    python scripts/compile_kernels.py build/arm --compiler aarch64-linux-gnu-g++ --machine aarch64
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str]) -> int:
    """Compile; 1 if anything failed, with the compiler's messages on standard error."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="Compile the C++ kernels into a folder.", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where the libraries go")
    parser.add_argument("--compiler", default="g++", help="name of the C++ compiler (default: g++)")
    parser.add_argument("--machine", default=platform.machine(), help="kind of machine (default: this one's)")
    parser.add_argument("--isa", action="append", help="instruction set; may be repeated (default: all)")
    args = parser.parse_args(arguments[:end])
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).replace(platform.machine(), args.machine)
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
    known = setup["INSTRUCTION_SETS"].get(args.machine, {})
    names = args.isa or list(known)
    if not names or not known.keys() >= set(names):
        parser.error(f"no kernels for {', '.join(names) or args.machine}; known: {', '.join(known) or 'none'}")
    args.folder.mkdir(parents=True, exist_ok=True)
    more = [*setup["FLAGS"], "-Werror", "-fPIC", *arguments[end + 1 :]]
    sources = sorted((ROOT / setup["SOURCES"]).glob("*.cpp"))
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {name: [Path(temporary) / f"{name}.{source.stem}.o" for source in sources] for name in names}
        compiles = [
            [args.compiler, *more, *known[name], "-c", str(source), "-o", str(out)]
            for name in names
            for source, out in zip(sources, objects[name], strict=True)
        ]
        links = [
            [args.compiler, *more, "-shared", *map(str, objects[name]), "-o", str(args.folder / f"lib_{name}{suffix}")]
            for name in names
        ]
        return 0 if all(pool.map(_succeeds, compiles)) and all(pool.map(_succeeds, links)) else 1


def _succeeds(command: list[str]) -> bool:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
