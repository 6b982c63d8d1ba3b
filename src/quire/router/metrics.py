"""The router's Prometheus metrics: its own counters, and the state of each server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.router.servers import Server
from quire.server.metric_values import Family, Layout, Values, exposition, read_all
from quire.server.metrics import REJECTIONS, STATUSES, HttpMetrics

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}",
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
    "/router/status",
    "/router/requests/{request_id}",
    "/admin",
    "/static",
    "/",
    "other",
)
"""Values of the label `route`."""
_FIRST_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    160.0,
)
_LAYOUT = Layout(
    Family(
        "quire:http_requests",
        "Answers.",
        labels={"route": ROUTES, "status": (*STATUSES[:-1], "502", "other")},
        sparse=True,
    ),
    Family("quire:http_requests_in_progress", "HTTP requests in progress.", kind="gauge"),
    Family("quire:requests_rejected", "Requests refused before they were sent.", labels={"reason": REJECTIONS}),
    Family("quire:disconnects", "Clients that disconnected before their response was complete."),
    Family(
        "quire:router_time_to_first_token_seconds",
        "Seconds from a streaming request's arrival to the first byte of its response.",
        buckets=_FIRST_TOKEN,
    ),
    Family("quire:router_sent", "Requests sent to a server.", labels={"kind": ("first", "resumed")}),
    Family(
        "quire:router_picked",
        "Requests sent for which a picker had named servers: to one of these, or to another, as none could take them.",
        labels={"sent_to": ("picked", "other")},
    ),
)


class RouterMetrics(HttpMetrics):
    """The metrics of one router. To be used from one thread."""

    def __init__(self) -> None:
        super().__init__(Values(_LAYOUT, None, 0))
        self._first_token = self._values.histogram("quire:router_time_to_first_token_seconds")

    def first_token(self, seconds: float) -> None:
        """A stream's first bytes came this many seconds after the request."""
        self._first_token.observe(seconds)

    def routed(self, again: bool, as_picked: bool | None = None) -> None:
        """A request was sent to a server; with `again`, to resume its stream. `as_picked`: see `Choice`."""
        self._values.count("quire:router_sent", "resumed" if again else "first")
        if as_picked is not None:
            self._values.count("quire:router_picked", "picked" if as_picked else "other")

    def render(self, servers: Iterable[Server]) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and the content type."""
        cells, _ = read_all(_LAYOUT, None, self._values)
        return exposition([*_LAYOUT.families_of(cells, lambda name: {}), *_server_families(list(servers))])


Reading = tuple[str, str, Callable[[Server], float]]
_GAUGES: tuple[Reading, ...] = (
    ("quire:server_up", "1 if the server accepts requests.", lambda one: one.is_up),
    ("quire:server_running", "Requests on the server that have a first token.", lambda one: one.running),
    ("quire:server_waiting", "Requests on the server that wait for their first token.", lambda one: one.waiting),
    ("quire:server_queued_tokens", "Prompt tokens still to be computed for waiting requests.", lambda one: one.queued),
    ("quire:server_prefill_rate", "Prompt tokens per second that the server computes.", lambda one: one.rate),
)
_COUNTERS: tuple[Reading, ...] = (
    ("quire:server_requests", "Requests sent to this server.", lambda one: one.num_requests),
    (
        "quire:server_failures",
        "Failures to reach the server or to get all of a response.",
        lambda one: one.num_failures,
    ),
)


def _server_families(servers: list[Server]) -> Iterator[Metric]:
    """Series labelled by server, as many as the operator has configured."""
    for kind, readings in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, help, value in readings:
            family = kind(name, help, labels=["server"])
            for one in servers:
                family.add_metric([one.name], float(value(one)))
            yield family
