"""Starting processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quire import child


class Start(msgspec.Struct):
    """What a process is told."""

    text: str


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-40, "killed by signal 40")]
)
def test_the_end_of_a_process_is_told_by_its_exit_code_or_signal(code: int, text: str) -> None:
    assert child.fate(code) == text


@pytest.mark.parametrize("spawn", [child.spawn_quietly, child.spawn_beside])
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["within the pipe's buffer", "more than that"])
def test_one_that_dies_before_it_is_told_anything_is_seen_by_who_waits(
    spawn: Callable[..., Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen

    def dead(*args: Any, **more: Any) -> Any:
        process = popen(*args, **more)
        process.wait(10)
        return process

    monkeypatch.setattr(subprocess, "Popen", dead)
    assert spawn(["sh", "-c", "exit 3"], Start("x" * size)).returncode == 3
