"""Metrics of the engines, made from what each one reports at a scrape.

A restarted engine counts from zero again, which Prometheus takes for a counter's reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.log import kv_use

STATES = ("loading", "ready", "restarting", "failed", "unknown")


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The state of one engine at a scrape.

    Attributes:
        stats: the engine's statistics, see `EngineStats`; None if it did not answer. Metrics of missing fields are
            left out.
        state: one of `STATES`; any other value counts as "unknown". restarts: how often it was restarted.
    """

    stats: Mapping[str, Any] | None = None
    state: str = "unknown"
    restarts: int = 0


_GAUGES = {
    "vllm:num_requests_running": ("running", "Running requests: they hold blocks and take part in steps."),
    "vllm:num_requests_waiting": ("waiting", "Requests that wait for their first step, or were preempted."),
    # with several ranks
    "quire:ranks": ("ranks", "Processes that share the model."),
    "quire:rank_imbalance": ("rank_imbalance", "Recent load of the busiest rank's experts, over the mean."),
    "quire:rank_imbalance_before_move": (
        "imbalance_before",
        "The same for one layer, before its experts were last moved.",
    ),
    "quire:rank_imbalance_after_move": ("imbalance_after", "The same as expected after that move."),
    "quire:expert_move_seconds": (
        "expert_move_seconds",
        "Seconds that the last move of experts took, beside running steps.",
    ),
}
_COUNTERS = {
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "vllm:num_preemptions": ("preemptions", "Preemptions of requests."),
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "vllm:prompt_tokens_cached": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "vllm:generation_tokens": ("output_tokens", "Tokens sampled."),
    "quire:engine_steps": ("steps", "Steps run."),
    "quire:prefill_step_tokens": ("prefill_tokens", "Tokens computed in steps with prompt tokens."),
    "quire:prefill_step_seconds": ("prefill_seconds", "Seconds in steps with prompt tokens."),
    "quire:decode_step_tokens": ("decode_tokens", "Tokens sampled in steps that only decoded."),
    "quire:decode_step_seconds": ("decode_seconds", "Seconds in steps that only decoded."),
    # with several ranks
    "quire:gathers": ("gathers", "Number of all-gathers between ranks."),
    "quire:gathered_bytes": ("gathered_bytes", "Bytes that the first rank received in them."),
    "quire:all_reduces": ("all_reduces", "Number of all-reduces between ranks."),
    "quire:all_reduced_bytes": ("all_reduced_bytes", "Bytes that they summed."),
    "quire:expert_moves": ("expert_moves", "Layers whose experts were moved between ranks."),
    "quire:experts_moved": ("experts_moved", "Experts that ranks read for these moves."),
    "quire:expert_bytes_moved": ("expert_bytes_moved", "Bytes of these experts, before quantization."),
}
_DRAFT_COUNTERS = {
    "vllm:spec_decode_num_drafts": ("verifications", "How often drafts of a request were verified."),
    "vllm:spec_decode_num_draft_tokens": ("drafted", "Draft tokens that were verified."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted", "Draft tokens that were accepted."),
}
"""Only of engines that speculate, which report `draft_depth`."""


def engine_families(engines: Sequence[EngineReading], model_name: str) -> Iterator[Metric]:
    """The metrics of all engines. Each sample is labelled with its engine's number, and in vLLM's with the model."""
    families: dict[str, Metric] = {}
    for number, engine in enumerate(engines):
        for family in _families(engine):
            labels = {"engine": str(number)} | ({"model_name": model_name} if family.name.startswith("vllm:") else {})
            own = [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
            whole = families.setdefault(family.name, family)
            whole.samples = own if whole is family else [*whole.samples, *own]
    yield from families.values()


def _families(engine: EngineReading) -> Iterator[Metric]:
    state = engine.state if engine.state in STATES else "unknown"
    states = [(one, one == state) for one in STATES]
    yield _gauge("quire:engine_state", "1 for the state that the engine is in.", states, "state")
    yield _counter("quire:engine_restarts", "Restarts of the engine.", [(engine.restarts,)])
    if engine.stats is not None:
        yield from _plain_families(engine.stats)
        yield from _block_families(engine.stats)
        yield from _tier_families(engine.stats)
        yield from _model_families(engine.stats)


def _plain_families(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """One number each."""
    counters = _COUNTERS | (_DRAFT_COUNTERS if "draft_depth" in stats else {})
    for make, table in ((_gauge, _GAUGES), (_counter, counters)):
        for name, (key, help) in table.items():
            if isinstance(stats.get(key), int | float):
                yield make(name, help, [(stats[key],)])


def _block_families(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """How the pool of KV blocks is used."""
    if not all(name in stats for name in ("num_blocks", "held_blocks", "free_blocks")):
        return
    help = "The share of KV blocks that requests hold, 0 to 1."
    yield _gauge("vllm:kv_cache_usage_perc", help, [(kv_use(stats),)])
    if "block_size" in stats:
        sizes = [(str(stats["block_size"]), str(stats["num_blocks"]), 1.0)]
        help = "Always 1; the labels are the size of the KV cache, whatever the device."
        yield _gauge("vllm:cache_config_info", help, sizes, "block_size", "num_gpu_blocks")
    held, free = stats["held_blocks"], stats["free_blocks"]
    blocks = [("held", held), ("cached", stats["num_blocks"] - held - free), ("free", free)]
    yield _gauge("quire:kv_blocks", "KV blocks held by requests, cached without a holder, and free.", blocks, "state")


def _tier_families(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What moved between the pool and the tiers below it, and the host tier's slots."""
    if tiers := stats.get("kv_tiers"):
        blocks = [(tier, event, count) for tier, counts in tiers.items() for event, count in counts.items()]
        help = "KV blocks stored in a tier, loaded from it, and found corrupt when loaded (bad); see docs/kv.md."
        yield _counter("quire:kv_tier_blocks", help, blocks, "tier", "event")
        sizes = stats["kv_tier_bytes"]
        moved = [(tier, event, sizes[tier].get(event, 0)) for tier, event, _ in blocks if event in ("stored", "loaded")]
        help = "Bytes stored in a tier, and loaded from it."
        yield _counter("quire:kv_tier_bytes", help, moved, "tier", "event")
    if slots := stats.get("kv_slots"):
        help = "Slots of the host tier: free, filling, kept, and in quarantine (a late write may still arrive)."
        yield _gauge("quire:kv_host_slots", help, slots.items(), "state")
    if unmet := stats.get("kv_transfer_unmet"):
        help = "Requests whose kv_transfer_params name an engine that was not asked: see docs/kv.md."
        yield _counter("quire:kv_transfer_unmet", help, unmet.items(), "reason")


def _model_families(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Drafts, experts and pipeline stages, where there are any."""
    if "draft_depth" in stats and "accepted_by_position" in stats:
        counts = stats["accepted_by_position"]
        counts = enumerate([*counts, *[0] * (stats["draft_depth"] - len(counts))])
        help = "Accepted draft tokens, by their position among the drafts."
        yield _counter("vllm:spec_decode_num_accepted_tokens_per_pos", help, counts, "position")
    if "expert_load_balance" in stats and "expert_load_balance_by_layer" in stats:
        balances = {"all": stats["expert_load_balance"]} | stats["expert_load_balance_by_layer"]
        help = "Tokens of the busiest expert over the mean, for all layers together and for each layer with experts."
        yield _gauge("quire:expert_load_balance", help, balances.items(), "layer")
    if "expert_tokens" in stats:
        loads = [(layer, *one) for layer, load in stats["expert_tokens"].items() for one in enumerate(load)]
        yield _counter("quire:expert_tokens", "Tokens routed to each expert of each layer.", loads, "layer", "expert")
    if "stage_busy" in stats:
        help = "The share of all steps' time in which a pipeline stage computed rather than waited."
        yield _gauge("quire:stage_busy", help, enumerate(stats["stage_busy"]), "stage")


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    help: str,
    rows: Iterable[tuple[Any, ...]],
    *labels: str,
) -> Metric:
    """A metric. Each row has the values of the labels, and then the number."""
    family = kind(name, help, labels=labels)
    for *values, number in rows:
        family.add_metric([*map(str, values)], number)
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)
