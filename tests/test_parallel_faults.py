"""Ranks that die, hang or fail: one cause that names the rank, in time, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.errors import ConfigError, RankLostError
from quire.runner.model_runner import STEP_FAILED, ModelRunner
from tests.oracle import save_checkpoint

LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7]


def ranks_of(llm: LLM) -> list[subprocess.Popen[bytes]]:
    found = llm._engine._ranks
    assert found is not None
    return found._processes


def steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_is_killed_ends_the_step_at_once_and_is_named(overlap: bool) -> None:
    with LLM("demo", tensor_parallel_size=2, threads=1, async_scheduling=overlap) as llm:
        llm.add_request(PROMPT, LONG)
        steps(llm, 5)
        [other] = ranks_of(llm)
        os.kill(other.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(RankLostError, match=r"^rank 1 died \(killed by SIGKILL\)$") as caught:
            steps(llm, 50)
        assert time.monotonic() - begin < 5
        assert caught.value.outside
        with pytest.raises(RankLostError):
            llm.step()
    assert other.poll() == -signal.SIGKILL


def test_a_rank_that_hangs_is_given_up_after_the_deadline() -> None:
    with LLM("demo", tensor_parallel_size=4, threads=1, collective_timeout_s=0.7) as llm:
        llm.add_request(PROMPT, LONG)
        steps(llm, 5)
        others = ranks_of(llm)
        os.kill(others[1].pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(RankLostError, match=r"^rank 2 has not answered for 0.7 seconds \(collective_timeout_s\)$"):
            steps(llm, 50)
        assert 0.5 < time.monotonic() - begin < 8
    assert all(other.poll() is not None for other in others)


def test_a_closed_engine_leaves_no_rank_behind() -> None:
    llm = LLM("demo", tensor_parallel_size=2, threads=1)
    llm.generate([PROMPT], SamplingParams(max_tokens=3))
    [other] = ranks_of(llm)
    begin = time.monotonic()
    llm.close()
    assert other.poll() == 0
    assert time.monotonic() - begin < 1.5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_the_process_that_started_them(how: int) -> None:
    script = """
        from quire import LLM, SamplingParams
        llm = LLM("demo", tensor_parallel_size=2, threads=1)
        print(llm._engine._ranks._processes[0].pid, flush=True)
        llm.generate([[5, 6]] * 4, SamplingParams(max_tokens=400, ignore_eos=True, temperature=0))
        while True:
            llm.generate([[5, 6]] * 4, SamplingParams(max_tokens=400, ignore_eos=True, temperature=0))
    """
    first = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    other = int(first.stdout.readline())
    time.sleep(0.2)
    first.send_signal(how)
    first.wait(10)
    end = time.monotonic() + 5
    while Path(f"/proc/{other}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{other}").exists()


def test_a_step_that_fails_on_the_first_rank_alone_ends_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others give it up, too; its requests are computed again in halves, and go on with the same tokens."""
    with LLM("demo", threads=1) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate([[5, 6, n] for n in range(4)], LONG)]
    launch = ModelRunner._compute_at_once
    poisoned = 2

    def compute(self: ModelRunner, spans: Any, drafts: Any) -> Any:
        if any(span.request == poisoned and span.start > 20 for span in spans):
            raise MemoryError("none left")
        return launch(self, spans, drafts)

    with LLM("demo", tensor_parallel_size=2, threads=1) as llm:
        monkeypatch.setattr(ModelRunner, "_compute_at_once", compute)
        outputs = llm.generate([[5, 6, n] for n in range(4)], LONG)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length", "error", "length"]
        assert outputs[2].outputs[0].error == STEP_FAILED
        assert [o.outputs[0].token_ids for o in outputs if o.outputs[0].error is None] == [
            expected[i] for i in (0, 1, 3)
        ]


def test_an_interrupted_step_is_given_up_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = ModelRunner._compute_at_once
    interrupts = iter([False] * 7 + [True] + [False] * 1000)

    def compute(self: ModelRunner, spans: Any, drafts: Any) -> Any:
        if next(interrupts):
            raise KeyboardInterrupt
        return launch(self, spans, drafts)

    with LLM("demo", threads=1) as llm:
        [expected] = llm.generate([PROMPT], LONG)
    with LLM("demo", tensor_parallel_size=2, threads=1) as llm:
        monkeypatch.setattr(ModelRunner, "_compute_at_once", compute)
        llm.add_request(PROMPT, LONG)
        with pytest.raises(KeyboardInterrupt):
            steps(llm, 20)
        outputs = []
        while not llm.idle:
            outputs += llm.step()
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_plan_that_a_rank_does_not_read_in_time_is_no_reason_to_wait_for_ever() -> None:
    with LLM("demo", tensor_parallel_size=2, threads=1, collective_timeout_s=0.5) as llm:
        [other] = ranks_of(llm)
        os.kill(other.pid, signal.SIGSTOP)
        engine: Engine = llm._engine
        with pytest.raises(RankLostError, match="rank 1 has not answered"):
            for _ in range(100_000):
                engine.executor._ranks.send(b"x" * 10_000)  # type: ignore[attr-defined]


def test_ranks_that_the_model_cannot_have_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 does not divide the model's 4 .*: 1, 2, 4$"):
        LLM("demo", tensor_parallel_size=3)
    for wrong in (0, -1, 257, "2", 2.0, True):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            LLM("demo", tensor_parallel_size=wrong)
    folder = save_checkpoint(tmp_path / "latent", "deepseek_v3", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .*allowed: 1, 2, 4"):
        LLM(str(folder), tensor_parallel_size=3)


def test_an_engine_that_cannot_start_leaves_no_rank_behind() -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("demo", tensor_parallel_size=2, threads=1, max_model_len=10**6)
    assert caught.value is not None  # its traceback holds all that there was
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    assert not [pid for pid in children if "quire.engine.rank" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_ranks_outlive_the_thread_that_started_them() -> None:
    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(LLM("demo", tensor_parallel_size=2, threads=1)))
    thread.start()
    thread.join()
    with made[0] as llm:
        assert llm.generate([PROMPT], SamplingParams(max_tokens=3))[0].finished


def test_what_is_wrong_on_another_rank_is_told() -> None:
    with pytest.raises(ConfigError, match="kernels for"):
        LLM("demo", tensor_parallel_size=2, cpu_kernels="neon")
