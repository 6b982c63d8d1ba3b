"""Checks docs/reading.md: that it lists the files that run on the plain way from a prompt to its tokens, and no others,
and that the numbers of files and lines there and in README.md are right.

    python scripts/reading.py            # say what is wrong; the exit code is 1 if anything is
    python scripts/reading.py --write    # count again, and write the numbers

A file is on that way if one of its functions runs while `LLM("demo")` starts on a CPU, completes a prompt and closes,
or if it defines, without functions, what those files pass to one another (`DATA`). Importing is not running.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "quire"
READING, README = ROOT / "docs" / "reading.md", ROOT / "README.md"
DATA = ("core/step.py",)
"""Files on the way without a function that runs."""
TOLERANCE = 0.02
"""How far a written number of lines may be from the true one: the next edit should not make it wrong."""
ENTRY = re.compile(r"^- \[`(?P<name>[^`]+)`\]\(\.\./src/quire/(?P=name)\): [A-Z`].*?\.$", re.MULTILINE | re.DOTALL)
PLAIN = re.compile(r"(\d+) files and ([\d,]+) lines")
ALL = re.compile(r"([\d,]+) lines of Python")


def main() -> int:
    """1 if anything is wrong and was not written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the numbers")
    write = parser.parse_args().write
    listed = [match["name"] for match in ENTRY.finditer(READING.read_text("utf-8"))]
    wrong = _differences(listed, files_that_run() | set(DATA))
    counted = len(listed), _lines(listed), _lines(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
    for path in (READING, README):
        if write:
            _write(path, *counted)
        else:
            wrong += _wrong_numbers(path, *counted)
    print("\n".join(wrong) or f"docs/reading.md: {counted[0]} files and {counted[1]:,} lines of {counted[2]:,}")
    return 1 if wrong else 0


def files_that_run() -> set[str]:
    """The files of the package, by their path in it, of which a function runs on the plain way."""
    found: set[str] = set()
    prefix = f"{PACKAGE}/"

    def look(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(prefix) or file.removeprefix(prefix) in found:
            return
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and not _importing(frame):  # a function's, not a class's
            found.add(file.removeprefix(prefix))

    from quire import LLM, SamplingParams
    from quire.ops.cpu import library

    sys.setprofile(look)
    threading.setprofile(look)
    try:
        kernels = next(iter(library.usable()), "torch")  # by name, so that no self-test runs first
        with LLM("demo", device="cpu", threads=1, num_kv_blocks=64, cpu_kernels=kernels) as llm:
            llm.generate(["def fib(n):"], SamplingParams(max_tokens=8, temperature=0.8, seed=1))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported, so that what runs belongs to that."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def _lines(names: Any) -> int:
    return sum(len((PACKAGE / name).read_text("utf-8").splitlines()) for name in names if (PACKAGE / name).is_file())


def _differences(listed: list[str], running: set[str]) -> list[str]:
    """What to do about files, a line each."""
    twice = {name for name in listed if listed.count(name) > 1}
    return [
        *(f"docs/reading.md: {name} is listed twice; keep one" for name in sorted(twice)),
        *(
            f"docs/reading.md: {name} runs on the plain way and is not listed; add '- [`{name}`](../src/quire/{name}): "
            "What it does.' where a reader should meet it, or have it not run"
            for name in sorted(running - set(listed))
        ),
        *(
            f"docs/reading.md: {name} is listed and does not run on the plain way; take the line out"
            for name in sorted(set(listed) - running)
        ),
    ]


def _wrong_numbers(path: Path, files: int, plain: int, every: int) -> list[str]:
    """The numbers that a page should have otherwise, a line each."""
    text, again = path.read_text("utf-8"), "'python scripts/reading.py --write' counts again"
    found = [(int(files), int(lines.replace(",", ""))) for files, lines in PLAIN.findall(text)]
    wrong = [
        f"{path.name} says {said[0]} files and {said[1]:,} lines; there are {files} and {plain:,}: {again}"
        for said in found
        if said[0] != files or abs(said[1] - plain) > TOLERANCE * plain
    ]
    said_in_all = [int(number.replace(",", "")) for number in ALL.findall(text)]
    wrong += [
        f"{path.name} says {said:,} lines of Python; there are {every:,}: {again}"
        for said in said_in_all
        if abs(said - every) > TOLERANCE * every
    ]
    if not found or not said_in_all:
        wrong.append(f"{path.name} does not say 'N files and N lines' and 'N lines of Python'")
    return wrong


def _write(path: Path, files: int, plain: int, every: int) -> None:
    text = PLAIN.sub(f"{files} files and {round(plain, -1):,} lines", path.read_text("utf-8"))
    path.write_text(ALL.sub(f"{round(every, -2):,} lines of Python", text), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
