"""Translates the body of POST /v1/responses, OpenAI's newer interface, into a chat (`translation.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quire.server.errors import invalid
from quire.server.limits import Limits
from quire.server.openai_responses_tools import (
    Called,
    ChatTools,
    NamedCustomTool,
    NamedTool,
    Tool,
    chat_tools,
    flat_name,
    text_arguments,
)
from quire.server.protocol import DEFAULT_LIMITS, ChatCall
from quire.server.translation import check_refused, message_names, parse_translated, read_typed

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MAX_ID_LENGTH = 128
MAX_METADATA = 16


class Part(msgspec.Struct):
    """A piece of content; whether its type is text is checked later."""

    type: str
    text: str = ""


class Item(msgspec.Struct, omit_defaults=True):
    """A message, a call, the result of one, or reasoning: which fields mean something depends on the type. `input` is
    that of a custom tool's call."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    id: str | None = None

    @property
    def kind(self) -> str:
        """The type; messages need not have one."""
        return self.type or "message"


class AllowedTools(msgspec.Struct, tag="allowed_tools"):
    """The tools that may be called, of all that the prompt has."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool | NamedCustomTool]


class Format(msgspec.Struct, frozen=True):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType | None = UNSET
    schema: Raw | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET


class TextConfig(msgspec.Struct):
    """Form and length of the text."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    """How much to reason. There are no summaries: reasoning is returned as it is."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(msgspec.Struct):
    """Nothing is obfuscated."""

    include_obfuscation: Literal[False] | None = None


Included = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Parts of a response that it has anyway, or that belong to items it never has."""


class ResponsesBody(msgspec.Struct):
    """The fields that are this route's own, or mean something else in a chat."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | float | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | NamedCustomTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Included] | None = None
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None
    top_logprobs: Literal[0] | None = None


REFUSED = ("conversation", "context_management", "max_tool_calls", "moderation", "prompt")
"""Fields that would change something."""
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""Fields of chats by other names here."""


@dataclasses.dataclass(slots=True, kw_only=True)
class ResponseCall(ChatCall):
    """A chat, and the parts of the request that its response repeats.

    Attributes:
        input: the items of this request. items: the items before it, and these.
        stores: the response is stored.
        called: the client's tools by their names in the chat.
    """

    asked: ResponsesBody
    input: list[Item]
    items: list[Item]
    stores: bool
    called: dict[str, Called]


Find = Callable[[str], bytes]
"""The JSON of the items up to the end of a stored response; raises `ApiError` where there is none."""


def parse_response(body: bytes, limits: Limits = DEFAULT_LIMITS, *, find: Find, keeps: bool = True) -> ResponseCall:
    """The call in a body of POST /v1/responses.

    Args:
        keeps: whether responses can be stored here.

    Raises:
        ApiError: it is not valid.
    """
    given, others = read_typed(body, ResponsesBody, limits, "input")
    check_refused(others, REFUSED)
    _check(given, keeps)
    own = [Item(role="user", content=given.input)] if isinstance(given.input, str) else given.input
    before: list[Item] = []
    if given.previous_response_id is not None:
        if len(given.previous_response_id) > MAX_ID_LENGTH:
            message = f"previous_response_id has more than {MAX_ID_LENGTH} characters; give the id of a response"
            raise invalid(message, "previous_response_id")
        before = msgspec.json.decode(find(given.previous_response_id), type=list[Item])
    messages: list[dict[str, Any]] = []
    if given.instructions:
        messages.append({"role": "system", "content": given.instructions})
    places = ["instructions"] * len(messages)
    for index, turn in messages_of([*before, *own], first=-len(before)):
        messages.append(turn)
        places.append(f"input[{index}]" if index >= 0 else "previous_response_id")
    tools = chat_tools(given.tools or ())
    left = {f"tools[{at}]": place for at, place in enumerate(tools.places)}
    names = message_names(places) | left | NAMES
    chat = parse_translated(others, {"messages": messages, **_chat(given, tools)}, names, limits)
    if given.text is not None and given.text.verbosity not in (None, "medium"):
        chat.ignore(["text.verbosity"])
    chat.ignore(tools.ignored)
    common = {field.name: getattr(chat, field.name) for field in dataclasses.fields(ChatCall)}
    stores = keeps and given.store is not False
    return ResponseCall(**common, asked=given, input=own, items=[*before, *own], stores=stores, called=tools.called)


def _check(given: ResponsesBody, keeps: bool) -> None:
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


def _chat(given: ResponsesBody, tools: ChatTools) -> dict[str, Any]:
    """The fields in the words of the chat route."""
    chat: dict[str, Any] = {
        "stream": given.stream,
        "max_completion_tokens": given.max_output_tokens,
        "parallel_tool_calls": given.parallel_tool_calls,
    }
    if tools.functions:
        chat["tools"] = tools.functions
    if isinstance(given.tool_choice, AllowedTools):
        allowed = {"mode": given.tool_choice.mode, "tools": [_named(tool) for tool in given.tool_choice.tools]}
        chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    elif isinstance(given.tool_choice, NamedTool | NamedCustomTool):
        chat["tool_choice"] = _named(given.tool_choice)
    elif given.tool_choice is not None:
        chat["tool_choice"] = given.tool_choice
    if given.reasoning is not None:
        chat["reasoning"] = msgspec.structs.asdict(given.reasoning)
    if given.text is not None and given.text.format is not None and given.text.format.type != "text":
        named = msgspec.structs.asdict(given.text.format)
        form = {name: value for name, value in named.items() if value is not UNSET}
        chat["response_format"] = {"type": form.pop("type")}
        if given.text.format.type == "json_schema":
            chat["response_format"]["json_schema"] = form
    return {name: value for name, value in chat.items() if value is not None}


def _named(tool: NamedTool | NamedCustomTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": flat_name(tool.name, tool.namespace)}}


def messages_of(items: Iterable[Item], first: int = 0) -> list[tuple[int, dict[str, Any]]]:
    """The messages of a chat, each with the number of its first item. Reasoning, text and calls that follow one another
    are one turn of the assistant's.

    Args:
        first: the number of the first item.

    Raises:
        ApiError: an item's type is not supported.
    """
    found: list[tuple[int, dict[str, Any] | _Turn]] = []
    turn: _Turn | None = None
    for index, item in enumerate(items, first):
        where = f"input[{index}]"
        if item.kind in ("function_call_output", "custom_tool_call_output"):
            turn = None
            result = {"role": "tool", "tool_call_id": item.call_id, "content": _text(where, item.output)}
            found.append((index, result))
        elif item.kind == "message" and item.role != "assistant":
            turn = None
            found.append((index, {"role": item.role, "content": _content(where, item.content)}))
        else:
            if turn is None:
                turn = _Turn()
                found.append((index, turn))
            turn.add(where, item)
    return [(index, one.message() if isinstance(one, _Turn) else one) for index, one in found]


class _Turn:
    """A turn of the assistant's. Its texts are joined at the end, since there may be many."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, where: str, item: Item) -> None:
        """Append an item. Raises `ApiError` if its type is not supported."""
        if item.kind == "message":
            self._texts.append(_text(where, item.content))
        elif item.kind == "reasoning":
            self._reasoning.append(_text(where, item.content or item.summary))
        elif item.kind in ("function_call", "custom_tool_call"):
            arguments = item.arguments if item.kind == "function_call" else text_arguments(item.input)
            function = {"name": flat_name(item.name, item.namespace), "arguments": arguments}
            self._calls.append({"id": item.call_id, "type": "function", "function": function})
        else:
            message = (
                f"{where} is of type {item.kind[:64]!r}; supported are message, function_call, function_call_output, "
                "custom_tool_call, custom_tool_call_output and reasoning"
            )
            raise invalid(message, "input", "unsupported_content")

    def message(self) -> dict[str, Any]:
        """The turn as a message."""
        made: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
        if self._reasoning:
            made["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            made["tool_calls"] = self._calls
        return made


def _content(where: str, content: str | Sequence[Part] | None) -> str | list[dict[str, str]]:
    if content is None:
        raise invalid(f"{where}.content is missing", "input", "missing_parameter")
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in _checked(where, content)]


def _text(where: str, content: str | Sequence[Part] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in _checked(where, content or ()))


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
