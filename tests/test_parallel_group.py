"""What ranks do together, over shared memory: threads stand for the processes."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.engine.link import Link
from quire.errors import RankLostError, RanksDisagreeError, StepGivenUpError
from quire.ops.cpu.group import SharedGroup, new_memory
from quire.parallel.group import OneRank, own_heads, share
from tests.compiled import CPP, ENVIRONMENT, KERNELS
from tests.oracle import save_checkpoint
from tests.test_cpu_team import program

SOURCES = (CPP / "group_test.cpp", KERNELS / "group.cpp", KERNELS / "team.cpp")
LONG = ("gathers", "exchanges")
"""Under ThreadSanitizer."""
TESTS = re.findall(r'\{"(\w+)", \1\}', SOURCES[0].read_text())


@pytest.mark.quick(
    "exchanges-plain",
    "differing_words-plain",
    "steps_are_given_up-plain",
    "numbers_beyond_32_bits-plain",
    "a_matrix_that_has_no_room-plain",
    "who_is_lost-plain",
    "differing_digests-plain",
    "differing_shapes-plain",
    "steps_that_one_never_begins-plain",
    "steps_that_one_never_begins-thread",
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("name", "sanitizer"),
    [
        *((name, "plain") for name in TESTS),
        *((name, "thread") for name in TESTS if name not in LONG),
        *(pytest.param(name, "thread", marks=pytest.mark.slow) for name in LONG),
    ],
)
def test_the_group_keeps_its_promises(name: str, sanitizer: str) -> None:
    command = [*program(sanitizer, SOURCES), name]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


@contextmanager
def ranks(size: int, matrix_bytes: int = 4096, timeout: float = 20.0) -> Iterator[list[SharedGroup]]:
    memory = new_memory(matrix_bytes)
    try:
        yield [SharedGroup(memory, matrix_bytes, rank, size, timeout) for rank in range(size)]
    finally:
        os.close(memory)


ONE_EACH = [range(rank, rank + 1) for rank in range(3)]


def shares(width: int, size: int) -> list[range]:
    """What each rank has of so many columns."""
    return [share(width, OneRank(rank, size)) for rank in range(size)]


def all_of(groups: list[SharedGroup], call: Callable[[SharedGroup], Any]) -> list[Any]:
    """What `call` returns, or raises, on each rank, all at the same time."""

    def run(group: SharedGroup) -> Any:
        try:
            return call(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, groups))


@given(size=st.integers(1, 5000), ranks=st.integers(1, 16))
def test_shares_are_all_of_it_once_and_of_nearly_equal_size(size: int, ranks: int) -> None:
    if size < ranks:
        return
    of_each = shares(size, ranks)
    assert [column for each in of_each for column in each] == list(range(size))
    assert max(map(len, of_each)) - min(map(len, of_each)) <= 32


@given(heads=st.sampled_from([1, 2, 4, 8, 12]), width=st.integers(1, 80), ranks=st.sampled_from([1, 2, 4, 8]))
def test_heads_are_not_cut_and_are_shared_where_there_are_too_few(heads: int, width: int, ranks: int) -> None:
    if heads % ranks and ranks % heads:
        return
    for rank in range(ranks):
        member = OneRank(rank, ranks)
        own = share(heads * width, member, heads)
        assert own.start % width == 0 and len(own) == own_heads(heads, member) * width
        assert len(own) == max(1, heads // ranks) * width
        first_query = rank * (heads * ranks) // ranks  # of as many queries a head as there are ranks
        assert own.start // width == first_query // ranks or heads > ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gather_gives_every_rank_all_columns(size: int) -> None:
    rnd = random.Random(size)
    with ranks(size) as groups:
        for _ in range(60):
            rows, width = rnd.randrange(1, 40), rnd.randrange(size, 300)  # often more than there is room for at a time
            dtype = rnd.choice([torch.float32, torch.bfloat16])
            whole = torch.randn(rows, width).to(dtype)

            def gather(group: SharedGroup, whole: torch.Tensor = whole, width: int = width) -> torch.Tensor:
                own = share(width, group)
                time.sleep(rnd.choice([0, 0, 0, 1e-4, 2e-3]))  # others spin, or sleep
                return group.all_gather(whole[:, own.start : own.stop], shares(width, size))

            assert all(torch.equal(found, whole) for found in all_of(groups, gather))
        assert len({group.counts[0] for group in groups}) == 1


def test_one_rank_gathers_nothing() -> None:
    x = torch.randn(3, 5)
    assert OneRank().all_gather(x, [range(5)]) is x


def test_ranks_that_sampled_other_tokens_are_found_out() -> None:
    with ranks(3) as groups:
        assert all_of(groups, lambda group: group.check(7)) == [None] * 3
        assert all(isinstance(e, RanksDisagreeError) for e in all_of(groups, lambda group: group.check(group.rank)))


def test_where_one_gives_up_all_do_until_they_resume() -> None:
    with ranks(3) as groups:

        def step(group: SharedGroup, number: int) -> None:
            group.check(1)
            if group.rank == 1:
                group.give_up(number)
                raise StepGivenUpError
            group.check(2)

        for number in range(5, 50, 5):
            given_up = all_of(groups, lambda group, n=number: step(group, n - 3))  # type: ignore[misc]
            assert all(isinstance(e, StepGivenUpError) for e in given_up)
            assert all(isinstance(e, StepGivenUpError) for e in all_of(groups, lambda group: group.check(3)))
            assert all_of(groups, lambda group, n=number: group.resume(n)) == [None] * 3  # type: ignore[misc]
            assert all_of(groups, lambda group: group.check(4)) == [None] * 3


def test_who_begins_anew_with_a_plan_that_was_given_up_too_is_told_and_waited_for() -> None:
    def begin(group: SharedGroup) -> None:
        if group.rank == 0:
            with pytest.raises(StepGivenUpError):
                group.resume(3)
        group.resume(4)
        group.check(1)

    with ranks(2) as groups:
        assert all_of(groups, begin) == [None, None]


def test_what_a_rank_left_out_is_not_taken_for_what_comes_later() -> None:
    """One rank is interrupted before its step, which the others have begun."""
    with ranks(3) as groups:

        def go_on(group: SharedGroup) -> list[int]:
            if group.rank == 0:
                time.sleep(0.01)  # the others wait for it
            else:
                with pytest.raises(StepGivenUpError):
                    group.all_gather(torch.full((1, 1), -1), ONE_EACH)
                group.give_up(7)
            group.resume(8)
            return group.all_gather(torch.full((1, 1), group.rank), ONE_EACH).tolist()[0]

        assert all_of(groups, go_on) == [[0, 1, 2]] * 3


def test_ranks_that_gather_other_shapes_are_found_out() -> None:
    with ranks(2) as groups:
        answers = all_of(groups, lambda group: group.all_gather(torch.zeros(1 + group.rank, 1), ONE_EACH[:2]))
        assert all(isinstance(answer, RanksDisagreeError) for answer in answers)


class Interrupting:
    """A socket whose calls are interrupted as by Ctrl-C, now and then, before or after they have sent something."""

    def __init__(self, luck: random.Random) -> None:
        self.sent, self._luck = bytearray(), luck

    def send(self, data: memoryview) -> int:
        if self._luck.random() < 0.3:
            raise KeyboardInterrupt
        part = bytes(data[: self._luck.randrange(1, len(data) + 1)])
        self.sent += part
        return len(part)


def test_a_message_that_was_interrupted_is_sent_to_its_end_before_the_next() -> None:
    luck = random.Random(0)
    stream = Interrupting(luck)
    link = Link(stream)  # type: ignore[arg-type]
    begun = b""
    for number in range(2000):
        message = number.to_bytes(2, "little") * luck.randrange(1, 30)
        with contextlib.suppress(KeyboardInterrupt):
            link.send(message)
        if link._message[4:] == message:  # else the one before is not sent yet, and this one has not begun
            begun += link._message
    while stream.sent != begun:
        with contextlib.suppress(KeyboardInterrupt):
            link._finish()
        assert begun.startswith(stream.sent)


def test_messages_of_several_threads_all_arrive_once_and_whole() -> None:
    """A replica's rank sends its results while the thread that reads its new experts says that it has them."""
    ours, theirs = socket.socketpair()
    link, told = Link(ours), [bytes([thread]) * (1 + number % 300) for thread in (1, 2) for number in range(2000)]
    with ours, theirs, ThreadPoolExecutor(3) as threads:
        heard = threads.submit(lambda: [Link(theirs).receive() for _ in told])
        list(threads.map(lambda some: list(map(link.send, some)), (told[:2000], told[2000:])))
        ours.shutdown(socket.SHUT_WR)
        assert sorted(each or b"" for each in heard.result()) == sorted(told)
        assert not theirs.recv(1)


def test_a_rank_that_does_not_answer_is_lost_to_all() -> None:
    with ranks(3, timeout=0.3) as groups:
        begin = time.monotonic()
        answers = all_of(groups[:2], lambda group: group.check(1))
        assert 0.2 < time.monotonic() - begin < 5
        assert [error.rank for error in answers] == [2, 2]
        assert all(isinstance(error, RankLostError) for error in answers)
        with pytest.raises(RankLostError):
            groups[2].check(1)


def test_a_rank_that_is_known_to_be_gone_is_not_waited_for() -> None:
    with ranks(2) as groups:
        waiting = threading.Timer(0.3, lambda: groups[0].lose(1))
        waiting.start()
        begin = time.monotonic()
        with pytest.raises(RankLostError, match="rank 1"):
            groups[0].check(1)
        assert time.monotonic() - begin < 5
        waiting.join()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_gathers_four_times_a_layer_and_once_for_the_logits(ranks: int) -> None:
    """So many bytes as the formula says; and nothing is added across ranks: there is no such collective."""
    with LLM("demo", tensor_parallel_size=ranks, threads=1, max_num_batched_tokens=128) as llm:
        found, model = llm._engine._ranks, llm.model
        assert found is not None
        before = found.group.counts
        llm.generate([[5, 6, 7, 8, 9]], SamplingParams(max_tokens=1, temperature=0.0))
        gathers, received = (after - first for after, first in zip(found.group.counts, before, strict=True))
        layer = model.config.layer
        widths = (layer.num_heads * layer.head_dim, layer.hidden_size, layer.intermediate_size, layer.hidden_size)
        lacking = [width - len(share(width, OneRank(0, ranks))) for width in (*widths, model.vocab_size)]
        assert gathers == 4 * model.num_layers + 1
        assert received == 5 * model.num_layers * model.dtype.itemsize * sum(lacking[:4]) + 4 * lacking[4]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_textbook_form_adds_twice_a_layer(ranks: int) -> None:
    """Without `deterministic`: 2 * layers * tokens * hidden numbers are summed, and logits are gathered."""
    options = {"deterministic": False, "max_num_batched_tokens": 128, "threads": 1}
    prompt = list(range(5, 105))
    with LLM("demo", **options) as one, LLM("demo", tensor_parallel_size=ranks, **options) as llm:
        greedy = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
        [expected], [found] = one.generate([prompt], greedy), llm.generate([prompt], greedy)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        [mine], [theirs] = found.outputs[0].logprobs or [], expected.outputs[0].logprobs or []
        token = found.outputs[0].token_ids[0]
        assert abs(mine[token].logprob - theirs[token].logprob) < 0.1
        before = llm._engine.rank_stats()
        llm.generate([prompt[::-1]], greedy)
        after, model = llm._engine.rank_stats(), llm.model
        counted = {name: after[name] - before[name] for name in ("gathers", "all_reduces", "all_reduced_bytes")}
        summed = 2 * model.num_layers * len(prompt) * model.config.layer.hidden_size * model.dtype.itemsize
        assert counted["all_reduces"] == 2 * model.num_layers and counted["all_reduced_bytes"] == summed
        assert any("deterministic=False: ranks add partial sums" in note for note in llm.notes)


@pytest.mark.parametrize(
    ("architecture", "options", "sums"),
    [
        pytest.param("llama", {"quantization": "int8"}, 0, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, 4, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {}, 3, marks=pytest.mark.slow),
        ("qwen3_moe", {"enable_expert_parallel": True}, 2),
    ],
)
def test_what_is_added_up_in_the_textbook_form(
    architecture: str, options: dict[str, Any], sums: int, tmp_path: Path
) -> None:
    """Neither quantized products, of which inputs share a scale, nor those of experts."""
    folder = str(save_checkpoint(tmp_path / "model", architecture, num_hidden_layers=2))
    prompts, greedy = [[5, 6, n] for n in range(3)], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(folder, tensor_parallel_size=2, threads=1, deterministic=False, dtype="float32", **options) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
        steps = llm.stats.steps
        assert llm._engine.rank_stats().get("all_reduces", 0) >= sums * steps
        assert ("all_reduces" in llm._engine.rank_stats()) == bool(sums)
    with LLM(folder, threads=1, deterministic=False, dtype="float32", **options) as one:
        assert [output.outputs[0].token_ids for output in one.generate(prompts, greedy)] == found


def test_sums_are_the_same_on_all_ranks_and_made_in_parts() -> None:
    x = torch.randn(3, 70, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = (x[0].float() + x[1].float() + x[2].float()).bfloat16()
    with ranks(3, matrix_bytes=4096) as groups:
        for found in all_of(groups, lambda group: group.all_reduce(x[group.rank])):
            assert torch.equal(found, expected)
        assert [group.reduced for group in groups] == [(1, x[0].nbytes)] * 3
    assert torch.equal(OneRank().all_reduce(x[0]), x[0])
