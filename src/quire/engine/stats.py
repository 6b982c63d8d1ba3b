"""An engine's statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.request import RequestUpdate
from quire.core.step import StepPlan, StepResult


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started, and gauges.

    A step that computes any prompt token counts as prefill, all others as decode; tokens per second of either kind are
    its tokens over its seconds.

    Attributes:
        steps: steps run.
        prompt_tokens, cached_tokens, output_tokens: tokens of all prompts, those found in the prefix cache, and sampled
            tokens.
        prefill_tokens, prefill_seconds: tokens computed in prefill steps, and their time.
        decode_tokens, decode_seconds: tokens sampled in pure decode steps, and their time.
        verifications: spans that verified drafts.
        drafted, accepted: verified drafts, and those of them that were accepted.
        accepted_by_position: how often at least 1, 2, ... drafts of a span were accepted.
        peak_blocks: most blocks held at once. num_blocks: usable blocks of the pools. block_size: their tokens.
        kv_tiers: for each tier below the pool, blocks `stored` in it, `loaded` from it, and `bad` ones, whose bytes
            were not those stored; they were recomputed.
        kv_slots: slots of the host tier by state: "free", "filling" (a block is on its way), "kept" (it has a block),
            and "quarantined" (something may still be read or written late); {} without that tier.
        kv_tier_bytes: bytes `stored` and `loaded`, likewise.
        kv_block_bytes: bytes of a block of the first KV group.
        kv_transfer_unmet: requests whose `kv_transfer_params` named an engine that was not asked, by the reason.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    preemptions: int = 0
    peak_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    running: int = 0
    waiting: int = 0
    kv_tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    kv_slots: dict[str, int] = field(default_factory=dict)
    kv_tier_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    kv_block_bytes: int = 0
    kv_transfer_unmet: dict[str, int] = field(default_factory=dict)

    def count(self, plan: StepPlan, result: StepResult, updates: list[RequestUpdate]) -> None:
        """Count a step and its result."""
        self.steps += 1
        sampled = sum(len(update.tokens) for update in updates)
        self.output_tokens += sampled
        drafts = sum(max(0, span.num_sampled - 1) for span in plan.spans)
        if not plan.spans:
            return
        if plan.num_tokens - drafts > len(plan.spans):
            self.prefill_tokens += plan.num_tokens - drafts
            self.prefill_seconds += result.seconds
        else:
            self.decode_tokens += sampled
            self.decode_seconds += result.seconds
        for span in result.spans:
            if span.num_drafted:
                self._count_drafts(span.num_drafted, len(span.tokens) - 1)

    def _count_drafts(self, drafted: int, accepted: int) -> None:
        """Count a verification of drafts."""
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_by_position += [0] * (accepted - len(self.accepted_by_position))
        for position in range(accepted):
            self.accepted_by_position[position] += 1
