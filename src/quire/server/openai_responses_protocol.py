"""From a body of POST /v1/responses to a chat: what its items are as messages.

As for Anthropic's interface (`messages_protocol.py`), nothing is judged here that the chat route judges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quire.server.body import has_more_strings
from quire.server.conversation import STRINGS_PER_OBJECT
from quire.server.errors import invalid
from quire.server.limits import Limits
from quire.server.messages_protocol import reason_of, where_of
from quire.server.protocol import DEFAULT_LIMITS, ChatCall, parse_chat

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MAX_ID_LENGTH = 128
MAX_METADATA = 16


class Part(msgspec.Struct):
    """A piece of content; whether its type is text is checked later."""

    type: str
    text: str = ""


class Item(msgspec.Struct, omit_defaults=True):
    """A message, a call, the result of one, or reasoning: which fields mean something depends on the type."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""
    summary: list[Part] = []
    id: str | None = None


class FunctionTool(msgspec.Struct, omit_defaults=True):
    """A tool of the client's."""

    type: Literal["function"]
    name: str
    parameters: Raw | UnsetType = UNSET
    description: str | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class Format(msgspec.Struct, frozen=True):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType = UNSET
    schema: Raw | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET


class TextConfig(msgspec.Struct):
    """About the text."""

    format: Format = Format()
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct):
    """How hard to think; summaries are not made."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class StreamOptions(msgspec.Struct):
    """Nothing is obfuscated."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(msgspec.Struct):
    """The fields that are this route's own, or mean something else in a chat."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None
    top_logprobs: Literal[0] | None = None


_OWN = frozenset(ResponsesBody.__struct_fields__)
REFUSED = ("conversation", "context_management", "max_tool_calls", "moderation", "prompt")
"""Fields that would change something."""


@dataclasses.dataclass(slots=True, kw_only=True)
class ResponseCall(ChatCall):
    """A chat, and what of the request its answer repeats.

    Attributes:
        input: the items of this request. items: those that it goes on from, and these.
        stores: the answer is kept.
    """

    asked: ResponsesBody
    input: list[Item]
    items: list[Item]
    stores: bool


Find = Callable[[str], bytes]
"""The JSON of the items up to the end of a stored response; raises `ApiError` where there is none."""


def parse_response(body: bytes, limits: Limits = DEFAULT_LIMITS, *, find: Find, keeps: bool = True) -> ResponseCall:
    """The call in a body of POST /v1/responses.

    Args:
        keeps: whether responses can be stored here.

    Raises:
        ApiError: it is not valid.
    """
    given, others = _read(body, limits)
    _check(given, others, keeps)
    own = [Item(role="user", content=given.input)] if isinstance(given.input, str) else given.input
    before: list[Item] = []
    if given.previous_response_id is not None:
        if len(given.previous_response_id) > MAX_ID_LENGTH:
            raise invalid("previous_response_id is no id of a response", "previous_response_id")
        before = msgspec.json.decode(find(given.previous_response_id), type=list[Item])
    messages = [{"role": "system", "content": given.instructions}] if given.instructions else []
    messages += messages_of([*before, *own])
    chat = parse_chat(msgspec.json.encode({**others, "messages": messages, **_chat(given)}), limits)
    if chat.params.n != 1:
        raise invalid("n must be 1: a response has one choice", "n", "unsupported_parameter")
    common = {field.name: getattr(chat, field.name) for field in dataclasses.fields(ChatCall)}
    stores = keeps and given.store is not False
    return ResponseCall(**common, asked=given, input=own, items=[*before, *own], stores=stores)


def _read(body: bytes, limits: Limits) -> tuple[ResponsesBody, dict[str, Raw]]:
    """The fields that are this route's own, and all others as JSON."""
    if has_more_strings(body, STRINGS_PER_OBJECT * (limits.messages + limits.content_parts)):
        raise invalid(f"input has more than {limits.content_parts} items or parts", "input")
    try:
        given = msgspec.json.decode(body, type=ResponsesBody)
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.ValidationError, RecursionError) as error:
        where = where_of(error)
        about = f"is not valid ({reason_of(error)}), or asks for something that is not supported"
        raise invalid(f"{where or 'the body'} {about}", where.partition("[")[0] or None, "invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid("the body is not valid JSON", code="invalid_json") from None
    return given, {name: value for name, value in fields.items() if name not in _OWN}


def _check(given: ResponsesBody, others: dict[str, Raw], keeps: bool) -> None:
    for name in REFUSED:
        if name in others and bytes(others[name]) != b"null":
            raise invalid(f"{name} is not supported here; leave it out", name, "unsupported_parameter")
    if given.background and given.stream:
        raise invalid("a response in the background is not streamed; leave out stream or background", "background")
    if given.background and given.store is False:
        raise invalid("a response in the background must be stored; leave out store", "store")
    for name in ("background", "previous_response_id"):
        if not keeps and getattr(given, name):
            message = (
                f"{name} needs stored responses, and a server of several HTTP processes keeps none (--api-workers)"
            )
            raise invalid(message, name, "unsupported_parameter")
    if given.metadata is not None and len(given.metadata) > MAX_METADATA:
        raise invalid(f"metadata has {len(given.metadata)} entries; at most {MAX_METADATA} are allowed", "metadata")


def _chat(given: ResponsesBody) -> dict[str, Any]:
    """The fields in the words of the chat route."""
    chat: dict[str, Any] = {
        "stream": given.stream,
        "max_completion_tokens": given.max_output_tokens,
        "parallel_tool_calls": given.parallel_tool_calls,
    }
    if given.tools:
        chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in given.tools]
    if isinstance(given.tool_choice, NamedTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": given.tool_choice.name}}
    elif given.tool_choice is not None:
        chat["tool_choice"] = given.tool_choice
    if given.reasoning is not None and given.reasoning.effort is not None:
        chat["reasoning_effort"] = given.reasoning.effort
    if given.text is not None and given.text.format.type != "text":
        named = msgspec.structs.asdict(given.text.format)
        form = {name: value for name, value in named.items() if value is not UNSET}
        chat["response_format"] = {"type": form.pop("type")}
        if given.text.format.type == "json_schema":
            chat["response_format"]["json_schema"] = form
    return {name: value for name, value in chat.items() if value is not None}


def _function(tool: FunctionTool) -> dict[str, Any]:
    fields = msgspec.structs.asdict(tool).items()
    return {name: value for name, value in fields if value is not None and value is not UNSET and name != "type"}


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The messages of a chat; reasoning, text and calls that follow one another are one turn of the assistant's.

    Raises:
        ApiError: an item is of no type that is supported.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "function_call_output":
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(where, item.output)})
        elif item.type == "message" and item.role != "assistant":
            turn = None
            messages.append({"role": item.role, "content": _content(where, item.content)})
        else:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(where, turn, item)
    return messages


def _add_to_turn(where: str, turn: dict[str, Any], item: Item) -> None:
    if item.type == "message":
        turn["content"] += _text(where, item.content or "")
    elif item.type == "reasoning":
        text = _text(where, item.content or item.summary)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    else:
        message = (
            f"{where} is of type {item.type[:64]!r}; supported are message, function_call, function_call_output "
            "and reasoning"
        )
        raise invalid(message, "input", "unsupported_content")


def _content(where: str, content: str | Sequence[Part] | None) -> str | list[dict[str, str]]:
    if content is None:
        raise invalid(f"{where}.content is missing", "input", "missing_parameter")
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in _checked(where, content)]


def _text(where: str, content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in _checked(where, content))


def _checked(where: str, parts: Sequence[Part]) -> Sequence[Part]:
    for part in parts:
        if part.type not in TEXT_PARTS:
            message = f"{where} has a part of type {part.type[:64]!r}; only text is supported"
            raise invalid(message, "input", "unsupported_content")
    return parts


def openapi_schemas() -> dict[str, Any]:
    """What the OpenAPI document says of a body, by name."""
    _, schemas = msgspec.json.schema_components([ResponsesBody], ref_template="#/components/schemas/Responses{name}")
    return {f"Responses{name}": schema for name, schema in schemas.items()}
