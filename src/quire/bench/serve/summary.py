"""Computes a run's figures from its records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.serve.config import LoadConfig
from quire.bench.serve.records import Record

LATE = 0.05
"""A request sent more than this many seconds after its time counts as late."""

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Some latencies, in milliseconds."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of(seconds: Iterable[float], weights: Sequence[int] | None = None) -> Distribution | None:
        """The distribution of weighted values; None if there are none."""
        values = 1000 * np.asarray(list(seconds), dtype=np.float64)
        if weights is not None:
            values = np.repeat(values, np.asarray(weights, dtype=np.int64))
        if not len(values):
            return None
        p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
        low, high = float(values.min()), float(values.max())
        return Distribution(len(values), float(values.mean()), float(values.std()), low, p50, p90, p95, p99, high)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """How many of the requests that ended met every target (in milliseconds)."""

    targets: dict[str, float]
    requests: int
    share: float
    per_s: float


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Requests that failed for one reason, and the first one's message."""

    count: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's figures. Rates are per second; latencies have the names of `LATENCIES`.

    Attributes:
        seconds: from sending the first request to the end of the last one.
        asked_rate: intended requests per second: an open loop's rate, or that of the trace's times.
        sent_rate: requests sent per second, first turns only. Rates are None if they span no time.
        late_ms: how long after their due times requests were sent.
        cached_tokens: prompt tokens from the server's prefix cache; None if it does not report them.
        notes: remarks on the figures.
    """

    succeeded: int
    failed: int
    broken_off: int
    stopped: str | None
    seconds: float
    most_running: int
    asked_rate: float | None
    sent_rate: float | None
    late_ms: Distribution | None
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    requests_per_s: float
    input_per_s: float
    output_per_s: float
    total_per_s: float
    latencies: dict[str, Distribution | None]
    goodput: Goodput | None
    failures: dict[str, Failures]
    finish_reasons: dict[str, int]
    notes: list[str]


def summarize(
    config: LoadConfig,
    records: Sequence[Record],
    most_running: int = 0,
    broken_off: int = 0,
    stopped: str | None = None,
) -> Summary:
    """Compute a run's figures; the package's docstring says what they mean."""
    good = [record for record in records if record.error is None]
    seconds = max((r.end for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    per_s = 1 / seconds if seconds > 0 else 0.0
    input_tokens, output_tokens = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    asked = config.requests_per_second
    due = [r.sent - r.due for r in records if r.due is not None]
    return Summary(
        succeeded=len(good),
        failed=len(records) - len(good),
        broken_off=broken_off,
        stopped=stopped,
        seconds=seconds,
        most_running=most_running,
        asked_rate=asked if math.isfinite(asked) else _rate(r.due for r in records if r.due is not None),
        sent_rate=_rate(r.sent for r in records if r.turn == 0),
        late_ms=Distribution.of(due),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        requests_per_s=len(good) * per_s,
        input_per_s=input_tokens * per_s,
        output_per_s=output_tokens * per_s,
        total_per_s=(input_tokens + output_tokens) * per_s,
        latencies=_latencies(good),
        goodput=_goodput(config.targets, records, per_s),
        failures=_failures(records),
        finish_reasons=dict(Counter(r.finish_reason or "none" for r in good)),
        notes=_notes(config, good, len(cached)) + _late(due),
    )


def _rate(times: Iterable[float]) -> float | None:
    """Events per second; None if they span no time."""
    events = sorted(times)
    return (len(events) - 1) / (events[-1] - events[0]) if events and events[-1] > events[0] else None


def _latencies(good: Sequence[Record]) -> dict[str, Distribution | None]:
    gaps = [gap for record in good for gap in record.gaps()]
    return {
        "ttft": Distribution.of(r.ttft for r in good if r.ttft is not None),
        "tpot": Distribution.of(r.tpot for r in good if r.tpot is not None),
        "itl": Distribution.of((gap for gap, _ in gaps), [count for _, count in gaps]),
        "e2e": Distribution.of(r.e2e for r in good),
    }


def _goodput(targets: dict[str, float], records: Sequence[Record], per_s: float) -> Goodput | None:
    if not targets:
        return None

    def meets(record: Record) -> bool:
        found = ((getattr(record, name), most) for name, most in targets.items())
        return record.error is None and all(value is None or value <= most for value, most in found)

    met = sum(meets(record) for record in records)
    shown = {name: 1000 * seconds for name, seconds in targets.items()}
    return Goodput(targets=shown, requests=met, share=met / len(records) if records else 0.0, per_s=met * per_s)


def _failures(records: Sequence[Record]) -> dict[str, Failures]:
    first: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            first.setdefault(record.error, record.message)
    counts = Counter(record.error for record in records)
    return {
        kind: Failures(count=counts[kind], message=first[kind])
        for kind in sorted(first, key=lambda kind: -counts[kind])
    }


def _notes(config: LoadConfig, good: Sequence[Record], told_cached: int) -> list[str]:
    notes = []
    no_usage = sum(r.output_usage is None for r in good)
    if no_usage:
        notes.append(
            f"{no_usage:,} of {len(good):,} answers had no usage: their output tokens are counted chunks, and their "
            f"prompt tokens the {'words' if config.as_text else 'ids'} that were sent"
        )
    usage = sum(r.output_usage or 0 for r in good if r.output_usage is not None)
    counted = sum(r.counted for r in good if r.output_usage is not None)
    if usage - counted > 0.01 * usage:
        flag = "" if config.asks_token_ids else "; --return-token-ids may tell them apart"
        notes.append(
            f"chunks showed {counted:,} of {usage:,} output tokens: inter-token latency is between chunks{flag}"
        )
    short = sum(r.output_tokens < r.asked_output for r in good)
    if short:
        notes.append(f"{short:,} answers are shorter than was asked for")
    cached, prompts = sum(r.cached_tokens or 0 for r in good), sum(r.input_tokens for r in good)
    if config.kind == "random" and cached > 0.1 * prompts:
        notes.append(
            "the server had many of these prompts in its cache, as after a run of this seed; try another --seed"
        )
    if 0 < told_cached < len(good):
        notes.append(f"cached prompt tokens are those of the {told_cached:,} answers that told")
    return notes


def _late(due: Sequence[float]) -> list[str]:
    """A note if this client could not keep up with the schedule."""
    late = sum(seconds > LATE for seconds in due)
    if late <= 0.01 * len(due):
        return []
    return [
        f"{late:,} of {len(due):,} requests were sent over {1000 * LATE:g} ms late: this machine is too busy to keep "
        "to these times, and latencies may be this client's own"
    ]


def report(
    config: LoadConfig, summary: Summary, records: Sequence[Record], about: dict[str, Any], details: bool
) -> dict[str, Any]:
    """The run as a JSON document: settings, figures, and with `details` every request."""
    start = min((r.sent for r in records), default=0.0)
    content: dict[str, Any] = {"benchmark": "serve", **about, "settings": config.settings(), "result": summary}
    if details:
        content["requests"] = [record.as_json(start) for record in sorted(records, key=lambda r: r.sent)]
    return content
