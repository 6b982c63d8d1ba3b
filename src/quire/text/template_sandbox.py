"""The Jinja environment for chat templates: the dialect of `transformers`, in a sandbox.

`chat_template.py` says what is guaranteed. Operations that make long strings from short ones are limited here. That
prevents the simple ways to exhaust memory, but not all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from string import Formatter
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

from quire.errors import ChatTemplateError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables with special tokens; those that the tokenizer does not have are printed as nothing."""

MAX_RENDERED = 8 << 20
"""Maximum characters that a template may print, and of each of its strings."""


def join_pieces(pieces: Any) -> str:
    """The printed pieces as one text. Raises `ChatTemplateError` if it exceeds `MAX_RENDERED` characters."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED:
            raise ChatTemplateError(f"the chat template prints more than {MAX_RENDERED} characters")
        parts.append(piece)
    return "".join(parts)


class _PrintedUndefined(Undefined):
    """Like Jinja's `Undefined`, but printing an undefined variable is an error that names it.

    Missing fields of a message and missing arguments of a macro are printed as nothing, as in `transformers`, since
    templates rely on that. Printing something that the sandbox forbids is an error.
    """

    def __str__(self) -> str:
        is_variable = self._undefined_obj is missing and self._undefined_hint is None
        is_forbidden = self._undefined_exception is SecurityError
        if is_forbidden or (is_variable and self._undefined_name not in SPECIAL_NAMES):
            self._fail_with_undefined_error()
        return ""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks text of the assistant for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Jinja's compiler, but `~` calls the environment's `concat`, which limits the result."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses results that would be too long, before they are made.

    `MAX_RENDERED` limits repeated and added strings and lists, concatenation (`~`, macros, `set` blocks), methods and
    filters that pad, indent, replace or join, and the widths in formats. Products and powers of integers are limited
    here, `range` by Jinja.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(join_pieces)

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
                args = tuple(list(arg) for arg in args)  # since an iterator can be read only once
                _check_size(_joined_size(args[0] if args else [], owner))
            else:
                given = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
                _check_size(_RESULT_SIZES[name](owner, *args, **given))  # without what Jinja adds inside a loop
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
    """Limit the sum of the widths in a format; widths that are arguments are refused.

    Args:
        computed: what marks such a width.
    """
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
"""The maximum length of the result of a string's method, given the string and the arguments."""


def _bound_filters(filters: dict[str, Callable[..., Any]]) -> None:
    """Apply the limits of strings' methods to the filters that do the same."""
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
    """Jinja's `namespace`, without names that have a meaning in Python."""

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
    """`dict(...)` for templates, without access to the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


def make_environment() -> _Sandbox:
    """A new environment, with the functions that templates may call."""

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
    del environment.globals["lipsum"]  # prints any amount of text
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
