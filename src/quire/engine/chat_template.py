"""Chat templates: from messages to the text that a model was trained on.

A template comes with the checkpoint, so it is data from outside: it runs in Jinja's immutable sandbox, sees
plain JSON values only, and may make neither huge strings nor huge output. The environment is that of
`transformers` (trimmed blocks, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and
`continue`, the `generation` tag), so that a template renders here as it does there, with one exception: a
variable that nobody defined may be tested, but printing it is an error instead of nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

from quire.errors import ChatTemplateError, UnknownTemplateVariableError

Message: TypeAlias = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""A role is a closed set, since templates build control tokens from it."""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables that hold special tokens; where the tokenizer has none, they print as nothing."""

MAX_RENDERED = 8 << 20
"""Characters that a template may print, and that one of its strings may have."""
MAX_DEPTH = 64
"""How deep lists and dicts in messages may nest."""


def load_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's templates by name; "default" is the main one. Empty when it has none.

    Looks in `chat_template.jinja`, then `chat_template.json`, then `tokenizer_config.json`, where a list of
    named templates may stand. Raises `ChatTemplateError`.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": _read(path)}
    found: Any = tokenizer_config.get("chat_template")
    path = folder / "chat_template.json"
    if path.is_file():
        try:
            content = json.loads(_read(path))
        except ValueError as error:
            raise ChatTemplateError(f"{path} is not valid JSON: {error}") from error
        found = content.get("chat_template") if isinstance(content, dict) else content
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        for item in found
    ):
        return {item["name"]: item["template"] for item in found}
    raise ChatTemplateError(
        f"the chat template of {folder} is a {type(found).__name__}; it must be a string, or a list of "
        "objects with 'name' and 'template'"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{path} cannot be read: {error}") from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain copies of messages, with the text parts of a content list joined by line breaks.

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
        plain["content"] = "\n".join(_text_part(f"{where}, part {i}", part) for i, part in enumerate(content))
    elif content is None and plain["role"] == "assistant" and plain.get("tool_calls"):
        plain["content"] = ""  # an answer that only calls tools
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


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a value made of JSON's types alone, so that a template meets no foreign object.

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

    Raises:
        ChatTemplateError: the source is not valid.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Args:
            messages: dicts with `role` and `content`.
            add_generation_prompt: end with the opening of the assistant's answer.
            tools: JSON schemas of functions, for templates that know them.
            variables: further variables of the template, like `enable_thinking`.

        Raises:
            UnknownTemplateVariableError: a variable is given that the template does not read, or it prints one
                that is not defined.
            ChatTemplateError: messages are not valid, the template refuses them (`raise_exception`) or fails on
                them, or prints more than `MAX_RENDERED`.
        """
        given = plain_json(dict(variables or {}), "the template's variables")
        reserved = {"messages", "add_generation_prompt", "tools", *SPECIAL_NAMES} & set(given)
        if reserved:
            raise ChatTemplateError(f"the template variable {sorted(reserved)[0]!r} cannot be set")
        unknown = set(given) - self.variables
        if unknown:
            known = sorted(self.variables - {"messages", "add_generation_prompt", "tools", *SPECIAL_NAMES})
            raise UnknownTemplateVariableError(
                f"the chat template does not read the variable {sorted(unknown)[0]!r}; "
                + (f"it reads {', '.join(known)}" if known else "it reads none beside the messages")
            )
        context = {
            "documents": None,
            **self._special_tokens,
            **given,
            "messages": check_messages(messages),
            "tools": None if tools is None else plain_json(list(tools), "tools"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _join(self._template.generate(context))
        except ChatTemplateError:
            raise
        except jinja2.UndefinedError as error:
            raise UnknownTemplateVariableError(
                f"the chat template uses something undefined: {error.message}; "
                "pass it as a template variable, or check the messages' fields"
            ) from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error.message}") from error
        except Exception as error:  # a template is a program from outside: whatever it raises is its failure
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error


def _join(pieces: Any) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED:
            raise ChatTemplateError(f"the chat template prints more than {MAX_RENDERED} characters")
        parts.append(piece)
    return "".join(parts)


class _PrintedUndefined(Undefined):
    """Testable like Jinja's own, but printing an undefined variable is an error that names it.

    Missing fields of a message, and arguments that a macro was not given, print as nothing, as they do in
    `transformers`: templates rely on both. What the sandbox forbids is an error.
    """

    def __str__(self) -> str:
        is_variable = self._undefined_obj is missing and self._undefined_hint is None
        is_forbidden = self._undefined_exception is SecurityError
        if is_forbidden or (is_variable and self._undefined_name not in SPECIAL_NAMES):
            self._fail_with_undefined_error()
        return ""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it only prints."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with products and powers bounded: `"a" * 10 ** 12` must not take the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1 << 16 and abs(right) <= 64):
            raise SecurityError("a power in the chat template is too large")
        for sequence, times in ((left, right), (right, left)):
            repeats = isinstance(sequence, str | list | tuple) and isinstance(times, int)
            if repeats and len(sequence) * times > MAX_RENDERED:
                raise SecurityError("a repeated string in the chat template is too long")
        return super().call_binop(context, operator, left, right)


class _Namespace(Namespace):
    """Jinja's `namespace`, without names that Python itself reads."""

    def __init__(*args: Any, **values: Any) -> None:  # as Jinja's own: `self` stays free as a name
        self, *given = args
        attributes = dict(*given, **values)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace in the chat template cannot hold {name!r}")


class _Dict:
    """`dict(...)` for templates, without the class behind it."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


def _environment() -> _Sandbox:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_PrintedUndefined,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
