"""`quire trace`: what the scheduler did, as it is printed."""

from __future__ import annotations

import os
import re

import pytest
from rich.console import Console

from quire.cli.main import main
from quire.cli.trace_replay import Replay, Traced
from quire.cli.trace_view import TraceView
from quire.config import EngineConfig

PROMPTS = ["the quick brown fox jumps", "the quick brown dog sleeps", "a cat"]


def traced(prompts: list[str] = PROMPTS, output: str = "0123456789") -> list[Traced]:
    """Requests whose tokens are characters."""
    texts = {ord(letter): letter for text in (*prompts, output) for letter in text}
    return [
        Traced("ABC"[number], list(map(ord, prompt)), list(map(ord, output)), texts, "length")
        for number, prompt in enumerate(prompts)
    ]


def shown(block_size: int = 4, apart: int = 0, requests: list[Traced] | None = None, **options: object) -> str:
    given = {
        "model": "x",
        "num_kv_blocks": 64,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "min_chunk": 8,
    } | options
    console = Console(record=True, width=200, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    replay = Replay(EngineConfig.from_options(given), block_size, requests or traced())
    TraceView(replay, console).show(apart)
    console.file.close()
    return console.export_text()


@pytest.mark.parametrize("block_size", [1, 3, 4, 100])
def test_blocks_of_any_size_end_in_the_same_tokens(block_size: int) -> None:
    text = shown(block_size, num_kv_blocks=200)
    ends = re.findall(r"([ABC])  ends      length: (.*)", text)
    assert sorted(ends) == [(name, '"0123456789"') for name in "ABC"]


def test_a_prompt_is_cut_into_chunks_and_its_beginning_found_by_the_next() -> None:
    text = shown(apart=3)
    assert re.search(r"A  chunk     at 0-15 +\+1,2,3,4", text)
    assert re.search(r"A  prefill   at 16-24", text)
    assert "B  finds     16 of 26 tokens are in the cache" in text
    assert "(AB)" in text and "+" in re.findall(r"pool (\S+)", text)[5]


def test_requests_that_begin_alike_wait_for_the_first_one() -> None:
    assert "B  waits     what it begins with is being computed" in shown(max_num_batched_tokens=64)
    assert "waits" not in shown(max_num_batched_tokens=64, prefix_cache="off")


def test_a_request_that_gives_way_is_seen_and_computed_again() -> None:
    text = shown(num_kv_blocks=12)
    assert "gives way" in text and "recompute" in text
    assert not text.rstrip().endswith("; 0 preemptions")


def test_the_command_shows_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "def f(", "def f(", "demo", "--block-size", "2", "--max-tokens", "3", "--apart", "2"]) == 0
    text, told = capsys.readouterr()
    assert text.startswith("Blocks of 2 tokens, 32 of them; at most 16 tokens a step; prefix cache: radix\n")
    assert "B  finds     " in text and " steps, " in text.splitlines()[-1]
    assert told == "'demo' is taken as a prompt, and demo as the model; to trace that model: --model demo\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--block-size", "0"], "--block-size is 0; it must be from 1 to 4096"),
        (["--apart", "-1"], "--apart is -1"),
        (["--max-num-batched-tokens", "4"], "max_num_batched_tokens"),
        (["--num-kv-blocks", "1"], "--num-kv-blocks is 1"),
        (["a"] * 27, "27 prompts are too many"),
    ],
)
def test_what_is_not_allowed_is_refused_before_the_model_is_loaded(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_pool_that_could_not_hold_a_request_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--num-kv-blocks", "3"]) == 2
    assert "block" in capsys.readouterr().err


def test_a_reader_that_leaves_ends_it_as_any_command() -> None:
    from quire.cli.terminal import console

    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, pytest.raises(BrokenPipeError):
        to = console()
        to.file = pipe
        try:
            to.print("x" * 100_000)
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # for the file's own flush
