"""A group whose ranks are on several machines: what each has written is mirrored to the others."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire.errors import RankLostError, StepGivenUpError
from quire.ops.cpu.group import SharedGroup, new_memory
from quire.ops.cpu.mirror import Mirror
from quire.parallel.group import Gather
from tests.test_parallel_group import all_of

MATRIX = 4096
ROOM = MATRIX + 2 * 256 * 64  # with the heads of what is exchanged


@contextmanager
def machines(*sizes: int, timeout: float = 20.0, delay: float = 0.0) -> Iterator[list[SharedGroup]]:
    """A group on so many machines, each with so many ranks: memories of their own, and what carries between them."""
    memories, bells = [new_memory(MATRIX) for _ in sizes], [os.eventfd(0, os.EFD_NONBLOCK) for _ in sizes]
    total, stop, rnd = sum(sizes), threading.Event(), random.Random(1)
    owns = [range(sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]
    mirrors = [Mirror(memory, MATRIX, total, own) for memory, own in zip(memories, owns, strict=True)]

    def carry() -> None:
        while not stop.is_set():
            for mirror in mirrors:
                for rank, news in mirror.news():
                    for other in mirrors:
                        if other is not mirror:
                            time.sleep(rnd.random() * delay)
                            other.bring(rank, memoryview(news))
            time.sleep(1e-5)

    carrier = threading.Thread(target=carry)
    carrier.start()
    try:
        yield [
            SharedGroup(memories[number], MATRIX, rank, total, timeout, bell=bells[number])
            for number, own in enumerate(owns)
            for rank in own
        ]
    finally:
        stop.set()
        carrier.join()
        for descriptor in (*memories, *bells):
            os.close(descriptor)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2, 1)])
def test_a_gather_over_machines_gives_every_rank_all_columns(sizes: tuple[int, ...]) -> None:
    rnd = random.Random(len(sizes))
    with machines(*sizes, delay=2e-4) as groups:
        for _ in range(40):
            rows, width = rnd.randrange(1, 40), rnd.randrange(sum(sizes), 300)
            dtype = rnd.choice([torch.float32, torch.bfloat16])
            whole = torch.randn(rows, width).to(dtype)

            def gather(group: SharedGroup, whole: torch.Tensor = whole, width: int = width) -> torch.Tensor:
                together = Gather(group, width)
                return together(whole[:, together.own.start : together.own.stop])

            assert all(torch.equal(found, whole) for found in all_of(groups, gather))


def test_steps_that_are_given_up_on_any_machine_are_given_up_on_all() -> None:
    """Whatever comes late; ranks that go on find nothing of what was before."""
    rnd = random.Random(5)
    plan = [(rnd.randrange(4), rnd.randrange(3)) for _ in range(60)]
    one_each = [range(rank, rank + 1) for rank in range(4)]
    with machines(2, 1, 1, delay=3e-4) as groups:

        def go_on(group: SharedGroup) -> list[int]:
            sums = []
            for step, (culprit, gathers) in enumerate(plan):
                try:
                    group.resume(2 * step + 1)
                    for number in range(3):
                        if group.rank == culprit and number == gathers:
                            group.give_up(2 * step + 1)
                        group.all_gather(torch.full((1, 1), 100 * step + number), one_each)
                    group.check(step)
                except StepGivenUpError:
                    pass
                group.resume(2 * step + 2)
                found = group.all_gather(torch.full((1, 1), 10 * step + group.rank), one_each)
                sums.append(int(found.sum()))
                with contextlib.suppress(StepGivenUpError):  # who is through may begin anew already
                    group.check(step)
            return sums

        expected = [40 * step + 6 for step in range(len(plan))]
        assert all_of(groups, go_on) == [expected] * 4


def test_a_rank_that_is_lost_on_one_machine_is_lost_on_all() -> None:
    with machines(2, 1) as groups:
        threading.Timer(0.2, lambda: groups[2].lose(1)).start()
        begin = time.monotonic()
        answers = all_of([groups[0], groups[2]], lambda group: group.check(1))
        assert [type(answer) for answer in answers] == [RankLostError] * 2
        assert [answer.rank for answer in answers] == [1, 1]
        assert time.monotonic() - begin < 5


def test_a_counter_that_grows_into_its_upper_half_is_no_new_beginning() -> None:
    """After 2^32 collectives without a step that was given up, which ranks of two machines reach within weeks."""
    memory = new_memory(MATRIX)
    here, there = Mirror(memory, MATRIX, 2, range(1, 2)), Mirror(memory, MATRIX, 2, range(1))
    here._seen[1] = 2**32 - 3
    for arrived in range(2**32 - 2, 2**32 + 4):
        news = struct.pack("<QQqqqq", arrived, arrived % 1000, 0, 0, 0, 0)
        there.bring(1, memoryview(news))  # stands for the rank
        assert [(rank, bytes(each)) for rank, each in here.news()] == [(1, news)]
    os.close(memory)


def test_a_mirror_takes_nothing_that_does_not_fit(tmp_path: Path) -> None:
    memory = new_memory(MATRIX)
    mirror = Mirror(memory, MATRIX, 3, range(1))
    good = struct.pack("<QQqqqq", 1, 7, 0, 8, 8, 1) + bytes(8)
    wrong = [
        (0, good),  # a rank of its own
        (3, good),
        (1, good[:-1]),
        (1, good[:20]),
        (1, struct.pack("<QQqqqq", 1, 7, -8, 8, 8, 1) + bytes(8)),
        (1, struct.pack("<QQqqqq", 1, 7, ROOM - 7, 8, 8, 1) + bytes(8)),
        (1, struct.pack("<QQqqqq", 1, 7, 0, 8, ROOM, 2) + bytes(16)),
        (1, struct.pack("<QQqqqq", 1, 7, 0, 8, 4, 2) + bytes(16)),
        (1, struct.pack("<QQqqqq", 1, 7, 0, 2**62, 2**62, 4) + bytes(8)),
    ]
    for rank, told in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            mirror.bring(rank, memoryview(told))
    mirror.bring(1, memoryview(good))
    with pytest.raises(ValueError, match="do not fit"):
        mirror.bring(1, memoryview(good))  # again
    os.close(memory)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_what_ranks_exchange_over_machines_may_be_of_any_size(sizes: tuple[int, ...]) -> None:
    rnd = random.Random(3)
    with machines(*sizes) as groups:
        for word in range(20):
            parts = [torch.randint(0, 255, (rnd.choice([0, 1, 700, 1300]),), dtype=torch.uint8) for _ in groups]
            for found in all_of(
                groups,
                lambda group, parts=parts, word=word: [  # type: ignore[misc]
                    part.clone() for part in group.exchange([parts[group.rank]], word)
                ],
            ):
                assert all(map(torch.equal, found, parts))
        x = [torch.full((3, 8), float(rank)) for rank in range(len(groups))]
        for total in all_of(groups, lambda group: group.all_reduce(x[group.rank])):
            assert torch.equal(total, sum(x[1:], x[0]))
