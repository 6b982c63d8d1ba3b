"""Children of a supervisor that show no pulse, by the clock; the rest is in `test_server_supervisor.py`."""

# ruff: noqa: F811  # fixtures of another file
from __future__ import annotations

from pathlib import Path

import pytest

from quire.server import supervisor as supervisor_module
from tests.test_server_supervisor import folder, forked, private_folders, running  # noqa: F401


async def test_an_engine_without_a_pulse_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "LOOK_SECONDS", 0.01)
    async with running(folder, fault="still") as server:
        await server.until_ready(boot=2)
        causes = [state["cause"] for state in server.states() if state["state"] == "restarting"]
        assert causes[0] == "it showed no sign of life for 60 s and was killed"


async def test_an_http_process_without_a_pulse_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "LOOK_SECONDS", 0.01)
    async with running(folder, manners="still") as server:
        await server.until_ready(worker=1)
        [private] = private_folders(folder)
        await server.until((private / "gone-0").exists, "the engine is told that the first one is gone")
