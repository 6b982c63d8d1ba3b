"""Engines that compute prompts for each other, or would ask themselves: nobody waits for somebody who waits for him."""

from __future__ import annotations

import time
from typing import Any

from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.ipc import engine_process
from tests.http_tools import free_port, wait_until
from tests.test_kv_host import Outcome, params
from tests.test_kv_prefill import alone, options, peer, prompt, run

__all__ = ["options"]  # a fixture


def test_engines_that_compute_prompts_for_each_other_do_not_wait_for_each_other(options: dict[str, Any]) -> None:
    """Neither for a prompt that one of them has, nor for one that both get at once."""
    ports = free_port(), free_port()
    both = options | {"kv_role": "both", "prefill_min_tokens": 16}
    urls = [f"127.0.0.1:{port}" for port in ports]
    engines = [
        Engine(EngineConfig(**both, kv_port=port, prefill_url=url))
        for port, url in zip(ports, reversed(urls), strict=True)
    ]
    importers = [engine.tiers.importer for engine in engines]
    wait_until(lambda: all(each is not None and each.ready for each in importers))
    outcomes: dict[tuple[int, int], Outcome] = {}

    def ask(engine: int, text: int) -> None:
        outcomes[engine, text] = []
        engines[engine].add(Request(1000 + text, prompt(100, text), params(0), max_tokens=8))

    def turn(number: int) -> None:
        engine = engines[number]
        engine.exchange()
        for asked, want in engine.tiers.to_compute:
            engine.add(engine_process._request(asked, engine_process._wanted(asked, want)))
        engine.tiers.to_compute.clear()
        updates = engine.take_updates() if engine.idle else engine.step()
        for update in updates:
            if (found := outcomes.get((number, update.request - 1000))) is not None:
                found += [(n, tuple(e.values)) for n, e in zip(update.tokens, update.logprobs or [], strict=True)]
        engine.prefilled([update.request for update in updates if update.finish_reason and update.request < 1000])

    ask(0, 0)
    for texts in ((0,), (1,)):
        if texts == (1,):
            ask(0, 1)
            ask(1, 1)
        end = time.monotonic() + 30.0
        while not all(engine.idle for engine in engines):
            assert time.monotonic() < end, "they wait for each other"
            turn(0)
            turn(1)
    assert peer(engines[0]) >= 6, "the first prompt"
    for (_, text), outcome in outcomes.items():
        assert [outcome] == alone(options, [prompt(100, text)])
    for engine in engines:
        engine.close()


def test_an_engine_does_not_ask_itself(options: dict[str, Any]) -> None:
    port = free_port()
    engine = Engine(EngineConfig(**options, kv_role="both", kv_port=port, prefill_url=f"127.0.0.1:{port}"))
    importer = engine.tiers.importer
    assert importer is not None
    wait_until(lambda: "it is this engine itself" in importer.prefillers[0].state)
    assert run(engine, [prompt(100)]) == alone(options, [prompt(100)]) and not importer.ready
    engine.close()
