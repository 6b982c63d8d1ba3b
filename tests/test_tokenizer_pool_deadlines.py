"""Tokenizer workers that take too long or stand still, by the clock; the rest is in `test_tokenizer_pool.py`."""

# ruff: noqa: F811  # fixtures of another file
from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from quire.errors import TokenizerTimeoutError, TokenizerUnavailableError
from quire.text import tokenizer_pool
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_pool import TokenizerPool
from tests.test_tokenizer_pool import folder, is_gone, start, until, user  # noqa: F401


async def test_an_endless_template_is_killed_at_the_deadline_and_others_go_on(start: Any) -> None:
    told: list[str] = []
    pool = await start(2, deadline=3.0, log=told.append)
    await until(lambda: len(pool.pids) == 2)
    before = pool.pids
    began = time.monotonic()
    endless = asyncio.create_task(pool.render(user("endless")))
    await until(lambda: pool._num_busy == 1)
    beside = 0
    for index in range(20):
        assert await pool.encode([f"text {index}"])
        beside += not endless.done()
    assert beside
    with pytest.raises(TokenizerTimeoutError, match="longer than 3 s"):
        await endless
    assert 3.0 <= time.monotonic() - began < 60.0
    await until(lambda: len(pool.pids) == 2)
    assert len(set(pool.pids) & set(before)) == 1
    assert [line.partition("was killed")[1] for line in told] == ["was killed"]
    assert (await pool.render(user("x"))).token_ids


async def test_a_job_given_to_a_stopped_worker_is_done_by_another_one(
    start: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    pool = await start(log=told.append)
    monkeypatch.setattr(tokenizer_pool, "BEGIN_SECONDS", 0.5)
    [victim] = pool.pids
    os.kill(victim, signal.SIGSTOP)
    job = asyncio.create_task(pool.encode(["hello"]))
    await until(lambda: bool(told))
    monkeypatch.setattr(tokenizer_pool, "BEGIN_SECONDS", 60.0)
    assert await job == [Tokenizer.load(folder).encode("hello")]
    assert "no sign of life" in told[0] and is_gone(victim)


async def test_a_job_whose_worker_is_stopped_in_its_midst_is_done_again(
    start: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "WORKED_SHARE", 100.0)  # however late the stop comes
    told: list[str] = []
    pool = await start(deadline=0.5, log=told.append)
    slow = asyncio.create_task(pool.render(user("slow")))
    stopped = await stop_at_work(pool, slow)
    await until(lambda: bool(told) or slow.done())
    pool.deadline = 60.0
    assert await slow == Tokenizer.load(folder).apply_chat_template(user("slow"))
    if stopped:
        assert "no sign of life" in told[0]


async def test_a_job_whose_workers_are_stopped_twice_is_not_blamed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "WORKED_SHARE", 100.0)  # however late the stop comes
    pool = await start(deadline=0.5, log=lambda _: None)
    endless = asyncio.create_task(pool.render(user("endless")))
    for _ in range(2):
        await stop_at_work(pool, endless)
        [victim] = pool.pids
        await until(lambda victim=victim: victim not in pool.pids)
    with pytest.raises(TokenizerUnavailableError, match="stopped or killed"):
        await endless
    assert (await pool.render(user("x"))).token_ids


async def stop_at_work(pool: TokenizerPool, job: asyncio.Task[Any]) -> bool:
    """Stop the worker that has begun this job; False if the job was done first."""
    await until(lambda: job.done() or any(worker._begun is not None for worker in pool._workers))
    if not job.done():
        os.kill(pool.pids[0], signal.SIGSTOP)
    return not job.done()


async def test_an_idle_worker_that_is_stopped_is_replaced_before_anybody_needs_it(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "PING_SECONDS", 0.05)
    told: list[str] = []
    pool = await start(log=told.append)
    [victim] = pool.pids
    await asyncio.sleep(0.5)
    assert pool.pids == [victim]  # it is asked, and answers
    monkeypatch.setattr(tokenizer_pool, "BEGIN_SECONDS", 0.5)
    os.kill(victim, signal.SIGSTOP)
    await until(lambda: bool(told))
    monkeypatch.setattr(tokenizer_pool, "BEGIN_SECONDS", 60.0)
    await until(lambda: bool(pool.pids) and pool.pids != [victim])
    assert "no sign of life" in told[0]
    assert await pool.encode(["x"])
