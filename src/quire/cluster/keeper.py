"""Keeps a cluster's members running: starts them, checks their health, restarts those that die, and stops them all."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal

from quire import child
from quire.address import Address
from quire.cluster.place import Place, Running
from quire.cluster.spec import Member
from quire.errors import ClusterError
from quire.http_client import HttpClient, HttpError
from quire.server.processes import RestartBudget

LOOK_SECONDS = 0.25
"""How often a member that is not ready is checked."""

ANSWER_SECONDS = 5.0
"""Timeout of a health check."""

TAKEN_SECONDS = 5.0
"""How long a member's port may stay open before the member is started: processes of the last one may be ending."""

KILL_SECONDS = 10.0
"""How long a member may take to exit after its drain timeout, before it is killed."""

UNREACHABLE = OSError, TimeoutError, ValueError
"""Errors of a member that cannot be asked, whose host is no name, or that answers endlessly."""

USAGE = 2
"""Exit code of a member with an invalid option or model (`quire.cli.main`), which a restart would not help."""

State = Literal["waiting", "starting", "ready", "unhealthy", "restarting", "failed", "stopping", "ended"]


@dataclasses.dataclass(slots=True)
class Kept:
    """A member and its state.

    Attributes:
        since: when the state began, on the monotonic clock.
        was_ready: it has been ready, so its options and its model are valid. invalid: they are not.
        restarts: how often it was restarted. why: how it last ended.
    """

    member: Member
    state: State = "waiting"
    since: float = 0.0
    was_ready: bool = False
    invalid: bool = False
    restarts: int = 0
    why: str = ""
    running: Running | None = None


class Keeper:
    """A running cluster.

    Args:
        restart_limit: restarts allowed per member within an hour.
        drain_seconds: how long running requests may take to finish when the cluster stops.
    """

    def __init__(self, members: Sequence[Member], place: Place, *, restart_limit: int, drain_seconds: float) -> None:
        self.kept = [Kept(member, since=time.monotonic()) for member in members]
        self._place, self._limit, self._drain = place, restart_limit, drain_seconds
        self._changed: Callable[[Kept], None] = lambda kept: None
        self._leaving = asyncio.Event()
        self._hurried = asyncio.Event()

    def leave(self) -> None:
        """Stop all members; a second call stops them without waiting for running requests."""
        (self._hurried if self._leaving.is_set() else self._leaving).set()

    async def run(self, changed: Callable[[Kept], None]) -> bool:
        """Run until `leave` (True), or until no client could get an answer any more (False). Nothing is left running.

        Members start in order, since later ones need earlier ones; all servers start at once. One whose options or
        model are not valid ends the cluster: whoever wrote the file is there to correct it.

        Args:
            changed: called with a member whose state has changed.
        """
        self._changed = changed
        tasks: list[asyncio.Task[None]] = []
        try:
            first = [kept for kept in self.kept if kept.member.kind == "redis"]
            for group in (first, [kept for kept in self.kept if kept not in first]):
                tasks += [asyncio.create_task(self._keep(kept)) for kept in group if self._goes_on()]
                while self._goes_on() and any(kept.state in ("waiting", "starting") for kept in group):
                    await asyncio.sleep(LOOK_SECONDS)
            while self._goes_on():
                await asyncio.sleep(LOOK_SECONDS)
            return self._leaving.is_set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_all()
            await self._place.close()

    def _goes_on(self) -> bool:
        """Whether clients can still get an answer, now or after a restart, and none has asked to leave."""
        alive = {kept.member.kind for kept in self.kept if kept.state != "failed"}
        return not self._leaving.is_set() and {"router", "server"} <= alive and not any(k.invalid for k in self.kept)

    def _enter(self, kept: Kept, state: State) -> None:
        if kept.state != state:
            kept.state, kept.since = state, time.monotonic()
            kept.was_ready |= state == "ready"
            self._changed(kept)

    async def _keep(self, kept: Kept) -> None:
        """Run one member, with restarts."""
        budget = RestartBudget(self._limit)
        while True:
            kept.invalid = await self._live(kept) == USAGE and not kept.was_ready
            delay = None if kept.invalid else budget.spend()
            if delay is None:
                self._enter(kept, "failed")
                return
            kept.restarts += 1
            self._enter(kept, "restarting")
            await asyncio.sleep(delay)

    async def _live(self, kept: Kept) -> int | None:
        """Start a member and watch it until it ends. Sets `why`; returns the exit code, None if it did not start."""
        self._enter(kept, "starting")
        if await is_taken(kept.member):
            kept.why = f"another program listens at {kept.member.url}"
            return None
        try:
            kept.running = await self._place.start(kept.member)
        except ClusterError as error:
            kept.why = str(error)
            return None
        while (code := await kept.running.exit_code()) is None:
            if await is_healthy(kept.member):
                self._enter(kept, "ready")
            elif kept.state == "ready":
                self._enter(kept, "unhealthy")
            await asyncio.sleep(LOOK_SECONDS if kept.state != "ready" else 4 * LOOK_SECONDS)
        kept.why = child.fate(code)
        return code

    async def _end_all(self) -> None:
        """Stop the router first, so that no new requests come, and Redis, which the others need, last."""
        for kind in ("router", "server", "redis"):
            await asyncio.gather(*(self._end(kept) for kept in self.kept if kept.member.kind == kind))

    async def _end(self, kept: Kept) -> None:
        running = kept.running
        if running is None or await running.exit_code() is not None:
            self._enter(kept, "failed" if kept.state == "failed" else "ended")
            return
        self._enter(kept, "stopping")
        await running.signal(signal.SIGTERM)
        hurried, until = False, time.monotonic() + self._drain + KILL_SECONDS
        while await running.exit_code() is None:
            if self._hurried.is_set() and not hurried:
                hurried, until = True, min(until, time.monotonic() + KILL_SECONDS)
                await running.signal(signal.SIGTERM)
            if time.monotonic() > until:
                await running.signal(signal.SIGKILL)
            await asyncio.sleep(0.05)
        self._enter(kept, "ended")


async def is_taken(member: Member) -> bool:
    """Whether another program listens where a member should. Its answers would be taken for the member's."""
    until = time.monotonic() + TAKEN_SECONDS
    while time.monotonic() < until:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                _, writer = await asyncio.open_connection(member.host, member.port)
        except UNREACHABLE:
            return False
        writer.close()
        await asyncio.sleep(LOOK_SECONDS)
    return True


async def is_healthy(member: Member) -> bool:
    """Whether a member is healthy: `/health` answers 200, or Redis accepts a connection."""
    try:
        if member.kind != "redis":
            client = HttpClient(Address(member.url), verify=False, kept=0)
            return (await client.fetch("GET", "/health", seconds=ANSWER_SECONDS))[0] == 200
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(member.host, member.port)
            with contextlib.closing(writer):
                writer.write(b"PING\r\n")
                return (await reader.read(64)).startswith((b"+PONG", b"-NOAUTH"))
    except (*UNREACHABLE, HttpError):
        return False
