"""The fields for the required form of a reply, as OpenAI, vLLM, SGLang and llama.cpp spell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.core.structured_outputs import StructuredOutputsParams, structured_outputs
from quire.errors import SamplingParamsError
from quire.server.body import BodyFields, shorten, wrong_type, wrong_value
from quire.server.errors import api_error, invalid
from quire.text.reply_grammar import ReplyRequest, reply_request

MAX_FORMAT_BYTES = 4 << 20
"""Largest JSON of such a field: more than a schema's own limit, since JSON may escape characters."""

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's former names, and their current ones."""

GRAMMARS = {
    "ebnf": "grammar",
    "grammar": "grammar",
    "regex": "regex",
    "json_schema": "json",
    "structural_tag": "structural_tag",
}
"""SGLang's and llama.cpp's names, and a former one of vLLM's."""

_BESIDE_TYPE = {"json_schema": ("json_schema",), "json_object": ("schema",)}
"""The second one is llama.cpp's."""

FORMATS = "text", "json_object", "json_schema", "structural_tag"


def read_structured_outputs(given: BodyFields) -> StructuredOutputsParams | None:
    """The required form, from any of these fields; None if there is none.

    Raises:
        ApiError: a field is not valid, or several are given.
    """
    names = ["response_format", "structured_outputs", *GUIDED, *GRAMMARS]
    asked = {name: value for name in names if (value := given.get(name, MAX_FORMAT_BYTES)) is not None}
    spaces = given.text("guided_whitespace_pattern", 1024)
    if "response_format" in asked:
        wanted = _format_fields(asked["response_format"])
        if wanted is None:
            del asked["response_format"]
        else:
            asked["response_format"] = wanted
    if len(asked) > 1:
        raise invalid(f"{' and '.join(asked)} both say what the answer must look like; give one of them", [*asked][1])
    if not asked:
        if spaces is not None:
            raise invalid("guided_whitespace_pattern is allowed with guided_json only", "guided_whitespace_pattern")
        return None
    [(name, value)] = asked.items()
    kind = {**GUIDED, **GRAMMARS}.get(name)
    fields = value if kind is None else {kind: value}
    if spaces is not None:
        fields = {**fields, "whitespace_pattern": spaces} if isinstance(fields, Mapping) else fields
    try:
        return structured_outputs(fields)
    except SamplingParamsError as error:
        error.param = name
        raise api_error(error) from None


def read_reply(given: BodyFields, structured: StructuredOutputsParams | None) -> ReplyRequest:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: one is not valid.
    """
    tools, choice = given.get("tools", MAX_FORMAT_BYTES), given.get("tool_choice")
    parallel = given.boolean("parallel_tool_calls", default=True)
    try:
        return reply_request(tools, choice, parallel, structured)
    except SamplingParamsError as error:
        raise api_error(error) from None


def _format_fields(value: Any) -> dict[str, Any] | None:
    """OpenAI's `response_format` as fields of `StructuredOutputsParams`; None for plain text."""
    if not isinstance(value, dict):
        raise wrong_type("response_format", value, f"an object with a type: {', '.join(FORMATS)}")
    kind = value.get("type")
    if kind not in FORMATS:
        raise wrong_value("response_format.type", kind, f"one of {', '.join(FORMATS)}")
    if kind == "structural_tag":
        return {"structural_tag": value}
    _check_names(value, {"type", *_BESIDE_TYPE.get(kind, ())}, "response_format")
    if kind == "text":
        return None
    if kind == "json_object" and value.get("schema") is None:
        return {"json_object": True}
    if kind == "json_object":
        return {"json": _schema(value, "response_format")}
    told = value.get("json_schema")
    if not isinstance(told, dict):
        raise wrong_type("response_format.json_schema", told, "an object with a schema")
    _check_names(told, {"name", "description", "schema", "strict"}, "response_format.json_schema")
    if not isinstance(told.get("strict"), bool | None):
        raise wrong_type("response_format.json_schema.strict", told["strict"], "true or false; it is enforced anyway")
    return {"json": _schema(told, "response_format.json_schema")}


def _schema(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise wrong_type(f"{where}.schema", schema, "a JSON Schema")
    return schema


def _check_names(value: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in value:
        if name not in known:
            raise invalid(f"{where} has the field {shorten(name)}; it may have {', '.join(sorted(known))}", where)
