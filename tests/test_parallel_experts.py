"""Expert parallelism: ranks have whole experts, which may move under running requests, and no bit depends on where."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.expert_balance import imbalance
from quire.core.step import StepPlan
from quire.engine.expert_balancer import ExpertBalancer
from quire.errors import ConfigError, DeviceLostError, RankLostError, RanksDisagreeError
from quire.layers.experts import ExpertsLayer
from quire.models.quantize import quantize_folder
from quire.ops import Kernels, choose_kernels
from quire.ops.cpu import library
from quire.ops.cpu.group import SharedGroup
from quire.ops.experts import ExpertSlots
from quire.runner.expert_mover import ExpertMover, Prepared
from tests.oracle import save_checkpoint
from tests.test_cpu_experts import (
    EXPERTS,
    FORMATS,
    HIDDEN,
    Format,
    activations,
    draw,
    draw_layer,
    draw_product,
    draw_routes,
)
from tests.test_determinism import alone, engine_of, prompts, run, setting
from tests.test_parallel_determinism import LARGE, SMALL
from tests.test_parallel_group import all_of, ranks

__all__ = ["alone", "setting"]  # fixtures


def placements(size: int, count: int, rnd: random.Random) -> tuple[int, ...]:
    """Experts in so many slots of each rank: each expert has one at least."""
    slots = [*range(EXPERTS), *rnd.choices(range(EXPERTS), k=size * count - EXPERTS)]
    rnd.shuffle(slots)
    return tuple(slots)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("isa", [*library.usable(), "torch"])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_experts_on_any_ranks_have_the_bits_of_one(isa: str, form: Format) -> None:
    kernels = choose_kernels(isa)
    up, down = draw_layer(kernels, form)
    whole, rnd = kernels.experts(up, down), random.Random(1)
    for size, count in ((2, 3), (2, 5), (3, 2), (3, 4)):
        slots = placements(size, count, rnd)
        with ranks(size, matrix_bytes=40 * HIDDEN * 4) as groups:  # larger steps are computed in parts
            made = {}
            for group in groups:
                own = ExpertSlots(group, slots)
                products = [(up[slots[slot]], down[slots[slot]]) for slot in own.own]
                made[group.rank] = choose_kernels(isa).experts(*zip(*products, strict=True), own)  # type: ignore[arg-type]
            for rows, top_k in ((1, 1), (1, 3), (5, 2), (33, EXPERTS), (90, 2)):
                if isa == "torch" and rows > 33:
                    continue
                x, (ids, weights) = draw(rows, HIDDEN, dtype=activations(form), seed=rows), draw_routes(rows, top_k)
                expected = whole(x, ids, weights)

                def compute(group: SharedGroup, given: Any = (x, ids, weights), made: Any = made) -> torch.Tensor:
                    return made[group.rank](*given)

                assert all(torch.equal(found, expected) for found in all_of(groups, compute)), (slots, rows, top_k)


def test_the_slots_of_an_expert_take_turns() -> None:
    slots = ExpertSlots(SimpleNamespace(rank=1, size=2), (0, 1, 2, 0))  # type: ignore[arg-type]
    assert slots.own == range(2, 4)
    assert slots.replicas == [[0, 3], [1], [2]]
    assert slots.turns().of(torch.tensor([[0, 1], [0, 2], [0, 1]])).tolist() == [[0, 1], [3, 2], [0, 1]]


@pytest.mark.skipif(not library.usable(), reason="the C++ kernels were not built here")
def test_ranks_that_place_experts_differently_are_found_out() -> None:
    kernels = choose_kernels()
    up, down = draw_layer(kernels, torch.float32)
    with ranks(2) as groups:

        def compute(group: SharedGroup) -> torch.Tensor:
            slots = ExpertSlots(group, tuple(range(EXPERTS)) if group.rank else (1, 0, *range(2, EXPERTS)))
            own = [slots.experts[slot] for slot in slots.own]
            made = choose_kernels().experts([up[e] for e in own], [down[e] for e in own], slots)
            return made(draw(3, HIDDEN), *draw_routes(3, 2))

        assert all(isinstance(answer, RanksDisagreeError) for answer in all_of(groups, compute))


@pytest.mark.parametrize("setting", ["experts"], indirect=True)
@pytest.mark.parametrize(
    ("size", "stages", "redundant"),
    [*(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1, 0), (4, 1, 4))), (2, 2, 2)],
)
def test_ranks_with_experts_of_their_own_change_nothing(
    setting: dict[str, Any], alone: Any, size: int, stages: int, redundant: int
) -> None:
    """Nor do experts that move all the time, nor a step that is given up meanwhile."""
    more = {"enable_expert_parallel": True, "num_redundant_experts": redundant, "eplb_interval": 3}
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    for switches in (SMALL, LARGE)[: 3 - stages]:
        with contextlib.closing(engine_of(setting, switches, **sizes, **more)) as made:
            order = list(range(len(prompts())))
            assert run(made, order) == alone, f"cold, {switches}"
            assert run(made, order[::-1], first_id=100, stagger=2) == alone, f"warm, {switches}"
            assert made.rank_stats()["expert_moves"] > 2
            assert [bool(load.sum()) for load in made.model.expert_loads.values()] == [True, True]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
        ("deepseek_v3", {"kv_cache_dtype": "int8"}),
        pytest.param("qwen3_moe", {"quantization": "int4"}, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"cpu_kernels": "torch"}, marks=pytest.mark.slow),
    ],
)
def test_models_with_experts(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = str(save_checkpoint(tmp_path / "model", architecture, num_hidden_layers=2))
    found = []
    two, own = {"tensor_parallel_size": 2}, {"enable_expert_parallel": True, "eplb_interval": 4}
    for more in ({}, two, two | own):
        with LLM(folder, threads=1, **options, **more) as llm:
            outputs = llm.generate([[5, 6, 7, n] for n in range(4)], [params(n) for n in range(4)])
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1] == found[2]


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=40, seed=number, temperature=number % 2, logprobs=2, ignore_eos=True)


def test_a_quantized_folder_and_less_memory_on_each_rank(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    quantize_folder(tmp_path / "model", tmp_path / "int8", "int8")
    found, held = [], []
    for more in ({}, {"enable_expert_parallel": True, "eplb_interval": 3}):
        for size in (1, 2):
            with LLM(str(tmp_path / "int8"), tensor_parallel_size=size, threads=1, **more) as llm:
                [output] = llm.generate([[5, 6, 7, 8] * 9], params(1))
                found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
                held.append(llm.model.expert_bytes)
                assert not any("holds its own experts" in note for note in llm.notes) or size == 2
    assert all(each == found[0] for each in found)
    assert held[1] == held[3] < 0.55 * held[0]


def test_what_cannot_be_shared_out_is_refused_by_name(tmp_path: Path) -> None:
    folder = str(save_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=1))
    with pytest.raises(ConfigError, match=r"^enable_expert_parallel=True, but the model has no experts; leave it out$"):
        LLM("demo", tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(
        ConfigError, match=r"num_redundant_experts=1: the 8 experts .* 2 ranks; allowed: 0, 2, 4 \.\.\. 8"
    ):
        LLM(folder, tensor_parallel_size=2, enable_expert_parallel=True, num_redundant_experts=1)
    with pytest.raises(ConfigError, match=r"num_redundant_experts=10"):
        LLM(folder, tensor_parallel_size=2, enable_expert_parallel=True, num_redundant_experts=10)
    with pytest.raises(ConfigError, match="num_redundant_experts=2 needs expert parallelism"):
        LLM(folder, tensor_parallel_size=2, num_redundant_experts=2)
    with pytest.raises(ConfigError, match="eplb_interval=-1"):
        LLM(folder, eplb_interval=-1)
    with LLM(folder, enable_expert_parallel=True, threads=1) as llm:  # one rank has all experts anyway
        assert llm._engine.expert_balancer is None


# -- moving ------------------------------------------------------------------------------------------------


class Layer:
    """Stands for a layer with experts."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.slots, self.load = tuple(range(count)), torch.zeros(count, dtype=torch.int64)
        self.seconds, self.error, self.pieces = seconds, "", 0

    def arrange(self, slots: list[int]) -> Generator[None, None, Any]:
        """In three pieces and a last one."""
        for _ in range(3):
            self.pieces += 1
            time.sleep(self.seconds)
            yield
        if self.error:
            raise OSError(self.error)
        return SimpleNamespace(slots=tuple(slots))

    def use(self, arranged: Any) -> None:
        self.slots = arranged.slots


class Rank:
    """A rank that takes plans, of a model with so many experts in each of its layers.

    Args:
        layers: how many it has, or which ones.
    """

    def __init__(self, layers: int | Sequence[int] = 2, count: int = 8) -> None:
        own = range(layers) if isinstance(layers, int) else layers
        self.layers = {index: Layer(count) for index in own}
        self.mover = ExpertMover(self.layers, Kernels())  # type: ignore[arg-type]
        self.said: list[Prepared | None] = [None]
        self.mover.on_prepared = lambda prepared: self.said.__setitem__(0, prepared)


class Said:
    """What all have said."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Prepared | None]:
        return iter([rank.said[0] for rank in self._ranks])


def balancer_of(*all_ranks: Rank, interval: int = 10, ranks: int = 2, stages: int = 1) -> ExpertBalancer:
    layers = {number: rank.layers[number] for number in (0, 1) for rank in all_ranks[::-1] if number in rank.layers}
    model: Any = SimpleNamespace(
        ranks=SimpleNamespace(size=ranks * stages),
        stages=stages,
        expert_slots=len(layers[0].slots),
        expert_layers=layers,
        config=SimpleNamespace(routing=SimpleNamespace(groups=1, num_experts=8)),
        expert_parameters=8000,
        expert_loads={number: layer.load for number, layer in layers.items()},
        dtype=torch.bfloat16,
    )
    return ExpertBalancer(model, Said(all_ranks), interval)  # type: ignore[arg-type]


UNEVEN = torch.tensor([40, 40, 10, 10, 1, 1, 1, 1])


def steps(
    balancer: ExpertBalancer,
    ranks: list[Rank],
    count: int,
    number: int = 0,
    lost: Callable[[int], bool] = lambda n: False,
) -> list[StepPlan]:
    """Plans that all ranks compute; those that are `lost` reach none of them, and a gap follows."""
    plans = []
    for _ in range(count):
        for layer in ranks[0].layers.values():
            layer.load += UNEVEN
        plan = StepPlan(number, [])
        balancer.plan(plan, float(number))
        number += 2 if lost(number) else 1
        if number == plan.number + 1:
            for rank in ranks:
                rank.mover.follow(plan)
        plans.append(plan)
        if not any(layer.seconds for rank in ranks for layer in rank.layers.values()):
            wait_for_reads(ranks)
    return plans


def wait_for_reads(ranks: Sequence[Rank]) -> None:
    """Until no rank reads a piece any more."""
    for rank in ranks:
        if rank.mover._piece is not None:
            rank.mover._piece.result(60)


def test_experts_move_where_the_work_is_uneven_a_layer_at_a_time_and_once() -> None:
    first, second = Rank(), Rank()
    balancer = balancer_of(first, second)
    plans = steps(balancer, [first, second], 60)
    moves = [plan for plan in plans if plan.expert_move is not None]
    assert [plan.expert_move.layer for plan in moves if plan.expert_move] == [0, 1]  # and then the work is even
    assert moves[0].number == 9
    versions = [plan.expert_version for plan in plans]
    assert versions == sorted(versions) and {*versions} == {0, 1, 2}
    for rank in (first, second):
        assert all(imbalance(UNEVEN.tolist(), layer.slots, 2) < 1.1 for layer in rank.layers.values())
    assert [layer.slots for layer in first.layers.values()] == [layer.slots for layer in second.layers.values()]
    stats = balancer.stats()
    assert stats["expert_moves"] == 2 and stats["imbalance_before"] > 1.9 and stats["imbalance_after"] < 1.1
    assert stats["expert_bytes_moved"] == stats["experts_moved"] * 8000 * 2 // 16 > 0


def test_the_experts_of_each_stage_of_a_pipeline_move_among_its_ranks() -> None:
    """All ranks say that they are ready, those without the layer at once; and all know what experts have got before."""
    stages = [[Rank([0]), Rank([0])], [Rank([1]), Rank([1])]]
    every = [rank for stage in stages for rank in stage]
    stages[1][1].layers[1].load = stages[1][0].layers[1].load
    balancer = balancer_of(*every, stages=2)
    plans = []
    for number in range(60):
        stages[1][0].layers[1].load += UNEVEN
        plans += steps(balancer, every, 1, number=number)
    assert [plan.expert_move.layer for plan in plans if plan.expert_move] == [0, 1]
    assert [plan.number for plan in plans if plan.expert_loads] == list(range(7, 60, 10))
    for stage, (first, second) in enumerate(stages):
        assert first.layers[stage].slots == second.layers[stage].slots != tuple(range(8))
    assert balancer.stats()["rank_imbalance"] < 1.1


def test_no_step_waits_for_a_rank_that_reads_slowly_and_none_begins_more_than_a_piece() -> None:
    first, slow = Rank(1), Rank(1)
    slow.layers[0].seconds = 0.1
    balancer = balancer_of(first, slow)
    plans = steps(balancer, [first, slow], 30)
    assert any(plan.expert_move for plan in plans) and not any(plan.expert_version for plan in plans)
    for number, pieces in enumerate((2, 3, 3, 3, 3), 30):
        wait_for_reads([slow])
        last = steps(balancer, [first, slow], 1, number=number)[-1]
        wait_for_reads([slow])
        assert slow.layers[0].pieces == pieces
    assert last.expert_version == 1
    assert slow.layers[0].slots == first.layers[0].slots != tuple(range(8))
    assert balancer.stats()["expert_read_seconds"] >= 0.3


def test_steps_that_are_lost_lose_no_move() -> None:
    for lose in range(9, 25):
        first, second = Rank(1), Rank(1)
        steps(balancer_of(first, second), [first, second], 45, lost=lambda number, lose=lose: number == lose)  # type: ignore[misc]
        assert first.mover.version == second.mover.version >= 1
        assert first.layers[0].slots == second.layers[0].slots


@pytest.mark.skipif(not library.usable(), reason="the C++ kernels were not built here")
@pytest.mark.parametrize("form", [torch.bfloat16, "int8"], ids=str)
def test_a_piece_reads_one_expert_and_what_stays_is_not_touched_while_steps_read_it(form: Format) -> None:
    """All weights are too small for huge pages, so that they lie side by side; what experts leave is used again."""
    kernels, read = choose_kernels(), []
    layer = ExpertsLayer.__new__(ExpertsLayer)
    layer._group, layer._kernels, layer._activation = SimpleNamespace(rank=0, size=2, address=1), kernels, "silu"  # type: ignore[assignment]

    def read_one(expert: int) -> tuple[Any, Any]:
        read.append(expert)
        return draw_product(kernels, (2 * 256, 1024), form, 2 * expert), draw_product(kernels, (1024, 256), form, 1)

    def places() -> dict[int, list[int]]:
        both = {expert: [*up.parts, *down.parts] for expert, (up, down) in layer._own.items()}  # type: ignore[attr-defined]
        return {expert: [part.data_ptr() for part in parts] for expert, parts in both.items()}

    def move(slots: Sequence[int]) -> list[int]:
        """Experts that were read in each piece."""
        pieces, found = layer.arrange(slots), []
        while True:
            before = len(read)
            try:
                next(pieces)
            except StopIteration as end:
                assert len(read) == before
                layer.use(end.value)
                return found
            found.append(len(read) - before)

    layer._own, layer._read = {}, read_one
    assert move([*range(16)]) == [1] * 8  # a rank's half
    before = places()
    assert move([*range(6), 8, 9, 6, 7, *range(10, 16)]) == [1, 1]
    assert move([*range(6), 8, 9, 15, 7, *range(10, 15), 6]) == []
    after = places()
    assert {expert: after[expert] for expert in range(6)} == {expert: before[expert] for expert in range(6)}
    assert move([*range(8), 8, 9, *range(10, 16)]) == [1, 1]
    taken = {place for each in places().values() for place in each}
    assert taken <= {place for each in (*before.values(), *after.values()) for place in each}


def test_even_work_and_no_work_move_nothing() -> None:
    rank = Rank()
    balancer = balancer_of(rank, interval=0)
    assert not any(plan.expert_move for plan in steps(balancer, [rank], 50))
    balancer = balancer_of(rank)
    plan = StepPlan(0, [])
    for number in range(50):
        plan = StepPlan(number, [])
        balancer.plan(plan, 0.0)
        assert plan.expert_move is None
    assert balancer.stats()["rank_imbalance"] == 1.0


@pytest.mark.parametrize("which", [0, 1])
def test_experts_that_a_rank_cannot_read_stay_where_they_are(which: int, caplog: pytest.LogCaptureFixture) -> None:
    first, second = both = Rank(1), Rank(1)
    both[which].layers[0].error = "the file is gone"
    plans = steps(balancer_of(*both), [*both], 60)
    assert {plan.expert_version for plan in plans} == {0}
    assert first.layers[0].slots == second.layers[0].slots == tuple(range(8))
    assert caplog.text.count("since a rank cannot read them: OSError: the file is gone") == 1


def test_a_move_that_was_never_prepared_is_a_bug() -> None:
    with pytest.raises(DeviceLostError, match="never moved"):
        Rank().mover.follow(StepPlan(0, [], expert_version=3))


def test_requests_go_on_when_a_rank_dies_in_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cause that names the rank."""
    folder = str(save_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=2))
    arrange, reading = ExpertsLayer.arrange, threading.Event()

    def slowly(self: ExpertsLayer, slots: Any) -> Any:
        reading.set()
        time.sleep(0.2)
        return (yield from arrange(self, slots))

    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "eplb_interval": 5}
    with LLM(folder, threads=1, **options) as llm:
        monkeypatch.setattr(ExpertsLayer, "arrange", slowly)
        llm.add_request([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))
        while not reading.is_set():
            llm.step()
        assert llm._engine._ranks is not None
        llm._engine._ranks._processes[0].kill()
        with pytest.raises(RankLostError, match=r"^rank 1 died \(killed by SIGKILL\)$"):
            for _ in range(400):
                llm.step()
