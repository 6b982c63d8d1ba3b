"""Tools for a chat template that has none: what the model is told of them, in the words of its format of calls, and
earlier calls and their results as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text import quoted_values
from quire.text.reply_syntax import NAME, NUMBER, PLACEHOLDERS, ToolSyntax, pieces

_TOLD = """# Tools

You may call {how_many} of these functions. Their signatures, one on a line, are within <tools></tools> tags:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments like this, and nothing after it:
{example}"""


def told_of(tools: Sequence[Mapping[str, Any]], syntax: ToolSyntax) -> str:
    """What a model is told of tools, given in OpenAI's format, whose calls it writes in this syntax."""
    return _TOLD.format(
        how_many="one" if syntax.single else "one or more",
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        example=written_call(syntax, 0, "function-name", {"argument-name": "argument-value"}) + syntax.end,
    )


def with_system_message(messages: Sequence[Mapping[str, Any]], text: str, taken: bool) -> list[dict[str, Any]]:
    """Messages with this text at the end of the system message, which is made if there is none, or in front of the
    first other message if the template takes no system messages (`taken`).
    """
    copied = [dict(message) for message in messages]
    if taken and copied[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *copied]
    content = copied[0]["content"] or ""
    if isinstance(content, list):
        at = -1 if taken else 0
        content[at] = {"type": "text", "text": _joined(content[at]["text"], text, taken)}
    else:
        copied[0]["content"] = _joined(content, text, taken)
    return copied


def _joined(content: str, text: str, behind: bool) -> str:
    return "\n\n".join(filter(None, (content, text) if behind else (text, content)))


def calls_as_text(messages: Sequence[Mapping[str, Any]], syntax: ToolSyntax) -> list[dict[str, Any]]:
    """Messages in which calls are text of the assistant's, and all results of a turn are one message of the user's."""
    made: list[dict[str, Any]] = []
    results = False
    for message in messages:
        copied, content = dict(message), message.get("content")
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(content)}\n</tool_response>"
            if results:
                made[-1]["content"] += "\n" + text
            else:
                made.append({"role": "user", "content": text})
        elif calls := copied.pop("tool_calls", None):
            functions = [call["function"] for call in calls]
            written = [
                written_call(syntax, number, one["name"], _arguments(one["arguments"]))
                for number, one in enumerate(functions)
            ]
            made.append({**copied, "content": _text(content) + "".join(written) + syntax.end})
        else:
            made.append(copied)
        results = message["role"] == "tool"
    return made


def written_call(syntax: ToolSyntax, number: int, name: str, arguments: Mapping[str, Any]) -> str:
    """The call of a reply with this number, as the model would write it."""
    text = (syntax.between if number else syntax.begin) + syntax.before_name + name + syntax.before_arguments
    text = (text + _written_arguments(syntax, arguments) + syntax.after_arguments).replace(NAME, name)
    ids = {one: str(number) if one == NUMBER else f"{number:09d}" for one in PLACEHOLDERS}
    return "".join(ids.get(piece, piece) for piece in pieces(text))


def _written_arguments(syntax: ToolSyntax, arguments: Mapping[str, Any]) -> str:
    one = syntax.parameters
    if one is None:
        return json.dumps(arguments, ensure_ascii=False)
    if one.quote:
        return quoted_values.written(dict(arguments), one.quote)[1:-1]
    if one.python:
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in arguments.items()}
        words = {"true": "True", "false": "False"}
        return ", ".join(key + one.before_value + words.get(text, text) for key, text in texts.items())
    for_json = one.before_json or one.before_value
    values = {
        key: one.before_value + value if isinstance(value, str) else for_json + json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    return "".join(one.before_name + key + text + one.after_value for key, text in values.items())


def _arguments(given: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(given) if isinstance(given, str) else given
    return found


def _text(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
