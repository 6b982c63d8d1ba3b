"""Everything that needs a GPU, from one command that may be cut off: `make gpu-check`, or `python -m benchmarks.gpu`.

Runs from the repository's root on any machine with a GPU, torch and Triton, and gcc or clang, which Triton needs; it
needs no network and no installed Quire. Packages that are missing are taken from build/gpu-bundle (`make gpu-bundle`).
Results are appended to records.jsonl in --out as they come, and gpu.md is written anew after each step. The same
command again goes on where the last one was cut off: what is done is found in --out, or in build/gpu-check, which also
keeps compiled kernels.
Exit code 1: a check failed, or a section with checks did not end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import KINDS, TOTAL_SECONDS, Section, chosen
from benchmarks.gpu.records import ENDED, NAME, append, read, whole
from benchmarks.gpu.run import ROOT, Run
from benchmarks.gpu.table import BEGIN, END, report, with_section

BUNDLE = ROOT / "build" / "gpu-bundle"
KEPT = ROOT / "build" / "gpu-check"
"""Compiled kernels, and a copy of the records, for the next run on this machine."""
CHECKS = ("parity", "determinism", "unwaited", "accesses")

FIND_GPU = """
import torch, triton
torch.zeros(1, device="cuda")
triton.runtime.driver.active.utils  # compiled at its first use
print(torch.cuda.get_device_name())
"""
START_SECONDS = 150.0
"""In which a process has imported torch and found the device, or never will: a driver may hang."""
REHEARSED = "import torch, triton; print('no GPU')"
IMPORTS = "import quire.llm, quire.engine.engine, quire.models.random_checkpoint"
"""What must run before anything else can."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    began = time.monotonic()
    end_with_all()
    try:
        steps = chosen(args.only.split(",") if args.only else None, args.quick)
    except ValueError as error:
        return _refuse(str(error))
    out = args.out or KEPT
    with tempfile.TemporaryDirectory(prefix="quire-gpu-check-") as scratch:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
        if args.rehearse:
            environment["TRITON_INTERPRET"] = "1"
        else:
            environment["TRITON_CACHE_DIR"] = str(KEPT / "triton")
        device = output(REHEARSED if args.rehearse else FIND_GPU, environment)
        if device is None:
            return _refuse(
                f"the torch of {sys.executable} finds no GPU, or Triton cannot start, which needs gcc or clang and "
                "Python's headers (PYTHON=... names another Python); --rehearse tries the harness on a CPU, with tiny "
                "shapes"
            )
        if output(IMPORTS, environment, quiet=True) is None:
            install(Path(scratch) / "site", environment)
            if output(IMPORTS, environment) is None:
                return _refuse(
                    "packages beside torch and Triton are missing: run `make gpu-bundle`, and copy build/gpu-bundle "
                    f"too (its wheels are for Python 3.12 on x86-64; this is Python {platform.python_version()})"
                )
        if args.rehearse:
            steps = [[section for step in steps for section in step]]
        file = out / NAME
        begin(file, f"{device}; sources {sources()}", [file] if args.rehearse else [file, KEPT / NAME], args.fresh)
        run = Run(file, Path(scratch), environment, args.rehearse, began + args.seconds)
        run.ended = lambda: write(out, run.records(), keep=not args.rehearse)
        records = run.everything(steps)
    write(out, records, keep=not args.rehearse)
    print(f"\n{text_of(records)}\n\n{time.monotonic() - began:.0f} s in all; {file}", flush=True)
    if undone := steps_left(steps, records):
        print(f"{undone} sections are left: the same command again goes on with them", flush=True)
    return int(failed(records))


def end_with_all() -> None:
    """Whoever ends this process ends those of the sections, too, which lead sessions of their own."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for records.jsonl and gpu.md (default: build/gpu-check)")
    parser.add_argument("--only", metavar="KIND,...", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--quick", action="store_true", help="the checks, and A and B at 0.6B")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU; figures mean nothing")
    parser.add_argument("--fresh", action="store_true", help="run everything anew, whatever an earlier run has done")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help=f"for all (default {TOTAL_SECONDS:g})")
    return parser


def _refuse(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2


def output(program: str, environment: dict[str, str], quiet: bool = False) -> str | None:
    """What a program prints; None where it fails, and then the last line of what it says is printed, unless `quiet`."""
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"not done after {START_SECONDS:g} s: {program.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    if done.returncode:
        said = done.stderr.strip() or f"ended with {done.returncode}"
        if not quiet:
            print(said.splitlines()[-1], file=sys.stderr)
        return None
    return done.stdout.strip()


def install(site: Path, environment: dict[str, str]) -> None:
    """Unpack the bundle into a folder, and have it found there; nothing where there is none. It needs no pip."""
    wheels = sorted(BUNDLE.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    if wheels:
        environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(site)])


def sources() -> str:
    """A hash of all that is measured, and of what measures it."""
    digest = hashlib.sha256()
    for folder in (ROOT / "src", ROOT / "benchmarks" / "gpu"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def begin(file: Path, key: str, earlier: Sequence[Path], fresh: bool = False) -> None:
    """Make the file of records, with all that an earlier run of the same key has done.

    Args:
        key: of what is measured; results of another one are not of use.
        earlier: files that may have it, the first one that has any counts.
    """
    kept = next(filter(None, (whole(read(path), key) for path in earlier)), []) if not fresh else []
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as unfinished:
        for record in ({"kind": "run", "key": key}, *kept):
            append(unfinished, record)
    if done := [record["section"] for record in kept if record["kind"] == "section"]:
        print(f"done before: {', '.join(done)}", flush=True)


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A file to write in place of this one, which takes its name in the end: whoever is cut off leaves one of both."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    yield unfinished
    unfinished.replace(file)


def failed(records: Sequence[dict[str, Any]]) -> bool:
    """Whether a check failed, or could not be done."""
    wrong = (record for record in records if record["kind"] == "check" and not record["ok"])
    ended = (record for record in records if record["kind"] == "section" and record["section"].startswith(CHECKS))
    return any(wrong) or any(record["status"] != "done" for record in ended)


def steps_left(steps: Sequence[Sequence[Section]], records: Sequence[dict[str, Any]]) -> int:
    """How many sections would run if the same command was given again."""
    ended = {one["section"] for one in records if one["kind"] == "section" and one["status"] in ENDED}
    return sum(section.name not in ended for step in steps for section in step)


def text_of(records: Sequence[dict[str, Any]]) -> str:
    """The tables; where they cannot be made, why: nothing that was measured may be lost for it."""
    try:
        return report(records, date.today().isoformat())
    except Exception:
        return f"the tables cannot be made of these records:\n\n{traceback.format_exc()}"


def write(folder: Path, records: Sequence[dict[str, Any]], keep: bool) -> None:
    """The section of gpu.md: between its markers where the file is there; `keep`: also a copy of the records."""
    if keep and folder.resolve() != KEPT.resolve():
        KEPT.mkdir(parents=True, exist_ok=True)
        with whole_file(KEPT / NAME) as unfinished:
            shutil.copy(folder / NAME, unfinished)
    page = folder / "gpu.md"
    before = page.read_text("utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    page.write_text(with_section(before, text_of(records)), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
