"""The whole engine on Triton's kernels, in its interpreter: a request's tokens, bit for bit, whatever is around it.

What a GPU adds to this (streams, real graphs, matrix instructions, bf16) is checked by `make gpu-check`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from benchmarks.replay import ReplayProposer

from quire.config import EngineConfig
from quire.core.pooling import PoolingParams
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo, Span
from quire.engine.engine import Engine
from quire.ops import CodedWeight, Kernels, KVCache, Product, self_test, self_test_layers
from quire.ops.triton import linear_fp8
from quire.ops.triton.kernels import TritonKernels
from quire.parallel.group import OneRank
from quire.runner import device_forward
from quire.runner.device import Device
from quire.runner.device_forward import DeviceForward
from quire.runner.draft_context import DraftContext
from quire.runner.drafts import Branch, Drafts, Row, Wanted
from quire.runner.proposer import Proposer
from quire.runner.sampler import Sampler
from tests.devices import DelayedDevice, on_device
from tests.gguf_files import LLAMA, llama, write
from tests.oracle import VOCAB, load_reference, save_checkpoint
from tests.test_pooling import embedding_gemma
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

MAX_TOKENS = 3
INT4: dict[str, Any] = {"quantization": "int4", "kv_cache_dtype": "int8"}
SETTINGS = [
    pytest.param((torch.float16, {"kv_cache_dtype": "int8"}), id="fp16, int8 cache"),
    pytest.param((torch.float32, {}), id="fp32", marks=pytest.mark.slow),
    pytest.param((torch.float16, INT4), id="int4 weights, int8 cache", marks=pytest.mark.slow),
    pytest.param(
        (torch.float16, {"quantization": "int8", "kv_cache_dtype": "fp8"}),
        id="int8 weights, fp8 cache",
        marks=pytest.mark.slow,
    ),
]


pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
"""Rows of padding hold whatever memory held."""


@pytest.fixture(scope="module", autouse=True)
def small_steps() -> Iterator[None]:
    """The interpreter is slow: steps are padded to few rows."""
    with mock.patch.object(device_forward, "CHUNK", 4):
        yield


def prompts() -> list[list[int]]:
    rnd = random.Random(8)
    head = [rnd.randrange(3, VOCAB) for _ in range(14)]
    return [[5], [*head, 9], [*head[:13], 11, 12], [rnd.randrange(3, VOCAB) for _ in range(12)]]


def params(index: int) -> SamplingParams:
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, seed=0, logprobs=1, ignore_eos=True).resolved()
    return SamplingParams(
        temperature=0.9, top_p=0.95, seed=index, logprobs=1, repetition_penalty=1.1, ignore_eos=True
    ).resolved()


class KnownPeak(DelayedDevice):
    """What the largest step takes is known: nothing is run for it."""

    def peak(self, run: Callable[[], None]) -> int:
        return 2**20


def start(
    folder: str, options: dict[str, Any], proposer: Proposer | None = None, *, measured: bool = False, **more: Any
) -> Engine:
    kernels = TritonKernels("cpu", deterministic=True)
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "max_model_len": 32, "num_kv_blocks": 20}
    with on_device(DelayedDevice() if measured else KnownPeak(), kernels):
        settings = EngineConfig(model=folder, threads=1, device="cpu", **options, **{**config, **more})
        return Engine(settings, proposer=proposer)


def run(engine: Engine, indices: list[int], stagger: int = 0, max_tokens: int = MAX_TOKENS) -> dict[int, list[Any]]:
    """Tokens and log-probabilities of each prompt."""
    found: dict[int, list[Any]] = {index: [] for index in indices}
    todo, step = list(indices), 0
    while todo or not engine.idle:
        if todo and (not stagger or step % stagger == 0):
            for index in todo if not stagger else todo[:1]:
                engine.add(Request(index, prompts()[index], params(index), max_tokens=max_tokens))
            todo = todo[1:] if stagger else []
        for update in engine.step():
            assert update.error is None
            found[update.request] += zip(update.tokens, [entry.values for entry in update.logprobs or []], strict=True)
        step += 1
    return found


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request, tmp_path_factory) -> tuple[str, dict[str, Any]]:
    dtype, options = request.param
    folder = tmp_path_factory.mktemp("model")
    return str(save_checkpoint(folder, "qwen3", dtype=dtype, num_hidden_layers=1)), options


@pytest.mark.parametrize(
    "order", [[0, 1, 3], pytest.param([0, 1, 2, 3], marks=pytest.mark.slow)], ids=["three", "four"]
)
def test_nothing_around_a_request_changes_its_tokens(setting, order):
    folder, options = setting
    engine = start(folder, options, block_size=32, prefix_cache="off", cuda_graphs="off", async_scheduling=False)
    alone = {}
    for index in order:
        alone |= run(engine, [index])
    assert all(len(tokens) == MAX_TOKENS for tokens in alone.values())
    together = start(folder, options, num_kv_blocks=3, check_invariants=True)
    assert run(together, order) == alone
    assert run(together, order[::-1], stagger=1) == alone
    assert together.stats.preemptions > 0
    assert together.stats.cached_tokens > 0


class Branching(ReplayProposer):
    """What is recorded stands in a tree, behind a wrong token: where it is accepted, it must be moved."""

    def propose(self, wanted: Sequence[Wanted], context: DraftContext) -> list[Drafts]:
        made = []
        for want, line in zip(wanted, super().propose(wanted, context), strict=True):
            tokens = [0, *line.tokens[: want.count - 1]]
            made.append(Drafts(tokens, [0, 0, *range(2, len(tokens))][: len(tokens)]))
        return made


@pytest.mark.slow
def test_drafts_change_nothing(setting):
    folder, options = setting
    order = list(range(len(prompts())))
    plain = run(start(folder, options, cuda_graphs="off"), order, max_tokens=6)
    texts = [[*prompt, *(token for token, _ in plain[index])] for index, prompt in enumerate(prompts())]
    spec = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    for kind in (ReplayProposer, Branching):
        proposer = kind(texts, 0.7, VOCAB)
        engine = start(folder, options, proposer, speculative_config=spec, check_invariants=True)
        assert run(engine, order, max_tokens=6) == plain
        assert engine.stats.drafted > engine.stats.accepted > 5


@pytest.mark.slow
def test_drafts_that_stay_on_the_device_change_nothing(setting):
    """The target is its own draft model: without quantization all are accepted."""
    folder, options = setting
    plain = run(start(folder, options, cuda_graphs="off"), [0, 1, 3], max_tokens=6)
    spec = {"method": "draft_model", "model": folder, "num_speculative_tokens": 2, "adaptive": False}
    engine = start(folder, options, speculative_config=spec, check_invariants=True)
    assert run(engine, [0, 1, 3], max_tokens=6) == plain
    assert engine.stats.drafted >= engine.stats.accepted > 0
    assert options or engine.stats.accepted == engine.stats.drafted


def test_penalties_hold_in_each_row_of_a_step_that_verifies_drafts():
    """Also in the first one: counts behind drafts must not be taken for those of a request without penalties."""
    torch.manual_seed(0)
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    prompt, logits = [4, 5, 6], torch.randn(4, 30)
    logits[:, [5, 9, 20]] += 3.0  # what is penalized would win
    found = []
    for kernels, device in ((TritonKernels("cpu", deterministic=True), DelayedDevice()), (Kernels(), Device())):
        sampler = Sampler(30, kernels, device)
        for request, more in ((0, penalties), (1, {})):
            given = SamplingParams(temperature=0.0, **more).resolved()
            sampler.start(RequestInfo(request, given, 0, prompt, [9]))
        rows = [Row(0, 4), Row(0, 5, [20]), Row(1, 4), Row(1, 5, [20])]
        sampled = sampler.launch_with_drafts(logits.clone(), rows)
        device.mark().wait()
        found.append([row.token for row in sampled.finish()])
    assert found[0] == found[1]
    assert len({*found[0]}) > 1


def test_a_row_of_a_growing_tree_reads_ancestors_that_lie_behind_it():
    """A tree that grows uses the slots of nodes again that nothing grows from any more."""
    kernels = TritonKernels("cpu", deterministic=True)
    model: Any = SimpleNamespace(kernels=kernels, vocab_size=1, ranks=OneRank())
    forward = DeviceForward(model, [KVCache(4, 1, 1, 16, 16, torch.float16)], DelayedDevice(), 2, 3)
    forward.set_blocks([0, 1], [0, 0], [[[2, 3]], [[1]]])
    branch = Branch(7, 14, [5], [1], [[0, 3, 1]])
    [batch] = forward.batches([Span(8, 4, [6]), Span(7, 14, [5])], np.array([1, 0]), np.array([0, 1, 2]), {7: branch})
    assert batch.positions.tolist() == [4, 16]
    assert batch.slots.tolist() == [16 + 4, 32 + 15]
    assert batch.spans is not None and batch.spans.context_lens.tolist() == [5, 18]


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_plain_kernels(tmp_path):
    folder = str(save_checkpoint(tmp_path, "qwen3", dtype=torch.float32, num_hidden_layers=1))
    plain = Engine(EngineConfig(model=folder, threads=1, device="cpu", cpu_kernels="torch", max_model_len=32, **INT4))
    ours, theirs = run(start(folder, INT4), [2])[2], run(plain, [2])[2]
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    for (_, [got, *_]), (_, [want, *_]) in zip(ours, theirs, strict=True):
        assert got == pytest.approx(want, abs=1e-4)


@pytest.mark.slow
def test_layers_with_and_without_windows_have_tables_of_their_own(tmp_path):
    """A cached head, a table that grows, and a window that passes a block, beside another request."""
    options = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    folder = str(save_checkpoint(tmp_path, "qwen2", dtype=torch.float32, num_hidden_layers=2, **options))
    plain = Engine(EngineConfig(model=folder, threads=1, device="cpu", cpu_kernels="torch", max_model_len=32))
    ours = start(folder, {}, num_kv_blocks=8, check_invariants=True)
    assert len(ours.kv_cache) == 2
    for order in ([0, 1], [2]):
        mine, theirs = run(ours, order, max_tokens=5), run(plain, order, max_tokens=5)
        assert [token for index in order for token, _ in mine[index]] == [
            token for index in order for token, _ in theirs[index]
        ]
    assert ours.stats.cached_tokens == 13


@pytest.mark.slow
def test_the_self_test_of_the_doctor_passes(monkeypatch):
    monkeypatch.setattr(self_test, "DTYPES", (torch.float16,))
    monkeypatch.setattr(self_test, "QUANTIZATIONS", ("int8",))
    monkeypatch.setattr(self_test, "ROWS_DTYPE", torch.float16)  # the interpreter multiplies bf16 wrongly
    monkeypatch.setattr(self_test, "ROW_COUNTS", (1, 9))
    monkeypatch.setattr(self_test, "FP8_ROWS", 40)
    monkeypatch.setattr(linear_fp8, "MANY_ROWS", 32)
    monkeypatch.setattr(self_test, "LINEAR_SHAPES", ((96, 128),))
    monkeypatch.setattr(self_test_layers, "CONTEXT", 40)
    monkeypatch.setattr(self_test, "CHUNKINGS", ((39, 1),))
    monkeypatch.setattr(self_test, "CACHES", ((torch.float16, "int8"),))
    monkeypatch.setattr(self_test, "EXPERTS_SHAPE", (3, 2, 64, 64))
    monkeypatch.setattr(self_test, "LATENT_CACHES", ((torch.float16, "fp8"),))
    monkeypatch.setattr(self_test, "TREE_BASES", (14,))
    monkeypatch.setattr(self_test, "TREE_SIZE", 6)
    checks = {check.name: check for check in self_test.run(TritonKernels("cpu", deterministic=True))}
    assert not [check for check in checks.values() if not check.passed]
    assert {"linear fp8", "shares of ranks, fp8", "experts fp8"} <= set(checks)


@pytest.mark.slow
def test_whole_prompts_that_see_both_ways_are_pooled_as_each_alone(tmp_path: Path) -> None:
    folder, whole = str(embedding_gemma(tmp_path, window=10)), {"max_num_batched_tokens": 40}
    engine = start(folder, {}, cuda_graphs="off", **whole)
    alone = [pooled(engine, [index])[0] for index in range(4)]
    assert pooled(start(folder, {}, check_invariants=True, block_size=32, **whole), [3, 1, 0, 2]) == [
        alone[index] for index in (3, 1, 0, 2)
    ]
    reference = load_reference(Path(folder))
    for prompt, sums in zip(prompts(), alone, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(torch.tensor(sums, dtype=torch.float32), expected, atol=1e-4, rtol=0)


def pooled(engine: Engine, indices: list[int]) -> list[list[float]]:
    """The mean of each prompt's hidden states."""
    found: dict[int, list[float]] = {}
    params = SamplingParams(max_tokens=0, seed=0, speculate=False).resolved()
    for index in indices:
        engine.add(Request(index, prompts()[index], params, max_tokens=0, pooling=PoolingParams("mean")))
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            if update.pooled is not None:
                found[update.request] = update.pooled
    return [found[index] for index in indices]


@pytest.mark.slow
def test_a_gguf_model_is_computed_as_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each request has the bits that it has alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tests.test_triton_engine.VOCAB", 64)
    tensors = llama("Q4_K", "Q6_K")
    tensors["blk.0.attn_v.weight"] = llama("Q6_K")["blk.0.attn_v.weight"]
    folder = str(write(tmp_path / "m.gguf", LLAMA, tensors))
    packed: list[list[str]] = []

    def pack(self: TritonKernels, parts: Sequence[CodedWeight], *given: Any) -> Product:
        packed.append([part.scheme.name for part in parts])
        return pack_coded(self, parts, *given)

    pack_coded = TritonKernels.pack_coded
    monkeypatch.setattr(TritonKernels, "pack_coded", pack)
    engine = start(folder, {"dtype": "float32"}, prefix_cache="off", cuda_graphs="off", async_scheduling=False)
    assert sorted(packed) == [["Q4_K"], ["Q4_K"], ["Q4_K", "Q4_K"], ["Q4_K", "Q4_K", "Q6_K"], ["Q6_K"]]
    alone = run(engine, [0]) | run(engine, [3])
    assert run(engine, [0, 3]) == alone
    engine.close()
