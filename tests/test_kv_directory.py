"""Directories of who holds which block: Redis is compared with the one within a process, and what is wrong with a Redis
is one error.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from quire.errors import ConfigError
from quire.kv.directory import open_directory
from quire.kv.directory.base import Directory, DirectoryError, Holders, Node, masked
from quire.kv.directory.redis import PREFIX, RedisDirectory
from tests.http_tools import free_port
from tests.local_directory import LocalDirectory, LocalStore
from tests.redis_server import RedisServer, needs_redis

PATIENT = 30.0
"""Seconds for an answer on a machine that is busy, where what is answered is the matter."""

NAMES = "north", "east", "south"
LEASE = 1000.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def empty(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


def blocks(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in numbers]


def held(found: Holders) -> list[list[Node]]:
    return [sorted(row) for row in found]


class Both:
    """A directory and the one within the process, which must say the same.

    Args:
        lose: a node's lease has ended. flush: all is lost.
    """

    def __init__(self, directory: Directory, lose: Callable[[str], object], flush: Callable[[], object]) -> None:
        self.store = LocalStore(lambda: 0.0)
        self._lose, self._flush = lose, flush
        self.directories: list[Directory] = [directory, LocalDirectory(self.store, "us")]

    def ask(self, method: str, *args: Any) -> Any:
        ours, theirs = (getattr(each, method)(*args) for each in self.directories)
        if method == "query":
            ours, theirs = held(ours), held(theirs)
        assert ours == theirs, (method, args)
        return ours

    def lose_lease(self, name: str) -> None:
        self.store.leases.pop(name, None)
        self._lose(name)

    def flush(self) -> None:
        self.store.clear()
        self._flush()


@needs_redis
@pytest.mark.parametrize("seed", range(20))
def test_redis_says_what_the_directory_within_a_process_says(
    seed: int, server: RedisServer, empty: redis.Redis
) -> None:
    def lose(name: str) -> None:
        empty.delete(PREFIX + b"n:" + name.encode())

    compare(random.Random(seed), Both(RedisDirectory(server.url, "us", PATIENT), lose, empty.flushall), 400)


def compare(rnd: random.Random, both: Both, steps: int) -> None:
    """Have both do the same at random."""
    nodes = {name: Node(name, "1", f"{name}:1") for name in NAMES}
    for _ in range(steps):
        node = nodes[rnd.choice(NAMES)]
        some = blocks(*rnd.sample(range(12), rnd.randrange(1, 6)))
        [what] = rnd.choices(
            ["join", "leave", "publish", "withdraw", "query", "epoch", "lease", "flush"], [4, 1, 8, 4, 8, 1, 1, 0.3]
        )
        if what in ("publish", "withdraw"):
            both.ask(what, node, some)
        elif what == "query":
            both.ask("query", some, rnd.choice([None, [rnd.random() < 0.5 for _ in some]]))
        elif what == "join":
            if not both.ask("join", node, LEASE):  # as an agent does
                nodes[node.name] = node._replace(epoch=str(int(node.epoch) + 1))
                both.ask("join", nodes[node.name], LEASE)
        elif what == "leave":
            both.ask("leave", node)
        elif what == "epoch":
            nodes[node.name] = node._replace(epoch=str(int(node.epoch) + 1))
        elif what == "lease":
            both.lose_lease(node.name)
        else:
            both.flush()
        assert sorted(both.directories[0].nodes()) == sorted(both.directories[1].nodes())


def directories(url: str) -> list[Directory]:
    return [RedisDirectory(url, "us"), LocalDirectory(LocalStore(), "us")]


@needs_redis
def test_who_does_not_renew_its_lease_is_gone_with_all_that_it_published(
    server: RedisServer, empty: redis.Redis
) -> None:
    for directory in directories(server.url):
        node, other = Node("a", "1", "a:1"), Node("b", "1", "b:1")
        directory.join(node, LEASE)
        directory.join(other, LEASE)
        directory.publish(node, blocks(1, 2))
        directory.publish(other, blocks(1))
        assert held(directory.query(blocks(1, 2))) == [[node, other], [node]]
        some = blocks(2, 9, 1, 8, 2)
        assert held(directory.query(some, [True, False, True, True, True])) == [[node], [], [node, other]]
        directory.join(node, 0.05)
        deadline = time.monotonic() + 20.0
        while node in directory.nodes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert directory.query(blocks(1, 2)) == [[other]]
        assert not directory.publish(node, blocks(3)), "it has to join again"
        assert not directory.join(node._replace(epoch="2"), LEASE)
        assert directory.query(blocks(2)) == [], "of another epoch"


@needs_redis
def test_the_bigger_half_of_a_crowd_that_left_is_forgotten_where_a_block_is_published_again(
    server: RedisServer, empty: redis.Redis
) -> None:
    directory = RedisDirectory(server.url, "us", PATIENT)
    for number in range(30):
        node = Node(f"boot-{number}", "1", "a:1")
        directory.join(node, LEASE)
        directory.publish(node, blocks(1))
        directory.leave(node)
    assert empty.hlen(PREFIX + b"b:" + blocks(1)[0]) <= 9


@needs_redis
def test_a_query_of_a_long_prefix_is_one_round_trip(server: RedisServer, empty: redis.Redis) -> None:
    directory, node = RedisDirectory(server.url, "us", PATIENT), Node("a", "1", "a:1")
    names = [number.to_bytes(32, "big") for number in range(4096)]
    directory.join(node, LEASE)
    directory.publish(node, names)
    directory.query(names[:1])
    before = empty.info("stats")["total_commands_processed"]
    commands = [each for each in empty.info("commandstats") if each.startswith("cmdstat_evalsha")]
    calls = sum(empty.info("commandstats")[each]["calls"] for each in commands)
    assert directory.query([*names, b"unknown"]) == [[node]] * 4096
    assert sum(empty.info("commandstats")[each]["calls"] for each in commands) == calls + 1
    assert empty.info("stats")["total_commands_processed"] > before


@needs_redis
def test_keys_of_another_type_are_deleted_with_one_warning(
    server: RedisServer, empty: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    directory, node = RedisDirectory(server.url, "us", PATIENT), Node("a", "1", "a:1")
    directory.join(node, LEASE)
    [name] = blocks(1)
    asked: list[Callable[[], object]] = [
        lambda: directory.query([name]),
        lambda: directory.withdraw(node, [name]),
        lambda: directory.publish(node, [name]),
    ]
    for ask in asked:
        empty.delete(PREFIX + b"b:" + name)
        empty.set(PREFIX + b"b:" + name, "not of ours")
        ask()
    assert directory.query([name]) == [[node]], "published in the place of the other"
    empty.set(PREFIX + b"nodes", "not of ours")
    assert directory.nodes() == [] and not directory.join(node._replace(name="b"), LEASE)
    assert [each.name for each in directory.nodes()] == ["b"]
    [warning] = caplog.messages
    assert "keys of a type that no engine makes are deleted there (1 now" in warning


@needs_redis
def test_engines_with_another_cluster_key_are_told_so(server: RedisServer, empty: redis.Redis) -> None:
    store = LocalStore()
    pairs: list[tuple[Directory, Directory]] = [
        (RedisDirectory(server.url, "us", PATIENT), RedisDirectory(server.url, "them", PATIENT)),
        (LocalDirectory(store, "us"), LocalDirectory(store, "them")),
    ]
    for ours, theirs in pairs:
        ours.join(Node("a", "1", "a:1"), LEASE)
        with pytest.raises(ConfigError, match="is used by engines with another cluster key; give all of them the same"):
            theirs.join(Node("b", "1", "b:1"), LEASE)


@needs_redis
def test_a_password_a_user_and_what_a_user_may_do() -> None:
    with RedisServer("--requirepass", "sesame") as server:
        at = f"@127.0.0.1:{server.port}/0"
        RedisDirectory(f"redis://:sesame{at}", "us").check()
        for wrong in ("redis://" + at.removeprefix("@"), f"redis://:wrong{at}", f"redis://nobody:sesame{at}"):
            with pytest.raises(ConfigError, match="does not accept this user and password") as error:
                RedisDirectory(wrong, "us").check()
            assert "sesame" not in str(error.value) and ":wrong" not in str(error.value)
        with redis.Redis(port=server.port, password="sesame") as admin:
            rules = ["~quire:*", "resetchannels", "-@all", "+@read", "+@write", "+@scripting", "+info"]
            admin.execute_command("ACL", "SETUSER", "quire", "on", ">word", *rules)
            admin.execute_command("ACL", "SETUSER", "less", "on", ">word", "~other:*", *rules[1:])
            admin.execute_command("ACL", "SETUSER", "least", "on", ">word", "~quire:*", "-@all")
        directory, node = RedisDirectory(f"redis://quire:word{at}", "us"), Node("a", "1", "a:1")
        directory.check()
        assert not directory.join(node, LEASE) and directory.publish(node, blocks(1))
        assert directory.query(blocks(1)) == [[node]] and directory.nodes() == [node]
        directory.withdraw(node, blocks(1))
        directory.leave(node)
        for user in ("less", "least"):
            with pytest.raises(ConfigError, match="its user lacks permissions for a directory"):
                directory = RedisDirectory(f"redis://{user}:word{at}", "us")
                directory.check()
                directory.join(node, LEASE)


@needs_redis
def test_a_password_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer("--requirepass", "sesame") as server:
        monkeypatch.setenv("REDISCLI_AUTH", "sesame")
        RedisDirectory(server.url, "us", PATIENT).check()
        with pytest.raises(ConfigError, match="does not accept this user and password"):
            RedisDirectory(server.url.replace("//", "//:wrong@"), "us").check()


def certificates(folder: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@needs_redis
def test_tls_and_a_server_that_nobody_vouches_for(tmp_path: Path) -> None:
    certificate, key = certificates(tmp_path)
    port = free_port()
    files = "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate
    with RedisServer("--port", "0", "--tls-port", str(port), *files, "--tls-auth-clients", "no", port=port):
        url = f"rediss://127.0.0.1:{port}/0"
        directory = RedisDirectory(f"{url}?ssl_ca_certs={certificate}", "us")
        directory.check()
        assert not directory.join(Node("a", "1", "a:1"), LEASE)
        with pytest.raises(ConfigError, match="no TLS connection"):
            RedisDirectory(url, "us").check()
        with pytest.raises(DirectoryError):
            RedisDirectory(url.replace("rediss", "redis"), "us").check()


@contextlib.contextmanager
def answering(answers: bytes) -> Iterator[int]:
    """Something that says this to whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        while connection.recv(65536):
                            connection.sendall(answers)

        threading.Thread(target=answer, daemon=True).start()
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "not a Redis"),
        (b"$24\r\nredis_version:3.2.100\r\n \r\n", "Redis 3.2.100 is too old; use 6.0 or later, or Valkey"),
    ],
)
def test_what_is_no_redis_or_an_old_one_is_one_error(answers: bytes, why: str) -> None:
    with answering(answers) as port, pytest.raises(ConfigError, match=why):
        RedisDirectory(f"redis://127.0.0.1:{port}/0?protocol=2&lib_name=&lib_version=", "us").check()


def test_who_does_not_answer_may_do_so_later() -> None:
    with pytest.raises(DirectoryError, match="cannot be reached"):
        RedisDirectory(f"redis://127.0.0.1:{free_port()}/0", "us").check()
    with answering(b"") as port, pytest.raises(DirectoryError, match="does not answer as it should"):
        RedisDirectory(f"redis://127.0.0.1:{port}/0", "us", timeout=0.2).check()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:6379", "is not the URL of a directory; allowed: redis://"),
        ("http://a:b@c", r"http://a:\*\*\*@c' is not the URL of a directory"),
        ("redis://host:port/0", "redis://host:port/0: Port could not be cast"),
        ("redis://host/0?color=red", "unexpected keyword argument 'color'"),
    ],
)
def test_a_url_that_is_none_is_one_error(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        open_directory(url, "us")


def test_a_password_is_not_shown() -> None:
    assert masked("redis://user:word@host:1/0") == "redis://user:***@host:1/0"
    assert masked("redis://:wo@rd@host") == "redis://:***@host" and masked("redis://host/0") == "redis://host/0"
