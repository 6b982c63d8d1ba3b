"""Chat templates: render messages to a prompt.

A template comes with the checkpoint, so it is untrusted: it runs in Jinja's immutable sandbox, sees only plain JSON
values, and its output is bounded. Operations that make long strings out of short ones are bounded too (see
`template_sandbox.py`), which prevents the obvious ways to exhaust memory, but not all: nested lists, for example,
print without a bound known in advance. There is no time limit here: untrusted templates should be run in a process
that can be killed. The environment is that of `transformers` (trimmed blocks,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and `continue`, the `generation` tag), so
that a template renders here as it does there, with one exception: an undefined variable may be tested,
but printing it is an error instead of nothing.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import jinja2.meta
import msgspec

from quire.errors import ChatTemplateError, UnknownTemplateVariableError
from quire.models.fields import has_file
from quire.text.partial_json import completed
from quire.text.reply_formats import content_of_calls, find_syntax, in_format, takes_argument_objects, takes_parts
from quire.text.reply_syntax import ReplySyntax
from quire.text.reply_writing import calls_as_text, told_of, with_system_message
from quire.text.template_sandbox import SPECIAL_NAMES, join_pieces, make_environment

Message: TypeAlias = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""A role is a closed set, since templates build control tokens from it."""

REASONING_NAMES = "reasoning_content", "reasoning", "thinking"

THINKING_SWITCHES = "enable_thinking", "thinking"
"""What templates call the variable that turns reasoning on and off."""

_RESERVED = frozenset(("messages", "add_generation_prompt", "tools", *SPECIAL_NAMES))
"""Variables that nobody but Quire sets."""

MAX_DEPTH = 64
"""Maximum nesting of lists and dicts in messages."""


class ChatOptions(msgspec.Struct, frozen=True):
    """How chats are written where it is not as the checkpoint says.

    Attributes:
        template: Jinja text in place of the checkpoint's templates.
        tool_format: see `EngineConfig.tool_format`.
    """

    template: str | None = None
    tool_format: str = "auto"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ChatOptions:
        """From the fields of an `EngineConfig`."""
        return cls(config.get("chat_template"), config.get("tool_format") or "auto")


AS_THE_CHECKPOINT = ChatOptions()


def load_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> tuple[dict[str, str], Path]:
    """The checkpoint's templates by name ("default" is the main one; may be empty), and the main one's file.

    Those of `additional_chat_templates/NAME.jinja` come on top, as in `transformers`. Raises `ChatTemplateError`.
    """
    main, path = _main_templates(folder, tokenizer_config)
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return {**main, **{one.stem: _read(one) for one in more}}, path


def _main_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> tuple[dict[str, str], Path]:
    """Looks in `chat_template.jinja`, then `chat_template.json`, then `tokenizer_config.json`, which may have a list
    of named templates. Raises `ChatTemplateError`.
    """
    path = folder / "chat_template.jinja"
    if has_file(path, ChatTemplateError):
        return {"default": _read(path)}, path
    found: Any = tokenizer_config.get("chat_template")
    path = folder / "tokenizer_config.json"
    if has_file(folder / "chat_template.json", ChatTemplateError):
        path = folder / "chat_template.json"
        try:
            content = json.loads(_read(path))
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"{path} is not valid JSON: {error}") from error
        found = content.get("chat_template") if isinstance(content, dict) else content
    if found is None:
        return {}, path
    if isinstance(found, str):
        return {"default": found}, path
    if isinstance(found, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        for item in found
    ):
        return {item["name"]: item["template"] for item in found}, path
    raise ChatTemplateError(
        f"the chat template in {path} is a {type(found).__name__}; it must be a string, or a list of "
        "objects with 'name' and 'template'"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{path} cannot be read: {error}") from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain copies of messages; the parts of a content list are all `{"type": "text", "text": ...}`.

    Raises `ChatTemplateError` naming the message that has no known role, or content that is not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ChatTemplateError(
            f"messages is {_short(messages)}; it must be a list of at least one message "
            '(like {"role": "user", "content": "Hello"})'
        )
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} is {_short(message)}; it must be a dict with 'role' and 'content'")
    plain: dict[str, Any] = plain_json(dict(message), where)
    if plain.get("role") not in ROLES:
        raise ChatTemplateError(
            f"{where} has the role {_short(plain.get('role'))}; it must be one of {', '.join(ROLES)}"
        )
    content = plain.get("content")
    if isinstance(content, list):
        texts = [_text_part(f"{where}, part {i}", part) for i, part in enumerate(content)]
        plain["content"] = [{"type": "text", "text": text} for text in texts]
    elif content is None and plain["role"] == "assistant" and ("content" in plain or plain.get("tool_calls")):
        plain["content"] = None  # an answer that only calls tools, or only reasons
    elif not isinstance(content, str):
        raise ChatTemplateError(
            f"{where} has the content {_short(content)}; it must be a string or a list of text parts"
        )
    return plain


def _text_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ChatTemplateError(f'{where} is {_short(part)}; only text is supported, as {{"type": "text", "text": "..."}}')


def open_reasoning(message: Message) -> str:
    """The reasoning of a message to be continued that has no content yet; empty if it goes on with its content."""
    if message["role"] != "assistant" or message.get("content"):
        return ""
    return next((message[name] for name in REASONING_NAMES if isinstance(message.get(name), str)), "")


def joined(content: Any) -> Any:
    """A content whose text parts, if it is a list of them, are joined by line breaks."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a value made of JSON types only, so that a template sees no other objects.

    Raises `ChatTemplateError` for any other type, or for nesting beyond `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise ChatTemplateError(f"{where} nests deeper than {MAX_DEPTH} levels")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise ChatTemplateError(f"{where} has the key {_short(key)}; keys must be strings")
        return {key: plain_json(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, where, depth + 1) for item in value]
    raise ChatTemplateError(
        f"{where} holds {_short(value)}; only strings, numbers, booleans, None, lists and dicts are allowed"
    )


def _short(value: object) -> str:
    shown = f"a {type(value).__name__}" if isinstance(value, int) and value.bit_length() > 64 else repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


class ChatTemplate:
    """One compiled template.

    Attributes:
        variables: names that the template reads and does not set.

    Args:
        source: Jinja text.
        special_tokens: variables that hold special tokens, like `bos_token`.
        tool_format: "auto", or the model's format regardless of the template: see `reply_formats.in_format`.
        name: its name in errors of compilation.

    Raises:
        ChatTemplateError: the source is not valid.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
        tool_format: str = "auto",
    ) -> None:
        self.source, self._tool_format = source, tool_format
        self._special_tokens = dict(special_tokens or {})
        self._parts: dict[str, bool] = {}  # by role: whether its content may be a list
        try:
            source.encode()  # a lone surrogate would make the output invalid
            environment = make_environment()
            self._template = environment.from_string(source)
            self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"{name} is not valid, line {error.lineno}: {error.message}; correct or remove it"
            ) from error
        except Exception as error:  # Jinja and Python's compiler raise many kinds, all of them caused by the template
            raise ChatTemplateError(
                f"{name} cannot be compiled: {type(error).__name__}: {error}; correct or remove it"
            ) from error

    @functools.cached_property
    def reply_syntax(self) -> ReplySyntax:
        """The syntax of the model's replies, as far as this template shows it."""
        return in_format(find_syntax(self), self._tool_format)

    @functools.cached_property
    def _takes_objects(self) -> bool:
        return takes_argument_objects(self)

    @functools.cached_property
    def _content_of_calls(self) -> frozenset[str | None]:
        return content_of_calls(self)

    def _takes_parts(self, role: str) -> bool:
        if role not in self._parts:
            self._parts[role] = takes_parts(self, role)
        return self._parts[role]

    def as_known(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with tool calls' arguments as this template takes them (objects or JSON text), and with reasoning
        under all names that templates use. Of a call that was cut (by `max_tokens`), what there is of its arguments.

        Raises:
            ChatTemplateError: a call is malformed, or its arguments are not a JSON object.
        """
        for index, message in enumerate(messages):
            thought = next((message[name] for name in REASONING_NAMES if isinstance(message.get(name), str)), None)
            if thought is not None:
                message.update(dict.fromkeys(REASONING_NAMES, thought))
            calls = message.get("tool_calls")
            for number, call in enumerate(calls if isinstance(calls, list) else ()):
                where = f"messages[{index}].tool_calls[{number}]"
                function = call.get("function") if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    raise ChatTemplateError(f"{where} must have a function with a name and arguments")
                function["arguments"] = self._arguments(function.get("arguments"), f"{where}.function.arguments")
        return messages

    def _arguments(self, given: Any, where: str) -> Any:
        try:
            value = completed(given or "{}") if isinstance(given, str | None) else given
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ChatTemplateError(f"{where} is {_short(given)}; it must be a JSON object, or its text")
        value = plain_json(value, where)
        return value if self._takes_objects else json.dumps(value, ensure_ascii=False)

    def known_variables(self, variables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Variables as this template expects them, and those that it does not use, each with the error that says so.

        Thinking is turned on and off by the template's own name for that, which a `reasoning_effort` of "none" does,
        too, where the template has no efforts.
        """
        known = dict(variables)
        switch = next((name for name in THINKING_SWITCHES if name in self.variables), None)
        if switch is not None:
            if known.get("reasoning_effort") == "none" and "reasoning_effort" not in self.variables:
                known.setdefault(switch, not known.pop("reasoning_effort"))
            for name in THINKING_SWITCHES:
                if name not in self.variables and isinstance(known.get(name), bool):
                    known.setdefault(switch, known.pop(name))
        unused = {name: self._not_used(name) for name in known.keys() - self.variables - _RESERVED}
        return {name: value for name, value in known.items() if name not in unused}, unused

    def _not_used(self, name: str) -> str:
        others = sorted(self.variables - _RESERVED)
        told = f"it has: {', '.join(others)}" if others else "it has no variables"
        return f"the chat template does not use the variable {name!r}; leave it out ({told})"

    def special(self, name: str) -> str:
        """The text of a special token, such as `eos_token`; empty if there is none."""
        return self._special_tokens.get(name, "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt.

        Args:
            messages: dicts with `role` and `content`.
            add_generation_prompt: end with the opening of the assistant's answer.
            continue_final_message: end right after the last message's content, or after its reasoning if it has no
                content yet, so that the model continues it. Needs `add_generation_prompt=False`.
            tools: JSON schemas of functions, for templates that support tools.
            variables: further variables of the template, like `enable_thinking`.

        Raises:
            UnknownTemplateVariableError: a variable is given that the template does not use, or it uses one
                that is not defined.
            ChatTemplateError: messages are not valid, the template refuses them (`raise_exception`) or fails on
                them, prints more than `MAX_RENDERED`, or changes the message to be continued.
        """
        given = self._told(check_messages(messages), tools, continue_final_message)
        checked = [self._as_taken(message) for message in given]
        context = self._context(checked, tools, add_generation_prompt, variables)
        if not continue_final_message:
            return self._print(context)
        if add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message goes on with the last message and add_generation_prompt opens a new one; "
                "set one of them to false"
            )
        return self._print_to_the_end_of(checked, context)

    def print_as_given(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages without asking how this template takes contents: that is found with it."""
        checked = check_messages(messages)
        return self._print(self._context(checked, tools, add_generation_prompt, None))

    def _told(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, continues: bool
    ) -> list[dict[str, Any]]:
        """Messages that also tell the model of the tools, if it is to call them and the template has none."""
        if not tools or self._tool_format in ("auto", "off") or {"tools", "xml_tools"} & self.variables:
            return messages
        syntax = self.reply_syntax.tools
        if syntax is None or (continues and messages[-1].get("tool_calls")):
            return messages
        return with_system_message(calls_as_text(messages, syntax), told_of(tools, syntax), self._takes_system)

    @functools.cached_property
    def _takes_system(self) -> bool:
        asked = [{"role": "system", "content": "qzsystem"}, {"role": "user", "content": "qzuser"}]
        try:
            return "qzsystem" in self.print_as_given(asked)
        except ChatTemplateError:
            return False

    def _as_taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose content is as this template takes it."""
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts(message["role"]):
            content = joined(content)
        if message["role"] == "assistant" and not content:
            taken = self._content_of_calls if message.get("tool_calls") else frozenset({""})
            content = content if content in taken or not taken else "" if "" in taken else None
            content = content or ("" if not taken else content)
        return {**message, "content": content}

    def _context(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """All variables of a template."""
        given = plain_json(dict(variables or {}), "the template's variables")
        reserved = _RESERVED & set(given)
        if reserved:
            raise ChatTemplateError(f"the template variable {sorted(reserved)[0]!r} cannot be set")
        if unknown := sorted(set(given) - self.variables):
            raise UnknownTemplateVariableError(self._not_used(unknown[0]), param=unknown[0])
        functions = None if tools is None else plain_json(list(tools), "tools")
        return {
            "documents": None,
            **self._special_tokens,
            **({"xml_tools": functions} if functions and "xml_tools" in self.variables else {}),  # SmolLM3
            **given,
            "messages": messages,
            "tools": functions,
            "add_generation_prompt": add_generation_prompt,
        }

    def reopened(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message to be continued; if its content is reasoning that is not closed, that is its reasoning."""
        reasoning, content = self.reply_syntax.reasoning, message.get("content")
        if reasoning is None or not isinstance(content, str) or reasoning.end in content:
            return message
        before, found, thought = content.partition(reasoning.start)
        if before.strip() or not found:
            return message
        return {**message, "content": "", **dict.fromkeys(REASONING_NAMES, thought.lstrip("\n"))}

    def _print_to_the_end_of(self, messages: list[dict[str, Any]], context: Mapping[str, Any]) -> str:
        """Render, and cut after the last message, as `transformers` does.

        A tag after its content, or reasoning, marks the place: a random one, which no message can hold. The space after
        it tells whether the template trims the content, in which case what is before the tag must be trimmed too.
        """
        last = messages[-1]
        if last.get("tool_calls"):
            raise ChatTemplateError("the last message calls tools, so continue_final_message has no text to go on with")
        tag = f"END_{secrets.token_hex(8)}"
        holder, keys = last, ["content"]
        thought = open_reasoning(last)
        if thought:
            keys = [name for name in REASONING_NAMES if name in last]
        elif isinstance(last["content"], list) and last["content"]:
            holder, keys = last["content"][-1], ["text"]
        content: str = holder.get(keys[0]) or ""
        holder.update(dict.fromkeys(keys, f"{content}{tag} "))
        printed = self._print(context)
        before, found, after = printed.rpartition(tag)
        if not found or not before.rstrip().endswith(content.strip()):
            if thought and (opened := self._open_reasoning({**context, "messages": messages[:-1]})):
                return opened + thought  # which the template leaves out
            raise ChatTemplateError(
                "the chat template changes the last message or leaves it out, so continue_final_message cannot go on "
                "with it; send the messages without it"
            )
        return before if after.startswith(" ") else before.rstrip()

    def _open_reasoning(self, context: Mapping[str, Any]) -> str:
        """A prompt that opens reasoning; empty if it is not known how."""
        begun, reasoning = self._print({**context, "add_generation_prompt": True}), self.reply_syntax.reasoning
        if reasoning is None or begun.rstrip().endswith(reasoning.start):
            return begun if reasoning is not None else ""
        return begun + reasoning.start if self.reply_syntax.content is not None else ""

    def _print(self, context: Mapping[str, Any]) -> str:
        try:
            return join_pieces(self._template.generate(context))
        except ChatTemplateError:
            raise
        except jinja2.UndefinedError as error:
            raise UnknownTemplateVariableError(
                f"the chat template uses something undefined: {error.message}; "
                "pass it as a template variable, or check the messages' fields"
            ) from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error.message}") from error
        except MemoryError:
            raise ChatTemplateError("the chat template takes more memory on these messages than it may have") from None
        except Exception as error:  # a template is an untrusted program: anything it raises is its failure
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error
