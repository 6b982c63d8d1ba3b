"""`AsyncLLM`: many callers, cancellation, timeouts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator

import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams
from quire.errors import ConcurrentUseError, EngineClosedError, PromptTooLongError, RequestError
from quire.models.hub import resolve
from tests.forks import in_a_fork

LONG = SamplingParams(max_tokens=1500, ignore_eos=True, seed=1)


@pytest.fixture
def llm():
    llm = AsyncLLM("demo", threads=1, check_invariants=True)
    yield llm
    llm.close()


async def collect(
    llm: AsyncLLM, prompt: str, params: SamplingParams, begun: asyncio.Event | None = None, **options
) -> tuple[str, str]:
    """The deltas joined, and the final text. `begun` is set with the first of them."""
    deltas = []
    async for output in llm.generate(prompt, params, **options):
        deltas.append(output.outputs[0].delta)
        if begun is not None:
            begun.set()
    return "".join(deltas), output.outputs[0].text


async def everything(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def begin(llm: AsyncLLM) -> asyncio.Task[tuple[str, str]]:
    """A long request that has some tokens."""
    begun = asyncio.Event()
    task = asyncio.create_task(collect(llm, "x", LONG, begun))
    await begun.wait()
    return task


async def drained(llm: AsyncLLM) -> None:
    for _ in range(6000):
        if llm._engine.idle and llm._frontend.idle:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are left over")


async def test_many_callers_get_what_one_alone_would(llm):
    params = [SamplingParams(max_tokens=15, seed=i) for i in range(12)]
    results = await asyncio.gather(*(collect(llm, f"def f{i}(", p) for i, p in enumerate(params)))
    with LLM("demo", threads=1) as alone:
        expected = [alone.generate(f"def f{i}(", p)[0].outputs[0].text for i, p in enumerate(params)]
    assert results == [(text, text) for text in expected]


async def test_a_slow_reader_misses_nothing(llm):
    deltas = []
    async for output in llm.generate("class A:", SamplingParams(max_tokens=30, seed=3, ignore_eos=True)):
        deltas.append(output.outputs[0].delta)
        await asyncio.sleep(0.02)
    assert "".join(deltas) == output.outputs[0].text
    assert len(output.outputs[0].token_ids) == 30


async def test_a_token_that_the_decoder_panics_on_ends_its_own_request_alone(tmp_path):
    folder = shutil.copytree(resolve("demo"), tmp_path / "demo")
    content = json.loads((folder / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": "~", "start": 1, "stop": 1}
    content["decoder"] = {"type": "Sequence", "decoders": [strip, content["decoder"]]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    llm = AsyncLLM(str(folder), threads=1)
    try:
        [panics] = llm.tokenizer.encode("~")
        bad, good = (
            llm.generate("x", SamplingParams(max_tokens=9, seed=1, ignore_eos=True, allowed_token_ids=allowed))
            for allowed in ([panics], None)
        )
        [(*_, bad), (*_, good)] = await asyncio.gather(everything(bad), everything(good))
    finally:
        llm.close()
    assert bad.outputs[0].finish_reason == "error" and "the tokenizer failed" in bad.outputs[0].error
    assert good.outputs[0].finish_reason == "length"


async def test_cancelling_a_caller_aborts_its_request(llm):
    task = await begin(llm)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await drained(llm)


async def test_a_timeout_aborts_the_request(llm):
    with pytest.raises(TimeoutError):
        await collect(llm, "x", LONG, timeout=0.05)
    await drained(llm)


async def test_an_abort_by_id_ends_the_iterator_with_a_reason(llm):
    outputs = []
    async for output in llm.generate("x", LONG, request_id="mine"):
        outputs.append(output)
        await llm.abort("mine")
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    await drained(llm)


async def test_an_id_is_in_use_until_its_last_output_was_handed_out(llm):
    short = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
    first = llm.generate("x", short, request_id="mine")
    await anext(first)
    await drained(llm)
    with pytest.raises(RequestError, match="'mine' is in use"):
        await collect(llm, "y", short, request_id="mine")
    assert (await anext(first)).finished
    second = llm.generate("y", LONG, request_id="mine")
    await anext(second)
    await first.aclose()
    await llm.abort("mine")
    outputs = [output async for output in second]
    assert outputs[-1].outputs[0].finish_reason == "abort"


async def test_an_id_whose_reader_left_can_be_used_again(llm):
    for _ in range(2):
        stream = llm.generate("x", LONG, request_id="mine")
        await anext(stream)
        await stream.aclose()
        await drained(llm)


async def test_a_bad_prompt_raises_for_its_caller_alone(llm):
    good = asyncio.create_task(collect(llm, "x", SamplingParams(max_tokens=5)))
    with pytest.raises(PromptTooLongError):
        await collect(llm, "x " * 5000, SamplingParams(max_tokens=5))
    assert await good


async def test_closing_ends_those_who_wait(llm):
    task = await begin(llm)
    await asyncio.to_thread(llm.close)
    with pytest.raises(EngineClosedError):
        await task
    with pytest.raises(EngineClosedError):
        await collect(llm, "x", LONG)


async def test_a_failure_of_the_engines_thread_is_told_to_everybody(llm, monkeypatch):
    waiting = await begin(llm)

    def broken():
        raise RuntimeError("a bug")

    monkeypatch.setattr(llm._engine.scheduler, "schedule", lambda now: broken())
    for late in (waiting, collect(llm, "y", LONG)):
        with pytest.raises(EngineClosedError, match="a bug"):
            await late


async def test_a_timeout_of_the_wrong_type_leaves_nothing_behind(llm):
    with pytest.raises(TypeError):
        await collect(llm, "x", LONG, timeout="5")
    assert llm._frontend.idle and not llm._streams._changed


async def test_closing_while_a_prompt_is_tokenized_ends_its_caller(llm, monkeypatch):
    prepare = llm._frontend.prepare

    def slow(*args):
        time.sleep(0.3)
        return prepare(*args)

    monkeypatch.setattr(llm._frontend, "prepare", slow)
    task = asyncio.create_task(collect(llm, "x", LONG))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(llm.close)
    with pytest.raises(EngineClosedError):
        await asyncio.wait_for(task, 60)


def test_a_second_event_loop_is_refused_while_requests_of_the_first_run(llm):
    """Outputs grow on one loop; readers on another one would not be woken."""
    params, begun, go_on = SamplingParams(max_tokens=20, ignore_eos=True, seed=1), threading.Event(), threading.Event()

    async def first() -> str:
        outputs = llm.generate("def f(", params)
        await anext(outputs)
        begun.set()
        await asyncio.to_thread(go_on.wait, 60)
        return (await everything(outputs))[-1].outputs[0].text

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, first())
        assert begun.wait(60)
        with pytest.raises(ConcurrentUseError, match="run_coroutine_threadsafe"):
            asyncio.run(collect(llm, "x", params))
        go_on.set()
        expected = running.result(60)
    assert asyncio.run(collect(llm, "def f(", params)) == (expected, expected), "one after the other"


def test_requests_whose_loop_was_closed_under_them_are_ended_when_another_is_used(llm):
    loop = asyncio.new_event_loop()
    left = llm.generate("x", LONG)
    loop.run_until_complete(anext(left))
    loop.close()

    async def use() -> None:
        assert (await collect(llm, "y", SamplingParams(max_tokens=3, seed=1)))[1]
        await drained(llm)

    asyncio.run(use())


def test_a_fork_of_the_process_is_told_that_the_engine_is_not_its_own(llm):
    short = SamplingParams(max_tokens=3, seed=1)
    expected = asyncio.run(collect(llm, "def f(", short))
    told = in_a_fork(lambda: asyncio.run(collect(llm, "def f(", short)))
    assert told.startswith("EngineClosedError: this engine belongs to process")
    assert in_a_fork(llm.close) == "None"
    assert asyncio.run(collect(llm, "def f(", short)) == expected


def test_an_engine_that_nobody_has_any_more_is_closed_and_freed():
    llm = AsyncLLM("demo", threads=1)
    assert asyncio.run(collect(llm, "x", SamplingParams(max_tokens=3, seed=1)))[1]
    thread, freed = llm._thread, [weakref.ref(llm.model), weakref.ref(llm)]
    del llm
    gc.collect()  # of what asyncio and the test still have
    thread.join(60)
    assert not thread.is_alive() and [each() for each in freed] == [None, None]


def test_a_program_may_end_while_a_step_runs():
    """Nobody closed the engine: its thread must not be broken off inside a kernel, which aborts the process."""
    code = """
import asyncio
from quire import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM("demo")
    streams = [llm.generate("x", SamplingParams(max_tokens=1500, ignore_eos=True, seed=seed)) for seed in range(8)]
    for step in range(20):
        await asyncio.gather(*(anext(stream) for stream in streams))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
