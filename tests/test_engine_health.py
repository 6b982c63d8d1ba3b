"""Whether an engine process is seen to be well, by the clock; what it does is in `test_engine_process.py`."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from quire.errors import EngineClosedError
from quire.ipc import link as link_module
from quire.ipc.board import START_SECONDS
from tests.engine_server import until
from tests.test_engine_process import LONG, PROMPTS, WALL, amid, server  # noqa: F401  # a fixture


async def test_an_engine_that_hangs_in_a_step_is_not_healthy_within_ten_seconds(server, monkeypatch):  # noqa: F811
    assert link_module.STALL_SECONDS < 10
    server.fault = f"block:{WALL}"
    client = await server.ready_client()
    assert client.healthy
    stream = client.generate(client.prepare(None, [WALL], LONG), name="a", arrived=time.monotonic())
    task = asyncio.create_task(anext(stream))
    monkeypatch.setattr(link_module, "STALL_SECONDS", 2.0)
    await until(lambda: not client.healthy)
    with pytest.raises(EngineClosedError, match="no sign of life"):
        await client.inspect("live")
    task.cancel()


async def test_an_engine_says_on_its_board_how_long_its_pulse_may_stand_still(server):  # noqa: F811
    client, _ = await amid(server, (PROMPTS[0], LONG))
    assert client.board.patience == 1  # of a step of 64 tokens; little, for so small a model
    server.fault = None
    server.kill()
    await server.replace_engine()
    loading = server.board.patience
    await until(lambda: client.state == "ready" and client.num_open == 0)
    assert loading >= START_SECONDS and client.board.patience == 0


async def test_an_idle_engine_and_one_with_slow_steps_are_healthy(server):  # noqa: F811
    client = await server.ready_client()
    before = client.board.pulse
    await until(lambda: client.board.pulse > before)
    os.kill(server.process.pid, signal.SIGSTOP)
    await asyncio.sleep(2)
    assert client.healthy
    os.kill(server.process.pid, signal.SIGCONT)
