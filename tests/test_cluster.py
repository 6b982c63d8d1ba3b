"""`quire up`: what a cluster file means, what is refused, and that members are kept: on this machine, as processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from quire import child
from quire.cli import up
from quire.cluster import place
from quire.cluster.folder import ClusterFolder, end, folder_of
from quire.cluster.keeper import Keeper, Kept, is_healthy, is_taken
from quire.cluster.place import Here
from quire.cluster.screen import make_screen
from quire.cluster.spec import Member, members, read_cluster
from quire.errors import ClusterError, ConfigError
from quire.server.app import create_app
from tests.certificates import make_certificate, needs_openssl
from tests.http_tools import free_port
from tests.server_fakes import AppThread, app_context

ROOT = Path(__file__).parent.parent
HOSTS = dict.fromkeys(("prefill-0", "decode-0", "decode-1", "server-0"), "127.0.0.1")
SMALL = "model: demo\nservers:\n  - port: 8010\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def options_of(member: Member) -> dict[str, Any]:
    """What the configuration file of a member says."""
    options = yaml.safe_load(member.files[f"{member.name}.yaml"])
    assert isinstance(options, dict)
    return options


@needs_openssl
def test_a_router_with_a_certificate_is_asked_for_its_health_by_https(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL + "router: {port: 8000, ssl_certfile: cert.pem}\n")
    [router] = [one for one in members(read_cluster(path), redis=False, key="k", hosts=HOSTS) if one.kind == "router"]
    assert router.url == "https://127.0.0.1:8000"
    context = app_context()
    with AppThread(lambda: create_app(context), certificate=make_certificate(tmp_path).loaded) as site:
        assert asyncio.run(is_healthy(dataclasses.replace(router, port=site.port)))
        context.client.draining = True
        assert not asyncio.run(is_healthy(dataclasses.replace(router, port=site.port)))
    assert not asyncio.run(is_healthy(dataclasses.replace(router, port=site.port)))


async def test_a_member_that_cannot_be_asked_is_not_healthy_and_nobody_has_its_port() -> None:
    server = Member(name="server-0", kind="server", arguments=(), host="a..b", port=8010)
    assert not await is_healthy(server) and not await is_taken(server)

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * (1 << 20))
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as babbler:
        port = babbler.sockets[0].getsockname()[1]
        assert not await is_healthy(dataclasses.replace(server, host="127.0.0.1", port=port))


# -- the file --------------------------------------------------------------------------------------------------


def test_the_example_is_a_router_a_prefill_server_two_decode_servers_and_redis() -> None:
    cluster = read_cluster(ROOT / "examples" / "cluster.yaml")
    found = members(cluster, redis=True, key="secret", hosts=HOSTS)
    assert [member.name for member in found] == ["redis", "prefill-0", "decode-0", "decode-1", "router"]
    assert [member.port for member in found] == [6390, 8010, 8020, 8021, 8000]
    prefill, decode, router = (options_of(found[index]) for index in (1, 3, 4))
    assert prefill["kv_role"] == "prefill" and "prefill_url" not in prefill
    assert decode["prefill_url"] == "http://127.0.0.1:8010" and decode["prefill_min_tokens"] == 64
    assert {options["kv_directory"] for options in (prefill, decode)} == {"redis://127.0.0.1:6390"}
    assert {options["cluster_key_file"] for options in (prefill, decode)} == {"{folder}/cluster.key"}
    assert {found[index].files["cluster.key"] for index in (1, 2, 3)} == {"secret\n"}
    assert router["server"] == ["http://127.0.0.1:8020", "http://127.0.0.1:8021"]
    assert router["prefill_server"] == ["http://127.0.0.1:8010"]


def test_servers_without_roles_and_without_redis_share_nothing(tmp_path: Path) -> None:
    found = members(read_cluster(written(tmp_path, SMALL)), redis=False, key="secret", hosts=HOSTS)
    assert [member.name for member in found] == ["server-0", "router"]
    assert options_of(found[0]) == {"model": "demo", "host": "127.0.0.1", "port": 8010}
    assert "cluster.key" not in found[0].files


def test_a_redis_that_runs_elsewhere_is_not_started(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL + "redis: redis://10.0.0.9:6379/1\n")
    found = members(read_cluster(path), redis=True, key="secret", hosts=HOSTS)
    assert [member.name for member in found] == ["server-0", "router"]
    options = options_of(found[0])
    assert (options["kv_directory"], options["kv_role"]) == ("redis://10.0.0.9:6379/1", "both")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold 'name: value' lines"),
        ("- a", "must hold 'name: value' lines"),
        ("model: [", "is not YAML"),
        ("model: demo", "servers is missing; it must be a list"),
        ("model: demo\nservers: [{port: x}]", "servers[0].port is 'x'; it must be an integer"),
        ("model: demo\nmodel: other\nservers: [{port: 81}]", "it has model twice"),
        ("model: demo\nname: ../x\nservers: [{port: 81}]", "name='../x'; allowed: up to 64 letters, digits"),
        ("model: demo\nredis: ftp://a\nservers: [{port: 81}]", "redis='ftp://a'; allowed: auto"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("model: demo\nservers: []", "servers is empty"),
        ("model: demo\nserver: []", "unknown name 'server'; did you mean 'servers'?"),
        ("model: demo\nservers: [{port: 1, rolle: decode}]", "servers[0]: unknown name 'rolle'; did you mean 'role'?"),
        ("model: demo\nservers: [{port: 80, role: encode}]", "role='encode'; allowed: prefill, decode, both"),
        ("model: demo\nservers: [{port: 80, role: prefill}]", "every server has role=prefill"),
        ("model: demo\nservers: [{port: 80, count: 0}]", "count=0; allowed: 1 to 256"),
        ("model: demo\nservers: [{port: 8000}]", "router and server-0 would both listen on port 8000"),
        ("model: demo\nservers: [{port: 81, count: 2}, {port: 82}]", "server-1 and server-2 would both listen"),
        ("model: demo\nservers: [{port: 65535, count: 2}]", "server-1 would listen on port 65536; allowed: 1 to 65535"),
        ("model: demo\nservers: [{port: 81, options: {port: 9}}]", "options must not have port"),
        ("model: demo\noptions: {port: 9}\nservers: [{port: 81}]", "options must not have port"),
        ("model: demo\nredis: yes\nservers: [{port: 81}]", "redis=True; allowed: auto, off, or a URL"),
        ("model: demo\nredis: localhost:6379\nservers: [{port: 81}]", "redis='localhost:6379'; allowed: auto"),
        ("model: demo\nplace: moon\nservers: [{port: 81}]", "place='moon'; allowed: processes, ray"),
        ("model: demo\nrouter: {port: x}\nservers: [{port: 81}]", "port='x' is not a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_cluster(written(tmp_path, text))
    assert message in str(error.value)


# -- its folder ------------------------------------------------------------------------------------------------


def test_a_cluster_runs_once_and_keeps_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = folder_of(Path("a.yaml"), "a")
    with ClusterFolder(path) as folder:
        key = folder.key()
        assert (path / "cluster.key").stat().st_mode & 0o777 == 0o600 and len(key) > 32
        with pytest.raises(ClusterError, match="is running already"), ClusterFolder(path):
            pass
    with ClusterFolder(path) as folder:
        assert folder.key() == key
    assert not end(path, 1.0, hurry=False)  # nobody runs it


def test_another_process_of_the_same_id_is_not_told_to_end(tmp_path: Path) -> None:
    """The folder may be on a disk that machines or containers share, each with ids of its own."""
    with ClusterFolder(tmp_path), subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / "lock").write_text(f"{other.pid} 1\n")
        with pytest.raises(ClusterError, match=f"not by process {other.pid} of this machine"):
            end(tmp_path, 1.0, hurry=True)
        assert other.poll() is None
        (tmp_path / "lock").write_text(f"{other.pid} {child.began(other.pid):.0f}\n")
        with pytest.raises(ClusterError, match="still stopping"):  # this process holds the lock on
            end(tmp_path, 0.5, hurry=False)
        assert other.wait() == -signal.SIGTERM


# -- its members -----------------------------------------------------------------------------------------------

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of `quire`, members run what their arguments say."""
    monkeypatch.setattr(place, "command_of", lambda member, folder: [sys.executable, "-c", *member.arguments])
    yield


def member(name: str, kind: str, code: str = HEALTHY) -> Member:
    port = free_port()
    return Member(name=name, kind=kind, arguments=(code, str(port)), host="127.0.0.1", port=port)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


class Seen(list[tuple[str, str]]):
    """The states that members have entered, in their order."""

    def changed(self, kept: Kept) -> None:
        self.append((kept.member.name, kept.state))


def kept_by(tmp_path: Path, *found: Member, limit: int = 3) -> tuple[Keeper, Seen]:
    return Keeper(found, Here(tmp_path), restart_limit=limit, drain_seconds=1.0), Seen()


def pid_of(kept: Kept) -> int:
    assert kept.running is not None
    return int(kept.running.describe().split()[1])


def gone(pid: int) -> bool:
    """Whether it has ended; an orphan may stay a zombie where nobody takes it in."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.usefixtures("program")
def test_who_is_killed_is_started_again_and_all_end_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        keeper, seen = kept_by(tmp_path, member("server-0", "server"), member("router", "router"))
        running = asyncio.create_task(keeper.run(seen.changed))
        await until(lambda: all(kept.state == "ready" for kept in keeper.kept))
        first = pid_of(keeper.kept[0])
        os.kill(first, signal.SIGKILL)
        await until(lambda: keeper.kept[0].restarts == 1 and keeper.kept[0].state == "ready")
        assert keeper.kept[0].why == "killed by SIGKILL" and keeper.kept[1].restarts == 0
        pids = [pid_of(kept) for kept in keeper.kept]
        keeper.leave()
        assert await running
        assert all(gone(pid) for pid in pids) and gone(first)
        ends = [name for name, state in seen if state == "ended"]
        assert ends == ["router", "server-0"]  # nothing new comes to a server that ends

    asyncio.run(scenario())


CHATTY = """
import itertools, time
for number in itertools.count():
    print(f"line {number} " + "x" * 1000, flush=True)
    time.sleep(0.001)
"""


@pytest.mark.usefixtures("program")
def test_a_members_log_and_the_one_before_are_all_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "LOG_BYTES", 100_000)
    log, last = tmp_path / "chatty.log", tmp_path / "chatty.log.1"

    async def run() -> None:
        keeper, seen = kept_by(tmp_path, member("chatty", "server", CHATTY), member("router", "router"))
        running = asyncio.create_task(keeper.run(seen.changed))
        numbers = set()
        for _ in range(3):
            await until(lambda: last.exists() and int(last.read_text().split()[1]) not in numbers)
            numbers.add(int(last.read_text().split()[1]))
            assert log.stat().st_size < 1_000_000
        keeper.leave()
        await running

    asyncio.run(run())
    lines = last.read_text().splitlines()
    assert lines[0].startswith("line ") and len(lines) > 50 and {*tmp_path.glob("chatty*")} == {log, last}


@pytest.mark.usefixtures("program")
def test_who_dies_too_often_is_left_and_without_a_server_all_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        dying = member("server-0", "server", "raise SystemExit(1)")
        keeper, seen = kept_by(tmp_path, dying, member("router", "router"), limit=1)
        assert not await asyncio.wait_for(keeper.run(seen.changed), 60)
        assert keeper.kept[0].state == "failed" and keeper.kept[0].restarts == 1
        assert ("router", "ended") in seen

    asyncio.run(scenario())


@pytest.mark.usefixtures("program")
def test_another_program_at_a_members_port_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cluster.keeper.TAKEN_SECONDS", 0.3)

    async def scenario() -> None:
        found = [member("server-0", "server"), member("router", "router")]
        keeper, seen = kept_by(tmp_path, *found)
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", *found[0].arguments)
        try:
            while not await is_healthy(found[0]):
                await asyncio.sleep(0.02)
            running = asyncio.create_task(keeper.run(seen.changed))
            await until(lambda: keeper.kept[0].restarts == 1)
            assert ("server-0", "ready") not in seen
            assert keeper.kept[0].why == f"another program listens at {found[0].url}"
        finally:
            other.kill()
            await other.wait()
        await until(lambda: all(kept.state == "ready" for kept in keeper.kept))  # once it has gone
        keeper.leave()
        assert await running

    asyncio.run(scenario())


INVALID = "import sys; print('starting\\nquire: error: no checkpoint x', file=sys.stderr); sys.exit(2)"
"""What a member does whose model is not valid."""


@pytest.mark.usefixtures("program")
def test_a_member_that_is_not_valid_ends_the_cluster_with_its_own_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        found = [member("server-0", "server"), member("server-1", "server", INVALID), member("router", "router")]
        keeper, seen = kept_by(tmp_path, *found)
        assert not await asyncio.wait_for(keeper.run(seen.changed), 60)
        invalid = keeper.kept[1]
        assert (invalid.restarts, invalid.why, invalid.state) == (0, "exit code 2", "failed")
        assert [kept.state for kept in keeper.kept if kept is not invalid] == ["ended", "ended"]
        cluster = read_cluster(written(tmp_path, SMALL))
        with pytest.raises(ConfigError, match=f"^server-1: no checkpoint x; see {tmp_path}/server-1.log$"):
            await up._keep(cluster, found, Here(tmp_path), tmp_path, limit=3, drain=1.0)

    asyncio.run(scenario())


@pytest.mark.usefixtures("program")
def test_a_member_that_was_ready_is_started_again_whatever_it_says_when_it_dies(tmp_path: Path) -> None:
    """What it is told was valid: what is wrong now may pass, such as memory that others take."""
    mark = tmp_path / "mark"
    once = f"import pathlib; mark = pathlib.Path({str(mark)!r})\nif mark.exists(): mark.unlink(); raise SystemExit(2)\n"

    async def scenario() -> None:
        keeper, seen = kept_by(tmp_path, member("server-0", "server", once + HEALTHY), member("router", "router"))
        running = asyncio.create_task(keeper.run(seen.changed))
        await until(lambda: all(kept.state == "ready" for kept in keeper.kept))
        mark.touch()
        os.kill(pid_of(keeper.kept[0]), signal.SIGKILL)
        await until(lambda: keeper.kept[0].restarts == 2 and keeper.kept[0].state == "ready")
        assert keeper.kept[0].why == "exit code 2" and keeper.kept[1].restarts == 0
        keeper.leave()
        assert await running

    asyncio.run(scenario())


@pytest.mark.usefixtures("program")
def test_who_does_not_end_is_killed_when_all_is_hurried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cluster.keeper.KILL_SECONDS", 0.2)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + HEALTHY

    async def scenario() -> None:
        keeper, seen = kept_by(tmp_path, member("server-0", "server", deaf), member("router", "router"))
        keeper._drain = 3600.0
        running = asyncio.create_task(keeper.run(seen.changed))
        await until(lambda: all(kept.state == "ready" for kept in keeper.kept))
        keeper.leave()
        keeper.leave()
        assert await asyncio.wait_for(running, 30)
        assert keeper.kept[0].state == "ended"

    asyncio.run(scenario())


def test_members_die_with_who_has_started_them(tmp_path: Path) -> None:
    """`kill -9` of `quire up` leaves nothing running."""
    code = f"""
        import asyncio, sys
        from pathlib import Path
        from quire.cluster import place
        from quire.cluster.spec import Member
        place.command_of = lambda member, folder: ["sleep", "3600"]
        async def main():
            running = await place.Here(Path({str(tmp_path)!r})).start(
                Member(name="a", kind="server", arguments=(), host="127.0.0.1", port=1))
            print(running.describe().split()[1], flush=True)
            await asyncio.sleep(3600)
        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":  # it has become its own program
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("program")
def test_the_table_shows_each_member_and_how_it_does(tmp_path: Path) -> None:
    async def scenario() -> str:
        keeper, _ = kept_by(tmp_path, member("server-0", "server"), member("router", "router"))
        console = Console(force_terminal=True, width=140, file=io.StringIO())
        with make_screen(console, "two of demo", keeper.kept) as screen:
            running = asyncio.create_task(keeper.run(screen.changed))
            await until(lambda: all(kept.state == "ready" for kept in keeper.kept))
            pid = pid_of(keeper.kept[0])
            screen.changed(keeper.kept[0])
            keeper.leave()
            assert await running
        shown = console.file.getvalue()
        assert f"pid {pid}" in shown
        return shown

    shown = asyncio.run(scenario())
    for text in ("two of demo", "server-0", "router", "starting", "ready", "ended", "http://127.0.0.1:"):
        assert text in shown
