"""The servers behind a router: their health, their load, and which one a request is sent to.

Each server is checked every second, with exponential backoff after failures. Before it gets requests, and again when it
was down, it must show that it has an OpenAI-compatible API, accepts the router's key, and serves the same model as
other servers under the same name. Of Quire servers whose tokens would differ, since they have other kernels or another
precision, one group serves a model, and the others stand aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import msgspec

from quire.address import Address
from quire.errors import ConfigError
from quire.fleet.choice import Candidate, Chooser, Decision, PolicyName
from quire.fleet.knowledge import Knowledge
from quire.fleet.load import Load, common_rate
from quire.fleet.prompt import CHUNK_BYTES, Prompt
from quire.http_client import FETCHED_BYTES, Connections, HttpClient, HttpError
from quire.log import event
from quire.router.answers import identity, read_models, read_prompts, wrong_key
from quire.router.picked import NOTHING_PICKED, Picked

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often a healthy server is checked."""
PATIENCE_SECONDS = 5.0
"""A server that does not answer a check within this time has failed; its requests continue elsewhere."""
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 30.0
WELL_SECONDS = 60.0
"""After this long without a failure, the backoff starts over."""
BYTES_PER_TOKEN = 4.0
"""Assumed until responses have shown the real ratio."""
FETCH_TOKENS_PER_SECOND = 100_000.0
FETCH_SECONDS = 0.02
"""Cost of transferring a prompt's blocks from a prefill server: a rate, and a fixed latency. A rough estimate suffices,
since it decides between computing and fetching, which differ by far."""

FORGET_SECONDS = 60.0
"""A server that joined by itself is removed if it has not renewed its registration for this long and is not up: another
program may have its port by then."""

ON_DECODE = 4.0
"""With prefill servers, a second of prefill on another server is weighted by this factor: it delays all streams there,
which prefill servers are meant to prevent."""

State = Literal["new", "up", "down", "loading", "refused", "aside"]
Role = Literal["serve", "prefill"]
Origin = str
"""How the router learned of a server: "given" (an option), "joined" (by itself), "file", or a source's URL."""


_KV = "num_blocks", "block_size", "held_blocks", "cached_blocks", "prompt_tokens", "cached_tokens", "kv_tiers"
"""What a Quire server reports about its KV cache, for display."""


class Engine:
    """An engine of a server: most servers have one, a Quire server has one per replica. Requests are placed on engines.

    Attributes:
        name: the server's name, with the replica's number if there are several.
        number: the replica's number; None if the server has only one engine.
        boot: identifies the running engine (another one after a restart), if the server reports it.
        is_up: False if the server reports that it is down. stalled: it hangs, and will be restarted.
        load: what this router has sent there. others: requests from elsewhere, if the server reports them.
    """

    def __init__(self, server: str, number: int | None = None) -> None:
        self.name = server if number is None else f"{server}#{number}"
        self.number = number
        self.boot: str | None = None
        self.is_up, self.stalled = True, False
        self.load = Load()
        self.others = 0

    def take(self, told: dict[str, Any]) -> None:
        """Take in what the server reports about it."""
        self.is_up, self.stalled = told.get("up", True), told.get("stalled", False)
        if "engine" in told and told["engine"] is None:
            return  # it is in a long step and has reported nothing new; its last report still counts
        self.boot = told.get("engine") or self.boot
        self.load.tell(told.get("prefill_tokens_per_second"))
        own = self.load.running + self.load.waiting
        self.others = max(0, told.get("running", 0) + told.get("waiting", 0) - own)


class Server:
    """One server, as the router knows it.

    Attributes:
        name: host and port.
        state: "refused" means that it answers but must not be used, and "aside" that servers which compute in another
            way serve its model; `reason` says why.
        draining: it gets no new requests.
        failures: recent consecutive failures; reset after `WELL_SECONDS`.
        engines: at least one.
        models: by name, what distinguishes a model from others of the same name.
        told: a Quire server's last answer to `/load`.
        tells_prompts: it reports what it has cached, or has not been asked yet.
        num_requests, num_failures: since the router started.
    """

    def __init__(
        self, url: str, role: Role, origin: Origin, connections: Connections, cacert: str | None = None
    ) -> None:
        self.address = Address(url)
        self.name = self.address.name
        self.role, self.origin = role, origin
        self.upstream = HttpClient(self.address, connections, cacert)
        self.engines = [Engine(self.name)]
        self.state: State = "new"
        self.reason = "not checked yet"
        self.draining = False
        self.failures = 0
        self.failed_at = 0.0
        self.retry_at = 0.0
        self.models: dict[str, dict[str, Any]] = {}
        self.is_quire = False
        self.told: dict[str, Any] = {}
        self.tells_prompts = True
        self.num_requests = self.num_failures = 0
        self.heard_at = 0.0  # when it was last listed, or last registered
        self.wake = asyncio.Event()  # check it now

    @property
    def is_up(self) -> bool:
        return self.state == "up" and not self.draining

    @property
    def works(self) -> bool:
        """Whether any of its engines is up."""
        return any(engine.is_up for engine in self.engines)

    @property
    def fingerprint(self) -> str:
        """What its tokens depend on; "" if it is not known."""
        return str(self.told.get("fingerprint") or "")

    @property
    def waiting(self) -> int:
        """Requests that this router has sent there and that wait for their first token."""
        return sum(one.load.waiting for one in self.engines)

    @property
    def running(self) -> int:
        """Requests that this router has sent there and that have a first token."""
        return sum(one.load.running for one in self.engines)

    @property
    def queued(self) -> int:
        """Prompt tokens of the waiting requests."""
        return sum(one.load.queued for one in self.engines)

    @property
    def rate(self) -> float:
        """Prompt tokens per second, summed over the engines whose rate is known."""
        return sum(one.load.shown or 0.0 for one in self.engines)

    def described(self, now: float, blocks: int) -> dict[str, Any]:
        """For people."""
        return {
            "server": self.name,
            "role": self.role,
            "origin": self.origin,
            "state": "draining" if self.draining and self.state == "up" else self.state,
            "reason": self.reason,
            "retry_in_s": round(max(0.0, self.retry_at - now), 1) if self.state == "down" else None,
            "quire": self.is_quire,
            "fingerprint": self.fingerprint,
            "models": sorted(self.models),
            "waiting": self.waiting,
            "running": self.running,
            "other_requests": sum(one.others for one in self.engines),
            "queued_tokens": self.queued,
            "prefill_tokens_per_second": round(self.rate, 1),
            "engines": len(self.engines),
            "requests": self.num_requests,
            "failures": self.num_failures,
            "known_chunks": blocks,
            "kv": {name: self.told[name] for name in _KV if self.told.get(name) is not None},
        }


class Servers:
    """All servers. To be used from one event loop.

    Args:
        key: the API key that the router itself sends to the servers; "" for none.
        cacert: see `quire.tls.client_context`.
        max_connections: most connections to all of them, as far as requests do not need more.
        mixed: servers whose tokens differ may serve one model.
    """

    def __init__(
        self,
        policy: PolicyName = "cost",
        key: str = "",
        clock: Callable[[], float] = time.monotonic,
        cacert: str | None = None,
        max_connections: int = 1 << 20,
        mixed: bool = False,
    ) -> None:
        self._mixed, self._serving = mixed, dict[str, str]()  # by model: the fingerprint of those that serve it
        self._cacert, self._connections = cacert, Connections(max_connections)
        self.by_name: dict[str, Server] = {}
        self.knowledge = Knowledge()
        self.bytes_per_token = BYTES_PER_TOKEN
        self.clock = clock
        self._chooser, self._sources = Chooser(policy), Chooser()
        self._headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    # -- membership --------------------------------------------------------------------------------------

    def add(self, url: str, role: Role = "serve", origin: Origin = "given") -> Server:
        """Add a server; one that is known already stays as it is, unless its role has changed.

        Raises:
            ConfigError: this is not a server's URL, or one that may not join by itself.
        """
        address = Address(url)
        if origin == "joined" and address.uds is not None:  # remote servers must not make it connect to local sockets
            raise ConfigError(f"{url!r} is a Unix socket, and servers join from a port; give the router its --server")
        name = address.name
        found = self.by_name.get(name)
        if found is not None and found.role == role:
            found.heard_at = self.clock()
            return found
        if found is not None:
            self.remove(name)
        server = self.by_name[name] = Server(url, role, origin, self._connections, self._cacert)
        server.heard_at = self.clock()
        self._looking[name] = asyncio.create_task(self._look_after(server))
        event(logger, "server_added", f"server {name} ({role}) was added", server=name, role=role, origin=origin)
        return server

    def remove(self, name: str) -> None:
        """Remove a server: it gets no new requests, and those running there may finish."""
        server = self.by_name.pop(name)
        self._looking.pop(name).cancel()
        self._forget(server)
        server.state, server.reason = "down", "it was removed"
        self.regroup()
        event(logger, "server_removed", f"server {name} was removed", server=name)

    def _forget(self, server: Server) -> None:
        """Forget what the server had cached: it is gone, or may have lost it."""
        for engine in server.engines:
            self.knowledge.forget(engine.name)

    def chunks(self, server: Server) -> int:
        """Number of prompt chunks that its engines are known to have cached."""
        return sum(self.knowledge.count(engine.name) for engine in server.engines)

    def held(self, server: Server, hashes: Sequence[bytes]) -> int:
        """Tokens of a prompt that are cached there, on the engine that has the most of it."""
        return self.tokens_of(CHUNK_BYTES * max(self.knowledge.held(one.name, hashes) for one in server.engines))

    def set_listed(self, listed: dict[str, Role], origin: Origin) -> None:
        """Set the servers of one origin, by URL: new ones are added, and those no longer listed are removed."""
        names = {self.add(url, role, origin).name for url, role in listed.items()}
        for name, server in list(self.by_name.items()):
            if server.origin == origin and name not in names:
                self.remove(name)

    async def close(self) -> None:
        """Stop looking."""
        for task in self._looking.values():
            task.cancel()
        await asyncio.gather(*self._looking.values(), return_exceptions=True)
        for server in self.by_name.values():
            server.upstream.break_off()

    # -- choosing ------------------------------------------------------------------------------------------

    def choose(
        self, prompt: Prompt, avoid: Collection[str] = (), goes_on: str | None = None, picked: Picked = NOTHING_PICKED
    ) -> Choice | None:
        """Choose a server for a request; None if none can take it now.

        Args:
            avoid: servers that have been tried.
            goes_on: its stream has begun on another server with this fingerprint, so only such a one can resume it.
            picked: what a picker has said; if none of those that it prefers can take the request, the cost decides.
        """
        able = [one for one in self.able(prompt.model, goes_on, picked) if one.name not in avoid]
        plain = [one for one in able if one.role == "serve"] or able  # a prefill server can serve if no other is left
        prefill = [] if prompt.moved or plain is able else [one for one in able if one.role == "prefill"]
        tokens = self.tokens_of(prompt.size)
        sources = self._candidates(_engines(prefill), prompt, tokens)
        source = self._sources.choose(tokens, b"", sources)  # the one that would have the prompt first
        best = _engines(picked.best_of(plain))
        places = [(server, engine) for server, engine in best if goes_on is None or engine.is_up]
        candidates = self._candidates(places, prompt, tokens, source)
        decision = self._chooser.choose(tokens, prompt.hashes[0], candidates)
        if decision is None:
            return None
        server, engine = next(place for place in places if place[1].name == decision.server)
        computes = None
        if source is not None and decision.chosen.fetch:
            computes = next(one for one, engine in _engines(prefill) if engine.name == source.server)
        endpoint = server.address.endpoint
        return Choice(server, engine, decision, tokens, computes, picked.prefers(endpoint), picked.described(endpoint))

    def _candidates(
        self, places: Sequence[tuple[Server, Engine]], prompt: Prompt, tokens: int, source: Decision | None = None
    ) -> list[Candidate]:
        """The engines of some servers as candidates for a prompt. `source`: a prefill server that could compute it."""
        now, common, found = self.clock(), common_rate(engine.load for _, engine in places), []
        for _, engine in places:
            load, fetch = engine.load, 0.0
            held = self.tokens_of(self.knowledge.held(engine.name, prompt.hashes) * CHUNK_BYTES)
            if source is not None:
                fetch = source.chosen.total + FETCH_SECONDS + max(0, tokens - held) / FETCH_TOKENS_PER_SECOND
            candidate = Candidate(
                name=engine.name,
                rate=load.rate(common),
                is_up=engine.is_up,
                held=held,
                queued=load.queued,
                waiting=load.waiting,
                running=load.waiting + load.running + engine.others,
                recent=load.recent(now),
                weight=1.0 if source is None else ON_DECODE,
                fetchable=tokens if source is not None else 0,
                fetch_seconds=fetch,
            )
            found.append(candidate)
        return found

    def tokens_of(self, size: int) -> int:
        """The estimated number of tokens of a prompt of this many bytes."""
        return int(size / self.bytes_per_token)

    def learn_size(self, size: int, tokens: int) -> None:
        """Learn that a prompt of this many bytes had this many tokens."""
        if tokens >= 8:
            self.bytes_per_token += 0.05 * (min(64.0, max(0.25, size / tokens)) - self.bytes_per_token)

    def able(self, model: str | None, goes_on: str | None = None, picked: Picked = NOTHING_PICKED) -> list[Server]:
        """The servers that accept requests for this model; None: for any. `goes_on`, `picked`: see `choose`."""
        allowed = [one for one in self.by_name.values() if picked.allows(one.address.endpoint)]
        found = [one for one in allowed if model is None or model in one.models]
        if goes_on is None:
            return [one for one in found if one.is_up]
        alike = [one for one in found if one.is_quire and one.fingerprint == goes_on]
        return [one for one in alike if one.is_up or (one.state == "aside" and not one.draining)]

    def hangs(self, model: str | None, goes_on: str | None, picked: Picked = NOTHING_PICKED) -> bool:
        """Whether a server could take a request, see `choose`, but for its engines, none of which works now."""
        return any(not one.works for one in self.able(model, goes_on, picked))

    def has_model(self, model: str | None) -> bool:
        """Whether any server, even one that is down, serves this model; True while no server's models are known."""
        known = [one for one in self.by_name.values() if one.models]
        return model is None or not known or any(model in one.models for one in known)

    @property
    def has_new(self) -> bool:
        """Whether any server has not been checked yet: until then it is not known whether one takes a request. A check
        takes at most `PATIENCE_SECONDS` per HTTP request.
        """
        return any(one.state == "new" for one in self.by_name.values())

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until a server's state has changed, for at most this many seconds."""
        self._changed.clear()
        await _wait(self._changed, seconds)

    # -- health ---------------------------------------------------------------------------------------

    def failed(self, server: Server, reason: str) -> None:
        """A server could not be reached, or its response broke off; the backoff doubles each time."""
        now = self.clock()
        if server.state == "down" and now < server.retry_at:
            return  # one of many requests that it had when it failed
        if now - server.failed_at > WELL_SECONDS:
            server.failures = 0
        if server.state != "down":
            server.num_failures += 1
        was_there = server.state in ("up", "aside")
        wait = min(MAX_BACKOFF, FIRST_BACKOFF * 2.0**server.failures)
        server.failures, server.failed_at, server.retry_at = min(server.failures + 1, 16), now, now + wait
        if not server.is_quire:  # its cache may be lost; a Quire server reports that itself
            self._forget(server)
        self._set_state(server, "down", reason)
        server.wake.set()
        if was_there:
            self.regroup()

    def _set_state(self, server: Server, state: State, reason: str) -> None:
        if server.state != state or (state in ("refused", "aside") and server.reason != reason):
            level = logging.INFO if state in ("up", "loading") else logging.WARNING
            text = f"server {server.name} is {state}" + (f": {reason}" if reason else "")
            event(logger, "server_state", text, level=level, server=server.name, state=state, reason=reason)
            self._changed.set()
        server.state, server.reason = state, reason

    def regroup(self) -> None:
        """Of the servers of a model, let those with one fingerprint serve it, and the others stand aside: most of them,
        and among equally many those that serve it now. Servers that only compute prompts do not count.
        """
        there = [one for one in self.by_name.values() if one.state in ("up", "aside")]
        for model in {name for one in there for name in one.models} if not self._mixed else ():
            voters = [one for one in there if model in one.models and one.fingerprint and not one.draining]
            counts = Counter({one.fingerprint: 0 for one in voters})
            counts.update(one.fingerprint for one in voters if one.role == "serve")
            if counts:
                now = self._serving.get(model)
                self._serving[model] = max(counts, key=lambda each: (counts[each], each == now))
        for one in there:
            own, serving = one.fingerprint, {self._serving.get(model, "") for model in one.models} - {""}
            if self._mixed or not own or serving <= {own}:
                self._set_state(one, "up", "")
            else:
                reason = (
                    f"its tokens would be others: it computes as {own}, and the servers of its model as "
                    f"{', '.join(sorted(serving - {own}))}; give all the same precision and --cpu-kernels, or the "
                    "router --mixed"
                )
                self._set_state(one, "aside", reason)

    async def _look_after(self, server: Server) -> None:
        """Check a server periodically."""
        while True:
            try:
                await self._look_at(server)
            except HttpError as error:
                self.failed(server, str(error))
                if server.is_quire:  # its requests continue elsewhere
                    server.upstream.break_off()
            except Exception as error:  # whatever it answers, the other servers must not be affected
                event(
                    logger,
                    "look_failed",
                    f"server {server.name}: {type(error).__name__}",
                    level=logging.ERROR,
                    exc_info=error,
                )
                self.failed(server, "its answer could not be read")
            silent = self.clock() - server.heard_at > FORGET_SECONDS
            if server.state != "up" and server.origin == "joined" and silent:
                return self.remove(server.name)
            await self._pause(server)

    async def _pause(self, server: Server) -> None:
        """Wait until the next check; a failure in the meantime changes when that is."""
        end = self.clock() + LOOK_SECONDS
        while (left := (server.retry_at if server.state == "down" else end) - self.clock()) > 0:
            server.wake.clear()
            await _wait(server.wake, left)

    async def _look_at(self, server: Server) -> None:
        fetch, before = server.upstream.fetch, server.fingerprint
        status, body = await fetch("GET", "/v1/models", self._headers, seconds=PATIENCE_SECONDS)
        if status in (401, 403):
            self._set_state(server, "refused", wrong_key(status, bool(self._headers)))
            return
        if status == 503:
            self._set_state(server, "loading", "it does not accept requests now")
            return
        models = read_models(body) if status == 200 else None
        if models is None:
            self._set_state(
                server,
                "refused",
                f"it is no OpenAI server: GET /v1/models answers {status}, without a "
                "list of models; give the URL that stands before /v1",
            )
            return
        server.is_quire = any(card.get("owned_by") == "quire" for card in models.values())
        if server.is_quire:
            status, body = await fetch("GET", "/load", self._headers, seconds=PATIENCE_SECONDS)
            self._take_load(server, msgspec.json.decode(body) if status == 200 else {})
            self._leave_stalled(server)
            await self._hear(server)
        if server.told.get("checkpoint"):
            models = {name: card | {"checkpoint": server.told["checkpoint"]} for name, card in models.items()}
        conflict = self._conflict(server, models)
        if conflict is not None:
            self._set_state(server, "refused", conflict)
            return
        is_new = server.state not in ("up", "aside") or server.models.keys() != models.keys()
        server.models = models
        if is_new or server.fingerprint != before:
            server.state = server.state if server.state in ("up", "aside") else "aside"
            self.regroup()

    def _take_load(self, server: Server, told: dict[str, Any]) -> None:
        """Take in a Quire server's report about itself."""
        server.told = told
        documents = told.get("engines") or [{}]
        if len(documents) != len(server.engines):
            self._forget(server)
            numbers = range(len(documents)) if len(documents) > 1 else [None]
            server.engines = [Engine(server.name, number) for number in numbers]
        for engine, document in zip(server.engines, documents, strict=True):
            before = engine.boot
            engine.take(document)
            if engine.boot != before:
                self.knowledge.forget(engine.name)  # a new engine: its cache is empty
                server.tells_prompts = True
            size = (document.get("num_blocks") or 0) * (told.get("block_size") or 0)
            if size and self.knowledge.expects(engine.name) < 0:
                self.knowledge.resize(engine.name, int(size * self.bytes_per_token / CHUNK_BYTES))

    def _leave_stalled(self, server: Server) -> None:
        """If all its engines hang, its requests go on elsewhere, where they can."""
        others = [one for one in self.by_name.values() if one.is_up and one.models.keys() & server.models.keys()]
        works = any(one.works for one in others if one is not server)
        if works and all(engine.stalled for engine in server.engines):
            server.upstream.break_off()

    async def _hear(self, server: Server) -> None:
        """Learn what its cache has gained and lost since the last check. For a server that does not report this, the
        router goes by what it has sent there.
        """
        if not server.tells_prompts:
            return
        since = [self.knowledge.expects(engine.name) for engine in server.engines]
        path = f"/load/prompts?since={','.join(map(str, since))}"
        most = FETCHED_BYTES * len(server.engines)  # each may tell the names of its whole cache
        status, body = await server.upstream.fetch("GET", path, self._headers, seconds=PATIENCE_SECONDS, most=most)
        server.tells_prompts = status != 404
        if status != 200:
            return
        told = await asyncio.to_thread(read_prompts, body, since)  # the document may be large
        for engine, news in zip(server.engines, told, strict=True):
            if news is None:
                continue
            if news.names is not None:
                self.knowledge.snapshot(engine.name, news.boot, news.next, news.names)
            else:
                self.knowledge.hear(engine.name, news.boot, news.events)

    def _conflict(self, server: Server, models: dict[str, dict[str, Any]]) -> str | None:
        """Find a server that serves a different model under one of these names."""
        for other in self.by_name.values():
            if other is server or not other.models or other.state == "refused":
                continue
            for name in models.keys() & other.models.keys():
                mine, theirs = identity(models[name]), identity(other.models[name])
                if mine and theirs and mine != theirs:
                    return (
                        f"it serves another model as {name!r} than {other.name} does ({mine}, not {theirs}); give one "
                        "of them another --served-model-name"
                    )
        return None


class Choice(msgspec.Struct, frozen=True):
    """Where a request goes: a server and which of its engines, why, the estimated number of prompt tokens, the server
    that computes the prompt if that is another one, whether the server is one that a picker prefers (None: it named
    none), and what the log says of that."""

    server: Server
    engine: Engine
    decision: Decision
    tokens: int
    prefill: Server | None = None
    as_picked: bool | None = None
    how: str = ""

    @property
    def missing(self) -> int:
        """Prompt tokens that the server must compute."""
        return max(1, self.tokens - self.decision.chosen.held) if self.prefill is None else 1

    def described(self) -> str:
        """The choice and the servers' costs, for the log."""
        pair = f" with {self.prefill.name}" if self.prefill is not None else ""
        shown = self.decision.shown
        others = len(self.decision.costs) - len(shown)
        more = [f"{others} others"] if others else []
        return f"to {self.engine.name}{pair}{self.how}: " + "; ".join([*map(str, shown), *more])


def _engines(servers: Iterable[Server]) -> list[tuple[Server, Engine]]:
    return [(server, engine) for server in servers for engine in server.engines]


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, at most this long. Not by `wait_for`: in Python 3.11 it may swallow a cancellation."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
