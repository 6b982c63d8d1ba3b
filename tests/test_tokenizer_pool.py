"""Tokenizer workers: the answers are `Tokenizer`'s own, and whatever a job does costs nobody else anything."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import (
    ChatTemplateError,
    EngineClosedError,
    PromptTooLongError,
    RequestError,
    SamplingParamsError,
    TokenizerError,
    TokenizerFailedError,
    TokenizerUnavailableError,
    TokenOutOfRangeError,
    UnknownTemplateVariableError,
)
from quire.text import tokenizer_pool
from quire.text.chat_template import ChatOptions
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_pool import LARGE_BYTES, MAX_JOB_BYTES, TokenizerPool

from .http_tools import children_of, command_of, resident_bytes
from .tokenizer_builders import CHATML_CONFIG, byte_level_json, panicking_json

TEMPLATE = (
    "{% set what = messages[0].content %}{% set ns = namespace(held=[]) %}"
    "{% if what == 'endless' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif what == 'slow' %}{% for i in range(300) %}{% for j in range(10000) %}{% endfor %}{% endfor %}"
    "{% elif what == 'greedy' %}{% for i in range(99999) %}{% set ns.held = [ns.held, 'x' * 1000000 ~ i] %}{% endfor %}"
    "{% elif what == 'refuse' %}{{ raise_exception('not this one') }}"
    "{% elif what == 'undefined' %}{{ mood }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if tone %}{{ tone }}{% endif %}"
)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "tokenizer.json").write_text(byte_level_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({**CHATML_CONFIG, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
async def start(folder: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts pools, which are closed after the test."""
    pools: list[TokenizerPool] = []

    async def start(workers: int = 1, deadline: float = 60.0, where: Path = folder, **options: Any) -> TokenizerPool:
        pools.append(TokenizerPool(where, workers, deadline, **options))
        await pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    """The process is no more, or only waits for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# -- answers -------------------------------------------------------------------------------------------------


async def test_answers_are_those_of_the_tokenizer_itself(start: Any, folder: Path) -> None:
    pool, tokenizer = await start(), Tokenizer.load(folder)
    texts = ["hello world", "", " 世界🙂 <|im_end|>", "x" * 1000]
    assert await pool.encode(texts) == tokenizer.encode_batch(texts)
    assert await pool.encode(texts, False) == tokenizer.encode_batch(texts, False)
    assert await pool.encode(texts, parse_special=True) == tokenizer.encode_batch(texts, parse_special=True)
    assert await pool.encode([]) == []
    ids = [*tokenizer.encode(texts[2]), 2, 100_000]
    assert await pool.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert await pool.token_texts(ids) == [tokenizer.token_text(token) for token in ids]
    assert await pool.decode([]) == "" and await pool.token_texts([]) == []
    assert await pool.bad_words(["hello", "x"]) == tokenizer.bad_word_ids(["hello", "x"])
    assert await pool.bad_words([]) == []


@pytest.mark.parametrize("content", ["hello", "<|im_end|> as text"])
async def test_a_rendered_chat_is_that_of_the_tokenizer_itself(start: Any, folder: Path, content: str) -> None:
    chats = ChatOptions(TEMPLATE + "{{ 'given' }}")
    pool, tokenizer = await start(chats=chats), Tokenizer.load(folder, chats)
    assert tokenizer.apply_chat_template(user("x")).text.endswith("given")
    options: list[dict[str, Any]] = [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "variables": {"tone": "kind", "strange": 1}},
    ]
    for given in options:
        assert await pool.render(user(content), **given) == tokenizer.apply_chat_template(user(content), **given)


async def test_many_texts_come_back_in_their_order(start: Any, folder: Path) -> None:
    pool, tokenizer = await start(2), Tokenizer.load(folder)
    texts = [f"{index} " * (index * 400 % 9000) for index in range(60)]
    assert sum(map(len, texts)) > 4 * LARGE_BYTES
    assert await pool.encode(texts) == tokenizer.encode_batch(texts)


async def test_fifty_jobs_at_once_each_get_their_own_answer(start: Any, folder: Path) -> None:
    pool, tokenizer = await start(2), Tokenizer.load(folder)
    texts = [f"text number {index}" for index in range(50)]
    answers = await asyncio.gather(*(pool.encode([text]) for text in texts))
    assert answers == [[tokenizer.encode(text)] for text in texts]


def test_the_pool_works_on_uvloop(folder: Path) -> None:
    async def work() -> list[list[int]]:
        pool = TokenizerPool(folder, 1, 60.0)
        await pool.start()
        try:
            assert not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
            os.kill(pool.pids[0], signal.SIGKILL)
            return await pool.encode(["hello"])
        finally:
            await pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(work()) == [Tokenizer.load(folder).encode("hello")]


# -- refusals ------------------------------------------------------------------------------------------------


async def test_errors_keep_their_class_and_their_words(start: Any, folder: Path) -> None:
    pool, tokenizer = await start(), Tokenizer.load(folder)
    cases: list[tuple[type[Exception], Any, Callable[[], Any]]] = [
        (
            ChatTemplateError,
            pool.render(user("refuse")),
            lambda: tokenizer.apply_chat_template(user("refuse")),
        ),
        (
            UnknownTemplateVariableError,
            pool.render(user("undefined")),
            lambda: tokenizer.apply_chat_template(user("undefined")),
        ),
        (RequestError, pool.encode(["a", "\ud800"]), lambda: tokenizer.encode_batch(["a", "\ud800"])),
    ]
    for kind, job, same in cases:
        with pytest.raises(kind) as here:
            await job
        with pytest.raises(kind) as there:
            same()
        assert type(here.value) is type(there.value) and str(here.value) == str(there.value)
        assert getattr(here.value, "param", None) == getattr(there.value, "param", None)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "\ud800"}, "surrogate"),
        ({"role": "user", "content": "x", "number": 10**30}, "more than 64 bits"),
        ({"role": "user", "content": "x", "thing": object()}, "what JSON does not have"),
    ],
)
async def test_messages_that_cannot_be_sent_are_refused(start: Any, message: dict[str, Any], words: str) -> None:
    pool = await start()
    with pytest.raises(RequestError, match=words):
        await pool.render([message])
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises((RequestError, ChatTemplateError), match="nests"):
        await pool.render([{"role": "user", "content": "x", "deep": nested}])
    while nested:  # taken apart by hand: Python's own way to free it is recursive
        nested = nested.pop()
    assert (await pool.render(user("x"))).token_ids


@pytest.mark.parametrize("ids", [[-1], [1 << 32], [1, -(1 << 40)]])
async def test_ids_that_are_none_are_refused(start: Any, ids: list[int]) -> None:
    pool = await start()
    for job in (pool.decode(ids), pool.token_texts(ids)):
        with pytest.raises(TokenOutOfRangeError, match="outside the vocabulary"):
            await job


async def test_texts_that_are_too_long_are_refused_before_any_work(start: Any) -> None:
    pool = await start()
    with pytest.raises(RequestError, match=f"at most {MAX_JOB_BYTES}"):
        await pool.encode(["a" * (MAX_JOB_BYTES + 1)])
    with pytest.raises(RequestError, match=f"at most {MAX_JOB_BYTES}"):
        await pool.render(user("a" * (MAX_JOB_BYTES + 1)))


async def test_prompts_that_cannot_fit_into_the_context_are_refused_by_their_size(start: Any) -> None:
    pool = await start()
    text = "word " * 100_000
    for refused in (pool.encode([text], max_tokens=64), pool.render(user(text), max_tokens=64)):
        with pytest.raises(PromptTooLongError, match="at most; shorten the prompt"):
            await refused
    assert len((await pool.encode([text]))[0]) > 64


async def test_a_failure_that_is_not_the_requests_goes_to_the_log_alone(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = await start()
    with pytest.raises(TokenizerFailedError, match="the server's log tells more"):
        await pool.bad_words([1])  # a mistake of ours
    assert "ValidationError" in capfd.readouterr().err
    assert await pool.encode(["x"])


async def test_a_panic_of_the_library_fails_its_job_alone_and_costs_no_worker(start: Any, tmp_path: Path) -> None:
    source, panics = panicking_json()
    (tmp_path / "tokenizer.json").write_text(source)
    pool = await start(where=tmp_path)
    before = pool.pids
    with pytest.raises(TokenizerFailedError, match="the server's log tells more"):
        await pool.decode([panics])
    assert await pool.decode(Tokenizer(source).encode("hello")) == "hello"
    assert pool.pids == before


async def test_a_checkpoint_without_a_tokenizer_refuses_every_job(start: Any, tmp_path: Path) -> None:
    pool = await start(where=tmp_path)
    with pytest.raises(RequestError, match=r"no tokenizer\.json; give prompts as lists of token ids"):
        await pool.encode(["x"])
    with pytest.raises(ChatTemplateError, match="no tokenizer"):
        await pool.render(user("x"))


async def test_a_broken_checkpoint_is_told_at_the_start(start: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a valid"):
        await start(where=tmp_path)


async def test_a_process_that_cannot_be_started_is_an_error(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(TokenizerFailedError, match="No such file"):
        await start()


# -- deadlines and deaths ------------------------------------------------------------------------------------


async def test_a_job_whose_worker_is_killed_is_done_again_once(start: Any, folder: Path) -> None:
    told: list[str] = []
    pool = await start(log=told.append)
    [victim] = pool.pids
    slow = asyncio.create_task(pool.render(user("slow")))
    await until(lambda: pool._num_busy == 1 or slow.done())
    os.kill(victim, signal.SIGKILL)
    assert await slow == Tokenizer.load(folder).apply_chat_template(user("slow"))
    await until(lambda: bool(told))
    assert pool.pids != [victim] and "SIGKILL" in told[0]


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (signal.SIGABRT, TokenizerFailedError, "two tokenizer workers died of this request"),
        (signal.SIGKILL, TokenizerUnavailableError, "two tokenizer workers were stopped or killed .* try again"),
    ],
)
async def test_a_job_that_two_workers_died_of_fails_alone_and_is_blamed_only_if_nobody_killed_them(
    start: Any, number: int, kind: type[Exception], words: str
) -> None:
    pool = await start(log=lambda _: None)
    endless = asyncio.create_task(pool.render(user("endless")))
    others = asyncio.create_task(pool.encode(["waits"]))
    for _ in range(2):
        await until(lambda: bool(pool.pids))
        [victim] = pool.pids
        await until(lambda: pool._num_busy == 1)
        os.kill(victim, number)
        await until(lambda victim=victim: victim not in pool.pids)
    with pytest.raises(TokenizerFailedError, match=words) as failed:
        await endless
    assert failed.type is kind
    assert await others


async def test_a_worker_that_dies_idle_is_replaced_at_once(start: Any) -> None:
    pool = await start(log=lambda _: None)
    [victim] = pool.pids
    os.kill(victim, signal.SIGKILL)
    await until(lambda: bool(pool.pids) and pool.pids != [victim])
    assert await pool.encode(["x"])


async def test_workers_that_cannot_be_replaced_fail_the_jobs_that_wait(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "LONGEST_PAUSE", 0.2)
    told: list[str] = []
    pool = await start(log=told.append)
    python = sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    os.kill(pool.pids[0], signal.SIGKILL)
    await until(lambda: len(told) >= 2)
    with pytest.raises(TokenizerUnavailableError, match="no tokenizer worker can be started"):
        await pool.encode(["x"])
    monkeypatch.setattr(sys, "executable", python)
    await until(lambda: bool(pool.pids))
    assert await pool.encode(["x"])


async def test_a_worker_is_replaced_as_soon_as_there_are_file_descriptors_again(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "LONGEST_PAUSE", 0.2)
    pool = await start(workers=1)
    pair = tokenizer_pool.socket.socketpair

    def none_left() -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tokenizer_pool.socket, "socketpair", none_left)
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(TokenizerFailedError):
        await asyncio.wait_for(pool.encode(["x"]), 60)
    monkeypatch.setattr(tokenizer_pool.socket, "socketpair", pair)
    await until(lambda: pool.pids)
    assert await pool.encode(["x"])


async def test_a_template_that_takes_all_memory_fails_alone(start: Any) -> None:
    pool = await start(memory_bytes=128 << 20)
    before = pool.pids
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="more memory"):
            await pool.render(user("greedy"))
    assert (await pool.render(user("x"))).token_ids
    assert pool.pids == before


async def test_a_text_that_takes_all_memory_fails_alone(start: Any) -> None:
    pool = await start(memory_bytes=32 << 20, log=lambda _: None)
    with pytest.raises((TokenizerFailedError, RequestError), match="memory"):
        await pool.encode(["hello world, " * 200_000])
    assert await pool.encode(["x"])


# -- callers that leave, order, and the end ------------------------------------------------------------------


async def test_a_caller_that_gives_up_frees_its_worker(start: Any) -> None:
    pool = await start(deadline=600.0, log=lambda _: None)
    endless = asyncio.create_task(pool.render(user("endless")))
    queued = asyncio.create_task(pool.render(user("endless")))
    await until(lambda: pool._num_busy == 1 and pool.num_waiting == 1)
    endless.cancel()
    queued.cancel()
    began = time.monotonic()
    assert await pool.encode(["x"])
    assert time.monotonic() - began < 60.0  # and not the deadline


async def test_nothing_is_kept_of_a_job_that_its_caller_gave_up_before_its_turn(start: Any) -> None:
    pool = await start(workers=1, log=lambda _: None)
    busy = asyncio.create_task(pool.render(user("endless")))
    await until(lambda: pool._num_busy == 1)
    given_up = [asyncio.create_task(pool.encode(["x" * size])) for size in (10, 100_000)]
    await until(lambda: pool.num_waiting == 2)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    assert not any(pool._waiting)
    busy.cancel()


async def test_a_caller_that_gives_up_on_a_short_job_costs_no_worker(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "ABANDONED_SECONDS", 30.0)
    pool = await start()
    before = pool.pids
    for _ in range(3):
        task = asyncio.create_task(pool.render(user("slow")))
        await until(lambda task=task: pool._num_busy == 1 or task.done())
        task.cancel()
        assert await pool.encode(["y"])
    assert pool.pids == before


async def test_large_jobs_leave_a_worker_to_small_ones(start: Any) -> None:
    pool = await start(2)
    await until(lambda: len(pool.pids) == 2)
    large = [asyncio.create_task(pool.render([*user("endless"), *user("x" * LARGE_BYTES)])) for _ in range(3)]
    for index in range(20):
        assert await pool.encode([f"small {index}"])
    assert pool._num_busy == 1 and pool.num_waiting == 2
    for task in large:
        task.cancel()


async def test_with_one_worker_small_jobs_take_turns_with_the_parts_of_a_long_list(start: Any) -> None:
    pool = await start()
    order: list[str] = []
    many = asyncio.create_task(pool.encode(["hello world " * 5000] * 20))
    many.add_done_callback(lambda _: order.append("many"))
    await until(lambda: pool.num_waiting > 0)
    small = asyncio.create_task(pool.encode(["small"]))
    small.add_done_callback(lambda _: order.append("small"))
    await asyncio.gather(many, small)
    assert order == ["small", "many"]


async def test_closing_ends_every_process_and_every_job(start: Any) -> None:
    pool = await start(2)
    await until(lambda: len(pool.pids) == 2)
    pids = pool.pids
    jobs = [asyncio.create_task(pool.render(user("endless"))) for _ in range(4)]
    await until(lambda: pool._num_busy == 2)
    await pool.close()
    await pool.close()
    assert all(is_gone(pid) for pid in pids)
    for job in jobs:
        with pytest.raises(EngineClosedError):
            await job
    with pytest.raises(EngineClosedError):
        await pool.encode(["x"])


async def test_closing_at_the_moment_at_which_a_job_comes_ends_both(start: Any) -> None:
    pool = await start()
    await asyncio.sleep(0.1)  # the workers wait for a job
    job = asyncio.ensure_future(pool.encode(["a"]))
    await asyncio.sleep(0)  # it is queued, and no worker has seen that yet
    async with asyncio.timeout(10.0):
        await pool.close()
    with pytest.raises(EngineClosedError):
        await job
    assert pool.pids == []


async def test_closing_while_workers_start_leaves_no_process(folder: Path) -> None:
    for pause in (0.0, 0.02, 0.1):
        pool = TokenizerPool(folder, 2, 60.0)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(pause)
        if starting.done():  # a fast machine: there is nothing left to cancel
            await pool.close()
        else:
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        assert pool.pids == []
    assert not any("tokenizer_worker" in command_of(child) for child in children_of(os.getpid()))


async def test_workers_die_with_their_parent_even_in_mid_job(folder: Path) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from quire.text.tokenizer_pool import TokenizerPool\n"
        "async def main():\n"
        "    pool = TokenizerPool(Path(sys.argv[1]), 1, 600.0)\n"
        "    await pool.start()\n"
        "    job = asyncio.create_task(pool.render([{'role': 'user', 'content': 'endless'}]))\n"
        "    while pool.num_waiting or not pool._num_busy: await asyncio.sleep(0.01)\n"
        "    print(*pool.pids, flush=True)\n"
        "    await job\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert not is_gone(worker)
        parent.kill()
        parent.wait()
    await until(lambda: is_gone(worker))


async def test_the_terminals_signals_do_not_end_a_worker(start: Any) -> None:
    pool = await start()
    before = pool.pids
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(before[0], number)
    assert await pool.encode(["x"])
    assert pool.pids == before


def test_neither_the_pool_nor_a_worker_imports_torch() -> None:
    code = "import sys, quire.text.tokenizer_pool, quire.text.tokenizer_worker; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "False"


async def test_grammars_that_take_much_memory_are_refused_and_leave_none(start: Any) -> None:
    """They never get to an engine, and one whose compilation kills its worker does so twice."""
    pool = await start()
    ordinary = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "string"}}})
    await pool.compile_grammar(ordinary)
    [worker] = pool.pids
    before = resident_bytes(worker)
    for number in range(4):
        with pytest.raises(SamplingParamsError, match="MiB when it is compiled"):
            await pool.compile_grammar(StructuredOutputsParams(regex=f"(a{{{400 + number}}}){{1000}}"))
    await pool.compile_grammar(ordinary)
    assert pool.pids == [worker] and resident_bytes(worker) - before < 300 << 20
    small = await start(memory_bytes=64 << 20)
    with pytest.raises((TokenizerFailedError, RequestError)):
        await small.compile_grammar(StructuredOutputsParams(regex="(a{400}){1000}"))
    await small.compile_grammar(ordinary)
