"""Steps on a GPU that computes nothing: all tensors lie where they must, and no launch looks at a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.config import EngineConfig
from quire.core.pooling import PoolingParams
from quire.core.sampling_params import SamplingParams
from quire.core.step import DRAFT, FROM_PREVIOUS, RequestInfo, Span, SpanResult, StepPlan
from quire.engine import loading
from quire.layers.rotary import RotaryEmbedding
from quire.ops import elementwise
from quire.ops.triton.kernels import TritonKernels
from quire.parallel.group import OneRank
from quire.runner import edits
from quire.runner.device import Device
from quire.runner.device_forward import DeviceForward
from quire.runner.memory_plan import Measured
from quire.runner.model_runner import LaunchedStep, ModelRunner
from quire.runner.pooling import launch_sum
from quire.runner.sampler import Sampled, Sampler
from quire.runner.start import planned, start_runner
from quire.speculate import drafting
from tests import fake_gpu
from tests.fake_gpu import GPU, FakeGpu, gpu  # noqa: F401  # a fixture
from tests.oracle import save_checkpoint
from tests.test_models_families import FAMILIES

PROMPT = [5, 6, 7] * 7
BLOCKS = 6
"""Of each request."""
PARAMS = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=1, logprobs=3, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, seed=2, logit_bias={5: 1.0}, allowed_token_ids=(3, 4, 5), min_tokens=2),
    SamplingParams(temperature=0.7, seed=3, prompt_logprobs=2),
)
INT8: dict[str, Any] = {"quantization": "int8", "kv_cache_dtype": "fp8"}
INT4: dict[str, Any] = {"quantization": "int4", "kv_cache_dtype": "int8"}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}


def runner_of(gpu: FakeGpu, folder: Path, group: OneRank | None = None, **options: Any) -> ModelRunner:  # noqa: F811
    """Of a checkpoint, as an engine makes it."""
    model, speculation, config = loaded(gpu, folder, group or OneRank(), **options)
    plan = planned(config, model, gpu, Measured(60 * 2**30, 2**20), speculation)
    return start_runner(config, model, gpu, plan, 1, lambda phase, share: None, speculation).runner


def loaded(gpu: FakeGpu, folder: Path, group: OneRank, **options: Any) -> tuple[Any, Any, EngineConfig]:  # noqa: F811
    """The model and what drafts for it, as a rank loads them."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 96, "num_kv_blocks": 40}
    config = EngineConfig.from_options({"model": str(folder), "device": "cpu", **sizes, **options})
    kernels = TritonKernels(GPU, config.deterministic)
    with fake_gpu.loading(), mock.patch.object(loading, "choose_kernels", lambda *args: kernels):
        return *loading.load(config, folder, gpu, group, None, lambda phase, share: None), config


def launch_some(runner: ModelRunner, decoded: Callable[[int], tuple[int, ...]]) -> None:
    """Prompts, and steps in which each request has the tokens that `decoded` says."""
    first = StepPlan(0, [])
    for number, params in enumerate(PARAMS):
        info = RequestInfo(number, params.resolved(), 0, PROMPT)
        span = Span(number, 0, list(PROMPT), num_sampled=1)
        own = range(1 + BLOCKS * number, 1 + BLOCKS * (number + 1))
        span.blocks, span.table_start = [list(own)] * len(runner.kv), 0
        span.copies = [(0, 1, own.stop - 1, 5)] if number else []
        span.targets = PROMPT[1:] if params.prompt_logprobs is not None else []
        first.spans.append(span)
        first.started.append(info)
    runner.launch(first)
    for step in range(1, 4):
        tokens = decoded(step)
        spans = [
            Span(number, len(PROMPT) + step - 1, list(tokens), len(tokens), start_follows=len(tokens) > 1 < step)
            for number in range(len(PARAMS))
        ]
        runner.launch(StepPlan(step, spans))


@pytest.mark.quick("qwen3-options0")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3_moe", INT8),
        ("deepseek_v32", {}),
        ("qwen3_next", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3", {"deterministic": False}),
                ("qwen3", {"cuda_graphs": "off"}),
                ("qwen3", INT8),
                ("qwen3", INT4),
                ("qwen3_moe", {}),
                ("gpt_oss", {}),
                ("deepseek_v2", {}),
                ("deepseek_v3", INT8),
                ("gemma3_text", {}),
                ("ministral3", {}),
                ("olmo2", {}),
                ("hunyuan_v1_dense", {}),
                ("lfm2", {}),
                ("kimi_linear", {}),
                ("nemotron_h", {}),
            )
        ),
    ],
)
def test_all_of_a_step_lies_on_the_gpu_and_no_launch_looks_at_it(
    family: str,
    options: dict[str, Any],
    gpu: FakeGpu,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = save_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    launch_some(runner_of(gpu, folder, **options), lambda step: (FROM_PREVIOUS,))


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_so_do_steps_of_every_family(case: str, gpu: FakeGpu, tmp_path: Path) -> None:  # noqa: F811
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, **options)
    launch_some(runner_of(gpu, folder, max_model_len=32), lambda step: (FROM_PREVIOUS,))


class OneOfTwo(OneRank):
    """The second of two ranks, and what stands for the other's part."""

    def __init__(self) -> None:
        super().__init__(1, 2)

    def all_gather(self, x: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        return torch.cat([x[:, :1].expand(-1, len(part)) for part in parts], dim=1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def exchange(self, own: Sequence[torch.Tensor], word: int = 0) -> list[torch.Tensor]:
        return super().exchange(own) * 2


@pytest.mark.parametrize(
    ("family", "deterministic"),
    [("qwen3_moe", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("gpt_oss", "qwen3_next"))],
)
def test_so_do_those_of_a_rank(
    family: str,
    deterministic: bool,
    gpu: FakeGpu,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    monkeypatch.setattr(ModelRunner, "_check", lambda self, step: None)  # it looks at what has come to the host
    runner = runner_of(gpu, folder, OneOfTwo(), deterministic=deterministic)
    launch_some(runner, lambda step: (FROM_PREVIOUS,))


@pytest.mark.slow
def test_so_do_drafts_of_a_model(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def results(self: LaunchedStep) -> list[list[SpanResult]]:
        return [[SpanResult([7]) for _ in part.spans] for part in self.parts]

    monkeypatch.setattr(LaunchedStep, "results", results)
    folder = save_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    drafts = DRAFTS | {"model": str(folder)}
    runner = runner_of(gpu, folder, speculative_config=drafts, async_scheduling=True)
    launch_some(runner, lambda step: (FROM_PREVIOUS, DRAFT, DRAFT, DRAFT))


def test_a_tensor_left_on_the_host_a_look_and_a_copy_that_is_waited_for_are_seen(
    gpu: FakeGpu,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, num_hidden_layers=1)
    batches = DeviceForward._batches

    def looks(self: DeviceForward, inputs: torch.Tensor, *more: Any) -> Any:
        inputs[0].item()
        return batches(self, inputs, *more)

    with monkeypatch.context() as changed:
        changed.setattr(DeviceForward, "_batches", looks)
        with pytest.raises(pytest.fail.Exception, match="the host looks at a tensor of the GPU: item"):
            runner_of(gpu, folder)
    make = RotaryEmbedding.__init__
    with monkeypatch.context() as changed:
        changed.setattr(RotaryEmbedding, "__init__", lambda self, config, device: make(self, config, "cpu"))
        with pytest.raises(Exception, match="Expected all tensors to be on the same device"):
            runner_of(gpu, folder)
    runner = runner_of(gpu, folder)
    monkeypatch.setattr(FakeGpu, "upload", lambda self, *arrays: [torch.tensor(one, device=GPU) for one in arrays])
    with pytest.raises(pytest.fail.Exception, match="the host waits until it has sent"):
        launch_some(runner, lambda step: (FROM_PREVIOUS,))


class Matcher:
    """Of a grammar that allows everything."""

    error = None

    def append(self, token: int) -> None: ...


def test_so_do_masks_of_grammars(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    runner = runner_of(gpu, save_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16))
    monkeypatch.setattr(Sampler, "_matcher", lambda self, info: Matcher() if info.request % 2 else None)
    monkeypatch.setattr(edits, "masks", lambda matchers, ahead: np.full((len(matchers), 40), -1, np.int32))
    monkeypatch.setattr(edits.EditedRequest, "check_known", lambda *args: None)
    monkeypatch.setattr(Sampled, "tell", lambda self: None)  # it looks at what has come to the host
    launch_some(runner, lambda step: (FROM_PREVIOUS,))


@pytest.mark.parametrize("pooling", [PoolingParams("mean"), PoolingParams("labels", (3, 4))])
def test_so_does_what_is_pooled(pooling: PoolingParams, gpu: FakeGpu, tmp_path: Path) -> None:  # noqa: F811
    runner = runner_of(gpu, save_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16))
    rows = pooling.pooled_rows(0, len(PROMPT), len(PROMPT))
    span = Span(0, 0, list(PROMPT), num_pooled=rows, blocks=[list(range(1, 1 + BLOCKS))], table_start=0)
    plan = StepPlan(0, [span], started=[RequestInfo(0, PARAMS[0].resolved(), 0, PROMPT, pooling=pooling)])
    runner.launch(plan)


def test_rows_are_picked_without_a_wait(gpu: FakeGpu) -> None:  # noqa: F811
    with torch.inference_mode(), gpu.active():
        assert drafting._pick(torch.empty(5, 4, device=GPU), [0, 2, 3]).shape == (3, 4)


class Counted(TorchDispatchMode):
    """How many operations torch does, each of which a GPU has to be told."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_a_cpu_does_in_parts_that_fit_its_cache_takes_a_gpu_few_launches() -> None:
    with Counted() as counted:
        x, angles = torch.empty(8192, 40, 128, device="meta"), torch.empty(8192, 64, device="meta")
        elementwise.rotate(x, angles, angles)
    assert counted.count < 100
    with Counted() as counted:
        launch_sum(Device(), torch.empty(8192, 4096, device="meta"))
    assert counted.count < 150


def test_what_is_computed_in_parts_stays_on_its_device() -> None:
    x = torch.empty(300, 2048, device="meta")
    made = elementwise.rms_norm(x, x[0], 1e-6), elementwise.activate(x, "silu"), elementwise.activate(x, "gelu_tanh")
    assert [one.device.type for one in made] == ["meta"] * 3


@pytest.mark.quick("qwen3-True")
@pytest.mark.parametrize(("family", "deterministic"), [("qwen3", True), ("qwen3_moe", False), ("deepseek_v3", True)])
def test_a_rank_has_its_own_part_of_the_weights_on_its_gpu_and_no_more(
    family: str,
    deterministic: bool,
    gpu: FakeGpu,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A view of a part would keep the whole."""
    folder = save_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    model, _, _ = loaded(gpu, folder, OneRank(1, 2), deterministic=deterministic)
    table = model.embedding.weight.untyped_storage()._cdata
    kept: dict[int, tuple[int, int]] = {}  # by storage: its bytes, and those of what is used there
    for tensor in tensors_of(model):
        storage = tensor.untyped_storage()
        if tensor.device == GPU and tensor.dim() == 2 and storage._cdata != table:
            kept[storage._cdata] = storage.nbytes(), max(tensor.nbytes, kept.get(storage._cdata, (0, 0))[1])
    assert len(kept) > 10
    assert [sizes for sizes in kept.values() if sizes[0] != sizes[1]] == []


@pytest.mark.parametrize(("tied", "ranks"), [(True, 1), (False, 1), (True, 2)])
def test_the_plan_counts_the_embedding_table_which_lies_on_the_gpu_too(
    tied: bool,
    ranks: int,
    gpu: FakeGpu,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = save_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tie_word_embeddings=tied, vocab_size=2000)
    model, _, config = loaded(gpu, folder, OneRank(ranks - 1, ranks))
    plan = planned(config, model, gpu, Measured(60 * 2**30, 2**20))
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors_of(model) if tensor.device == GPU}
    there = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    assert 0.95 * there < plan.weights < 1.05 * there


def tensors_of(thing: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All that an object of this program holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif type(thing).__module__.startswith("quire."):
        names = {*vars(thing)} if hasattr(thing, "__dict__") else {*getattr(type(thing), "__slots__", ())}
        parts = [getattr(thing, name) for name in names]
    for part in parts:
        yield from tensors_of(part, seen)
