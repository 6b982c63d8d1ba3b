"""Which replica of a server a request goes to, as one HTTP process sees them: see `quire.fleet.choice` for the rule."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.core.block_hash import BlockHasher
from quire.core.request import Request, RequestUpdate
from quire.fleet.choice import Candidate, Chooser
from quire.fleet.knowledge import Knowledge
from quire.fleet.load import FIRST_RATE, Load
from quire.ipc.link import EngineLink


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes. `tokens`: of its prompt that are probably not cached there."""

    link: EngineLink
    tokens: int


@dataclass(slots=True)
class _Sent:
    place: Place
    at: float
    begun: bool = False


class Placement:
    """Chooses among the engines of one server.

    What each has cached is known from what was sent there: it goes by the hashes of the prompts' blocks. What other
    HTTP processes have sent is known by its number alone, from the engines' boards. So that they send prompts that
    begin alike to the same engine without asking each other, a prompt that is new to all goes by the hash of its first
    block (rendezvous hashing), of engines that are as good; one process alone takes the one that got the fewest lately.

    Args:
        key: 32 bytes that the server's HTTP processes have in common, and nobody else.
        alone: there is one HTTP process.
    """

    def __init__(self, links: Sequence[EngineLink], key: bytes, alone: bool) -> None:
        self._links, self._alone = links, alone
        self._hasher = BlockHasher(key, "")
        self._chooser, self._knowledge = Chooser(), Knowledge()
        self._loads = [Load() for _ in links]
        self._sent: dict[int, _Sent] = {}  # open requests, by number

    def choose(self, request: Request, able: Sequence[EngineLink]) -> Place:
        """Where a request goes, of engines that are ready: one at least."""
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
        others = link.num_open - len(link.requests)  # of other HTTP processes, as the engine counted last
        return Candidate(
            name=link.name,
            rate=FIRST_RATE,  # replicas are alike: which costs least does not depend on how fast all of them are
            is_up=link.healthy,
            held=held * _block_size(link),
            queued=load.queued,
            waiting=load.waiting,
            running=load.waiting + load.running + max(0, others),
            recent=load.recent(now),
        )

    def _hashes(self, request: Request, link: EngineLink) -> list[bytes]:
        """Of the full blocks of all that is known of the request."""
        size = 4 * _block_size(link)
        tokens = array("I", request.tokens).tobytes()
        blocks = (tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size))
        return self._hasher.chain(self._hasher.root(request.scope), blocks)

    def sent(self, number: int, place: Place) -> None:
        """The request of this number goes there."""
        now = time.monotonic()
        self._loads[place.link.replica].sent(now, place.tokens)
        self._sent[number] = _Sent(place, now)

    def heard(self, update: RequestUpdate) -> None:
        """What came of a request."""
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
        """There is an engine, with nothing in its cache."""
        self.lost_cache(link)
        if link.info is not None:
            self._knowledge.resize(link.name, link.info.num_blocks)

    def lost(self, link: EngineLink) -> None:
        """The engine died, with all that it had to do."""
        self.lost_cache(link)
        self._loads[link.replica] = Load()
        self._sent = {number: sent for number, sent in self._sent.items() if sent.place.link is not link}

    def lost_cache(self, link: EngineLink) -> None:
        """What requests do not use there is not cached any more."""
        self._knowledge.forget(link.name)


def _block_size(link: EngineLink) -> int:
    return link.info.block_size if link.info is not None else 1
