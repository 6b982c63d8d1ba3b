"""Finds the prefix length from which loading beats computing: from the pool, a tier below it, or another engine."""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from quire.bench.cells import greedy
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.errors import BenchmarkError
from quire.kv.importer import Prefiller
from quire.kv.tiers.connector import WORTH
from quire.kv.tiers.cost import Costs
from quire.kv.tiers.tier import DISK, HOST, PEER, Tier
from quire.kv.transport.base import Transport
from quire.llm import LLM

COMPUTED, POOL = "computed", "pool"
TRANSPORTS = "shared_memory", "socket"
SOURCES = POOL, HOST, DISK, *TRANSPORTS
"""Where a prefix can come from; for another engine, the transport."""

NAMES = {
    COMPUTED: "computed",
    POOL: "pool",
    HOST: "host",
    DISK: "disk",
    "shared_memory": "shared memory",
    "socket": "socket",
}
"""For people."""

FROM = {
    POOL: "the pool",
    HOST: "host memory",
    DISK: "the disk",
    "shared_memory": "another engine by shared memory",
    "socket": "another engine by socket",
}

NEVER = 1 << 40
"""A `prefill_min_tokens` so high that only requests that ask for it are computed by another engine."""

READY_SECONDS = 60.0
"""Timeout for connecting to the other engine."""


class Always(Costs):
    """In place of `Costs`: always prefers loading."""

    def prefers_load(self, source: str, blocks: float, tokens: int, context: int) -> bool:
        return True


class Row(msgspec.Struct):
    """Attributes:
    tokens: length of the prefix.
    seconds: median time to first token of a prompt with the prefix and one more token, by source. None if it was
        computed anyway.
    """

    tokens: int
    seconds: dict[str, float | None]


Progress = Callable[[str], None]
"""Called with what is being measured."""


class PrefixTimer:
    """Times an engine's time to first token, by where the prompt's prefix comes from.

    The engine must be idle otherwise. Its cost estimates are replaced, so that whatever can be loaded is loaded.

    Args:
        llm: an engine with a host tier.
        transports: transports for reading another engine's blocks, if there is one.
    """

    def __init__(self, llm: LLM, transports: Sequence[str] = ()) -> None:
        if not isinstance(llm._engine.scheduler, Scheduler):
            raise BenchmarkError("replicas have no tiers")
        self._llm, self._engine, self._scheduler = llm, llm._engine, llm._engine.scheduler
        if (sources := self._engine.tiers.sources) is None:
            raise BenchmarkError("this engine has no host tier; give it host_kv_memory")
        self._sources = sources
        self._sources.costs = Always()
        self._block_size = llm.config.block_size
        self._links = by_transport(self._engine, transports) if transports else {}
        self._random = random.Random()

    @property
    def most_tokens(self) -> int:
        """The longest prefix that fits: the pool must hold it twice, so that it is loaded in a few pieces, and pending
        writes to the disk may take at most half of the host tier."""
        usable = self._llm.memory_plan.num_usable
        blocks = min((usable - 2) // 2, self._tier.room(0) // 2)
        return min(blocks * self._block_size, self._llm.max_model_len - 2)

    @property
    def _tier(self) -> Tier:
        return self._sources.tier

    def measure(self, tokens: int, sources: Iterable[str], repeat: int, progress: Progress) -> Row:
        """Time a prefix of this many tokens, `repeat` times from each source.

        Raises:
            BenchmarkError: a token differs from that of the computed prompt, or a request failed.
        """
        computed: list[float] = []
        for turn in range(repeat):
            progress(f"{tokens:,} tokens: computed, {turn + 1} of {repeat}")
            prompt = self._prompt(tokens)
            seconds, token, _ = self._request(prompt)
            computed.append(seconds)
        row = Row(tokens, {COMPUTED: statistics.median(computed)})
        for _ in range(1, WORTH):  # used often enough to be written to the disk
            self._request(prompt)
        self.settle()
        for source in sources:
            progress(f"{tokens:,} tokens: from {FROM[source]}")
            with self._only(source):
                if source in self._links:
                    self._timed(source, prompt, token)  # so that the other engine has it
                times = [self._timed(source, prompt, token) for _ in range(repeat)]
            known = [each for each in times if each is not None]
            row.seconds[source] = statistics.median(known) if len(known) == repeat else None
        self.clear(host=True)
        return row

    def _timed(self, source: str, prompt: list[int], expected: int) -> float | None:
        """Seconds to the first token; None if the prefix did not come from this source."""
        if source != POOL:
            self.clear(host=source != HOST)
        if source == DISK and self._engine.tiers.disk is not None:
            drop_cached(self._engine.tiers.disk.folder)
        before = self._llm.stats.cached_tokens
        seconds, token, sources = self._request(prompt, elsewhere=source in self._links)
        if token != expected:
            raise BenchmarkError(
                f"the token after a prefix from {FROM[source]} is {token}, but {expected} when computed"
            )
        expected_sources = {POOL: set(), HOST: {HOST}, DISK: {DISK, HOST}}.get(source, {PEER, HOST})
        came = self._llm.stats.cached_tokens - before >= (len(prompt) - 1) // self._block_size * self._block_size
        return seconds if came and sources == expected_sources else None

    @contextlib.contextmanager
    def _only(self, source: str) -> Iterator[None]:
        """Make this source the only one from which a prefix can come, if no nearer tier has it."""
        if source not in self._links:
            yield
            return
        importer = self._engine.tiers.importer
        if importer is None:
            raise BenchmarkError("this engine has no other one")
        disk, all_of_them = self._sources.disk, importer.readers
        self._sources.disk, importer.readers = None, {source: self._links[source]}
        try:
            yield
        finally:
            self._sources.disk, importer.readers = disk, all_of_them

    def clear(self, host: bool = False) -> None:
        """Evict everything from the pool, saving what is worth it; with `host`, empty the host tier, too."""
        self._scheduler.kv.cache.clear()
        self.settle()
        if host:
            self._tier.reset()

    def settle(self) -> None:
        """Wait until all transfers have ended."""
        while not self._engine.idle or self._sources.writes or self._sources.reads:
            if self._engine.idle:
                self._engine.tiers.exchange(0.01)
            else:
                self._engine.step()

    def _prompt(self, tokens: int) -> list[int]:
        """A prompt that shares nothing with earlier ones, nor with those of earlier runs, which may be on the disk."""
        return self._random.choices(range(self._llm.model.vocab_size), k=tokens + 1)

    def _request(self, prompt: list[int], elsewhere: bool = False) -> tuple[float, int, set[str]]:
        """Seconds to the first token, the token, and the sources of blocks.

        Args:
            elsewhere: let another engine compute it.
        """
        params = greedy(1)
        if elsewhere:
            params = msgspec.structs.replace(params, kv_transfer_params={"do_remote_prefill": True})
        [output] = self._llm.generate([prompt], params)
        choice, metrics = output.outputs[0], output.metrics
        if choice.error or metrics.time_to_first_token is None:
            raise BenchmarkError(f"a prompt of {len(prompt)} tokens failed: {choice.error or choice.finish_reason}")
        return metrics.time_to_first_token, choice.token_ids[0], {each.source for each in metrics.fetches}


def by_transport(engine: Engine, names: Sequence[str]) -> dict[str, Prefiller]:
    """Replace an engine's connection to its prefill engine by one for each transport, and wait until they are ready.

    Raises:
        BenchmarkError: one cannot be made; the message says why.
    """
    importer = engine.tiers.importer
    if importer is None:
        raise BenchmarkError("this engine has no other one that computes prompts; give it prefill_url")
    [first] = importer.prefillers
    links = first._curve, first._identity, first._tier
    first.close()
    made = {name: Prefiller(first.url, *links, _one(first, name), first._mailbox) for name in names}
    importer.readers = made
    wait_ready(engine)
    return made


def wait_ready(engine: Engine) -> None:
    """Wait until an engine is connected to all of its prefill engines.

    Raises:
        BenchmarkError: one cannot be reached; the message says why.
    """
    deadline = time.monotonic() + READY_SECONDS
    for prefiller in engine.tiers.importer.prefillers if engine.tiers.importer else ():
        while not prefiller.ready:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"the other engine at {prefiller.url} cannot be used: {prefiller.state}")
            time.sleep(0.01)


def _one(prefiller: Prefiller, name: str) -> list[Transport]:
    return [each for each in prefiller._transports.values() if each.name == name]


def drop_cached(folder: Path) -> None:
    """Drop a disk tier's files from the page cache, so that they are read from the disk."""
    for file in folder.glob("*.kv"):
        descriptor = os.open(file, os.O_RDWR)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class Budget:
    """Which prefixes there is time for. The time is expected to grow with the length as it did between the last two,
    and at least proportionally.

    Args:
        seconds: in total, from now on.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._begin = seconds, clock, clock()
        self._taken: list[tuple[int, float]] = []

    def expected(self, tokens: int) -> float:
        """Expected seconds for a prefix of this many tokens; 0.0 if nothing is known yet."""
        if not self._taken:
            return 0.0
        last, seconds = self._taken[-1]
        power = 1.0
        if len(self._taken) > 1:
            before, less = self._taken[-2]
            power = min(2.0, max(1.0, math.log(seconds / less) / math.log(last / before)))
        return float(seconds * (tokens / last) ** power)

    def allows(self, tokens: int) -> bool:
        """Whether a prefix is expected to be done in time."""
        return self._clock() - self._begin + self.expected(tokens) <= self._seconds

    def took(self, tokens: int, seconds: float) -> None:
        """Record that a prefix has been measured."""
        self._taken.append((tokens, max(seconds, 1e-6)))


def crossover(rows: Sequence[Row], source: str) -> int | None:
    """The shortest measured prefix from which on loading was always faster than computing; None if there is none."""
    found = None
    for row in reversed(rows):
        loaded, computed = row.seconds[source], row.seconds[COMPUTED]
        if loaded is None or computed is None or loaded >= computed:
            break
        found = row.tokens
    return found


def verdict(rows: Sequence[Row], source: str) -> str:
    """The crossover, as a sentence."""
    first = crossover(rows, source)
    if first is None:
        return f"at none of these lengths is loading from {FROM[source]} faster than computing"
    return f"from {first:,} tokens on, loading from {FROM[source]} is faster than computing"
