"""Everything that needs a GPU, in under nine minutes: `make gpu-check`, or `python -m benchmarks.gpu`.

Runs from the repository's root on any machine with a GPU, torch and Triton; it needs no network, no compiler and no
installed Quire. Packages that are missing are taken from build/gpu-bundle (`make gpu-bundle`). Writes results-gpu.json
and gpu.md into --out. Exit code 1: a parity or determinism check failed, or a section with such checks did not end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import KINDS, LEAST_SECONDS, TOTAL_SECONDS, Section, chosen
from benchmarks.gpu.records import append, read
from benchmarks.gpu.table import BEGIN, END, report, with_section

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "build" / "gpu-bundle"
CHECKS = ("parity", "determinism")
GRACE_SECONDS = 3.0
"""What a process may take beyond its time before it is ended."""

FIND_GPU = "import torch, triton; torch.zeros(1, device='cuda')"
IMPORTS = "import quire.llm, quire.engine.engine, quire.models.random_checkpoint"
"""What must run before anything else can."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    began = time.monotonic()
    try:
        steps = chosen(args.only.split(",") if args.only else None, args.quick)
    except ValueError as error:
        return _refuse(str(error))
    with tempfile.TemporaryDirectory(prefix="quire-gpu-check-") as scratch:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
        if args.rehearse:
            environment["TRITON_INTERPRET"] = "1"
        elif not runs(FIND_GPU, environment):
            return _refuse(
                f"the torch of {sys.executable} finds no GPU (PYTHON=... names another Python); "
                "--rehearse tries the harness on a CPU, with tiny shapes"
            )
        if not (
            runs(IMPORTS, environment) or (install(Path(scratch) / "site", environment) and runs(IMPORTS, environment))
        ):
            return _refuse(
                "packages beside torch and Triton are missing: run `make gpu-bundle`, and copy build/gpu-bundle too "
                f"(its wheels are for Python 3.12 on x86-64; this is Python {platform.python_version()})"
            )
        if args.rehearse:  # one process: the point is the lines that run, not how
            steps = [[section for step in steps for section in step]]
        run = Run(Path(scratch), environment, args.rehearse, began + args.seconds)
        records = run.everything(steps)
    text = report(records, date.today().isoformat())
    print(f"\n{text}\n\n{time.monotonic() - began:.0f} s in all", flush=True)
    if args.out:
        write(args.out, records, text)
    return int(failed(records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for results-gpu.json and gpu.md (default: print only)")
    parser.add_argument("--only", metavar="KIND,...", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--quick", action="store_true", help="the checks, and A and B at 0.6B: about four minutes")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU; figures mean nothing")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help=f"for all (default {TOTAL_SECONDS:g})")
    return parser


def _refuse(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2


def runs(program: str, environment: dict[str, str]) -> bool:
    """Whether a program runs to its end; the last line of what it says otherwise is printed."""
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
    return not done.returncode


def install(site: Path, environment: dict[str, str]) -> bool:
    """Install the bundle into a folder, and have it found there; false where there is none, or none that fits."""
    wheels = sorted(BUNDLE.glob("*.whl"))
    if wheels:
        options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--root-user-action=ignore"]
        if subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", site, *wheels]).returncode:
            return False
        environment["PYTHONPATH"] = os.pathsep.join([str(site), environment["PYTHONPATH"]])
    return bool(wheels)


@dataclass
class Run:
    """Starts the sections' processes, and ends them when their time is out.

    Attributes:
        scratch: a folder of its own.
        deadline: of everything, on the clock of `time.monotonic`.
    """

    scratch: Path
    environment: dict[str, str]
    rehearse: bool
    deadline: float

    def everything(self, steps: Sequence[Sequence[Section]]) -> list[dict[str, Any]]:
        """Run step after step; all that was recorded."""
        for step in steps:
            names = [[section.name for section in step]] if self.rehearse else [[section.name] for section in step]
            left = self.deadline - time.monotonic()
            seconds = left if self.rehearse else min(left, max(section.seconds for section in step))
            if seconds < LEAST_SECONDS:
                for section in step:
                    self._record(section.name, "skipped", 0.0, "the time for everything was over")
                continue
            print(f"{', '.join(section.name for section in step)}: at most {seconds:.0f} s", flush=True)
            self.side_by_side(names, seconds)
        return self.records()

    @property
    def file(self) -> Path:
        return self.scratch / "records.jsonl"

    def records(self) -> list[dict[str, Any]]:
        """All so far."""
        return read(self.file)

    def side_by_side(self, processes: Sequence[Sequence[str]], seconds: float) -> None:
        """Run each list of sections in a process of its own, all at once."""
        began = time.monotonic()
        threads = max(1, (os.cpu_count() or 1) // len(processes))  # the references compute on the CPU
        environment = self.environment | {"OMP_NUM_THREADS": str(threads)}
        started = []
        for index, names in enumerate(processes):
            log = self.scratch / f"log-{index}"
            started.append((names, start(self.command(names, seconds), environment, log), log))
        try:
            for names, process, log in started:
                lost = "crashed"
                try:
                    process.wait(max(0.0, began + seconds + GRACE_SECONDS - time.monotonic()))
                except subprocess.TimeoutExpired:
                    lost = "out of time"
                end(process)  # with whatever it has started
                self._report(names, lost, time.monotonic() - began, log.read_text("utf-8", "replace")[-4000:])
        finally:  # Ctrl-C does not reach them
            for _, process, _ in started:
                if process.returncode is None:
                    end(process)

    def command(self, names: Sequence[str], seconds: float) -> list[str]:
        """That of a process."""
        command = [sys.executable, "-m", "benchmarks.gpu.worker", *names, "--records", str(self.file)]
        return [*command, "--seconds", str(seconds), *(["--rehearse"] if self.rehearse else [])]

    def _report(self, names: Sequence[str], lost: str, seconds: float, log: str) -> None:
        """Print how the sections ended; record it for those that could not do it themselves."""
        ended = {record["section"]: record for record in self.records() if record["kind"] == "section"}
        for name in names:
            if name not in ended:
                ended[name] = self._record(name, lost, seconds, log)
            status = ended[name]["status"]
            print(f"    {name}: {status}, {ended[name]['seconds']:.0f} s", flush=True)
            if status != "done":
                print(ended[name]["tail"], flush=True)

    def _record(self, name: str, status: str, seconds: float, tail: str) -> dict[str, Any]:
        record = {"kind": "section", "section": name, "status": status, "seconds": round(seconds, 1), "tail": tail}
        append(self.file, record)
        return record


def start(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that leads a session of its own, and writes what it prints into a file."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all that it has started there."""
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failed(records: Sequence[dict[str, Any]]) -> bool:
    """Whether a check failed, or could not be done."""
    wrong = (record for record in records if record["kind"] == "check" and not record["ok"])
    ended = (record for record in records if record["kind"] == "section" and record["section"].startswith(CHECKS))
    return any(wrong) or any(record["status"] != "done" for record in ended)


def write(folder: Path, records: Sequence[dict[str, Any]], text: str) -> None:
    """results-gpu.json, and the section of gpu.md: between its markers where the file is there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results-gpu.json").write_text(json.dumps(records, indent=1) + "\n", "utf-8")
    page = folder / "gpu.md"
    before = page.read_text("utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    page.write_text(with_section(before, text), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
