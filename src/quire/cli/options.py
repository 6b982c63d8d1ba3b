"""Flags and configuration files, generated from the fields of `EngineConfig`, `ServerConfig` and `SamplingParams`.

An option is defined once, as a field; its flag, its YAML key and its `/set` name follow from it. Flags are written
`--max-num-seqs` or `--max_num_seqs`; on/off options also `--no-...`. The order of precedence is: flag, YAML key,
environment (`QUIRE_MAX_NUM_SEQS`; servers, routers), preset, default. vLLM's names and values are accepted and
translated to Quire's here; so are names of llama.cpp, Ollama and SGLang with the same meaning.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import os
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.config import PRESETS, EngineConfig, unknown_option
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, SamplingParamsError
from quire.other_options import OTHER_OPTIONS, explained, flags_of
from quire.router.config import RouterConfig
from quire.server.config import ServerConfig
from quire.typed_json import BAD_JSON
from quire.vllm_options import VLLM_OPTIONS, translated
from quire.yaml_file import read_yaml

CONFIGS = EngineConfig, ServerConfig, RouterConfig
"""The classes whose options can be environment variables."""

FIELD_GROUPS = "engine options", "server options", "sampling options"
"""Groups of options generated from a class, which have dozens of options."""
COMMON_OPTIONS = frozenset(
    {"config", "preset", "max_model_len", "max_num_seqs", "quantization", "kv_cache_dtype", "device", "threads"}
    | {"tensor_parallel_size", "speculative_config", "host", "port", "api_key", "max_tokens", "temperature", "seed"}
)
"""The options in these groups that `--help` shows."""


class CommandParser(argparse.ArgumentParser):
    """argparse with whole names only, suggestions for unknown ones, and errors as exceptions."""

    def __init__(self, prog: str, description: str) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=formatter, add_help=False
        )
        self.add_argument("-h", "--help", action="store_true", help="show this help and exit")
        self.add_argument("--help-all", action="store_true", help="show all options and exit")

    def help_text(self, all_options: bool) -> str:
        """The help text; unless all options are wanted, only the common ones of the generated options are in it."""
        hidden = [
            (action, action.help)
            for group in self._action_groups
            if group.title in FIELD_GROUPS and not all_options
            for action in group._group_actions
            if action.dest not in COMMON_OPTIONS
        ]
        for action, _ in hidden:
            action.help = argparse.SUPPRESS
        text = self.format_help()
        for action, shown in hidden:
            action.help = shown
        return text + f"\n{len(hidden)} more options: {self.prog} --help-all\n" if hidden else text

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing and exiting."""
        message = re.sub(r"invalid int value: (.*)", r"\1 is not a whole number", message)
        message = re.sub(r"invalid float value: (.*)", r"\1 is not a number", message)
        raise ConfigError(f"{message}; see '{self.prog} --help'")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments. Flags and other arguments may be mixed freely.

        Raises:
            ConfigError: a flag is unknown (the message suggests a similar one), or its value is not valid.
        """
        known = list(self._option_string_actions)
        given = _translated([_with_dashes(argument) for argument in arguments], known)
        before = given[: given.index("--")] if "--" in given else given
        if {"-h", "--help", "--help-all"} & {*before}:
            print(self.help_text("--help-all" in before), end="")
            raise SystemExit(0)
        for argument in before:
            flag = argument.partition("=")[0]
            if re.fullmatch(r"--?[a-z][a-z0-9-]*", flag) and flag not in known:
                more = f"; {self.epilog}" if self.epilog else ""
                raise ConfigError(_unknown_flag(flag, known, self.prog) + more)
        return self.parse_intermixed_args(_each_with_its_flag(given))


def _each_with_its_flag(given: Sequence[str], flag: str = "--served-model-name") -> list[str]:
    """vLLM's `serve MODEL --served-model-name a b` as the flag twice. Without a model before it, `b` is the model."""
    if flag not in given or (given[0].startswith("-") and "--model" not in given):
        return list(given)
    first = given.index(flag) + 2
    last = next((i for i in range(first, len(given)) if given[i].startswith("-")), len(given))
    return [*given[:first], *(word for name in given[first:last] for word in (flag, name)), *given[last:]]


def _with_dashes(argument: str) -> str:
    """Turn `--max_num_seqs=4` into `--max-num-seqs=4`; anything but a flag is unchanged."""
    match = re.match(r"--(no[-_])?[a-z][a-z0-9_-]*(?==|$)", argument)
    return match[0].replace("_", "-") + argument[match.end() :] if match else argument


_OTHER_FLAGS = {flag: name for name in OTHER_OPTIONS for flag in flags_of(name)}


def _translated(given: Sequence[str], known: Sequence[str]) -> list[str]:
    """Replace flags of other engines by Quire's flags with the same meaning, and translate their values."""
    result: list[str] = []
    values: Mapping[str, str] = {}  # translations for the previous flag's value
    for index, argument in enumerate(given):
        if argument == "--":
            return [*result, *given[index:]]
        flag, equals, value = argument.partition("=")
        option = None if flag in known else OTHER_OPTIONS.get(_OTHER_FLAGS.get(flag, ""))
        if option is None or option.why is not None or _flag(option.ours or "") not in known:
            result.append(values.get(argument, argument))
            values = {}
        elif equals:
            result.append(f"{_flag(option.ours or '')}={option.values.get(value, value)}")
        else:
            result.append(_flag(option.ours or ""))
            values = option.values
    return result


def _unknown_flag(flag: str, known: list[str], prog: str) -> str:
    if (name := _OTHER_FLAGS.get(flag)) is not None:
        ours = OTHER_OPTIONS[name].ours
        if ours is None or _flag(ours) in known:
            return f"unknown option {flag}; {explained(name, flag, ours and _flag(ours))}"
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    return f"unknown option {flag}; " + (f"did you mean {near[0]}?" if near else f"see '{prog} --help'")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `EngineConfig`, and `--config` and `--preset`; also, hidden from the help text,
    vLLM's names of these and of the parser's other flags.
    """
    group = parser.add_argument_group(
        "engine options",
        "vLLM's names work too, such as --no-enable-prefix-caching; llama.cpp's and SGLang's where they mean the same.",
    )
    group.add_argument("--config", metavar="FILE", help="YAML file of options by these names; flags override it")
    group.add_argument(
        "--preset", choices=sorted(PRESETS), help="set a few options for one purpose; other options override it"
    )
    add_fields(group, EngineConfig)
    flags = parser._option_string_actions
    for name, option in VLLM_OPTIONS.items():
        taken = name in SamplingParams.__struct_fields__ or _flag(name) in flags
        if not taken and (option.ours is None or _flag(option.ours) in flags):
            _add_flag(group, name, option.kind, argparse.SUPPRESS, None, option.short)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `ServerConfig`."""
    add_fields(parser.add_argument_group("server options"), ServerConfig)


def add_fields(group: argparse._ArgumentGroup, config: type, names: Sequence[str] | None = None) -> None:
    """Add a flag for every field of a dataclass of options, or for those named."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        if names is not None and field.name not in names:
            continue
        default = None if field.default in (dataclasses.MISSING, ()) else field.default
        short = (field.metadata["short"],) if field.metadata.get("short") else ()
        _add_flag(group, field.name, hints[field.name], field.metadata["help"], default, short)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `SamplingParams`."""
    group = parser.add_argument_group("sampling options")
    docs, hints = _attribute_docs(SamplingParams), get_type_hints(SamplingParams)
    defaults = zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
    for name, default in defaults:
        text = docs.get(name, "").replace("None: ", "Default: ").replace("None is ", "default: ")
        text = text.replace("None ", "by default ")  # there is no None on a command line
        _add_flag(group, name, hints[name], text, default)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_flag(
    group: argparse._ArgumentGroup, name: str, hint: Any, text: str, default: Any, short: Sequence[str] = ()
) -> None:
    """Add one option's flag. It is absent from the namespace unless given, so that defaults stay in one place."""
    flags = (*short, _flag(name))
    text = text.replace("%", "%%")
    if default is not None:
        text += f" (default: {_shown(default)})"
    if hint is bool:
        boolean = argparse.BooleanOptionalAction
        group.add_argument(*flags, dest=name, action=boolean, default=argparse.SUPPRESS, help=text)
        return

    def convert(given: str) -> Any:
        try:
            return parse_value(name, hint, given)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name}: ")) from error

    if _takes_texts(hint):
        text += " (may be repeated)"
        group.add_argument(*flags, dest=name, action="append", default=argparse.SUPPRESS, metavar="TEXT", help=text)
    else:
        group.add_argument(
            *flags, dest=name, type=convert, default=argparse.SUPPRESS, metavar=_metavar(hint), help=text
        )


def _shown(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def parse_value(name: str, hint: Any, text: str) -> Any:
    """Parse the value of an option of this type.

    Lists of numbers are written `1,2,3`, several texts as a JSON list, a bias `ID:BIAS,ID:BIAS`, and `none`
    unsets an option that may be None.

    Raises:
        ConfigError: `text` is not of that type.
    """
    optional, kind = _without_none(hint)
    if optional and text.lower() == "none":
        return None
    if _takes_texts(hint):
        return _texts(name, text)
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{name}: {text!r} is not valid; use on or off")
        return _BOOLEANS[text.lower()]
    convert, what = _CONVERTERS[_kind_name(kind)]
    try:
        return convert(text)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not {what}") from None


def _texts(name: str, text: str) -> list[str]:
    if not text.startswith("["):
        return [text]
    try:
        return msgspec.json.decode(text, type=list[str])
    except BAD_JSON as error:
        raise ConfigError(f"{name}: {text!r} is not a JSON list of texts: {error}") from error


def _bias(text: str) -> dict[int, float]:
    pairs = [pair.partition(":") for pair in text.split(",")]
    return {int(token): float(bias) for token, _, bias in pairs}


def _mapping(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except BAD_JSON as error:
        raise ValueError(str(error)) from error


_BOOLEANS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_CONVERTERS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a text"),
    "list": (lambda text: [int(part) for part in text.split(",")], "a list of whole numbers, as in 1,2,3"),
    "dict": (_bias, "a list of token ids with biases, as in 17:-100,42:2.5"),
    "mapping": (_mapping, """a JSON object, as in '{"method": "ngram"}'"""),
    "StructuredOutputsParams": (_mapping, """a JSON object, as in '{"choice": ["yes", "no"]}'"""),
}
_METAVARS = {"int": "N", "float": "X", "str": "TEXT", "list": "ID,ID,...", "dict": "ID:BIAS,...", "mapping": "JSON"}
_METAVARS["StructuredOutputsParams"] = "JSON"


def _without_none(hint: Any) -> tuple[bool, Any]:
    """Whether None is allowed, and the type (or a tuple of them) without it."""
    if get_origin(hint) not in (Union, types.UnionType):
        return False, hint
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    return len(kinds) < len(get_args(hint)), kinds[0] if len(kinds) == 1 else tuple(kinds)


def _kind_name(kind: Any) -> str:
    """`kind` as a key of `_CONVERTERS`. A Literal has the type of its choices."""
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0]).__name__
    return {Sequence: "list", dict: "dict", Mapping: "mapping"}.get(get_origin(kind), getattr(kind, "__name__", ""))


def _takes_texts(hint: Any) -> bool:
    kind = _without_none(hint)[1]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return Sequence[str] in kinds or tuple[str, ...] in kinds


def _metavar(hint: Any) -> str:
    kind = _without_none(hint)[1]
    if get_origin(kind) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kind)) + "}"
    return _METAVARS[_kind_name(kind)]


def _attribute_docs(cls: type) -> dict[str, str]:
    """Texts of fields, by name, from the `Attributes:` section of a class's docstring (empty under `python -OO`)."""
    text = inspect.getdoc(cls) or ""
    part = re.search(r"^Attributes:\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", part[1], re.MULTILINE) if part else []
    return {name: " ".join(body.split()) for name, body in entries}


def read_config(path: str, known: Sequence[str]) -> dict[str, Any]:
    """Read the options in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or has a key that is neither in `known` nor vLLM's.
    """
    content = read_yaml(Path(path), f"--config {path}", "a configuration file")
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path} must have 'name: value' lines, but it is a {type(content).__name__}")
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in known and name not in VLLM_OPTIONS:
            raise ConfigError(f"--config {path}: {unknown_option(name, list(known))}")
        if name in options:
            raise ConfigError(f"--config {path} has {name} twice; remove one")
        options[name] = _yaml_value(name, value)
    return options


def _yaml_value(name: str, value: Any) -> Any:
    """YAML reads a bare `off` as false; if the option has a choice of that name, use it."""
    hint = get_type_hints(EngineConfig).get(name)
    return "off" if value is False and get_origin(hint) is Literal and "off" in get_args(hint) else value


@dataclasses.dataclass(frozen=True)
class Given:
    """The options from flags and the configuration file. Names have been checked; values are checked by their classes.

    Attributes:
        origins: where each option came from: "flag", "file", "environment" or "preset".
    """

    engine: dict[str, Any]
    sampling: dict[str, Any]
    preset: str | None
    server: dict[str, Any] = dataclasses.field(default_factory=dict)
    origins: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def preset_options(self) -> dict[str, Any]:
        """The options that the preset sets and nothing overrides."""
        options = PRESETS[self.preset] if self.preset else {}
        return {name: value for name, value in options.items() if name not in self.engine}


def given_options(
    args: argparse.Namespace, model: str | None = None, sampling: bool = False, server: bool = False
) -> Given:
    """Merge flags over the configuration file.

    `model` is the one named without a flag, if any; with `sampling` the file may set sampling parameters too, with
    `server` the server's options.

    Raises:
        ConfigError: see `read_config`.
    """
    engine_names = [field.name for field in dataclasses.fields(EngineConfig)]
    server_names = [field.name for field in dataclasses.fields(ServerConfig)] if server else []
    sampling_names = list(SamplingParams.__struct_fields__) if sampling else []
    known = [*engine_names, *server_names, *sampling_names]
    from_file = translated(read_config(args.config, [*known, "preset"]), known) if args.config else {}
    preset = args.preset or from_file.pop("preset", None)
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise ConfigError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    given = {name: value for name, value in vars(args).items() if name in known or name in VLLM_OPTIONS}
    from_environment = read_environment(known) if server else {}
    flags = translated(({} if model is None else {"model": model}) | given, known)
    options = from_environment | from_file | flags
    origins = dict.fromkeys(PRESETS[preset] if preset else {}, "preset")
    origins |= (
        dict.fromkeys(from_environment, "environment") | dict.fromkeys(from_file, "file") | dict.fromkeys(flags, "flag")
    )
    return Given(
        engine={name: options[name] for name in engine_names if name in options},
        sampling={name: options[name] for name in sampling_names if name in options},
        preset=preset,
        server={name: options[name] for name in server_names if name in options},
        origins=origins,
    )


def read_environment(known: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Read environment variables such as QUIRE_MAX_MODEL_LEN, for containers; values are written as for flags.

    Raises:
        ConfigError: a value does not have its option's type.
    """
    hints = {name: hint for config in CONFIGS for name, hint in get_type_hints(config).items()}
    found: dict[str, Any] = {}
    for name in known:
        variable = "QUIRE_" + name.upper()
        text = environment.get(variable)
        if text is None:
            continue
        if name == "port" and text.startswith("tcp://"):
            raise ConfigError(
                f"{variable}={text} was set by Kubernetes for a service named quire; set "
                "enableServiceLinks: false for the pod, or rename the service"
            )
        try:
            value = parse_value(name, hints[name], text)
        except ConfigError as error:
            raise ConfigError(f"in the environment, {variable}: {error}") from error
        found[name] = tuple(value) if isinstance(value, list) and _takes_texts(hints[name]) else value
    return found


KUBERNETES = re.compile(r"QUIRE_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)")
"""Variables that Kubernetes sets in pods if there is a service named quire."""

BUILD_VARIABLES = {"QUIRE_KERNELS"}
"""Variables of `setup.py`, which may still be set in images."""


def unknown_variables(known: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings about variables that look like options but are not; they have no effect."""
    variables = {"QUIRE_" + name.upper() for name in known} | BUILD_VARIABLES
    told = []
    for variable in sorted(environment):
        if variable.startswith("QUIRE_") and variable not in variables and not KUBERNETES.fullmatch(variable):
            near = difflib.get_close_matches(variable, sorted(variables), n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else "'quire serve --help-all' lists all options"
            told.append(f"the environment variable {variable} is no option, and is ignored; {hint}")
    return told


def option_names() -> list[str]:
    """The names of all options of engines, servers and routers."""
    return list(dict.fromkeys(field.name for config in CONFIGS for field in dataclasses.fields(config)))


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Make sampling parameters from names and values in JSON, YAML or flags.

    Raises:
        SamplingParamsError: a name is unknown (the message suggests a similar one), or a value is not valid.
    """
    for name in fields:
        if name not in SamplingParams.__struct_fields__:
            raise SamplingParamsError(unknown_option(name, list(SamplingParams.__struct_fields__)))
    values = dict(fields)
    if isinstance(values.get("logit_bias"), dict):  # JSON's keys are always strings
        values["logit_bias"] = {_as_id(key): bias for key, bias in values["logit_bias"].items()}
    return SamplingParams(**values)


def _as_id(key: Any) -> Any:
    return int(key) if isinstance(key, str) and re.fullmatch(r"\d{1,10}", key) else key
