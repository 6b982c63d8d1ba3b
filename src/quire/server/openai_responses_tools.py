"""Tools of the Responses interface as functions of a chat, and the names by which clients know their calls.

The functions of a `namespace` are functions like others, under a name that tells it; calls name the two apart, since
that is how clients find their tools. A `custom` tool, whose input is plain text, is a function of one text. Tools of
OpenAI's servers are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quire.text.reply_arguments import LARK

INPUT = "input"
"""The parameter of a custom tool."""


class FunctionTool(msgspec.Struct, omit_defaults=True, tag="function"):
    """A tool of the client's."""

    name: str
    parameters: Raw | UnsetType = UNSET
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag="text"):
    """Any text."""


class GrammarFormat(msgspec.Struct, tag="grammar"):
    """Text of a grammar."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(msgspec.Struct, omit_defaults=True, tag="custom"):
    """A tool of the client's whose input is text."""

    name: str
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None


class NamespaceTool(msgspec.Struct, omit_defaults=True, tag="namespace"):
    """Tools of the client's that belong together, such as those of an MCP server."""

    name: str
    tools: list[FunctionTool | CustomTool]
    description: str | None = None


class WebSearch(msgspec.Struct, tag="web_search"):
    """A tool of OpenAI's servers, which agents (Codex) name in every request: it is left out, and named as ignored."""


class LocalShell(msgspec.Struct, tag="local_shell"):
    """The same."""


class ImageGeneration(msgspec.Struct, tag="image_generation"):
    """The same."""


class ToolSearch(msgspec.Struct, tag="tool_search"):
    """The same: all tools of a request are in its prompt."""


Tool = FunctionTool | CustomTool | NamespaceTool | WebSearch | LocalShell | ImageGeneration | ToolSearch


class NamedTool(msgspec.Struct, omit_defaults=True, tag="function"):
    """The tool that must be called, or one that may be."""

    name: str
    namespace: str | None = None


class NamedCustomTool(msgspec.Struct, omit_defaults=True, tag="custom"):
    """The same, of a custom one."""

    name: str
    namespace: str | None = None


class Called(NamedTuple):
    """A tool as its client knows it. `custom`: its input is text."""

    name: str
    namespace: str | None
    custom: bool


class ChatTools(NamedTuple):
    """The tools of a request.

    Attributes:
        functions: as the chat route takes them.
        places: where each comes from.
        called: what clients know as the function of a name.
        ignored: types that were left out.
    """

    functions: list[dict[str, Any]]
    places: list[str]
    called: dict[str, Called]
    ignored: list[str]


def chat_tools(tools: Sequence[Tool]) -> ChatTools:
    """The tools of a request as functions of a chat."""
    made = ChatTools([], [], {}, [])
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionTool | CustomTool | NamespaceTool):
            for place, namespace, one in _unfolded(f"tools[{index}]", tool):
                function = _function(one) if isinstance(one, FunctionTool) else _text_function(one)
                function["name"] = flat_name(one.name, namespace)
                made.functions.append({"type": "function", "function": function})
                made.places.append(place)
                made.called[function["name"]] = Called(one.name, namespace, isinstance(one, CustomTool))
        else:
            made.ignored.append(f"tools[].{type(tool).__struct_config__.tag}")
    return made


def flat_name(name: str | None, namespace: str | None) -> str | None:
    """The name of a function of a chat."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace and name else name


def text_arguments(text: str | None) -> str:
    """The arguments of a custom tool's function."""
    return json.dumps({INPUT: text or ""}, ensure_ascii=False)


def _unfolded(
    place: str, tool: FunctionTool | CustomTool | NamespaceTool
) -> Iterator[tuple[str, str | None, FunctionTool | CustomTool]]:
    """Each tool, with its place and its namespace, whose description stands before that of its first tool."""
    if not isinstance(tool, NamespaceTool):
        yield place, None, tool
        return
    for index, one in enumerate(tool.tools):
        if index == 0 and tool.description:
            both = "\n\n".join(filter(None, (tool.description, one.description)))
            one = msgspec.structs.replace(one, description=both)
        yield f"{place}.tools[{index}]", tool.name, one


def _function(tool: FunctionTool) -> dict[str, Any]:
    fields = msgspec.structs.asdict(tool).items()
    return {name: value for name, value in fields if value is not None and value is not UNSET}


def _text_function(tool: CustomTool) -> dict[str, Any]:
    """A grammar is a keyword of the text's schema: see `reply_arguments.LARK`."""
    text: dict[str, Any] = {"type": "string"}
    if isinstance(tool.format, GrammarFormat):
        definition = tool.format.definition
        text |= {"pattern": f"^(?:{definition})$"} if tool.format.syntax == "regex" else {LARK: definition}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    described = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": parameters}
