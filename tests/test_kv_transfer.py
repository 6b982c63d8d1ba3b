"""Prefill and decode apart through each transport: prompts of every length, and bytes that come too late."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from quire.bench.kv_prefill import prefill_process
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.kv import importer, wire
from quire.kv.tiers import connector
from quire.kv.transport import TRANSPORTS, installed
from quire.kv.transport.base import Link, Range
from tests.forks import spawn_rank
from tests.http_tools import wait_until
from tests.test_kv_prefill import BLOCK, Outcome, Prefill, alone, decoder, options, peer, prompt, rest, run

__all__ = ["options"]  # a fixture


def each(*quick: str) -> list[Any]:
    """All transports, of which those that are not named are slow tests."""
    return [
        pytest.param(
            name,
            marks=[
                *([] if name in quick else [pytest.mark.slow]),
                *([] if name in installed() else [pytest.mark.skip(f"{name} is not installed")]),
            ],
        )
        for name in TRANSPORTS
    ]


@pytest.fixture(autouse=True)
def by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX would copy within the machine, which nobody can stop."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that computes prompts has torch when it begins."""
    monkeypatch.setattr("quire.bench.kv_prefill.spawn_quietly", spawn_rank)


def at(engine: Engine, temperature: float, texts: Sequence[list[int]], first_id: int) -> list[Outcome]:
    for index, text in enumerate(texts):
        params = SamplingParams(temperature=temperature, seed=index, logprobs=1, ignore_eos=True).resolved()
        engine.add(Request(first_id + index, text, params, max_tokens=4))
    return rest(engine, len(texts), first_id)


@pytest.mark.quick("socket")
@pytest.mark.parametrize("name", each(*TRANSPORTS))
def test_every_length_of_a_prompt_through_every_transport(name: str, options: dict[str, Any]) -> None:
    """Greedy and sampled, with log-probabilities, as one engine without any cache."""
    texts = [prompt(length, length) for length in range(1, 3 * BLOCK + 3)]
    options |= {"num_kv_blocks": 400}
    own = {name: value for name, value in options.items() if name not in ("host_kv_memory", "cluster_key_file")}
    one = Engine(EngineConfig(**own, prefix_cache="off"))
    prefill = Prefill(**options, kv_transport=name)
    engine = decoder(options, prefill, kv_transport=name)
    blocks = sum((len(text) - 1) // BLOCK for text in texts if len(text) > BLOCK)
    for turn, temperature in enumerate((0.0, 0.9)):
        assert at(engine, temperature, texts, 100 * turn) == at(one, temperature, texts, 100 * turn)
        assert peer(engine) == blocks * (turn + 1)
        engine.scheduler.kv.cache.clear()
        engine._give_up()  # the host tier, too
    assert not engine.stats.kv_tiers["host"]["bad"]
    for made in (one, engine, prefill):
        made.close()


@pytest.mark.parametrize("then", [signal.SIGCONT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", each("socket"))
def test_blocks_that_come_too_late_change_no_token(
    name: str, then: signal.Signals, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that computes prompts is stopped in the middle of a transfer, until nobody waits for that any more
    and other requests have used every slot; then it goes on, or dies.
    """
    monkeypatch.setattr(importer, "READ_SECONDS", 1.0)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 1.5)
    monkeypatch.setattr(connector, "WORTH", 1)  # so that every slot is used
    options |= {"num_kv_blocks": 60, "host_kv_memory": "1MiB", "kv_transport": name}
    text, others = [prompt(150)], [prompt(150, first) for first in range(1, 51)]
    own = {name: value for name, value in options.items() if name != "kv_transport"}
    expected, expected_others = (alone(own, each, most=2) for each in (text, others))
    theirs = {name: value for name, value in options.items() if name not in ("cluster_key_file", "check_invariants")}
    with prefill_process(theirs) as other:
        more = {"cluster_key_file": other.key_file, "prefill_url": other.address, "prefill_min_tokens": 16}
        engine = Engine(EngineConfig(**{**options, "kv_role": "decode", **more}))
        try:
            assert engine.tiers.importer is not None
            [prefiller] = engine.tiers.importer.prefillers
            wait_until(lambda: prefiller.ready)
            stopped, kind = threading.Event(), type(prefiller._link)
            read = kind.read

            def stops(link: Link, ranges: Sequence[Range], seconds: float) -> None:
                if not stopped.is_set():
                    stopped.set()
                    os.kill(other.process.pid, signal.SIGSTOP)
                read(link, ranges, seconds)

            monkeypatch.setattr(kind, "read", stops)
            assert run(engine, text, most=2) == expected
            wait_until(lambda: not prefiller.ready)
            assert (engine.stats.kv_slots["quarantined"] > 0) is (name == "nixl")
            assert run(engine, others, first_id=1, most=2) == expected_others
            assert engine.stats.kv_tiers["host"]["stored"] > engine.tiers.host.num_slots
            os.kill(other.process.pid, then)

            def over() -> bool:
                engine.exchange()
                return engine.stats.kv_slots["quarantined"] == 0

            wait_until(over)
            read_before = peer(engine)
            if then is signal.SIGCONT:
                wait_until(lambda: prefiller.ready)
                engine._give_up()  # the books are made anew: prompts are computed elsewhere again
            assert run(engine, others[:20], first_id=100, most=2) == expected_others[:20]
            assert (peer(engine) > read_before) is (then is signal.SIGCONT)
            assert not engine.stats.kv_tiers["host"]["bad"]
        finally:
            engine.close()
