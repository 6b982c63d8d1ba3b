"""One pool of KV: what one engine has computed, the others read, and no token shows it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import quire.kv.directory
from quire.config import EngineConfig
from quire.core import holders
from quire.core.fetches import PATIENCE, REMOTE
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.kv.directory import agent
from quire.kv.directory.base import Directory, DirectoryError, Node
from quire.kv.directory.local import LocalDirectory, LocalStore
from tests.http_tools import wait_until
from tests.redis_server import RedisServer, free_port, needs_redis
from tests.test_kv_host import Outcome, params
from tests.test_kv_prefill import alone, prompt

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
            fetches = self.engine.scheduler.kv.fetches
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


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    key = tmp_path / "key"
    key.write_text("a secret of this cluster")
    key.chmod(0o600)
    return {
        "model": "demo",
        "threads": 1,
        "num_kv_blocks": 120,
        "max_model_len": 192,
        "check_invariants": True,
        "host_kv_memory": "4MiB",
        "cluster_key_file": str(key),
        "kv_directory": "redis://nowhere",
    }


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A directory within this process, in place of Redis."""
    made = LocalStore()
    monkeypatch.setattr(quire.kv.directory, "open_directory", lambda url, cluster: LocalDirectory(made, cluster))
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
def pool(options: dict[str, Any], store: LocalStore) -> Iterator[Pool]:
    made = Pool(options)
    yield made
    for node in made.nodes:
        node.close()


@needs_redis
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
