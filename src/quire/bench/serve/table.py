"""A run's figures as a text table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quire.bench.serve.config import LoadConfig
from quire.bench.serve.summary import LATENCIES, Distribution, Summary

_NAME = 23
_NUMBER = 13


def describe(config: LoadConfig) -> str:
    """A short description of the load."""
    prompts = f"{config.kind} prompts of {'words' if config.as_text else 'token ids'}"
    if config.at_a_time is not None:
        what = "conversations" if config.kind == "multi-turn" else "requests"
        return f"{prompts}, {config.at_a_time:,} {what} at a time"
    if config.rate is None:
        speedup = config.number("speedup")
        return f"{prompts}, at the trace's times" + ("" if speedup == 1 else f", {speedup:g} times as fast")
    what = "conversations" if config.kind == "multi-turn" else "requests"
    burst = "" if config.burstiness is None else f", burstiness {config.burstiness:g}"
    return f"{prompts}, {config.rate} {what} a second{burst}"


def render(config: LoadConfig, summary: Summary, about: Mapping[str, str]) -> str:
    """The table, lines joined."""
    return "\n".join(_lines(config, summary, about))


def _lines(config: LoadConfig, summary: Summary, about: Mapping[str, str]) -> Iterator[str]:
    yield f"{about['url']}, model {about['model']}: {describe(config)}"
    yield ""
    yield from _requests(summary)
    yield ""
    yield _row("throughput", "a second", "in all")
    yield _row("  requests", f"{summary.requests_per_s:,.2f}", f"{summary.succeeded:,}")
    yield _row("  input tokens", f"{summary.input_per_s:,.1f}", f"{summary.input_tokens:,}")
    yield _row("  output tokens", f"{summary.output_per_s:,.1f}", f"{summary.output_tokens:,}")
    yield _row("  all tokens", f"{summary.total_per_s:,.1f}", f"{summary.input_tokens + summary.output_tokens:,}")
    yield ""
    yield _row("latency, ms", "mean", "p50", "p90", "p99", "max")
    for name, text in LATENCIES.items():
        yield _latency(f"  {text}", summary.latencies[name])
    if summary.goodput is not None:
        goodput = summary.goodput
        targets = ", ".join(f"{name} {most:g} ms" for name, most in goodput.targets.items())
        yield ""
        yield (
            _row("goodput", f"{goodput.per_s:,.2f}", f"{goodput.requests:,}")
            + f"  {goodput.share:.1%} within {targets}"
        )
    if summary.failures or summary.notes or summary.stopped:
        yield ""
    for kind, failures in summary.failures.items():
        yield f"{failures.count:,} failed: {kind}: {failures.message}"
    if summary.stopped:
        yield f"stopped early: {summary.stopped}"
    for note in summary.notes:
        yield f"note: {note}"


def _requests(summary: Summary) -> Iterator[str]:
    broken_off = f", {summary.broken_off:,} broken off and not counted" if summary.broken_off else ""
    yield _fact("requests", f"{summary.succeeded:,} succeeded, {summary.failed:,} failed{broken_off}")
    yield _fact("time", f"{summary.seconds:,.2f} s, at most {summary.most_running:,} requests at a time")
    if summary.sent_rate is not None and summary.asked_rate is not None:
        late = "" if summary.late_ms is None else f"; sent {summary.late_ms.p99:,.1f} ms late (p99)"
        yield _fact("rate", f"{summary.asked_rate:,.3g}/s asked, {summary.sent_rate:,.3g}/s sent{late}")
    if summary.cached_tokens is None:
        yield _fact("cached prompt tokens", "the server does not tell")
    else:
        share = summary.cached_tokens / summary.input_tokens if summary.input_tokens else 0.0
        yield _fact("cached prompt tokens", f"{summary.cached_tokens:,} ({share:.1%})")


def _fact(name: str, text: str) -> str:
    return f"{name:{_NAME}}  {text}"


def _row(name: str, *cells: str) -> str:
    return f"{name:{_NAME}}" + "".join(f"{cell:>{_NUMBER}}" for cell in cells)


def _latency(name: str, found: Distribution | None) -> str:
    if found is None:
        return _row(name, *"-----")
    return _row(name, *(f"{value:,.2f}" for value in (found.mean, found.p50, found.p90, found.p99, found.max)))
