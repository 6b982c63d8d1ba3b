"""`--profile`: what the trace file says, that Perfetto can read it, and that it never disturbs the engine."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.request import RequestUpdate
from quire.core.step import Span, SpanResult, StepPlan, StepResult
from quire.errors import ConfigError
from quire.observe import timeline as module
from quire.observe.timeline import (
    BETWEEN_STEPS,
    DEVICE,
    FIRST_PROFILED_STEP,
    MAX_SPANS,
    PROFILED_STEPS,
    SCHEDULER,
    KernelProfile,
    Timeline,
    TraceFile,
)

from .core.fake_runner import make_request, make_scheduler, outputs

Event = dict[str, Any]


# -- a real run -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """The events of a run of the embedded model, with steps scheduled while others run."""
    folder = tmp_path_factory.mktemp("timeline")
    with LLM("demo", profile=str(folder / "new" / "one"), max_num_batched_tokens=64, max_num_seqs=4) as llm:
        params = [SamplingParams(max_tokens=count, seed=7) for count in (4, 9, 6, 5, 8, 3)]
        llm.generate(["def f():\n", "import os\n" * 30, "x", "y", "class A:\n", "z"], params)
    [path] = (folder / "new" / "one").iterdir()
    return events_of(path)


def test_a_real_run_keeps_the_format(demo: list[Event]) -> None:
    check_format(demo)
    check_lanes(demo)
    assert {event["args"]["name"] for event in demo if event["name"] == "thread_name"} == {"scheduler", "device"}


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_other_ranks_have_a_lane_with_the_steps_that_they_computed(sizes: dict[str, int], tmp_path: Path) -> None:
    """At the same times: ranks of a machine have one clock."""
    with LLM("demo", profile=str(tmp_path), threads=1, **sizes) as llm:
        llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=12, ignore_eos=True))
        steps = llm.stats.steps
    [path] = tmp_path.iterdir()
    events = events_of(path)
    check_format(events)
    check_lanes(events)
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {SCHEDULER: "scheduler", DEVICE: "device", DEVICE + 1: "rank 1"}
    own = {e["name"].split(":")[0]: e for e in events if e["ph"] == "X" and e["tid"] == DEVICE}
    others = {e["name"]: e for e in events if e["ph"] == "X" and e["tid"] == DEVICE + 1 and e["name"] != "slot"}
    assert len(own) == steps and len({*own} - {*others}) <= 1  # the last one may come too late
    for name in {*own} & {*others} if "tensor_parallel_size" in sizes else ():  # of a pipeline, slots
        begin = max(own[name]["ts"], others[name]["ts"])
        assert begin <= min(own[name]["ts"] + own[name]["dur"], others[name]["ts"] + others[name]["dur"])


def test_every_step_is_on_the_device_and_has_its_four_moments_on_the_host(demo: list[Event]) -> None:
    numbers = [slice["args"]["step"] for slice in slices(demo, DEVICE)]
    assert len(numbers) >= 9 and numbers == sorted(set(numbers))
    for name in ("schedule", "submit", "wait", "commit"):
        assert [each["args"]["step"] for each in slices(demo, SCHEDULER) if each["name"] == name] == numbers


def test_every_request_is_drawn_to_its_end(demo: list[Event]) -> None:
    ends = [event["args"] for event in demo if event["ph"] == "e" and event["name"] == "request"]
    assert sorted(end["output"] for end in ends) == [3, 4, 5, 6, 8, 9]
    assert {end["reason"] for end in ends} <= {"length", "stop"}
    begins = [event["args"] for event in demo if event["ph"] == "b" and event["name"] == "request"]
    assert sorted(begin["request"] for begin in begins) == list(range(6))
    chunks = [each for each in slices(demo, DEVICE) if "prompt chunk" in each["name"]]
    assert sum(each["args"]["tokens"] for each in chunks) >= sum(begin["prompt"] for begin in begins)


def test_counters_end_with_nothing_running(demo: list[Event]) -> None:
    assert last_counters(demo) == {"running": 0, "waiting": 0, "used": 0, "tokens": 0}
    running = [event["args"]["running"] for event in demo if event["name"] == "requests"]
    assert max(running) == 4


# -- steps ----------------------------------------------------------------------------------------------------


def test_a_step_says_what_it_computes(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    spans = [Span(number, 50 + number, [1], 1) for number in range(3)] + [Span(9, 16, [1] * 514)]
    drive.step(StepPlan(12, spans, [SimpleNamespace(request=9)], [4], 517))
    [step] = slices(drive.events(), DEVICE)
    assert step["name"] == "step 12: 3 decodes + 1 prompt chunk, 517 tokens"
    assert step["args"] == {
        "step": 12,
        "tokens": 517,
        "started requests": 1,
        "ended requests": 1,
        "cached tokens": 16,
        "spans": [
            "request 9: 514 tokens from position 16, 0 sampled",
            "request 0: 1 token from position 50, 1 sampled",
            "request 1: 1 token from position 51, 1 sampled",
            "request 2: 1 token from position 52, 1 sampled",
        ],
    }


@pytest.mark.parametrize(
    ("spans", "name"),
    [
        ([Span(0, 8, [1], 1)], "step 0: 1 decode, 1 token"),
        ([Span(0, 0, [1] * 8, 1), Span(1, 0, [1] * 2)], "step 0: 2 prompt chunks, 10 tokens"),
        ([Span(0, 8, [1] * 3, 3)], "step 0: 1 decode, 3 tokens"),  # drafts: every row is sampled
    ],
)
def test_the_name_counts_only_what_is_there(tmp_path: Path, spans: list[Span], name: str) -> None:
    drive = Drive(tmp_path)
    drive.step(StepPlan(0, spans, num_tokens=sum(len(span.tokens) for span in spans)))
    assert [step["name"] for step in slices(drive.events(), DEVICE)] == [name]


def test_a_step_and_a_request_tell_of_the_drafts_that_were_verified(tmp_path: Path) -> None:
    scheduler, runner = make_scheduler()
    drive = Drive(tmp_path, scheduler)
    for number, drafted in enumerate((0, 9)):
        scheduler.add(make_request(number, [number] * 6, max_tokens=3))
        scheduler.requests[number].stats.drafted = drafted
    drive.run_all(runner)
    spans = [Span(7, 8, [1] * 5, 5), Span(8, 12, [1] * 5, 5, start_follows=True), Span(9, 8, [1], 1)]
    results = [SpanResult([1, 1, 1], num_drafted=4), SpanResult([1], num_drafted=2), SpanResult([1])]
    drive.step(StepPlan(90, spans, num_tokens=11), results=results, drafting=0.0025)
    events = drive.events()
    plain, *_, speculative = [step["args"] for step in slices(events, DEVICE)]
    names = ("drafts verified", "drafts accepted", "drafting (ms)")
    assert not set(names) & set(plain)
    assert [speculative[name] for name in names] == [6, 2, 2.5]
    assert speculative["spans"][1] == "request 8: 5 tokens from position 12 at most, 5 sampled"
    ends = [event["args"] for event in events if event["ph"] == "e" and event["name"] == "request"]
    assert [end.get("drafts verified") for end in ends] == [None, 9]


@pytest.mark.parametrize("num_chunks", [0, 2, MAX_SPANS + 3])
def test_a_wide_step_shows_its_chunks_first_and_says_how_many_spans_it_leaves_out(
    tmp_path: Path, num_chunks: int
) -> None:
    drive = Drive(tmp_path)
    spans = [Span(number, 9, [1], 1) for number in range(256 - num_chunks)]
    spans += [Span(number, 0, [1] * 7) for number in range(256 - num_chunks, 256)]
    drive.step(StepPlan(0, spans, num_tokens=256 + 6 * num_chunks))
    [step] = slices(drive.events(), DEVICE)
    shown = step["args"]["spans"]
    assert len(shown) == MAX_SPANS and step["args"]["spans not shown"] == 256 - MAX_SPANS
    assert sum("7 tokens" in line for line in shown[:num_chunks]) == min(num_chunks, MAX_SPANS)


def test_a_step_that_was_given_up_is_a_mark_without_a_length(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    for number in (0, 1):
        drive.timeline.planned(StepPlan(number, [Span(0, 8, [1], 1)], num_tokens=1), time.monotonic(), 0.0)
    drive.timeline.given_up()
    drive.step(StepPlan(3, [Span(0, 8, [1], 1)], num_tokens=1))
    drive.timeline.given_up()
    events = drive.events()
    assert [event["name"] for event in events if event["ph"] == "i"] == ["step 0 given up", "step 1 given up"]
    assert [step["args"]["step"] for step in slices(events, DEVICE)] == [3]


@pytest.mark.parametrize("error", [-3.0, -0.002, 0.0, 0.002, 3.0])
def test_a_clock_of_the_device_that_has_drifted_puts_no_step_before_its_submission_or_behind_its_result(
    tmp_path: Path, error: float
) -> None:
    drive = Drive(tmp_path)
    for number in range(3):
        drive.step(StepPlan(number, [Span(0, 8, [1], 1)], num_tokens=1), seconds=0.002, clock_error=error)
    events = drive.events()
    check_lanes(events)
    for step, wait in zip(slices(events, DEVICE), slices(events, SCHEDULER, "wait"), strict=True):
        assert abs(step["dur"] - 2000) <= 1  # microseconds: times are rounded down
        assert step["ts"] + step["dur"] <= wait["ts"] + wait["dur"] + 1


# -- requests -------------------------------------------------------------------------------------------------


def test_requests_are_drawn_from_arrival_through_their_phases_to_the_reason(tmp_path: Path) -> None:
    scheduler, runner = make_scheduler(max_num_seqs=2)
    drive = Drive(tmp_path, scheduler)
    arrived = time.monotonic() - 1
    for number, count in enumerate((3, 5, 1)):
        scheduler.add(make_request(number, [number] * 6, max_tokens=count, arrived=arrived))
    requests = dict(scheduler.requests)
    tokens = outputs(drive.run_all(runner, depth=1))
    events = drive.events()
    check_format(events)
    check_lanes(events)
    for number, request in requests.items():
        stats = request.stats
        begin, end = [event for event in phases(events, number) if event["name"] == "request"]
        assert begin["args"] == {"request": number, "prompt": 6, "cached": 0}
        assert end["args"] == {"reason": "length", "output": len(tokens[number]), "preemptions": 0}
        times = [(event["name"].split()[0], event["ts"]) for event in phases(events, number)]
        assert times == [
            ("request", int(arrived * 1e6)),
            ("queued", int(arrived * 1e6)),
            ("queued", int(stats.admitted * 1e6)),
            ("prefill", int(stats.admitted * 1e6)),
            ("prefill", int(stats.first_token * 1e6)),
            ("decode", int(stats.first_token * 1e6)),
            ("decode", int(stats.finished * 1e6)),
            ("request", int(stats.finished * 1e6)),
        ]


def test_a_request_that_is_aborted_between_steps_ends_when_that_was(tmp_path: Path) -> None:
    scheduler, runner = make_scheduler()
    drive = Drive(tmp_path, scheduler)
    for number in range(3):
        scheduler.add(make_request(number, [number] * 70, max_tokens=20))
    drive.run_all(runner, limit=1)  # the first prompt's first chunk
    aborted = [time.monotonic(), 0.0]
    scheduler.abort(0, "abort", aborted[0])
    drive.run_all(runner, limit=2)
    aborted[1] = time.monotonic()
    scheduler.abort(1, "stop", aborted[1])
    scheduler.abort(2, "abort", aborted[1])  # no step comes after these: `close` finds them
    events = drive.events()
    check_format(events)
    for number, phase, when in (
        (0, "prefill 0", aborted[0]),
        (1, "decode 1", aborted[1]),
        (2, "prefill 2", aborted[1]),
    ):
        *_, inner, outer = phases(events, number)
        assert (inner["name"], inner["ts"]) == (phase, int(when * 1e6))
        assert (outer["ts"], outer["args"]["reason"]) == (int(when * 1e6), BETWEEN_STEPS)


def test_requests_beyond_the_limit_are_counted_and_those_after_them_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)
    scheduler, runner = make_scheduler()
    drive = Drive(tmp_path, scheduler)
    for number in range(5):
        scheduler.add(make_request(number, [number] * 4))
    drive.run_all(runner)
    scheduler.add(make_request(5, [5] * 4))
    drive.run_all(runner)
    events = drive.events()
    check_format(events)
    assert {event["id2"]["local"] for event in events if event["ph"] == "b"} == {"0", "1", "5"}
    hidden = [event["args"]["total"] for event in events if event["name"] == "requests not drawn"]
    assert hidden == [1, 2, 3]


def test_counters_tell_of_queue_blocks_and_tokens(tmp_path: Path) -> None:
    scheduler, runner = make_scheduler(max_num_seqs=2, block_size=4)
    drive = Drive(tmp_path, scheduler)
    for number in range(3):
        scheduler.add(make_request(number, [number] * 7))
    drive.run_all(runner, limit=1)
    assert last_counters(drive.events()) == {"running": 2, "waiting": 1, "used": 4, "tokens": 14}


# -- the file -------------------------------------------------------------------------------------------------


def test_the_file_is_a_complete_document_after_every_step_that_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.0)
    drive = Drive(tmp_path)
    lengths = []
    for number in range(5):
        drive.step(StepPlan(number, [Span(0, 8, [1], 1)], num_tokens=1))
        lengths.append(len(events_of(drive.timeline.path)))  # as a process that is killed here would leave it
        assert len(slices(events_of(drive.timeline.path), DEVICE)) == number + 1
    assert lengths == sorted(set(lengths))


def test_events_wait_in_memory_until_they_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 1e9)
    drive = Drive(tmp_path, busy_scheduler())
    sizes = set()
    for number in range(300):
        drive.step(StepPlan(number, [Span(0, 8, [1], 1)], num_tokens=1))
        sizes.add(drive.timeline.path.stat().st_size)
    written = sorted(sizes)
    assert 3 < len(written) < 20
    assert all(b - a >= module.FLUSH_BYTES for a, b in pairwise(written[1:]))
    assert len(slices(drive.events(), DEVICE)) == 300


def test_engines_of_one_process_write_files_of_their_own(tmp_path: Path) -> None:
    paths = [TraceFile(str(tmp_path)).path for _ in range(2)]
    assert [path.name for path in paths] == [f"quire-{os.getpid()}-{number}.json" for number in range(2)]


@pytest.mark.parametrize("folder", ["", "{file}", "{file}/below", "/proc/quire", "nul\0"])
def test_a_folder_that_cannot_be_written_is_told_with_what_to_do(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"^profile.*give a folder"):
        TraceFile(folder.format(file=tmp_path / "file"))


def test_a_step_of_256_requests_costs_little(tmp_path: Path) -> None:
    drive = Drive(tmp_path, busy_scheduler())
    plan = StepPlan(0, [Span(number, 99, [1], 1) for number in range(256)], num_tokens=256)
    updates = [RequestUpdate(number, [1]) for number in range(256)]
    moments = [time.perf_counter()]
    for number in range(50):
        plan.number = number
        drive.step(plan, updates=updates)
        moments.append(time.perf_counter())
        [Span(each, 99, [1], 1) for each in range(256)]
        moments.append(time.perf_counter())
    times = [end - begin for begin, end in pairwise(moments)]
    assert min(times[::2]) < 10 * min(times[1::2])  # about three times what it takes to make a step's spans
    drive.timeline.close()
    assert drive.timeline.path.stat().st_size < 50 * 3000


# -- what goes wrong ------------------------------------------------------------------------------------------


def full_disk(path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))


def deleted_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("accident", [full_disk, deleted_folder])
def test_a_file_that_cannot_grow_ends_with_one_warning_and_is_left_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, accident: Any
) -> None:
    scheduler, runner = make_scheduler()
    kernels = FakeKernels()
    drive = Drive(tmp_path / "traces", scheduler, kernels)
    scheduler.add(make_request(0, [1] * 4))
    drive.run_all(runner, limit=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        accident(drive.timeline.path)
        tokens = outputs(drive.run_all(runner))
        drive.timeline.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(tokens[0]) == 3  # of the 4, the first step sampled one
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"the timeline {drive.timeline.path} ends here: ")
    assert not drive.timeline.on and kernels.closed == 1
    if drive.timeline.path.exists():
        assert len(slices(events_of(drive.timeline.path), DEVICE)) == 1


def test_a_file_that_has_reached_its_limit_ends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 2**20)
    monkeypatch.setattr(module, "FLUSH_BYTES", 2**16)
    drive = Drive(tmp_path, busy_scheduler())
    plan = StepPlan(0, [Span(number, 99, [1], 1) for number in range(256)], num_tokens=256)
    for number in range(800):
        plan.number = number
        drive.step(plan)
    assert "it has reached 1 MiB" in caplog.text
    assert 2**20 - 2**17 < drive.timeline.path.stat().st_size <= 2**20 + 8
    check_format(events_of(drive.timeline.path), closed=False)


def test_a_bug_of_the_timeline_does_not_reach_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drive = Drive(tmp_path)
    drive.timeline.committed(StepPlan(3, []), StepResult(3, [], 0.1, 1.0), [])  # of a step that nobody has submitted
    drive.step(StepPlan(4, []))
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.exc_info and "KeyError" in caplog.text
    assert not drive.timeline.on


# -- the device's kernels -------------------------------------------------------------------------------------


def test_the_kernels_of_some_steps_after_the_first_ones_are_written_beside_the_timeline(tmp_path: Path) -> None:
    kernels = KernelProfile(tmp_path / "quire-1-0.json")
    for number in range(FIRST_PROFILED_STEP + PROFILED_STEPS + 5):
        assert kernels.path.exists() == (number > FIRST_PROFILED_STEP + PROFILED_STEPS)
        kernels.step()
        torch.ones(3).cumsum(0)
    assert kernels.path == tmp_path / "quire-1-0.kernels.json"
    assert [event["name"] for event in kernel_events(kernels)].count("aten::cumsum") == PROFILED_STEPS


@pytest.mark.parametrize("num_steps", [0, 5, FIRST_PROFILED_STEP, FIRST_PROFILED_STEP + 6])
def test_a_run_that_ends_early_has_the_kernels_that_were_profiled(tmp_path: Path, num_steps: int) -> None:
    kernels = KernelProfile(tmp_path / "quire-1-0.json")
    for _ in range(num_steps):
        kernels.step()
        torch.ones(3).cumsum(0)
    kernels.close()
    kernels.close()
    profiled = max(0, num_steps - FIRST_PROFILED_STEP)
    assert kernels.path.exists() == bool(profiled)
    if profiled:
        assert [event["name"] for event in kernel_events(kernels)].count("aten::cumsum") == profiled


def test_a_profile_that_another_thread_ends_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels = KernelProfile(tmp_path / "quire-1-0.json")

    def run() -> None:
        for _ in range(FIRST_PROFILED_STEP + 5):
            kernels.step()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    kernels.close()
    assert "closed by another thread" in caplog.text and not kernels.path.exists()


@pytest.mark.parametrize("refuses", ["start", "step"])
def test_a_driver_that_refuses_profiling_costs_the_kernels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    class Refusing:
        def __init__(self, **options: Any) -> None: ...

        def start(self) -> None:
            self.fail("start")

        def step(self) -> None:
            self.fail("step")

        def fail(self, call: str) -> None:
            if call == refuses:
                raise RuntimeError("CUPTI says no")

    monkeypatch.setattr(torch.profiler, "profile", Refusing)
    drive = Drive(tmp_path, kernels=KernelProfile(tmp_path / "quire-1-0.json"))
    for number in range(3):
        drive.step(StepPlan(number, [Span(0, 8, [1], 1)], num_tokens=1))
    assert len(slices(drive.events(), DEVICE)) == 3
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "CUPTI says no" in warning


def test_a_profile_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernels = KernelProfile(tmp_path / "nowhere" / "quire-1-0.json")
    for _ in range(FIRST_PROFILED_STEP + PROFILED_STEPS + 1):
        kernels.step()
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "cannot be written" in warning


def test_time_that_profiling_takes_is_drawn(tmp_path: Path) -> None:
    drive = Drive(tmp_path, kernels=FakeKernels(seconds=0.002))
    drive.step(StepPlan(0, [Span(0, 8, [1], 1)], num_tokens=1))
    [drawn] = slices(drive.events(), SCHEDULER, "profile kernels")
    assert drawn["dur"] >= 2000


class FakeKernels(KernelProfile):
    """Does what it is told instead of profiling."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.closed = 0
        self._seconds = seconds

    def step(self) -> None:
        time.sleep(self._seconds)

    def close(self) -> None:
        self.closed += 1


def kernel_events(kernels: KernelProfile) -> list[Event]:
    events: list[Event] = json.loads(kernels.path.read_text())["traceEvents"]
    return events


# -- tools ----------------------------------------------------------------------------------------------------


class Drive:
    """Calls a timeline as the engine does."""

    def __init__(self, folder: Path, scheduler: Any = None, kernels: KernelProfile | None = None) -> None:
        self.scheduler = scheduler or make_scheduler()[0]
        self.timeline = Timeline(TraceFile(str(folder)), self.scheduler, kernels)

    def step(
        self,
        plan: StepPlan,
        seconds: float = 0.0,
        clock_error: float = 0.0,
        updates: list[RequestUpdate] | None = None,
        results: list[SpanResult] | None = None,
        drafting: float = 0.0,
    ) -> None:
        """One made-up step, which the device computes for `seconds`; what it starts must be known to no scheduler."""
        started, plan.started = plan.started, []
        self.timeline.planned(plan, time.monotonic(), 0.0)
        plan.started = started
        begin = time.monotonic()
        self.timeline.submitted(plan, begin, 0.0)
        time.sleep(seconds)
        self.timeline.waited(plan, time.monotonic(), 0.0)
        result = StepResult(plan.number, results or [], seconds, begin + clock_error, drafting)
        self.timeline.committed(plan, result, updates or [])

    def run_all(self, runner: Any, depth: int = 0, limit: int = 1000) -> list[RequestUpdate]:
        """What the scheduler plans, at most `limit` steps, with `depth` more in flight."""
        updates: list[RequestUpdate] = []
        flying: list[tuple[StepPlan, StepResult]] = []
        while limit or flying:
            begin = time.monotonic()
            plan = self.scheduler.schedule(begin) if limit else None
            if plan:
                limit -= 1
                begun = time.monotonic()
                self.timeline.planned(plan, begin, begun - begin)
                begun = time.monotonic()
                flying.append((plan, self._run(runner, plan)))
                self.timeline.submitted(plan, begun, time.monotonic() - begun)
            elif not flying:
                break
            if not plan or len(flying) > depth:
                self.timeline.waited(flying[0][0], time.monotonic(), 0.0)
                first = flying.pop(0)
                updates += self.scheduler.commit(*first, time.monotonic())
                self.timeline.committed(*first, updates)
        return updates

    @staticmethod
    def _run(runner: Any, plan: StepPlan) -> StepResult:
        began = time.monotonic()
        result: StepResult = runner.run(plan)
        result.began, result.seconds = began, time.monotonic() - began
        return result

    def events(self) -> list[Event]:
        self.timeline.close()
        return events_of(self.timeline.path)


def busy_scheduler() -> Any:
    """One with a request that runs for ever."""
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(0, [1]))
    scheduler.schedule(0.0)
    return scheduler


def events_of(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())
    return events


def slices(events: list[Event], lane: int, name: str | None = None) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and e["tid"] == lane and name in (None, e["name"])]


def phases(events: list[Event], request: int) -> list[Event]:
    return [event for event in events if event["ph"] in "be" and event["id2"]["local"] == str(request)]


def last_counters(events: list[Event]) -> dict[str, int]:
    last: dict[str, int] = {}
    for event in events:
        if event["ph"] == "C":
            last |= event["args"]
    return last


def check_format(events: list[Event], closed: bool = True) -> None:
    """Each event has what "Trace Event Format" asks of its kind; phases of a request nest, and have ended."""
    more = {"X": {"dur", "args"}, "i": {"s"}, "C": {"args"}, "M": {"args"}, "s": {"id", "cat"}}
    more |= {"f": {"id", "cat", "bp"}, "b": {"id2", "cat", "args"}, "e": {"id2", "cat", "args"}}
    open_phases: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for event in events:
        assert set(event) == {"name", "ph", "pid", "tid", "ts"} | more[event["ph"]], event
        assert event["pid"] == os.getpid() and event["tid"] in range(SCHEDULER, DEVICE + 2)
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("ts", "dur") if key in event), event
        if event["ph"] == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values())
        elif event["ph"] == "b":
            open_phases[event["id2"]["local"]].append((event["name"], event["ts"]))
        elif event["ph"] == "e":
            name, begin = open_phases[event["id2"]["local"]].pop()
            assert name == event["name"] and begin <= event["ts"]
    assert not closed or not any(open_phases.values())


def check_lanes(events: list[Event]) -> None:
    """Slices of a lane do not overlap, and each step's arrow leads from where it was submitted to where it ran."""
    for lane in (SCHEDULER, DEVICE):
        ordered = sorted((slice["ts"], slice["dur"]) for slice in slices(events, lane))
        for (begin, length), (following, _) in pairwise(ordered):
            assert begin + length <= following
    leaves = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    arrives = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert leaves == {slice["args"]["step"]: slice["ts"] for slice in slices(events, SCHEDULER, "submit")}
    assert arrives == {slice["args"]["step"]: slice["ts"] for slice in slices(events, DEVICE)}
    assert all(leaves[step] <= arrives[step] for step in arrives)
