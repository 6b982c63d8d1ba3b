"""A store that has the blocks of a pool: computed once, put, and read by the others, whatever becomes of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import quire.kv.mooncake_store
from quire.errors import ConfigError
from quire.kv.directory.base import DirectoryError
from quire.kv.mooncake_store import MooncakeStore
from quire.kv.tiers import holders
from tests.http_tools import wait_until
from tests.mooncake_master import mooncake_master, needs_mooncake_store
from tests.test_kv_pool import BLOCK, TEXTS, PoolNode, options_of, own, settled
from tests.test_kv_prefill import alone, prompt


class Shared:
    """What stand-ins for the store have in common.

    Attributes:
        lost: nothing is answered, but an error. ghosts: names that seem to be there, and are not.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.ghosts: set[bytes] = set()
        self.lost = threading.Event()


class StandIn:
    """See `BlockStore`; a put of a name that is there keeps the old value."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def _meet(self) -> None:
        if self._shared.lost.is_set():
            raise DirectoryError("the store is lost")

    def connect(self) -> None:
        self._meet()

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        self._meet()
        return [name in self._shared.values or name in self._shared.ghosts for name in names]

    def put(self, names: Sequence[bytes], values: Sequence[bytes]) -> None:
        self._meet()
        for name, value in zip(names, values, strict=True):
            self._shared.values.setdefault(name, value)

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        self._meet()
        return [self._shared.values.get(name) for name in names]

    def remove(self, names: Sequence[bytes]) -> None:
        self._meet()
        for name in names:
            self._shared.values.pop(name, None)
            self._shared.ghosts.discard(name)

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 30.0)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    made = Shared()
    monkeypatch.setattr(quire.kv.mooncake_store, "MooncakeStore", lambda url, cluster, host: StandIn(made))
    return made


@pytest.fixture
def options(cluster_key: str) -> dict[str, Any]:
    return options_of(cluster_key, "mooncake://127.0.0.1:1")


@pytest.fixture
def nodes(options: dict[str, Any]) -> Iterator[list[PoolNode]]:
    made: list[PoolNode] = []
    yield made
    for node in made:
        node.close()


TEXT = TEXTS[1]
BLOCKS = len(TEXT) // BLOCK


def node(nodes: list[PoolNode], options: dict[str, Any], **more: Any) -> PoolNode:
    nodes.append(PoolNode(**{**options, **more}))
    return nodes[-1]


def test_a_prefix_is_computed_once_put_and_read_twice_also_after_its_node_has_left(
    options: dict[str, Any], nodes: list[PoolNode], shared: Shared
) -> None:
    expected = alone(own(options), [TEXT])
    first = node(nodes, options)
    assert [first.ask(TEXT)] == expected
    wait_until(lambda: len(shared.values) >= BLOCKS)
    nodes.remove(first)
    first.close()
    for _ in range(2):
        other = node(nodes, options)
        assert [other.ask(TEXT)] == expected and other.loaded == BLOCKS
        assert other.computed == len(TEXT) - BLOCKS * BLOCK
        wait_until(lambda other=other: settled(other.engine.scheduler.kv))
    prefill = node(nodes, options, kv_role="prefill")
    prefill.ask(prompt(64, 9), most=1)
    wait_until(lambda: len(shared.values) >= BLOCKS + 4)
    decode = node(nodes, options, kv_role="decode", prefill_url="127.0.0.1:1")
    decode.ask(prompt(48, 7), most=1)
    assert decode.ask(prompt(64, 9)) and decode.loaded == 3, "it reads, and puts nothing"


def test_a_block_that_is_wrong_cut_or_only_seems_to_be_there_is_computed(
    options: dict[str, Any], nodes: list[PoolNode], shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    expected = alone(own(options), [TEXT])
    first = node(nodes, options)
    first.ask(TEXT, most=1)
    wait_until(lambda: len(shared.values) >= BLOCKS)
    names = [each.hash for each in first.engine.scheduler.kv.cache._by_hash.values()][:BLOCKS]
    good = shared.values[names[1]]
    shared.values[names[1]] = good[:-1] + bytes([good[-1] ^ 1])
    second = node(nodes, options)
    assert [second.ask(TEXT)] == expected
    assert second.counts["bad"] == 1 and "with other bytes" in caplog.text
    wait_until(lambda: shared.values.get(names[1]) == good), "what it computed has taken the bad one's place"
    shared.values[names[2]] = b"\xff\xffcut"
    third = node(nodes, options)
    assert [third.ask(TEXT)] == expected and third.loaded == 2 and third.counts["stale"]
    wait_until(lambda: shared.values.get(names[2], b"")[:2] != b"\xff\xff")
    shared.ghosts.add(names[0])
    shared.values.pop(names[0])
    fourth = node(nodes, options)
    assert [fourth.ask(TEXT)] == expected and fourth.loaded == 0
    assert [fourth.ask(TEXT, scope="another tenant")] == expected and fourth.loaded == 0


def test_a_store_that_is_lost_costs_hits_and_nothing_else(
    options: dict[str, Any], nodes: list[PoolNode], shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    expected = alone(own(options), TEXTS)
    shared.lost.set()
    first, second = node(nodes, options), node(nodes, options)
    assert [first.ask(text, seed=seed) for seed, text in enumerate(TEXTS)] == expected
    assert caplog.text.count("the store is lost; KV blocks are computed meanwhile") == 2
    shared.lost.clear()
    wait_until(lambda: first.agent.ready and second.agent.ready)
    more = prompt(100, 11)
    first.ask(more, most=1)
    wait_until(lambda: set(first.engine.scheduler.kv.cache._by_hash) <= set(shared.values))
    assert [second.ask(more)] == alone(own(options), [more]) and second.loaded == len(more) // BLOCK


def test_a_store_of_another_package_is_found_by_the_scheme_of_its_url(
    cluster_key: str, nodes: list[PoolNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "mine-1.0.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[quire.kv_stores]\nshelf = {__name__}:a_shelf\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = options_of(cluster_key, "shelf://top")
    first = node(nodes, options)
    expected = [first.ask(TEXT)]
    wait_until(lambda: len(SHELF.values) >= BLOCKS)
    second = node(nodes, options)
    assert [second.ask(TEXT)] == expected and second.loaded == BLOCKS


SHELF = Shared()


def a_shelf(url: str, cluster: str, host: str) -> StandIn:
    """What the entry point names."""
    assert url == "shelf://top" and cluster and host
    return StandIn(SHELF)


def chaos(seed: int, options: dict[str, Any], shared: Shared, expected: list[Any]) -> int:
    """Requests at three nodes while the store is lost, forgets, and is written to by others; blocks that were read."""
    rnd, nodes = random.Random(seed), list[PoolNode]()
    small = {"num_kv_blocks": 40, "host_kv_memory": str(16 * 2048 * BLOCK)}
    for _ in range(3):
        node(nodes, options, **rnd.choice([{}, small]))
    asked: list[tuple[PoolNode, int, int]] = []
    for _ in range(40):
        [what] = rnd.choices(["ask", "rest", "lost", "evict", "flip", "forget"], [30, 12, 4, 4, 3, 6])
        one = rnd.choice(nodes)
        names = list(shared.values)
        if what == "ask":
            text = rnd.randrange(len(expected))
            asked.append((one, text, one.begin(TEXTS[text], seed=text)))
        elif what == "rest" and asked:
            one, text, number = asked.pop(0)
            assert one.rest(number) == expected[text]
        elif what == "lost":
            (shared.lost.clear if shared.lost.is_set() else shared.lost.set)()
        elif what == "evict":
            for name in rnd.sample(names, len(names) // 2):
                shared.values.pop(name, None)
        elif what == "flip" and names:
            value = bytearray(shared.values.get(name := rnd.choice(names), b"\0\0"))
            value[rnd.randrange(len(value))] ^= 1 << rnd.randrange(8)
            shared.values[name] = bytes(value)
        elif what == "forget":
            one.do(one.engine.scheduler.kv.cache.clear)
    for one, text, number in asked:
        assert one.rest(number) == expected[text]
    shared.lost.clear()
    read = 0
    for one in nodes:
        read += one.loaded
        kv = one.engine.scheduler.kv
        wait_until(lambda kv=kv: settled(kv))
        one.close()
    shared.values.clear()
    return read


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_to_a_store_every_request_ends_right(
    seed: int, options: dict[str, Any], shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 0.2)
    chaos(seed, options, shared, alone(own(options), TEXTS))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixty_fault_schedules_of_a_store(
    options: dict[str, Any], shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 0.2)
    expected = alone(own(options), TEXTS)
    assert sum(chaos(seed, options, shared, expected) for seed in range(60))


# -- Mooncake's own ------------------------------------------------------------------------------------------------


@needs_mooncake_store
def test_mooncake_store_computes_once_reads_twice_and_is_lost(options: dict[str, Any], nodes: list[PoolNode]) -> None:
    expected = alone(own(options), [TEXT])
    with mooncake_master() as url:
        options["kv_directory"] = url
        first = node(nodes, options)
        assert [first.ask(TEXT)] == expected
        agent = first.engine.tiers.store
        assert agent is not None
        wait_until(lambda: not agent._waiting and agent._putting is None)
        time.sleep(0.2)  # its last put
        second, third = node(nodes, options), node(nodes, options)
        assert [second.ask(TEXT)] == [third.ask(TEXT)] == expected
        assert second.loaded == third.loaded == BLOCKS
        for one in (first, third):  # with a master that is gone, Mooncake takes seconds for that
            nodes.remove(one)
            one.close()
    more = prompt(100, 11)
    assert [second.ask(more)] == alone(own(options), [more])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mooncake://host", "allowed: mooncake://HOST:PORT"),
        ("mooncake://u:p@host:1", "allowed: mooncake://HOST:PORT"),
        ("mooncake://host:1?color=red", "allowed: mooncake://HOST:PORT"),
        ("mooncake://host:1?protocol=udp", r"protocol=tcp\|rdma"),
        ("mooncake://host:1?memory=much", "'much' is not a size"),
        ("mooncake://host:port", "such as mooncake://10.0.0.1:50051"),
    ],
)
def test_a_url_that_is_none_is_one_error(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        MooncakeStore(url, "us", "127.0.0.1")


def test_a_store_without_mooncake_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire.kv.mooncake_store.importlib, "import_module", _missing)
    with pytest.raises(ConfigError, match=r"pip install '\.\[mooncake\]'"):
        MooncakeStore("mooncake://127.0.0.1:1", "us", "127.0.0.1")


def _missing(name: str) -> Any:
    raise ImportError(name)
