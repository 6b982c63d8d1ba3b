"""KV events as vLLM publishes them (`vllm/distributed/kv_events.py`), for routers that follow what engines have cached.

A message has three frames: the topic, a sequence number of 8 bytes (big-endian), and a batch of events in msgpack. A
subscriber that has missed some asks the replay socket, with the number of the first that it wants, for what is kept.
A block's hash is the last 8 bytes of Quire's, with the first bit set; its medium "GPU" is vLLM's name for what can be
used without a transfer, on any device. Blocks of requests with a `cache_salt` are their owners' matter, and are not
published.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import zmq

from quire.core.prefix_cache import KEY_BYTES, PrefixCache
from quire.core.prefix_node import Node
from quire.errors import ConfigError

MEDIUM = "GPU"
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number after the last message of a replay."""

POLL_MS = 200


class KVEventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`kv_events_config`, with vLLM's names and defaults.

    Attributes:
        endpoint: ZeroMQ's address of the PUB socket; bound if it has `*` or `::` or is `ipc:`, else connected.
        replay_endpoint: address of the ROUTER socket for replays; None for none.
        buffer_steps: number of the last messages that are kept for replays. hwm: those kept for a slow subscriber.
        max_queue_size: has no effect, since messages are sent at once.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> KVEventsConfig:
        """Parse the option.

        Raises:
            ConfigError: it has an unknown key, or a value of another type.
        """
        try:
            return msgspec.convert(dict(given), cls)
        except msgspec.ValidationError as error:
            allowed = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"kv_events_config: {error}; allowed are {allowed}") from error


class _Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(_Event):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = 0


class KVEvents:
    """Publishes which blocks can be used here.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic, self._told = config.topic.encode(), set[bytes]()
        self._kept = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)
        self._next, self._keeping, self._stopping = 0, threading.Lock(), threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(config.hwm)
        bound = any(each in config.endpoint for each in ("*", "::", "ipc://"))
        self._open(self._out, config.endpoint, bound)
        self._thread: threading.Thread | None = None
        if config.replay_endpoint is not None:
            socket = self._context.socket(zmq.ROUTER)
            self._open(socket, config.replay_endpoint, True)
            self._thread = threading.Thread(target=self._replay, args=(socket,), name="quire KV events", daemon=True)
            self._thread.start()
        self._send([AllBlocksCleared()])  # whatever an engine before had published

    def tell(self, touched: set[bytes], there: set[bytes], caches: Sequence[PrefixCache]) -> None:
        """Publish what has changed.

        Args:
            touched: names of blocks that may have come or gone. there: those of blocks that are there.
            caches: see `Published.changes`.
        """
        gone = [each for each in touched & self._told if each not in there]
        self._told.difference_update(gone)
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if gone:
            events.append(BlockRemoved([_number(each) for each in gone]) if self._told else AllBlocksCleared())
        for cache in caches:
            found = {each: cache.find(each) for each in (touched & there) - self._told}
            new = {name: node for name, node in found.items() if node is not None and not node.scope}
            self._told |= new.keys()
            events += _stored(new, cache.block_bytes // KEY_BYTES)
        if events:
            self._send(events)

    def close(self) -> None:
        """Close the sockets."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def _open(self, socket: zmq.Socket[bytes], address: str, bound: bool) -> None:
        try:
            (socket.bind if bound else socket.connect)(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_events_config: {address} cannot be used ({error.strerror}); give a ZeroMQ address such as "
                "tcp://*:5557 that nothing else on this machine listens on"
            ) from error

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        number = self._next.to_bytes(8, "big")
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events))
        with self._keeping:
            self._kept.append((number, payload))
            self._next += 1
        self._out.send_multipart([self._topic, number, payload])

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer replay requests, until the end."""
        while not self._stopping.is_set():
            if not socket.poll(POLL_MS):
                continue
            client, *rest = socket.recv_multipart()
            with self._keeping:
                kept = list(self._kept)
            if len(rest) == 2 and len(rest[1]) == 8:  # an empty frame, and a number
                for message in [*(each for each in kept if each[0] >= rest[1]), (END, b"")]:
                    socket.send_multipart([client, b"", *message])


def publisher(given: Mapping[str, Any]) -> KVEvents | None:
    """What `kv_events_config` asks for; None for no events.

    Raises:
        ConfigError: it is not valid.
    """
    config = KVEventsConfig.of(given)
    return KVEvents(config) if config.enable_kv_cache_events and config.publisher == "zmq" else None


def of_replica(given: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The option for one of several replicas: as in vLLM, ports are counted up from the first one's.

    Raises:
        ConfigError: an address has no port.
    """
    config = KVEventsConfig.of(given)
    ports = {"endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint}
    return {**given, **{name: _counted_up(each, index) for name, each in ports.items() if each is not None}}


def _counted_up(address: str, index: int) -> str:
    head, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"kv_events_config: {address} of several replicas needs a port, as in tcp://*:5557")
    return f"{head}:{int(port) + index}"


def _number(name: bytes) -> int:
    """A block's hash: never so small that msgpack takes fewer than 8 bytes, which older versions of llm-d refuse."""
    return int.from_bytes(name[-8:], "big") | 1 << 63


def _stored(new: dict[bytes, Node], block_size: int) -> list[BlockStored]:
    """Events of new blocks: one for each chain of them, after that of the block before it."""
    events, left = [], dict(new)
    while left:
        chain = [next(iter(left.values()))]
        while (parent := chain[-1].parent) is not None and parent.hash in left:
            chain.append(parent)
        chain.reverse()
        before = chain[0].parent
        parent_hash = _number(before.hash) if before is not None and before.parent is not None else None
        tokens = [token for node in chain for token in memoryview(node.key).cast("q")]
        events.append(BlockStored([_number(node.hash) for node in chain], parent_hash, tokens, block_size))
        for node in chain:
            del left[node.hash]
    return events
