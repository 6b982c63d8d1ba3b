"""Prefill and decode apart: one engine computes prompts, another one reads their blocks and decodes, and no token shows
it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.errors import ConfigError, RequestError
from quire.kv import importer, wire
from quire.kv.tiers.orders import Have
from quire.kv.tiers.tier import PEER
from quire.kv.transport.base import TransferError
from quire.kv.transport.shared import SharedMemoryLink, SharedMemoryTransport
from quire.ops.cpu import library
from quire.ops.threads import ASIDE
from tests.http_tools import wait_until
from tests.test_kv_host import MODELS, Outcome, chosen, latent, params, tiny

__all__ = ["latent", "tiny"]  # fixtures

BLOCK = 16
LENGTHS = [*range(1, 3 * BLOCK + 3), 64, 65, 127, 128, 129]


class Prefill:
    """An engine that computes prompts for others, driven by a thread as an engine process drives one.

    Attributes:
        computed: prompts of which something was computed.
        hold: no step is run while it is set.
    """

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(EngineConfig(**{"kv_role": "prefill", "max_num_seqs": 8, **options}))
        assert self.engine.tiers.exporter is not None
        self.address = str(self.engine.tiers.exporter.address)
        self.computed = 0
        self.hold = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)  # a test that fails leaves it
        self._thread.start()

    def _run(self) -> None:
        tiers = self.engine.tiers
        while not self._stop.is_set():
            self.engine.exchange()
            for number, want in tiers.to_compute:
                params = SamplingParams(seed=0).resolved()
                try:
                    self.engine.add(Request(number, want.tokens, params, max_tokens=0, scope=want.scope))
                except RequestError:
                    self.engine.prefilled([number])
                self.computed += 1
            tiers.to_compute.clear()
            for number in tiers.dropped:
                self.engine.abort(number)
            tiers.dropped.clear()
            if self.hold.is_set() or self.engine.idle:
                time.sleep(0.002)
                ended = self.engine.take_updates()
            else:
                ended = self.engine.step()
            self.engine.prefilled([update.request for update in ended if update.finish_reason])

    @property
    def exported(self) -> int:
        return self.engine.scheduler.kv.external.sources.num_moved(PEER, "stored")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.engine.close()


@pytest.fixture
def options(cluster_key: str) -> dict[str, Any]:
    return {
        "model": "demo",
        "threads": 1,
        "num_kv_blocks": 120,
        "max_model_len": 192,
        "check_invariants": True,
        "host_kv_memory": "64MiB",
        "cluster_key_file": cluster_key,
    }


@pytest.fixture
def prefill(options: dict[str, Any]) -> Iterator[Prefill]:
    made = Prefill(**options)
    yield made
    made.close()


def decoder(options: dict[str, Any], *prefills: Prefill, **more: Any) -> Engine:
    """An engine that has found those that compute for it."""
    urls = ",".join(each.address for each in prefills)
    made = Engine(
        EngineConfig(**{**options, "kv_role": "decode", "prefill_url": urls, "prefill_min_tokens": 16, **more})
    )
    importer = made.tiers.importer
    assert importer is not None
    wait_until(lambda: all(each.ready for each in importer.prefillers))
    return made


def prompt(length: int, first: int = 0) -> list[int]:
    return [3 + (first + 7 * index * index + index // 3) % 60 for index in range(length)]


def run(engine: Engine, texts: list[list[int]], first_id: int = 0, most: int = 8, scope: str = "") -> list[Outcome]:
    """Tokens and log-probabilities of prompts that are served at once."""
    begin(engine, texts, first_id, most, scope)
    return rest(engine, len(texts), first_id)


def begin(engine: Engine, texts: list[list[int]], first_id: int = 0, most: int = 8, scope: str = "") -> None:
    for index, text in enumerate(texts):
        engine.add(Request(first_id + index, text, params(index), max_tokens=most, scope=scope))


def rest(engine: Engine, count: int = 1, first_id: int = 0) -> list[Outcome]:
    outcomes: list[Outcome] = [[] for _ in range(count)]
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            for token, entry in zip(update.tokens, update.logprobs or [], strict=True):
                outcomes[update.request - first_id].append((token, tuple(entry.values)))
    return outcomes


def alone(options: dict[str, Any], texts: list[list[int]], **more: Any) -> list[Outcome]:
    """What one engine without any cache says."""
    own = {name: value for name, value in options.items() if name not in ("host_kv_memory", "cluster_key_file")}
    engine = Engine(EngineConfig(**{**own, "prefix_cache": "off"}))
    outcomes = run(engine, texts, **more)
    engine.close()
    return outcomes


def peer(engine: Engine) -> int:
    """Blocks that came from other engines."""
    return engine.stats.kv_tiers["peer"]["loaded"]


@pytest.mark.quick("latent attention", "n-grams")
@pytest.mark.parametrize("model", MODELS)
def test_every_length_of_a_prompt(model: str, options: dict[str, Any], tiny: dict[str, str]) -> None:
    options |= {"num_kv_blocks": 400} | chosen(model, tiny)
    texts = [prompt(length, first) for first, length in enumerate(LENGTHS)]
    expected = alone(options, texts)
    prefill = Prefill(**options)
    engine = decoder(options, prefill)
    try:
        assert run(engine, texts) == expected
        assert peer(engine) == prefill.exported == sum((length - 1) // BLOCK for length in LENGTHS if length > BLOCK)
        assert not engine.stats.kv_tiers["host"]["bad"]
    finally:
        engine.close()
        prefill.close()


def test_a_prompt_leaves_while_it_is_computed_and_streams_go_on_meanwhile(options: dict[str, Any]) -> None:
    prefill = Prefill(**options, max_num_batched_tokens=32)
    engine = decoder(options, prefill)
    expected = alone(options, [prompt(170), prompt(10, 1)], most=20)
    try:
        assert run(engine, [prompt(170), prompt(10, 1)], most=20) == expected
        assert peer(engine) == 10 and engine.stats.cached_tokens >= 32, "loaded, until computing is found to be faster"
    finally:
        engine.close()
        prefill.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_the_thread_that_brings_blocks_leaves_the_cores_to_steps(options: dict[str, Any], prefill: Prefill) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    engine, own = decoder(options, prefill), niceness()
    [prefiller] = engine.tiers.importer.prefillers
    assert prefiller._reader.submit(niceness).result() == min(19, own + ASIDE) and niceness() == own
    engine.close()


def test_a_request_may_say_where_its_prompt_is_computed(
    options: dict[str, Any], prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    other = Prefill(**options)
    engine = decoder(options, prefill, other, prefill_min_tokens=100)
    importer = engine.tiers.importer
    assert importer is not None
    expected = alone(options, [prompt(60), prompt(60, 1), prompt(160, 2)])
    asked = {"do_remote_prefill": True}, {"do_remote_decode": True}
    for index, (length, said) in enumerate([(60, asked[0]), (60, None), (160, asked[1])]):
        if said is asked[0]:
            said = {**said, "remote_engine_id": importer.prefillers[1].engine}
        one = msgspec.structs.replace(params(index), kv_transfer_params=said)
        engine.add(Request(index, prompt(length, index), one, max_tokens=8))
    assert rest(engine, 3) == expected
    assert prefill.computed + other.computed == 1 and peer(engine) == 3
    assert "ask for a prompt" not in caplog.text
    other.close()
    wait_until(lambda: not importer.prefillers[1].ready)
    for index, name in enumerate(("stranger", "another", importer.prefillers[1].engine), 3):
        said = {"do_remote_prefill": True, "remote_engine_id": name, "remote_host": "10.0.0.1"}
        one = msgspec.structs.replace(params(0), kv_transfer_params=said)
        engine.add(Request(index, prompt(20), one, max_tokens=1))
    rest(engine, 6)
    first, second = [each for each in caplog.messages if "ask for a prompt" in each]
    assert (
        "from stranger at 10.0.0.1, and that is none of --prefill-url and is not contacted" in first
        and "cannot be reached now" in second
    )
    assert engine.stats.kv_transfer_unmet == {"not allowed": 2, "unreachable": 1}
    engine.close()


class Health(ThreadingHTTPServer):
    """What a prefill engine's server says of it, at one of the addresses of a name."""

    def __init__(self, at: tuple[str, int], engine: Prefill) -> None:
        body = json.dumps({"kv_port": int(engine.address.rpartition(":")[2])}).encode()
        self.asked = asked = []  # type: list[str]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None: ...

        super().__init__(at, Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine on Linux")
def test_all_addresses_of_a_name_compute_prompts_and_no_other_is_contacted(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    prefills = [Prefill(**options, kv_host=host) for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3")]
    first = Health(("127.0.0.1", 0), prefills[0])
    port = first.server_port
    others = [Health((f"127.0.0.{last}", port), prefills[last - 1]) for last in (2, 3)]
    said: list[Any] = [["127.0.0.2", "127.0.0.1"]]

    def resolve(name: str, port: int) -> list[str]:
        assert (name, port) == ("prefill.internal", first.server_port)
        if isinstance(said[-1], OSError):
            raise said[-1]
        return list(said[-1])

    monkeypatch.setattr("quire.kv.prefill_servers.addresses", resolve)
    monkeypatch.setattr("quire.kv.prefill_servers.DNS_SECONDS", 0.05)
    url = f"dns+http://prefill.internal:{port}"
    engine = Engine(EngineConfig(**options, kv_role="decode", prefill_url=url, prefill_min_tokens=150))
    importer = engine.tiers.importer
    assert importer is not None

    def found(*last: int) -> None:
        def there() -> bool:
            engine.exchange()
            return [each.url for each in importer.prefillers if each.ready] == [
                f"http://127.0.0.{n}:{port}" for n in last
            ]

        wait_until(there)

    def ask(index: int, host: str) -> list[Outcome]:
        named = {"do_remote_prefill": True, "remote_engine_id": "another, as it was called before", "remote_host": host}
        one = msgspec.structs.replace(params(0), kv_transfer_params=named)
        engine.add(Request(index, prompt(100, index), one, max_tokens=4))
        return rest(engine, 1, index)

    try:
        found(1, 2)
        assert ask(0, "127.0.0.2") and [each.computed for each in prefills] == [0, 1, 0]
        assert ask(1, "127.0.0.1") and [each.computed for each in prefills] == [1, 1, 0] and peer(engine) == 12
        assert ask(2, "127.0.0.3") and not prefills[2].computed and not others[1].asked, "it is not of the name"
        assert engine.stats.kv_transfer_unmet == {"not allowed": 1}
        said.append(OSError(-2, "Name or service not known"))
        wait_until(lambda: "not known; the servers stay as they were" in caplog.text)
        said.append(["127.0.0.2", "127.0.0.3"])
        found(2, 3)
        assert ask(3, "127.0.0.3") and prefills[2].computed == 1
    finally:
        engine.close()
        for server in (first, *others):
            server.shutdown()
            server.server_close()
        for each in prefills:
            each.close()


def test_a_step_that_waits_for_another_engine_says_so(options: dict[str, Any], prefill: Prefill) -> None:
    engine = decoder(options, prefill)
    engine.wait_seconds = 0.0
    prefill.hold.set()
    begin(engine, [prompt(150)])
    assert not engine.step() and engine.awaits_tiers and not engine.blocked
    prefill.hold.clear()
    assert rest(engine) == alone(options, [prompt(150)]) and not engine.awaits_tiers
    engine.close()


def test_what_is_cached_here_is_not_asked_for(options: dict[str, Any], prefill: Prefill) -> None:
    engine = decoder(options, prefill, prefill_min_tokens=40)
    head = prompt(100)
    run(engine, [head])
    assert peer(engine) == 6
    [outcome] = run(engine, [[*head, *prompt(30, 5)]], first_id=10)
    assert peer(engine) == 6 and [outcome] == alone(options, [[*head, *prompt(30, 5)]])
    engine.close()


def test_tenants_share_nothing(options: dict[str, Any], prefill: Prefill) -> None:
    engine = decoder(options, prefill)
    run(engine, [prompt(100)], scope="one")
    run(engine, [prompt(100)], first_id=10, scope="other")
    assert prefill.computed == 2 and prefill.engine.stats.cached_tokens == 0
    engine.close()


def test_prompt_log_probabilities_are_computed_here(options: dict[str, Any], prefill: Prefill) -> None:
    engine = decoder(options, prefill)
    scored = SamplingParams(seed=1, prompt_logprobs=1, temperature=0.0).resolved()
    engine.add(Request(0, prompt(100), scored, max_tokens=2))
    while not engine.idle:
        engine.step()
    assert not prefill.computed and not peer(engine)
    engine.close()


def test_the_one_with_less_to_do_is_asked(options: dict[str, Any], prefill: Prefill) -> None:
    other = Prefill(**options)
    engine = decoder(options, prefill, other)
    prefill.hold.set()
    other.hold.set()
    for index in range(4):
        engine.add(Request(index, prompt(100, index), params(index), max_tokens=4))
        engine.step()
    wait_until(lambda: prefill.computed + other.computed == 4)
    assert prefill.computed == other.computed == 2
    prefill.hold.clear()
    other.hold.clear()
    while not engine.idle:
        engine.step()
    assert peer(engine) == 24
    engine.close()
    other.close()


RANKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tensor_parallel_size": 2}, {}),
    ({}, {"tensor_parallel_size": 2}),
    ({"pipeline_parallel_size": 2, "async_scheduling": False}, {"tensor_parallel_size": 2}),
    ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "async_scheduling": False}),
]
"""Of who computes prompts, and of who decodes."""


@pytest.mark.parametrize(
    ("there", "here"), [*RANKS[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in RANKS[2:])]
)
def test_each_side_has_ranks_as_it_likes(there: dict[str, Any], here: dict[str, Any], options: dict[str, Any]) -> None:
    prefill = Prefill(**options, **there)
    engine = decoder(options, prefill, **here)
    texts = [prompt(length, first) for first, length in enumerate((33, 100, 160))]
    assert run(engine, texts) == alone(options, texts) and peer(engine) == 2 + 6 + 9
    assert not engine.stats.kv_tiers["host"]["bad"]
    engine.close()
    prefill.close()


def test_two_engines_decode_what_one_computes(options: dict[str, Any], prefill: Prefill) -> None:
    first, second = decoder(options, prefill), decoder(options, prefill)
    expected = alone(options, [prompt(150)])
    assert run(first, [prompt(150)]) == run(second, [prompt(150)]) == expected
    assert prefill.computed == 1 and peer(first) == peer(second) == 9
    first.close()
    second.close()


def test_an_engine_that_ends_is_done_without_and_found_again(options: dict[str, Any]) -> None:
    prefill = Prefill(**options)
    engine = decoder(options, prefill)
    importer = engine.tiers.importer
    assert importer is not None
    prefill.hold.set()
    expected = alone(options, [prompt(150), prompt(130, 1)])
    begin(engine, [prompt(150), prompt(130, 1)])
    engine.step()
    wait_until(lambda: prefill.computed == 2)
    port = int(prefill.address.rpartition(":")[2])
    prefill.close()
    assert rest(engine, 2) == expected and not peer(engine)
    again = Prefill(**options, kv_port=port)
    wait_until(lambda: importer.ready)
    assert run(engine, [prompt(140, 7)], first_id=20) == alone(options, [prompt(140, 7)]) and peer(engine) == 8
    engine.close()
    again.close()


def test_one_that_asked_and_ends_leaves_nothing_pinned(options: dict[str, Any], prefill: Prefill) -> None:
    engine = decoder(options, prefill)
    prefill.hold.set()
    engine.add(Request(0, prompt(150), params(0), max_tokens=4))
    engine.step()
    wait_until(lambda: prefill.computed == 1)
    engine.close()
    wait_until(lambda: not prefill.engine.scheduler.kv.external.sources.exports.under_way)
    assert not prefill.engine.scheduler.requests, "nobody wants it any more"
    prefill.hold.clear()
    wait_until(lambda: prefill.engine.idle)
    assert not prefill.engine.scheduler.kv.external.tier.pins


def test_a_request_that_is_aborted_while_its_prompt_is_computed_elsewhere(
    options: dict[str, Any], prefill: Prefill
) -> None:
    engine = decoder(options, prefill)
    prefill.hold.set()
    engine.add(Request(0, prompt(150), params(0), max_tokens=4))
    engine.step()
    wait_until(lambda: prefill.computed == 1)
    engine.abort(0)
    assert engine.step()[0].finish_reason == "abort"
    prefill.hold.clear()
    assert run(engine, [prompt(150)], first_id=1) == alone(options, [prompt(150)])
    assert prefill.computed == 1 and peer(engine) == 9
    engine.close()


@pytest.mark.parametrize("where", [0, 3, 8])
def test_a_bit_that_is_flipped_on_the_way_costs_a_computed_block(
    where: int, options: dict[str, Any], prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoder(options, prefill)
    tier = engine.scheduler.kv.external.tier
    filled, host = tier.filled, engine.tiers.host
    assert host is not None
    flipped: list[int] = []

    def flip(slot: int) -> None:
        if len(flipped) == where:
            host.block(slot)[77] ^= 1
        flipped.append(slot)
        filled(slot)

    monkeypatch.setattr(tier, "filled", flip)
    assert run(engine, [prompt(150)]) == alone(options, [prompt(150)])
    assert engine.stats.kv_tiers["host"]["bad"] == 1 and len(flipped) >= 9
    engine.close()


def test_blocks_for_a_request_that_is_gone_are_not_read_and_counted(options: dict[str, Any], prefill: Prefill) -> None:
    engine, exporter = decoder(options, prefill), prefill.engine.tiers.exporter
    assert exporter is not None
    [who] = exporter._importers
    exporter._known[99] = who, 12345
    exporter.announce(Have(99, 0, (0, 1)))
    wait_until(lambda: engine.stats.kv_tiers["peer"]["unwanted"] == 2)
    del exporter._known[99]
    assert run(engine, [prompt(100)]) == alone(options, [prompt(100)]) and peer(engine) == 6
    engine.close()


def failing(self: object, ranges: object, seconds: float) -> None:
    raise TransferError("the wire was cut")


def test_a_read_that_fails_is_computed_here_and_the_connection_made_anew(
    options: dict[str, Any], prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoder(options, prefill)
    importer = engine.tiers.importer
    assert importer is not None
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemoryLink, "read", failing)
        begin(engine, [prompt(150)])
        wait_until(lambda: engine.step() or not importer.ready)
    wait_until(lambda: importer.ready)
    assert engine.stats.kv_slots["quarantined"] == 0
    assert rest(engine) == alone(options, [prompt(150)])
    engine.close()


def test_what_was_read_while_this_engine_was_stopped_is_not_used(
    options: dict[str, Any], prefill: Prefill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one has given it up by then, and its slots may have other blocks: they would count as bad ones."""
    engine, read, stopped = decoder(options, prefill), SharedMemoryLink.read, [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + stopped[0]

    def stop(link: SharedMemoryLink, *given: Any) -> None:
        read(link, *given)
        stopped[0] = wire.SILENCE_SECONDS + 0.1

    monkeypatch.setattr(importer, "time", Clock)
    monkeypatch.setattr(SharedMemoryLink, "read", stop)
    assert run(engine, [prompt(100)]) == alone(options, [prompt(100)])
    assert peer(engine) == 0 and "this engine said nothing for 5 seconds" in caplog.text
    monkeypatch.undo()
    found = engine.tiers.importer
    assert found is not None
    wait_until(lambda: found.ready)
    assert run(engine, [prompt(100, 1)], first_id=9) == alone(options, [prompt(100, 1)]) and peer(engine) == 6
    engine.close()


def test_slots_into_which_something_may_come_late_wait_for_its_end_and_so_does_the_transport(
    options: dict[str, Any], prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = threading.Event()
    engine = decoder(options, prefill, kv_transport="shared_memory")
    importer = engine.tiers.importer
    assert importer is not None
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemoryTransport, "fenced", False)
        patch.setattr(SharedMemoryLink, "settled", lambda link: settled.is_set())
        patch.setattr(SharedMemoryLink, "read", failing)
        assert run(engine, [prompt(150)]) == alone(options, [prompt(150)])
        wait_until(lambda: "what it failed to read may still arrive" in importer.prefillers[0].state)
        assert engine.stats.kv_slots["quarantined"] == 9 and not importer.ready
        assert run(engine, [prompt(100, 1)], first_id=10) == alone(options, [prompt(100, 1)])
    settled.set()
    wait_until(lambda: importer.ready)
    engine.exchange()
    assert engine.stats.kv_slots["quarantined"] == 0
    assert run(engine, [prompt(100, 2)], first_id=20) == alone(options, [prompt(100, 2)]) and peer(engine) == 6
    engine.close()


def test_a_prefill_engine_whose_tier_is_full_says_so_and_the_rest_is_computed_here(options: dict[str, Any]) -> None:
    block = 2048 * BLOCK
    prefill = Prefill(**{**options, "host_kv_memory": str(4 * block)})
    engine = decoder(options, prefill)
    texts = [prompt(150, index) for index in range(3)]
    assert run(engine, texts) == alone(options, texts)
    assert peer(engine) >= 3
    engine.close()
    prefill.close()


def test_a_prompt_that_is_too_long_for_the_prefill_engine_is_computed_here(options: dict[str, Any]) -> None:
    """On a GPU its block table would not end where the next request's begins."""
    prefill = Prefill(**{**options, "max_model_len": 96})
    engine = decoder(options, prefill)
    for number, length in enumerate((96, 160)):
        assert run(engine, [prompt(length, number)], first_id=number) == alone(options, [prompt(length, number)])
        assert peer(engine) == 5 and prefill.computed == number + 1  # that is, it was asked for both
    engine.close()
    prefill.close()


SLOWEST = library.usable()[-1] if library.usable() else "torch"  # engines choose the fastest by themselves
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "block size": ({"block_size": 32}, "block_size is 16 where prompts are computed, and 32 where"),
    "kernels": ({"cpu_kernels": "torch"}, "kernels is"),
    "instruction set": ({"cpu_kernels": SLOWEST}, "(give both the same --cpu-kernels)"),
    "precision": ({"dtype": "float32"}, "precision is"),
    "model": ({"model": "deepseek_v3"}, "(give both the same model)"),
    "cache": ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is auto where prompts are computed, and int8 where"),
    "drafter": (
        {"speculative_config": {"method": "eagle", "model": "demo-eagle", "num_speculative_tokens": 3}},
        "(give both the same --speculative-config)",
    ),
    "key": ({"cluster_key_file": "another"}, "it does not accept this cluster key"),
}


@pytest.mark.quick("block size", "model", "cache")
@pytest.mark.parametrize("what", WRONG)
def test_engines_that_do_not_fit_are_told_why_and_serve_alone(
    what: str, options: dict[str, Any], prefill: Prefill, tmp_path: Path, latent: Path
) -> None:
    more, why = WRONG[what]
    if what == "instruction set" and len(library.usable()) < 2:
        pytest.skip("there are kernels for one instruction set only")
    if "model" in more:
        more = {"model": str(latent)}
    if "cluster_key_file" in more:
        file = tmp_path / "another"
        file.write_text("the secret of another cluster")
        more = {"cluster_key_file": str(file)}
    config = {**options, "kv_role": "decode", "prefill_url": prefill.address, "prefill_min_tokens": 16, **more}
    engine = Engine(EngineConfig(**config))
    importer = engine.tiers.importer
    assert importer is not None
    [prefiller] = importer.prefillers
    wait_until(lambda: why in prefiller.state)
    assert not importer.ready
    own = {name: value for name, value in more.items() if name != "cluster_key_file"}
    assert run(engine, [prompt(100)]) == alone({**options, **own}, [prompt(100)])
    assert not peer(engine)
    engine.close()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"kv_role": "decode", "prefill_url": "http://"}, "is neither the URL of a server"),
        ({"kv_role": "decode", "prefill_url": "http://[::1"}, "is neither the URL of a server"),
        ({"kv_role": "decode", "prefill_url": "ftp://a:80"}, "is neither the URL of a server"),
        ({"kv_role": "decode", "prefill_url": "nowhere"}, "is not HOST:PORT"),
        ({"kv_role": "decode", "prefill_url": "dns+https://a"}, "nor dns+http://NAME:PORT"),
        ({"kv_role": "both"}, "kv_role=both needs kv_directory, where"),
        ({"kv_role": "decode", "prefill_url": " , "}, "names no server"),
        (
            {"kv_directory": "redis://a"},
            "kv_directory needs kv_role, since it is for engines that share KV; set kv_role=both",
        ),
        ({"kv_role": "both", "kv_directory": "http://a"}, "is not the URL of a directory"),
        ({"kv_role": "prefill", "prefill_url": "http://a"}, "set kv_role=decode"),
        ({"cluster_key_file": "x"}, "is for engines that share KV"),
        ({"kv_role": "prefill", "cluster_key_file": "/nowhere/key"}, "cluster-key-file /nowhere/key: No such file"),
        ({"kv_role": "prefill", "kv_host": "0.0.0.0"}, "is not an address at which others can reach this machine"),
        ({"kv_role": "prefill", "prefix_cache": "off"}, "kv_role=prefill needs the prefix cache"),
        ({"kv_role": "prefill", "kv_port": 70000}, "allowed: from 0 to 65535"),
        ({"kv_role": "prefill", "host_kv_memory": "1"}, "is less than one block"),
    ],
)
def test_options_that_make_no_sense_are_one_error(more: dict[str, Any], why: str, cluster_key: str) -> None:
    options = {"model": "demo", "threads": 1, "num_kv_blocks": 20, "max_model_len": 64}
    if "cluster_key_file" not in more and "kv_role" in more:
        options["cluster_key_file"] = cluster_key
    with pytest.raises(ConfigError, match=re.escape(why)):
        Engine(EngineConfig(**{**options, **more}))


def test_an_engine_without_a_server_computes_no_prompts_for_others_and_may_have_its_own_computed(
    options: dict[str, Any], prefill: Prefill
) -> None:
    own = {name: value for name, value in options.items() if name != "check_invariants"}
    with pytest.raises(ConfigError, match="quire serve demo --role prefill"):
        LLM(**own, kv_role="prefill")
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(**own, kv_role="decode", prefill_url=prefill.address, prefill_min_tokens=16) as llm, LLM("demo") as one:
        importer = llm._engine.tiers.importer
        assert importer is not None
        wait_until(lambda: importer.ready)
        [here], [there] = (each.generate([prompt(100)], sampling) for each in (llm, one))
        assert here.outputs[0].token_ids == there.outputs[0].token_ids
        assert here.metrics is not None and [each.source for each in here.metrics.fetches] == ["peer", "host"]


def test_names_of_blocks_that_are_none_are_no_message() -> None:
    for name in (b"", bytes(31), bytes(33)):
        with pytest.raises(msgspec.ValidationError):
            wire.decode_from_importer(wire.encode(wire.Want(1, [bytes(32), name], [])))


def test_a_port_that_is_taken_is_an_error_that_names_it(options: dict[str, Any], prefill: Prefill) -> None:
    port = int(prefill.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"kv_port={port}: cannot listen there"):
        Engine(EngineConfig(**{**options, "kv_role": "prefill", "kv_port": port}))


def test_a_users_own_key_is_made_once_and_read_by_nobody_else(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = {name: value for name, value in options.items() if name != "cluster_key_file"}
    prefill = Prefill(**own)
    engine = decoder(own, prefill)
    file = tmp_path / "config" / "quire" / "cluster-key"
    assert file.stat().st_mode & 0o777 == 0o600 and [each.name for each in file.parent.iterdir()] == ["cluster-key"]
    assert run(engine, [prompt(100)]) == alone(options, [prompt(100)]) and peer(engine) == 6
    engine.close()
    prefill.close()
