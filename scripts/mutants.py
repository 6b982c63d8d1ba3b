"""Mutation testing of `core`: changes its code in small ways, one at a time, and sees whether its tests notice.

    python scripts/mutants.py                  # every eighth of the library's mutants, and all written by hand
    python scripts/mutants.py --every 1        # all of them
    python scripts/mutants.py --only scheduler.Scheduler._victim --every 1

Mutants are made by mutmut's operators, and by two of our own: a call or `del` that stands alone is left out, and the
condition of an `if` is always, or never, true. Those of tests/core/mutants.toml are written by hand. Each runs in a
process of its own, which stops at the first test that fails; the sample, and what kills a mutant, depend on no clock
(one that no longer ends is stopped after so many seconds of its own work). Survivors are printed as diffs, unless
tests/core/mutants.toml explains them. Needs requirements/mutants.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import resource
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import islice, zip_longest
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "src" / "quire" / "core"
LIST = ROOT / "tests" / "core" / "mutants.toml"

TESTS = sorted(
    (str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "core").glob("test_*.py")),
    key=lambda name: ("properties" in name, name),
)
"""Those that take longest come last."""

UNUSED = ("cacheprovider", "unraisableexception", "xdist", "asyncio", "anyio")
OPTIONS = ["-x", "-q", "--no-header", "--tb=line", "--assert=plain", "--disable-warnings"]
OPTIONS += ["--hypothesis-profile=mutants", *(f"-pno:{plugin}" for plugin in UNUSED)]
"""Nothing that takes time, or a place on the disk."""

LOADED_ONCE = ("torch", "hypothesis.stateful", "_hypothesis_pytestplugin", "pytest_timeout", "msgspec", "blake3", "pdb")
"""By the process that all others are forked from: whatever takes time and knows nothing of Quire."""

LONG = {"tests/core/test_self_tuning.py": "draft_length"}
"""Those that are run for no module but one."""

ELSEWHERE = {"sampling_params": ["tests/test_sampling_params.py"]}
"""Modules whose tests are not in tests/core."""

LEFT_OUT = ("invariants", "step", "__init__")
"""Modules: what only checks, and what only holds data."""

LEAST = 92.0
"""Percent that must be killed or explained."""

LONGER, MEMORY = 4, 6 * 2**30
"""A mutant that takes so many times the processor's time that the tests take without one, or so many bytes, is killed:
it ran away."""

UNTOUCHED = (cst.Annotation, cst.Raise, cst.Decorator, cst.FunctionDef)
"""What is not changed: types, the words of errors, and what stands inside is visited by its own name."""


STRICT = re.compile(r",\s*(strict=\w+\s*)?\)")
"""The end of a call, where `strict` of `zip` may stand: it only checks, and is not changed."""


@dataclass(frozen=True)
class Mutant:
    """A module with one change; `function` is "scheduler.Scheduler._victim"."""

    function: str
    source: str
    mutated: str

    @property
    def module(self) -> str:
        return re.split("[.:]", self.function)[0]

    @property
    def change(self) -> tuple[str, str]:
        """The lines that differ, old and new, without their places: what stays the same when code around it moves."""
        _, old, new = self._lines()
        return " ".join(line.strip() for line in old), " ".join(line.strip() for line in new)

    @property
    def diff(self) -> str:
        """The same to be read, with the file and the line."""
        line, old, new = self._lines()
        shown = [
            f"  src/quire/core/{self.module}.py:{line}",
            *(f"  -{text}" for text in old),
            *(f"  +{text}" for text in new),
        ]
        return "\n".join(shown)

    def _lines(self) -> tuple[int, list[str], list[str]]:
        """(number of the first line, the lines before, and after): all that is equal at both ends is left out."""
        old, new = self.source.splitlines(), self.mutated.splitlines()
        first = next(i for i, (a, b) in enumerate(zip_longest(old, new, fillvalue="")) if a.strip() != b.strip())
        shorter = min(len(old), len(new)) - first
        equal = next((i for i in range(shorter) if old[-1 - i].strip() != new[-1 - i].strip()), shorter)
        return first + 1, old[first : len(old) - equal], new[first : len(new) - equal]

    def sampled(self, every: int) -> bool:
        """Whether it is in the sample of one in so many, which does not change when other code does."""
        digest = hashlib.sha256("\n".join((self.function, *self.change)).encode()).digest()
        return int.from_bytes(digest[:8], "little") % every == 0


# -- making mutants ------------------------------------------------------------------------------------------


def make_mutants(module: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its text."""
    source = (CORE / f"{module}.py").read_text()
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    spans = wrapper.resolve(ByteSpanPositionProvider)
    data, seen = source.encode(), set()
    for name, body in functions(wrapper.module, module):
        for node in nodes(body):
            for old, changed in changes(node):
                span = spans[old]
                text = wrapper.module.code_for_node(changed).strip().encode()
                mutated = (data[: span.start] + text + data[span.start + span.length :]).decode()
                if mutated not in seen and STRICT.sub(")", mutated) != STRICT.sub(")", source):
                    seen.add(mutated)
                    yield Mutant(name, source, mutated)


def functions(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The bodies of all functions, methods and properties with their dotted names."""
    for child in node.children:
        inner = f"{name}.{child.name.value}" if isinstance(child, cst.FunctionDef | cst.ClassDef) else name
        if isinstance(child, cst.FunctionDef):
            yield inner, child.body
        yield from functions(child, inner)


def nodes(node: Any) -> Iterator[Any]:
    """A piece of code and all that it is made of."""
    yield node
    for child in node.children:
        if not isinstance(child, UNTOUCHED):
            yield from nodes(child)


def changes(node: Any) -> Iterator[tuple[Any, Any]]:
    """What may stand in place of a piece of code, or of a part of it: (old, new)."""
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            most = 1 if kind is cst.BaseString else None  # not in other cases, too: "UTF-8" is "utf-8"
            yield from ((node, changed) for changed in islice(operator(node), most))
    if isinstance(node, cst.Del) or (isinstance(node, cst.Expr) and isinstance(node.value, cst.Call)):
        yield node, cst.Pass()
    if isinstance(node, cst.If):
        yield from ((node.test, cst.Name(constant)) for constant in ("True", "False"))


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def make_by_hand(entries: Iterable[dict[str, str]]) -> list[Mutant]:
    """The mutants of the list; one whose code is not there, or there twice, is reported, and not made."""
    made = []
    for entry in entries:
        file = CORE / f"{entry['module']}.py"
        source = file.read_text() if file.exists() else ""
        places = source.count(entry["old"])
        if places == 1:
            name = f"{entry['module']}: {entry['what']}"
            made.append(Mutant(name, source, source.replace(entry["old"], entry["new"])))
        else:
            print(f"LOST: {entry['module']}, {entry['what']!r}: its `old` is there {places} times; adapt {LIST.name}")
    return made


# -- running them --------------------------------------------------------------------------------------------


class MutatedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from another text than its file's."""

    source = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class MutatedFinder:
    """Finds one module mutated."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = f"quire.core.{mutant.module}"
        self._mutant = mutant

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        file = str(CORE / f"{name.rpartition('.')[2]}.py")
        loader = MutatedLoader(name, file)
        loader.source = self._mutant.mutated
        return importlib.util.spec_from_file_location(name, file, loader=loader)


def run_tests(mutant: Mutant | None) -> int:
    """Pytest's exit status with this mutant in place; for a process that does nothing else."""
    import pytest

    module = mutant.module if mutant else ""
    if mutant:
        sys.meta_path.insert(0, MutatedFinder(mutant))
    own = f"tests/core/test_{module}.py"
    chosen = [name for name in TESTS if LONG.get(name, module) == module or not mutant]
    tests = ELSEWHERE.get(module) or sorted(chosen, key=lambda name: name != own)
    return int(pytest.main([*OPTIONS, *tests]))


def start(mutant: Mutant | None, seconds: int = 0) -> int:
    """A process that runs the tests with a mutant for so long; what it prints is lost unless it runs without one."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if mutant:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        status = run_tests(mutant)
    finally:
        os._exit(status)


def run_all(mutants: list[Mutant], workers: int, seconds: int, report: Callable[[int, Mutant, bool], None]) -> None:
    """Run the tests for each mutant, so many at once; `report` gets (how many are done, which, whether it survived)."""
    waiting, done = list(reversed(mutants)), 0
    running: dict[int, Mutant] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            running[start(mutant, seconds)] = mutant
        child, status = os.wait()
        done += 1
        report(done, running.pop(child), status == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing of quire.core.")
    parser.add_argument("--every", type=int, default=8, help="run one in so many of the library's mutants (8)")
    parser.add_argument("--only", default="", help="run those of functions whose dotted name begins so")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    known = tomllib.loads(LIST.read_text())
    listed = make_by_hand(known.get("by_hand", []))
    made = [
        mutant for file in sorted(CORE.glob("*.py")) if file.stem not in LEFT_OUT for mutant in make_mutants(file.stem)
    ]
    mutants = [
        mutant
        for mutant in [*listed, *(each for each in made if each.sampled(arguments.every))]
        if mutant.function.startswith(arguments.only) and compiles(mutant.mutated)
    ]
    print(f"{len(mutants)} mutants, of {len(made)} that mutmut's operators make and {len(listed)} by hand")
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.function}\n{mutant.diff}")
        return
    sys.exit(test(mutants, known.get("explained", []), arguments.workers))


def test(mutants: list[Mutant], explanations: list[dict[str, str]], workers: int) -> int:
    """Run them all and print what came of it; the exit status."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    for name in LOADED_ONCE:
        importlib.import_module(name)
    _, status, used = os.wait4(start(None), 0)
    if status:
        print("the tests fail without a mutant: mend them first", file=sys.stderr)
        return 1
    seconds = 5 + int(LONGER * (used.ru_utime + used.ru_stime))
    explained = {(entry["function"], entry["old"], entry["new"]): entry["why"] for entry in explanations}
    begin, table = time.monotonic(), Counter[tuple[str, str]]()

    def report(done: int, mutant: Mutant, passed: bool) -> None:
        outcome = "killed"
        if passed:
            outcome = "explained" if (mutant.function, *mutant.change) in explained else "survived"
            if outcome == "survived":
                print(f"\n{mutant.function}\n{mutant.diff}\n", flush=True)
        table[mutant.module, outcome] += 1
        if done % 25 == 0 or done == len(mutants):
            spent = time.monotonic() - begin
            left = spent / done * (len(mutants) - done)
            survived = sum(count for (_, outcome), count in table.items() if outcome == "survived")
            print(f"  {done}/{len(mutants)}, {survived} survived, {left / 60:.0f} min left", flush=True)

    run_all(mutants, workers, seconds, report)
    return 0 if print_table(table) >= LEAST else 1


def print_table(table: Counter[tuple[str, str]]) -> float:
    """The outcomes by module; returns how many percent were killed or are explained."""
    print(f"\n{'module':<18}{'mutants':>9}{'killed':>9}{'explained':>11}{'survived':>10}{'killed':>10}")
    for module in [*sorted({module for module, _ in table}), "all"]:
        counts = [
            sum(n for (of, outcome), n in table.items() if module in (of, "all") and outcome == each)
            for each in ("killed", "explained", "survived")
        ]
        total = sum(counts)
        print(f"{module:<18}{total:>9}{counts[0]:>9}{counts[1]:>11}{counts[2]:>10}{100 * counts[0] / total:>9.1f}%")
    return 100 * (counts[0] + counts[1]) / total


if __name__ == "__main__":
    main()
