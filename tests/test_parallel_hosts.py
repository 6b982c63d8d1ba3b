"""Ranks on several machines: two processes that join over the loopback, and what joins them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from quire import LLM, SamplingParams, __version__
from quire.cli.main import main
from quire.config import EngineConfig
from quire.curve import read_token
from quire.engine import machine_messages
from quire.engine.external_launcher import placed
from quire.engine.ranks import Ranks
from quire.errors import ConfigError, RankLostError
from quire.runner.memory_plan import Measured
from tests.http_tools import free_port
from tests.networks import Networks, networks
from tests.oracle import save_checkpoint
from tests.warm import WarmProcess

__all__ = ["networks"]  # a fixture

# -- machines that join --------------------------------------------------------------------------------------

LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7]


class Joined:
    """A machine that brings ranks: `quire rank`, and what it has said."""

    process: WarmProcess | subprocess.Popen[bytes]

    def __init__(self, port: int, token: Path, *options: str, warm: bool = True) -> None:
        command = ["quire.cli.main", "rank", "--join", f"127.0.0.1:{port}", "--token-file", str(token), *options]
        if warm:
            self.process = WarmProcess(*command)
        else:
            self.process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE)
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.decode().strip())

    def wait_said(self, text: str, count: int = 1, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while sum(text in line for line in self.said) < count:
            assert time.monotonic() < end, self.said
            time.sleep(0.02)

    def children(self) -> list[int]:
        return children(self.process.pid)

    def stop(self) -> None:
        own = self.children()
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
        gone(own)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def gone(pids: list[int], seconds: float = 8.0) -> None:
    """Until none of these processes is there."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef" * 2 + "\n")
    file.chmod(0o600)
    return file


@contextmanager
def joined(token: Path, *machines: Sequence[str], warm: bool = True) -> Iterator[tuple[dict[str, Any], list[Joined]]]:
    """Options of an engine, and machines that join it."""
    port = free_port()
    others = [Joined(port, token, *options, warm=warm) for options in machines or [()]]
    try:
        yield {"nnodes": 1 + len(others), "master_port": port, "token_file": str(token), "threads": 1}, others
    finally:
        for other in others:
            other.stop()


@pytest.mark.parametrize(
    ("sizes", "machines"),
    [
        ({"tensor_parallel_size": 2}, [()]),
        pytest.param({"tensor_parallel_size": 4}, [("--ranks", "1"), ("--ranks", "2")], marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, [()], marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, [()], marks=pytest.mark.slow),
        pytest.param(
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, [("--ranks", "3")], marks=pytest.mark.slow
        ),
    ],
)
def test_machines_change_nothing(sizes: dict[str, int], machines: list[Sequence[str]], token: Path) -> None:
    params = [SamplingParams(max_tokens=30, seed=1, temperature=t, logprobs=1, ignore_eos=True) for t in (0.0, 0.8)]
    texts = ["def fib(n):\n", "import os\nimport sys\n\nclass Parser:\n"]
    found = []
    with LLM("demo", threads=1) as llm:
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(texts, params)])
    before = bells()
    with joined(token, *machines, warm=False) as (options, others):
        with LLM("demo", **sizes, **options) as llm:
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(texts, params)])
            own = [pid for other in others for pid in other.children()]
            count = sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1)
            assert len(own) == count - llm._engine._ranks.num_here  # type: ignore[union-attr]
        gone(own)
        for other in others:
            other.wait_said("has ended")
    assert found[0] == found[1]
    assert bells() == before, "a closed engine has given back its descriptors"


def bells() -> int:
    """Number of this process's eventfds."""
    files = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("eventfd" in os.readlink(file) for file in files if file.is_symlink())


@pytest.mark.slow
def test_experts_on_several_machines_move_and_change_nothing(token: Path, tmp_path: Path) -> None:
    folder = str(save_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=2))
    params = SamplingParams(max_tokens=30, temperature=0.0, logprobs=1, ignore_eos=True)
    found = []
    with LLM(folder, threads=1) as llm:
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate([PROMPT, [9, 8]], params)])
    with joined(token) as (options, _):
        experts = {"enable_expert_parallel": True, "eplb_interval": 3, "num_redundant_experts": 2}
        with LLM(folder, tensor_parallel_size=2, **experts, **options) as llm:
            outputs = llm.generate([PROMPT, [9, 8]], params)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            assert llm._engine.rank_stats()["expert_moves"] > 0
    assert found[0] == found[1]


def steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.step()


@pytest.mark.parametrize("who", ["rank", "machine"])
def test_who_is_killed_on_another_machine_is_missed_at_once_and_the_machine_waits_for_the_next_engine(
    who: str, token: Path
) -> None:
    with joined(token) as (options, [other]):
        with LLM("demo", tensor_parallel_size=2, **options) as llm:
            llm.add_request(PROMPT, LONG)
            steps(llm, 5)
            [rank] = other.children()
            os.kill(rank if who == "rank" else other.process.pid, signal.SIGKILL)
            begin = time.monotonic()
            how = (
                r"died \(killed by SIGKILL\)$" if who == "rank" else "is lost: the connection to its machine was closed"
            )
            with pytest.raises(RankLostError, match=rf"^rank 1 on .* \(127\.0\.0\.1\) {how}") as caught:
                steps(llm, 50)
            assert time.monotonic() - begin < 5
            assert caught.value.outside
            gone([rank])
        if who == "rank":
            with LLM("demo", tensor_parallel_size=2, **options) as llm:
                assert llm.generate([PROMPT], SamplingParams(max_tokens=3))[0].finished


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_machine_that_is_told_to_leave(how: signal.Signals, code: int, token: Path) -> None:
    with joined(token) as (options, [other]), LLM("demo", tensor_parallel_size=2, **options) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=3))
        own = other.children()
        other.process.send_signal(how)
        assert other.process.wait(10) == code
        gone(own)
        with pytest.raises(RankLostError, match=r"^rank 1 on .*"):
            llm.generate([PROMPT], LONG)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_nothing_is_computed_is_missed(token: Path) -> None:
    with joined(token) as (options, [other]), LLM("demo", tensor_parallel_size=2, **options) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=3))
        other.process.kill()
        end = time.monotonic() + 5
        with pytest.raises(RankLostError, match=r"^rank 1 on .* is lost"):
            while time.monotonic() < end:
                llm._engine.check_ranks()
                time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param("rank", marks=pytest.mark.slow), "machine"])
def test_who_hangs_on_another_machine_is_given_up_after_the_deadline(who: str, token: Path) -> None:
    with joined(token) as (options, [other]):
        with LLM("demo", tensor_parallel_size=2, collective_timeout_s=1.5, **options) as llm:
            llm.add_request(PROMPT, LONG)
            steps(llm, 5)
            [rank] = other.children()
            stopped = rank if who == "rank" else other.process.pid
            os.kill(stopped, signal.SIGSTOP)
            begin = time.monotonic()
            with pytest.raises(RankLostError, match=r"^rank 1 on .* seconds \(collective_timeout_s\)$"):
                steps(llm, 50)
            assert 0.5 < time.monotonic() - begin < 8
        os.kill(other.process.pid, signal.SIGCONT)
        gone([rank])


FIRST = """
    import sys, time
    from quire import LLM, SamplingParams
    llm = LLM("demo", tensor_parallel_size=2, nnodes=2, master_port=int(sys.argv[1]), token_file=sys.argv[2],
              threads=1, collective_timeout_s=1.5)
    print("ready", flush=True)
    while sys.argv[3] == "busy":
        llm.generate([[5, 6]] * 4, SamplingParams(max_tokens=400, ignore_eos=True, temperature=0))
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "state"),
    [
        (signal.SIGKILL, "idle"),
        (signal.SIGSTOP, "busy"),
        pytest.param(signal.SIGKILL, "busy", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "idle", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_the_first_machine(how: signal.Signals, state: str, token: Path) -> None:
    with joined(token) as (options, [other]):
        command = [sys.executable, "-c", textwrap.dedent(FIRST), str(options["master_port"]), str(token), state]
        first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert first.stdout is not None and first.stdout.readline() == "ready\n"
            own = other.children()
            assert len(own) == 1
            first.send_signal(how)
            gone(own)
            other.wait_said("has ended")
            other.wait_said("looking for an engine", 2)
        finally:
            first.kill()
            first.wait()


# -- machines that cannot join -------------------------------------------------------------------------------


def test_a_machine_with_another_token_gets_nothing(token: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("f" * 32)
    with joined(token) as (options, _):
        stranger = Joined(options["master_port"], wrong)
        with LLM("demo", tensor_parallel_size=2, **options) as llm:
            assert stranger.process.wait(30) == 2
            assert "does not accept this token" in stranger.said[-1] and "--token-file" in stranger.said[-1]
            assert llm.generate([PROMPT], SamplingParams(max_tokens=3))[0].finished


def test_the_keys_of_the_others_are_asked_for_too(token: Path) -> None:
    """Who knows the first machine's public key alone is not let in."""
    context: zmq.Context[Any] = zmq.Context()
    known = read_token(str(token), "token_file")
    first = machine_messages.listening(context, known, 5.0)
    door = machine_messages.doorkeeper(context, known)
    port = first.bind_to_random_port("tcp://127.0.0.1")
    for own, welcome in ((known, True), (b"another token, of some length", False)):
        other = machine_messages.connecting(context, known)
        other.curve_publickey, other.curve_secretkey = machine_messages._curve(own).keys("others")
        other.connect(f"tcp://127.0.0.1:{port}")
        other.send(b"let me in")
        assert door.socket.poll(5000)
        door.answer()
        assert bool(first.poll(5000 if welcome else 300)) == welcome
        if welcome:
            assert first.recv_multipart()[1] == b"let me in"
        other.close()
    context.destroy(linger=0)


def test_who_cannot_take_part_is_told_why_and_the_engine_waits_for_others(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(token, ("--ranks", "5")) as (options, [many]):
        port = options["master_port"]
        context: zmq.Context[Any] = zmq.Context()
        old = machine_messages.connecting(context, read_token(str(token), "token_file"))
        made: list[LLM] = []
        thread = threading.Thread(target=lambda: made.append(LLM("demo", tensor_parallel_size=2, **options)))
        thread.start()
        assert many.process.wait(60) == 2
        assert "--ranks 5: of the engine's 2 ranks, this machine may bring 1, as there are 2 machines" in many.said[-1]
        old.connect(f"tcp://127.0.0.1:{port}")
        old.send_multipart([msgspec.msgpack.encode({"type": "Hello", "version": "0.0.1", "news": True}), b""])
        assert old.poll(10_000)
        refused = msgspec.msgpack.decode(old.recv_multipart()[0], type=machine_messages.Refused)
        assert f"has Quire 0.0.1, and the first one {__version__}" in refused.message
        context.destroy(linger=0)
        right = Joined(port, token, "--once")
        thread.join(60)
        late = Joined(port, token)
        assert late.process.wait(30) == 2
        assert "all 2 machines (nnodes) of the engine" in late.said[-1]
        [llm] = made
        assert llm.generate([PROMPT], SamplingParams(max_tokens=3))[0].finished
        llm.close()
        assert right.process.wait(10) == 0


@pytest.mark.slow
def test_another_checkpoint_is_refused(token: Path, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=2)
    with joined(token, ("--model", str(folder))) as (options, [other]):
        with pytest.raises(
            ConfigError,
            match=rf"^rank 1 on .*: model: the checkpoint {folder} differs from the one on the first machine",
        ):
            LLM("demo", tensor_parallel_size=2, **options)
        other.wait_said("looking for an engine", 2)
        assert not other.children()


@pytest.mark.slow
def test_other_kernels_are_refused(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":  # it is read once, from the environment too
        pytest.skip("torch has no other kernels here")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    with joined(token, warm=False) as (options, [other]):
        with pytest.raises(ConfigError, match=r"^rank 1 on .* has other kernels \(.*DEFAULT\) than the first"):
            LLM("demo", tensor_parallel_size=2, **options)
        other.wait_said("looking for an engine", 2)


@pytest.mark.slow
def test_the_least_memory_of_all_ranks_counts(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = 300 * 2**20

    def measured(self: Ranks, found: Any = Ranks.measured) -> list[Measured]:
        assert all(least < each.free for each in found(self))
        return [Measured(least)]

    monkeypatch.setattr(Ranks, "measured", measured)
    with joined(token) as (options, _), LLM("demo", tensor_parallel_size=2, **options) as llm:
        plan = llm._engine.memory_plan
        assert plan.kv_bytes + plan.activations <= least
        assert llm.generate([PROMPT], SamplingParams(max_tokens=3))[0].finished


def test_a_token_that_everybody_can_read_is_noted(token: Path, caplog: pytest.LogCaptureFixture) -> None:
    token.chmod(0o644)
    read_token(str(token), "token_file")
    assert "can be read by every user of this machine" in caplog.text
    caplog.clear()
    token.chmod(0o600)
    read_token(str(token), "token_file")
    assert not caplog.text


def test_what_another_machine_cannot_do_is_told(token: Path) -> None:
    with joined(token) as (options, [other]):
        with pytest.raises(ConfigError, match="max_model_len"):
            LLM("demo", tensor_parallel_size=2, max_model_len=10**6, **options)
        other.wait_said("looking for an engine", 2)
        assert not other.children()


def test_machines_that_never_come(token: Path) -> None:
    options = {"nnodes": 3, "tensor_parallel_size": 4, "token_file": str(token), "master_port": free_port()}
    begin = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"^only 0 of 2 other machines \(nnodes=3\) .* 0.5 seconds \(join_timeout_s\)"
    ):
        LLM("demo", join_timeout_s=0.5, **options)
    assert time.monotonic() - begin < 10
    with socket.socket() as again:
        again.bind(("127.0.0.1", options["master_port"]))  # nothing is left that listens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nnodes": 3}, r"nnodes=3 is more than the number of ranks, 2"),
        ({"token_file": None}, r"nnodes=2 needs token_file"),
        ({"nnodes": 1}, r"token_file is for several machines"),
        ({"token_file": "/nowhere"}, r"token_file /nowhere: No such file"),
        ({"token_file": "short"}, r"token_file .*: a token of 5 bytes; allowed: 16 to 4096"),
        ({"master_addr": "192.0.2.1"}, r"master_addr=192\.0\.2\.1, master_port=\d+: Cannot assign"),
        ({"master_addr": "no.such.host.invalid"}, r"master_addr 'no\.such\.host\.invalid'"),
        ({"master_port": "taken"}, r"master_addr=127\.0\.0\.1, master_port=\d+: Address already in use"),
        ({"master_port": 0}, r"master_port=0 is out of range; allowed: from 1 to 65535"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], message: str, token: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    options = {"nnodes": 2, "tensor_parallel_size": 2, "token_file": str(token), "master_port": free_port()}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options |= given
        if given.get("token_file") == "short":
            options["token_file"] = str(tmp_path / "short")
        if given.get("master_port") == "taken":
            options["master_port"] = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=message):
            LLM("demo", **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--join", "nowhere"], "--join 'nowhere' is not HOST:PORT"),
        (["--join", "10.0.0.1:99999"], "with a port from 1 to 65535"),
        (["--join", "127.0.0.1:1", "--ranks", "0"], "--ranks 0 is out of range; allowed: from 1 to 255"),
        (["--join", "127.0.0.1:1", "--model", "/nowhere"], "no checkpoint '/nowhere'"),
    ],
)
def test_wrong_flags_of_a_machine_are_named(
    arguments: list[str], message: str, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rank", "--token-file", str(token), *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


# -- networks ------------------------------------------------------------------------------------------------


IN_A_NETWORK = """
    import subprocess, sys, time
    from quire import LLM, SamplingParams
    from quire.errors import RankLostError
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM("demo", threads=1) as llm:
        [alone] = llm.generate([[5, 6, 7]], params)
    with LLM("demo", tensor_parallel_size=2, nnodes=2, master_addr="10.77.0.1", token_file=sys.argv[1],
             threads=1, collective_timeout_s=1.5) as llm:
        [both] = llm.generate([[5, 6, 7]], params)
        print(both.outputs[0].token_ids == alone.outputs[0].token_ids)
        listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True).stdout.split()
        print(*[each for each in listening if ":" in each and each[-1].isdigit()])
        subprocess.run(["ip", "link", "set", sys.argv[2], "down"], check=True)
        begin = time.monotonic()
        try:
            llm.generate([[5, 6, 7]], params)
        except RankLostError as error:
            print(error, time.monotonic() - begin < 6)
"""


@pytest.mark.slow
def test_two_networks_that_a_cable_joins_until_it_is_pulled(networks: Networks, token: Path) -> None:
    first, second = networks.names
    command = [sys.executable, "-m", "quire.cli.main", "rank", "--join", "10.77.0.1:29501", "--token-file", str(token)]
    other = subprocess.Popen(["ip", "netns", "exec", second, *command], stderr=subprocess.PIPE, text=True)
    try:
        script = [sys.executable, "-c", textwrap.dedent(IN_A_NETWORK), str(token), networks.cables[0]]
        done = subprocess.run(["ip", "netns", "exec", first, *script], capture_output=True, text=True, timeout=120)
        lines = done.stdout.splitlines()
        assert lines[0] == "True", done.stderr[-3000:]
        assert lines[1].replace("[::ffff:10.77.0.1]", "10.77.0.1") == "10.77.0.1:29501"  # and nothing else
        assert re.fullmatch(r"rank 1 on .* \(10\.77\.0\.2\) .* 1\.5 seconds \(collective_timeout_s\) True", lines[2])
        end = time.monotonic() + 8
        while children(other.pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not children(other.pid)  # it has missed the engine, too
    finally:
        other.terminate()
        other.wait(10)


# -- torchrun ------------------------------------------------------------------------------------------------

LAUNCHED = """
    import sys
    from quire import LLM, SamplingParams
    with LLM("demo", tensor_parallel_size=2, distributed_executor_backend="external_launcher", threads=1,
             master_port=int(sys.argv[1]), token_file=sys.argv[2]) as llm:
        [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        print("tokens:", *output.outputs[0].token_ids)
"""


@pytest.mark.slow
def test_processes_of_torchrun_are_the_ranks(token: Path, tmp_path: Path) -> None:
    with LLM("demo", threads=1) as llm:
        [expected] = llm.generate([PROMPT], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LAUNCHED))
    ports = [str(free_port()), str(free_port())]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command = [sys.executable, *launcher, "--master-port", ports[0], str(script), ports[1], str(token)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("tokens:")]
    assert told == [" ".join(["tokens:", *map(str, expected.outputs[0].token_ids)])]  # the first process alone goes on


def test_what_torchrun_has_not_said_or_says_otherwise_is_named(token: Path) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    config = EngineConfig(model="demo", token_file=str(token), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="RANK is not set: start this program with torchrun"):
        placed(config, {})
    with pytest.raises(
        ConfigError, match=r"started 3 processes \(WORLD_SIZE\) for 2 ranks: 2 \(tensor_parallel_size\)"
    ):
        placed(config, {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"})
    first = placed(config, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"})
    assert (first.nnodes, first.master_addr) == (2, "10.0.0.1")
    with pytest.raises(ConfigError, match="external_launcher needs token_file"):
        EngineConfig(model="demo", **options)  # type: ignore[arg-type]


# -- Ray -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_starts_ranks_on_its_machines() -> None:
    ray = pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    with LLM("demo", threads=1) as llm:
        [expected] = llm.generate([PROMPT], LONG)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    options: dict[str, Any] = {"distributed_executor_backend": "ray", "master_port": free_port(), "threads": 1}
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        with LLM("demo", tensor_parallel_size=2, nnodes=2, **options) as llm:
            assert llm.generate([PROMPT], LONG)[0].outputs[0].token_ids == expected.outputs[0].token_ids
            assert any("Ray listens" in note for note in llm._engine.notes)
        with pytest.raises(ConfigError, match=r"nnodes=3: Ray did not have that many machines .* within 3 seconds"):
            LLM("demo", tensor_parallel_size=3 + 1, nnodes=3, join_timeout_s=3.0, **options)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_ray_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    with pytest.raises(ConfigError, match=r"needs Ray: .*; pip install '\.\[ray\]'"):
        LLM("demo", nnodes=2, **options)
    with pytest.raises(ConfigError, match="ray starts ranks on other machines, but nnodes=1"):
        LLM("demo", **options)
