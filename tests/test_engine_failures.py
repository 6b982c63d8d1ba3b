"""Steps that fail, are interrupted or lost: nobody gets a token twice or not at all, and only who is to blame ends."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core import scheduler
from quire.core.invariants import check
from quire.core.kv_manager import KVManager
from quire.core.request import RequestUpdate
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan
from quire.engine.engine import Engine
from quire.engine.executor import InlineExecutor
from quire.ops import Kernels
from quire.ops.elementwise import Activation
from quire.runner import model_runner
from quire.runner.device import Device
from quire.runner.model_runner import OUT_OF_MEMORY, STEP_FAILED, ModelRunner
from quire.runner.sampler import Sampler
from tests.devices import DelayedDevice, SpanKernels, on_device
from tests.oracle import save_checkpoint
from tests.test_speculation import CHOICES, Outcome, Recorded, config, request, run

INDICES = (1, 4, 5, 9, 11, 12, 14)
"""Of `test_speculation.request`: with noise, penalties, bad words and shared heads."""
CULPRIT = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2))


@pytest.fixture(scope="module")
def outcomes(folder) -> list[Outcome]:
    """What each request gets alone."""
    engine = Engine(config(folder, {"cpu_kernels": "torch"}, 0, prefix_cache="off"))
    return [run(engine, [index])[0] for index in range(16)]


WAYS = ("inline", "thread", "device")


def start(folder: str, outcomes: list[Outcome], way: str, drafts: int = 0, **more: Any) -> Engine:
    proposer = Recorded(outcomes, CHOICES["right, then wrong"]) if drafts else None
    options = {"cpu_kernels": "torch", "async_scheduling": way != "inline", "cuda_graphs": "off"} | more
    if way != "device":
        return Engine(config(folder, options, drafts), proposer=proposer)
    with on_device(DelayedDevice(), SpanKernels()):
        return Engine(config(folder, options, drafts), proposer=proposer)


def run_with_culprits(engine: Engine, *culprits: int) -> tuple[list[Outcome], list[RequestUpdate]]:
    """What `INDICES` get beside culprits, which have their ids from 100 on, and the ends of those."""
    tokens: dict[int, list[int]] = {index: [] for index in INDICES}
    values: dict[int, list[tuple[float, ...]]] = {index: [] for index in INDICES}
    reasons: dict[int, str | None] = {}
    ends = []
    for index in INDICES[:3]:
        engine.add(request(index, index))
    for id in culprits:
        engine.add(request(2, id))
    for index in INDICES[3:]:
        engine.add(request(index, 200 + index))
    for update in until_idle(engine):
        index = update.request % 200
        if index in culprits:
            ends += [update] if update.finish_reason else []
            continue
        assert update.error is None
        tokens[index] += update.tokens
        values[index] += [(*entry.ids, *entry.values) for entry in update.logprobs or ()]
        reasons[index] = update.finish_reason
    return [(tuple(tokens[i]), tuple(values[i]), reasons[i]) for i in INDICES], ends


def until_idle(engine: Engine) -> list[RequestUpdate]:
    updates: list[RequestUpdate] = []
    for _ in range(2000):
        if engine.idle:
            check(engine.scheduler)
            kv = engine.scheduler.kv
            assert kv.num_available == kv.num_usable, "blocks were lost"
            return updates
        updates += engine.step()
    raise AssertionError("the engine does not come to an end")


# -- errors --------------------------------------------------------------------------------------------------------


def fail_in(place: str, monkeypatch: pytest.MonkeyPatch, culprits: set[int], position: int, error: Exception) -> None:
    """Whatever has to do with these requests from a position on fails there."""

    def concerns(spans: Any) -> bool:
        return any(span.request in culprits and span.start + len(span.tokens) >= position for span in spans)

    def failing(original: Callable[..., Any], of: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if of(*args):
                raise error
            return original(*args, **named)

        return call

    owner, name, of = {
        "compute": (ModelRunner, "_compute_at_once", lambda runner, spans, drafts: concerns(spans)),
        "sampler": (Sampler, "start", lambda sampler, info: info.request in culprits),
        "launch": (ModelRunner, "launch", lambda runner, plan: concerns(plan.spans)),
        "wait": (model_runner.Part, "results", lambda part: concerns(part.spans)),
    }[place]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), of))


@pytest.mark.quick("compute-thread", "sampler-device", "launch-inline", "wait-inline")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["compute", "sampler", "launch", "wait"])
def test_only_the_request_that_makes_steps_fail_ends(folder, outcomes, monkeypatch, caplog, way, place):
    late = place in ("compute", "wait")
    fail_in(place, monkeypatch, {CULPRIT}, 10 if late else 0, ValueError("a poisoned request"))
    engine = start(folder, outcomes, way, drafts=4 if late else 0)
    others, [end] = run_with_culprits(engine, CULPRIT)
    assert others == [outcomes[index] for index in INDICES]
    assert (end.finish_reason, end.error) == ("error", STEP_FAILED)
    [told] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"request {CULPRIT} " in told.message and "a poisoned request" in told.message
    assert "halvings: 3" in told.message or "halvings: 2" in told.message
    assert told.exc_info, "with a traceback"
    caplog.clear()
    assert run(engine, INDICES, first_id=300) == [outcomes[index] for index in INDICES]
    assert not caplog.records


@pytest.mark.quick("compute")
@pytest.mark.parametrize("place", ["compute", "launch", "wait"])
def test_of_several_requests_that_make_steps_fail_each_ends(folder, outcomes, monkeypatch, place):
    fail_in(place, monkeypatch, {100, 102, 103}, 0, ValueError("a poisoned request"))
    engine = start(folder, outcomes, "thread", drafts=2, max_num_seqs=6)
    others, ends = run_with_culprits(engine, 100, 101, 102, 103)
    assert others == [outcomes[index] for index in INDICES]
    assert {end.request: end.error for end in ends} == {100: STEP_FAILED, 101: None, 102: STEP_FAILED, 103: STEP_FAILED}


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_that_does_not_come_again_ends_nobody(folder, outcomes, monkeypatch, way):
    engine = start(folder, outcomes, way, drafts=3)
    wait, draw = model_runner.LaunchedStep.wait, random.Random(3)

    def failing(step: model_runner.LaunchedStep) -> Any:
        if not engine.scheduler.trials.on and draw.random() < 0.2:
            raise ValueError("bad luck")
        return wait(step)

    monkeypatch.setattr(model_runner.LaunchedStep, "wait", failing)
    assert run_with_culprits(engine) == ([outcomes[index] for index in INDICES], [])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("of Python's"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    ],
)
def test_memory_that_a_cpu_lacks_halves_a_step(folder, outcomes, error, caplog):
    class Small(Kernels):
        """Has no memory for more than 100 rows at once."""

        def activate(self, x: torch.Tensor, how: Activation) -> torch.Tensor:
            if len(x) > 100:
                raise type(error)(*error.args)
            return super().activate(x, how)

    with on_device(Device(), Small()):
        engine = Engine(config(folder, {"async_scheduling": False}, 0))
    fitting = [index for index in INDICES if index != 9]
    engine.add(request(9, 0))  # 128 tokens
    for index in fitting:
        engine.add(request(index, index))
    updates = until_idle(engine)
    assert {update.request: update.error for update in updates if update.error} == {0: OUT_OF_MEMORY}
    for index in fitting:
        tokens = tuple(token for update in updates if update.request == index for token in update.tokens)
        assert tokens == outcomes[index][0]
    assert any(record.message.startswith("out of memory in a step of ") for record in caplog.records)


# -- interruptions -------------------------------------------------------------------------------------------------


@pytest.mark.quick("inline-wait-KeyboardInterrupt", "thread-launch-KeyboardInterrupt", "device-launch-SystemExit")
@pytest.mark.parametrize(
    ("way", "place", "error"),
    list(itertools.product(WAYS, ("launch", "wait"), (SystemExit, KeyboardInterrupt))),
)
def test_whatever_comes_out_of_a_step_the_next_one_goes_on_without_it(folder, outcomes, way, place, error, monkeypatch):
    engine = start(folder, outcomes, way, drafts=3)
    owner, name = (ModelRunner, "_settle") if place == "launch" else (model_runner.LaunchedStep, "wait")
    original, calls = getattr(owner, name), []

    def raising(self: Any) -> Any:
        calls.append(1)
        if len(calls) in (3, 4, 9):
            raise error
        return original(self)

    monkeypatch.setattr(owner, name, raising)
    found = run_through(engine, error)
    assert found == [outcomes[index] for index in INDICES] and len(calls) > 9


@pytest.mark.quick("Scheduler-_plan", "KVManager-admit")
@pytest.mark.parametrize(
    ("owner", "name"), [(Scheduler, "_plan"), (scheduler, "next_span"), (KVManager, "reserve"), (KVManager, "admit")]
)
def test_a_step_that_cannot_be_planned_leaves_no_trace(folder, outcomes, owner, name, monkeypatch):
    engine = start(folder, outcomes, "thread", drafts=3, max_num_batched_tokens=64)
    original, draw = getattr(owner, name), random.Random(5)

    def raising(*args: Any) -> Any:
        if draw.random() < 0.1:
            raise MemoryError
        return original(*args)

    monkeypatch.setattr(owner, name, raising)
    assert run_through(engine, MemoryError) == [outcomes[index] for index in INDICES]


def test_requests_of_a_step_that_cannot_be_committed_end_and_all_others_go_on(folder, outcomes, monkeypatch):
    engine = start(folder, outcomes, "inline", max_num_batched_tokens=64)
    original, calls = KVManager.publish, []

    def raising(kv: KVManager, req: Any) -> Any:
        calls.append(req.id)
        if len(calls) == 3:
            raise MemoryError
        return original(kv, req)

    monkeypatch.setattr(KVManager, "publish", raising)
    for index in INDICES:
        engine.add(request(index, index))
    tokens: dict[int, list[int]] = {index: [] for index in INDICES}
    ends: dict[int, str | None] = {}
    while not engine.idle:
        try:
            updates = engine.step()
        except MemoryError:
            continue
        for update in updates:
            tokens[update.request] += update.tokens
            if update.finish_reason:
                assert update.request not in ends
                ends[update.request] = update.error
    check(engine.scheduler)
    assert 0 < sum(error is None for error in ends.values()) < len(ends) == len(INDICES)
    for index, error in ends.items():
        wanted = outcomes[index][0]
        assert tuple(tokens[index]) == (wanted if error is None else wanted[: len(tokens[index])])


def run_through(engine: Engine, error: type[BaseException]) -> list[Outcome]:
    """As `run`, going on after each such error."""
    step, raised = engine.step, []

    def go_on() -> list[RequestUpdate]:
        try:
            return step()
        except error:
            raised.append(1)
            check(engine.scheduler)
            return []

    engine.step = go_on  # type: ignore[method-assign]
    found = run(engine, INDICES)
    assert raised
    return found


def test_a_fresh_runner_goes_on_where_another_one_was(folder, outcomes):
    engine = start(folder, outcomes, "inline")
    tokens: dict[int, list[int]] = {index: [] for index in INDICES}
    for index in INDICES:
        engine.add(request(index, index))
    for step in range(2000):
        if engine.idle:
            break
        if step in (4, 9):
            old = engine.executor._runner
            engine.executor = InlineExecutor(ModelRunner(old.model, old.kv, old._logit_rows, 1))
            engine.scheduler.restart()
        for update in engine.step():
            tokens[update.request] += update.tokens
    assert [tuple(tokens[index]) for index in INDICES] == [outcomes[index][0] for index in INDICES]


def test_a_runner_that_lacks_state_says_so(folder, outcomes):
    engine = start(folder, outcomes, "inline")
    engine.add(request(1, 7))
    engine.step()
    plan = engine.scheduler.schedule(0.0)
    plan.number += 1
    with pytest.raises(RuntimeError, match=r"plan 2 came where plan 1 was next, and it does not start request 7"):
        engine.executor._runner.launch(plan)
    plan.number = 1
    with pytest.raises(RuntimeError, match="plan 1 came where a gap was next"):
        engine.executor._runner.launch(plan)


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


PROMPTS = [[5, 6, 7, 8] * 5, [5, 6, 7, 8] * 4, [9, 10, 11]]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
INTERRUPTED = ("quire.core.", "quire.runner.", "quire.engine.engine", "quire.engine.executor", "quire.engine.frontend")


def press_at(line: int, presses: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function: Ctrl-C is pressed before the engine's next so many lines, counted from this one on."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable[[FrameType, str, Any], Any] | None:
        nonlocal count
        if not frame.f_globals["__name__"].startswith(INTERRUPTED):
            return None
        if event == "line":
            count += 1
            if line <= count < line + presses:
                signal.raise_signal(signal.SIGINT)
        return trace

    return trace


@pytest.mark.quick("False")
@pytest.mark.parametrize("overlap", [False, True])
def test_wherever_ctrl_c_is_pressed_twice_no_token_is_lost_or_told_again(folder, overlap):
    llm = LLM(folder, async_scheduling=overlap, threads=1, max_model_len=64, check_invariants=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    draw, pressed = random.Random(2), 0
    for _ in range(20):
        requests = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
        outputs = {}
        trace, before = press_at(draw.randrange(1, 5000), draw.choice([2, 2, 3])), sys.gettrace()
        while not llm.idle:
            sys.settrace(trace)
            try:
                changed = llm.step()
            except KeyboardInterrupt:
                pressed += 1
                continue
            finally:
                sys.settrace(before)
            outputs.update((output.request_id, output) for output in changed)
        assert [outputs[request].outputs[0].token_ids for request in requests] == expected
        assert all(output.finished for output in outputs.values())
        check(llm._engine.scheduler)
        kv = llm._engine.scheduler.kv
        assert kv.num_available == kv.num_usable
    assert pressed >= 15
    llm.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_ctrl_c_ends_a_batch_in_the_middle_of_a_step_and_leaves_an_engine_that_works(
    folder, overlap, monkeypatch
):
    llm = LLM(folder, async_scheduling=overlap, threads=1, max_model_len=64, check_invariants=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    forward, calls, main = llm.model.forward, [], threading.main_thread().ident
    submit, submitted = llm._engine.executor.submit, []
    came_through, waited = threading.Event(), []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)

    def wake() -> None:
        """Python sees a signal that comes just before it waits for a lock only when another one comes."""
        signal.pthread_kill(main, signal.SIGUSR1)
        time.sleep(0.001)

    def pressed(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            while overlap and len(submitted) < 4:  # then it waits for this step; before, the first comes through
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)
            while not llm._interrupts._num_held:  # two signals before the first is handled are one
                wake()
            signal.pthread_kill(main, signal.SIGINT)
            if overlap:  # the thread is busy with the step until nobody waits for it any more
                deadline = time.monotonic() + 60
                while not came_through.wait(0.01) and time.monotonic() < deadline:
                    wake()
                waited.append(came_through.is_set())
        return forward(*args)

    def counted(plan: StepPlan) -> Any:
        pending = submit(plan)
        submitted.append(plan)
        return pending

    monkeypatch.setattr(llm._engine.executor, "submit", counted)
    monkeypatch.setattr(llm.model, "forward", pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    came_through.set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.idle
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert waited == [True] * overlap
    signal.signal(signal.SIGUSR1, before)
    llm.close()
