"""KV events: a subscriber written from vLLM's example (kv_events_subscriber.py) knows what an engine has cached, and
llm-d's parser (pkg/kvevents/engineadapter/vllm_adapter.go, by which `positions` is written) reads the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from quire import LLM, SamplingParams
from quire.engine.kv_events import _number, of_replica
from quire.errors import ConfigError
from tests.http_tools import free_port

SIZE = 16
PROMPT = list(range(300, 300 + 3 * SIZE + 5))


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def positions(payload: bytes) -> list[tuple[str, list[int], int | None, list[int] | None]]:
    """The events of a batch as llm-d's parser takes them: arrays, by the positions of their fields, with hashes that
    are 64-bit numbers in msgpack (a smaller one has a type that it refuses), token ids of 32 bits, and trailing fields
    (LoRA, medium, extra keys, group, kind of cache, window) that may be absent or null."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float) and rank == 0
    found = []
    for tag, *fields in events:
        hashes, parent, tokens = fields[0] if fields else [], None, None
        assert type(tag) is str and all(b"\xcf" + each.to_bytes(8, "big") in payload for each in hashes)
        if tag == "BlockStored":
            _, parent, tokens, size, *more = fields
            assert parent is None or b"\xcf" + parent.to_bytes(8, "big") in payload
            assert all(0 <= token < 2**32 for token in tokens) and type(size) is int
            types = int, str, str, list, int, str, int
            assert all(each is None or type(each) is kind for each, kind in zip(more, types, strict=False))
            assert len(tokens) == size * len(hashes), "a dense span"
        elif tag == "BlockRemoved":
            assert all(each is None or type(each) is kind for each, kind in zip(fields[1:], (str, int), strict=False))
        else:
            assert tag == "AllBlocksCleared"
        found.append((tag, hashes, parent, tokens))
    return found


class Subscriber:
    """What an engine has by its events: the token ids of each block, by hash, and the block before it."""

    def __init__(self, events: str, replays: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._live, self._replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._live.connect(events)
        self._live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._replays.connect(replays)
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.seen: list[str] = []
        self._next = 0

    def catch_up(self) -> None:
        """Take in what has been missed."""
        self._replays.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            assert self._replays.poll(20_000)
            _, number, payload = self._replays.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                return
            self._take(number, payload)

    def listen(self) -> None:
        """Take in the next message that has not come from the replay socket."""
        before = self._next
        while self._next == before:
            assert self._live.poll(20_000)
            topic, number, payload = self._live.recv_multipart()
            assert topic == b"kv@here"
            if int.from_bytes(number, "big") >= before:
                self._take(number, payload)

    def _take(self, number: bytes, payload: bytes) -> None:
        assert int.from_bytes(number, "big") == self._next
        self._next += 1
        events = msgspec.msgpack.decode(payload, type=KVEventBatch).events
        assert [tag for tag, *_ in positions(payload)] == [type(event).__name__ for event in events]
        for event in events:
            self.seen.append(type(event).__name__)
            match event:
                case BlockStored(hashes, parent, tokens, size, _, medium):
                    assert (size, medium, len(tokens)) == (SIZE, "GPU", SIZE * len(hashes))
                    for index, each in enumerate(hashes):
                        self.blocks[each] = parent, tokens[index * SIZE : (index + 1) * SIZE]
                        parent = each
                case BlockRemoved(hashes, _):
                    for each in hashes:
                        del self.blocks[each]
                case AllBlocksCleared():
                    self.blocks.clear()

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each chain, from its first block to one that is the last."""
        found = []
        for last in self.blocks.keys() - {parent for parent, _ in self.blocks.values()}:
            tokens: list[int] = []
            at: int | None = last
            while at is not None:
                at, own = self.blocks[at]
                tokens = own + tokens
            found.append(tokens)
        return sorted(found)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def addresses() -> Iterator[dict[str, str]]:
    yield {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}


def test_a_subscriber_knows_what_an_engine_has_cached(addresses: dict[str, str]) -> None:
    events = {"enable_kv_cache_events": True, "topic": "kv@here", **addresses}
    params = SamplingParams(max_tokens=1, temperature=0.0)
    llm = LLM("demo", block_size=SIZE, num_kv_blocks=12, max_model_len=96, kv_events_config=events)
    subscriber = Subscriber(*(each.replace("*", "127.0.0.1") for each in addresses.values()))
    try:
        llm.generate([PROMPT], params)
        subscriber.catch_up()
        assert subscriber.seen[0] == "AllBlocksCleared" and set(subscriber.seen[1:]) == {"BlockStored"}
        assert subscriber.prompts == [PROMPT[: 3 * SIZE]]
        other = [*PROMPT[: 2 * SIZE], *range(900, 900 + SIZE + 1)]
        llm.generate([other], params)
        subscriber.listen()
        assert subscriber.prompts == [PROMPT[: 3 * SIZE], other[: 3 * SIZE]]
        llm.generate([[token + 100 for token in PROMPT]], SamplingParams(max_tokens=1, cache_salt="private"))
        llm.generate([list(range(1000, 1000 + 5 * SIZE))], params)  # evicts some
        subscriber.catch_up()
        assert "BlockRemoved" in subscriber.seen
        assert list(range(1000, 1000 + 5 * SIZE)) in subscriber.prompts
        assert not any(tokens[0] == PROMPT[0] + 100 for tokens in subscriber.prompts), "of a private prompt"
        for kv in llm._engine.scheduler.kvs:
            kv.cache.clear()
        llm.generate([PROMPT], params)
        subscriber.catch_up()
        assert subscriber.seen.count("AllBlocksCleared") == 2 and len(subscriber.blocks) == 3
    finally:
        subscriber.close()
        llm.close()


def test_a_hash_is_a_number_of_64_bits_in_msgpack_whatever_its_value() -> None:
    for name in (bytes(32), bytes(31) + b"\x07", b"\xff" * 32):
        assert msgspec.msgpack.encode(_number(name))[0] == 0xCF


def test_what_cannot_be_used_is_refused_by_name(addresses: dict[str, str]) -> None:
    taken = addresses["endpoint"]
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind(taken)
        for wrong, why in (
            ({"enable_kv_cache_events": True, "colour": 1}, "unknown field `colour`; allowed are"),
            ({"enable_kv_cache_events": True, "endpoint": taken}, "Address already in use"),
        ):
            with pytest.raises(ConfigError, match=why):
                LLM("demo", kv_events_config=wrong)
        socket.close(0)


def test_replicas_have_ports_of_their_own() -> None:
    given = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}
    assert of_replica(given, 2) == given | {"endpoint": "tcp://*:5559", "replay_endpoint": "tcp://*:6559"}
    assert of_replica({}, 1) == {"endpoint": "tcp://*:5558"}
    with pytest.raises(ConfigError, match="ipc:///a of several replicas needs a port"):
        of_replica({"endpoint": "ipc:///a"}, 0)
