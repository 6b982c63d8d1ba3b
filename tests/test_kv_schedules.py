"""Prefill and decode apart, two engines of this process in two networks, while the cable is pulled, messages come late
and twice, reads fail, bytes change on the way, in slots and on the disk, and the disk is full: every request ends with
one engine's tokens, and nothing is lost. What happens to processes is in `test_kv_faults.py`.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.kv import exporter, importer, wire
from quire.kv.mailbox import Mailbox
from quire.kv.transport.base import Range, TransferError
from quire.kv.transport.shared import SharedMemoryLink
from quire.kv.transport.socket import SocketLink
from tests.http_tools import wait_until
from tests.networks import Networks, networks
from tests.test_kv_faults import OPTIONS, Decoder, expected
from tests.test_kv_pool import settled
from tests.test_kv_prefill import Outcome, Prefill

__all__ = ["expected", "networks"]  # fixtures

SILENCE = 0.4
"""Seconds: what these tests need not wait longer for."""

FAULTS = "pull", "late", "twice", "fail", "change", "full"
"""What may be so for a while; `change`: bytes on the way."""

WEIGHTS = {
    "ask": 30,
    "steps": 50,
    "abort": 3,
    "forget": 5,
    "forget all": 2,
    "stop": 3,
    "go on": 6,
    "restart": 1,
    "slot": 5,
    "segment": 4,
    "begin": 8,
    "end": 10,
}
"""Of what happens: `begin` and `end` are those of one of the `FAULTS`, `slot` and `segment` a bit that flips there."""


class Faults:
    """Patches what brings messages and bytes; nothing is wrong before it is switched on.

    Attributes:
        on: those of `FAULTS`. happened: how often each had an effect.
    """

    def __init__(self, rnd: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.rnd, self.on, self.happened = rnd, set[str](), Counter[str]()
        send, post = exporter.Exporter._send, Mailbox.post
        write = os.pwritev

        def sent(exporting: Any, who: bytes, message: wire.FromExporter) -> None:
            if self.strikes("late"):
                time.sleep(rnd.uniform(0.0, 0.05))
            for _ in range(2 if self.strikes("twice") else 1):
                send(exporting, who, message)

        def posted(mailbox: Mailbox, news: object) -> None:
            post(mailbox, news)
            if isinstance(news, wire.Want | wire.Got | wire.Cancel) and self.strikes("twice"):
                post(mailbox, news)

        def written(descriptor: int, buffers: list[Any], offset: int) -> int:
            if self.strikes("full"):
                write(descriptor, [bytes(buffers[0])[: rnd.randrange(60)]], offset)
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, buffers, offset)

        patch.setattr(exporter.Exporter, "_send", sent)
        patch.setattr(Mailbox, "post", posted)
        patch.setattr(os, "pwritev", written)
        for kind in (SharedMemoryLink, SocketLink):
            patch.setattr(kind, "read", self._reading(kind.read))

    def strikes(self, fault: str) -> bool:
        """Whether a fault has an effect this time."""
        struck = fault in self.on and self.rnd.random() < 0.5
        self.happened[fault] += struck
        return struck

    def _reading(self, read: Any) -> Any:
        def reads(link: Any, ranges: Sequence[Range], seconds: float) -> None:
            if self.strikes("fail"):
                read(link, ranges[: len(ranges) // 2], seconds)
                raise TransferError("the wire was cut")
            read(link, ranges, seconds)
            if ranges and self.strikes("change"):
                _, target, length = self.rnd.choice(ranges)
                flip(link._memory, target, length, self.rnd)

        return reads


def flip(memory: Any, first: int, length: int, rnd: random.Random) -> None:
    """One bit of a range."""
    memory[first + rnd.randrange(length)] ^= 1 << rnd.randrange(8)


class Pair:
    """Both engines.

    Args:
        threads: what is started there is in the network of the engine that decodes, or in that of the other one.
    """

    def __init__(
        self,
        rnd: random.Random,
        folder: Path,
        cable: Networks | None,
        threads: Sequence[ThreadPoolExecutor],
        expected: list[Outcome],
        faults: Faults,
    ) -> None:
        self.rnd, self.cable, self.threads, self.expected, self.faults = rnd, cable, threads, expected, faults
        self.folder, self.key = folder / "disk", folder / "key"
        self.key.touch(0o600)
        self.key.write_text("a secret of this cluster")
        self.transport = rnd.choice(["shared_memory", "socket"])
        host = cable.addresses[1] if cable else "127.0.0.1"
        self.there = {
            **OPTIONS,
            "check_invariants": True,
            "cluster_key_file": str(self.key),
            "kv_host": host,
            "kv_transport": self.transport,
            "host_kv_memory": rnd.choice(["1MiB", "2MiB"]),  # slots for fewer blocks than the prompts have, or for more
        }
        self.prefill = self._begin_prefill()
        more = {"disk_kv_path": str(self.folder), "disk_kv_memory": rnd.choice(["1MiB", "64MiB"])}
        address = self.prefill.address
        self.decoder = (
            threads[0]
            .submit(Decoder, address, str(self.key), expected, self.transport, **(more if rnd.random() < 0.6 else {}))
            .result()
        )
        self.there["kv_port"] = int(address.rpartition(":")[2])
        if rnd.random() < 0.9:
            wait_until(lambda: self.decoder.ready)

    def _begin_prefill(self) -> Prefill:
        return self.threads[1].submit(lambda: Prefill(**self.there)).result()

    # -- what happens ----------------------------------------------------------------------------------------

    def happen(self, what: str) -> None:
        decoder, rnd = self.decoder, self.rnd
        match what:
            case "ask" if len(decoder.outcomes) < 6:
                decoder.add(rnd.randrange(8))
            case "steps":
                for _ in range(rnd.randrange(12)):
                    decoder.step()
            case "abort" if decoder.outcomes:
                decoder.abort(rnd.choice(list(decoder.outcomes)))
            case "forget":
                decoder.forget()
            case "forget all":
                decoder.forget_all()
            case "stop":
                self.prefill.hold.set()
            case "go on":
                self.prefill.hold.clear()
            case "restart":
                self.prefill.close()
                self.prefill = self._begin_prefill()
            case "slot":
                host = rnd.choice([decoder.engine, self.prefill.engine]).tiers.host
                flip(host.region.memory, 0, len(host.region.memory), rnd)
            case "segment":
                for file in self.folder.glob("*.kv"):
                    with file.open("r+b") as opened:
                        content = bytearray(opened.read())
                        flip(content, 0, len(content), rnd) if content else None
                        opened.seek(0)
                        opened.write(content)
            case "begin":
                self.switch(rnd.choice([*FAULTS, "full", "full"]), on=True)  # disks are seldom written to
            case "end" if self.faults.on:
                self.switch(rnd.choice(sorted(self.faults.on)), on=False)

    def switch(self, fault: str, *, on: bool) -> None:
        if (fault in self.faults.on) is not on:
            (self.faults.on.add if on else self.faults.on.remove)(fault)
            if fault == "pull" and self.cable:
                (self.cable.pull if on else self.cable.plug)()
                self.faults.happened["pull"] += on

    def close(self) -> int:
        """All requests end, right, and nothing is held anywhere; the blocks that came."""
        for fault in FAULTS:
            self.switch(fault, on=False)
        self.prefill.hold.clear()
        self.decoder.serve()
        there = self.prefill.engine
        here = self.decoder.engine

        def over() -> bool:  # reads for requests that were aborted, and writes, end without a step
            here.exchange()
            return settled(here.scheduler.kv)

        wait_until(over)
        read = self.decoder.read
        self.decoder.close()
        wait_until(
            lambda: (
                there.idle and settled(there.scheduler.kv) and not there.scheduler.kv.external.sources.exports.under_way
            )
        )
        self.prefill.close()
        return read


@pytest.fixture
def cable(request: pytest.FixtureRequest) -> Networks | None:
    """None where there may be no networks: then no cable is pulled."""
    try:
        return request.getfixturevalue("networks")
    except pytest.skip.Exception:
        return None


@pytest.fixture
def threads(cable: Networks | None) -> Iterator[list[ThreadPoolExecutor]]:
    made = [cable.thread(side) if cable else ThreadPoolExecutor(1) for side in range(2)]
    yield made
    for each in made:
        each.shutdown()


def run(
    seeds: range,
    cable: Networks | None,
    threads: list[ThreadPoolExecutor],
    expected: list[Outcome],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Counter[str]:
    """Schedules; how often what happened, and the blocks that came."""
    monkeypatch.setattr(wire, "SILENCE_SECONDS", SILENCE)
    monkeypatch.setattr(wire, "BEAT_SECONDS", SILENCE / 5)
    monkeypatch.setattr(importer, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(importer, "MOST_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(importer, "REST_SECONDS", 0.05)
    total = Counter[str]()
    for seed in seeds:
        rnd = random.Random(seed)
        own = folder / str(seed)
        own.mkdir()
        with monkeypatch.context() as patch:
            faults = Faults(rnd, patch)
            pair = Pair(rnd, own, cable, threads, expected, faults)
            for _ in range(50):
                [what] = rnd.choices([*WEIGHTS], [*WEIGHTS.values()])
                total[what] += 1
                pair.happen(what)
            total["blocks"] += pair.close()
            total += faults.happened
    return total


SHORT = 6
"""Schedules that `make test` has."""


@pytest.mark.slow
def test_whatever_happens_between_two_engines_every_request_ends_right(
    cable: Networks | None,
    threads: list[ThreadPoolExecutor],
    expected: list[Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = run(range(SHORT), cable, threads, expected, tmp_path, monkeypatch)
    assert total["blocks"], total


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 900, 100))
def test_nine_hundred_fault_schedules(
    first: int,
    cable: Networks | None,
    threads: list[ThreadPoolExecutor],
    expected: list[Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = run(range(first, first + 100), cable, threads, expected, tmp_path, monkeypatch)
    print(first, total)
    assert all(total[fault] for fault in FAULTS if fault != "pull" or cable), total
