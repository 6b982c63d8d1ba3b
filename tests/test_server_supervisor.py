"""The supervisor: what it starts, what it starts again, how it leaves, and what is left of it: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from quire import child
from quire.config import EngineConfig
from quire.errors import ConfigError, ServerError
from quire.ipc.board import PATIENCE, PULSE, Board
from quire.kv.disk import open_folder
from quire.server import replica as replica_module
from quire.server import supervisor as supervisor_module
from quire.server.config import HttpStart, ServerConfig
from quire.server.processes import (
    LOCK_NAME,
    MAX_SOCKET_PATH,
    Child,
    RestartBudget,
    RuntimeFolder,
    is_loopback,
    listen,
    remove_stale,
    url_of,
)
from quire.server.supervisor import Supervisor
from tests.server_stand_ins import QuietScreen, stand_in_options
from tests.warm import START_EXECUTED, start_process

DEADLINE = 60.0
STAND_IN = [sys.executable, "-m", "tests.server_stand_ins"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins are forks of this process: to import what they need takes as long as all that a test does."""
    monkeypatch.setattr(subprocess, "_fork_exec", start_process)


@pytest.fixture
def folder(forked: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers put their private folders, empty; its name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@dataclass
class Running:
    """A supervisor of stand-ins at work in this process."""

    supervisor: Supervisor
    task: asyncio.Task[int]
    screen: QuietScreen
    listener: socket.socket
    folder: Path

    def heard(self, worker: int | None = None) -> list[dict[str, Any]]:
        """What HTTP stand-ins have written down."""
        return [line["what"] for line in lines_of(self.folder) if worker is None or line["worker"] == worker]

    def states(self, worker: int | None = None) -> list[dict[str, Any]]:
        return [what for what in self.heard(worker) if what.get("type") == "state"]

    def drains(self) -> list[float]:
        return [what["seconds"] for what in self.heard() if what.get("type") == "drain"]

    def pids(self) -> list[int]:
        return [child.pid for child in [*self.supervisor._workers.values(), *self.engines()]]

    def engines(self) -> list[Child]:
        return [replica.child for replica in self.supervisor.replicas if replica.child]

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of `condition`; an early end of the server is an error."""
        end = time.monotonic() + DEADLINE
        while not (found := condition()):
            if self.task.done():
                self.task.result()
                raise AssertionError(f"the server ended before {what}")
            assert time.monotonic() < end, what
            await asyncio.sleep(0.01)
        return found

    async def until_ready(self, boot: int = 1, worker: int | None = None, replica: int = 0) -> None:
        wanted = ("ready", boot, replica)

        def ready() -> bool:
            return any((state["state"], state["boot"], state["replica"]) == wanted for state in self.states(worker))

        await self.until(ready, f"engine {boot} is ready")

    async def code(self) -> int:
        return await asyncio.wait_for(self.task, DEADLINE)


@contextlib.asynccontextmanager
async def running(
    folder: Path, fault: str | None = None, manners: str = "", replicas: int = 1, **server: Any
) -> AsyncIterator[Running]:
    options, screen = stand_in_options(folder / "log", manners, fault, replicas, **server), QuietScreen()
    with listen("127.0.0.1", 0) as listener:
        supervisor = Supervisor(options, listener, screen, time.monotonic())
        task = asyncio.create_task(supervisor.run())
        try:
            yield Running(supervisor, task, screen, listener, folder)
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What is in the log; without a last line that is still being written."""
    log = folder / "log"
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def private_folders(folder: Path) -> list[Path]:
    return list(folder.glob("quire-*"))


# -- starting -------------------------------------------------------------------------------------------------


async def test_http_processes_and_engine_start_and_the_screen_is_told(folder: Path) -> None:
    async with running(folder, api_workers=2, api_key=("secret",)) as server:
        await server.until_ready(worker=0)
        await server.until_ready(worker=1)
        await server.until(lambda: server.screen.info, "the start screen")
        starts = [what["start"] for what in server.heard() if "start" in what]
        assert sorted(start["worker"] for start in starts) == [0, 1]
        assert starts[0]["model_names"] == ["demo"]
        assert starts[0]["server"]["api_key"] == ["secret"]
        assert starts[0]["origins"] == {"port": "flag"}
        assert server.screen.is_closed


async def test_the_inherited_port_is_served(folder: Path) -> None:
    async with running(folder) as server:
        await server.until_ready()
        reader, writer = await asyncio.open_connection(*server.listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.read(100)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_no_key_is_on_a_command_line_or_in_an_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_fork_exec", START_EXECUTED)  # what it shows is its own
    async with running(folder, api_key=("top-secret-key",)) as server:
        await server.until_ready()
        for pid in server.pids():
            assert b"top-secret-key" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert b"top-secret-key" not in Path(f"/proc/{pid}/environ").read_bytes()


async def test_the_private_folder_is_private_and_the_children_are_told_where_it_is(folder: Path) -> None:
    async with running(folder) as server:
        await server.until_ready()
        [private] = private_folders(folder)
        assert private.stat().st_mode & 0o777 == 0o700
        [start] = [what for what in server.heard() if "start" in what]
        assert start["start"]["directory"] == str(private)


async def test_loading_is_shown_with_phase_and_percentage(folder: Path) -> None:
    async with running(folder, fault="load") as server:
        await server.until(lambda: ("reading weights", 40) in server.screen.phases, "the phase is shown")
        await server.until(lambda: [s for s in server.states() if s["path"]], "the checkpoint's path is passed on")
        assert {state["state"] for state in server.states()} == {"loading"}
        assert server.screen.phases[0] == ("listening", 0)


@pytest.mark.parametrize(("kind", "error"), [("fail", ServerError), ("invalid", ConfigError)])
async def test_an_engine_that_cannot_start_ends_the_server_with_its_message_and_as_an_invalid_option_if_it_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(replica_module, "LAST_WORDS_SECONDS", DEADLINE)
    async with running(folder, fault=f"{kind}:the pool is too small; raise kv_cache_memory") as server:
        with pytest.raises(error, match=r"^the pool is too small; raise kv_cache_memory$"):
            await server.code()
        assert server.screen.is_closed
    assert not private_folders(folder)


async def test_an_engine_that_dies_while_it_loads_ends_the_server_and_says_how(folder: Path) -> None:
    async with running(folder, fault="exit:7") as server:
        with pytest.raises(ServerError, match=r"the engine ended while it was loading .*exit code 7"):
            await server.code()


async def test_an_http_process_that_cannot_start_ends_the_server(folder: Path) -> None:
    async with running(folder, manners="exit") as server:
        with pytest.raises(ServerError, match=r"the HTTP process 0 cannot start \(exit code 3\)"):
            await server.code()
    assert not private_folders(folder)


async def test_a_command_that_does_not_exist_is_an_error_that_names_the_process(folder: Path) -> None:
    options = stand_in_options(folder / "log")
    options = supervisor_module.ServeOptions(
        server=options.server, engine=options.engine, engine_command=["/no/such/python"], http_command=["/no/such"]
    )
    with listen("127.0.0.1", 0) as listener, pytest.raises(ServerError, match="cannot start the engine 1: No such"):
        await Supervisor(options, listener, QuietScreen(), 0.0).run()


# -- starting again -------------------------------------------------------------------------------------------


async def test_a_killed_engine_is_started_again_and_its_suspects_are_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(folder) as server:
        await server.until_ready()
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        await server.until_ready(boot=2)
        restarting = [state for state in server.states() if state["state"] == "restarting"]
        assert restarting[0]["boot"] == 2
        assert restarting[0]["suspects"] == [7, 8]
        assert restarting[0]["culprit"] is None
        assert restarting[0]["cause"] == "killed by SIGKILL"
        assert all(state["suspects"] == [] for state in restarting[1:])
        assert "engine 1 died (killed by SIGKILL" in caplog.text
        assert "requests in its step: 2; it is started again" in caplog.text


async def test_the_request_on_probation_in_the_fatal_step_is_named_as_the_culprit(folder: Path) -> None:
    async with running(folder) as server:
        await server.until_ready()
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        await server.until_ready(boot=2)
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        await server.until_ready(boot=3)
        assert [s["culprit"] for s in server.states() if s["state"] == "restarting" and s["suspects"]] == [None, 8]


async def test_beyond_the_restart_limit_clients_are_told_and_the_server_ends_with_an_error(folder: Path) -> None:
    async with running(folder, restart_limit=1) as server:
        await server.until_ready()
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        await server.until_ready(boot=2)
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"the engine died \(killed by SIGKILL\).*restart_limit=1"):
            await server.code()
        assert server.states()[-1]["state"] == "failed"
        assert server.heard()[-1]["type"] == "drain"
    assert not private_folders(folder)


async def test_an_engine_that_cannot_start_again_is_tried_until_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "LAST_WORDS_SECONDS", DEADLINE)
    async with running(folder, fault="again:/private/path is gone", restart_limit=2) as server:
        await server.until_ready()
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="/private/path is gone"):  # the operator is told
            await server.code()
        causes = [state["cause"] for state in server.states() if state["cause"]]
        assert causes[-1] == "it could not be started again"  # clients are not told of paths
        assert not any("/private" in cause for cause in causes)


async def test_a_killed_http_process_gets_a_successor_with_a_new_number(folder: Path) -> None:
    async with running(folder) as server:
        await server.until_ready(worker=0)
        os.kill(server.supervisor._workers[0].pid, signal.SIGKILL)
        await server.until_ready(worker=1)
        [private] = private_folders(folder)
        await server.until((private / "gone-0").exists, "the engine is told that the first one is gone")


async def test_a_disk_that_is_full_by_now_stops_no_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(folder) as server:
        await server.until_ready(worker=0)
        monkeypatch.setattr(Board, "create", full)
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        await server.until_ready(boot=2)
        os.kill(server.supervisor._workers[0].pid, signal.SIGKILL)
        await server.until_ready(boot=2, worker=1)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
async def test_a_system_without_room_for_a_process_is_asked_again(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.server.processes.FIRST_BACKOFF", 0.01)
    spawn, refused = child.spawn, 0

    async def unable(*given: Any, **options: Any) -> Any:
        nonlocal refused
        if (refused := refused + 1) % 3:
            raise OSError(number, os.strerror(number))
        return await spawn(*given, **options)

    async with running(folder) as server:
        await server.until_ready(worker=0)
        monkeypatch.setattr(child, "spawn", unable)
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        await server.until_ready(boot=2)
        os.kill(server.supervisor._workers[0].pid, signal.SIGKILL)
        await server.until_ready(boot=2, worker=1)
    assert f"cannot start the engine 2: {os.strerror(number)}; trying again in 0.01 s" in caplog.text
    assert refused == 6 and "cannot start the HTTP process 1" in caplog.text


async def test_a_server_that_leaves_waits_for_no_room_for_a_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unable(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async with running(folder) as server:
        await server.until_ready(worker=0)
        monkeypatch.setattr(child, "spawn", unable)
        os.kill(server.supervisor._workers[0].pid, signal.SIGKILL)
        await server.until(lambda: "trying again" in caplog.text, "the HTTP process cannot be started")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.code() == 0


async def test_a_disk_that_is_full_at_the_start_is_an_error_that_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Board, "create", full)
    async with running(folder) as server:
        with pytest.raises(ServerError, match=r"cannot make .*engine-0-1\.board: No space left on device; .*TMPDIR"):
            await server.code()
    assert not private_folders(folder)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_http_processes_that_keep_dying_end_the_server(folder: Path) -> None:
    async with running(folder, restart_limit=0) as server:
        await server.until_ready()
        os.kill(server.supervisor._workers[0].pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"the HTTP process 0 died \(killed by SIGKILL\)"):
            await server.code()


class Looks:
    """In the place of the supervisor's asyncio: its watch, which looks once a second, looks whenever the test wants."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


async def test_only_a_pulse_that_stands_still_for_longer_than_it_may_is_the_end_of_a_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look of the watch is one of these: the pulse, and the patience that the process asks for."""
    board, process = Board.create(folder / "board"), Victim()
    looks = [(1, 3), *[(1, 3)] * 12, (2, 0), *[(2, 0)] * 9, (3, 0), *[(3, 0)] * 100]
    killed_at = 0

    async def look(seconds: float) -> None:
        nonlocal killed_at
        killed_at += 1
        board.fields[PULSE], board.fields[PATIENCE] = looks[killed_at - 1]

    monkeypatch.setattr(supervisor_module, "asyncio", Looks(look))
    options = stand_in_options(folder / "log", stall_restart_s=10.0)
    with listen("127.0.0.1", 0) as listener:
        await Supervisor(options, listener, QuietScreen(), 0.0).watch(cast(Any, process), board)
    assert process.blame == "it showed no sign of life for 10 s and was killed"
    assert killed_at == 13 + 10 + 11  # looks with each pulse


class Victim:
    """In the place of a child."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.blame: str | None = None

    def kill(self, blame: str) -> None:
        self.blame = blame
        self.ended.set()


async def test_nobody_is_watched_where_that_was_asked_for(folder: Path) -> None:
    options = stand_in_options(folder / "log", stall_restart_s=0.0)
    with listen("127.0.0.1", 0) as listener:
        supervisor = Supervisor(options, listener, QuietScreen(), 0.0)
        await supervisor.watch(cast(Any, Victim()), Board.create(folder / "board"))  # returns at once


async def test_what_no_process_of_ours_would_send_is_ignored(folder: Path) -> None:
    import zmq

    from quire.ipc import wire

    async with running(folder) as server:
        await server.until_ready()
        [private] = private_folders(folder)
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, b"stranger")
        stranger.connect(wire.control_address(private))
        stranger.send(b"\xc1 no message")
        stranger.send_multipart([b"a", b"b"])
        stranger.send(wire.encode(wire.Hello(0, 1)))  # under a false name
        stranger.send(wire.encode(wire.EngineFailed("a lie")))
        os.kill(server.supervisor._workers[0].pid, signal.SIGKILL)
        await server.until_ready(worker=1)  # it still listens
        stranger.close(linger=0)


# -- replicas -------------------------------------------------------------------------------------------------


def start_of(server: Running, name: str) -> dict[str, Any]:
    [private] = private_folders(server.folder)
    found: dict[str, Any] = json.loads((private / f"{name}.start").read_text())
    return found


async def test_the_first_replica_says_what_the_others_are_to_be_like(folder: Path) -> None:
    async with running(folder, replicas=3) as server:
        for replica in range(3):
            await server.until_ready(replica=replica)
        first, second, third = (start_of(server, f"engine-{replica}-1") for replica in range(3))
        assert (first["neighbours"], second["neighbours"], third["neighbours"]) == (2, 0, 0)
        assert first["sharers"] == 3 and first["config"]["data_parallel_size"] == 1
        assert first["config"]["max_model_len"] is None and first["config"]["model"] == "demo"
        assert second["config"]["max_model_len"] == 256 and second["config"]["num_kv_blocks"] == 64
        assert second["config"]["model"] == "/models/stand-in"
        assert [start["config"]["disk_kv_path"] for start in (first, second)] == ["kv/replica-0", "kv/replica-1"]
        states = server.states()
        ready = next(index for index, state in enumerate(states) if state["state"] == "ready")
        assert all(state["boot"] == 0 for state in states[:ready] if state["replica"])  # the others had not begun


async def test_a_replica_that_dies_is_started_again_and_the_others_are_left_alone(folder: Path) -> None:
    async with running(folder, replicas=2) as server:
        await server.until_ready(replica=1)
        first, second = server.engines()
        os.kill(second.pid, signal.SIGKILL)
        await server.until_ready(boot=2, replica=1)
        [died] = [state for state in server.states() if state["suspects"]]
        assert (died["replica"], died["state"], died["killed"]) == (1, "restarting", True)
        assert server.engines()[0] is first and first.exit_code is None
        assert {state["boot"] for state in server.states() if not state["replica"]} == {1}


@pytest.mark.parametrize("number, killed", [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
async def test_who_ended_an_engine_is_told(folder: Path, number: signal.Signals, killed: bool) -> None:
    async with running(folder) as server:
        await server.until_ready()
        os.kill(server.engines()[0].pid, number)
        await server.until_ready(boot=2)
        assert [state["killed"] for state in server.states() if state["suspects"]] == [killed]


async def test_the_server_goes_on_without_a_replica_that_died_too_often_and_ends_without_any(folder: Path) -> None:
    async with running(folder, replicas=2, restart_limit=0) as server:
        await server.until_ready(replica=1)
        first, second = server.engines()
        os.kill(second.pid, signal.SIGKILL)
        await server.until(lambda: [s for s in server.states() if s["state"] == "failed"], "the replica is given up")
        assert not server.task.done() and first.exit_code is None and not server.drains()
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"the engine died .* is not started again: restart_limit=0"):
            await server.code()
    assert not private_folders(folder)


async def test_a_replica_that_cannot_start_ends_the_server_with_its_message(folder: Path) -> None:
    async with running(folder, fault="second:fail:there is no room", replicas=2) as server:
        with pytest.raises(ServerError, match=r"^there is no room$"):
            await server.code()
    assert not private_folders(folder)


async def test_all_replicas_leave_at_a_signal(folder: Path) -> None:
    async with running(folder, replicas=3) as server:
        for replica in range(3):
            await server.until_ready(replica=replica)
        pids = server.pids()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.code() == 0
        assert [engine.exit_code for engine in server.engines()] == [0, 0, 0]
    assert not any(is_alive(pid) for pid in pids)


def test_a_replica_sees_its_own_gpu_of_those_that_the_server_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    several, one = EngineConfig(model="demo", data_parallel_size=2), EngineConfig(model="demo")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert replica_module.device_of(1, several) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert replica_module.device_of(0, one) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert replica_module.device_of(1, several) == {"CUDA_VISIBLE_DEVICES": "GPU-7"}
    assert replica_module.device_of(1, dataclasses.replace(several, device="cpu")) == {}


# -- leaving --------------------------------------------------------------------------------------------------


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that is not ignored, as SIGHUP is under nohup, for the tests and then for the server too."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


async def test_a_signal_drains_and_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    async with running(folder, api_workers=2, drain_timeout=12.5) as server:
        await server.until_ready(worker=0)
        await server.until_ready(worker=1)
        pids = server.pids()
        os.kill(os.getpid(), number)
        assert await server.code() == 0
        assert [what["seconds"] for what in server.heard() if what.get("type") == "drain"] == [12.5, 12.5]
    assert not any(is_alive(pid) for pid in pids)
    assert not private_folders(folder)


async def test_a_draining_server_takes_no_connections(folder: Path) -> None:
    async with running(folder, manners="stay") as server:
        await server.until_ready()
        address = server.listener.getsockname()
        os.kill(os.getpid(), signal.SIGTERM)
        await server.until(lambda: server.heard()[-1].get("type") == "drain", "the drain")
        assert server.listener.fileno() == -1
        os.kill(server.pids()[0], signal.SIGKILL)  # the stand-in would keep its own copy
        await server.code()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)


async def test_an_http_process_that_does_not_leave_in_time_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "DRAIN_GRACE", 0.2)
    async with running(folder, manners="stay", drain_timeout=0.1) as server:
        await server.until_ready()
        pids = server.pids()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.code() == 0
    assert not any(is_alive(pid) for pid in pids)


async def test_an_engine_that_does_not_leave_in_time_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "STOP_SECONDS", 0.2)
    async with running(folder, fault="deaf") as server:
        await server.until_ready()
        pids = server.pids()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.code() == 0
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.quick("15-2", "2-15")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_drain(folder: Path, first: signal.Signals, second: signal.Signals) -> None:
    async with running(folder, api_workers=2, manners="last words", drain_timeout=10 * DEADLINE) as server:
        await server.until_ready(worker=0)
        await server.until_ready(worker=1)
        pids = server.pids()
        os.kill(os.getpid(), first)
        await server.until(lambda: len(server.drains()) == 2, "the drain")
        os.kill(os.getpid(), second)
        assert await server.code() == 128 + second
        assert server.drains() == [10 * DEADLINE] * 2 + [0.0] * 2
    assert not any(is_alive(pid) for pid in pids)
    assert not private_folders(folder)


async def test_a_third_signal_ends_the_server_at_once(folder: Path) -> None:
    async with running(folder, manners="stay", drain_timeout=10 * DEADLINE) as server:
        await server.until_ready()
        pids = server.pids()
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            await server.until(lambda count=count: len(server.drains()) == count, "the drain")
        os.kill(os.getpid(), signal.SIGINT)
        assert await server.code() == 130
    assert not any(is_alive(pid) for pid in pids)
    assert not private_folders(folder)


async def test_a_hangup_behind_a_sigterm_does_not_shorten_the_drain(folder: Path) -> None:
    async with running(folder, manners="stay") as server:
        await server.until_ready()
        os.kill(os.getpid(), signal.SIGTERM)
        await server.until(server.drains, "the drain")
        server.supervisor._on_signal(signal.SIGHUP)
        os.kill(server.supervisor._workers[0].pid, signal.SIGKILL)  # the stand-in would stay
        assert await server.code() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_loading_ends_the_server_at_once(folder: Path, number: signal.Signals) -> None:
    async with running(folder, fault="load") as server:
        await server.until(lambda: server.states(), "the HTTP process is up")
        pids = server.pids()
        os.kill(os.getpid(), number)
        assert await server.code() == 0
    assert not any(is_alive(pid) for pid in pids)
    assert not private_folders(folder)


async def test_an_http_process_that_comes_up_during_a_drain_is_told_to_leave(folder: Path) -> None:
    async with running(folder, manners="stay", api_workers=1) as server:
        await server.until_ready()
        os.kill(os.getpid(), signal.SIGTERM)
        await server.until(lambda: server.heard()[-1].get("type") == "drain", "the drain")
        server.supervisor._greet(0)  # as a hello would
        await server.until(lambda: len([w for w in server.heard() if w.get("type") == "drain"]) == 2, "another drain")
        first, second = [what["seconds"] for what in server.heard() if what.get("type") == "drain"]
        assert 0 < second <= first


async def test_an_engine_that_dies_during_a_drain_is_started_again_for_those_who_still_run(folder: Path) -> None:
    async with running(folder, manners="stay") as server:
        await server.until_ready()
        os.kill(os.getpid(), signal.SIGTERM)
        await server.until(lambda: server.heard()[-1].get("type") == "drain", "the drain")
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        await server.until_ready(boot=2)


def supervise(folder: Path) -> subprocess.Popen[bytes]:
    command = [*STAND_IN, "supervise", str(folder / "log"), ""]
    return subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)})


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.01)
    return found


def is_ready(folder: Path) -> bool:
    return any(line["what"].get("state") == "ready" for line in lines_of(folder))


def test_the_children_of_a_killed_supervisor_die_and_the_next_server_cleans_up(folder: Path) -> None:
    first = supervise(folder)
    wait_for(lambda: is_ready(folder), "the first server")
    children = [int(pid) for pid in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
    assert len(children) == 2
    first.kill()
    first.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in children), "the children die")
    [stale] = private_folders(folder)
    (folder / "log").unlink()
    second = supervise(folder)
    try:
        wait_for(lambda: is_ready(folder), "the second server")
        assert not stale.exists()
        assert len(private_folders(folder)) == 1
    finally:
        second.send_signal(signal.SIGTERM)
        assert second.wait(DEADLINE) == 0
    assert not private_folders(folder)


def test_a_child_whose_parent_died_before_it_was_up_ends_at_once(folder: Path) -> None:
    told = b"%d\n" % (os.getpid() + 1)  # any process but its parent
    start = HttpStart(directory=str(folder), worker=0, fd=0, server=ServerConfig(), model_names=("demo",))
    command = [*STAND_IN, "http", str(folder / "log"), ""]
    late = subprocess.Popen(command, stdin=subprocess.PIPE)
    late.communicate(told + msgspec.json.encode(start), timeout=DEADLINE)
    assert late.returncode == 1
    assert not (folder / "log").exists()


async def test_a_start_message_larger_than_a_pipe_arrives_whole(folder: Path) -> None:
    keys = tuple(f"{number:0500}" for number in range(1000))
    async with running(folder, api_key=keys) as server:
        await server.until_ready()
        [start] = [what for what in server.heard() if "start" in what]
        assert tuple(start["start"]["server"]["api_key"]) == keys


def test_two_servers_live_side_by_side(folder: Path) -> None:
    servers = [supervise(folder), supervise(folder)]
    try:
        wait_for(lambda: len(private_folders(folder)) == 2, "both have a folder")
        wait_for(lambda: len([1 for line in lines_of(folder) if line["what"].get("state") == "ready"]) == 2, "ready")
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        assert [server.wait(DEADLINE) for server in servers] == [0, 0]
    assert not private_folders(folder)


# -- the listening socket -------------------------------------------------------------------------------------


def test_an_occupied_port_is_refused_with_what_to_do() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port}: another program listens there.*choose another --port"):
            listen("127.0.0.1", port)


def test_an_unknown_host_and_a_foreign_address_are_refused() -> None:
    with pytest.raises(ServerError, match=r"'no-such-host\.invalid'"):
        listen("no-such-host.invalid", 0)
    with pytest.raises(ServerError, match="this machine does not have that address"):
        listen("192.0.2.1", 0)
    with pytest.raises(ServerError, match="cannot listen on host"):
        listen("a" * 300, 0)


@pytest.mark.parametrize(
    "host, shown, loopback",
    [
        ("127.0.0.1", "http://127.0.0.1:{}", True),
        ("localhost", "http://127.0.0.1:{}", True),
        ("0.0.0.0", "http://127.0.0.1:{}", False),
        ("::1", "http://[::1]:{}", True),
        ("::", "http://[::1]:{}", False),
    ],
)
def test_the_url_is_one_that_works_on_this_machine(host: str, shown: str, loopback: bool) -> None:
    try:
        listener = listen(host, 0)
    except ServerError:
        if ":" in host:
            pytest.skip("this machine has no IPv6")
        raise
    with listener:
        port = listener.getsockname()[1]
        assert url_of(listener, ServerConfig()) == shown.format(port)
        assert is_loopback(listener) is loopback
        address = ("::1" if ":" in host else "127.0.0.1", port)
        socket.create_connection(address, timeout=5).close()


# -- the private folder ---------------------------------------------------------------------------------------


def test_a_folder_is_gone_after_use_and_its_sockets_names_fit(folder: Path) -> None:
    with RuntimeFolder() as path:
        assert path.parent == folder
        assert len(str(path / "engine-255-1000000.sock")) <= MAX_SOCKET_PATH
        assert (path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    assert not path.exists()


def test_cleaners_of_old_files_pass_over_a_folder_in_use(folder: Path) -> None:
    """As systemd-tmpfiles does: it locks a folder before it removes what is in it."""
    with RuntimeFolder() as path:
        cleaner = os.open(path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)


def test_a_base_whose_name_is_too_long_for_sockets_is_passed_over(folder: Path) -> None:
    long = folder / ("x" * 100)
    long.mkdir()
    with RuntimeFolder([long, folder]) as path:
        assert path.parent == folder
    with pytest.raises(ServerError, match=r"short enough name.*TMPDIR"), RuntimeFolder([long]):
        pass


def test_a_base_that_cannot_be_written_to_is_an_error_that_says_so(folder: Path) -> None:
    with pytest.raises(ServerError, match=r"No such file or directory.*TMPDIR"), RuntimeFolder([folder / "none"]):
        pass


def test_a_base_on_a_full_disk_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder / "other"
    other.mkdir()
    write, calls = os.write, []

    def write_once_full(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1:
            full()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_once_full)
    with RuntimeFolder([folder, other]) as path:
        assert path.parent == other and len(calls) == 2
    assert not private_folders(folder)


def test_only_unlocked_folders_of_ours_are_removed(folder: Path) -> None:
    for name in ("quire-stale", "quire-foreign", "other-stale"):
        (folder / name).mkdir()
    (folder / "quire-stale" / LOCK_NAME).touch()
    (folder / "quire-stale" / "metrics").mkdir()
    (folder / "other-stale" / LOCK_NAME).touch()
    (folder / "quire-file").touch()
    (folder / "quire-link").symlink_to(folder / "other-stale")
    with RuntimeFolder([folder]) as live:
        remove_stale(folder)
        assert live.exists()
    left = {path.name for path in folder.iterdir()}
    assert left == {"quire-foreign", "other-stale", "quire-file", "quire-link"}
    assert (folder / "other-stale" / LOCK_NAME).exists()


def test_a_folder_of_cached_kv_is_nobodys_to_remove(folder: Path) -> None:
    kept = folder / "quire-kv"
    for _ in range(2):
        _, key, lock = open_folder(str(kept))
        os.close(lock)  # its engine has ended
        with RuntimeFolder([folder]):
            assert (kept / "key").read_bytes() == key


# -- restarts -------------------------------------------------------------------------------------------------


def test_restarts_come_later_and_later_and_are_forgiven_after_an_hour() -> None:
    now = 0.0
    budget = RestartBudget(6, clock=lambda: now)
    assert [budget.spend() for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 15.0, None]
    now = 3600.0
    assert budget.spend() == 0.0
    assert RestartBudget(0).spend() is None
