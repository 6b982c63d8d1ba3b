"""The server against its own OpenAPI document: whatever schemathesis makes of it, valid or not, is answered as the
document says, and nothing by a 5xx."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.http_tools import ServeProcess

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FEW, MANY = 2, 60
"""Requests of each kind to each operation, by default and in the slow test."""


@pytest.fixture(scope="module")
def server():
    with ServeProcess("--admin", "--max-model-len", "64") as process:
        yield process


def ask_every_operation(server: ServeProcess, number: int) -> int:
    """Send requests to all operations; returns how many were answered well."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    answered = 0
    quickly = settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for found in schema.get_all_operations():
        for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
            operation = found.ok()
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @quickly
            @given(operation.as_strategy(mode))
            def ask(case: schemathesis.Case) -> None:
                nonlocal answered
                case.call_and_validate(checks=CHECKS, timeout=60)
                answered += 1

            ask()
    return answered


def test_requests_made_of_the_openapi_document_are_answered_as_it_says(server: ServeProcess) -> None:
    assert ask_every_operation(server, FEW) > 40
    assert server.json("/health")["status"] == "ok"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_requests_made_of_the_openapi_document_are_answered_as_it_says(server: ServeProcess) -> None:
    assert ask_every_operation(server, MANY) > 1000
    assert server.json("/health")["status"] == "ok"
