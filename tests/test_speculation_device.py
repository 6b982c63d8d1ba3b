"""Drafts on a device that works by itself: no step is waited for before the next is launched, and nothing changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from quire.engine.engine import Engine
from quire.ops import Kernels, sampling
from quire.runner.device_drafter import DeviceDrafter
from quire.runner.draft_context import DeviceContext
from quire.runner.drafts import Ahead, Asked, Lines, Row
from quire.runner.model_runner import OUT_OF_MEMORY
from quire.runner.penalties import padded
from quire.runner.proposer import DeviceProposer
from quire.runner.sampler import Sampler
from quire.runner.start import OnLoad
from quire.speculate import methods
from quire.speculate.device_drafting import DeviceDraftingProposer, kept_tokens
from quire.speculate.drafting import DraftingProposer
from tests.devices import DelayedDevice, SpanKernels, StrictDevice, on_device, opaque
from tests.test_speculation import CHOICES, Outcome, ends, prompts, request, run, save_with_bad_tokens
from tests.test_speculation_methods import TARGETS, folders

__all__ = ["folders"]  # a fixture

METHODS = ("draft_model", "eagle", "eagle3", "mtp", "itself")
"""`itself`: the target is its own draft model."""

ALWAYS = {"eagle": (0,), "mtp": (2,)}
"""The depths of overlap that a method is tested at, besides the usual one where a step is launched while nobody has
waited; `make test-slow` adds the others."""

AT_DEPTHS = [
    pytest.param(
        depth, method, id=f"{depth}-{method}", marks=() if depth in ALWAYS.get(method, ()) else pytest.mark.slow
    )
    for depth in (0, 1, 2)
    for method in METHODS
]

PREEMPTED = ((1, "itself"), (2, "eagle"))
"""So are these, while requests preempt each other."""

UNDRAFTED = (7, 9, 10, 13)
"""Requests of `test_speculation` with bad_words, with min_tokens, and without speculation."""

FOLLOWING = (7, 9)
"""Of these, those with bad_words: what is masked depends on which the tokens before are."""


def start(
    folders: dict[str, str],
    method: str | None,
    drafts: int = 4,
    device: DelayedDevice | None = None,
    proposer: DeviceProposer | None = None,
    kernels: Kernels | None = None,
    on_load: OnLoad = lambda phase, share: None,
    **more: Any,
) -> Engine:
    """An engine on a stand-in for a GPU; `spec` among the options changes what is drafted."""
    spec: dict[str, Any] | None = None
    if method is not None:
        name = "draft_model" if method == "itself" else method
        spec = {"method": name, "num_speculative_tokens": drafts, "adaptive": False} | more.pop("spec", {})
        if name not in ("ngram", "mtp"):
            spec["model"] = folders["target" if method == "itself" else method]
    options = {"threads": 1, "max_num_seqs": 16, "max_model_len": 200, "num_kv_blocks": 100, "check_invariants": True}
    on_gpu = {"device": "cuda", "deterministic": True, "gpu_memory_utilization": 1.0}
    with on_device(device or DelayedDevice(), kernels or opaque(SpanKernels())):
        config = EngineConfig(
            model=folders[TARGETS.get(method or "", "target")], **(options | on_gpu | more), speculative_config=spec
        )
        return Engine(config, proposer=proposer, on_load=on_load)


@pytest.fixture(scope="module")
def plain(folders) -> Mapping[str, list[Outcome]]:
    """What each request gets without drafts, by target."""
    return Plain(folders)


class Plain(dict[str, list[Outcome]]):
    def __init__(self, folders: dict[str, str]) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, target: str) -> list[Outcome]:
        engine = start(self._folders | {"target": self._folders[target]}, None, prefix_cache="off")
        self[target] = run(engine, range(16))
        return self[target]


def drafted_on_device(engine: Engine) -> bool:
    return isinstance(engine.executor._runner._drafter, DeviceDrafter)


# -- launching ahead -----------------------------------------------------------------------------------------------


@pytest.mark.quick("draft_model")
@pytest.mark.parametrize(
    "method", ["draft_model", "eagle3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("itself", "eagle"))]
)  # not "mtp": plain experts look
def test_a_step_is_launched_while_nobody_has_waited_for_the_one_before(folders, plain, method):
    engine = start(folders, method, device=StrictDevice(), max_num_batched_tokens=64)
    waiting = []
    submit = engine.executor.submit
    engine.executor.submit = lambda plan: waiting.append(len(engine._in_flight)) or submit(plan)  # type: ignore
    free = [index for index in range(16) if index not in FOLLOWING]
    assert run(engine, free) == [plain[TARGETS.get(method, "target")][index] for index in free]
    assert drafted_on_device(engine) and max(waiting) == 1
    assert engine.stats.drafted > 100 and engine.stats.accepted > 0


@pytest.mark.parametrize(("method", "spec"), [("ngram", {}), ("eagle", {"tree_width": 2})])
def test_what_drafts_on_the_host_is_seen_to_wait(folders, method, spec):
    engine = start(folders, method, device=StrictDevice(), spec=spec)
    assert not drafted_on_device(engine)
    with pytest.raises(pytest.fail.Exception, match=r"while (another one|a step) is launched"):
        run(engine, range(16))


def test_the_classic_rule_waits(folders):
    assert not drafted_on_device(start(folders, "eagle", speculative_acceptance="rejection"))
    assert drafted_on_device(start(folders, "eagle"))


# -- the contract --------------------------------------------------------------------------------------------------


@pytest.mark.quick("0-eagle")
@pytest.mark.parametrize(("depth", "method"), AT_DEPTHS)
def test_drafts_change_nothing_at_any_depth_of_overlap(folders, plain, method, depth):
    outcomes = plain[TARGETS.get(method, "target")]
    cache = ("hash", "radix", "off")[depth]
    engine = start(folders, method, async_scheduling=depth > 0, prefix_cache=cache, max_num_batched_tokens=64)
    engine._depth = depth
    assert run(engine, range(16)) == outcomes
    assert run(engine, range(15, -1, -1), first_id=100, stagger=2) == outcomes, "warm"
    assert engine.stats.drafted > 100 and engine.stats.accepted > 0


@pytest.mark.slow  # but for three of them, see the next test
def test_a_request_gets_alone_what_it_gets_among_others_without_drafts(folders, plain):
    engine = start(folders, "itself", 8)
    assert [run(engine, [index])[0] for index in range(16)] == plain["target"]


@pytest.mark.quick("1")
@pytest.mark.parametrize("drafts", [1, 8, *(pytest.param(drafts, marks=pytest.mark.slow) for drafts in range(2, 8))])
def test_drafts_of_any_length_change_nothing(folders, plain, drafts):
    engine = start(folders, "itself", drafts, max_num_batched_tokens=80)
    assert [run(engine, [index])[0] for index in (1, 2, 5)] == [plain["target"][index] for index in (1, 2, 5)]
    assert run(engine, range(16), first_id=100) == plain["target"]
    assert engine.stats.accepted == engine.stats.drafted > 50


@pytest.mark.quick("1-itself")
@pytest.mark.parametrize(
    ("depth", "method"),
    [
        pytest.param(depth, method, marks=() if (depth, method) in PREEMPTED else pytest.mark.slow)
        for depth in (0, 1, 2)
        for method in METHODS
    ],
)
def test_drafts_change_nothing_while_requests_preempt_each_other(folders, plain, method, depth):
    engine = start(folders, method, num_kv_blocks=20, max_num_batched_tokens=40)
    engine._depth = depth
    assert run(engine, range(16)) == plain[TARGETS.get(method, "target")]
    assert engine.stats.preemptions > 0 and engine.stats.drafted > 0
    if method == "itself":
        assert engine.stats.accepted == engine.stats.drafted


@pytest.mark.parametrize(
    "graphs", ["lazy", *(pytest.param(graphs, marks=pytest.mark.slow) for graphs in ("off", "eager"))]
)
def test_drafts_change_nothing_with_graphs_or_without(folders, plain, graphs):
    device = DelayedDevice()
    engine = start(folders, "eagle3", device=device, cuda_graphs=graphs, max_num_seqs=8)
    assert run(engine, range(4, 14), prompt_logprobs=1) == plain["deep"][4:14]
    assert (device.num_replayed > 0) == (graphs != "off")
    assert device.num_elsewhere == 0


@pytest.mark.slow
def test_self_tuning_drafts_and_changes_nothing(folders, plain):
    for method, stagger in (("itself", 0), ("eagle", 1)):
        engine = start(folders, method, 6, spec={"adaptive": True})
        assert run(engine, range(16), stagger=stagger) == plain["target"]
        assert engine.stats.drafted > 0


def test_where_masks_need_tokens_there_are_no_drafts(folders, plain):
    engine = start(folders, "itself")
    assert run(engine, UNDRAFTED) == [plain["target"][index] for index in UNDRAFTED]
    assert 0 < engine.stats.drafted < 24, "what follows once min_tokens are there"


def test_requests_that_are_let_go_get_no_drafts_and_the_same_tokens(folders, plain):
    engine = start(folders, "itself", 3)
    schedule, steps = engine.scheduler.schedule, [0]

    def letting_go(now: float) -> Any:
        plan = schedule(now)
        steps[0] += 1
        for span in plan.spans if plan is not None and steps[0] in (5, 9) else ():
            if not span.start_follows and span.request % 3 == 0:
                plan.drop_drafting.append(span.request)
                engine.scheduler.requests[span.request].draft_state.drafting_enabled = False
        return plan

    engine.scheduler.schedule = letting_go  # type: ignore[method-assign]
    assert run(engine, range(16)) == plain["target"]
    assert engine.stats.accepted == engine.stats.drafted > 50


# -- what is drafted -----------------------------------------------------------------------------------------------


class OnHost(DraftingProposer):
    """In place of what drafts on the device."""

    def __init__(self, model: Any, lead: int, most: int) -> None:
        super().__init__(model, lead)
        self.keeps = 1


@pytest.mark.quick("draft_model")
@pytest.mark.parametrize("method", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3", "draft_model"])
def test_the_drafts_are_those_of_the_host(folders, method):
    """As many are accepted of each request, whatever is cached, chunked or in flight."""
    found = []
    for kind in (OnHost, DeviceDraftingProposer):
        with mock.patch.object(methods, "DeviceDraftingProposer", kind):
            engine = start(folders, method, 3, max_num_batched_tokens=50, prefix_cache="hash")
        counts = []
        for index in (1, 11, 12):  # short, and two in chunks, of which the second finds blocks of the first
            run(engine, [index])
            counts.append((engine.stats.drafted, engine.stats.accepted))
        assert drafted_on_device(engine) == (kind is DeviceDraftingProposer)
        found.append(counts)
    assert found[0] == found[1]
    assert found[0][-1][1] > 0


@pytest.mark.quick("16")
@pytest.mark.parametrize("lag", [1, 16])
def test_requests_that_were_not_drafted_for_a_while_are_caught_up_with(folders, plain, lag):
    """Whatever waits, the drafts of a model that is the target are all accepted."""
    engine = start(folders, "itself", 3)
    reserve = engine.scheduler._reserve_drafts
    asked: dict[int, int] = {}

    def sometimes(given: Request, count: int) -> int:
        asked[given.id] = asked.get(given.id, 0) + 1
        return reserve(given, count) if asked[given.id] % (lag + 1) == 0 else 0

    engine.scheduler._reserve_drafts = sometimes  # type: ignore[method-assign]
    assert run(engine, range(16)) == plain["target"]
    assert engine.stats.accepted == engine.stats.drafted > 0


def test_more_preempted_requests_than_rows_grow_what_waits(folders):
    found = []
    for method in (None, "eagle"):
        engine = start(folders, method, max_num_seqs=2, scheduling_policy="priority", num_kv_blocks=400)
        tokens: dict[int, list[int]] = {number: [] for number in range(8)}
        steps = 0
        while steps < 16 or not engine.idle:
            if steps < 16 and steps % 2 == 0:
                number = steps // 2
                params = SamplingParams(temperature=0.0, seed=0, priority=-number, ignore_eos=True).resolved()
                engine.add(Request(number, prompts()[number], params, max_tokens=12))
            for update in engine.step():
                tokens[update.request] += update.tokens
            steps += 1
        assert engine.stats.preemptions > 4
        found.append(tokens)
    assert found[0] == found[1] and engine.stats.drafted > 0


# -- whatever is drafted -------------------------------------------------------------------------------------------


class Recorded(DeviceProposer):
    """Proposes as `choose` says; it may look at the device."""

    keeps = kept_tokens(8)

    def __init__(self, outcomes: Sequence[Outcome], choose: Callable[[list[int], int], Any]) -> None:
        self._texts = [[*prompt, *out[0]] for prompt, out in zip(prompts(), outcomes, strict=True)]
        self._choose = choose

    def start(self, info: Any) -> None: ...

    def end(self, request: int) -> None: ...

    def restart(self, request: int, start: int) -> None: ...

    def settle(self, request: int, length: int) -> None: ...

    def follow(self, computed: Any, placed: Any, features: torch.Tensor, context: DeviceContext) -> None: ...

    def propose(self, asked: Sequence[Asked], context: DeviceContext) -> Lines | None:
        wanted = [each for each in asked if each.drafts]
        if not wanted:
            return None
        ends = context.ends([each.request for each in wanted])
        lines = torch.full((len(wanted), max(each.drafts for each in wanted)), -1)
        for line, each, row, length in zip(lines, wanted, *map(torch.Tensor.tolist, ends), strict=True):
            text = self._texts[each.request % 100]
            assert each.certain <= length <= each.most
            if length <= len(text):
                assert context.recent[row, (length - 1) % self.keeps] == text[length - 1]
            tokens = self._choose(text[length:], each.drafts).tokens[: lines.shape[1]]
            line[: len(tokens)] = torch.tensor(tokens)
        return self.answer(Lines([each.request for each in wanted], lines))

    def answer(self, lines: Lines) -> Lines:
        return lines


@pytest.mark.quick("True-8-right")
@pytest.mark.parametrize(
    ("overlap", "drafts", "choice"),
    [
        pytest.param(overlap, drafts, choice, marks=() if choice in choices else pytest.mark.slow)
        for overlap, drafts, choices in (
            (False, 3, ("right, then wrong",)),
            (True, 8, ("right", "random")),
            (True, 1, ()),
        )
        for choice in ("right", "wrong", "right, then wrong", "random", "failing")
    ],
)
def test_whatever_is_drafted_the_output_is_the_same(folders, plain, choice, overlap, drafts):
    proposer = Recorded(plain["target"], CHOICES[choice])
    engine = start(folders, "ngram", drafts, proposer=proposer, async_scheduling=overlap, max_num_batched_tokens=64)
    assert run(engine, range(16)) == plain["target"]
    assert run(engine, range(15, -1, -1), first_id=100, stagger=2) == plain["target"]
    assert (engine.stats.drafted > 0) == (choice != "failing")
    if choice == "right":
        assert engine.stats.accepted > 200


@pytest.mark.quick("too many", "no integers", "for fewer")
@pytest.mark.parametrize(
    "answer",
    [
        lambda lines: Lines(lines.requests, lines.tokens.repeat(1, 40)),
        lambda lines: Lines(lines.requests, lines.tokens + 2**40),
        lambda lines: Lines(lines.requests, -2 - lines.tokens),
        lambda lines: Lines(lines.requests, lines.tokens.float()),
        lambda lines: Lines(lines.requests, lines.tokens[:, :0]),
        lambda lines: Lines(lines.requests[1:], lines.tokens),
        lambda lines: Lines([7000, *lines.requests[1:]], lines.tokens),
    ],
    ids=["too many", "beyond the vocabulary", "below it", "no integers", "none", "for fewer", "for others"],
)
def test_nonsense_costs_speed_and_nothing_else(folders, plain, answer):
    proposer = Recorded(plain["target"], CHOICES["right, then wrong"])
    proposer.answer = answer
    engine = start(folders, "ngram", 4, proposer=proposer, max_num_batched_tokens=64)
    assert run(engine, range(6)) == plain["target"][:6]


@pytest.mark.quick("propose")
@pytest.mark.parametrize(
    "what",
    [
        "propose",
        "follow",
        *(pytest.param(what, marks=pytest.mark.slow) for what in ("restart", "start", "end", "settle")),
    ],
)
def test_a_proposer_that_fails_costs_speed_and_nothing_else(folders, plain, what, caplog):
    engine = start(folders, "eagle", max_num_batched_tokens=40, num_kv_blocks=20)
    assert engine.speculation is not None
    draw, whole = random.Random(3), getattr(engine.speculation.proposer, what)

    def sometimes(*args: Any) -> Any:
        if draw.random() < 0.5:
            raise RuntimeError("this proposer fails now and then")
        return whole(*args)

    with mock.patch.object(engine.speculation.proposer, what, sometimes):
        assert run(engine, range(6, 14)) == plain["target"][6:14]
    assert (
        sum("the proposer failed to" in record.message for record in caplog.records if record.levelname == "ERROR") == 1
    )


@pytest.mark.quick("right-False")
@pytest.mark.parametrize(
    ("choice", "overlap"),
    [
        pytest.param(choice, overlap, marks=() if overlap == (choice == "wrong") else pytest.mark.slow)
        for choice in ("right", "wrong")
        for overlap in (False, True)
    ],
)
def test_drafts_that_are_not_finite_spoil_nothing(tmp_path, choice, overlap):
    bad = save_with_bad_tokens(tmp_path)
    folders = {"target": str(tmp_path)}
    plain = ends(start(folders, None))
    assert 2 < sum(out[-1] in ("length", "stop") for out in plain) < 14
    draw = random.Random(4)

    def choose(coming: list[int], count: int) -> Any:
        drafts = CHOICES[choice](coming, count)
        drafts.tokens = [draw.choice(bad) if draw.random() < 0.05 else token for token in drafts.tokens]
        return drafts

    outcomes: list[Outcome] = [(tuple(t for t in out if isinstance(t, int)), (), None) for out in plain]
    engine = start(folders, "ngram", 6, proposer=Recorded(outcomes, choose), async_scheduling=overlap)
    assert ends(engine) == plain
    stats = engine.stats
    assert stats.drafted > 0 and sum(stats.accepted_by_position) == stats.accepted >= 0


# -- what goes wrong -----------------------------------------------------------------------------------------------


def test_out_of_memory_halves_a_step_with_drafts(folders, plain):
    engine = start(folders, "itself", 8, cuda_graphs="off")
    forward, failures = engine.model.forward, []

    def small(batch: list[Any], kv: Any, aux: Any = None) -> torch.Tensor:
        if len(batch[0].token_ids) > 64:
            failures.append(len(batch[0].token_ids))
            raise torch.OutOfMemoryError("no")
        return forward(batch, kv, aux)

    engine.model.forward = small  # type: ignore[method-assign]
    indices = [0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15]  # with prompts of up to 53 tokens
    assert run(engine, indices) == [plain["target"][index] for index in indices]
    assert len(failures) > 3 and engine.stats.accepted == engine.stats.drafted > 0


def test_memory_that_runs_out_behind_the_sampling_counts_nothing_twice(folders, plain):
    engine = start(folders, "itself")
    runner = engine.executor._runner
    count, draw = runner.sampler.count, random.Random(1)

    def small(requests: Sequence[int], tokens: torch.Tensor) -> None:
        if len(requests) > 1 and draw.random() < 0.3:
            raise torch.OutOfMemoryError("no")
        count(requests, tokens)

    with mock.patch.object(runner.sampler, "count", small):
        assert run(engine, range(16)) == plain["target"]
    assert runner.num_halved > 5 and engine.stats.accepted == engine.stats.drafted > 100


class ScarceDevice(DelayedDevice):
    """Memory runs out now and then, whatever asks for some. What is done in place asks for none."""

    def __init__(self) -> None:
        super().__init__()
        self.share, self.draw = 0.0, random.Random(1)

    @contextmanager
    def active(self) -> Iterator[None]:
        with super().active(), _Scarce(self):
            yield


class _Scarce(TorchFunctionMode):
    def __init__(self, device: ScarceDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.__name__.endswith("_") and self._device.draw.random() < self._device.share:
            raise torch.OutOfMemoryError("no")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("share", "method"),
    [
        (0.004, "eagle"),
        *(
            pytest.param(share, method, marks=pytest.mark.slow)
            for method in ("itself", "eagle")
            for share in (0.001, 0.002, 0.004)
            if (share, method) != (0.004, "eagle")
        ),
    ],
)
def test_wherever_memory_runs_out_no_request_gets_other_tokens(folders, plain, method, share):
    device = ScarceDevice()
    engine = start(folders, method, device=device, cuda_graphs="off", max_num_batched_tokens=64)
    device.share = share
    found: dict[int, list[int]] = {index: [] for index in range(16)}
    failed = set()
    for index in found:
        engine.add(request(index, index))
    while not engine.idle:
        for update in engine.step():
            found[update.request] += update.tokens
            if update.error is not None:
                failed.add(update.request)
    assert engine.executor._runner.num_halved > 0 and len(failed) < 16
    for index, tokens in found.items():
        wanted = plain["target"][index][0]
        assert tuple(tokens) == (wanted[: len(tokens)] if index in failed else wanted)


@pytest.mark.quick("error0")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), torch.AcceleratorError("CUDA error: out of memory")])
def test_a_proposer_without_memory_for_what_follows_the_tokens_leaves_them_accepted(folders, plain, error):
    """Those of the device, or of the host, where torch has no class for it."""
    engine = start(folders, "eagle", cuda_graphs="off")
    proposer, draw = engine.speculation.proposer, random.Random(4)
    follow = proposer.follow

    def sometimes(*args: Any) -> None:
        if draw.random() < 0.2:
            raise error
        follow(*args)

    with mock.patch.object(proposer, "follow", sometimes):
        assert run(engine, range(8)) == plain["target"][:8]
    assert engine.executor._runner.num_halved == 0


def test_a_request_that_does_not_fit_alone_ends_alone(folders, plain):
    engine = start(folders, "eagle", cuda_graphs="off")
    forward = engine.model.forward

    def small(batch: list[Any], kv: Any, aux: Any = None) -> torch.Tensor:
        if len(batch[0].token_ids) > 80:
            raise torch.OutOfMemoryError("no")
        return forward(batch, kv, aux)

    engine.model.forward = small  # type: ignore[method-assign]
    found: dict[int, list[Any]] = {index: [] for index in (1, 5, 8)}
    for index in found:
        engine.add(request(index, index))
    while not engine.idle:
        for update in engine.step():
            found[update.request] += [*update.tokens, *filter(None, (update.error,))]
    assert found[8] == [OUT_OF_MEMORY]  # 127 tokens
    assert all(tuple(found[index]) == plain["target"][index][0] for index in (1, 5))


def test_requests_may_be_aborted_at_any_time(folders, plain):
    engine = start(folders, "itself", num_kv_blocks=40)
    draw = random.Random(2)
    for round in range(2):
        for index in range(16):
            engine.add(request(index, 100 * round + index))
        tokens: dict[int, list[int]] = {}
        aborted = set()
        while not engine.idle:
            if draw.random() < 0.3:
                aborted.add(draw.randrange(16))
                engine.abort(100 * round + max(aborted))
            for update in engine.step():
                assert update.error is None
                tokens.setdefault(update.request % 100, []).extend(update.tokens)
        for index, made in tokens.items():
            whole = plain["target"][index][0]
            assert tuple(made) == whole[: len(made)] and (index in aborted or len(made) == len(whole))


@pytest.mark.quick("forward")
@pytest.mark.parametrize("what", ["forward", "sample", "download"])
def test_a_step_that_cannot_be_launched_ends_its_requests_and_no_others(folders, plain, what):
    """Whether that is seen before the device's tables change, or behind it."""
    engine = start(folders, "itself", cuda_graphs="off", max_num_seqs=2)
    runner = engine.executor._runner
    owner = {"forward": engine.model, "sample": runner._drafter, "download": runner.device}[what]
    for index in (0, 1, 2, 3):
        engine.add(request(index, index))
    found: dict[int, list[Any]] = {index: [] for index in range(4)}

    def step() -> None:
        for update in engine.step():
            found[update.request] += [*update.tokens, *filter(None, (update.error,))]

    step()
    step()
    with mock.patch.object(owner, what, mock.Mock(side_effect=ValueError("broken"))):
        step()
    while not engine.idle:
        step()
    for index in (0, 1):
        *tokens, error = found[index]
        assert "the step that computed this request failed" in error
        assert tuple(tokens) == plain["target"][index][0][: len(tokens)]
    assert all(tuple(found[index]) == plain["target"][index][0] for index in (2, 3))
    assert run(engine, range(4, 9), first_id=100) == plain["target"][4:9]
    assert engine.stats.accepted == engine.stats.drafted > 50


# -- parts ---------------------------------------------------------------------------------------------------------


def test_keys_made_on_the_device_are_those_of_the_host():
    draw = random.Random(1)
    places = [(draw.getrandbits(64), draw.randrange(4), draw.randrange(2**20)) for _ in range(200)]
    purpose = sampling.Purpose.SAMPLE
    streams = [sampling.noise_stream(seed, choice, purpose) for seed, choice, _ in places]
    signed = torch.tensor([stream - (stream >> 63 << 64) for stream in streams])
    made = sampling.keys_at(signed, torch.tensor([position for _, _, position in places]))
    assert made.tolist() == [sampling.noise_key(seed, choice, purpose, position) for seed, choice, position in places]


@pytest.mark.parametrize("reported", [None, 2])
def test_rows_are_sampled_alike_whether_the_host_knows_where_they_stand(reported):
    """With and without penalties, before and behind drafts, and again once some of these are counted."""
    torch.manual_seed(0)
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    logits = torch.randn(6, 30)
    logits[:, [5, 9, 20]] += 3.0  # what is penalized would win
    drafts = [[], [20], [20, 9], [], [9], []]
    rows = [Row(number, 4 + len(ahead), ahead) for number, ahead in zip([0, 0, 0, 1, 1, 2], drafts, strict=True)]
    known, unknown = Sampler(30, SpanKernels(), DelayedDevice()), Sampler(30, SpanKernels(), DelayedDevice())
    for sampler in (known, unknown):
        for number, more in ((0, penalties), (1, {}), (2, penalties)):
            given = SamplingParams(temperature=0.7, top_p=0.9, seed=number, logprobs=reported, **more).resolved()
            sampler.start(RequestInfo(number, given, 0, [4, 5, 6], [9]))
    for _ in range(2):
        places = [(row.request, row.position) for row in rows]
        wanted = known.launch_with_drafts(logits.clone(), rows)
        ahead = Ahead(
            torch.tensor([row.position for row in rows]), torch.from_numpy(padded([row.ahead for row in rows]))
        )
        found = unknown.launch_ahead(logits.clone(), places, ahead)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.tokens.tolist() == unknown.draw_ahead(logits.clone(), places, ahead).tolist()
        for sampler, sampled in ((known, wanted), (unknown, found)):
            sampler._device.mark().wait()
            assert sampled.finish() == wanted.finish()
        unknown.count([0, 1, 2], torch.tensor([[20, 9], [-1, -1], [5, -1]]))
        for number, tokens in ((0, [20, 9]), (2, [5])):
            known.take(number, tokens)
            unknown.take(number, tokens, counted=True)
        logits, rows = logits[-3:], [Row(0, 6), Row(0, 7, [20]), Row(2, 5)]
