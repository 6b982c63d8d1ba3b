"""Starting processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quire import child


class Start(msgspec.Struct):
    """What a process is told."""

    text: str


@pytest.mark.parametrize("spawn", [child.spawn_quietly, child.spawn_beside])
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["within the pipe's buffer", "more than that"])
def test_one_that_dies_before_it_is_told_anything_is_seen_by_who_waits(
    spawn: Callable[..., Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = child._told

    def late(start: msgspec.Struct) -> bytes:
        time.sleep(0.3)  # by then it has ended
        return told(start)

    if spawn is child.spawn_beside:  # the other one encodes first
        monkeypatch.setattr(child, "_told", late)
    assert spawn(["sh", "-c", "exec <&-; exit 3"], Start("x" * size)).wait(10) == 3
