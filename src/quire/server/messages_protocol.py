"""From a body of POST /v1/messages to a chat: Anthropic's words for what the chat route calls otherwise.

Nothing is judged here that the chat route judges: the body is written anew as one of /v1/chat/completions, and read as
such. Fields that are not Anthropic's (`seed`, `top_p`, `chat_template_kwargs`, ...) go there as they are, and
`cache_control` asks for what is done anyway.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quire.server.body import has_more_strings
from quire.server.conversation import STRINGS_PER_OBJECT
from quire.server.errors import invalid
from quire.server.limits import Limits
from quire.server.protocol import DEFAULT_LIMITS, ChatCall, parse_chat

_MISSING = re.compile(r"missing required field `(\w{1,64})`")
_WHERE = re.compile(r"at `(\$[^`]{0,100})`")


class Text(msgspec.Struct, tag="text", tag_field="type"):
    """A block of text."""

    text: str


class Thinking(msgspec.Struct, tag="thinking", tag_field="type"):
    """A block of reasoning, as an answer had it."""

    thinking: str


class ToolUse(msgspec.Struct, tag="tool_use", tag_field="type"):
    """A call, as an answer had it."""

    id: str
    name: str
    input: dict[str, Raw]


class ToolResult(msgspec.Struct, tag="tool_result", tag_field="type"):
    """What came of a call."""

    tool_use_id: str
    content: str | list[Text] = ""
    is_error: bool = False


Block = Text | Thinking | ToolUse | ToolResult


class Message(msgspec.Struct):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A tool of the client's."""

    name: str
    input_schema: Raw
    description: str | UnsetType = UNSET
    strict: bool | UnsetType = UNSET
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct):
    """Which tools may, or must, be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class ThinkingConfig(msgspec.Struct):
    """Whether the model is to reason first, and how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class Metadata(msgspec.Struct):
    """Labels."""

    user_id: str | None = None


class OutputConfig(msgspec.Struct):
    """What the answer must look like, and how hard to think."""

    format: dict[str, Raw] | None = None
    effort: str | None = None


class MessagesBody(msgspec.Struct):
    """The fields that are Anthropic's own, or mean something else there."""

    messages: list[Message]
    max_tokens: int | None = None
    system: str | list[Text] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    cache_control: Raw | UnsetType = UNSET
    service_tier: Literal["auto", "standard_only"] | None = None


_OWN = frozenset(MessagesBody.__struct_fields__)


def openapi_schemas() -> dict[str, Any]:
    """What the OpenAPI document says of a body, by name."""
    _, schemas = msgspec.json.schema_components([MessagesBody], ref_template="#/components/schemas/Messages{name}")
    return {f"Messages{name}": schema for name, schema in schemas.items()}


def parse_messages(body: bytes, limits: Limits = DEFAULT_LIMITS) -> ChatCall:
    """The chat in a body of POST /v1/messages.

    Raises:
        ApiError: a 400 that names the field.
    """
    return _parse(body, limits, counts=False)


def parse_count(body: bytes, limits: Limits = DEFAULT_LIMITS) -> ChatCall:
    """The chat in a body of POST /v1/messages/count_tokens, which has no `max_tokens`. Raises `ApiError`."""
    return _parse(body, limits, counts=True)


def _parse(body: bytes, limits: Limits, counts: bool) -> ChatCall:
    given, others = _read(body, limits)
    if given.max_tokens is None and not counts:
        raise invalid("max_tokens is missing; it must be a whole number", "max_tokens", "missing_parameter")
    return parse_chat(msgspec.json.encode({**others, **_chat(given)}), limits)


def _read(body: bytes, limits: Limits) -> tuple[MessagesBody, dict[str, Raw]]:
    """The fields that are Anthropic's, and all others as JSON."""
    if has_more_strings(body, STRINGS_PER_OBJECT * (limits.messages + limits.content_parts)):
        raise invalid(f"messages has more than {limits.content_parts} blocks", "messages")
    try:
        given = msgspec.json.decode(body, type=MessagesBody)
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.ValidationError, RecursionError) as error:
        where = where_of(error)
        about = (
            f"is not valid ({reason_of(error)}), or has something that is not supported, such as images or documents"
        )
        raise invalid(f"{where or 'the body'} {about}", where.partition("[")[0] or None, "invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid("the body is not valid JSON", code="invalid_json") from None
    return given, {name: value for name, value in fields.items() if name not in _OWN}


def where_of(error: Exception) -> str:
    """The field that a body was refused for, as a path; empty where it is the whole body."""
    found, missing = _WHERE.search(str(error)), _MISSING.search(str(error))
    path = [found[1].removeprefix("$").removeprefix(".")] if found else []
    return ".".join([*path, *([missing[1]] if missing else [])])


def reason_of(error: Exception) -> str:
    """Why a body was refused: what was expected, and what was found."""
    reason = str(error).partition(" - at ")[0][:200]
    return reason[:1].lower() + reason[1:]


def _chat(given: MessagesBody) -> dict[str, Any]:
    """The same in the words of the chat route."""
    chat: dict[str, Any] = {"messages": _system(given.system)}
    for message in given.messages:
        chat["messages"] += _turn(message)
    for name, value in (("max_tokens", given.max_tokens), ("stop", given.stop_sequences)):
        if value is not None:
            chat[name] = value
    if given.tools:
        chat["tools"] = [_tool(tool) for tool in given.tools]
    if given.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(given.tool_choice)
        if given.tool_choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    if given.metadata is not None and given.metadata.user_id is not None:
        chat["user"] = given.metadata.user_id
    if given.thinking is not None:
        chat |= _thinking(given.thinking)
    if given.output_config is not None:
        chat |= _output(given.output_config)
    return chat


def _system(system: str | list[Text] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    return [{"role": "system", "content": system if isinstance(system, str) else _texts(system)}]


def _texts(blocks: list[Text]) -> list[dict[str, str]]:
    return [{"type": "text", "text": block.text} for block in blocks]


def _turn(message: Message) -> list[dict[str, Any]]:
    """One turn: the results of calls are messages of their own, before what the user says beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: list[dict[str, Any]] = []
    texts = [block for block in message.content if isinstance(block, Text)]
    turn: dict[str, Any] = {"role": message.role, "content": _texts(texts)}
    allowed = (Text, ToolResult) if message.role == "user" else (Text, ToolUse, Thinking)
    for block in message.content:
        if not isinstance(block, allowed):
            kind = type(block).__struct_config__.tag
            raise invalid(f"messages: a turn of the {message.role} holds a block of type {kind}", "messages")
    reasoning = [block.thinking for block in message.content if isinstance(block, Thinking)]
    if reasoning:
        turn["reasoning_content"] = "".join(reasoning)
    calls = [_call(block) for block in message.content if isinstance(block, ToolUse)]
    if calls:
        turn["tool_calls"] = calls
    for block in message.content:
        if isinstance(block, ToolResult):
            content = block.content if isinstance(block.content, str) else _texts(block.content)
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content or ""})
    if texts or not made:
        made.append(turn if texts else turn | {"content": "" if calls or reasoning else []})
    return made


def _call(block: ToolUse) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    for name, value in (("description", tool.description), ("strict", tool.strict)):
        if value is not UNSET:
            function[name] = value
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _thinking(thinking: ThinkingConfig) -> dict[str, Any]:
    """How Qwen3's and others' templates are told; "adaptive" leaves it to the template."""
    made: dict[str, Any] = {}
    if thinking.type != "adaptive":
        made["chat_template_kwargs"] = {"enable_thinking": thinking.type == "enabled"}
    if thinking.budget_tokens is not None:
        made["thinking_token_budget"] = thinking.budget_tokens
    return made


def _output(config: OutputConfig) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if config.effort is not None:
        made["reasoning_effort"] = config.effort
    if config.format is not None:
        if bytes(config.format.get("type", Raw(b""))) != b'"json_schema"' or "schema" not in config.format:
            raise invalid('output_config.format must be {"type": "json_schema", "schema": {...}}', "output_config")
        made["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": config.format["schema"], "strict": True},
        }
    return made
