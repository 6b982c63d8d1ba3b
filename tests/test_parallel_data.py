"""Replicas of attention that share experts: which of them has a request changes no bit, and none waits for requests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.core.lockstep import Lockstep
from quire.core.step import StepPlan, StepResult
from quire.engine import rank
from quire.engine.link import Computed, Link
from quire.errors import ConfigError, RankLostError, StepFailedError
from quire.runner.model_runner import STEP_FAILED, ModelRunner
from tests.oracle import save_checkpoint
from tests.test_determinism import alone, engine_of, prompts, run, setting
from tests.test_parallel_determinism import LARGE, SMALL
from tests.test_parallel_faults import ranks_of, steps

__all__ = ["alone", "setting"]  # fixtures

SHARED = {"enable_expert_parallel": True, "threads": 1, "check_invariants": True}
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["experts"], indirect=True)
@pytest.mark.parametrize(
    ("data", "tensor", "redundant"),
    [
        pytest.param(2, 1, 0, id="2 replicas"),
        pytest.param(3, 1, 4, id="3", marks=pytest.mark.slow),
        pytest.param(2, 2, 4, id="2 of 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_replicas_change_nothing(setting: dict[str, Any], alone: Any, data: int, tensor: int, redundant: int) -> None:
    """Nor do experts that move all the time."""
    more = {"enable_expert_parallel": True, "num_redundant_experts": redundant, "eplb_interval": 3}
    for switches in (SMALL, LARGE):
        with contextlib.closing(
            engine_of(setting, switches, data_parallel_size=data, tensor_parallel_size=tensor, **more)
        ) as made:
            order = list(range(len(prompts())))
            assert run(made, order) == alone, f"cold, {switches}"
            assert run(made, order[::-1], first_id=100, stagger=2) == alone, f"warm, {switches}"
            assert made.rank_stats()["expert_moves"] > 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("data") / "model", "qwen3_moe", num_hidden_layers=2))


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=40, seed=number, temperature=number % 2, logprobs=2, ignore_eos=True)


def outcomes(folder: str, **options: Any) -> list[Any]:
    with LLM(folder, threads=1, check_invariants=True, **options) as llm:
        outputs = llm.generate([[5, 6, 7, n % 3] for n in range(7)], [params(n) for n in range(7)])
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        pytest.param("qwen3_moe", {"async_scheduling": True}, marks=pytest.mark.slow),
        ("deepseek_v3", {"speculative_config": NGRAM, "kv_cache_dtype": "int8"}),
        pytest.param(
            "mixtral",
            {"quantization": "int4", "speculative_config": NGRAM},
            marks=pytest.mark.slow,
        ),
        pytest.param("deepseek_v2", {"quantization": "int8", "async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"cpu_kernels": "torch"}, marks=pytest.mark.slow),
    ],
)
def test_models_and_options(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = str(save_checkpoint(tmp_path / "model", architecture, num_hidden_layers=2))
    one = outcomes(folder, **options)
    assert outcomes(folder, **options, enable_expert_parallel=True, data_parallel_size=2, eplb_interval=4) == one


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_one_request_alone_needs_no_other(rounds: int, folder: str) -> None:
    """Replicas without requests take part in every step, hundreds of them, and again after a rest."""
    alone = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    short = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    with LLM(folder, **SHARED, data_parallel_size=2) as llm, LLM(folder, threads=1) as one:
        expected = one.generate([[5, 6, 7]], alone)[0].outputs[0].token_ids
        for _ in range(rounds):
            assert llm.generate([[5, 6, 7]], alone)[0].outputs[0].token_ids == expected
        assert llm.stats.steps > 390 * rounds
        assert llm.generate([[5, 6, 7]], short)[0].outputs[0].token_ids == expected[:9]


def test_requests_go_where_there_is_least_to_do(folder: str) -> None:
    with LLM(folder, **SHARED, data_parallel_size=2) as llm:
        both = llm._engine.scheduler
        assert isinstance(both, Lockstep)
        for length in (450, 20, 20, 20):  # with DECODING for each, 706 and 276
            llm.add_request([7] * length, LONG)
        assert [len(each.requests) for each in both.schedulers] == [1, 3]
        while not llm._engine.idle:
            llm.step()
        llm.add_request([7] * 440, LONG)  # most of it is cached, and all are idle
        assert [len(each.requests) for each in both.schedulers] == [1, 0]
        assert llm.stats.num_blocks == 2 * llm._engine.memory_plan.num_usable
        outputs = llm.generate([[3, n] for n in range(20)], LONG)
        assert len(outputs) == 20 and llm.stats.running == llm.stats.waiting == 0


# -- failures ----------------------------------------------------------------------------------------------


@pytest.fixture
def two(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SHARED, data_parallel_size=2, collective_timeout_s=2.0) as llm:
        yield llm


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_is_named(two: LLM, number: signal.Signals) -> None:
    two.add_request([5, 6, 7], LONG)
    steps(two, 5)
    os.kill(ranks_of(two)[0].pid, number)
    begin = time.monotonic()
    with pytest.raises(RankLostError, match=r"^rank 1 (died \(killed by SIGKILL\)|has not answered for 2 s)"):
        steps(two, 50)
    assert time.monotonic() - begin < 8


@pytest.mark.parametrize("replica", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_who_makes_steps_fail_ends_alone_on_whichever_replica(folder: str, replica: int) -> None:
    """The failure is of one rank, and the others give the step up: it is not known whose it was before it is tried."""
    prompts = [[5, n] for n in range(6)]
    with LLM(folder, threads=1) as one:
        expected = [output.outputs[0].token_ids for output in one.generate(prompts, LONG)]
    culprit = 2 + replica
    with LLM(folder, **SHARED, data_parallel_size=2) as llm:
        outputs = failing(llm, prompts, culprit)
        assert [choice.finish_reason for choice in outputs] == ["error" if n == culprit else "length" for n in range(6)]
        assert outputs[culprit].error == STEP_FAILED
        assert [c.token_ids for c in outputs if c.error is None] == [e for n, e in enumerate(expected) if n != culprit]


def failing(llm: LLM, prompts: list[list[int]], culprit: int) -> list[Any]:
    """What comes of prompts, one of which makes steps fail on the first rank, whichever replica has it."""
    compute, engine = ModelRunner._launch, llm._engine
    numbers = {}

    def fails(self: ModelRunner, plan: Any) -> Any:
        if any(span.request == numbers.get("culprit") for part in last for span in part.spans):
            raise RuntimeError("planted")
        return compute(self, plan)

    last: list[Any] = []
    schedule = engine.scheduler.schedule

    def noting(now: float) -> Any:
        plan = schedule(now)
        last[:] = plan.plans if plan else []
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_launch", fails)
        patch.setattr(engine.scheduler, "schedule", noting)
        ids = [llm.add_request(prompt, LONG) for prompt in prompts]
        numbers["culprit"] = sorted(engine.scheduler.requests)[culprit]
        found = {}
        while not llm._engine.idle:
            found |= {output.request_id: output for output in llm.step()}
        return [found[id].outputs[0] for id in ids]


def test_a_rank_says_what_came_of_each_plan() -> None:
    """Also that it could not compute one: the first rank waits for an answer to each."""
    ours, theirs = socket.socketpair()
    runner: Any = SimpleNamespace(launch=lambda plan: SimpleNamespace(wait=lambda: StepResult(plan.number, [])))
    with ours, theirs:
        rank._answer(runner, StepPlan(3, []), Link(theirs))
        runner.launch = {}.__getitem__
        with pytest.raises(TypeError):
            rank._answer(runner, StepPlan(4, []), Link(theirs))
        link = Link(ours)
        good, bad = (msgspec.msgpack.decode(link.receive() or b"", type=Computed) for _ in range(2))
    assert (good.number, good.result) == (3, StepResult(3, [])) and not good.error
    assert (bad.number, bad.result) == (4, None) and bad.error.startswith("TypeError")


def test_results_of_other_replicas_are_waited_for_and_old_ones_dropped(two: LLM) -> None:
    found = two._engine._ranks
    assert found is not None
    [computed] = found.computed
    for answer in (Computed(5, None, "old"), Computed(7, StepResult(7, [])), Computed(8, None, "planted")):
        computed.put(answer)
    assert found.results(7) == [StepResult(7, [])]
    with pytest.raises(StepFailedError, match="planted"):
        found.results(8)
    begin = time.monotonic()
    with pytest.raises(RankLostError, match=r"^rank 1 has not answered for 2 s"):
        found.results(9)  # it met the others, and hangs before it tells
    assert 1.5 < time.monotonic() - begin < 8
    with pytest.raises(RankLostError, match="rank 1"):
        two._engine.check_ranks()


def test_what_cannot_be_is_refused_by_name(folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^data_parallel_size=2 needs a server.* --data-parallel-size 2'.* start 2 programs"
    ):
        LLM(folder, data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"^enable_expert_parallel=True, but the model has no experts"):
        LLM("demo", data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"the 8 experts of a layer .* among 3 ranks; allowed: 1, 4"):
        LLM(folder, data_parallel_size=3, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="data_parallel_size=0"):
        LLM(folder, data_parallel_size=0)
    with LLM(folder, data_parallel_size=1, threads=1) as llm:
        assert llm._engine._ranks is None
