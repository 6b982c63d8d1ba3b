"""Sends jobs in a closed or an open loop, and collects the records."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator
from typing import Any

from quire.bench.serve.config import LoadConfig
from quire.bench.serve.openai_client import Answer, OpenAIClient, Prepared, hint
from quire.bench.serve.records import Record
from quire.bench.serve.workloads import Job, Turn, make_jobs, make_warmup, token_ids, words
from quire.errors import BenchmarkError

MOST_HOPELESS = 10
"""After this many consecutive failures that are not caused by load, the run ends, since it would only go on failing."""

_HOPELESS_AT_FIRST = {"not_a_stream", "garbage", "no_token_ids"} | {
    f"http_{status}" for status in (400, 401, 403, 404, 405, 422)
}


class Transcript:
    """A conversation so far, with which the next prompt begins."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._ids: list[int] = []
        self.length = 0

    def ask(self, turn: Turn) -> dict[str, Any]:
        """The prompt of a turn: the conversation so far, and what the turn adds."""
        config, self.length = self._config, self.length + turn.length
        if not config.as_text:
            for piece in turn.pieces:
                self._ids += token_ids(config.seed, piece, config.vocab_size)
            return {"prompt": self._ids}
        added = " ".join(words(config.seed, piece) for piece in turn.pieces)
        if config.endpoint == "chat":
            self._messages.append({"role": "user", "content": added})
            return {"messages": self._messages}
        self._text += f" {added}" if self._text else added
        return {"prompt": self._text}

    def add(self, answer: Answer) -> None:
        """Add the answer."""
        self.length += answer.record.output_tokens
        self._ids += answer.token_ids
        self._messages.append({"role": "assistant", "content": answer.text})
        self._text += answer.text


class Driver:
    """One run of a load.

    Attributes:
        records: of the requests that have ended, in that order.
        running: number of requests in flight.
        most_running: most requests in flight at once.
        broken_off: number of requests in flight when the run was stopped.
        warming: whether this is the warm-up.
        began: when the run began, in seconds of `time.perf_counter`.
        stopped: why the run ended early; None if it did not.

    Raises:
        ConfigError: the trace cannot be read, or a line of it is not valid.
    """

    def __init__(self, config: LoadConfig, client: OpenAIClient) -> None:
        self.records: list[Record] = []
        self.running = self.most_running = self.broken_off = 0
        self.warming = False
        self.began = 0.0
        self.stopped: str | None = None
        self._config, self._client = config, client
        self._warmup, self._jobs = make_warmup(config), make_jobs(config)
        self._stop = asyncio.Event()
        self._hopeless = 0
        self._any_success = False

    def stop(self, reason: str) -> None:
        """End the run now. Requests in flight are cancelled and not counted."""
        if self.stopped is None:
            self.stopped = reason
            self._stop.set()

    async def warm_up(self) -> None:
        """Send the warm-up requests.

        Raises:
            BenchmarkError: none of them succeeded.
        """
        at_a_time = min(self._config.warmup, self._config.at_a_time or 8)
        self.warming = True
        await self._run(self._closed(self._warmup, at_a_time))
        self.warming = False
        records, self.records = self.records, []
        self.most_running = self.broken_off = 0
        if self.stopped == "interrupted" or not records:
            return
        if all(record.error for record in records):
            kind, message = records[0].error or "", records[0].message
            raise BenchmarkError(f"the warm-up failed: {kind}: {message}{hint(kind)}")

    async def run(self) -> None:
        """Send all requests, or those that fit into the duration, and wait for their end."""
        jobs, config = self._jobs, self._config
        if config.at_a_time is not None:
            await self._run(self._closed(jobs, config.at_a_time))
        elif config.rate is not None:
            await self._run(self._open(jobs, arrivals(config)))
        else:
            await self._run(self._open(jobs, None))

    async def _run(self, load: Any) -> None:
        self.began = time.perf_counter()
        work = asyncio.ensure_future(load)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = work.done()
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
        if finished:
            work.result()

    @property
    def _over(self) -> bool:
        """Whether the duration is over, so that nothing new is sent."""
        duration = self._config.duration
        return duration is not None and time.perf_counter() - self.began >= duration

    async def _closed(self, jobs: Iterator[Job], at_a_time: int) -> None:
        async def worker() -> None:
            for job in jobs:
                if self._over:
                    return
                transcript = Transcript(self._config)
                await self._converse(job, transcript, self._prepare(job.turns[0], transcript, None))

        async with asyncio.TaskGroup() as group:
            for _ in range(at_a_time):
                group.create_task(worker())

    async def _open(self, jobs: Iterator[Job], dues: Iterator[float] | None) -> None:
        """Start each job at its time (seconds since the run began), regardless of the others."""
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                at = next(dues) if dues is not None else job.at or 0.0
                if self._config.duration is not None and at >= self._config.duration:
                    break
                transcript = Transcript(self._config)
                request = self._prepare(job.turns[0], transcript, self.began + at)  # prepared ahead of time
                await asyncio.sleep(max(0.0, self.began + at - time.perf_counter()))
                group.create_task(self._converse(job, transcript, request))

    def _prepare(self, turn: Turn, transcript: Transcript, due: float | None, number: int = 0) -> Prepared:
        prompt = transcript.ask(turn)
        record = Record(asked_input=transcript.length, asked_output=turn.output, turn=number, due=due)
        return self._client.prepare(prompt, record)

    async def _converse(self, job: Job, transcript: Transcript, request: Prepared) -> None:
        """Send the turns of one conversation, beginning with `request`; it ends at the first failure."""
        for number, turn in enumerate(job.turns):
            if number:
                await asyncio.sleep(turn.think)
                if self._over:
                    return
                request = self._prepare(turn, transcript, None, number)
            answer = await self._send(request)
            last = number + 1 == len(job.turns)
            if not (last or self._config.as_text or answer.token_ids or answer.record.error):
                answer.record.error = "no_token_ids"
                answer.record.message = "the server sends no token ids for the next turn; use --prompt-type text"
            self._note(answer.record)
            if answer.record.error or last:
                return
            transcript.add(answer)

    async def _send(self, request: Prepared) -> Answer:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._client.send(request)
        except asyncio.CancelledError:
            self.broken_off += 1
            raise
        finally:
            self.running -= 1

    def _note(self, record: Record) -> None:
        self.records.append(record)
        self._any_success |= record.error is None
        hopeless = record.error == "connect" or (record.error in _HOPELESS_AT_FIRST and not self._any_success)
        self._hopeless = self._hopeless + 1 if hopeless else 0
        if self._hopeless >= MOST_HOPELESS:
            self.stop(f"{MOST_HOPELESS} failures in a row: {record.error}: {record.message}")


def arrivals(config: LoadConfig) -> Iterator[float]:
    """The start times of an open loop's jobs, in seconds, with gamma-distributed gaps of mean 1 / rate.

    With burstiness 1 this is a Poisson process; the parameter is that of vLLM's benchmark.
    """
    rate, shape = config.requests_per_second, config.burstiness or 1.0
    if math.isinf(rate):
        return itertools.repeat(0.0)
    rng = random.Random(f"{config.seed}:arrivals")
    gaps = (rng.gammavariate(shape, 1.0 / (rate * shape)) for _ in itertools.count())
    return itertools.accumulate(gaps)
