"""Ranks that die, hang or fail: one cause that names the rank, in time, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
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
from quire.core.step import StepPlan
from quire.engine import ranks as ranks_module
from quire.engine.engine import Engine
from quire.errors import ConfigError, RankLostError
from quire.runner.model_runner import STEP_FAILED, ModelRunner
from quire.speculate.ngram import NgramProposer
from tests.forks import in_a_fork
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


def test_the_end_of_a_fork_of_the_first_rank_ends_no_other() -> None:
    with LLM("demo", tensor_parallel_size=2, threads=1) as llm:
        [expected] = llm.generate([PROMPT], SamplingParams(max_tokens=3, temperature=0.0))
        found = llm._engine._ranks
        assert found is not None
        assert in_a_fork(found.close) == "None"
        assert llm.generate([PROMPT], SamplingParams(max_tokens=3, temperature=0.0))[0].outputs == expected.outputs


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "width", "rank", "overlap", "number"),
    [
        (2, 1, 1, True, signal.SIGKILL),
        (2, 2, 3, False, signal.SIGKILL),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (3, 1, 2, False, signal.SIGKILL),
                (3, 1, 2, False, signal.SIGSTOP),
                (2, 1, 1, True, signal.SIGSTOP),
                (2, 2, 1, False, signal.SIGKILL),
                (2, 2, 1, False, signal.SIGSTOP),
                (2, 2, 2, False, signal.SIGKILL),
                (2, 2, 2, False, signal.SIGSTOP),
                (2, 2, 3, False, signal.SIGSTOP),
            )
        ),
    ],
)
def test_a_rank_of_a_pipeline_that_dies_or_hangs_is_named(
    stages: int, width: int, rank: int, overlap: bool, number: signal.Signals
) -> None:
    """Also where one that shares its layers waits for it, and the others for that one."""
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": width}
    with LLM("demo", **sizes, threads=1, collective_timeout_s=1.5, async_scheduling=overlap) as llm:
        llm.add_request(PROMPT, LONG)
        steps(llm, 5)
        os.kill(ranks_of(llm)[rank - 1].pid, number)
        begin = time.monotonic()
        how = r"(died \(killed by SIGKILL\)|has not answered for 1.5 s)"
        with pytest.raises(RankLostError, match=f"^rank {rank} {how}"):
            steps(llm, 50)
        assert time.monotonic() - begin < 8


@pytest.mark.usefixtures("spawned_ranks")
def test_a_closed_engine_leaves_no_rank_behind() -> None:
    llm = LLM("demo", tensor_parallel_size=2, threads=1)
    llm.generate([PROMPT], SamplingParams(max_tokens=3))
    [other] = ranks_of(llm)
    begin = time.monotonic()
    llm.close()
    assert other.poll() == 0
    assert time.monotonic() - begin < 1.5


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
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

    def compute(self: ModelRunner, spans: Any, *rest: Any, **named: Any) -> Any:
        if any(span.request == poisoned and span.start > 20 for span in spans):
            raise MemoryError("none left")
        return launch(self, spans, *rest, **named)

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

    def compute(self: ModelRunner, spans: Any, *rest: Any, **named: Any) -> Any:
        if next(interrupts):
            raise KeyboardInterrupt
        return launch(self, spans, *rest, **named)

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


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_interrupt_between_sending_a_plan_and_computing_it(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have begun the step, which the first rank never does: they give it up, and nothing is mixed up."""
    with LLM("demo", threads=1) as llm:
        [expected] = llm.generate([PROMPT], LONG)
    with LLM("demo", tensor_parallel_size=2, threads=1, async_scheduling=overlap) as llm:
        own = llm._engine.executor._own  # type: ignore[attr-defined]
        submit, luck = own.submit, random.Random(1)

        def interrupted(plan: StepPlan) -> Any:
            if luck.random() < 0.1:
                raise KeyboardInterrupt
            return submit(plan)

        monkeypatch.setattr(own, "submit", interrupted)
        llm.add_request(PROMPT, LONG)
        outputs, interrupts = [], 0
        while not llm.idle:
            try:
                outputs += llm.step()
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts > 3
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("what", ["propose", pytest.param("follow", marks=pytest.mark.slow)])
def test_a_proposer_that_fails_on_one_rank_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with other drafts would compute other rows: the step is given up, and computed again."""
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8]]
    with LLM("demo", threads=1) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, LONG)]
    call, luck = getattr(NgramProposer, what), random.Random(1)

    def fails(self: NgramProposer, *given: Any) -> Any:
        if luck.random() < 0.1:
            raise ValueError("a bug in the proposer")
        return call(self, *given)

    options = {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "adaptive": False}}
    with LLM("demo", threads=1, **options) as llm:
        monkeypatch.setattr(NgramProposer, what, fails)
        outputs = llm.generate(prompts, LONG)
        for output, tokens in zip(outputs, expected, strict=True):
            [choice] = output.outputs
            assert choice.token_ids == tokens if choice.error is None else choice.error == STEP_FAILED
        monkeypatch.setattr(NgramProposer, what, call)
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, LONG)] == expected


def test_a_rank_that_dies_while_nothing_is_computed_is_missed() -> None:
    with LLM("demo", tensor_parallel_size=2, threads=1) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=3))
        llm._engine.check_ranks()
        ranks_of(llm)[0].kill()
        end = time.monotonic() + 5
        with pytest.raises(RankLostError, match=r"^rank 1 died \(killed by SIGKILL\)$"):
            while time.monotonic() < end:
                llm._engine.check_ranks()
                time.sleep(0.01)


def test_who_is_to_blame_for_a_rank_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody, where it was killed from outside; but the system kills, too, whoever takes all of its memory."""
    monkeypatch.setattr(ranks_module, "out_of_memory_kills", lambda: 3)
    with LLM("demo", tensor_parallel_size=3 - 1, threads=1) as llm:
        found = llm._engine._ranks
        assert found is not None
        first = found.explained(0)
        assert str(first) == "rank 0 did not answer the others for 30 seconds" and first.outside
        ranks_of(llm)[0].kill()
        assert found.explained(1).outside
        monkeypatch.setattr(ranks_module, "out_of_memory_kills", lambda: 4)
        killed = found.explained(1)
        assert str(killed) == "rank 1 died (killed by SIGKILL: the system is out of memory)" and not killed.outside


def test_ranks_end_with_an_engine_that_was_not_closed() -> None:
    llm = LLM("demo", tensor_parallel_size=2, threads=1)
    [other] = ranks_of(llm)
    del llm
    gc.collect()
    assert other.wait(5) == 0


@pytest.mark.slow
def test_what_ranks_share_is_part_of_the_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runner.start.free_memory", lambda: 1000 * 2**20)
    rows, kv = [], []
    for tokens in (64, 4096):
        options = {"tensor_parallel_size": 2, "max_num_batched_tokens": tokens, "max_num_seqs": 16}
        with LLM("demo", threads=1, **options) as llm:
            plan = llm._engine.memory_plan
            rows += [value for name, value in plan.table() if name == "ranks"]
            kv.append(plan.shared)
            assert plan.kv_bytes + plan.activations <= (1000 * 2**20 - plan.shared) / 2
    assert rows[0].startswith("2; sizes are those of each, beside ") and rows[0] != rows[1]
    assert kv[0] < kv[1]


def test_a_plan_that_a_rank_does_not_read_in_time_is_no_reason_to_wait_for_ever() -> None:
    with LLM("demo", tensor_parallel_size=2, threads=1, collective_timeout_s=0.5) as llm:
        [other] = ranks_of(llm)
        os.kill(other.pid, signal.SIGSTOP)
        engine: Engine = llm._engine
        with pytest.raises(RankLostError, match="rank 1 has not answered"):
            for _ in range(100_000):
                engine.executor._ranks.send(b"x" * 10_000)  # type: ignore[attr-defined]


def test_ranks_that_the_model_cannot_have_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=3: so many ranks cannot share the model's 4 .*: 1, 2, 4$"
    ):
        LLM("demo", tensor_parallel_size=3)
    for wrong in (0, -1, 257, "2", 2.0, True):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            LLM("demo", tensor_parallel_size=wrong)
    folder = save_checkpoint(tmp_path / "latent", "deepseek_v3", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=5: .*allowed: 1, 2, 3, 4$"):
        LLM(str(folder), tensor_parallel_size=5)


@pytest.mark.usefixtures("spawned_ranks")
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
