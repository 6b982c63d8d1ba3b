"""Chooses a replica of the engine for each request of an HTTP process, by the rule of `quire.fleet.choice`."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from quire.core.block_hash import BlockHasher
from quire.core.request import Request, RequestUpdate
from quire.fleet.choice import Candidate, Chooser
from quire.fleet.knowledge import Knowledge
from quire.fleet.load import FIRST_RATE, Load
from quire.ipc.link import EngineLink


@dataclass(frozen=True, slots=True)
class Place:
    """The replica for a request. `tokens`: prompt tokens that are probably not cached there."""

    link: EngineLink
    tokens: int


@dataclass(slots=True)
class _Sent:
    place: Place
    at: float
    begun: bool = False


class Placement:
    """Chooses among the engines of one server.

    What each engine has cached is inferred from the prompts sent there, by their blocks' hashes. Of the requests of
    other HTTP processes only the number is known, from the engines' boards. A prompt that is new to all engines is
    placed by the hash of its first block (rendezvous hashing) among equally good engines, so that all HTTP processes
    send prompts with the same prefix to the same engine. A single process chooses the one with the fewest recent
    requests instead.

    Args:
        key: 32 bytes that only the server's HTTP processes know.
        alone: there is only one HTTP process.
    """

    def __init__(self, links: Sequence[EngineLink], key: bytes, alone: bool) -> None:
        self._links, self._alone = links, alone
        self._hasher = BlockHasher(key, "")
        self._chooser, self._knowledge = Chooser(), Knowledge()
        self._loads = [Load() for _ in links]
        self._sent: dict[int, _Sent] = {}  # open requests, by number

    def choose(self, request: Request, able: Sequence[EngineLink]) -> Place:
        """Choose one of the engines that are ready, at least one."""
        if len(self._links) == 1:
            return Place(able[0], len(request.tokens))
        hashes, now = self._hashes(request, able[0]), time.monotonic()
        held = {link.name: self._knowledge.held(link.name, hashes) for link in able}
        candidates = [self._candidate(link, held[link.name], now) for link in able]
        if hashes and not self._alone and not any(held.values()):
            candidates = [replace(each, recent=self._rank(hashes[0], each.name)) for each in candidates]
        decision = self._chooser.choose(len(request.tokens), b"".join(hashes[:1]), candidates)
        link = able[0] if decision is None else next(each for each in able if each.name == decision.server)
        self._knowledge.sent(link.name, hashes)
        return Place(link, max(1, len(request.tokens) - held[link.name] * _block_size(link)))

    def _rank(self, first: bytes, name: str) -> int:
        return int.from_bytes(self._hasher.chain(first, [name.encode()])[0][:6])

    def _candidate(self, link: EngineLink, held: int, now: float) -> Candidate:
        load = self._loads[link.replica]
        others = link.num_open - len(link.requests)  # from other HTTP processes, as the engine reported last
        return Candidate(
            name=link.name,
            rate=FIRST_RATE,  # replicas are equally fast, and how fast does not affect the choice
            is_up=link.healthy,
            held=held * _block_size(link),
            queued=load.queued,
            waiting=load.waiting,
            running=load.waiting + load.running + max(0, others),
            recent=load.recent(now),
        )

    def _hashes(self, request: Request, link: EngineLink) -> list[bytes]:
        """Hashes of the request's full blocks, prompt and output."""
        size = 4 * _block_size(link)
        tokens = array("I", request.tokens).tobytes()
        blocks = (tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size))
        return self._hasher.chain(self._hasher.root(request.scope), blocks)

    def sent(self, number: int, place: Place) -> None:
        """The request with this number was sent there."""
        now = time.monotonic()
        self._loads[place.link.replica].sent(now, place.tokens)
        self._sent[number] = _Sent(place, now)

    def heard(self, update: RequestUpdate) -> None:
        """Take note of an update of a request."""
        sent = self._sent.get(update.request)
        if sent is None:
            return
        load = self._loads[sent.place.link.replica]
        if update.tokens and not sent.begun:
            sent.begun = True
            load.begun(sent.at, time.monotonic(), sent.place.tokens)
        if update.finish_reason is not None:
            load.ended(sent.place.tokens, sent.begun)
            del self._sent[update.request]

    def opened(self, link: EngineLink) -> None:
        """An engine has started, with an empty cache."""
        self.lost_cache(link)
        if link.info is not None:
            self._knowledge.resize(link.name, link.info.num_blocks)

    def lost(self, link: EngineLink) -> None:
        """The engine died, with all its requests."""
        self.lost_cache(link)
        self._loads[link.replica] = Load()
        self._sent = {number: sent for number, sent in self._sent.items() if sent.place.link is not link}

    def left(self, link: EngineLink, numbers: Collection[int]) -> None:
        """These requests have left the engine, which hangs."""
        for number in self._sent.keys() & numbers:
            sent = self._sent.pop(number)
            self._loads[link.replica].ended(sent.place.tokens, sent.begun)

    def lost_cache(self, link: EngineLink) -> None:
        """The engine's prefix cache was cleared."""
        self._knowledge.forget(link.name)


def _block_size(link: EngineLink) -> int:
    return link.info.block_size if link.info is not None else 1
