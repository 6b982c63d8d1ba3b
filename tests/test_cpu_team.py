"""The team of threads that the C++ kernels' loops share: tests/cpp/team_test.cpp, also under ThreadSanitizer."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.ops import self_test, threads
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.threads import cpu_quota
from tests.compiled import CPP, ENVIRONMENT, KERNELS, compiled

SOURCES = (CPP / "team_test.cpp", KERNELS / "team.cpp")
TESTS = re.findall(r'\{"(\w+)", \1\}', SOURCES[0].read_text())


@functools.cache
def program(sanitizer: str, sources: tuple[Path, ...] = SOURCES) -> tuple[str, ...]:
    """The command that runs it. Skips where this machine cannot run what the sanitizer makes."""
    options = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"]
    if sanitizer != "plain":
        options.append(f"-fsanitize={sanitizer}")
    try:
        binary = str(compiled(f"{sources[0].stem}-{sanitizer}", sources, options))
    except subprocess.CalledProcessError as error:
        if "cannot find" in error.stderr:
            pytest.skip(f"g++ comes without the library for -fsanitize={sanitizer}")
        raise AssertionError(error.stderr) from None
    # The sanitizer's memory map does not suit the widest randomization of addresses that newer kernels have.
    for command in ([binary], ["setarch", "-R", binary]):
        if shutil.which(command[0]) and subprocess.run(command, capture_output=True, env=ENVIRONMENT).returncode == 0:
            return tuple(command)
    pytest.skip(f"what g++ makes with -fsanitize={sanitizer} does not run here")


@pytest.mark.quick(
    "loops_in_disorder-plain",
    "several_callers-plain",
    "one_processor-plain",
    "one_processor-thread",
    "forks-plain",
    "exit_in_the_middle-plain",
    "exit_in_the_middle-thread",
    "interrupted-plain",
    "numbers_of_threads-plain",
    "nobody_has_a_share-plain",
    "shares_are_taken_over-plain",
    "gives_way-plain",
)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=[pytest.mark.slow] * bool(i)) for i, isa in enumerate(library.usable())]
)
def test_no_kernel_depends_on_the_order_in_which_items_are_computed(isa: str) -> None:
    kernels = CpuKernels(isa)
    try:
        kernels._lib.disorder(98_765_431)
        assert [check for check in self_test.run(kernels) if not check.passed] == []
    finally:
        kernels._lib.disorder(0)


@contextmanager
def a_neighbour_that_comes_and_goes() -> Iterator[None]:
    """Another process keeps a core busy, a fifth of a second on and off."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    over = threading.Event()

    def toggle() -> None:
        for number in itertools.count():
            busy.send_signal((signal.SIGSTOP, signal.SIGCONT)[number % 2])
            if over.wait(0.2):
                return

    toggling = threading.Thread(target=toggle)
    toggling.start()
    try:
        yield
    finally:
        over.set()
        toggling.join()
        busy.kill()
        busy.wait()


def test_a_neighbour_that_comes_and_goes_changes_no_token() -> None:
    prompts = ["def add(a, b):", "import os\n", "class Stack:\n    def push(self, item):", "for i in range("] * 4
    params = [
        SamplingParams(max_tokens=80, ignore_eos=True, seed=i, temperature=0.9 * (i % 2), logprobs=1)
        for i in range(len(prompts))
    ]

    def run(llm: LLM) -> list[list[tuple[int, float]]]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        return [
            [(token, entry[token].logprob) for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)]
            for one in outputs
        ]

    with LLM("demo", threads=1) as alone, LLM("demo", threads=3) as three, a_neighbour_that_comes_and_goes():
        assert run(three) == run(alone)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"": "150000 100000"}, 1.5),
        ({"": "max 100000"}, None),
        ({"": None, "pod": "400000 100000", "pod/box": "50000 100000"}, 0.5),
        ({"": None, "pod": "50000 100000", "pod/box": "max 100000"}, 0.5),
        ({"": "nonsense"}, None),
        ({"": None}, None),
    ],
)
def test_a_containers_share_of_the_processors_is_found(
    tmp_path: Path, files: dict[str, str | None], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).mkdir(exist_ok=True)
        if text is not None:
            (tmp_path / name / "cpu.max").write_text(text + "\n")
    own = tmp_path / "own"
    own.write_text(f"0::/{max(files, key=len)}\n")
    assert cpu_quota(tmp_path, own) == quota
    assert cpu_quota(tmp_path, tmp_path / "nothing") is None


def test_no_more_threads_are_used_than_a_container_has_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for quota, count in ((None, 8), (0.1, 1), (1.5, 2), (3.0, 3), (64.0, 8)):
        monkeypatch.setattr(threads, "cpu_quota", lambda quota=quota: quota)
        assert threads.usable_threads() == count
