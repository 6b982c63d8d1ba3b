"""The server's metrics: what the HTTP processes count, and what Prometheus is told of it.

Where the meaning is vLLM's, the name, type, buckets and labels are vLLM's too, so that its dashboards work; the rest
is called `quire:`. Label values come from closed sets; whatever is not in a set counts as its last member.

Each HTTP process counts in a small file of its own (`metric_values.py`), so `/metrics` answers for all of them
whichever one is asked, and a process that has died stays counted. What the engine counts it tells at each scrape.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.log import kv_use
from quire.server.metric_values import Family, Layout, Values, read_all

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/v1/models",
    "/v1/models/{id}",
    "/tokenize",
    "/detokenize",
    "/abort/{request_id}",
    "/health",
    "/live",
    "/metrics",
    "/version",
    "/server_info",
    "/load",
    "/view",
    "/openapi.json",
    "/docs",
    "/reset_prefix_cache",
    "/debug/requests",
    "/debug/steps",
    "/static",
    "/",
    "other",
)
"""Values of the label `route`."""

STATUSES = ("200", "400", "401", "403", "404", "405", "408", "413", "415", "429", "431", "499", "500", "503", "other")
"""Values of the label `status`; 499 is a client that went away before the answer."""

REJECTIONS = (
    "queue_requests",  # --max-queued-requests
    "queue_tokens",  # --max-queued-tokens
    "not_ready",  # loading, restarting, failed
    "draining",
    "unauthorized",
    "too_large",  # the body
    "context_length",  # the prompt
    "unknown_model",
    "timeout",  # before it ran: --request-timeout, or the tokenizer's deadline
    "invalid",  # any other 400
    "other",
)
"""Values of the label `reason` of refused requests."""

FINISH_REASONS = ("stop", "length", "abort", "error")
STATES = ("loading", "ready", "restarting", "failed", "unknown")

_VLLM = ("model_name", "engine")  # labels of every vllm: metric

# vLLM's buckets (vllm/v1/metrics/loggers.py), seconds.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# vLLM ends these at the model's longest context; here they must be known before the model is.
_COUNT = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_LAYOUT = Layout(
    Family(
        "vllm:request_success", "Finished choices of requests, by reason.", labels={"finished_reason": FINISH_REASONS}
    ),
    Family(
        "vllm:time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", buckets=_FIRST_TOKEN
    ),
    Family("vllm:inter_token_latency_seconds", "Seconds between two tokens of a choice.", buckets=_TOKEN),
    Family("vllm:request_time_per_output_token_seconds", "A request's decoding seconds per token.", buckets=_TOKEN),
    Family("vllm:e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", buckets=_REQUEST),
    Family("vllm:request_queue_time_seconds", "Seconds from a request's arrival to its first step.", buckets=_REQUEST),
    Family("vllm:request_prefill_time_seconds", "Seconds in steps that computed a request's prompt.", buckets=_REQUEST),
    Family("vllm:request_decode_time_seconds", "Seconds in steps that computed a request's output.", buckets=_REQUEST),
    Family("vllm:request_prompt_tokens", "Prompt tokens of a request.", buckets=_COUNT),
    Family("vllm:request_generation_tokens", "Output tokens of a request.", buckets=_COUNT),
    Family("vllm:request_max_num_generation_tokens", "Output tokens of a request's longest choice.", buckets=_COUNT),
    Family(
        "vllm:request_prefill_kv_computed_tokens", "A request's prompt tokens not found in the cache.", buckets=_COUNT
    ),
    Family("vllm:request_params_n", "A request's parameter n.", buckets=_CHOICES),
    Family("vllm:request_params_max_tokens", "A request's parameter max_tokens, if given.", buckets=_COUNT),
    Family("vllm:request_num_preemptions", "How often a request was preempted.", buckets=_PREEMPTIONS),
    Family("quire:tokenize_seconds", "Seconds to render and tokenize a request's prompts.", buckets=_SHORT),
    Family("quire:detokenize_seconds", "Seconds to detokenize a request's tokens.", buckets=_SHORT),
    Family("quire:http_requests", "Answers.", labels={"route": ROUTES, "status": STATUSES}, sparse=True),
    Family("quire:http_requests_in_progress", "HTTP requests in progress.", kind="gauge"),
    Family("quire:requests_rejected", "Requests refused before they ran.", labels={"reason": REJECTIONS}),
    Family("quire:disconnects", "Clients that disconnected before their response was complete."),
    Family("quire:queued_requests", "Requests without a first token, as counted by the queue limit.", kind="gauge"),
    Family("quire:queued_tokens", "Their tokens, as counted by the queue limit.", kind="gauge"),
)


class HttpMetrics:
    """What a server and a router count alike, of HTTP requests."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._in_progress = values.cell("quire:http_requests_in_progress")

    def request_received(self) -> None:
        """A request's headers have been received. Each call is followed by one of `request_done`."""
        self._in_progress[0] += 1

    def request_done(self, route: str, status: int) -> None:
        """A request was answered to its end. `route`: the template that matched it, or anything else; `status`: its
        HTTP status, or 499 if the client went away before there was one."""
        self._in_progress[0] -= 1
        self._values.count("quire:http_requests", route, str(status))

    def rejected(self, reason: str) -> None:
        """A request was refused before it ran or was sent on; `reason` is one of `REJECTIONS`."""
        self._values.count("quire:requests_rejected", reason)

    def disconnected(self) -> None:
        """A client disconnected before its response was complete."""
        self._values.count("quire:disconnects")


class Metrics(HttpMetrics):
    """One HTTP process's metrics. To be used from one thread; no method raises, whatever the numbers are.

    Args:
        folder: where the server's HTTP processes keep their numbers; None keeps them in memory, for one process.
        worker: this process's number.
        model_name: the label that vLLM's dashboards select by.
    """

    def __init__(self, folder: Path | None = None, *, worker: int = 0, model_name: str = "") -> None:
        super().__init__(Values(_LAYOUT, folder, worker))
        self._folder = folder
        self._model_name = model_name
        self._gaps = self._values.histogram("vllm:inter_token_latency_seconds")

    def queue(self, requests: int, tokens: int) -> None:
        """What this process's share of the queue bound holds now."""
        self._values.cell("quire:queued_requests")[0] = requests
        self._values.cell("quire:queued_tokens")[0] = tokens

    # -- generation ------------------------------------------------------------------------------------------

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after its arrival. Once a request, whatever its choices."""
        self._values.histogram("vllm:time_to_first_token_seconds").observe(seconds)

    def token_gap(self, seconds: float, count: int = 1) -> None:
        """`count` further tokens of one choice came within `seconds` of the one before them."""
        if count > 0:
            self._gaps.observe(seconds / count, count)

    def finished(
        self,
        reason: str | Sequence[str],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        e2e_seconds: float,
        queue_seconds: float = 0.0,
        prefill_seconds: float = 0.0,
        decode_seconds: float = 0.0,
        tokenize_seconds: float = 0.0,
        detokenize_seconds: float = 0.0,
        n: int = 1,
        max_tokens: int | None = None,
        longest_output: int | None = None,
        preemptions: int = 0,
    ) -> None:
        """A request that ran has ended: once a prompt, when all its choices have.

        Args:
            reason: why, of `FINISH_REASONS`; with several choices one each.
            output_tokens: of all choices. longest_output: of the longest one; default: `output_tokens` over `n`.
            max_tokens: what the client asked for, if it did.
        """
        for one in (reason,) if isinstance(reason, str) else reason:
            self._values.count("vllm:request_success", one)
        longest = longest_output if longest_output is not None else -(-output_tokens // max(1, n))
        observed = {
            "vllm:e2e_request_latency_seconds": e2e_seconds,
            "vllm:request_queue_time_seconds": queue_seconds,
            "vllm:request_prefill_time_seconds": prefill_seconds,
            "vllm:request_decode_time_seconds": decode_seconds,
            "vllm:request_time_per_output_token_seconds": decode_seconds / (longest - 1) if longest > 1 else None,
            "vllm:request_prompt_tokens": prompt_tokens,
            "vllm:request_generation_tokens": output_tokens,
            "vllm:request_max_num_generation_tokens": longest,
            "vllm:request_prefill_kv_computed_tokens": prompt_tokens - cached_tokens,
            "vllm:request_params_n": n,
            "vllm:request_params_max_tokens": max_tokens,
            "vllm:request_num_preemptions": preemptions,
            "quire:tokenize_seconds": tokenize_seconds,
            "quire:detokenize_seconds": detokenize_seconds,
        }
        for name, value in observed.items():
            if value is not None:
                self._values.histogram(name).observe(value)

    # -- out -------------------------------------------------------------------------------------------------

    def render(self, engines: Sequence[EngineReading]) -> tuple[bytes, str]:
        """The metrics of all HTTP processes and of each engine, in Prometheus' text format, and its content type.

        What an engine tells has its number as the label `engine`. What HTTP processes count is of all engines, so there
        vLLM's label of that name is "all" where there are several.
        """
        cells, pids = read_all(_LAYOUT, self._folder, self._values)
        labels = {"model_name": self._model_name, "engine": "0" if len(engines) == 1 else "all"}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Families(_LAYOUT.families_of(cells, lambda name: labels if name[:5] == "vllm:" else {})))
        registry.register(Families(_memory_families(pids, [engine.stats or {} for engine in engines])))
        registry.register(Families(_of_each(engines, self._model_name)))
        return generate_latest(registry), CONTENT_TYPE


@dataclass(frozen=True, slots=True)
class EngineReading:
    """How one engine does.

    Attributes:
        stats: fields of `EngineStats`, `held_blocks` (by requests), `free_blocks` and `pid`, of a model with
            experts their load and its balance, where tokens are drafted `draft_depth`, and what moved between
            the pool and its tiers; None while there is no engine to ask. What is missing is left out.
        state: one of `STATES`. restarts: how often it was started again.
    """

    stats: Mapping[str, Any] | None = None
    state: str = "unknown"
    restarts: int = 0


class Families(Collector):
    """Families that were made for one scrape."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


def _of_each(engines: Sequence[EngineReading], model_name: str) -> Iterator[Metric]:
    """What the engines told, each sample with its engine's number."""
    families: dict[str, Metric] = {}
    for number, engine in enumerate(engines):
        labels = {"model_name": model_name, "engine": str(number)}
        told = _engine_families(engine.stats, labels) if engine.stats is not None else iter(())
        for family in chain(_state_families(engine.state, engine.restarts), told):
            whole = families.setdefault(family.name, family)
            own = [sample._replace(labels={**sample.labels, "engine": str(number)}) for sample in family.samples]
            whole.samples = own if whole is family else [*whole.samples, *own]
    yield from families.values()
    build = GaugeMetricFamily("quire:build_info", "Always 1; the version is a label.", labels=["version"])
    yield _single(build, [version("quire")], 1.0)


_ENGINE_GAUGES = {
    "vllm:num_requests_running": ("running", "Running requests: they hold blocks and take part in steps."),
    "vllm:num_requests_waiting": ("waiting", "Requests that wait for their first step, or were preempted."),
}
_ENGINE_COUNTERS = {
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
}

_RANK_GAUGES = {
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
_RANK_COUNTERS = {
    "quire:gathers": ("gathers", "Number of all-gathers between ranks."),
    "quire:gathered_bytes": ("gathered_bytes", "Bytes that the first rank received in them."),
    "quire:all_reduces": ("all_reduces", "Number of all-reduces between ranks."),
    "quire:all_reduced_bytes": ("all_reduced_bytes", "Bytes that they summed."),
    "quire:expert_moves": ("expert_moves", "Layers whose experts were moved between ranks."),
    "quire:experts_moved": ("experts_moved", "Experts that ranks read for these moves."),
    "quire:expert_bytes_moved": ("expert_bytes_moved", "Bytes of these experts, before quantization."),
}
"""Of engines with several ranks."""

_DRAFT_COUNTERS = {
    "vllm:spec_decode_num_drafts": ("verifications", "How often drafts of a request were verified."),
    "vllm:spec_decode_num_draft_tokens": ("drafted", "Draft tokens that were verified."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted", "Draft tokens that were accepted."),
}
"""Of engines that speculate."""


def _engine_families(stats: Mapping[str, Any], vllm_labels: Mapping[str, str]) -> Iterator[Metric]:
    """What the engine told. A new engine counts from zero again, which Prometheus takes for a counter's reset."""
    drafts = _DRAFT_COUNTERS if "draft_depth" in stats else {}
    gauges, counters = _ENGINE_GAUGES | _RANK_GAUGES, _ENGINE_COUNTERS | drafts | _RANK_COUNTERS
    tables = ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters))
    for kind, table in tables:
        for name, (key, help) in table.items():
            if isinstance(stats.get(key), int | float):
                yield _single(kind(name, help, labels=_names(name)), _own(name, vllm_labels), stats[key])
    if all(name in stats for name in ("num_blocks", "held_blocks", "free_blocks")):
        name = "vllm:kv_cache_usage_perc"
        family = GaugeMetricFamily(name, "The share of KV blocks that requests hold, 0 to 1.", labels=_names(name))
        yield _single(family, _own(name, vllm_labels), kv_use(stats))
        yield _block_family(stats)
    if "draft_depth" in stats and "accepted_by_position" in stats:
        yield _accepted_family(stats["accepted_by_position"], stats["draft_depth"], vllm_labels)
    if "expert_load_balance" in stats and "expert_load_balance_by_layer" in stats:
        yield _expert_family({"all": stats["expert_load_balance"]} | stats["expert_load_balance_by_layer"])
    if stats.get("kv_tiers"):
        yield from _tier_families(stats["kv_tiers"], stats["kv_tier_bytes"])
    if stats.get("kv_slots"):
        yield _slot_family(stats["kv_slots"])
    if "stage_busy" in stats:
        yield _stage_family(stats["stage_busy"])
    if "expert_tokens" in stats:
        yield _expert_tokens(stats["expert_tokens"])


def _accepted_family(counts: Sequence[int], depth: int, vllm_labels: Mapping[str, str]) -> Metric:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    help = "Accepted draft tokens, by their position among the drafts."
    family = CounterMetricFamily(name, help, labels=[*_VLLM, "position"])
    for position, count in enumerate([*counts, *[0] * (depth - len(counts))]):
        family.add_metric([*_own(name, vllm_labels), str(position)], count)
    return family


def _tier_families(tiers: Mapping[str, Mapping[str, int]], sizes: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """What moved between the pool and its tiers, in blocks and in bytes."""
    help = "KV blocks stored in a tier, loaded from it, and found corrupt when loaded (bad); see docs/kv.md."
    blocks = CounterMetricFamily("quire:kv_tier_blocks", help, labels=["tier", "event"])
    help = "Bytes stored in a tier, and loaded from it."
    moved = CounterMetricFamily("quire:kv_tier_bytes", help, labels=["tier", "event"])
    for tier, counts in tiers.items():
        for event, count in counts.items():
            blocks.add_metric([tier, event], count)
            if event in ("stored", "loaded"):
                moved.add_metric([tier, event], sizes[tier].get(event, 0))
    yield from (blocks, moved)


def _slot_family(slots: Mapping[str, int]) -> Metric:
    help = "Slots of the host tier: free, filling, kept, and in quarantine (a late write may still arrive)."
    family = GaugeMetricFamily("quire:kv_host_slots", help, labels=["state"])
    for state, count in slots.items():
        family.add_metric([state], count)
    return family


def _stage_family(shares: Sequence[float]) -> Metric:
    help = "The share of all steps' time in which a pipeline stage computed rather than waited."
    family = GaugeMetricFamily("quire:stage_busy", help, labels=["stage"])
    for stage, share in enumerate(shares):
        family.add_metric([str(stage)], share)
    return family


def _expert_tokens(loads: Mapping[str, Sequence[int]]) -> Metric:
    help = "Tokens routed to each expert of each layer."
    family = CounterMetricFamily("quire:expert_tokens", help, labels=["layer", "expert"])
    for layer, load in loads.items():
        for expert, tokens in enumerate(load):
            family.add_metric([layer, str(expert)], tokens)
    return family


def _expert_family(balances: Mapping[str, float]) -> Metric:
    help = "Tokens of the busiest expert over the mean, for all layers together and for each layer with experts."
    family = GaugeMetricFamily("quire:expert_load_balance", help, labels=["layer"])
    for layer, balance in balances.items():
        family.add_metric([layer], balance)
    return family


def _block_family(stats: Mapping[str, Any]) -> Metric:
    help = "KV blocks held by requests, cached without a holder, and free."
    family = GaugeMetricFamily("quire:kv_blocks", help, labels=["state"])
    held, free = stats["held_blocks"], stats["free_blocks"]
    for state, value in (("held", held), ("cached", stats["num_blocks"] - held - free), ("free", free)):
        family.add_metric([state], value)
    return family


def _names(name: str) -> tuple[str, ...]:
    return _VLLM if name.startswith("vllm:") else ()


def _own(name: str, vllm_labels: Mapping[str, str]) -> Sequence[str]:
    return [vllm_labels[label] for label in _names(name)]


def _single(family: Metric, labels: Sequence[str], value: float) -> Metric:
    family.add_metric(labels, value)  # type: ignore[attr-defined]
    return family


def _state_families(state: str, restarts: int) -> Iterator[Metric]:
    state = state if state in STATES else STATES[-1]
    family = GaugeMetricFamily("quire:engine_state", "1 for the state that the engine is in.", labels=["state"])
    for one in STATES:
        family.add_metric([one], float(one == state))
    yield family
    yield CounterMetricFamily("quire:engine_restarts", "Restarts of the engine.", value=restarts)


def _memory_families(pids: Sequence[int], engines: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Resident memory by kind of process, where the system tells (Linux)."""
    found: dict[str, list[int]] = {"http": list(pids), "tokenizer": [child for pid in pids for child in _children(pid)]}
    found["engine"] = [engine["pid"] for engine in engines if isinstance(engine.get("pid"), int)]
    family = GaugeMetricFamily(
        "quire:memory_resident_bytes", "Resident memory, by kind of process.", labels=["process"]
    )
    for kind, members in found.items():
        if sizes := [size for pid in members if (size := _resident_bytes(pid))]:
            family.add_metric([kind], float(sum(sizes)))
    yield family


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []
