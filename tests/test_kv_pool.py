"""One pool of KV: what one engine has computed, the others read, and no token shows it."""

from __future__ import annotations

import functools
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import quire.kv.directory
from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.kv import wire
from quire.kv.directory.base import DirectoryError, Holders, Node
from quire.kv.mailbox import Mailbox
from quire.kv.nodes import NodeReader
from quire.kv.tiers import holders, sources
from quire.kv.tiers.cost import Costs
from quire.kv.tiers.orders import Lacks
from tests.http_tools import free_port, wait_until
from tests.local_directory import LocalDirectory, LocalStore
from tests.redis_server import RedisServer, needs_redis
from tests.test_kv_host import Outcome, params
from tests.test_kv_prefill import Prefill, alone, prompt

BLOCK = 16


class PoolNode:
    """An engine of a pool, driven by a thread as an engine process drives one.

    Attributes:
        errors: of its thread.
        hold: nothing is done while it is set.
    """

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(EngineConfig(**{"kv_role": "both", "max_num_seqs": 8, **options}))
        assert self.engine.tiers.agent is not None
        self.agent = self.engine.tiers.agent
        self.errors: list[BaseException] = []
        self.hold = threading.Event()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._outcomes: dict[int, Outcome] = {}
        self._ended: dict[int, threading.Event] = {}
        self._next = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)  # a test that fails leaves it
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                while not self._calls.empty():
                    self._calls.get()()
                if self.hold.is_set():
                    time.sleep(0.002)
                elif self.engine.idle:
                    self.engine.exchange()
                    time.sleep(0.002)
                else:
                    self._take_in()
        except BaseException as error:
            self.errors.append(error)

    def _take_in(self) -> None:
        for update in self.engine.step():
            assert update.error is None
            for token, entry in zip(update.tokens, update.logprobs or [], strict=True):
                self._outcomes[update.request].append((token, tuple(entry.values)))
            if update.finish_reason is not None:
                self._ended[update.request].set()

    def begin(self, text: list[int], most: int = 8, scope: str = "", seed: int = 0) -> int:
        """Serve a request; its number."""
        number, self._next = self._next, self._next + 1
        self._outcomes[number], self._ended[number] = [], threading.Event()
        request = Request(number, text, params(seed), max_tokens=most, scope=scope)
        self._calls.put(lambda: self.engine.add(request))
        return number

    def rest(self, number: int) -> Outcome:
        """What it got."""
        assert self._ended[number].wait(60.0) and not self.errors, self.errors
        return self._outcomes[number]

    def ask(self, text: list[int], **more: Any) -> Outcome:
        return self.rest(self.begin(text, **more))

    def do(self, call: Callable[[], Any]) -> Any:
        """Call something between two steps."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put(lambda: done.put(call()))
        return done.get(timeout=60.0)

    def forget(self) -> None:
        """All that it holds."""

        def forget() -> None:
            self.engine.scheduler.kv.cache.clear()
            fetches = self.engine.scheduler.kv.external
            fetches.planned(-1)
            fetches.given_up()
            tier = fetches.tier
            for slot in list(tier.kept.values()):
                tier.withdraw(slot)

        self.do(forget)

    @property
    def counts(self) -> dict[str, int]:
        return self.engine.stats.kv_tiers["remote"]

    @property
    def loaded(self) -> int:
        """Blocks that came from other nodes."""
        return self.counts["loaded"]

    @property
    def computed(self) -> int:
        """Tokens of prompts."""
        return self.engine.stats.prefill_tokens

    def published(self, least: int) -> None:
        """Wait until the directory knows of all blocks, which are so many at least."""
        wait_until(lambda: self.agent.ready and len(self.agent._held) >= least and not self.agent._changed)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.errors, self.errors
        self.engine.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that have much else to do must change nothing; tests of deadlines set their own."""
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 30.0)
    monkeypatch.setattr(sources, "LEAST_PATIENCE", 30.0)


def options_of(key: str, directory: str) -> dict[str, Any]:
    return {
        "model": "demo",
        "threads": 1,
        "num_kv_blocks": 120,
        "max_model_len": 192,
        "check_invariants": True,
        "host_kv_memory": "4MiB",
        "cluster_key_file": key,
        "kv_directory": directory,
    }


@pytest.fixture
def options(cluster_key: str) -> dict[str, Any]:
    return options_of(cluster_key, "redis://nowhere")


class FaultyDirectory(LocalDirectory):
    """One that is lost, or slow, while its store says so."""

    def __init__(self, store: FaultyStore, cluster: str) -> None:
        super().__init__(store, cluster)
        self._faults = store

    def join(self, node: Node, lease: float) -> bool:
        self._faults.meet()
        return super().join(node, lease)

    def publish(self, node: Node, blocks: Sequence[bytes]) -> bool:
        self._faults.meet()
        return super().publish(node, blocks)

    def withdraw(self, node: Node, blocks: Sequence[bytes]) -> None:
        self._faults.meet()
        super().withdraw(node, blocks)

    def query(self, blocks: Sequence[bytes], needed: Sequence[bool] | None = None) -> Holders:
        self._faults.meet()
        self._faults.queries += 1
        return super().query(blocks, needed)

    def nodes(self) -> list[Node]:
        self._faults.meet()
        return super().nodes()


class FaultyStore(LocalStore):
    """What those share.

    Attributes:
        lost: nothing is answered, but an error. slow: nothing is answered while it is set.
        queries: that were answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost, self.slow, self.queries = threading.Event(), threading.Event(), 0

    def meet(self) -> None:
        while self.slow.is_set():
            time.sleep(0.005)
        if self.lost.is_set():
            raise DirectoryError("the directory is lost")

    def holders(self) -> list[set[str]]:
        """Of each block that somebody holds."""
        with self.lock:
            there = {node.name: node.epoch for node, _ in self.leases.values()}
            rows = [{name for name, epoch in row.items() if there.get(name) == epoch} for row in self.blocks.values()]
            return [row for row in rows if row]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """A directory within this process, in place of Redis."""
    made = FaultyStore()
    monkeypatch.setattr(quire.kv.directory, "open_directory", lambda url, cluster: FaultyDirectory(made, cluster))
    return made


class Pool:
    """Nodes that are closed in the end."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.nodes = options, list[PoolNode]()

    def node(self, **more: Any) -> PoolNode:
        self.nodes.append(PoolNode(**{**self.options, **more}))
        return self.nodes[-1]

    def close(self, node: PoolNode) -> None:
        self.nodes.remove(node)
        node.close()


@pytest.fixture
def pool(options: dict[str, Any], store: FaultyStore) -> Iterator[Pool]:
    made = Pool(options)
    yield made
    for node in made.nodes:
        node.close()


@needs_redis
@pytest.mark.quick("shared_memory")
@pytest.mark.parametrize("transport", ["shared_memory", "socket"])
def test_a_prefix_of_512_tokens_is_computed_once_and_fetched_twice(transport: str, options: dict[str, Any]) -> None:
    options |= {"num_kv_blocks": 200, "max_model_len": 640, "kv_transport": transport, "host_kv_memory": "16MiB"}
    head = prompt(512)
    texts = [[*head, *prompt(9, last)] for last in range(3)]
    expected = alone({**options, "kv_directory": None, "kv_transport": None}, texts)
    with RedisServer() as server:
        pool = Pool(options | {"kv_directory": server.url})
        nodes = [pool.node() for _ in range(3)]
        for number, node in enumerate(nodes):
            outcome = node.ask(texts[number], seed=number)
            assert outcome == expected[number]
            node.published(512 // BLOCK)
        assert [node.loaded for node in nodes] == [0, 512 // BLOCK, 512 // BLOCK]
        assert nodes[0].computed == 521 and all(node.computed <= 9 for node in nodes[1:])
        assert not any(node.engine.stats.kv_tiers["host"]["bad"] for node in nodes)
        for node in nodes:
            node.close()


def own(options: dict[str, Any]) -> dict[str, Any]:
    """Those of an engine that is in no pool."""
    return {name: value for name, value in options.items() if name != "kv_directory"}


TEXT = prompt(100)
BLOCKS = len(TEXT) // BLOCK


def computed_by(node: PoolNode, text: list[int] = TEXT) -> None:
    """Have a node hold a prompt's blocks, and the directory know it."""
    before = len(node.agent._held)
    node.ask(text, most=1)
    node.published(before + len(text) // BLOCK)


def test_a_part_that_is_computed_is_what_nobody_has(pool: Pool) -> None:
    first, second, third = (pool.node() for _ in range(3))
    computed_by(first)
    longer = [*TEXT, *prompt(60, 5)]
    assert [second.ask(longer)] == alone(own(pool.options), [longer]) and second.loaded == BLOCKS
    second.published(len(longer) // BLOCK)
    pool.close(second)
    assert [third.ask(longer)] == alone(own(pool.options), [longer])
    assert third.loaded == BLOCKS, "what the node that left had is not asked for"


def test_runs_of_blocks_come_from_whoever_holds_them(pool: Pool) -> None:
    first, second, third = (pool.node() for _ in range(3))
    longer = [*TEXT, *prompt(60, 5)]
    computed_by(first)
    computed_by(second, longer)
    tier = second.engine.scheduler.kv
    names = [node.hash for node in list(tier.cache._by_hash.values())[: BLOCKS - 1]]  # it gives only what follows
    second.agent.changed([], names)
    wait_until(lambda: not second.agent._changed and len(second.agent._held) == len(longer) // BLOCK - len(names))
    assert [third.ask(longer)] == alone(own(pool.options), [longer])
    assert third.loaded == (len(longer) - 1) // BLOCK and len(third.engine.tiers.nodes.readers) == 2  # type: ignore[union-attr]


def test_what_no_node_has_is_computed_by_a_prefill_engine(pool: Pool) -> None:
    first = pool.node()
    computed_by(first)
    prefill = Prefill(**pool.options)
    second = pool.node(prefill_url=prefill.address, prefill_min_tokens=16)
    importer = second.engine.tiers.importer
    assert importer is not None
    wait_until(lambda: importer.ready)
    longer = [*TEXT, *prompt(60, 5)]
    assert [second.ask(longer)] == alone(own(pool.options), [longer])
    assert (
        second.loaded == BLOCKS and second.engine.stats.kv_tiers["peer"]["loaded"] == len(longer) // BLOCK - BLOCKS - 1
    )
    assert prefill.engine.tiers.agent is not None
    wait_until(lambda: len(prefill.engine.tiers.agent._held) >= len(longer) // BLOCK - 1)  # type: ignore[union-attr]
    prefill.close()


@pytest.mark.parametrize("here", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)])
def test_nodes_have_ranks_as_they_like(here: dict[str, Any], pool: Pool) -> None:
    first, second = pool.node(tensor_parallel_size=2), pool.node(**here)
    computed_by(first)
    assert [second.ask(TEXT)] == alone(own(pool.options), [TEXT]) and second.loaded == BLOCKS


def test_a_node_that_lies_is_found_out_banned_and_told_of(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    liar, other = pool.node(), pool.node()
    host = liar.engine.tiers.host
    assert host is not None
    save = host.save

    def lie(memory: Any, moves: Sequence[Any]) -> Callable[[], None]:
        add_checks = save(memory, moves)
        for move in moves:
            host.block(move.slot)[5] ^= 1
        return add_checks

    monkeypatch.setattr(host, "save", lie)
    computed_by(liar)
    assert [other.ask(TEXT)] == alone(own(pool.options), [TEXT])
    assert other.counts["bad"] == BLOCKS and caplog.text.count("gave a block with other bytes") == 1
    more = prompt(100, 9)
    computed_by(liar, more)
    before = other.loaded
    assert [other.ask(more)] == alone(own(pool.options), [more]) and other.loaded == before, (
        "nothing more is read there"
    )


def test_what_a_node_does_not_have_is_counted_withdrawn_and_computed(pool: Pool, store: FaultyStore) -> None:
    first, second = pool.node(), pool.node()
    computed_by(first)
    names = first.do(lambda: [*first.agent._held])
    cache = first.engine.scheduler.kv.cache
    cache._evicted = lambda node, group, block: None  # so that the host tier does not have it either
    first.do(cache.clear)
    first.published(0)
    wait_until(lambda: not store.holders())
    with store.lock:
        for name in names:  # as if it had not been told
            store.blocks[name] = {first.agent._node.name: first.agent._node.epoch}
    assert [second.ask(TEXT)] == alone(own(pool.options), [TEXT])
    assert second.counts["stale"] == BLOCKS and not second.loaded
    wait_until(lambda: all(first.agent._node.name not in row for row in store.holders()))


def test_two_nodes_hold_the_same_block_and_one_of_them_dies(pool: Pool) -> None:
    first, second, third = (pool.node() for _ in range(3))
    for node in (first, second):
        node.engine.scheduler.kv.external.sources.holders.ask = lambda names, needed, now: None  # type: ignore[method-assign, union-attr]
        computed_by(node)
    third.ask([*TEXT[:40], 1, 2])
    [asked] = third.engine.tiers.nodes.readers  # type: ignore[union-attr]
    [dies] = [node for node in (first, second) if node.agent._node.name == asked]
    exporter = dies.engine.tiers.exporter
    assert exporter is not None
    exporter.close()  # though the directory has it still
    dies.engine.tiers.exporter = None
    assert [third.ask(TEXT)] == alone(own(pool.options), [TEXT])
    assert third.loaded == BLOCKS, "the other one gives what is missing"


def test_what_is_evicted_while_somebody_fetches_it_costs_no_token(pool: Pool) -> None:
    small = {"num_kv_blocks": 30, "host_kv_memory": str(12 * 2048 * BLOCK)}
    first, second = pool.node(**small), pool.node()
    texts = [prompt(150, last) for last in range(5)]
    expected = alone(own(pool.options), texts)
    for _ in range(3):
        first.ask(texts[0])
        first.published(len(texts[0]) // BLOCK)
        first.hold.set()
        numbers = [first.begin(text, most=1) for text in texts[1:]]
        asked = second.begin(texts[0])
        reads, over = second.engine.scheduler.kv.external.sources, second._ended[asked]
        wait_until(functools.partial(lambda reads, over: reads.reads or over.is_set(), reads, over))
        first.hold.clear()
        assert [second.rest(asked)] == expected[:1]
        for number in numbers:
            first.rest(number)
        second.forget()
    wait_until(lambda: not first.engine.scheduler.kv.external.tier.pins)


def test_a_directory_that_is_lost_costs_no_request_and_is_told_all_again(
    pool: Pool, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pool.node(), pool.node()
    computed_by(first)
    epoch = first.agent._node.epoch
    second.ask([*TEXT[:50], 1])  # it has asked about all that it knows
    store.lost.set()
    for node in (first, second):
        node.agent._renew = 0.0
        node.agent.order(Lacks("nobody", []))  # wakes it
    wait_until(lambda: not first.agent.ready and not second.agent.ready)
    more = prompt(100, 3)
    assert [second.ask(more), second.ask(TEXT, seed=1)] == alone(own(pool.options), [more, TEXT])
    assert second.loaded == 3 and caplog.text.count("the directory is lost;") == 2, "one warning each"
    store.clear()
    store.lost.clear()
    wait_until(lambda: first.agent.ready and second.agent.ready)
    first.published(BLOCKS)
    assert first.agent._node.epoch != epoch
    third = pool.node()
    assert [third.ask(TEXT)] == alone(own(pool.options), [TEXT]) and third.loaded == BLOCKS


def test_what_is_known_is_read_on_while_the_directory_is_lost(pool: Pool, store: FaultyStore) -> None:
    first, second = pool.node(), pool.node()
    computed_by(first)
    second.ask([*TEXT, 1])
    assert second.loaded == BLOCKS
    second.forget()
    store.lost.set()
    second.agent._renew = 0.0
    second.agent.order(Lacks("nobody", []))
    wait_until(lambda: not second.agent.ready)
    assert [second.ask(TEXT)] == alone(own(pool.options), [TEXT]) and second.loaded == 2 * BLOCKS


def test_a_directory_that_is_emptied_is_told_all_again_under_a_new_epoch(pool: Pool, store: FaultyStore) -> None:
    first, second = pool.node(), pool.node()
    computed_by(first)
    epoch = first.agent._node.epoch
    with store.lock:
        kept = {name: dict(row) for name, row in store.blocks.items()}
        store.clear()
        store.blocks = kept  # as from an old snapshot
    first.agent._renew = 0.0
    first.agent.order(Lacks("nobody", []))
    wait_until(lambda: first.agent._node.epoch != epoch and len(store.holders()) == BLOCKS)
    second.agent._renew = 0.0
    assert [second.ask(TEXT)] == alone(own(pool.options), [TEXT]) and second.loaded == BLOCKS


def test_a_slow_directory_is_waited_for_for_milliseconds_once(
    pool: Pool, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pool.node(), pool.node()
    computed_by(first)
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 0.05)
    store.slow.set()
    begin = time.monotonic()
    texts = [TEXT, prompt(100, 3), prompt(100, 4)]
    assert [second.ask(text, seed=seed) for seed, text in enumerate(texts)] == alone(own(pool.options), texts)
    assert time.monotonic() - begin < 20.0 and not second.loaded
    assert len(second.engine.scheduler.kv.external.sources.holders.lookups) == 1, (
        "one that is late is asked for nothing"
    )  # type: ignore[union-attr]
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 30.0)
    store.slow.clear()
    wait_until(lambda: not second.engine.scheduler.kv.external.sources.holders.lookups)  # type: ignore[union-attr]
    second.forget()
    wait_until(lambda: second.ask(TEXT) and second.loaded)


def test_what_is_ordered_of_a_node_as_it_leaves_has_an_end() -> None:
    mailbox, unused = Mailbox(), cast(Any, None)
    reader = NodeReader("127.0.0.1:1", unused, {}, unused, [], mailbox)
    reader._stopping = True  # it is closed before its thread has seen the order
    assert reader.order(wire.Want(7, [bytes(32)], []), [0])
    reader.close()
    assert [(ended.kind, ended.number, ended.blocks) for ended in mailbox.take()] == [("read", 7, 0)]


def test_a_tenant_finds_nothing_of_another_one(pool: Pool, store: FaultyStore) -> None:
    first, second = pool.node(), pool.node()
    first.ask(TEXT, scope="one")
    first.published(BLOCKS)
    named = set(store.blocks)
    assert [second.ask(TEXT, scope="other")] == alone(own(pool.options), [TEXT], scope="other") and not second.loaded
    second.published(BLOCKS)
    assert len(set(store.blocks) - named) == len(named), "not one name is the same"
    assert [second.ask(TEXT, scope="one")] == alone(own(pool.options), [TEXT], scope="one")
    assert second.loaded == BLOCKS


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is elsewhere is fetched, however long that takes on this machine."""
    monkeypatch.setattr(Costs, "prefers_load", lambda *_: True)


@pytest.mark.usefixtures("fetching")
def test_no_timing_tells_a_tenant_what_another_one_asked(pool: Pool, tmp_path: Path) -> None:
    """Wherever one's blocks are, another one's request with the same prompt computes all of it, and brings nothing from
    anywhere: it does what it would have done if nobody had asked before.
    """
    disk = {"disk_kv_path": str(tmp_path / "disk"), "disk_kv_memory": "64MiB"}
    first, second = pool.node(**disk), pool.node()

    def cost(node: PoolNode, scope: str) -> tuple[int, int]:
        """Tokens that were computed, and blocks that were brought from anywhere."""
        before = node.computed, brought(node)
        node.ask(TEXT, most=1, scope=scope)
        return node.computed - before[0], brought(node) - before[1]

    def brought(node: PoolNode) -> int:
        return sum(events["loaded"] for tier, events in node.engine.stats.kv_tiers.items() if tier != "peer")

    others = iter(["two", "three", "four", "five"])

    def check(node: PoolNode, found: bool) -> None:
        assert cost(node, next(others)) == (len(TEXT), 0)
        computed, loaded = cost(node, "one")
        assert computed < len(TEXT) and bool(loaded) == found, "there was something to be found"

    for _ in range(3):
        first.ask(TEXT, most=1, scope="one")
    first.published(BLOCKS)
    check(first, found=False)  # on the device
    check(second, found=True)  # at another node
    first.do(first.engine.scheduler.kv.cache.clear)
    first.ask([5] * 5, most=2)  # a step saves what goes
    check(first, found=True)  # in the host tier
    pool.close(second)
    fetches = first.engine.scheduler.kv.external
    wait_until(lambda: fetches.sources.disk is not None and first.do(lambda: not fetches.sources.writes))
    first.forget()
    check(first, found=True)  # on the disk


@pytest.mark.usefixtures("fetching")
def test_popular_blocks_are_held_twice_and_cold_ones_once(pool: Pool, store: FaultyStore) -> None:
    """Where tiers have not room for all: what is used once by every other node stays where it was computed, and what is
    used again and again is kept by one more node, however many use it.
    """
    first = pool.node()
    others = [pool.node(host_kv_memory=str(20 * 2048 * BLOCK)) for _ in range(3)]
    popular, cold = TEXT, prompt(100, 7)
    expected = alone(own(pool.options), [popular])
    computed_by(first, popular)
    computed_by(first, cold)
    own_texts = (prompt(100, number) for number in itertools.count(20))
    for node in others:
        assert node.ask(cold, most=1) and node.loaded == BLOCKS
        _evict(node, [next(own_texts) for _ in range(4)])
    assert _copies(store, first, cold) == [1] * BLOCKS
    for node in others:
        for _ in range(3):
            assert node.ask(popular) == expected[0]
        _evict(node, [next(own_texts) for _ in range(2)])
        assert _copies(store, first, popular) == [2] * BLOCKS
    assert all(node.loaded == 2 * BLOCKS for node in others)


def _evict(node: PoolNode, texts: list[list[int]]) -> None:
    """What a node has in its pool goes, to the tier if it is worth it, and so do texts that it has used often."""
    node.do(node.engine.scheduler.kv.cache.clear)
    for text in texts:
        for _ in range(3):
            node.ask(text, most=1)
    node.do(node.engine.scheduler.kv.cache.clear)
    node.ask([5] * 5, most=2)  # a step saves what goes
    published = node.engine.tiers.published
    wait_until(lambda: bool(published and published.blocks == node.agent._held and not node.agent._changed))


def _copies(store: FaultyStore, node: PoolNode, text: list[int]) -> list[int]:
    """How many nodes hold each block of a prompt, as the directory says."""
    request = Request(-1, text, params(0), max_tokens=1)
    node.do(lambda: node.engine.scheduler.kv.match(request))
    with store.lock:
        return [len(store.blocks.get(name, ())) for name in request.hashes]


def test_what_was_fetched_once_takes_no_place_in_another_tier(pool: Pool) -> None:
    first, second = pool.node(), pool.node()
    computed_by(first)
    second.ask(TEXT)
    tier = second.engine.scheduler.kv.external.tier
    assert tier.idle_slots[: BLOCKS - 1] and second.loaded == BLOCKS
    second.do(second.engine.scheduler.kv.cache.clear)
    assert not second.engine.scheduler.kv.external.has_moves, "and nothing is saved that others have"


def test_a_node_whose_engine_does_not_fit_is_told_so_and_computes(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    first, second = pool.node(), pool.node(kv_cache_dtype="int8")
    computed_by(first)
    assert [second.ask(TEXT)] == alone({**own(pool.options), "kv_cache_dtype": "int8"}, [TEXT])
    assert not second.loaded, "its blocks have other names"


def test_engines_with_another_cluster_key_are_refused_when_they_start(pool: Pool, tmp_path: Path) -> None:
    pool.node()
    other = tmp_path / "other"
    other.write_text("the secret of another cluster")
    other.chmod(0o600)
    with pytest.raises(ConfigError, match="is used by engines with another cluster key"):
        pool.node(cluster_key_file=str(other))


def test_an_address_that_is_none_costs_a_computed_prompt(pool: Pool, store: FaultyStore) -> None:
    first, second = pool.node(), pool.node()
    computed_by(first)
    with store.lock:
        node, end = store.leases[first.agent._node.name]
        store.leases[node.name] = node._replace(address="nonsense"), end
    assert [second.ask(TEXT)] == alone(own(pool.options), [TEXT]) and not second.loaded


@needs_redis
def test_clocks_need_not_agree_and_redis_may_be_lost_and_come_back_empty(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    with RedisServer() as server:
        pool = Pool(options | {"kv_directory": server.url})
        first, second = pool.node(), pool.node()
        computed_by(first)
        assert [second.ask(TEXT)] == alone(own(options), [TEXT]) and second.loaded == BLOCKS
        server.stop()
        for node in (first, second):
            node.agent._renew = 0.0
            node.agent.order(Lacks("nobody", []))
        wait_until(lambda: not first.agent.ready and not second.agent.ready)
        assert "cannot be reached" in first.agent.problem
        more = prompt(100, 3)
        assert [second.ask(more)] == alone(own(options), [more])
        server.start()
        wait_until(lambda: first.agent.ready and second.agent.ready)
        first.published(BLOCKS)
        third = pool.node()
        assert [third.ask(TEXT)] == alone(own(options), [TEXT]) and third.loaded == BLOCKS
        for node in pool.nodes:
            node.close()


@needs_redis
def test_a_redis_that_cannot_be_used_is_one_error_at_the_start_and_one_that_is_not_there_yet_is_none(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer("--requirepass", "sesame") as server:
        with pytest.raises(ConfigError, match="does not accept this user and password"):
            PoolNode(**options | {"kv_directory": server.url})
        PoolNode(**options | {"kv_directory": server.url.replace("//", "//:sesame@")}).close()
    node = PoolNode(**options | {"kv_directory": f"redis://127.0.0.1:{free_port()}/0"})
    assert [node.ask(TEXT)] == alone(own(options), [TEXT]) and "cannot be reached" in caplog.text
    assert any("cannot be reached" in note for note in node.engine.notes)
    node.close()


def chaos(seed: int, options: dict[str, Any], store: FaultyStore, expected: list[Outcome]) -> int:
    """Requests at three nodes while the directory is lost, slow and emptied, and nodes come, go and forget; the blocks
    that were read.
    """
    rnd, pool = random.Random(seed), Pool(options)
    small = {"num_kv_blocks": 40, "host_kv_memory": str(16 * 2048 * BLOCK)}
    for _ in range(3):
        pool.node(**rnd.choice([{}, small]), kv_transport=rnd.choice(["shared_memory", "socket"]))
    asked: list[tuple[PoolNode, int, int]] = []
    read = 0
    for _ in range(60):
        [what] = rnd.choices(["ask", "rest", "lost", "slow", "clear", "forget", "leave"], [30, 12, 3, 3, 2, 4, 1])
        node = rnd.choice(pool.nodes)
        if what == "ask":
            text = rnd.randrange(len(expected))
            asked.append((node, text, node.begin(TEXTS[text], seed=text)))
        elif what == "rest" and asked:
            node, text, number = asked.pop(0)
            assert node.rest(number) == expected[text]
        elif what in ("lost", "slow"):
            flag = store.lost if what == "lost" else store.slow
            (flag.clear if flag.is_set() else flag.set)()
        elif what == "clear":
            store.clear()
        elif what == "forget":
            node.do(node.engine.scheduler.kv.cache.clear)
        elif what == "leave" and not any(each is node for each, _, _ in asked):
            store.slow.clear()
            read += node.loaded
            pool.close(node)
            pool.node()
    store.slow.clear()
    for node, text, number in asked:
        assert node.rest(number) == expected[text]
    for node in pool.nodes:
        read += node.loaded
        kv = node.engine.scheduler.kv
        wait_until(functools.partial(settled, kv))
        node.close()
    store.lost.clear()
    store.clear()
    return read


def settled(kv: Any) -> bool:
    """Nothing is held, read or waited for."""
    tier = kv.external.tier
    return (
        kv.num_available == kv.num_usable
        and not tier.pins
        and not kv.external.sources.waits
        and not tier.counts["filling"]
    )


TEXTS = [prompt(length, first) for first, length in enumerate((60, 100, 140, 170))]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_happens_to_a_pool_every_request_ends_right(
    seed: int, options: dict[str, Any], store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 0.2)
    monkeypatch.setattr(sources, "LEAST_PATIENCE", 0.02)
    chaos(seed, options, store, alone(own(options), TEXTS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_three_hundred_fault_schedules_of_a_pool(
    options: dict[str, Any], store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 0.2)
    monkeypatch.setattr(sources, "LEAST_PATIENCE", 0.02)
    expected = alone(own(options), TEXTS)
    assert sum(chaos(seed, options, store, expected) for seed in range(300))
