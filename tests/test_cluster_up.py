"""`quire up` as its users meet it: a router, a prefill and two decode servers; kills, one way down."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from quire import LLM, SamplingParams
from tests.http_tools import free_port, wait_until
from tests.test_cluster import ROOT, gone
from tests.warm import WarmProcess

PROMPTS = [f"def number_{index}(a, b):\n    return" for index in range(3)]
LONG = "\n".join(f"def f{index}(a, b):\n    return a + {index} * b\n" for index in range(24))
TOKENS = 96


class Cluster:
    """A cluster that runs, of the example's file at ports that are free."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, **changed: Any) -> None:
        content = yaml.safe_load((ROOT / "examples" / "cluster.yaml").read_text())
        content["router"]["port"] = self.port = free_port()
        content["redis_port"] = free_port()
        for servers in content["servers"]:
            servers["port"] = free_port() if servers.get("count", 1) == 1 else two_free_ports()
        self.redis = content["redis"] == "auto" and shutil.which("redis-server") is not None
        self.file = folder / "cluster.yaml"
        self.file.write_text(yaml.safe_dump(content | changed))
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder), **(environment or {})}
        self._lines: list[str] = []
        self.process = WarmProcess("quire.cli.main", "up", str(self.file), environment=self.environment)
        threading.Thread(target=self._read, daemon=True).start()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=20)

    def _read(self) -> None:
        for line in self.process.stderr:
            self._lines.append(line.decode())

    def said(self) -> str:
        return "".join(self._lines)

    def pid(self, member: str) -> int:
        """Of the process that `quire up` has started for a member; 0: there is none."""
        ending = "redis.conf" if member == "redis" else f"/{member}.yaml"
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            named = any(word.decode(errors="replace").endswith(ending) for word in words)
            if parent == self.process.pid and (named or (member == "redis" and b"redis-server" in words[0])):
                return int(path.name)
        return 0

    def complete(self, prompt: str, seed: int = 0) -> str:
        """A request's text, asked again where the router was killed beneath it."""
        while True:
            try:
                done = self.client.completions.create(
                    model="demo", prompt=prompt, max_tokens=TOKENS, seed=seed, temperature=0.9,
                    extra_body={"ignore_eos": True}, timeout=120,
                )  # fmt: skip
                return done.choices[0].text
            except openai.APIConnectionError:
                continue

    def down(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "quire.cli.main", "down", str(self.file), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)


def two_free_ports() -> int:
    """The first of two that follow one another."""
    import socket

    while True:
        port = free_port()
        with socket.socket() as second:
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("up"))
    try:
        for member in ("prefill-0", "decode-0", "decode-1", "router"):
            wait_until(lambda member=member: f"{member:12} ready" in cluster.said(), deadline=120)
        yield cluster
    finally:
        cluster.process.kill()
        cluster.process.wait()


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    params = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0.9, ignore_eos=True)
    with LLM("demo", threads=1, generation_config="auto") as llm:
        outputs = llm.generate([*PROMPTS, LONG], [params] * (len(PROMPTS) + 1))
    return dict(zip([*PROMPTS, LONG], (output.outputs[0].text for output in outputs), strict=True))


@pytest.mark.slow
def test_one_door_answers_as_one_engine_does(cluster: Cluster, expected: dict[str, str]) -> None:
    assert {prompt: cluster.complete(prompt) for prompt in (PROMPTS[0], LONG)} == {
        prompt: expected[prompt] for prompt in (PROMPTS[0], LONG)
    }


@pytest.mark.slow
def test_whoever_is_killed_under_load_no_token_is_wrong(cluster: Cluster, expected: dict[str, str]) -> None:
    members = ["decode-0", "prefill-0", "decode-1", "router", *(["redis"] if cluster.redis else [])]
    over = threading.Event()

    def ask(prompt: str) -> list[str]:
        found = [cluster.complete(prompt)]
        while not over.is_set():
            found.append(cluster.complete(prompt))
        return found

    with ThreadPoolExecutor(4) as pool:
        asked = {prompt: pool.submit(ask, prompt) for prompt in [*PROMPTS, LONG]}
        try:
            for member in members:
                victim = cluster.pid(member)
                assert victim, f"{member} does not run"
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda: cluster.pid(member) not in (0, victim), deadline=120)  # noqa: B023
                wait_until(lambda: cluster.said().splitlines()[-1].split()[1] == "ready", deadline=120)
        finally:
            over.set()
        for prompt, future in asked.items():
            assert set(future.result(timeout=120)) == {expected[prompt]}
    assert cluster.process.poll() is None


def test_one_command_ends_it_and_leaves_nothing_running(cluster: Cluster) -> None:
    pids = [cluster.pid(member) for member in ("prefill-0", "decode-0", "decode-1", "router")]
    done = cluster.down()
    assert (done.returncode, done.stderr) == (0, "the cluster has stopped\n")
    assert cluster.process.wait(30) == 0
    assert all(gone(pid) for pid in pids)
    assert cluster.down().stderr == "this cluster is not running\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_finds_machines_for_the_servers(tmp_path: Path, expected: dict[str, str]) -> None:
    pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    machines = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    machines.add_node(num_cpus=1)
    servers = [{"port": two_free_ports(), "count": 2}]
    options = {"redis": "off", "options": {"threads": 1}, "servers": servers, "place": "ray"}
    cluster = Cluster(tmp_path, {"RAY_ADDRESS": machines.address}, **options)
    try:
        for member in ("server-0", "server-1", "router"):
            wait_until(lambda member=member: f"{member:12} ready" in cluster.said(), deadline=120)
        assert cluster.complete(PROMPTS[0]) == expected[PROMPTS[0]]
        assert cluster.down().returncode == 0
        assert cluster.process.wait(30) == 0
    finally:
        cluster.process.kill()
        cluster.process.wait()
        machines.shutdown()
