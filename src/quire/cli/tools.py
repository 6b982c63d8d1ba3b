"""Tools of `quire chat --tools FILE.py`: the functions of a Python file, for a model to call.

Every public function that the file defines becomes a tool (those in `__all__`, if there is one). Its JSON schema is
made from its type hints: `str`, `int`, `float`, `bool`, `Literal[...]`, `list[X]`, `dict[str, X]`, unions such as
`X | None`, and `Annotated[X, "what it is"]`. Descriptions come from the docstring: the text before its `Args:`
section describes the function, the entries of that section the parameters. Other hints are refused, with the line.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.errors import ConfigError

ALLOWED = (
    "str, int, float, bool, Literal[...], list[X], dict[str, X], unions of these such as X | None, "
    "and Annotated[X, 'description']"
)
SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}

MAX_RESULT = 100_000
"""Maximum characters of a result that the model sees."""


@dataclass(frozen=True)
class Tool:
    """One function.

    Attributes:
        hints: of the parameters.
        required: parameters without a default.
        definition: the tool in OpenAI's format.
    """

    function: Callable[..., Any]
    hints: Mapping[str, Any]
    required: frozenset[str]
    definition: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.definition["function"]["name"])

    @property
    def signature(self) -> str:
        """For people, as in `weather(city, days)`."""
        return f"{self.name}({', '.join(self.hints)})"

    def arguments(self, text: str) -> dict[str, Any]:
        """The arguments of a call, checked against the hints.

        Raises:
            ValueError: they are not a JSON object, or do not match the hints; the message is for the model.
        """
        try:
            given = msgspec.json.decode(text or "{}")
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise ValueError(f"the arguments are not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ValueError("the arguments are not a JSON object")
        if unknown := given.keys() - self.hints.keys():
            raise ValueError(
                f"{self.name} has no parameter {min(unknown)!r}; it has: {', '.join(self.hints) or 'none'}"
            )
        if missing := self.required - given.keys():
            raise ValueError(f"{self.name} needs the argument {min(missing)!r}")
        return {name: self._argument(name, value) for name, value in given.items()}

    def _argument(self, name: str, value: Any) -> Any:
        try:
            return msgspec.convert(value, self.hints[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"the argument {name!r}: {error}") from error

    def run(self, text: str) -> str:
        """Call it with arguments in JSON; returns its result, or its error, as text for the model. Only a
        KeyboardInterrupt is passed on.
        """
        try:
            arguments = self.arguments(text)
        except ValueError as error:
            return f"error: {error}"
        try:
            result = self.function(**arguments)
        except (Exception, SystemExit) as error:
            return _cut(f"error: {type(error).__name__}: {error}")
        return _cut(result if isinstance(result, str) else _as_json(result))


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except Exception:  # keys or a `__str__` that cannot be written
        return f"a {type(value).__name__} that cannot be written as JSON"


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()  # unpaired surrogates
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}... (cut: {len(text)} characters in all)"


def read_tools(path: str) -> list[Tool]:
    """Run a Python file, and make tools from its functions.

    Raises:
        ConfigError: it cannot be read or run, has no functions, or one of them cannot be a tool.
    """
    module = _run_file(Path(path))
    names = getattr(module, "__all__", None)
    functions = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and (name in names if names is not None else value.__module__ == module.__name__ and not name.startswith("_"))
    ]
    if not functions:
        raise ConfigError(f"--tools {path} defines no functions; each public function in it becomes a tool")
    return [_tool(function, path) for function in functions]


def _run_file(path: Path) -> types.ModuleType:
    if path.suffix != ".py":
        raise ConfigError(f"--tools {path} is not a Python file; give one whose name ends in .py")
    name = f"quire_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--tools {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where `get_type_hints` and dataclasses look for a module's names
    try:
        spec.loader.exec_module(module)
    except OSError as error:
        raise ConfigError(f"--tools {path} cannot be read: {error.strerror or error}") from error
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{path}{where}: {type(error).__name__}: {error}") from error
    return module


def _tool(function: types.FunctionType, path: str) -> Tool:
    where = f"{path}, line {function.__code__.co_firstlineno}: {function.__name__}"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{where} is async or a generator; a tool is a plain function that returns its result")
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ConfigError(f"{where}: its type hints cannot be read: {error}") from error
    about, described = _read_docstring(inspect.getdoc(function) or "")
    properties, required, plain = {}, [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: the parameter {parameter} cannot be passed by name; use named parameters")
        if name not in hints:
            raise ConfigError(f"{where}: the parameter {name} has no type hint; allowed are {ALLOWED}")
        try:
            plain[name], schema = _schema(hints[name])
            msgspec.json.Decoder(plain[name])  # refuses unions whose members it could not tell apart
        except TypeError as error:
            raise ConfigError(f"{where}: the parameter {name}: {error}; allowed are {ALLOWED}") from error
        if name in described:
            schema.setdefault("description", described[name])
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is None or isinstance(parameter.default, str | int | float | bool):
            schema["default"] = parameter.default
        properties[name] = schema
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    told = {"name": function.__name__, **({"description": about} if about else {}), "parameters": parameters}
    return Tool(function, plain, frozenset(required), {"type": "function", "function": told})


def _schema(hint: Any) -> tuple[Any, dict[str, Any]]:
    """A hint without annotations, and its JSON schema.

    Raises:
        TypeError: the hint is not allowed.
    """
    origin, of = get_origin(hint), get_args(hint)
    if origin is Annotated:
        plain, schema = _schema(of[0])
        texts = [text for text in of[1:] if isinstance(text, str)]
        return plain, schema | ({"description": texts[0]} if texts else {})
    if hint in SCALARS:
        return hint, {"type": SCALARS[hint]}
    if origin is Literal and all(isinstance(value, str | int | None) for value in of):
        return hint, {"enum": list(of)}
    if origin is list:
        plain, schema = _schema(of[0])
        return types.GenericAlias(list, (plain,)), {"type": "array", "items": schema}
    if origin is dict and of[0] is str:
        plain, schema = _schema(of[1])
        return types.GenericAlias(dict, (str, plain)), {"type": "object", "additionalProperties": schema}
    if origin in (Union, types.UnionType):
        made = [_schema(one) for one in of]
        return Union[tuple(plain for plain, _ in made)], {"anyOf": [schema for _, schema in made]}  # noqa: UP007
    raise TypeError(f"the hint {hint.__name__ if isinstance(hint, type) and not of else hint} is not supported")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and that of each parameter under `Args:`."""
    head, _, rest = ("\n" + text).partition("\nArgs:\n")
    about = re.split(r"\n(?=(?:Returns|Raises|Yields|Example|Examples|Note|Notes):)", head)[0]
    section = re.match(r"(?:[ \t]+.*\n?|\n)*", rest)
    entries = re.findall(r"^ {1,8}(\w+)(?: ?\(.*?\))?: (.*(?:\n {6,}.*)*)", section[0] if section else "", re.MULTILINE)
    return about.strip(), {name: " ".join(body.split()) for name, body in entries}
