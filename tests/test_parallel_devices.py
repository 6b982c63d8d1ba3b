"""Ranks with devices of their own: gloo and devices that stand for GPUs show all but NCCL itself."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan, StepResult
from quire.engine import engine as engine_module
from quire.engine import machine
from quire.engine.engine import Engine
from quire.engine.machine import check_gpus
from quire.engine.ranks import RankExecutor
from quire.errors import ConfigError, RankLostError, RanksDisagreeError
from quire.models.formats.quantizing import Quantization
from quire.ops.experts import ExpertSlots
from quire.ops.triton import linear, linear_chunks
from quire.ops.triton.experts import GroupedExperts
from quire.ops.triton.experts_coded import CodedExperts
from quire.ops.triton.kernels import TritonKernels
from quire.ops.triton.linear_dense import DenseProduct
from quire.parallel import torch_group
from quire.parallel.group import Gather, Group, OneRank, share
from quire.parallel.torch_group import TorchGroup
from tests import rank_on_device
from tests.devices import DelayedDevice, SpanKernels, on_device
from tests.oracle import VOCAB, save_checkpoint
from tests.quantized import coded
from tests.test_parallel_group import all_of, ranks
from tests.test_triton_experts import COUNT, HIDDEN, draw, layer, quantized_weight

CPU = torch.device("cpu")


@contextmanager
def device_ranks(size: int, timeout: float = 20.0) -> Iterator[list[TorchGroup]]:
    store = os.memfd_create("store", 0)
    try:
        with ranks(size, timeout=timeout) as groups:
            yield [TorchGroup(group, store, CPU, timeout) for group in groups]
    finally:
        os.close(store)


# -- the group -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "width", "heads"), [(2, 64, None), (3, 100, None), (2, 60, 6), (3, 7, None)])
def test_a_gather_gives_every_rank_all_columns(size: int, width: int, heads: int | None) -> None:
    with device_ranks(size) as groups:
        for dtype in (torch.bfloat16, torch.float32):
            whole = torch.randn(5, width).to(dtype)

            def gather(group: Any, whole: torch.Tensor = whole) -> torch.Tensor:
                together = Gather(group, width, heads)
                return together(whole[:, together.own.start : together.own.stop])

            assert all(torch.equal(found, whole) for found in all_of(groups, gather))


def test_sums_and_messages_reach_all_ranks_and_other_tokens_are_found_out() -> None:
    x = torch.randn(2, 3, 8)
    with device_ranks(2) as groups:
        for found in all_of(groups, lambda group: group.all_reduce(x[group.rank].T)):
            assert torch.equal(found, (x[0] + x[1]).T)
        for brought in all_of(groups, lambda group: [part.tolist() for part in group.exchange([x[group.rank, 0]])]):
            assert brought == [part.view(torch.uint8).tolist() for part in x[:, 0].contiguous()]
        assert all_of(groups, lambda group: group.check(7)) == [None] * 2
        assert all(isinstance(e, RanksDisagreeError) for e in all_of(groups, lambda group: group.check(group.rank)))


def test_a_lost_rank_is_waited_for_by_nobody() -> None:
    with device_ranks(2, timeout=60.0) as groups:
        all_of(groups, lambda group: group.all_gather(torch.ones(1, 1), [range(1), range(1, 2)]))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(groups[0].check, 1)
            groups[0].lose(1)
            with pytest.raises(RankLostError, match="rank 1 died, or has not answered"):
                waiting.result(20)
        assert groups[0].lost == 1
        with pytest.raises(RankLostError, match="start again together"):
            groups[1].resume(3)


def test_the_end_of_a_group_does_not_wait_for_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may: an engine would not close."""
    begun, freed, ended = threading.Event(), threading.Event(), threading.Event()

    class Connection:
        def _allgather_base(self, *args: Any) -> Any:
            return mock.Mock()

        def shutdown(self) -> None:
            begun.set()
            freed.wait(30)
            ended.set()

    monkeypatch.setattr(torch_group, "_gloo", lambda *args: Connection())
    monkeypatch.setattr(torch_group, "SHUT_DOWN_SECONDS", 0.1)
    store = os.memfd_create("store", 0)
    group = TorchGroup(OneRank(), store, CPU, 20.0)
    os.close(store)
    group.all_gather(torch.ones(1, 1), [range(1)])
    del group
    assert begun.wait(20) and not ended.is_set()
    freed.set()
    assert ended.wait(20)


def test_no_result_is_taken_from_a_step_in_which_a_rank_was_lost() -> None:
    """Collectives on the other GPUs are ended then, so that nobody waits, and whatever they hold goes on."""
    group = OneRank(0, 2)
    lost = RankLostError("rank 1 died", 1)
    ranks = mock.Mock(group=group, computed=False, explained=lambda rank: lost)
    own = mock.Mock(submit=lambda plan: lambda: StepResult(plan.number, []))
    executor = RankExecutor(own, ranks)
    assert executor.submit(StepPlan(0, []))().number == 0
    wait = executor.submit(StepPlan(1, []))
    group.lost = 1
    with pytest.raises(RankLostError, match="rank 1 died"):
        wait()


# -- products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [None, "int8", "int4"], ids=str)
def test_a_rank_has_the_columns_of_the_whole_product(how: Quantization | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many outputs that the sums of a part would be cut into more chunks than those of the whole."""
    monkeypatch.setattr(linear_chunks, "PROGRAMS", 6)  # of a small device
    kernels = TritonKernels("cpu", deterministic=True)
    weight, x = draw(5 * 128, 512, seed=1).half(), draw(2, 512, seed=2).half()

    def product(own: slice, outputs: int | None = None) -> Any:
        if how is None:
            return kernels.pack([weight[own]], None, outputs)
        return kernels.pack_coded([coded(weight[own], how)], None, outputs)

    expected = product(slice(None)).matmul(x, torch.float32)[:, 64:192]
    assert torch.equal(product(slice(64, 192), len(weight)).matmul(x, torch.float32), expected)
    assert not torch.equal(product(slice(64, 192)).matmul(x, torch.float32), expected)


# -- experts -------------------------------------------------------------------------------------------------


class InTurn(OneRank):
    """A rank of threads that compute one after the other, since Triton's interpreter knows one at a time."""

    turn = threading.Lock()

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self._group = group

    def all_gather(self, x: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        self.turn.release()
        try:
            return self._group.all_gather(x, parts)
        finally:
            self.turn.acquire()


def on_all(size: int, compute: Callable[[Group], torch.Tensor]) -> list[torch.Tensor]:
    def one(group: Group) -> torch.Tensor:
        with InTurn.turn:
            return compute(InTurn(group))

    with ranks(size, matrix_bytes=2**20) as groups:
        found = all_of(groups, one)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


SLOTS = (4, 0, 1, 3, 2, 0)
"""Two ranks have three each; expert 0 is on both."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of others' experts are never written
@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_ranks_with_experts_of_their_own_have_the_bits_of_one(kind: str) -> None:
    hidden = HIDDEN
    if kind == "dense":
        made, (gate_up, down) = GroupedExperts, layer(torch.float16)
    else:
        made, hidden = CodedExperts, 96
        gate_up = [quantized_weight("int8", 2 * hidden, hidden, seed) for seed in range(COUNT)]
        down = [quantized_weight("int8", hidden, hidden, 9 + seed) for seed in range(COUNT)]
    ids = torch.tensor([[0, 4], [1, 2], [0, 3], [0, 1], [2, 3]])
    x, weights = draw(len(ids), hidden, dtype=torch.float16, seed=3), draw(*ids.shape, seed=4).abs()
    expected = made(gate_up, down)(x, ids, weights)

    def compute(group: Group) -> torch.Tensor:
        slots = ExpertSlots(group, SLOTS)
        own = [SLOTS[slot] for slot in slots.own]
        return made([gate_up[e] for e in own], [down[e] for e in own], slots)(x, ids, weights)

    assert all(torch.equal(found, expected) for found in on_all(2, compute))


def test_ranks_that_share_each_expert_have_the_bits_of_one() -> None:
    inner, hidden = 64, 96
    gate_up, down = layer(torch.float16, hidden, inner)
    ids = torch.tensor([[0, 4], [1, 2], [0, 3]])
    x, weights = draw(len(ids), hidden, dtype=torch.float16, seed=3), draw(*ids.shape, seed=4).abs()
    expected = GroupedExperts(gate_up, down)(x, ids, weights)

    def compute(group: Group) -> torch.Tensor:
        between, outputs = Gather(group, inner), Gather(group, hidden)
        first, own = between.own, share(hidden, group)
        rows = [*range(first.start, first.stop), *range(inner + first.start, inner + first.stop)]
        products = [
            ([pack(each.weight[rows]) for each in gate_up], [pack(each.weight[own.start : own.stop]) for each in down])
        ]
        return outputs(GroupedExperts(*products[0], between)(x, ids, weights))

    assert all(torch.equal(found, expected) for found in on_all(2, compute))


def pack(weight: torch.Tensor) -> Any:
    return linear.pack([weight.contiguous()], None, CPU, DenseProduct)


# -- engines -------------------------------------------------------------------------------------------------


@contextmanager
def engine_on_devices(folder: Path, size: int, **options: Any) -> Iterator[Engine]:
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 64, "block_size": 16}
    settings = EngineConfig(
        model=str(folder), device="cuda", threads=1, tensor_parallel_size=size, **{**config, **options}
    )
    with (
        on_device(DelayedDevice(), SpanKernels()),
        mock.patch.object(engine_module, "count_gpus", lambda: size),
        mock.patch.object(machine.child, "python", lambda module: [rank_on_device.__name__]),
    ):
        engine = Engine(settings)
    with contextlib.closing(engine):
        yield engine


def answers(engine: Engine, first: int = 0) -> list[list[Any]]:
    """Of some prompts at once: tokens and log-probabilities."""
    prompts = [[5], [*range(7, 30)], [*range(7, 30), 40, 41], [9, 8, 7, 6]]
    for number, prompt in enumerate(prompts):
        how = SamplingParams(temperature=0.8 * (number % 2), seed=number, logprobs=1, ignore_eos=True).resolved()
        engine.add(Request(first + number, prompt, how, max_tokens=12))
    found: list[list[Any]] = [[] for _ in prompts]
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            scores = [entry.values for entry in update.logprobs or []]
            found[update.request - first] += zip(update.tokens, scores, strict=True)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of an architecture."""

    @functools.cache
    def of(architecture: str) -> Path:
        made = tmp_path_factory.mktemp("model")
        save_checkpoint(made, architecture, dtype=torch.bfloat16, num_hidden_layers=2)
        return made

    return of


OVERLAP = {"async_scheduling": True, "cuda_graphs": "eager", "num_kv_blocks": 6}
DRAFTS = {"speculative_config": {"method": "ngram"}, "async_scheduling": False}
EXPERTS = {"enable_expert_parallel": True, "num_redundant_experts": 2}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        pytest.param("qwen3_moe", EXPERTS | OVERLAP, id="experts, overlap"),
        pytest.param("qwen3_moe", DRAFTS, id="each expert shared, drafts", marks=pytest.mark.slow),
        pytest.param("qwen3", OVERLAP, id="dense, overlap", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", EXPERTS | OVERLAP, id="latent attention, overlap", marks=pytest.mark.slow),
    ],
)
def test_ranks_on_devices_change_nothing(
    folder: Callable[[str], Path], architecture: str, options: dict[str, Any]
) -> None:
    with engine_on_devices(folder(architecture), 1) as engine:
        alone = answers(engine)
        assert len(alone[0]) == 12 and all(0 <= token < VOCAB for token, _ in alone[0])
    with engine_on_devices(folder(architecture), 2, **options) as engine:
        assert answers(engine) == alone, "cold"
        assert answers(engine, 10) == alone, "warm"
        stats = engine.rank_stats()
        assert stats["ranks"] == 2 and "gathers" not in stats  # a recorded graph gathers without telling
        assert (engine.stats.preemptions > 0) == ("num_kv_blocks" in options)


def test_a_rank_that_dies_ends_the_engine(folder: Callable[[str], Path]) -> None:
    with engine_on_devices(folder("qwen3_moe"), 2, collective_timeout_s=20.0) as engine:
        engine.add(Request(0, [5], SamplingParams(seed=0, ignore_eos=True).resolved(), max_tokens=50))
        engine.step()
        assert engine._ranks is not None
        engine._ranks._processes[0].kill()
        with pytest.raises(RankLostError, match=r"^rank 1 died \(killed by SIGKILL\)"):
            while not engine.idle:
                engine.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, r"^tensor_parallel_size=4 needs one GPU per rank, but there are 2; lower it"),
        (
            {"pipeline_parallel_size": 2},
            r"^pipeline_parallel_size=2 with device=cuda: on GPUs only ranks that share each layer",
        ),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            r"^data_parallel_size=2 with enable_expert_parallel with device=cuda",
        ),
        ({"tensor_parallel_size": 2, "nnodes": 2, "token_file": "t"}, r"^nnodes=2 with device=cuda"),
    ],
)
def test_what_gpus_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gpus(EngineConfig(model="demo", device="cuda", **options), 2)
    check_gpus(EngineConfig(model="demo", device="cuda", tensor_parallel_size=2), 2)
