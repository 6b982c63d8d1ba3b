"""Ranks on several machines: two processes that join over the loopback, and what joins them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from quire.ops.cpu.group import SharedGroup, new_memory
from quire.ops.cpu.mirror import Mirror
from quire.parallel.group import share
from tests.test_parallel_group import all_of

MATRIX = 4096


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
                own = share(width, group)
                return group.all_gather(whole[:, own.start : own.stop], own.start, width)

            assert all(torch.equal(found, whole) for found in all_of(groups, gather))
