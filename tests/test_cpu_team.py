"""The team of threads that the C++ kernels' loops share: tests/cpp/team_test.cpp, also under ThreadSanitizer."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from quire.ops import self_test
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels

HERE = Path(__file__).parent
SOURCES = (HERE / "cpp" / "team_test.cpp", HERE.parent / "src" / "quire" / "ops" / "cpu" / "src" / "team.cpp")
TESTS = re.findall(r'\{"(\w+)", \1\}', SOURCES[0].read_text())
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # `make sanitize` sets it


@functools.cache
def program(sanitizer: str) -> tuple[str, ...]:
    """The command that runs it. Skips where this machine cannot run what the sanitizer makes."""
    binary = f"{tempfile.mkdtemp(prefix='quire-team-')}/team-{sanitizer}"
    options = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Wno-psabi", f"-I{SOURCES[1].parent}"]
    if sanitizer != "plain":
        options.append(f"-fsanitize={sanitizer}")
    made = subprocess.run(
        ["g++", *options, *map(str, SOURCES), "-o", binary], capture_output=True, text=True, env=ENVIRONMENT
    )
    if made.returncode and "cannot find" in made.stderr:
        pytest.skip(f"g++ comes without the library for -fsanitize={sanitizer}")
    assert made.returncode == 0, made.stderr
    # The sanitizer's memory map does not suit the widest randomization of addresses that newer kernels have.
    for command in ([binary], ["setarch", "-R", binary]):
        if shutil.which(command[0]) and subprocess.run(command, capture_output=True, env=ENVIRONMENT).returncode == 0:
            return tuple(command)
    pytest.skip(f"what g++ makes with -fsanitize={sanitizer} does not run here")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["plain", "thread"])
@pytest.mark.parametrize("name", TESTS)
def test_the_team_keeps_its_promises(name: str, sanitizer: str) -> None:
    if sanitizer == "thread" and name == "forks":
        pytest.skip("ThreadSanitizer does not follow threads that are started in a fork")
    done = subprocess.run([*program(sanitizer), name], capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_tests_are_found() -> None:
    assert len(TESTS) >= 9


@pytest.mark.parametrize("isa", library.usable())
def test_no_kernel_depends_on_the_order_in_which_items_are_computed(isa: str) -> None:
    kernels = CpuKernels(isa)
    try:
        for seed in (1_000_003, 98_765_431):
            kernels._lib.disorder(seed)
            assert [check for check in self_test.run(kernels) if not check.passed] == []
    finally:
        kernels._lib.disorder(0)
