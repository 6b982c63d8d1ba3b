"""Traces of requests: what a collector of OpenTelemetry's gets from a router and its server."""

from __future__ import annotations

import gzip
import http.server
import importlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.server import http_options
from quire.server.config import ServerConfig
from tests.http_tools import ServeProcess, wait_until
from tests.test_router_serve import RouteProcess

pytest.importorskip("opentelemetry.sdk")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the spans that it has got: (service, span)."""
    spans: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            told = trace_service.ExportTraceServiceRequest.FromString(body)
            for resource in told.resource_spans:
                [service] = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                spans.extend((service, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()


def test_a_requests_life_over_a_router_and_its_server_is_one_trace(collector: tuple[str, list[Any]]) -> None:
    url, spans = collector
    flag = ("--otlp-traces-endpoint", url)
    with ServeProcess(*flag) as server, RouteProcess("--server", server.url, *flag) as router:
        wait_until(router.up)
        body = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 8, "ignore_eos": True}
        caller = "4bf92f3577b34da6a3ce929d0e0e4736"
        status, _, answer = router.post("/v1/completions", body, traceparent=f"00-{caller}-00f067aa0ba902b7-01")
        assert status == 200, answer
        names = {"queue", "prefill", "decode", "POST /v1/completions"}
        wait_until(lambda: names <= {span.name for _, span in spans if span.trace_id.hex() == caller})
        wait_until(lambda: sum(span.name.startswith("POST") for _, span in spans if span.trace_id.hex() == caller) == 2)
    found = {(service, span.name): span for service, span in spans if span.trace_id.hex() == caller}
    route, serve = (found[service, "POST /v1/completions"] for service in ("quire route", "quire demo"))
    assert route.parent_span_id.hex() == "00f067aa0ba902b7"
    assert serve.parent_span_id == route.span_id
    attributes = {attribute.key: attribute.value for attribute in serve.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "text_completion"
    assert attributes["gen_ai.provider.name"].string_value == "quire"
    assert attributes["gen_ai.request.model"].string_value == attributes["gen_ai.response.model"].string_value == "demo"
    assert attributes["gen_ai.response.id"].string_value == json.loads(answer)["id"]
    assert [each.string_value for each in attributes["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == 8
    assert attributes["gen_ai.usage.input_tokens"].int_value > 0
    assert attributes["server.address"].string_value == "127.0.0.1"
    assert server.url.endswith(f":{attributes['server.port'].int_value}")
    names = {key for key in attributes if not key.startswith("quire.")} | {each.key for each in route.attributes}
    assert {each for each in names if not each.startswith("quire.")} <= registered_names()
    prefill, decode = found["quire demo", "prefill"], found["quire demo", "decode"]
    assert prefill.parent_span_id == decode.parent_span_id == serve.span_id
    begin, end = serve.start_time_unix_nano, serve.end_time_unix_nano
    slack = 10_000_000  # the span began a moment after the request's clock
    assert begin - slack <= prefill.start_time_unix_nano <= prefill.end_time_unix_nano <= decode.end_time_unix_nano
    assert decode.end_time_unix_nano <= end + slack


def registered_names() -> set[str]:
    """The attributes of OpenTelemetry's registry that a span of generative AI may have."""
    registry = "opentelemetry.semconv"
    modules = (
        f"{registry}._incubating.attributes.gen_ai_attributes",
        *(f"{registry}.attributes.{name}_attributes" for name in ("server", "error")),
    )
    found = [vars(importlib.import_module(name)) for name in modules]
    old = "gen_ai.completion", "gen_ai.prompt", "gen_ai.system", "gen_ai.usage.prompt_tokens"
    old = *old, "gen_ai.usage.completion_tokens"
    return {value for each in found for value in each.values() if isinstance(value, str)} - set(old)


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", ""])
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint=.* is not a URL such as"):
        ServerConfig(otlp_traces_endpoint=url)


def test_without_the_library_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_options, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
