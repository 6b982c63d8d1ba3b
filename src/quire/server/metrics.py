"""The metrics of a server's HTTP processes, and `/metrics` with those of its engines (`engine_metrics.py`).

A metric that vLLM has keeps vLLM's name, type, buckets and labels, so that its dashboards work; the names of the others
begin with `quire:`, but for OpenTelemetry's `gen_ai.server.*`, whose histograms are here as its exporter for Prometheus
names them. Label values come from closed sets; a value that is not in its set counts as the last one.

Each HTTP process counts in a small file of its own (`metric_values.py`), so any of them can answer `/metrics` for all,
and the counts of one that died are kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily

from quire.engine.outputs import RequestMetrics
from quire.log import RequestSummary
from quire.server.engine_metrics import EngineReading, engine_families
from quire.server.metric_values import Family, Layout, Values, exposition, read_all

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
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
    "/load/prompts",
    "/load/requests/{request_id}",
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
"""Values of the label `status`; 499: the client disconnected before the response."""

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

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
"""OpenTelemetry's `gen_ai.operation.name` of a route."""
PROVIDER = "quire"
"""Its `gen_ai.provider.name`."""

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
# Those of OpenTelemetry's semantic conventions for generative AI metrics.
_OTEL_REQUEST = tuple(0.01 * 2**power for power in range(14))
_OTEL_FIRST_TOKEN = _FIRST_TOKEN[:16]
_OTEL_TOKEN = _TOKEN[:13]
_OPERATION = {"gen_ai_operation_name": tuple(dict.fromkeys(OPERATIONS.values()))}
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
    Family(
        "gen_ai_server_request_duration_seconds",
        "Seconds from a successful request's arrival to its end.",
        labels=_OPERATION,
        buckets=_OTEL_REQUEST,
        sparse=True,
    ),
    Family(
        "gen_ai_server_time_to_first_token_seconds",
        "Seconds from a successful request's arrival to its first token.",
        labels=_OPERATION,
        buckets=_OTEL_FIRST_TOKEN,
        sparse=True,
    ),
    Family(
        "gen_ai_server_time_per_output_token_seconds",
        "Seconds per token after the first of a successful request.",
        labels=_OPERATION,
        buckets=_OTEL_TOKEN,
        sparse=True,
    ),
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
    """The HTTP metrics that a server and a router have in common."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._in_progress = values.cell("quire:http_requests_in_progress")

    def request_received(self) -> None:
        """Count a request whose headers have been received. Each call is followed by one of `request_done`."""
        self._in_progress[0] += 1

    def request_done(self, route: str, status: int, summary: RequestSummary) -> None:
        """Count a request that has ended.

        Args:
            route: the template that matched its path; any other text counts as "other".
            status: its HTTP status; 499 if the client disconnected before there was one.
            summary: the content of its line in the log.
        """
        self._in_progress[0] -= 1
        self._values.count("quire:http_requests", route, str(status))

    def rejected(self, reason: str) -> None:
        """Count a request that was refused before it ran or was sent on; `reason` is one of `REJECTIONS`."""
        self._values.count("quire:requests_rejected", reason)

    def disconnected(self) -> None:
        """Count a client that disconnected before its response was complete."""
        self._values.count("quire:disconnects")


class Metrics(HttpMetrics):
    """The metrics of one HTTP process. Use it from one thread; no method raises, whatever the numbers are.

    Args:
        folder: where the server's HTTP processes keep their files; None: in memory, for a single process.
        worker: this process's number.
        model_name: value of the label by which vLLM's dashboards select a model.
    """

    def __init__(self, folder: Path | None = None, *, worker: int = 0, model_name: str = "") -> None:
        super().__init__(Values(_LAYOUT, folder, worker))
        self._folder = folder
        self._model_name = model_name
        self._gaps = self._values.histogram("vllm:inter_token_latency_seconds")

    def request_done(self, route: str, status: int, summary: RequestSummary) -> None:
        super().request_done(route, status, summary)
        operation, reasons = OPERATIONS.get(route), finish_reasons(summary)
        if operation is None or not {"stop", "length"}.issuperset(reasons) or not reasons:
            return
        rate = summary.tokens_per_second
        observed = {
            "gen_ai_server_request_duration_seconds": summary.total_seconds,
            "gen_ai_server_time_to_first_token_seconds": summary.first_token_seconds,
            "gen_ai_server_time_per_output_token_seconds": None if rate is None else 1 / rate,
        }
        for name, value in observed.items():
            if value is not None:
                self._values.histogram(name, operation).observe(value)

    def queue(self, requests: int, tokens: int) -> None:
        """Set the number of requests that wait in this process, and of their tokens."""
        self._values.cell("quire:queued_requests")[0] = requests
        self._values.cell("quire:queued_tokens")[0] = tokens

    def first_token(self, seconds: float) -> None:
        """Observe the time from a request's arrival to the first token of any choice. Once for each request."""
        self._values.histogram("vllm:time_to_first_token_seconds").observe(seconds)

    def token_gap(self, seconds: float, count: int) -> None:
        """Observe `count` further tokens of a choice, which came `seconds` after the token before them."""
        if count > 0:
            self._gaps.observe(seconds / count, count)

    def finished(
        self,
        reasons: Sequence[str],
        times: RequestMetrics,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: Sequence[int],
        e2e_seconds: float,
        tokenize_seconds: float,
        max_tokens: int | None,
    ) -> None:
        """Observe a request that has ended: once for each prompt, when all its choices have.

        Args:
            reasons: the finish reason of each choice, of `FINISH_REASONS`.
            times: measured by the engine; the default values if it did not finish.
            output_tokens: of each choice.
            e2e_seconds: from its arrival to its end. tokenize_seconds: for rendering and tokenizing it.
            max_tokens: as requested; None if it was not given.
        """
        for reason in reasons:
            self._values.count("vllm:request_success", reason)
        longest = max(output_tokens)
        observed = {
            "vllm:e2e_request_latency_seconds": e2e_seconds,
            "vllm:request_queue_time_seconds": times.queue_seconds,
            "vllm:request_prefill_time_seconds": times.prefill_seconds,
            "vllm:request_decode_time_seconds": times.decode_seconds,
            "vllm:request_time_per_output_token_seconds": times.decode_seconds / (longest - 1) if longest > 1 else None,
            "vllm:request_prompt_tokens": prompt_tokens,
            "vllm:request_generation_tokens": sum(output_tokens),
            "vllm:request_max_num_generation_tokens": longest,
            "vllm:request_prefill_kv_computed_tokens": prompt_tokens - cached_tokens,
            "vllm:request_params_n": len(output_tokens),
            "vllm:request_params_max_tokens": max_tokens,
            "vllm:request_num_preemptions": times.preemptions,
            "quire:tokenize_seconds": tokenize_seconds,
            "quire:detokenize_seconds": times.detokenize_seconds,
        }
        for name, value in observed.items():
            if value is not None:
                self._values.histogram(name).observe(value)

    def render(self, engines: Sequence[EngineReading]) -> tuple[bytes, str]:
        """All metrics of the server, in Prometheus' text format, and its content type.

        An engine's metrics have its number as the label `engine`. What HTTP processes count covers all engines, so if
        there are several, this label, which is vLLM's, is "all".
        """
        cells, pids = read_all(_LAYOUT, self._folder, self._values)
        vllm = {"model_name": self._model_name, "engine": "0" if len(engines) == 1 else "all"}
        otel = {"gen_ai_provider_name": PROVIDER, "gen_ai_request_model": self._model_name}
        labels = {"vllm:": vllm, "gen_ai_": otel}
        return exposition(
            [
                *_LAYOUT.families_of(
                    cells, lambda name: next((labels[each] for each in labels if name.startswith(each)), {})
                ),
                _memory_family(pids, [each.stats["pid"] for each in engines if each.stats and "pid" in each.stats]),
                *engine_families(engines, self._model_name),
            ]
        )


def finish_reasons(summary: RequestSummary) -> list[str]:
    """The finish reasons of a request's choices, each once; none if it was not answered with choices."""
    reasons = summary.reason.split(", ")
    return reasons if set(FINISH_REASONS).issuperset(reasons) else []


def _memory_family(http: Sequence[int], engines: Sequence[int]) -> GaugeMetricFamily:
    """Resident memory by kind of process, given their ids; without those whose memory the system does not report."""
    found = {"http": http, "tokenizer": [child for pid in http for child in _children(pid)], "engine": engines}
    family = GaugeMetricFamily(
        "quire:memory_resident_bytes", "Resident memory, by kind of process.", labels=["process"]
    )
    for kind, pids in found.items():
        if size := sum(map(_resident_bytes, pids)):
            family.add_metric([kind], float(size))
    return family


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
