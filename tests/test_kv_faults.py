"""Prefill and decode apart while processes are killed and stopped, and connections cut: every request ends with one
engine's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest

from quire.bench.kv_prefill import prefill_process
from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.kv import wire
from quire.kv.transport import installed
from tests.engine_server import EngineServer, until
from tests.forks import FORKS
from tests.http_tools import free_port, wait_until
from tests.networks import Networks, networks
from tests.test_kv_prefill import Outcome, Prefill, params, prompt

__all__ = ["networks"]  # a fixture

LENGTHS = 40, 90, 130, 160
OPTIONS: dict[str, Any] = {
    "model": "demo",
    "threads": 1,
    "num_kv_blocks": 60,
    "max_model_len": 192,
    "host_kv_memory": "2MiB",
    "max_num_batched_tokens": 96,
}
SILENCE = 1.5
"""Seconds: what tests need not wait longer for."""


class Decoder:
    """An engine of this process whose prompts are computed by another process, and what its requests got."""

    def __init__(self, address: str, key: str, expected: list[Outcome], transport: str | None, **more: Any) -> None:
        more |= {"kv_role": "decode", "prefill_url": address, "prefill_min_tokens": 16}
        self.engine = Engine(
            EngineConfig(**OPTIONS, **more, cluster_key_file=key, check_invariants=True, kv_transport=transport)
        )
        self.expected = expected
        self.outcomes: dict[int, tuple[int, Outcome]] = {}
        self._next = 0

    @property
    def ready(self) -> bool:
        importer = self.engine.tiers.importer
        assert importer is not None
        return importer.ready

    @property
    def read(self) -> int:
        return self.engine.stats.kv_tiers["peer"]["loaded"]

    def add(self, text: int) -> None:
        self.outcomes[self._next] = text, []
        self.engine.add(Request(self._next, prompt(LENGTHS[text % 4], text), params(text), max_tokens=8))
        self._next += 1

    def abort(self, number: int) -> None:
        self.engine.abort(number)
        del self.outcomes[number]

    def step(self) -> None:
        for update in self.engine.step():
            assert update.error is None
            if update.request not in self.outcomes:
                continue  # it was aborted
            text, outcome = self.outcomes[update.request]
            for token, entry in zip(update.tokens, update.logprobs or [], strict=True):
                outcome.append((token, tuple(entry.values)))
            if update.finish_reason is not None:
                assert outcome == self.expected[text], f"request {update.request}, prompt {text}"
                del self.outcomes[update.request]

    def serve(self) -> None:
        """All requests, to their ends."""
        end = time.monotonic() + 60.0
        while not self.engine.idle:
            assert time.monotonic() < end, "requests do not end"
            self.step()

    def forget(self) -> None:
        """All that its pool has cached."""
        self.engine.scheduler.kv.cache.clear()

    def forget_all(self) -> None:
        """What its tier has, too, so that prompts are computed elsewhere again: as where a commit fails."""
        self.engine._give_up()

    def close(self) -> None:
        fetches = self.engine.scheduler.kv.external
        kv = self.engine.scheduler.kv
        assert kv.num_available == kv.num_usable and not fetches.tier.pins and not fetches.sources.reads
        assert not fetches.tier.counts["filling"] and not fetches.tier.counts["quarantined"]
        self.engine.close()


@contextlib.asynccontextmanager
async def apart(
    transport: str | None, expected: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[EngineServer, Decoder]]:
    monkeypatch.setattr(wire, "SILENCE_SECONDS", SILENCE)  # of the one that decodes
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        key = Path(name) / "key"
        key.touch(0o600)
        key.write_text("a secret of this cluster")
        port = free_port()
        options = {**OPTIONS, "kv_role": "prefill", "kv_port": port, "kv_transport": transport}
        async with EngineServer(Path(name), **options, cluster_key_file=str(key)) as server:
            await server.ready_client()
            decoder = await asyncio.to_thread(Decoder, f"127.0.0.1:{port}", str(key), expected, transport)
            await until(lambda: decoder.ready)
            yield server, decoder
            await asyncio.to_thread(decoder.close)


async def served(decoder: Decoder) -> None:
    await asyncio.to_thread(decoder.serve)


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    """Of eight prompts, what one engine without a cache says to each."""
    texts = [prompt(LENGTHS[index % 4], index) for index in range(8)]
    outcomes: list[Outcome] = []
    options = {name: value for name, value in OPTIONS.items() if name != "host_kv_memory"}
    engine = Engine(EngineConfig(**options, prefix_cache="off"))
    for index, text in enumerate(texts):
        engine.add(Request(index, text, params(index), max_tokens=8))
        outcomes.append([])
    while not engine.idle:
        for update in engine.step():
            for token, entry in zip(update.tokens, update.logprobs or [], strict=True):
                outcomes[update.request].append((token, tuple(entry.values)))
    engine.close()
    return outcomes


@pytest.mark.parametrize(
    ("number", "transport"),
    [
        (signal.SIGKILL, "shared_memory"),
        pytest.param(signal.SIGKILL, "socket", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "shared_memory", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "socket", marks=pytest.mark.slow),
    ],
)
async def test_a_prefill_process_that_dies_or_hangs_costs_time_and_no_token(
    number: signal.Signals, transport: str, expected: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with apart(transport, expected, monkeypatch) as (server, decoder):
        for text in range(8):
            decoder.add(text)
        while not decoder.read:
            await asyncio.to_thread(decoder.step)
        os.kill(server.process.pid, number)
        await served(decoder)
        assert not decoder.ready or number is signal.SIGKILL
        if number is signal.SIGSTOP:
            await until(lambda: not decoder.ready)
            os.kill(server.process.pid, signal.SIGCONT)
        else:
            await server.replace_engine()
        await until(lambda: decoder.ready)
        read = decoder.read
        for text in range(8):
            decoder.forget_all()
            decoder.add(text)
            await served(decoder)
        assert decoder.read > read


async def chaos(
    rnd: random.Random, seconds: float, decoder: Decoder, faults: Mapping[Callable[[], Awaitable[None] | None], float]
) -> None:
    """Requests, steps, and faults with such weights, at random times."""

    def add() -> None:
        if len(decoder.outcomes) < 6:
            decoder.add(rnd.randrange(8))

    async def steps() -> None:
        for _ in range(rnd.randrange(12)):
            await asyncio.to_thread(decoder.step)

    happens = {add: 30, steps: 60, decoder.forget: 6, **faults}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        [what] = rnd.choices([*happens], [*happens.values()])
        if (doing := what()) is not None:
            await doing


async def chaos_of_processes(
    seed: int, seconds: float, expected: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Kill, stop and continue the process that computes prompts, at random times under load; blocks that came."""
    rnd = random.Random(seed)
    async with apart(rnd.choice(["shared_memory", "socket"]), expected, monkeypatch) as (server, decoder):

        async def kill() -> None:
            server.kill()
            await server.replace_engine()

        def stop() -> None:
            os.kill(server.process.pid, signal.SIGSTOP)

        def go_on() -> None:
            os.kill(server.process.pid, signal.SIGCONT)

        await chaos(rnd, seconds, decoder, {kill: 0.7, stop: 1.5, go_on: 4})
        go_on()
        await served(decoder)
        return decoder.read


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_to_the_prefill_process_every_request_ends_right(
    seed: int, expected: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await chaos_of_processes(seed, 5.0, expected, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_hundred_fault_schedules_of_processes(expected: list[Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with those of `test_kv_schedules.py` they are a thousand."""
    assert sum([await chaos_of_processes(seed, 2.0, expected, monkeypatch) for seed in range(100)])


# -- the process that decodes --------------------------------------------------------------------------------


def decode(address: str, key: str, transport: str, expected: list[Outcome], read: Synchronized[int]) -> None:
    """What a process does that is to be killed: it compares tokens, and tells how many blocks have come."""
    wire.SILENCE_SECONDS = SILENCE
    rnd, decoder = random.Random(), Decoder(address, key, expected, transport)
    while True:
        for _ in range(rnd.randrange(1, 7)):
            decoder.add(rnd.randrange(8))
        decoder.serve()
        decoder.forget_all()
        read.value = decoder.read


class Stopped:
    """A process that decodes, which is stopped, continued and killed.

    Args:
        prefill: the engine that computes prompts for it.
        arguments: the others of `decode`.
    """

    def __init__(self, prefill: Prefill, *arguments: Any) -> None:
        self.prefill = prefill
        self._read = FORKS.Value("i", 0)
        self.process = FORKS.Process(target=decode, args=(prefill.address, *arguments, self._read), daemon=True)
        self.process.start()
        self.reads()

    def reads(self) -> None:
        """Wait until blocks have come, in which a token had been wrong otherwise."""
        before = self._read.value
        wait_until(lambda: self._read.value > before or not self.process.is_alive(), 240.0)
        assert self.process.is_alive(), "its tokens are not those of one engine"

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def given_up(self) -> None:
        """Wait until nothing is kept for it."""
        engine = self.prefill.engine
        kv = engine.scheduler.kv
        wait_until(lambda: engine.idle and not kv.external.sources.exports.under_way and not kv.external.tier.pins)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("transport", "rounds"),
    [("shared_memory", 1), *(pytest.param(name, 20, marks=pytest.mark.slow) for name in installed())],
)
def test_a_decode_process_that_is_stopped_and_killed_leaves_nothing_behind_and_reads_no_wrong_block(
    transport: str, rounds: int, expected: list[Outcome], cluster_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE_SECONDS", SILENCE)
    few = {**OPTIONS, "host_kv_memory": "1MiB"}  # slots for fewer blocks than the prompts have
    prefill = Prefill(**few, check_invariants=True, kv_transport=transport, cluster_key_file=cluster_key)
    other, rnd = Decoder(prefill.address, cluster_key, expected, transport), random.Random(transport)
    wait_until(lambda: other.ready)
    for _ in range(rounds):
        decoder = Stopped(prefill, cluster_key, transport, expected)
        time.sleep(rnd.uniform(0.0, 1.0))
        decoder.signal(signal.SIGSTOP)
        decoder.given_up()
        for _ in range(20):  # the slots that it was to read have other blocks by now
            other.forget_all()
            other.add(rnd.randrange(8))
            other.serve()
        decoder.signal(signal.SIGCONT)
        decoder.reads()
        time.sleep(rnd.uniform(0.0, 0.5))
        decoder.signal(signal.SIGKILL)
        decoder.process.join()
        decoder.given_up()
    other.close()
    prefill.close()


# -- networks ------------------------------------------------------------------------------------------------


@pytest.fixture
def cabled(networks: Networks, expected: list[Outcome], monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    """An engine in the first network whose prompts are computed in the second one."""
    monkeypatch.setattr(wire, "SILENCE_SECONDS", SILENCE)
    here, there = networks.thread(0), networks.thread(1)
    other = prefill_process({**OPTIONS, "kv_host": networks.addresses[1], "kv_transport": "socket"})
    process = there.submit(other.__enter__).result()
    try:
        decoder = here.submit(Decoder, process.address, process.key_file, expected, "socket").result()
        wait_until(lambda: decoder.ready)
        yield decoder
        decoder.close()
    finally:
        other.__exit__(None, None, None)


@pytest.mark.slow
async def test_a_cable_that_is_pulled_while_blocks_come_costs_time_and_no_token(
    networks: Networks, cabled: Decoder
) -> None:
    for text in range(8):
        cabled.add(text)
    while not (cabled.read and cabled.engine.scheduler.kv.external.sources.reads):
        cabled.step()
    networks.pull()
    await served(cabled)
    await until(lambda: not cabled.ready)
    networks.plug()
    await until(lambda: cabled.ready)
    read = cabled.read
    cabled.forget_all()
    cabled.add(3)
    await served(cabled)
    assert cabled.read > read


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
async def test_however_often_the_cable_is_pulled_every_request_ends_right(
    seed: int, networks: Networks, cabled: Decoder
) -> None:
    await chaos(random.Random(seed), 60.0, cabled, {networks.pull: 0.7, networks.plug: 3})
    networks.plug()
    await served(cabled)
    await until(lambda: cabled.ready)
    assert cabled.read
