"""Chat templates: from messages to the text that a model was trained on.

A template comes with the checkpoint, so it is data from outside: it runs in Jinja's immutable sandbox, sees
plain JSON values only, and may print no huge output. What makes long strings out of short ones is bounded too
(see `_Sandbox`), which stops the plain ways to take the memory, not every one: lists that hold each other, say,
print without a bound known before. Nor is there a limit of time here: whoever runs templates of strangers does so
in a process that can be stopped. The environment is that of
`transformers` (trimmed blocks, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and
`continue`, the `generation` tag), so that a template renders here as it does there, with one exception: a
variable that nobody defined may be tested, but printing it is an error instead of nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from string import Formatter
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

from quire.errors import ChatTemplateError, UnknownTemplateVariableError
from quire.models.fields import has_file

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
    if has_file(path, ChatTemplateError):
        return {"default": _read(path)}
    found: Any = tokenizer_config.get("chat_template")
    path = folder / "chat_template.json"
    if has_file(path, ChatTemplateError):
        try:
            content = json.loads(_read(path))
        except (ValueError, RecursionError) as error:
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


class _CodeGenerator(CodeGenerator):
    """Jinja's compiler, with `~` joined by the environment, which bounds it."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with long results refused before they are made.

    Bounded by `MAX_RENDERED`: repeated and added strings and lists, concatenation (`~`, macros, `set` blocks),
    strings' methods and filters that pad, indent, replace or join, and the widths in formats. Whole numbers
    are bounded in products and powers, `range` by Jinja itself.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(_join)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1 << 16 and abs(right) <= 64):
            raise SecurityError("a power in the chat template is too large")
        for sequence, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(sequence, str | list | tuple) and isinstance(times, int):
                _check_size(len(sequence) * times)
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() + right.bit_length())
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _check_widths(_PERCENT_SPEC.findall(left), "*")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name in _RESULT_SIZES:
            if name == "join":
                args = tuple(list(arg) for arg in args)  # an iterator could be read only once
                _check_size(_joined_size(args[0] if args else [], owner))
            else:
                _check_size(_RESULT_SIZES[name](owner, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths([spec or "" for _, _, spec, _ in Formatter().parse(value.__self__)], "{")
        return wrapped


_PERCENT_SPEC = re.compile(r"%%|%(?:\([^)]*\))?([-+ #0-9.*]*)")


def _check_size(size: int) -> None:
    if size > MAX_RENDERED:
        raise SecurityError(f"a value in the chat template is longer than {MAX_RENDERED}")


def _check_widths(specs: Sequence[str], computed: str) -> None:
    """Bounds what the widths of a format add up to; one that is computed only when formatting is refused."""
    if any(computed in found for found in specs):
        raise SecurityError("a format in the chat template must state its widths as numbers")
    _check_size(sum(int(width) for found in specs for width in re.findall(r"\d+", found)))


def _padded_size(value: object, width: int = 80, *_: object) -> int:
    return width


def _indented_size(value: str, width: int | str = 8, *_: object, **__: object) -> int:
    return len(value) + (len(value.splitlines()) + value.count("\t") + 1) * (
        len(width) if isinstance(width, str) else width
    )


def _replaced_size(value: str, old: str, new: str, count: int | None = None) -> int:
    found = value.count(old)
    times = found if count is None or count < 0 else min(found, count)
    return len(value) + times * (len(new) - len(old))


def _joined_size(items: Sequence[Any], between: str) -> int:
    return sum(len(item) for item in items if isinstance(item, str)) + len(items) * len(between)


_RESULT_SIZES: dict[str, Callable[..., int]] = {
    "ljust": _padded_size,
    "rjust": _padded_size,
    "center": _padded_size,
    "zfill": _padded_size,
    "expandtabs": lambda value, tabsize=8: _indented_size(value, tabsize),
    "replace": _replaced_size,
    "join": _joined_size,
}
"""How long the result of a string's method is at most, given the string and the arguments."""


def _bound_filters(filters: dict[str, Callable[..., Any]]) -> None:
    """Puts the bounds of methods on the filters that do the same."""
    center, indent, batch, percent = (filters[name] for name in ("center", "indent", "batch", "format"))
    replace, join, wrap, split = (filters[name] for name in ("replace", "join", "wordwrap", "slice"))

    def bounded_center(value: str, width: int = 80) -> Any:
        _check_size(width)
        return center(value, width)

    def bounded_indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        _check_size(_indented_size(value, width))
        return indent(value, width, first, blank)

    def bounded_batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
        _check_size(linecount)
        return batch(value, linecount, fill_with)

    def bounded_slice(value: Any, slices: int, fill_with: Any = None) -> Any:
        _check_size(slices)
        return split(value, slices, fill_with)

    @jinja2.pass_environment
    def bounded_wordwrap(
        environment: Any, s: str, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None,
        break_on_hyphens: bool = True,
    ) -> Any:  # fmt: skip
        _check_size(len(s) * len(wrapstring or "\n"))
        return wrap(environment, s, width, break_long_words, wrapstring, break_on_hyphens)

    def bounded_format(value: str, *args: Any, **kwargs: Any) -> Any:
        _check_widths(_PERCENT_SPEC.findall(str(value)), "*")
        return percent(value, *args, **kwargs)

    @jinja2.pass_eval_context
    def bounded_replace(context: Any, s: Any, old: str, new: str, count: int | None = None) -> Any:
        _check_size(_replaced_size(str(s), str(old), str(new), count))
        return replace(context, s, old, new, count)

    @jinja2.pass_eval_context
    def bounded_join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        items = list(value)
        _check_size(_joined_size(items, str(d)))
        return join(context, items, d, attribute)

    filters.update(
        center=bounded_center, indent=bounded_indent, batch=bounded_batch, format=bounded_format,
        replace=bounded_replace, join=bounded_join, slice=bounded_slice, wordwrap=bounded_wordwrap,
    )  # fmt: skip


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
        _check_size(indent if isinstance(indent, int) else 0)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_PrintedUndefined,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    _bound_filters(environment.filters)
    environment.filters["tojson"] = to_json
    del environment.globals["lipsum"]  # prints as much as it is asked for
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
