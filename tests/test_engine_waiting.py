"""An engine whose requests wait for what others bring: it neither spins nor ends them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from quire.config import EngineConfig
from quire.core.kv_manager import Handle
from quire.core.request import Event, Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.ipc.engine_process import IDLE_POLL_MS, EngineProcess
from tests.test_determinism import prompts

GRAMMAR = Event("grammar", 1)
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True).resolved()


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(model="demo", threads=1, num_kv_blocks=40, max_num_seqs=4, check_invariants=True)
    engine = Engine(config, hash_key=bytes(32))
    yield engine
    engine.close()


def request(id: int, awaits: Event | None = None, max_tokens: int = 4) -> Request:
    return Request(id, prompts()[id], PARAMS, max_tokens=max_tokens, awaits=awaits)


def run(engine: Engine) -> list[RequestUpdate]:
    updates: list[RequestUpdate] = []
    while not engine.idle and not engine.blocked:
        updates += engine.step()
    return updates


def ends(updates: list[RequestUpdate]) -> dict[int, str]:
    return {update.request: update.finish_reason for update in updates if update.finish_reason}


def test_requests_that_wait_for_events_are_kept_and_the_engine_says_that_a_step_would_do_nothing(
    engine: Engine,
) -> None:
    engine.add(request(0, GRAMMAR))
    engine.add(request(1, GRAMMAR))
    engine.add(request(2))
    assert ends(run(engine)) == {2: "length"}
    assert engine.blocked and not engine.idle and engine.stats.waiting == 2
    assert engine.step() == [] and engine.blocked
    engine.arrived(GRAMMAR)
    assert not engine.blocked
    assert ends(run(engine)) == {0: "length", 1: "length"}
    assert engine.idle and not engine.blocked


def test_an_engines_process_sleeps_while_all_requests_wait(engine: Engine) -> None:
    made, asked = EngineProcess.__new__(EngineProcess), []
    made.engine, made._outside = engine, {}
    made._board = SimpleNamespace(fields=[0] * 8)  # type: ignore[assignment]
    made._poller = SimpleNamespace(poll=lambda ms: asked.append(ms) or {})  # type: ignore[assignment]
    made._control = made._socket = None  # type: ignore[assignment]
    engine.add(request(0, GRAMMAR))
    made._receive()
    run(engine)
    made._receive()
    engine.arrived(GRAMMAR)
    made._receive()
    run(engine)
    made._receive()
    assert asked == [0, IDLE_POLL_MS, 0, IDLE_POLL_MS]


def test_an_end_while_all_others_wait_is_told(engine: Engine) -> None:
    for id in range(3):
        engine.add(request(id, Event("grammar", id)))
    run(engine)
    engine.abort(0)
    engine.failed(Event("grammar", 1), "the grammar has no rule 'root'")
    assert not engine.blocked
    assert ends(run(engine)) == {0: "abort", 1: "error"}
    assert engine.blocked and not engine.idle


def test_a_request_that_lacks_blocks_which_a_handle_holds_waits_for_it(engine: Engine) -> None:
    kv, handle = engine.scheduler.kv, Handle("transfer", 1)
    engine.add(request(0, max_tokens=200))
    for _ in range(200):
        engine.step()
    kv.hold(handle, [(0, block) for block in kv.groups[0].cached])
    engine.abort(0)
    engine.add(request(1, max_tokens=38 * 16 - len(prompts()[1])))  # as many as all blocks hold
    updates = run(engine)
    assert engine.blocked and not ends(updates).get(1)
    engine.release(handle)
    assert not engine.blocked
    assert ends(run(engine)) == {1: "length"}


def test_blocks_have_equal_names_in_engines_with_one_key_and_else_never() -> None:
    def root(key: bytes | None, **options: object) -> bytes:
        engine = Engine(EngineConfig(**{"model": "demo", "threads": 1, "num_kv_blocks": 4} | options), hash_key=key)
        try:
            return engine.scheduler.kv.hasher.root("")
        finally:
            engine.close()

    one = root(bytes(32))
    assert one == root(bytes(32), max_num_seqs=3)
    others = {
        "another key": root(b"k" * 32),
        "a random key": root(None),
        "kv in int8": root(bytes(32), kv_cache_dtype="int8"),
        "weights in int8": root(bytes(32), quantization="int8"),
        "another block size": root(bytes(32), block_size=32),
        "plain torch": root(bytes(32), cpu_kernels="torch"),
        "a draft model behind": root(
            bytes(32), speculative_config={"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 2}
        ),
    }
    assert len({one, *others.values()}) == len(others) + 1, others
