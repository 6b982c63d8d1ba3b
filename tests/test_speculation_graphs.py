"""What drafts is recorded and replayed, as the target's steps are: nothing of it is launched by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from quire.core.step import Span
from quire.engine.engine import Engine
from quire.parallel.group import OneRank
from quire.runner.device_forward import DeviceForward
from quire.runner.draft_passes import DraftPasses
from quire.runner.drafts import Computed
from quire.runner.host_forward import Forwarded
from quire.speculate import methods
from tests.devices import DelayedDevice
from tests.taped import TapedDevice
from tests.test_device_forward import warnings_in
from tests.test_speculation import request, run
from tests.test_speculation_device import OnHost, plain, start
from tests.test_speculation_methods import TARGETS, folders

__all__ = ["folders", "plain"]  # fixtures


def taped(folders: dict[str, str], method: str | None, device: TapedDevice, drafts: int = 4, **more: Any) -> Engine:
    return start(folders, method, drafts, device=device, kernels=device.kernels, **more)


@pytest.mark.parametrize(
    ("waits", "method"),
    [
        pytest.param(waits, method, marks=() if waits and method == "eagle3" else pytest.mark.slow)
        for waits in (False, True)
        for method in ("draft_model", "eagle", "eagle3")
    ],
)
def test_a_replay_repeats_what_was_recorded_and_gives_the_same_tokens(folders, plain, method, waits):
    """Whatever the host knew while it recorded."""
    device = TapedDevice()
    kind = OnHost if waits else methods.DeviceDraftingProposer
    with mock.patch.object(methods, "DeviceDraftingProposer", kind):
        engine = taped(folders, method, device, max_num_batched_tokens=64)
    outcomes = plain[TARGETS.get(method, "target")]
    assert run(engine, range(16)) == outcomes
    assert run(engine, range(15, -1, -1), first_id=100, stagger=1) == outcomes
    assert device.num_replayed > 100 and engine.stats.drafted > 100 and engine.stats.accepted > 0


@pytest.mark.quick("False")
@pytest.mark.parametrize("waits", [False, True])
def test_a_head_is_given_what_the_target_computed_whatever_was_replayed_since(folders, monkeypatch, waits):
    """Also of a step that was recorded after the head's rows, and so lies where these are computed."""
    given: list[bool] = []
    compute = DraftPasses.rows

    def rows(self: DraftPasses, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        given.append(bool(hidden.isfinite().all()))
        return compute(self, hidden, *args)

    device = TapedDevice()
    with mock.patch.object(methods, "DeviceDraftingProposer", OnHost if waits else methods.DeviceDraftingProposer):
        engine = taped(folders, "eagle", device, max_num_batched_tokens=200, prefix_cache="off")
    monkeypatch.setattr(DraftPasses, "rows", rows)
    for turn in range(2):
        run(engine, (0, 1, 2, 3, 4, 5, 8, 7, 9, 10, 11, 13, 14), first_id=100 * turn, stagger=1, max_tokens=10)
    assert len(given) > 20 and all(given)


def followed_in_halves(folders: dict[str, str], graphs: str) -> dict[tuple[int, int], torch.Tensor]:
    """By request and position, what a head is given where no more than two requests fit into a step."""

    def few(forward: DeviceForward, spans: list[Span], *args: Any) -> Forwarded:
        if len(spans) > 2:
            raise torch.OutOfMemoryError("no")
        return compute(forward, spans, *args)

    def seen(computed: Sequence[Computed], features: torch.Tensor, context: Any) -> None:
        for each in computed:
            given.update({(each.request, each.start + i): features[row].clone() for i, row in enumerate(each.rows)})
        follow(computed, features, context)

    given: dict[tuple[int, int], torch.Tensor] = {}
    with mock.patch.object(methods, "DeviceDraftingProposer", OnHost):
        engine = taped(folders, "eagle", device := TapedDevice(), cuda_graphs=graphs, max_num_batched_tokens=64)
    proposer: Any = engine.speculation.proposer  # type: ignore[union-attr]
    compute, follow = DeviceForward.__call__, proposer.follow
    with mock.patch.object(proposer, "follow", seen), mock.patch.object(DeviceForward, "__call__", few):
        run(engine, (1, 2, 4, 5, 11, 14), max_tokens=12)
    assert engine.executor._runner.num_halved > 5  # type: ignore[attr-defined]
    assert (device.num_replayed > 20) == (graphs == "lazy")
    return given


def test_of_a_step_in_halves_a_head_is_given_what_each_of_them_computed(folders):
    """Although they may be the same graph, whose result is in one place."""
    launched, replayed = (followed_in_halves(folders, graphs) for graphs in ("off", "lazy"))
    assert launched.keys() == replayed.keys()
    assert all(torch.equal(replayed[place], row) for place, row in launched.items())


@pytest.mark.slow
def test_with_rejection_sampling_a_replay_gives_what_is_launched_without(folders):
    found = []
    for graphs in ("lazy", "off"):
        device = TapedDevice()
        more = {"speculative_acceptance": "rejection", "cuda_graphs": graphs, "max_num_batched_tokens": 64}
        engine = taped(folders, "eagle", device, **more)
        found.append(run(engine, range(16), max_tokens=14))
        assert (device.num_replayed > 50) == (graphs == "lazy") and engine.stats.drafted > 100
    assert found[0] == found[1]


@pytest.mark.quick("draft_model")
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_replay_of_trees_does_so_too(folders, plain, method):
    device = TapedDevice()
    engine = taped(folders, method, device, 8, spec={"tree_width": 3}, max_num_batched_tokens=128)
    recorded = device.num_recorded
    assert run(engine, [1, 2])[0] == plain["target"][1]
    assert device.num_recorded <= recorded + 1, "but for the prompts' step"
    assert run(engine, range(16), first_id=100, stagger=1) == plain["target"]
    graphs = engine.executor._runner._forward.graphs  # type: ignore[attr-defined]
    assert {key[0] for key in graphs._recorded} >= {"step", "rows", "nodes"}
    assert any(key[0] == "step" and key[1].paths for key in graphs._recorded)
    assert engine.stats.drafted > 100 and engine.stats.accepted > 0


@pytest.mark.quick("True")
@pytest.mark.parametrize("waits", [False, True])
def test_more_drafts_or_requests_launch_nothing_more(folders, waits):
    """Outside of graphs only what follows them is launched: head and sampling of the rows that are verified."""
    found = {}
    for drafts, count in ((2, 1), (6, 1), (6, 4)):
        device = TapedDevice()
        kind = OnHost if waits else methods.DeviceDraftingProposer
        with mock.patch.object(methods, "DeviceDraftingProposer", kind):
            sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64}  # so that few graphs are recorded
            engine = taped(folders, "eagle", device, drafts, cuda_graphs="eager", **sizes)
        for number in range(count):
            engine.add(request(1, number, max_tokens=60))
        for _ in range(4):
            engine.step()
        launched, recorded = device.num_launched, device.num_recorded
        for _ in range(4):
            engine.step()
        assert device.num_recorded == recorded, "all was recorded at start"
        assert engine.stats.drafted > 0
        found[drafts, count] = device.num_launched - launched
    assert len(set(found.values())) == 1 and found[2, 1] <= 4 * 3, found


def test_what_drafts_is_recorded_at_start_and_said_so(folders):
    told: list[tuple[str, float]] = []
    for mode, kinds in (("lazy", {"step", "rows", "chains"}), ("eager", {"step", "rows", "chains"}), ("off", set())):
        told.clear()
        engine = start(folders, "eagle", cuda_graphs=mode, on_load=lambda *each: told.append(each))
        graphs = engine.executor._runner._forward.graphs  # type: ignore[attr-defined]
        assert {key[0] for key in graphs._recorded} >= kinds and bool(graphs) == bool(kinds)
        shares = [share for phase, share in told if phase == "recording CUDA graphs"]
        assert shares == sorted(shares) and shares[-1:] == [1.0] * bool(kinds)


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_where_no_more_graphs_fit_drafts_go_on_without(folders, plain, caplog, waits):
    device = DelayedDevice(most_graphs=25)
    kind = OnHost if waits else methods.DeviceDraftingProposer
    with mock.patch.object(methods, "DeviceDraftingProposer", kind):
        engine = start(folders, "eagle", device=device, cuda_graphs="eager")
    assert run(engine, range(16)) == plain["target"]
    assert device.num_recorded == 25 and engine.stats.drafted > 100
    [warning] = warnings_in(caplog)
    assert "no memory for more than 25 CUDA graphs" in warning


@pytest.mark.quick("False")
@pytest.mark.parametrize("other", [True, False])
def test_ranks_record_drafts_together_or_not_at_all(folders, plain, caplog, other):
    class TwoRanks(OneRank):
        def exchange(self, own: Sequence[torch.Tensor], word: int = 0) -> list[torch.Tensor]:
            return [*super().exchange(own), torch.tensor([other], dtype=torch.uint8)]

    device = DelayedDevice()
    engine = start(folders, "eagle", device=device)
    graphs = engine.executor._runner._forward.graphs  # type: ignore[attr-defined]
    graphs.clear()
    graphs._ranks = TwoRanks(0, 2)
    assert run(engine, range(8)) == plain["target"][:8]
    assert engine.stats.drafted > 50
    assert (len(graphs) > 5) == other
    assert len(warnings_in(caplog)) == (not other)
