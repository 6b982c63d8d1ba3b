"""A timeline of the engine's steps: `--profile DIR`.

It has the work of the scheduler and the device and the phases of each request, in Chrome's trace event format, for
Perfetto (https://ui.perfetto.dev); docs/profiling.md explains it. Times are microseconds of `time.monotonic`. The
format: "Trace Event Format", linked from https://github.com/catapult-project/catapult/tree/main/tracing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import msgspec
import torch
from torch.profiler import ProfilerActivity

from quire.core.lockstep import Lockstep
from quire.core.request import Request, RequestUpdate, Status
from quire.core.scheduler import Scheduler
from quire.core.step import Span, StepPlan, StepResult
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

SCHEDULER, DEVICE = 1, 2
"""Lanes; the format calls them threads."""

MAX_SPANS = 16
"""Maximum spans listed for a step. A step of 256 requests takes about 2 KiB with these, and 14 KiB with all."""

MAX_REQUESTS = 512
"""Maximum requests drawn at once; further ones are counted."""

FLUSH_BYTES = 64 * 1024
FLUSH_SECONDS = 1.0
"""Events are kept in memory up to this size or age, or until no request runs."""

MAX_BYTES = 512 * 2**20
"""Maximum size of a file: Perfetto loads all of it into the browser's memory."""

FIRST_PROFILED_STEP, PROFILED_STEPS = 10, 20
"""Steps whose kernels are profiled: few, since each has thousands of events; and not the first, which compile."""

BETWEEN_STEPS = "ended between steps"
"""The reason for a request whose end no commit reports: it was aborted, or the caller found a stop string."""

SHOWN_PROFILING = 0.001
"""Profiling itself is drawn in a step if it takes at least this many seconds."""


class TraceFile:
    """A JSON array of events, streamed to a file that is valid after every flush.

    The format allows the closing bracket to be missing, but some readers need it (Perfetto's issue 926). So each flush
    overwrites the bracket of the last one; a killed process loses only the last second.

    Args:
        folder: created if it does not exist.

    Attributes:
        path: the file, `quire-<pid>-<n>.json`, with the first n that is free.

    Raises:
        ConfigError: no file can be created there.
    """

    def __init__(self, folder: str) -> None:
        if not folder:
            raise ConfigError("profile is empty; give a folder for the timeline")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = _create(Path(folder))
            self.path = Path(self._file.name)
            self._buffer = bytearray()
            self._encode = msgspec.json.Encoder().encode
            self._pid = os.getpid()
            self._end = 0  # of the events in the file
            self._separator = b"[\n"
            self._next_flush = 0.0
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
            self._add("process_name", "M", SCHEDULER, 0, args={"name": "quire"})
            self._add("process_labels", "M", SCHEDULER, 0, args={"labels": f"started {started}"})
            for lane, name in ((SCHEDULER, "scheduler"), (DEVICE, "device")):
                self.lane(lane, name)
            self.flush()
        except (OSError, ValueError) as error:  # ValueError: an invalid file name
            raise ConfigError(
                f"profile={folder!r}: no timeline can be written there ({error}); give a folder that can be written"
            ) from error

    # -- events --------------------------------------------------------------------------------------------

    def lane(self, lane: int, name: str) -> None:
        """Name a lane."""
        self._add("thread_name", "M", lane, 0, args={"name": name})
        self._add("thread_sort_index", "M", lane, 0, args={"sort_index": lane})

    def slice(self, lane: int, name: str, begin: float, end: float, **args: Any) -> None:
        """A slice from `begin` to `end`, in seconds. Slices of a lane must not overlap."""
        start = int(begin * 1e6)
        self._add(name, "X", lane, start, dur=int(end * 1e6) - start, args=args)

    def instant(self, lane: int, name: str, now: float) -> None:
        """An event without a duration."""
        self._add(name, "i", lane, int(now * 1e6), s="t")

    def arrow_from(self, lane: int, name: str, id: int, begin: float) -> None:
        """The start of an arrow, at the slice that begins at `begin`, which must be in the file already."""
        self._add(name, "s", lane, int(begin * 1e6), cat="flow", id=id)

    def arrow_to(self, lane: int, name: str, id: int, begin: float) -> None:
        """The end of the arrow with this name and id, at the slice that begins at `begin`."""
        self._add(name, "f", lane, int(begin * 1e6), cat="flow", id=id, bp="e")

    def begin(self, id: int, name: str, begin: float, **args: Any) -> None:
        """A phase of a request begins; phases of one id nest."""
        self._add(name, "b", SCHEDULER, int(begin * 1e6), cat="request", id2={"local": str(id)}, args=args)

    def end(self, id: int, name: str, end: float, **args: Any) -> None:
        """The phase of this id and name ends."""
        self._add(name, "e", SCHEDULER, int(end * 1e6), cat="request", id2={"local": str(id)}, args=args)

    def counter(self, name: str, now: float, **values: int) -> None:
        """A curve for each of the values."""
        self._add(name, "C", SCHEDULER, int(now * 1e6), args=values)

    def _add(self, name: str, phase: str, lane: int, microseconds: int, **more: Any) -> None:
        event = {"name": name, "ph": phase, "pid": self._pid, "tid": lane, "ts": microseconds, **more}
        self._buffer += self._separator
        self._buffer += self._encode(event)
        self._separator = b",\n"

    # -- the file ------------------------------------------------------------------------------------------

    def flush_if_due(self, now: float) -> None:
        """Flush if there are many events or old ones. Raises OSError, as `flush` does."""
        if len(self._buffer) >= FLUSH_BYTES or now >= self._next_flush:
            self.flush()
            self._next_flush = now + FLUSH_SECONDS

    def flush(self) -> None:
        """Write the events in memory.

        Raises:
            OSError: they cannot be written, the file was deleted, or it is full; earlier events are kept.
        """
        events, self._buffer = bytes(self._buffer), bytearray()
        if not events:
            return
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError(errno.ENOENT, "it was deleted")
        if self._end + len(events) > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has reached {MAX_BYTES >> 20} MiB")
        if not self._write(events + b"\n]\n"):
            self._file.truncate(self._end)
            self._write(b"\n]\n")
            raise OSError(errno.ENOSPC, "the disk is full")
        self._end += len(events)

    def _write(self, data: bytes) -> bool:
        """Write `data` after the events; False if not all of it was written."""
        self._file.seek(self._end)
        return self._file.write(data) == len(data)

    def close(self) -> None:
        """Write the rest, and close the file. Raises OSError, as `flush` does."""
        with self._file:
            self.flush()


def _create(folder: Path) -> io.FileIO:
    """Create a new file in the folder, unbuffered, so that each write is one system call."""
    number = 0
    while True:
        try:
            return io.FileIO(folder / f"quire-{os.getpid()}-{number}.json", "x")
        except FileExistsError:
            number += 1


class KernelProfile:
    """Torch's profile of a few steps: operators on the host and, with a GPU, its kernels. It is written once, to its
    own file, since it has another clock. Errors are logged, and end the profile.

    Attributes:
        path: its file, `<timeline>.kernels.json`.
    """

    def __init__(self, timeline: Path) -> None:
        self.path = timeline.with_suffix(".kernels.json")
        self._profiler: torch.profiler.profile | None = None
        self._thread = 0
        self._steps_left = FIRST_PROFILED_STEP + PROFILED_STEPS + 1  # the last one only ends it

    def step(self) -> None:
        """Called before each step: begins, continues, or ends and writes the profile."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        with self._logged():
            if self._profiler is None:
                self._profiler = self._start()
            else:
                self._check_thread()
                self._profiler.step()
        if not self._steps_left:
            self.close()

    def close(self) -> None:
        """End the profile; if only some of the steps were profiled, they are written now."""
        profiler, self._profiler, self._steps_left = self._profiler, None, 0
        if profiler is not None:
            with self._logged():
                self._check_thread()
                profiler.stop()

    def _start(self) -> torch.profiler.profile:
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        schedule = torch.profiler.schedule(wait=FIRST_PROFILED_STEP - 1, warmup=1, active=PROFILED_STEPS, repeat=1)
        profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *gpu], schedule=schedule, on_trace_ready=self._write
        )
        profiler.start()
        self._thread = threading.get_ident()
        return profiler

    def _check_thread(self) -> None:
        """The profiler belongs to the thread that started it; torch 2.13 crashes if another one writes the file."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("the engine was closed by another thread before enough steps had run")

    def _write(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        if not self.path.exists():  # the profiler only prints such errors
            raise FileNotFoundError(errno.ENOENT, "cannot be written", str(self.path))
        logger.info("the device's kernels in a few steps: %s", self.path)

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._profiler, self._steps_left = None, 0
            logger.warning("the device's kernels are not profiled: %s", error)


P = ParamSpec("P")


def _harmless(moment: Callable[Concatenate[Timeline, P], None]) -> Callable[Concatenate[Timeline, P], None]:
    """Keep errors from the engine: they are logged, and end the timeline."""

    @functools.wraps(moment)
    def guarded(self: Timeline, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.on:
            try:
                moment(self, *args, **kwargs)
            except Exception as error:
                self.give_up(error)

    return guarded


class Timeline:
    """Draws the engine's work. A `StepObserver` that never raises.

    Args:
        trace: the file.
        scheduler: its requests and blocks are drawn, too.
        kernels: profiles the device's kernels; None: they are not profiled.

    Attributes:
        path: the file.
        on: False once it is closed, or has failed.
    """

    def __init__(self, trace: TraceFile, scheduler: Scheduler | Lockstep, kernels: KernelProfile | None = None) -> None:
        self.path = trace.path
        self.on = True
        self._trace = trace
        self._scheduler = scheduler
        self._kernels = kernels
        self._requests: dict[int, Request] = {}  # those that are drawn and have not ended
        self._prefilling: set[int] = set()
        self._num_hidden = 0
        self._ranks: set[int] = set()  # others that have a lane
        self._submitted: dict[int, float] = {}  # when steps in flight were, by number
        self._waited = 0.0  # when the host had the last result
        self._device_end = 0.0

    # -- events of the engine -----------------------------------------------------------------------------

    @_harmless
    def planned(self, plan: StepPlan, begin: float, seconds: float) -> None:
        """A step is about to run."""
        self._submitted[plan.number] = begin + seconds  # until it is
        self._trace.slice(SCHEDULER, "schedule", begin, begin + seconds, step=plan.number)
        for info in plan.started:
            if info.request not in self._requests:
                self._start(info.request)
        for number in plan.ended:  # whose end no commit has reported
            self._end(number, BETWEEN_STEPS)
        if self._kernels is not None:
            self._profile_kernels(self._kernels)

    @_harmless
    def submitted(self, plan: StepPlan, begin: float, seconds: float) -> None:
        """The executor took the step, which took `seconds` from `begin`."""
        self._submitted[plan.number] = begin
        self._trace.slice(SCHEDULER, "submit", begin, begin + seconds, step=plan.number)
        self._trace.arrow_from(SCHEDULER, "step", plan.number, begin)

    @_harmless
    def waited(self, plan: StepPlan, begin: float, seconds: float) -> None:
        """The host waited for the step's result for `seconds` from `begin`."""
        self._waited = begin + seconds
        self._trace.slice(SCHEDULER, "wait", begin, self._waited, step=plan.number)

    @_harmless
    def committed(self, plan: StepPlan, result: StepResult, updates: list[RequestUpdate]) -> None:
        """A step has run: draw it, and what its requests did."""
        now = time.monotonic()
        self._trace.slice(SCHEDULER, "commit", self._waited, now, step=plan.number)
        begin = self._draw_step(plan, result)
        for update in updates:
            if update.finish_reason is not None:
                self._end(update.request, update.finish_reason)
            elif update.request in self._prefilling and update.tokens:
                self._begin_decode(self._requests[update.request])
        self._count(plan, begin, now)
        if not self._scheduler.running:
            self._trace.flush()  # there may be nothing more for a long time
        else:
            self._trace.flush_if_due(now)

    @_harmless
    def rank_computed(self, rank: int, number: int, begin: float, seconds: float) -> None:
        """Another rank of this machine has computed this step (-1: a pipeline's slot without one)."""
        lane = DEVICE + rank
        if rank not in self._ranks:
            self._ranks.add(rank)
            self._trace.lane(lane, f"rank {rank}")
        self._trace.slice(lane, f"step {number}" if number >= 0 else "slot", begin, begin + seconds)

    @_harmless
    def given_up(self) -> None:
        """The steps in flight will not commit."""
        now = time.monotonic()
        for number in self._submitted:
            self._trace.instant(DEVICE, f"step {number} given up", now)
        self._submitted.clear()

    @_harmless
    def close(self) -> None:
        """Write the rest. Nothing is drawn after this."""
        self.on = False
        for number, request in list(self._requests.items()):
            if request.status is Status.FINISHED:
                self._end(number, BETWEEN_STEPS)
        if self._kernels is not None:
            self._kernels.close()
        self._trace.close()

    def give_up(self, error: Exception) -> None:
        """Log why it cannot continue, and release everything."""
        known = isinstance(error, OSError)
        logger.warning("the timeline %s ends here: %s", self.path, error, exc_info=not known)
        self.on = False
        self._requests.clear()
        if self._kernels is not None:
            self._kernels.close()
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed already
            self._trace.close()

    # -- steps ---------------------------------------------------------------------------------------------

    def _draw_step(self, plan: StepPlan, result: StepResult) -> float:
        """Draw the device's slice and the arrow to it; returns when it began."""
        # Device times are converted to the host's clock with an error that may grow. But a step has ended when the host
        # has its result, and begins neither before it was submitted nor before the previous step has ended.
        begin = min(result.began, self._waited - result.seconds)
        begin = max(begin, self._submitted.pop(plan.number), self._device_end)
        self._device_end = begin + result.seconds
        chunks = [span for span in plan.spans if len(span.tokens) > span.num_sampled]
        num_decodes = len(plan.spans) - len(chunks)
        parts = [_count_of(num_decodes, "decode")] if num_decodes else []
        parts += [_count_of(len(chunks), "prompt chunk")] if chunks else []
        parts += [_count_of(len(plan.saves), "saved block")] if plan.saves else []
        parts += [_count_of(len(plan.loads), "loaded block")] if plan.loads else []
        name = f"step {plan.number}: {' + '.join(parts)}, {_count_of(plan.num_tokens, 'token')}"
        args = _step_args(plan, chunks) | _draft_args(result)
        self._trace.slice(DEVICE, name, begin, self._device_end, **args)
        self._trace.arrow_to(DEVICE, "step", plan.number, begin)
        return begin

    def _count(self, plan: StepPlan, begin: float, now: float) -> None:
        trace, scheduler = self._trace, self._scheduler
        running = len(scheduler.running)
        trace.counter("requests", now, running=running, waiting=scheduler.num_waiting)
        trace.counter("KV blocks", now, used=sum(kv.num_usable - kv.num_available for kv in scheduler.kvs))
        trace.counter("step", begin, tokens=plan.num_tokens)
        if not running:
            trace.counter("step", now, tokens=0)

    def _profile_kernels(self, kernels: KernelProfile) -> None:
        """Starting and writing the profile may take seconds: draw that, since it would look like the engine's time."""
        begin = time.monotonic()
        kernels.step()
        end = time.monotonic()
        if end - begin >= SHOWN_PROFILING:
            self._trace.slice(SCHEDULER, "profile kernels", begin, end)

    # -- requests ------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        """Draw a request that has left the queue."""
        request = self._scheduler.requests[number]
        stats, trace = request.stats, self._trace
        admitted = stats.admitted or stats.arrived
        if len(self._requests) >= MAX_REQUESTS:
            self._num_hidden += 1
            trace.counter("requests not drawn", admitted, total=self._num_hidden)
            return
        self._requests[number] = request
        self._prefilling.add(number)
        trace.begin(
            number, "request", stats.arrived, request=number, prompt=request.num_prompt, cached=request.num_cached
        )
        trace.begin(number, f"queued {number}", stats.arrived)
        trace.end(number, f"queued {number}", admitted)
        trace.begin(number, f"prefill {number}", admitted)

    def _begin_decode(self, request: Request) -> None:
        first_token = request.stats.first_token or time.monotonic()
        self._prefilling.remove(request.id)
        self._trace.end(request.id, f"prefill {request.id}", first_token)
        self._trace.begin(request.id, f"decode {request.id}", first_token)

    def _end(self, number: int, reason: str) -> None:
        """Draw the end of a request; ignored for one that is not drawn."""
        request = self._requests.pop(number, None)
        if request is None:
            return
        stats = request.stats
        if number in self._prefilling and stats.first_token is not None:
            self._begin_decode(request)
        phase = "prefill" if number in self._prefilling else "decode"
        self._prefilling.discard(number)
        finished, num_output = stats.finished or time.monotonic(), len(request.tokens) - request.num_prompt
        args = {"reason": reason, "output": num_output, "preemptions": stats.preemptions}
        if stats.drafted:
            args |= {"drafts verified": stats.drafted, "drafts accepted": stats.accepted}
        self._trace.end(number, f"{phase} {number}", finished)
        self._trace.end(number, "request", finished, **args)


def _step_args(plan: StepPlan, chunks: list[Span]) -> dict[str, Any]:
    """Details of a step, shown at a click. Prompt chunks come before decodes, since they are fewer and tell more."""
    started = {info.request for info in plan.started}
    decodes = (span for span in plan.spans if len(span.tokens) <= span.num_sampled)
    shown = [*chunks[:MAX_SPANS], *islice(decodes, max(0, MAX_SPANS - len(chunks)))]
    args: dict[str, Any] = {
        "step": plan.number,
        "tokens": plan.num_tokens,
        "started requests": len(started),
        "ended requests": len(plan.ended),
        # A request's first span begins after its cached prefix.
        "cached tokens": sum(span.start for span in plan.spans if span.request in started) if started else 0,
        "spans": [
            f"request {span.request}: {_count_of(len(span.tokens), 'token')} from position {span.start}"
            f"{' at most' if span.start_follows else ''}, {span.num_sampled} sampled"
            for span in shown
        ],
    }
    if len(shown) < len(plan.spans):
        args["spans not shown"] = len(plan.spans) - len(shown)
    return args


def _draft_args(result: StepResult) -> dict[str, Any]:
    """The same for the drafts that the step verified; empty if there were none."""
    verified = [span for span in result.spans if span.num_drafted]
    if not verified and not result.drafting:
        return {}
    return {
        "drafts verified": sum(span.num_drafted for span in verified),
        "drafts accepted": sum(len(span.tokens) - 1 for span in verified),
        "drafting (ms)": round(1000 * result.drafting, 3),
    }


def _count_of(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
