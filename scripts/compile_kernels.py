"""Compiles the C++ kernels, file by file on all cores: a library for each instruction set.

    python scripts/compile_kernels.py src/quire/ops/cpu                       # for all of this kind of machine
    python scripts/compile_kernels.py src/quire/ops/cpu --isa native          # for this processor
    python scripts/compile_kernels.py build/kernels --isa avx2 -- -g -Werror  # with options more
    python scripts/compile_kernels.py build/arm --compiler aarch64-linux-gnu-g++ --machine aarch64

It needs nothing that has to be installed: setup.py runs it, and make before there is an environment. A library that is
newer than what it is made of is left as it is, unless there are options more.
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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "src" / "quire" / "ops" / "cpu"
SOURCES = KERNELS / "src"
EVERYWHERE = ("simd.h", "team.h")
"""Headers that nearly all sources include. To read them, and the thousands of intrinsics, takes over a second."""
LONGEST = ("attention", "linear", "recurrent", "latent", "rows")
"""Sources that take longest to compile: they come first, so that all cores are busy to the end; then others by size."""
SETS = runpy.run_path(str(KERNELS / "instruction_sets.py"))
OPTIONS = (
    *("-std=c++17", "-O3", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
    "-Wno-unknown-warning-option",  # of Clang, which does not know all of these
)

Failures = dict[str, str]
"""What the compiler said, by the instruction set that it could not compile for."""


def main(arguments: Sequence[str]) -> int:
    """Compile; 1 if anything failed, with the compiler's messages on standard error."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="Compile the C++ kernels into a folder.", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where the libraries go")
    parser.add_argument("--compiler", default="g++", help="name of the C++ compiler (default: g++)")
    parser.add_argument("--machine", default=platform.machine(), help="kind of machine (default: this one's)")
    parser.add_argument(
        "--isa",
        action="append",
        help="instruction set, or native: this processor's best; may be repeated (default: all)",
    )
    parser.add_argument(
        "--optional", action="store_true", help="what cannot be compiled is told in a line, and no failure"
    )
    args = parser.parse_args(arguments[:end])
    known = SETS["for_machine"](args.machine)
    names = args.isa or known
    if names != ["native"] and (not names or not set(known) >= set(names)) and not args.optional:
        parser.error(f"no kernels for {', '.join(names) or args.machine}; known: {', '.join(known) or 'none'}")
    failures = compile_kernels(args.folder, names, args.compiler, arguments[end + 1 :], args.machine)
    if args.optional:
        _tell(failures, any(args.folder.glob("lib_*.so")))
        return 0
    print(*failures.values(), sep="\n", end="", file=sys.stderr)
    return 1 if failures else 0


def _tell(failures: Failures, any_there: bool) -> None:
    """A line for each reason why something was not compiled, and one for what follows from that."""
    reasons: dict[str, list[str]] = {}
    for name, said in failures.items():
        reason = next((line for line in said.splitlines() if "error" in line), said.strip())
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print(f"    The kernels for {', '.join(names)} were not compiled: {reason}", file=sys.stderr)
    if not any_there:
        print("    So Quire runs on its slower torch path: 'quire doctor' tells what to do.", file=sys.stderr)


def compile_kernels(
    folder: Path,
    names: Sequence[str],
    compiler: str = "g++",
    more: Sequence[str] = (),
    machine: str = platform.machine(),
) -> Failures:
    """Make a library of each of these sets; of `["native"]`, of the fastest that this processor has and that compiles.

    Libraries that are older than the sources, and not made again, are removed.

    Args:
        compiler: a g++ or clang++, or what takes their options.
        more: options more.
        machine: what the libraries are for.
    """
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).replace(platform.machine(), machine)
    folder.mkdir(parents=True, exist_ok=True)
    made_of = [*SOURCES.iterdir(), Path(SETS["__file__"]), Path(__file__)]
    newest = max(path.stat().st_mtime for path in made_of)
    paths = {name: folder / f"lib_{name}{suffix}" for name in SETS["INSTRUCTION_SETS"]}
    current = {name for name, path in paths.items() if path.exists() and path.stat().st_mtime >= newest and not more}
    for name in paths.keys() - current:
        paths[name].unlink(missing_ok=True)

    def compile_those(names: Iterable[str]) -> Failures:
        return _compile({name: paths[name] for name in names if name not in current}, compiler, more)

    if list(names) != ["native"]:
        return compile_those(names)
    failures: Failures = {}
    for name in _of_this_processor():
        if not (failed := compile_those([name])):
            break
        failures |= failed
    return failures


def _of_this_processor() -> list[str]:
    """The sets that this processor has, the fastest first."""
    flags = SETS["cpu_flags"]()
    return [name for name in SETS["for_machine"](platform.machine()) if SETS["INSTRUCTION_SETS"][name].needs <= flags]


def _compile(libraries: dict[str, Path], compiler: str, more: Sequence[str]) -> Failures:
    """Make these libraries, by instruction set."""
    longest = {name: i for i, name in enumerate(LONGEST)}
    sources = sorted(
        SOURCES.glob("*.cpp"), key=lambda path: (longest.get(path.stem, len(LONGEST)), -path.stat().st_size)
    )
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(_cores()) as pool:
        options_of = {name: (*OPTIONS, *_options_of(name, compiler), *more) for name in libraries}

        def read_headers(name: str) -> str | None:
            header = Path(temporary, f"{name}.h")
            header.write_text("".join(f'#include "{SOURCES / each}"\n' for each in EVERYWHERE))
            return _failure([compiler, *options_of[name], "-x", "c++-header", str(header), "-o", f"{header}.gch"])

        def compile_one(name: str, source: Path) -> str | None:
            # Nobody waits for the headers: what begins before they are read reads them itself.
            read = headers[name].done() and headers[name].result() is None
            options = (*options_of[name], *(("-include", f"{temporary}/{name}.h") if read else ()))
            return _failure([compiler, *options, "-c", str(source), "-o", f"{temporary}/{name}.{source.stem}.o"])

        def link(name: str) -> str | None:
            objects = [f"{temporary}/{name}.{source.stem}.o" for source in sources]
            unfinished = libraries[name].with_suffix(".unfinished")
            failure = _failure([compiler, *OPTIONS, *more, "-shared", *objects, "-o", str(unfinished)])
            if failure is None:
                unfinished.replace(libraries[name])
            return failure

        headers = {name: pool.submit(read_headers, name) for name in libraries}
        compiled = [(name, pool.submit(compile_one, name, source)) for name in libraries for source in sources]
        failures: Failures = {}
        for name, done in compiled:
            if said := done.result():
                failures.setdefault(name, said)
        linked = [(name, pool.submit(link, name)) for name in libraries if name not in failures]
        return failures | {name: said for name, done in linked if (said := done.result())}


def _options_of(name: str, compiler: str) -> tuple[str, ...]:
    """What a set is compiled with: all of its options, and those of its wishes that the compiler knows."""
    wanted, nothing = SETS["INSTRUCTION_SETS"][name], ("-Werror", "-S", "-x", "c++", os.devnull, "-o", os.devnull)
    return (*wanted.options, *(wish for wish in wanted.wishes if _failure([compiler, wish, *nothing]) is None))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _failure(command: list[str]) -> str | None:
    """What a command said that failed. What one says that did not, such as warnings, is passed on."""
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return f"{command[0]}: {error.strerror}\n"
    if done.returncode:
        return done.stderr or f"{command[0]} ended with {done.returncode}\n"
    print(done.stderr, end="", file=sys.stderr)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
