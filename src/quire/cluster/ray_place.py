"""Members on the machines of a Ray cluster. Ray finds room, starts our processes and reports when they end; requests
and KV pass between the members as without Ray. Imported only when used, and `ray` with it (extra `ray`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire import child
from quire.cluster.member import Start
from quire.cluster.place import Here, Running, bound, command_of, log_of, write_files
from quire.cluster.spec import Member, Need
from quire.errors import ClusterError, ConfigError

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(f"place: ray needs Ray: {error}; pip install '.[ray]'") from error

ROOM_SECONDS = 60.0
"""How long Ray may take to find room for all servers."""


class _Starter:
    """A Ray actor on a member's machine; its members die with it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None

    def address(self) -> str:
        """The address of its machine."""
        return str(ray.util.get_node_ip_address())

    def start(self, told: bytes) -> int:
        """Start a member, given as JSON; returns the process id."""
        member = msgspec.json.decode(told, type=Member)
        write_files(member, self._folder)
        self._log = log_of(member, self._folder)
        start = Start(command_of(member, str(self._folder)), str(self._log))
        self._process = child.spawn_quietly(child.python("quire.cluster.member"), start)
        return self._process.pid

    def exit_code(self) -> int | None:
        if self._log is not None:
            bound(self._log)
        return self._process.poll() if self._process else None

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class _Remote:
    def __init__(self, actor: Any, where: str) -> None:
        self._actor, self._where = actor, where

    async def exit_code(self) -> int | None:
        """If the machine is gone, so are its members."""
        try:
            code: int | None = await self._actor.exit_code.remote()
            return code
        except ray.exceptions.RayError:
            return -signal.SIGKILL

    async def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            await self._actor.signal.remote(int(number))

    def describe(self) -> str:
        return self._where


class RayPlace:
    """The machines of a Ray cluster, which Ray finds (`ray start`, RAY_ADDRESS). Router and Redis run on this machine.

    Args:
        folder: the cluster's, at the same path on all machines.
        host: address at which members on this machine listen.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._here = folder, Here(folder, host)
        self._needs: dict[str, Need] = {}
        self._bundles: dict[str, int] = {}
        self._actors: dict[str, Any] = {}
        self._group: Any = None
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)

    def hosts(self, needs: Sequence[Need]) -> dict[str, str]:
        """Reserve room for each server; returns their machines' addresses. Raises ClusterError."""
        bundles = [{"CPU": need.cpus} | ({"GPU": need.gpus} if need.gpus else {}) for need in needs]
        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(ROOM_SECONDS):
            remove_placement_group(self._group)
            raise ClusterError(
                f"Ray found no room for {len(needs)} servers within {ROOM_SECONDS:g} seconds; it has "
                f"{ray.cluster_resources()} in all, of which {ray.available_resources()} are free"
            )
        self._needs = {need.name: need for need in needs}
        self._bundles = {need.name: index for index, need in enumerate(needs)}
        try:
            return {need.name: ray.get(self._actor(need.name).address.remote()) for need in needs}
        except ray.exceptions.RayError as error:
            raise ClusterError(f"Ray could not start a process on one of its machines: {error}") from error

    def _actor(self, name: str) -> Any:
        """The Ray actor that starts this member; a new one if the last one has died."""
        need, where = self._needs[name], PlacementGroupSchedulingStrategy(self._group, self._bundles[name])
        remote = ray.remote(num_cpus=need.cpus, num_gpus=need.gpus, scheduling_strategy=where)(_Starter)
        self._actors[name] = remote.remote(str(self._folder))
        return self._actors[name]

    async def start(self, member: Member) -> Running:
        """Start a server where its room is, and other members here. Raises ClusterError."""
        if member.kind != "server":
            return await self._here.start(member)
        told = msgspec.json.encode(member)
        try:
            try:
                pid = await self._actors[member.name].start.remote(told)
            except ray.exceptions.RayActorError:
                pid = await self._actor(member.name).start.remote(told)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"{member.name} cannot be started by Ray: {error}") from error
        return _Remote(self._actors[member.name], f"{member.host} pid {pid}")

    async def close(self) -> None:
        """Give back the room, and leave Ray."""
        for actor in self._actors.values():
            ray.kill(actor)
        remove_placement_group(self._group)
        await asyncio.to_thread(ray.shutdown)
