"""Traces of requests for an OpenTelemetry collector (OTLP over HTTP): the content of their lines in the log, as spans.

Each request is a span, with children for queueing, prefill, decode, and fetched KV. With a `traceparent` header it is
part of the caller's trace (W3C Trace Context), so a router's and its server's spans form one trace. Needs
extra `otel`; without the option nothing is imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

from quire.log import RequestSummary
from quire.server.metrics import OPERATIONS, PROVIDER, finish_reasons

_SPAN = "quire.span"
_PROPAGATOR = TraceContextTextMapPropagator()
_HEADERS = (b"traceparent", b"tracestate")
_SAME_ID = "/v1/completions", "/v1/chat/completions", "/v1/messages"
"""Where the id of the response is that of the request."""


class Traces:
    """Makes spans of requests and sends them, in batches, from its own thread.

    Args:
        endpoint: the collector's URL, such as http://127.0.0.1:4318/v1/traces.
        service: this process's name in traces.
        model: the model that answers; "" if that is another process's matter.
    """

    def __init__(self, endpoint: str, service: str, model: str = "") -> None:
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint), schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("quire")

    def begin(self, scope: MutableMapping[str, Any]) -> None:
        """Begin the span of an ASGI request."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        name = f"{scope['method']} {scope['path'][:256]}"
        scope[_SPAN] = self._tracer.start_span(name, _PROPAGATOR.extract(carrier), SpanKind.SERVER)

    def end(self, scope: Mapping[str, Any], summary: RequestSummary) -> None:
        """End the request's span."""
        span: Span = scope[_SPAN]
        end = time.time_ns()
        span.set_attributes({name: value for name, value in self._attributes(scope, summary).items() if value})
        if summary.error is not None:
            span.set_status(StatusCode.ERROR, summary.error)
        arrived = end - int(summary.total_seconds * 1e9)
        for name, begin, seconds, attributes in _parts(summary):
            start = arrived + int(begin * 1e9)
            part = self._tracer.start_span(name, set_span_in_context(span), start_time=start, attributes=attributes)
            part.end(start + int(seconds * 1e9))
        span.end(end)

    def onward(self, scope: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
        """The headers that make another server's spans of this request part of its trace."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(scope[_SPAN]))
        return [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def _attributes(self, scope: Mapping[str, Any], summary: RequestSummary) -> dict[str, Any]:
        """Names are those of OpenTelemetry's semantic conventions for generative AI spans, and Quire's own."""
        host, port = scope.get("server") or (None, None)
        reasons = finish_reasons(summary)
        told: dict[str, Any] = {
            "server.address": host,
            "server.port": port,
            "error.type": None if reasons or summary.error is None else summary.reason,
            "quire.request.id": summary.request_id,
            "quire.route": summary.route,
        }
        path = getattr(scope.get("route"), "path", summary.path)
        if (operation := OPERATIONS.get(path)) is None:
            return told
        return told | {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": summary.model,
            "gen_ai.response.model": self._model if reasons else None,
            "gen_ai.response.id": summary.request_id if reasons and path in _SAME_ID else None,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": summary.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
            "gen_ai.usage.output_tokens": summary.output_tokens,
        }


def _parts(summary: RequestSummary) -> list[tuple[str, float, float, dict[str, Any]]]:
    """The phases of a request: (name, seconds from its arrival to the phase, seconds, attributes)."""
    first = summary.first_token_seconds
    if first is None or not summary.prompt_tokens:
        return []
    queued = min(summary.queue_seconds, first)
    parts: list[tuple[str, float, float, dict[str, Any]]] = [("queue", 0.0, queued, {})]
    for fetch in summary.fetches:  # a request that waits for blocks is in the queue
        if fetch["seconds"] is not None:
            told = {"quire.source": fetch["source"], "quire.tokens": fetch["tokens"]}
            parts.append(("fetch", max(0.0, queued - fetch["seconds"]), min(queued, fetch["seconds"]), told))
    parts.append(("prefill", queued, first - queued, {}))
    parts.append(("decode", first, summary.total_seconds - first, {}))
    return parts
