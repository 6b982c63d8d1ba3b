"""The engine as a process: the same tokens as in-process, across its death, and nobody else harmed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest
from msgspec.structs import replace

from quire import LLM, SamplingParams
from quire.engine.frontend import Frontend
from quire.errors import EngineClosedError, PromptTooLongError
from quire.ipc import client as client_module
from quire.ipc import engine_process as process
from quire.ipc import wire
from tests.engine_server import EngineServer, until

PROMPTS = ["def fib(n):\n", "class Stack:\n", "import os\n", "for x in"]
LONG = SamplingParams(max_tokens=100, temperature=0.9, seed=5, ignore_eos=True, logprobs=1)
ENDLESS = SamplingParams(max_tokens=1900, ignore_eos=True)
POISON, WALL = 1234, 3210
"""Tokens that an engine with a fault dies of, or stands still at."""


def behind_a_long_prompt(token):
    """A prompt that ends with this token. It is computed in pieces: whoever comes before it gets some tokens first."""
    return [5] * 1200 + [token]


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", threads=1) as engine:
        yield engine


@pytest.fixture
async def server(tmp_path):
    async with EngineServer(tmp_path, max_num_seqs=16, max_num_batched_tokens=64) as server:
        yield server


@pytest.fixture
async def slow_server(tmp_path):
    """One whose engine is slow enough for a request to be still there when something is done to it."""
    async with EngineServer(tmp_path, check_invariants=True) as server:
        yield server


async def run(client, text, params, name="cmpl-1", owner=""):
    ids = client.tokenizer.encode(text)
    stream = client.generate(client.prepare(text, ids, params), name=name, owner=owner, arrived=time.monotonic())
    async for output in stream:
        last = output
    return last


def told(output):
    """What a client sees of an output."""
    return [(choice.text, choice.token_ids, choice.logprobs, choice.finish_reason) for choice in output.outputs]


EXPECTED = {}


def expected(llm, text, params):
    if (key := (text, repr(params))) not in EXPECTED:
        [output] = llm.generate(text, params)
        EXPECTED[key] = told(output)
    return EXPECTED[key]


async def amid(server, *jobs):
    """A client, and tasks of requests that have some of their tokens; their engine stands still, for it to be killed.

    No clock decides how far they are, but the step that comes to the end of the prompt of one more request, the last.
    """
    server.fault = f"block:{WALL}"
    client = await server.ready_client()
    tasks = [asyncio.create_task(run(client, *job)) for job in jobs]
    tasks.append(asyncio.create_task(run_ids(client, behind_a_long_prompt(WALL), SamplingParams(max_tokens=1))))
    await until(lambda: len(counts := tokens_so_far(client)) == len(tasks) and min(counts[:-1]) > 5)
    server.fault = None
    return client, tasks


@pytest.mark.slow
async def test_the_wire_changes_no_token(server, llm):
    client = await server.ready_client()
    params = [LONG, SamplingParams(max_tokens=40, n=3, seed=1), SamplingParams(max_tokens=9, temperature=0, stop="\n")]
    jobs = [(text, some) for text in PROMPTS for some in params]
    outputs = await asyncio.gather(*(run(client, *job) for job in jobs))
    for job, output in zip(jobs, outputs, strict=True):
        assert told(output) == expected(llm, *job)
    assert not client._frontend._live, "what was read to its end is forgotten"


async def test_prompt_logprobs_come_over_the_wire_and_survive_a_restart(server, llm):
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True, prompt_logprobs=2)
    [direct] = llm.generate(PROMPTS[0], params)
    _, (task, _) = await amid(server, (PROMPTS[0], params))
    server.kill()
    await server.replace_engine()
    output = await task
    assert output.prompt_logprobs == direct.prompt_logprobs
    assert told(output) == told(direct)


def tokens_so_far(client):
    return [len(choice.output.token_ids) for _, choice in client._frontend._by_request.values()]


async def test_streams_go_on_with_the_tokens_they_would_have_had_when_the_engine_is_killed(server, llm):
    client, (*tasks, last) = await amid(server, *((text, LONG) for text in PROMPTS))
    server.kill()
    await server.replace_engine()
    for text, task in zip(PROMPTS, tasks, strict=True):
        assert told(await task) == expected(llm, text, LONG)
    await last
    assert client.num_open == 0


@pytest.mark.slow
async def test_a_request_that_brings_the_engine_down_twice_ends_alone(server, llm):
    server.fault = f"crash:{POISON}"
    client = await server.ready_client()
    innocent = [asyncio.create_task(run(client, text, LONG)) for text in PROMPTS]
    bad = asyncio.create_task(run_ids(client, behind_a_long_prompt(POISON)))
    for _ in range(2):
        await server.replace_engine()
    [choice] = (await bad).outputs
    assert choice.finish_reason == "error" and "twice" in choice.error
    assert server.boot == 3
    for text, task in zip(PROMPTS, innocent, strict=True):
        assert told(await task) == expected(llm, text, LONG)


async def test_requests_end_with_an_error_when_there_is_no_engine_any_more(server):
    client, (task, _) = await amid(server, ("x", LONG))
    server.kill()
    await server.tell_failed()
    [choice] = (await task).outputs
    assert choice.finish_reason == "error" and "died too often" in choice.error
    with pytest.raises(EngineClosedError):
        await run(client, "x", LONG)


async def test_requests_that_the_servers_end_cuts_off_have_all_that_they_got_and_none_begins(server, llm):
    params = replace(LONG, stop=[" self.zzz", "\n\n\n\n", "(((("])  # of which some may be held back
    client, (*tasks, _) = await amid(server, *((text, params) for text in PROMPTS))
    client.end_all()  # the engine, which stands still, is not asked
    for text, task in zip(PROMPTS, tasks, strict=True):
        [choice] = (await task).outputs
        count = len(choice.token_ids)
        [same] = expected(llm, text, replace(params, max_tokens=count))
        assert (choice.text, choice.token_ids, choice.logprobs, choice.finish_reason) == (*same[:3], "abort")
        assert count > 5
    assert client.num_open == 0
    with pytest.raises(EngineClosedError, match="leaving"):
        await run(client, "x", LONG)


async def test_leaving_a_stream_early_frees_its_blocks(slow_server):
    client = await slow_server.ready_client()
    ids = client.tokenizer.encode("def f():")
    stream = client.generate(client.prepare(None, ids, ENDLESS), name="a", arrived=time.monotonic())
    async with contextlib.aclosing(stream):
        async for _ in stream:
            break
    stats = await stats_when_idle(client)
    assert stats["held_blocks"] == 0 and stats["aborted"] == 1


async def stats_when_idle(client):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = json.loads(await client.inspect("stats"))
        if not stats["running"] and not stats["waiting"] and not stats["held_blocks"]:  # a step may be in flight
            return stats
        await asyncio.sleep(0.02)
    raise TimeoutError(stats)


async def test_a_response_is_aborted_by_name_under_its_owner_only(slow_server):
    client, other = await slow_server.ready_client(), await slow_server.ready_client()
    task = asyncio.create_task(run(client, "x", ENDLESS, name="cmpl-7", owner="alice"))
    await until(lambda: any(tokens_so_far(client)))
    assert not await other.abort_named("cmpl-7", "bob")
    assert await other.abort_named("cmpl-7", "alice")
    assert [choice.finish_reason for choice in (await task).outputs] == ["abort"]


async def test_requests_of_an_http_process_that_died_are_aborted_and_what_it_said_last_does_not_run(slow_server):
    client, other = await slow_server.ready_client(), await slow_server.ready_client()
    task = asyncio.create_task(run(client, "x", ENDLESS))
    await until(lambda: any(tokens_so_far(client)))
    await slow_server.tell_engine(wire.ClientGone(0))
    assert [choice.finish_reason for choice in (await task).outputs] == ["abort"]
    before = await stats_when_idle(other)
    assert before["aborted"] == 1
    late = asyncio.create_task(run(client, "x", LONG))
    await until(lambda: client.num_open == 1)
    await client.inspect("stats")  # by the way that the late request took, and after it
    assert (await stats_when_idle(other))["output_tokens"] == before["output_tokens"]
    late.cancel()


async def test_tenants_do_not_share_cached_prefixes(server):
    client = await server.ready_client()
    text, params = "def fib(n):\n    return n\n" * 8, SamplingParams(max_tokens=1)
    first = await run(client, text, params, owner="alice")
    assert first.cached_tokens == 0
    assert (await run(client, text, params, owner="bob")).cached_tokens == 0
    assert (await run(client, text, params, owner="alice")).cached_tokens > 0


def test_each_choice_of_a_tenants_request_has_its_owner_in_the_engine():
    requests = []
    frontend = Frontend(
        tokenizer=None,
        vocab_size=300,
        max_model_len=64,
        eos_token_ids=[0],
        defaults={},
        add=requests.append,
        abort=lambda number, reason: [],
    )
    for tenant in ("alice", "bob", ""):
        frontend.submit(frontend.prepare([5, 6], SamplingParams(n=3, max_tokens=2)), tenant=tenant)
    assert [request.owner for request in requests] == ["alice"] * 3 + ["bob"] * 3 + [""] * 3
    origin = client_module._Origin("cmpl-1", "alice", 0.0, 0.0)
    add = wire.decode_to_engine(wire.encode(client_module._message(requests[0], origin)))
    assert process._request(7, add).owner == "alice"
    resumed, _ = frontend.resume()
    assert [request.owner for request in resumed] == [request.owner for request in requests]


async def test_max_tokens_beyond_the_context_is_clamped_and_a_long_prompt_refused(server):
    client = await server.ready_client()
    limit = client.info.max_model_len
    prepared = client.prepare(None, [5] * (limit - 4), SamplingParams(max_tokens=100))
    assert (prepared.max_tokens, prepared.clamped_from) == (4, 100)
    assert client.prepare(None, [5] * limit, SamplingParams(max_tokens=0)).clamped_from is None
    with pytest.raises(PromptTooLongError):
        client.prepare(None, [5] * (limit + 1), SamplingParams(max_tokens=0))


async def test_max_tokens_0_scores_the_prompt_and_returns_no_token(server, llm):
    client = await server.ready_client()
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1)
    output = await run(client, PROMPTS[0], params)
    assert told(output) == [("", [], [], "length")]
    [scored] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs == scored.prompt_logprobs


async def test_an_engine_that_cannot_start_says_why_and_leaves(tmp_path):
    async with EngineServer(tmp_path, model=str(tmp_path / "nothing")) as server:
        server.boot_engine()
        assert await asyncio.wait_for(server.exit_code(), 60) == 1
        await until(lambda: server.failure is not None)
        assert "nothing" in server.failure


async def test_the_engine_dies_with_its_supervisor(server):
    await server.ready_client()
    await server.tell_engine(wire.Stop())
    assert await asyncio.wait_for(server.exit_code(), 60) == 0


async def test_the_live_document_tells_of_requests_steps_blocks_and_prefixes(slow_server):
    client = await slow_server.ready_client()
    text = "def fib(n):\n    return n\n" * 8
    await asyncio.gather(
        *(run(client, text + tail, SamplingParams(max_tokens=5, ignore_eos=True)) for tail in ("x", "y"))
    )
    task = asyncio.create_task(run(client, text, ENDLESS, name="cmpl-live"))
    await until(lambda: any(tokens_so_far(client)))
    live = json.loads(await client.inspect("live"))
    assert await client.abort_named("cmpl-live", "")
    await task
    await stats_when_idle(client)
    [request] = live["requests"]
    assert (request["id"], request["status"]) == ("cmpl-live", "running") and request["cached"] > 0
    assert len(live["kv"]["cells"]) * live["kv"]["blocks_per_cell"] >= live["kv"]["num_blocks"]
    assert set(live["kv"]["cells"]) <= set("fc123456789") and "1" in live["kv"]["cells"]
    assert live["kv"]["free"] + live["kv"]["cached"] + live["kv"]["held"] == live["kv"]["num_blocks"]
    assert live["tree"] and all(node["parent"] in {None, *(n["id"] for n in live["tree"])} for node in live["tree"])
    assert live["steps"][-1]["spans"][0][:2] == ["cmpl-live", 0]
    finished = live["finished"][0]
    assert finished["reason"] == "length" and finished["chunks"] and finished["match_seconds"] is not None
    steps = json.loads(await client.inspect("steps"))["steps"]
    later = json.loads(await client.inspect("steps", since=steps[-2]["number"]))["steps"]
    assert later == steps[-2:]
    last = json.loads(await client.inspect("live"))["finished"][-1]
    assert last["id"] == "cmpl-live" and last["detokenize_seconds"] is not None


async def test_the_prefix_cache_can_be_reset(server):
    client = await server.ready_client()
    await run(client, PROMPTS[0] * 20, SamplingParams(max_tokens=3))
    assert await client.reset_prefix_cache() > 0
    assert json.loads(await client.inspect("stats"))["cached_blocks"] == 0


async def test_nobody_on_probation_is_blamed_for_what_a_newcomer_does(server, llm):
    client, (*innocent, _) = await amid(server, *((text, LONG) for text in PROMPTS))
    server.fault = f"crash:{POISON}"
    server.kill()
    await server.replace_engine()
    await until(lambda: client.state == "restarting")
    bad = asyncio.create_task(run_ids(client, [5, POISON]))  # it meets them on the next engine
    for _ in range(2):
        await server.replace_engine()
    [choice] = (await bad).outputs
    assert choice.finish_reason == "error" and "twice" in choice.error
    for text, task in zip(PROMPTS, innocent, strict=True):
        assert told(await task) == expected(llm, text, LONG)


async def run_ids(client, ids, params=LONG):
    async for output in client.generate(client.prepare(None, ids, params), name="bad", arrived=time.monotonic()):
        last = output
    return last


async def test_messages_that_make_no_sense_harm_nobody(server, llm):
    client = await server.ready_client()
    task = asyncio.create_task(run(client, PROMPTS[0], LONG))
    await until(lambda: any(tokens_so_far(client)) or task.done())
    stranger = server.dealer(wire.engine_address(server.directory, 0, server.boot), "http-9")
    add = wire.Add(number=9 << wire.WORKER_SHIFT, name="x", prompt_token_ids=[2**63], params=LONG, max_tokens=3)
    for frames in ([b""], [b"\xc1"], [b"a", b"b"], [wire.encode(add)], [wire.encode(wire.Stop())]):
        await stranger.send_multipart(frames)
    await server.tell_engine(wire.Located("not for an engine"))
    [update] = wire.decode_from_engine(await asyncio.wait_for(stranger.recv(), 60)).updates
    assert update.request == add.number and update.finish_reason == "error" and "could not take in" in update.error
    assert told(await task) == expected(llm, PROMPTS[0], LONG)
    assert (await stats_when_idle(client))["failed"] == 1


async def test_a_request_and_news_of_an_engine_that_come_twice_change_nothing(server, llm):
    client = await server.ready_client()
    task = asyncio.create_task(run(client, PROMPTS[0], LONG))
    await until(lambda: any(tokens_so_far(client)) or task.done())
    await server.tell_ready()
    client._resume()
    assert told(await task) == expected(llm, PROMPTS[0], LONG)
    assert (await stats_when_idle(client))["finished"] == 1


async def test_a_bug_in_a_step_ends_the_engine_and_then_the_request_that_shows_it(server, llm):
    server.fault = f"raise:{POISON}"
    client = await server.ready_client()
    innocent = asyncio.create_task(run(client, PROMPTS[0], LONG))
    bad = asyncio.create_task(run_ids(client, behind_a_long_prompt(POISON)))
    for _ in range(2):
        await server.replace_engine()
    [choice] = (await bad).outputs
    assert choice.finish_reason == "error" and "twice" in choice.error
    assert told(await innocent) == expected(llm, PROMPTS[0], LONG)
