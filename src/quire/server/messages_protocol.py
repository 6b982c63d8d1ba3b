"""Translates the body of POST /v1/messages, Anthropic's interface, into a chat (`translation.py`).

`cache_control` asks for what is done anyway.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quire.server.body import decode
from quire.server.errors import invalid
from quire.server.limits import Limits
from quire.server.protocol import DEFAULT_LIMITS, ChatCall
from quire.server.translation import check_refused, message_names, parse_translated, read_typed

REFUSED = ("container", "mcp_servers")
"""Fields that would change something."""
INCOMPLETE = "_incomplete"
"""The only member of the input of a call that was cut off: the text of its arguments."""
NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
"""Fields of chats by other names here."""


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
    content: str | list[Text] | None = None
    is_error: bool | None = None


Block = Text | Thinking | ToolUse | ToolResult


class Message(msgspec.Struct):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A tool of the client's."""

    name: str
    input_schema: Raw
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct):
    """Which tools may, or must, be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """Whether the model is to reason first, and how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | float | None = None


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
    max_tokens: int | float | None = None
    system: str | list[Text] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Raw] | None = None
    cache_control: Raw | UnsetType = UNSET
    service_tier: Literal["auto", "standard_only"] | None = None


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
    given, others = read_typed(body, MessagesBody, limits, "messages")
    check_refused(others, REFUSED)
    if given.max_tokens is None and not counts:
        raise invalid("max_tokens is missing; it must be an integer", "max_tokens", "missing_parameter")
    chat = _chat(given)
    messages, places = _messages(given)
    chat |= {"messages": messages} | _prefill(messages, others)
    return parse_translated(others, chat, message_names(places) | NAMES, limits)


def _messages(given: MessagesBody) -> tuple[list[dict[str, Any]], list[str]]:
    """The chat's messages, and where each comes from."""
    messages = _system(given.system)
    places = ["system"] * len(messages)
    for index, message in enumerate(given.messages):
        turns = _turn(f"messages[{index}]", message)
        messages += turns
        places += [f"messages[{index}]"] * len(turns)
    return messages, places


def _prefill(messages: list[dict[str, Any]], others: dict[str, Raw]) -> dict[str, Any]:
    """A conversation that ends with text of the assistant's is continued from there."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or "tool_calls" in last or "continue_final_message" in others:
        return {}
    return {"continue_final_message": True, "add_generation_prompt": False}


def _chat(given: MessagesBody) -> dict[str, Any]:
    """The same in the words of the chat route."""
    chat: dict[str, Any] = {}
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
        chat["thinking"] = msgspec.structs.asdict(given.thinking)
    config = given.output_config or OutputConfig()
    if config.effort is not None:
        chat["reasoning_effort"] = config.effort
    for name, form in (("output_config.format", config.format), ("output_format", given.output_format)):
        if form is not None:
            chat["response_format"] = _format(name, form)
    return chat


def _system(system: str | list[Text] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    return [{"role": "system", "content": system if isinstance(system, str) else _texts(system)}]


def _texts(blocks: list[Text]) -> list[dict[str, str]]:
    return [{"type": "text", "text": block.text} for block in blocks]


def _turn(where: str, message: Message) -> list[dict[str, Any]]:
    """One turn as messages: results of tool calls come first, each as a message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: list[dict[str, Any]] = []
    texts = [block for block in message.content if isinstance(block, Text)]
    turn: dict[str, Any] = {"role": message.role, "content": _texts(texts)}
    allowed = _BLOCKS[message.role]
    for index, block in enumerate(message.content):
        if not isinstance(block, allowed):
            kinds = " or ".join(f'"{kind.__struct_config__.tag}"' for kind in allowed)
            kind = type(block).__struct_config__.tag
            place = f"{where}.content[{index}].type"
            raise invalid(f'{place} is "{kind}"; in a turn of the {message.role} it must be {kinds}', place)
    reasoning = [block.thinking for block in message.content if isinstance(block, Thinking)]
    if reasoning:
        turn["reasoning_content"] = "".join(reasoning)
    calls = [_call(block) for block in message.content if isinstance(block, ToolUse)]
    if calls:
        turn["tool_calls"] = calls
    for block in message.content:
        if isinstance(block, ToolResult):
            content = _texts(block.content) if isinstance(block.content, list) else block.content
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content or ""})
    if texts or not made:
        made.append(turn if texts else turn | {"content": "" if calls or reasoning else []})
    return made


_BLOCKS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "user": (Text, ToolResult),
    "assistant": (Text, ToolUse, Thinking),
    "system": (Text,),
}


def _call(block: ToolUse) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    if block.input.keys() == {INCOMPLETE} and bytes(block.input[INCOMPLETE]).startswith(b'"'):
        arguments = decode(block.input[INCOMPLETE], str)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    for name, value in (("description", tool.description), ("strict", tool.strict)):
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def _format(name: str, form: dict[str, Raw]) -> dict[str, Any]:
    if bytes(form.get("type", Raw(b""))) != b'"json_schema"' or "schema" not in form:
        raise invalid(f'{name} must be {{"type": "json_schema", "schema": {{...}}}}', name)
    schema = {"name": "output", "schema": form["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}
