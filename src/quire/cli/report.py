"""Statistics of a batch of prompts, as a table or on one line."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput
    from quire.engine.stats import EngineStats


def closing_rows(outputs: Sequence[RequestOutput], stats: EngineStats, seconds: float) -> list[tuple[str, str]]:
    """Rows of statistics: `seconds` of wall time, and the engine's counters since it started."""
    waits = [m.time_to_first_token for m in (o.metrics for o in outputs) if m.time_to_first_token is not None]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.cached_tokens for output in outputs)
    made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    clamped = sum(output.clamped_from is not None for output in outputs)
    reasons = Counter(choice.finish_reason or "none" for output in outputs for choice in output.outputs)
    speculation = [("speculation", verified(stats))] if stats.verifications else []
    return [
        ("time to first token", _spread(waits)),
        ("prefill", rate(stats.prefill_tokens, stats.prefill_seconds)),
        ("decode", rate(stats.decode_tokens, stats.decode_seconds)),
        *speculation,
        ("prompt tokens", f"{prompt:,}"),
        ("cached tokens", f"{cached:,} ({cached / prompt:.0%} of the prompts)" if prompt else "0"),
        ("output tokens", f"{made:,} in {seconds:.2f} s"),
        *([("max_tokens clamped", f"for {clamped:,} prompts, to what the context had left")] if clamped else []),
        ("KV blocks used", f"{stats.peak_blocks:,} of {stats.num_blocks:,} at most"),
        ("preemptions", f"{stats.preemptions:,}"),
        ("finished by", ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())),
    ]


def closing_line(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """The most important of these on one line."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.cached_tokens for output in outputs)
    made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    failed = sum(choice.finish_reason == "error" for output in outputs for choice in output.outputs)
    clamped = sum(output.clamped_from is not None for output in outputs)
    parts = [
        f"{made:,} tokens in {seconds:.2f} s ({made / seconds:,.0f} tokens/s)" if seconds > 0 else f"{made:,} tokens",
        f"{prompt:,} prompt tokens" + (f" ({cached:,} cached)" if cached else ""),
        *([f"max_tokens clamped for {clamped:,}, to the rest of the context"] if clamped else []),
        *([f"{failed:,} failed"] if failed else []),
    ]
    return ", ".join(parts)


def rate(tokens: int, seconds: float) -> str:
    """Tokens per second; a dash if nothing was measured."""
    return f"{tokens / seconds:,.0f} tokens/s ({tokens:,} in {seconds:.2f} s)" if seconds > 0 else "-"


def verified(stats: EngineStats) -> str:
    """How many drafts were accepted: tokens per verification, and the share accepted at each of the first positions."""
    tokens = (stats.verifications + stats.accepted) / stats.verifications
    shares = [count / stats.verifications for count in stats.accepted_by_position]
    named = zip(("1st", "2nd", "3rd", "4th"), shares, strict=False)
    parts = [f"{name} {share:.0%}" for name, share in named] + ["..."] * (len(shares) > 4)
    of_all = f"{stats.accepted / stats.drafted:.0%} of {stats.drafted:,}"
    accepted = f"{', '.join(parts)}; {of_all}" if parts else of_all
    return f"{tokens:.2f} tokens a verification (drafts accepted: {accepted})"


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    median = f"{statistics.median(seconds) * 1000:,.0f} ms"
    return median if len(seconds) == 1 else f"{median} median, {max(seconds) * 1000:,.0f} ms longest"
