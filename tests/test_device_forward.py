"""A step's way through a GPU, with stand-ins for the GPU: sizes, graphs, overlap, memory, and what goes wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.errors import DeviceLostError, MemoryPlanError
from quire.models.model import Model
from quire.ops import KVCache
from quire.ops.elementwise import Activation
from quire.parallel.group import OneRank
from quire.runner import device_forward
from quire.runner.device import RecordingError
from quire.runner.device_forward import (
    CHUNK,
    LARGEST_GRAPH,
    LARGEST_SMALL_GRAPH,
    DeviceForward,
    all_sizes,
    decode_sizes,
    largest_graph,
    padded,
)
from quire.runner.graphs import Graphs
from quire.runner.model_runner import OUT_OF_MEMORY, STEP_FAILED
from quire.runner.start import COMPILING
from tests.devices import DelayedDevice, SpanKernels, on_device
from tests.oracle import save_checkpoint
from tests.test_determinism import prompts, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2))


def options(folder: str, **more: Any) -> EngineConfig:
    chosen = {"model": folder, "threads": 1, "max_model_len": 320, "max_num_seqs": 8, "device": "cpu", **more}
    return EngineConfig(**chosen)


@pytest.fixture(scope="module")
def alone(folder) -> dict[int, Any]:
    """What each prompt gets on a CPU, alone."""
    engine = Engine(options(folder, cpu_kernels="torch", prefix_cache="off", async_scheduling=False))
    outcomes: dict[int, Any] = {}
    for index in range(len(prompts())):
        outcomes |= run(engine, [index])
    return outcomes


ALL, DECODES = (sizes(8, LARGEST_SMALL_GRAPH) for sizes in (all_sizes, decode_sizes))
"""Sizes that are recorded of these tests' small model with at most 8 requests."""

CACHES = {"radix": (22, 40), "hash": (400, 173), "off": (22, 2048)}
"""Kinds of prefix cache, with the blocks and the largest chunks that they are tested with."""


@pytest.mark.quick("eager-hash-True", "off-radix-False")
@pytest.mark.parametrize(
    ("graphs", "cache", "overlap"),
    list(itertools.product(("lazy", "eager", "off"), CACHES, (True, False))),
)
def test_a_device_gives_the_same_tokens(folder, alone, graphs, cache, overlap):
    device = DelayedDevice()
    blocks, chunk = CACHES[cache]
    with on_device(device, SpanKernels()):
        config = options(
            folder,
            cuda_graphs=graphs,
            num_kv_blocks=blocks,
            max_num_batched_tokens=chunk,
            prefix_cache=cache,
            async_scheduling=overlap,
            check_invariants=True,
        )
        engine = Engine(config)
    order = list(range(len(prompts())))
    assert run(engine, order) == alone
    assert run(engine, order[::-1], first_id=100, stagger=2) == alone
    assert (device.num_replayed > 0) == (graphs != "off")
    assert device.peaks == 1, "the largest step was run once, for the memory plan"
    assert device.num_elsewhere == 0


def test_all_graphs_are_recorded_at_start_and_said_so(folder):
    device = DelayedDevice()
    with on_device(device, SpanKernels()):
        engine = Engine(options(folder, cuda_graphs="eager"))
    made = len(ALL) + len(DECODES)  # with those of sampling
    assert device.num_recorded == made
    assert any(note.startswith(f"recorded {made} CUDA graphs in ") for note in engine.notes)
    run(engine, [0, 3])
    assert device.num_recorded == made, "no step has a size that was not recorded"


def test_a_start_tells_how_far_kernels_are_compiled(folder):
    """The first time, most of a start is spent there."""
    told: list[tuple[str, float]] = []
    with on_device(DelayedDevice(), SpanKernels()):
        Engine(options(folder, cuda_graphs="off"), on_load=lambda phase, share: told.append((phase, share))).close()
    shares = [share for phase, share in told if phase == COMPILING]
    assert len(shares) > 4 and shares == sorted(shares) and shares[0] == 0.0 and shares[-1] > 0.5


def test_decodes_are_recorded_at_start_and_steps_with_prompts_when_they_come(folder):
    device = DelayedDevice()
    with on_device(device, SpanKernels()):
        engine = Engine(options(folder))
    decodes = len(DECODES)
    assert decodes == 4  # of 1, 2, 4 and 8 requests
    assert device.num_recorded == 2 * decodes, "each with its sampling"
    assert any(f"up to {len(ALL) - decodes} more CUDA graphs" in note for note in engine.notes)
    run(engine, [0, 3])
    assert device.num_recorded > 2 * decodes and device.num_replayed > 0


def test_caches_are_cleared_in_the_devices_own_order(folder, monkeypatch):
    """On a GPU, what clears them elsewhere may come after the first steps have written to them."""
    device, new_caches, queued = DelayedDevice(), Model.new_caches, []

    def watched(self: Model, *args: Any) -> list[KVCache]:
        queued.append(device.is_active)
        return new_caches(self, *args)

    monkeypatch.setattr(Model, "new_caches", watched)
    with on_device(device, SpanKernels()):
        Engine(options(folder, cuda_graphs="off")).close()
    assert queued == [True, True]  # those of the trial steps, then its own


def test_enforce_eager_records_nothing(folder):
    device = DelayedDevice()
    with on_device(device, SpanKernels()):
        engine = Engine(options(folder, enforce_eager=True))
    run(engine, [0])
    assert device.num_recorded == 0


PLAIN = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.2, "min_p": 0.02})
OTHERS: tuple[dict[str, Any], ...] = ({"top_k": 5}, {"top_p": 0.7}, {"logprobs": 1}, {"presence_penalty": 0.5})


@pytest.mark.quick("None", "other2")
@pytest.mark.parametrize("other", [None, *OTHERS])
def test_decodes_are_sampled_by_a_graph_unless_one_of_them_asks_for_more(folder, monkeypatch, other):
    """With three requests the graph is one of four rows, and a token of padding belongs to nobody."""
    asked = [SamplingParams(**each, seed=seed, ignore_eos=True) for seed, each in enumerate(PLAIN)]
    if other is not None:
        asked[1] = SamplingParams(temperature=0.9, seed=1, ignore_eos=True, **other)
    made, calls, sample = {}, [0], DeviceForward.sample

    def counted(self: DeviceForward, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls[0] += len(args[-1]) > 0
        return sample(self, *args)

    monkeypatch.setattr(DeviceForward, "sample", counted)
    for graphs in ("lazy", "off"):
        with on_device(DelayedDevice(), SpanKernels()):
            engine = Engine(options(folder, cuda_graphs=graphs))
        tokens: dict[int, list[int]] = {number: [] for number in range(len(asked))}
        for number, params in enumerate(asked):
            engine.add(Request(number, prompts()[number], params.resolved(), max_tokens=9))
        while not engine.idle:
            for update in engine.step():
                tokens[update.request] += update.tokens
        made[graphs] = tokens
    assert made["lazy"] == made["off"]
    assert calls[0] == (8 if other is None else 0)


def test_a_step_whose_tokens_find_no_memory_on_the_host_is_computed_again_from_the_same_tokens(folder):
    class Scarce(DelayedDevice):
        """Has no memory on the host for some results of several rows."""

        started, draw = False, random.Random(0)

        def download(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
            if self.started and len(tensors[0]) > 1 and self.draw.random() < 0.3:
                raise torch.OutOfMemoryError("no")
            return super().download(*tensors)

    made, scarce = [], Scarce()
    for device in (DelayedDevice(), scarce):
        with on_device(device, SpanKernels()):
            engine = Engine(options(folder, cuda_graphs="lazy"))
        scarce.started = device is scarce
        tokens: dict[int, list[int]] = {number: [] for number in range(4)}
        for number in tokens:
            params = SamplingParams(temperature=0.9, seed=number, ignore_eos=True)
            engine.add(Request(number, prompts()[number], params.resolved(), max_tokens=16))
        while not engine.idle:
            for update in engine.step():
                tokens[update.request] += update.tokens
        made.append(tokens)
    assert made[0] == made[1]
    assert engine.executor._runner.num_halved > 2


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(("graphs", "most"), [("lazy", 2 * len(DECODES)), ("eager", len(all_sizes(8, 64)))])
def test_where_no_more_graphs_fit_steps_go_on_without(folder, alone, caplog, graphs, most):
    device = DelayedDevice(most_graphs=most)
    with on_device(device, SpanKernels()):
        engine = Engine(options(folder, cuda_graphs=graphs, max_num_batched_tokens=40))
    assert run(engine, list(range(len(prompts())))) == alone
    assert device.num_recorded == most and device.num_replayed > 0
    [warning] = warnings_in(caplog)
    assert f"no memory for more than {most} CUDA graphs" in warning
    assert any(note.startswith(f"recorded {most} CUDA graphs in ") for note in engine.notes)


def test_without_memory_for_a_graphs_inputs_the_result_is_there_all_the_same(monkeypatch, caplog):
    """What was computed is not computed again."""

    def none(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no")

    graphs = Graphs(DelayedDevice(), OneRank(0, 1), "lazy")
    monkeypatch.setattr(torch.Tensor, "clone", none)
    [made] = graphs("key", np.ones(1, np.int32), lambda inputs, more: (inputs + more,), torch.ones(1))
    assert made == 2 and graphs.full and len(graphs) == 0
    assert len(warnings_in(caplog)) == 1


def test_where_the_device_refuses_to_record_steps_go_on_without(folder, alone, caplog):
    class Refusing(DelayedDevice):
        def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            if self.num_recorded > 2 * len(DECODES):
                raise RecordingError("operation not permitted when stream is capturing")
            return super().record(run)

    with on_device(Refusing(), SpanKernels()):
        engine = Engine(options(folder))
    assert run(engine, list(range(len(prompts())))) == alone
    [warning] = warnings_in(caplog)
    assert "not permitted when stream is capturing" in warning


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), torch.AcceleratorError("CUDA error: out of memory")])
def test_a_graph_without_memory_to_run_is_dropped_and_the_step_launched(folder, alone, caplog, error):
    class Full(DelayedDevice):
        def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            replay, made = super().record(run)

            def replay_or_fail() -> None:
                if self.num_replayed >= 3:
                    raise error
                replay()

            return replay_or_fail, made

    with on_device(Full(), SpanKernels()):
        engine = Engine(options(folder))
    assert run(engine, list(range(len(prompts())))) == alone
    assert engine.executor._runner.num_halved == 0  # type: ignore[attr-defined]
    [warning] = warnings_in(caplog)
    assert "no memory for more than" in warning


def test_a_device_that_fails_in_a_replay_is_not_taken_for_one_without_memory() -> None:
    graphs = Graphs(DelayedDevice(), OneRank(0, 1), "lazy")
    given = np.ones(1, np.int32), lambda inputs: (inputs + 1,)
    graphs("key", *given)

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    graphs._recorded["key"].replay = fail
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        graphs("key", *given)


def test_sampling_is_recorded_for_the_sizes_of_recorded_steps_alone(folder, monkeypatch):
    monkeypatch.setattr(device_forward, "LARGEST_SMALL_GRAPH", 4)
    with on_device(DelayedDevice(), SpanKernels()):
        engine = Engine(options(folder))
    for id in range(6):
        engine.add(Request(id, [5, 6, 7 + id], SamplingParams(temperature=0.0).resolved(), max_tokens=8))
    while not engine.idle:
        engine.step()
    graphs = engine.executor._runner._forward.graphs  # type: ignore[attr-defined]
    assert {size for kind, size in graphs._recorded if kind == "sampling"} == {1, 2, 4}


def test_graphs_leave_the_largest_step_its_memory(folder, caplog):
    """What was measured for it, and, of a step of 4,096 tokens, half of that for a graph of 2,048."""
    device = DelayedDevice()
    with on_device(device, SpanKernels()):
        engine = Engine(options(folder, max_num_batched_tokens=4096))
    device.memory = lambda: (2**20 + 2**19, 2**30)  # type: ignore[method-assign]
    run(engine, [0])
    recorded = device.num_recorded
    assert recorded > 0
    device.memory = lambda: (2**20 + 2**19 - 1, 2**30)  # type: ignore[method-assign]
    run(engine, [0, 1, 2, 4], first_id=100)
    assert device.num_recorded == recorded
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("other", [True, False])
def test_ranks_record_a_step_together_or_not_at_all(folder, alone, caplog, other):
    """NCCL allows no collective that is in a graph on some ranks alone."""

    class TwoRanks(OneRank):
        def exchange(self, own: Sequence[torch.Tensor], word: int = 0) -> list[torch.Tensor]:
            return [*super().exchange(own), torch.tensor([other], dtype=torch.uint8)]

    with on_device(device := DelayedDevice(), SpanKernels()):
        engine = Engine(options(folder))
    forward = engine.executor._runner._forward  # type: ignore[attr-defined]
    forward.graphs._ranks = TwoRanks(0, 2)
    assert run(engine, [0, 3]) == {index: alone[index] for index in (0, 3)}
    assert device.num_recorded > 2 * len(DECODES)
    assert (len(forward.graphs) > 2 * len(DECODES)) == other
    assert len(warnings_in(caplog)) == (not other)


def test_larger_steps_are_recorded_of_small_models():
    """Their kernels take less than it takes to launch them."""
    assert [largest_graph(round(size * 1e9), 8192) for size in (0.6, 2.0, 2.1, 14.8)] == [2048, 2048, 1024, 1024]
    assert [largest_graph(10**9, most) for most in (64, 500, 2048)] == [64, 512, 2048]  # no step has more
    assert max(size.tokens for size in all_sizes(64, 2048)) == 2048
    assert all_sizes(64, 1024) < all_sizes(64, 2048)


@pytest.mark.parametrize("largest", [LARGEST_GRAPH, LARGEST_SMALL_GRAPH])
@pytest.mark.parametrize("most", [1, 3, 8, 64, 256])
def test_every_step_has_a_size_that_holds_it_and_only_decodes_are_square(most, largest):
    sizes = all_sizes(most, largest)
    draw = random.Random(most)
    for _ in range(2000):
        spans = draw.randint(1, most)
        tokens = spans if draw.random() < 0.3 else spans + draw.randint(1, 3 * largest)
        size = padded(tokens, spans, most)
        assert size.tokens >= tokens and size.spans >= spans
        assert (size.tokens == size.spans) == (tokens == spans)
        assert size in sizes or size.tokens > largest
        assert size.tokens < max(tokens, size.spans + 1) + CHUNK
    assert len(sizes) < 64 + largest // 32


def test_more_preempted_requests_than_rows_grow_the_tables(folder, alone):
    """Requests that wait after preemption keep their rows: with two running at most, many are known."""
    with on_device(DelayedDevice(), SpanKernels()):
        engine = Engine(options(folder, max_num_seqs=2, scheduling_policy="priority", num_kv_blocks=400))
    rows = len(engine.executor._runner._forward.lengths)
    order = [0, 2, 4, 6, 4, 2, 0, 6]  # of prompts that are sampled greedily
    tokens: dict[int, list[int]] = {number: [] for number in range(8)}
    steps = 0
    while steps < 16 or not engine.idle:
        if steps < 16 and steps % 2 == 0:
            number = steps // 2
            important = SamplingParams(temperature=0.0, seed=0, priority=-number, ignore_eos=True).resolved()
            engine.add(Request(number, prompts()[order[number]], important, max_tokens=12))
        for update in engine.step():
            tokens[update.request] += update.tokens
        steps += 1
    assert engine.stats.preemptions > 4
    assert len(engine.executor._runner._forward.lengths) > rows
    for number, index in enumerate(order):
        assert tokens[number] == [token for token, _, _ in alone[index]]


def test_out_of_memory_halves_the_step_and_ends_only_the_request_that_does_not_fit(folder, alone):
    class Small(SpanKernels):
        """Has no memory for more than 256 rows at once."""

        def activate(self, x: torch.Tensor, how: Activation) -> torch.Tensor:
            if len(x) > 256:
                raise torch.OutOfMemoryError("no")
            return super().activate(x, how)

    with on_device(DelayedDevice(), Small()):
        engine = Engine(options(folder, max_num_batched_tokens=256, cuda_graphs="off", prefix_cache="off"))
    object.__setattr__(engine.config, "max_num_batched_tokens", 2048)  # as if the plan had been wrong
    engine.scheduler._max_chunk = 320
    order = [0, 1, 2, 4, 5, 6, 7]
    errors: dict[int, str | None] = {}
    tokens: dict[int, list[int]] = {index: [] for index in order}
    for index in order:
        wanted = SamplingParams(temperature=0.0, seed=0, ignore_eos=True).resolved()
        engine.add(Request(index, prompts()[index], wanted, max_tokens=12))
    while not engine.idle:
        for update in engine.step():
            tokens[update.request] += update.tokens
            if update.finish_reason:
                errors[update.request] = update.error
    assert errors == {index: OUT_OF_MEMORY if index == 4 else None for index in order}  # prompt 4 has 300 tokens
    for index in (0, 2, 6):
        assert tokens[index] == [token for token, _, _ in alone[index]]


def test_too_little_memory_is_refused_with_what_to_do(folder):
    device = DelayedDevice()
    device.memory = lambda: (2**28, 2**32)  # type: ignore[method-assign]
    with (
        on_device(device, SpanKernels()),
        pytest.raises(MemoryPlanError, match=r"gpu_memory_utilization=0.9 .* above 0.94"),
    ):
        Engine(options(folder))


def test_a_step_that_does_not_fit_beside_the_weights_is_refused_with_what_to_do(folder):
    class Full(DelayedDevice):
        def peak(self, run):
            raise torch.OutOfMemoryError("no")

    with on_device(Full(), SpanKernels()), pytest.raises(MemoryPlanError, match="lower max_num_batched_tokens to 512"):
        Engine(options(folder))


def test_a_request_whose_mask_needs_its_last_token_waits_for_it(folder):
    """bad_words: with steps in flight it gets what it gets without."""
    found = []
    for overlap in (False, True):
        with on_device(DelayedDevice(), SpanKernels()):
            engine = Engine(options(folder, async_scheduling=overlap))
        plain = SamplingParams(temperature=0.0, seed=0, ignore_eos=True).resolved()
        engine.add(Request(0, prompts()[1], plain, max_tokens=12, bad_words=[[9], [11, 12]]))
        engine.add(Request(1, prompts()[2], plain, max_tokens=12))
        tokens: dict[int, list[int]] = {0: [], 1: []}
        while not engine.idle:
            for update in engine.step():
                tokens[update.request] += update.tokens
        found.append(tokens)
    assert found[0] == found[1]


def test_a_device_that_fails_ends_the_engine_but_what_it_refuses_ends_a_request(folder):
    """Whoever asks the driver next is told of it: torch, or Triton."""
    for kind, message, why in (
        (torch.AcceleratorError, "CUDA error: an illegal memory access was encountered", None),
        (RuntimeError, "Triton Error [CUDA]: an illegal memory access was encountered", None),
        (torch.AcceleratorError, "CUDA error: out of memory", OUT_OF_MEMORY),
        (RuntimeError, "Triton Error [CUDA]: out of memory", OUT_OF_MEMORY),
        (RuntimeError, "Triton Error [CUDA]: invalid argument", STEP_FAILED),
    ):

        class Failing(SpanKernels):
            on = False

            def activate(self, x: torch.Tensor, how: Activation, error: Exception = kind(message)) -> torch.Tensor:  # noqa: B008
                if self.on:
                    raise error
                return super().activate(x, how)

        kernels = Failing()
        with on_device(DelayedDevice(), kernels):
            engine = Engine(options(folder, cuda_graphs="off"))
        kernels.on = True
        engine.add(Request(0, prompts()[1], SamplingParams(temperature=0.0, seed=0).resolved(), max_tokens=4))
        if why is None:
            with pytest.raises(DeviceLostError, match="illegal memory access"):
                engine.step()
        else:
            updates = [update for _ in range(3) for update in engine.step()]
            assert [update.error for update in updates] == [why]
