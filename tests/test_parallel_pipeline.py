"""Pipelines: each rank has some of the layers, several steps are on their way, and the tokens are those of one rank."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.step import StepPlan
from quire.engine.ranks import PipelineExecutor
from quire.errors import ConfigError, RanksDisagreeError, StepGivenUpError
from quire.models.model import layers_of
from quire.models.quantize import quantize_folder
from quire.ops.cpu.group import SharedGroup
from quire.runner.model_runner import STEP_FAILED
from quire.runner.pipeline_runner import PipelineRunner
from tests.oracle import save_checkpoint
from tests.test_determinism import alone, engine_of, prompts, run, setting
from tests.test_parallel_determinism import LARGE, SMALL
from tests.test_parallel_faults import LONG
from tests.test_parallel_group import all_of, ranks

__all__ = ["alone", "setting"]  # fixtures

FAST = ("experts",)
SLOW = (
    "bfloat16",
    "int8 cache",
    "windows in some layers",
    "float32",
    "sliding window",
    "int4 weights",
    "torch",
    "latent attention",
    "fp8 cache",
)


@pytest.mark.parametrize(
    "setting", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)], indirect=True
)
def test_stages_change_nothing(setting: dict[str, Any], alone: Any) -> None:
    for switches in (SMALL, LARGE):
        with contextlib.closing(engine_of(setting, switches, pipeline_parallel_size=2)) as made:
            order = list(range(len(prompts())))
            assert run(made, order) == alone, f"cold, {switches}"
            assert run(made, order[::-1], first_id=100, stagger=2) == alone, f"warm, {switches}"
            assert made.stats.cached_tokens > 0
            assert (made.stats.preemptions > 0) == switches.small_pool


@pytest.mark.slow
def test_any_number_of_stages_with_filters_masks_and_scores_of_prompts() -> None:
    texts = ["def fib(n):\n", "import os\nimport sys\n\nclass Parser:\n", "# A list\nx = ["]
    params = [
        SamplingParams(max_tokens=40, seed=n, temperature=t, logprobs=2, ignore_eos=True, **more)
        for n, (t, more) in enumerate(
            [
                (0.0, {"prompt_logprobs": 1, "bad_words": ["return"]}),
                (0.8, {"top_p": 0.9, "repetition_penalty": 1.2}),
                (1.0, {"min_tokens": 3, "logit_bias": {5: 1.0}, "n": 2}),
            ]
        )
    ]
    found = []
    for stages in (1, 2, 3):
        with LLM("demo", pipeline_parallel_size=stages, threads=1) as llm:
            outputs = llm.generate(texts, params)
            found.append([(o.prompt_logprobs, [(c.token_ids, c.logprobs) for c in o.outputs]) for o in outputs])
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["bfloat16", pytest.param("latent attention", marks=pytest.mark.slow)], indirect=True
)
def test_stages_whose_layers_are_shared_change_nothing(setting: dict[str, Any], alone: Any) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with contextlib.closing(engine_of(setting, SMALL, **sizes)) as made:
        order = list(range(len(prompts())))
        assert run(made, order) == alone
        assert run(made, order[::-1], first_id=100, stagger=2) == alone


@pytest.mark.parametrize("setting", ["bfloat16"], indirect=True)
@pytest.mark.parametrize("sizes", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)])
def test_drafts_that_are_looked_up_change_nothing(setting: dict[str, Any], alone: Any, sizes: dict[str, int]) -> None:
    sizes = {"pipeline_parallel_size": 2, **sizes}
    spec = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}
    with contextlib.closing(engine_of(setting, SMALL, speculative_config=spec, **sizes)) as made:
        order = list(range(len(prompts())))
        assert run(made, order) == alone
        assert run(made, order[::-1], first_id=100, stagger=2) == alone
        assert made.stats.accepted and made.stats.drafted > made.stats.accepted and made.stats.preemptions


def test_the_layers_of_the_stages() -> None:
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            own = [layers_of(stage, stages, layers) for stage in range(stages)]
            assert [layer for part in own for layer in part] == list(range(layers))
            sizes = [len(part) for part in own]
            assert max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes)


@pytest.mark.slow
def test_each_stage_has_its_layers_alone(tmp_path: Path) -> None:
    """Of the weights, and of the KV of a token."""
    save_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    quantize_folder(tmp_path / "model", tmp_path / "int4", "int4")
    for folder, stages_of_it in (("model", 4), ("int4", 2)):
        found, weights, kv = [], [], []
        for stages in (1, stages_of_it):
            with LLM(str(tmp_path / folder), pipeline_parallel_size=stages, threads=1) as llm:
                [output] = llm.generate([[5, 6, 7, 8] * 9], SamplingParams(max_tokens=20, temperature=0.0, logprobs=2))
                found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
                weights.append(llm.model.weight_bytes)
                kv.append(llm._engine.memory_plan.kv_bytes_per_token)
        assert found[0] == found[1]
        assert kv[1] == kv[0] // stages_of_it
        assert weights[1] < (1 / stages_of_it + 0.1) * weights[0]


class RunnerInTwoSlots:
    """What a pipeline of two stages computes with: a step that enters waits until it may."""

    model = SimpleNamespace(stages=2)

    def __init__(self) -> None:
        self.may_enter = [threading.Event() for _ in range(3)]

    def launch(self, plan: StepPlan) -> Any:
        assert self.may_enter[plan.number].wait(60.0)
        return SimpleNamespace(wait=lambda: plan.number)

    def drain(self) -> None:
        """A slot without a plan."""


def test_with_overlap_a_step_is_through_while_the_next_but_one_is_still_computed() -> None:
    runner = RunnerInTwoSlots()
    executor = PipelineExecutor(cast(Any, runner), cast(Any, MagicMock()), True)
    pending = [executor.submit(StepPlan(number, [])) for number in range(3)]
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(pending[0]()), daemon=True)
    waiting.start()
    for entering in runner.may_enter[:2]:
        entering.set()
    waiting.join(30.0)
    assert found == [0]
    runner.may_enter[2].set()
    assert [each() for each in pending[1:]] == [1, 2]
    executor.close()


def test_as_many_steps_are_on_their_way_as_there_are_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    drains = []
    launch, drain = PipelineRunner.launch, PipelineRunner.drain

    def launched(self: PipelineRunner, plan: StepPlan) -> Any:
        step = launch(self, plan)
        seen.append((len(plan.spans), sum(each is not None for each in self._flow)))
        return step

    monkeypatch.setattr(PipelineRunner, "launch", launched)
    monkeypatch.setattr(PipelineRunner, "drain", lambda self: (drains.append(1), drain(self))[1])
    with LLM("demo", pipeline_parallel_size=3, threads=1, max_num_seqs=9) as llm:
        llm.generate([[5, 6, n] for n in range(9)], SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))
        runner = llm._engine.executor._runner  # type: ignore[attr-defined]
        assert len(runner.busy) == 3 and all(0 < busy < runner.seconds for busy in runner.busy)
    middle = seen[20:-20]
    assert {spans for spans, _ in middle} == {3}, "decodes are dealt out over the stages"
    assert {flow for _, flow in middle} == {2}, "and what enters is the third step on its way"
    assert len(drains) < 10, "nothing stands still while there is something to do"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fewer_requests_than_stages_wait_for_their_own_tokens_alone(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap no longer: a step is planned before they are known, and begins with them."""
    slots = []
    slot = PipelineRunner._slot
    monkeypatch.setattr(PipelineRunner, "_slot", lambda self, step: (slots.append(step), slot(self, step))[1])
    with LLM("demo", pipeline_parallel_size=3, threads=1, async_scheduling=overlap) as llm:
        llm.generate([[5, 6], [7, 8]], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    assert len(slots) <= 3 * 40 + 4, "a token of each every three slots"


def test_what_cannot_be_a_pipeline_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^pipeline_parallel_size=2 with enable_expert_parallel and data_parallel_size=2 is not supported",
    ):
        LLM("demo", pipeline_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=200 is more than the model's \d+ layers; lower it"):
        LLM("demo", pipeline_parallel_size=200)
    for wrong in (0, -1, 257, "2", 2.0, True):
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            EngineConfig(model="demo", pipeline_parallel_size=wrong)  # type: ignore[arg-type]


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "error", "more"),
    [
        ("_through_layers", MemoryError, {"async_scheduling": True}),
        *(
            pytest.param(where, error, more, marks=pytest.mark.slow)
            for where in ("_slot", "_pass_on", "_sample_all", "_through_layers")
            for error in (KeyboardInterrupt, MemoryError)
            for more in (
                {},
                {"async_scheduling": True},
                {"tensor_parallel_size": 2},
                {"speculative_config": {"method": "ngram", "adaptive": False}},
            )
        ),
    ],
)
def test_a_slot_that_fails_on_one_rank_is_given_up_by_all(
    where: str, error: type[BaseException], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is on its way is computed again, and gets the same tokens."""
    prompts = [[5, 6, n] for n in range(4)]
    with LLM("demo", threads=1) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, LONG)]
    call, luck = getattr(PipelineRunner, where), random.Random(1)

    def fails(self: PipelineRunner, *given: Any) -> Any:
        if luck.random() < 0.03:
            raise error("none left")
        return call(self, *given)

    failed = 0
    with LLM("demo", pipeline_parallel_size=2, threads=1, **more) as llm:
        monkeypatch.setattr(PipelineRunner, where, fails)
        names = [llm.add_request(prompt, LONG) for prompt in prompts]
        outputs: dict[str, Any] = {}
        while not llm.idle:
            try:
                outputs |= {output.request_id: output for output in llm.step() if output.finished}
            except KeyboardInterrupt:
                failed += 1
        found = [outputs[name].outputs[0] for name in names]
        assert failed > 2 or error is MemoryError
        assert all(c.token_ids == e or c.error == STEP_FAILED for c, e in zip(found, expected, strict=True))
        assert error is MemoryError or not any(choice.error for choice in found)
        monkeypatch.setattr(PipelineRunner, where, call)
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, LONG)] == expected


def test_after_a_slot_that_failed_one_without_a_plan_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank may have asked for it before it knew; the rows that it would compute with never came."""
    with LLM("demo", pipeline_parallel_size=2, threads=1) as llm:
        runner = llm._engine.executor._runner  # type: ignore[attr-defined]
        slots: list[Any] = []
        monkeypatch.setattr(runner, "_slot", slots.append)
        runner.drain()
        assert slots == [None]
        monkeypatch.setattr(runner, "_entered", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.launch(StepPlan(0, []))
        runner.drain()
        assert slots == [None]


def test_a_request_that_makes_steps_fail_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5, 6, n] for n in range(4)]
    with LLM("demo", threads=1) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, LONG)]
    call = PipelineRunner._through_layers

    def fails(self: PipelineRunner, step: Any) -> Any:
        if any(span.request == 2 and span.start > 20 for span in step.plan.spans):
            raise MemoryError("none left")
        return call(self, step)

    with LLM("demo", pipeline_parallel_size=2, threads=1) as llm:
        monkeypatch.setattr(PipelineRunner, "_through_layers", fails)
        outputs = [output.outputs[0] for output in llm.generate(prompts, LONG)]
        assert [choice.finish_reason for choice in outputs] == ["length", "length", "error", "length"]
        assert [c.token_ids for c in outputs if c.error is None] == [expected[n] for n in (0, 1, 3)]


# -- the exchange ------------------------------------------------------------------------------------------


def test_every_rank_finds_what_all_have_brought() -> None:
    rnd = random.Random(0)
    with ranks(3, matrix_bytes=8192) as groups:
        for _ in range(50):
            sizes = [2 * rnd.randrange(1200) for _ in range(3)]
            parts = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]

            def exchange(group: SharedGroup, parts: Any = parts, sizes: Any = sizes) -> Any:
                cut = sizes[group.rank] // 2
                own = [parts[group.rank][:cut], parts[group.rank][cut:]]
                return [part.clone() for part in group.exchange(own)]

            for found in all_of(groups, exchange):
                assert all(map(torch.equal, found, parts))


def test_stages_that_expect_other_rows_are_found_out() -> None:
    with ranks(2) as groups:
        own = torch.zeros(8, dtype=torch.uint8)
        answers = all_of(groups, lambda group: group.exchange([own], word=group.rank))
        assert all(isinstance(answer, RanksDisagreeError) for answer in answers)
        with pytest.raises(ValueError, match="more rows than the ranks have room for"):
            groups[0].exchange([torch.zeros(10**6)])
        groups[0].give_up(5)
        assert all(isinstance(e, StepGivenUpError) for e in all_of(groups, lambda g: g.exchange([own])))


def test_ranks_that_bring_nothing_take_part() -> None:
    with ranks(3) as groups:
        for found in all_of(groups, lambda g: [part.tolist() for part in g.exchange([torch.ones(1)] * g.rank)]):
            assert [len(part) for part in found] == [0, 4, 8]
        assert [group.counts for group in groups] == [(1, 12), (1, 8), (1, 4)]
