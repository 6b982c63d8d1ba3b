"""The OpenAPI document: FastAPI's, with our bodies, errors and API keys added."""

from __future__ import annotations

import copy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from quire.server.auth import METRICS_PATH, is_open
from quire.server.errors import ANTHROPIC

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What was wrong, what was found, and what is allowed."},
                "type": {"type": "string", "description": "The kind of error, by OpenAI's names."},
                "param": {"type": ["string", "null"], "description": "The field in question, if any."},
                "code": {"type": ["string", "null"], "description": "A stable code for this particular error."},
            },
        }
    },
}
_ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_KEY = {"type": "http", "scheme": "bearer", "description": "One of the server's API keys."}


def openapi_document(app: FastAPI, keys: bool, root_path: str | None = None) -> dict[str, Any]:
    """The document of this app's routes; made once, then kept.

    Args:
        keys: the server has some, and wants one.
        root_path: where a proxy offers the routes.
    """
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
        if root_path is not None:
            document["servers"] = [{"url": root_path}]
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own errors, which are never sent
            schemas.pop(name, None)
        schemas |= {"Error": _ERROR_SCHEMA, "AnthropicError": _ANTHROPIC_ERROR_SCHEMA}
        _add_bodies(document)
        if keys:
            components["securitySchemes"] = {"key": _KEY}
        for path, methods in document["paths"].items():
            for operation in methods.values():
                _complete(path, operation, keys)
        app.openapi_schema = document
    return app.openapi_schema


_ABOUT = "An LLM inference server with an OpenAI-compatible API. Errors have the format of the schema `Error`."


def _complete(path: str, operation: dict[str, Any], keys: bool) -> None:
    """The errors that this operation may return, and whether it needs a key."""
    responses = operation["responses"]
    responses.pop("422", None)
    shape = "AnthropicError" if path.startswith(ANTHROPIC) else "Error"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    responses["default"] = {"description": "An error", "content": error}
    if path == METRICS_PATH:
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if keys and not is_open(path):
        operation["security"] = [{"key": []}]


def _add_bodies(document: dict[str, Any]) -> None:
    """The schemas of bodies that are parsed and written without FastAPI."""
    from quire.server.schemas import openapi_bodies

    bodies = copy.deepcopy(openapi_bodies())
    document["components"]["schemas"].update(bodies.get("schemas", {}))
    for path, operation in bodies.get("paths", {}).items():
        if path in document["paths"]:
            document["paths"][path]["post"].update(operation)
