"""ServerConfig: every option of the server, and the message with which an HTTP process starts.

Its fields are flags and YAML keys, like those of `EngineConfig`. Child processes get options only through these two:
none from the environment, and no secrets on a command line.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_type_hints

import msgspec

from quire.config import check_field, option, unknown_option
from quire.errors import ConfigError
from quire.kv.directory import masked
from quire.models.hub import EMBEDDED_MODELS, HUB_NAME
from quire.server.processes import MAX_SOCKET_PATH
from quire.server.service_registry import SCHEMES, ServiceRegistry
from quire.tls import CACERT, ServerCertificate, client_context
from quire.vllm_options import translated

if TYPE_CHECKING:
    from quire.server.traces import Traces

MIN_STALL_SECONDS = 5.0
KEY_OPTIONS = ("api_key", "metrics_key")
MAX_KEYS = 1024
MAX_KEY_LENGTH = 512
MAX_KEY_FILE_BYTES = 1 << 20
MAX_NAMES = 64
"""Most names of the model, and most origins."""

_KEY = re.compile(r"[!-~]+")
_NAME = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]{0,254}[^\s\x00-\x1f\x7f])?")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_ENDPOINT = re.compile(r"https?://[^\s/?#]+[^\s]*")
_HOST = re.compile(r"\*|[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of one server.

    Attributes:
        api_key, metrics_key: the keys themselves; `from_options` has read key files. The first `api_key` is the
            operator's.

    Raises:
        ConfigError: an option has the wrong type, is out of range, or contradicts another one.
    """

    host: str = option("127.0.0.1", "address or name to listen on; 0.0.0.0 or :: is every address of this machine")
    port: int = option(8000, "port to listen on; 0: any free one", low=0, high=65535)
    uds: str | None = option(
        None,
        "path of a Unix socket to listen on instead of a host and port; the umask decides who may connect",
    )
    ssl_certfile: str | None = option(
        None, "certificate for https (PEM), with its intermediate certificates; reloaded when the file changes"
    )
    ssl_keyfile: str | None = option(None, "private key of the certificate (PEM); default: in the certificate's file")
    root_path: str | None = option(
        None, "path under which a proxy offers this server, such as /llm; the proxy may strip it or not"
    )
    cacert: str | None = option(None, CACERT)
    api_key: tuple[str, ...] = dataclasses.field(
        default=(), repr=False, metadata={"help": "key that clients must send, or @FILE with one per line"}
    )
    metrics_key: tuple[str, ...] = dataclasses.field(
        default=(), repr=False, metadata={"help": "key that opens /metrics and nothing else, or @FILE"}
    )
    allowed_host: tuple[str, ...] = option(
        (), "host name under which a server without keys may be reached, or * for any; addresses are always allowed"
    )
    served_model_name: tuple[str, ...] = option((), "what requests call the model; default: its folder's or hub name")
    api_workers: int = option(1, "number of HTTP processes on the port", low=1, high=64)
    tokenizer_workers: int = option(1, "tokenizer processes per HTTP process", low=1, high=64)
    tokenizer_deadline: float = option(
        10.0, "seconds that rendering or tokenizing one request may take", low=0.1, high=3600.0
    )
    max_queued_requests: int = option(1024, "requests that may wait for their first token", low=1, high=10**6)
    max_queued_tokens: int = option(1_000_000, "tokens that those may hold together, as estimated", low=1, high=10**12)
    request_timeout: float | None = option(
        None, "seconds after which a request is ended; default: never", low=0.001, high=10**7
    )
    max_body_bytes: int = option(16 << 20, "largest request body, in bytes", low=1024, high=1 << 30)
    drain_timeout: float = option(
        30.0, "seconds that running requests have to finish after SIGTERM or Ctrl-C", low=0.0, high=10**6
    )
    restart_limit: int = option(
        5,
        "restarts within an hour, of each engine and of HTTP processes, before giving up",
        low=0,
        high=10**6,
    )
    stall_restart_s: float = option(
        60.0,
        "restart a process that shows no sign of life for so many seconds (an engine in a large step is given longer); "
        "0: never",
        low=0.0,
        high=10**6,
    )
    join: str | None = option(
        None,
        "URL of a router (quire route) that should send requests here, or of a Redis where routers look for servers; "
        "router and server need the same first --api-key",
    )
    admin: bool = option(False, "offer /reset_prefix_cache, /debug/requests and /debug/steps")
    cors_origin: tuple[str, ...] = option((), "web origin whose pages may use this server, or * for all")
    log_format: Literal["text", "json"] = option("text", "lines for people, or one JSON object per line")
    log_requests: bool = option(True, "log one line per request")
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector for traces of requests, such as http://127.0.0.1:4318/v1/traces"
    )
    debug: bool = option(False, "log more, with tracebacks")

    def __post_init__(self) -> None:
        check_door(self)
        if 0 < self.stall_restart_s < MIN_STALL_SECONDS:
            raise ConfigError(
                f"stall_restart_s={self.stall_restart_s:g} is less than {MIN_STALL_SECONDS:g}, for which any process "
                "may be silent on a busy machine; give more, or 0 for never"
            )
        if self.join is not None and self.uds is not None:
            raise ConfigError("join needs a port that the router can reach, but uds is set; leave one of them out")
        if self.join is not None and not self.join.startswith(("http://", "https://", *SCHEMES)):
            raise ConfigError(
                f"join={masked(self.join)!r} is not a router's URL; give one such as http://127.0.0.1:8080, or "
                "redis://HOST:PORT, where routers find servers (quire route --server redis://...)"
            )
        if self.join is not None and not self.api_key:
            raise ConfigError(
                "join needs api_key, since a router accepts servers that have its key; give both the same one"
            )
        if self.join is not None and self.join.startswith(SCHEMES):
            ServiceRegistry(self.join, "join", self.api_key[0]).close()  # whether it could be used
        _check_each("served_model_name", self.served_model_name, _NAME, "1 to 256 printable characters")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServerConfig:
        """Make a configuration from options by name, as given by flags or YAML keys; reads key files.

        Raises:
            ConfigError: an option is unknown (the message names the nearest one), or invalid.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given = translated(options, names)
        check_place(given)
        for name in given:
            if name not in names:
                raise ConfigError(unknown_option(name, names))
        for name, hint in get_type_hints(cls).items():
            if hint == tuple[str, ...] and name in given:
                given[name] = as_tuple(given[name])
        for name in KEY_OPTIONS:
            if isinstance(given.get(name), tuple):
                given[name] = read_keys(given[name], name)
        config = cls(**given)
        check_certificates(config)
        return config

    def model_names(self, model: str) -> tuple[str, ...]:
        """The names of `model`, the engine's option, in requests; never empty.

        Of a folder, clients see only the last part of its path.
        """
        if self.served_model_name:
            return self.served_model_name
        if model in EMBEDDED_MODELS or HUB_NAME.fullmatch(model):
            return (model,)
        return (Path(model).expanduser().absolute().resolve().name or model,)


class Door(Protocol):
    """The common options of servers and routers: where they listen, and who may send requests."""

    host: str
    uds: str | None
    ssl_certfile: str | None
    ssl_keyfile: str | None
    root_path: str | None
    cacert: str | None
    api_key: tuple[str, ...]
    metrics_key: tuple[str, ...]
    allowed_host: tuple[str, ...]
    cors_origin: tuple[str, ...]
    otlp_traces_endpoint: str | None


def check_door(config: Any) -> None:
    """Check the types and ranges of a frozen dataclass's fields, and the meaning of those of a `Door`.

    Raises:
        ConfigError: a field is not valid.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        if hints[field.name] == tuple[str, ...]:
            _check_texts(field.name, getattr(config, field.name))
        else:
            check_field(field, hints[field.name], getattr(config, field.name))
    door: Door = config
    if not door.host or any(char.isspace() or char in "[]/@" for char in door.host):
        raise ConfigError(f"host={door.host!r} is not an address or a name; give, for example, 127.0.0.1 or ::1")
    _check_transport(door)
    _check_keys("api_key", door.api_key)
    _check_keys("metrics_key", door.metrics_key)
    if door.metrics_key and not door.api_key:
        raise ConfigError("metrics_key needs api_key, since without one /metrics is open to all; set --api-key too")
    if set(door.metrics_key) & set(door.api_key):
        raise ConfigError("a metrics_key is also an api_key; use a different key for metrics")
    _check_each("allowed_host", door.allowed_host, _HOST, "a name such as quire.example.org, without a port, or *")
    _check_each("cors_origin", door.cors_origin, _ORIGIN, "an origin such as https://example.org, or *")
    if door.otlp_traces_endpoint is not None:
        _check_endpoint(door.otlp_traces_endpoint)


def check_place(given: Mapping[str, Any]) -> None:
    """Refuse options that give two places to listen at.

    Raises:
        ConfigError: there are two.
    """
    if given.get("uds") is not None and (other := {"host", "port"} & given.keys()):
        raise ConfigError(
            f"uds and {' and '.join(sorted(other))} cannot be combined, since a server listens in one place; leave "
            "one out"
        )


def check_certificates(config: Any) -> None:
    """Read a `Door`'s certificate files, to check that they can be used.

    Raises:
        ConfigError: one could not.
    """
    certificate_of(config)
    door: Door = config
    if door.cacert is not None:
        client_context(door.cacert)


def certificate_of(config: Any) -> ServerCertificate | None:
    """A `Door`'s certificate, if it speaks https.

    Raises:
        ConfigError: it cannot be used.
    """
    door: Door = config
    return None if door.ssl_certfile is None else ServerCertificate(door.ssl_certfile, door.ssl_keyfile)


def _check_transport(door: Door) -> None:
    """Check the socket's path, the TLS options, and `root_path`."""
    if door.uds is not None and not 1 <= len(os.fsencode(door.uds)) <= MAX_SOCKET_PATH:
        raise ConfigError(
            f"uds={door.uds!r} has {len(os.fsencode(door.uds))} bytes; paths of Unix sockets may have 1 to "
            f"{MAX_SOCKET_PATH}"
        )
    if door.uds is not None and door.ssl_certfile is not None:
        raise ConfigError(
            "uds and ssl_certfile cannot be combined, since a Unix socket never leaves this machine; leave one of "
            "them out"
        )
    if door.ssl_keyfile is not None and door.ssl_certfile is None:
        raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate that the key belongs to")
    if door.root_path is not None and not _ROOT_PATH.fullmatch(door.root_path):
        raise ConfigError(
            f"root_path={door.root_path!r} is not a valid path such as /llm; it must begin with a slash and not end "
            "with one, and contain only letters, digits, slashes and ._~-"
        )


def _check_endpoint(url: str) -> None:
    """Check a trace collector's URL, and that OpenTelemetry is installed."""
    if not _ENDPOINT.fullmatch(url):
        raise ConfigError(f"otlp_traces_endpoint={url!r} is not a URL such as http://127.0.0.1:4318/v1/traces (HTTP)")
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry: pip install 'quire[otel]', or leave it out")


def open_traces(endpoint: str | None, service: str) -> Traces | None:
    """The trace exporter, if one was requested."""
    if endpoint is None:
        return None
    from quire.server.traces import Traces

    return Traces(endpoint, service)


def as_tuple(value: Any) -> Any:
    """A tuple of one string or a list of them, as in YAML; other values are left for the check."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _check_texts(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{name} must be a string or a list of strings; quote what YAML would read as a number")


def _check_each(name: str, values: tuple[str, ...], allowed: re.Pattern[str], what: str) -> None:
    """Refuse invalid values, duplicates, and too many."""
    for index, value in enumerate(values):
        if not allowed.fullmatch(value):
            raise ConfigError(f"{name}={value!r} is not valid; it must be {what}")
        if value in values[:index]:
            raise ConfigError(f"{name}={value!r} was given twice; remove one")
    if len(values) > MAX_NAMES:
        raise ConfigError(f"{name} was given {len(values)} times; at most {MAX_NAMES} are allowed")


def _check_keys(name: str, keys: tuple[str, ...]) -> None:
    """Refuse keys that cannot be in a header, and duplicates. No message shows a key."""
    for number, key in enumerate(keys, 1):
        if not key:
            raise ConfigError(f"{name} {number} is empty; remove it, or give a key")
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{name} {number} has a space or a character that is not printable ASCII, which an HTTP header cannot "
                "carry"
            )
        if len(key) > MAX_KEY_LENGTH:
            raise ConfigError(f"{name} {number} has {len(key)} characters; at most {MAX_KEY_LENGTH} are allowed")
    if len(set(keys)) < len(keys):
        first = next(number for number, key in enumerate(keys, 1) if key in keys[: number - 1])
        raise ConfigError(f"{name} {first} was given before; each key must be given once")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{name} was given {len(keys)} times; at most {MAX_KEYS} are allowed")


def read_keys(texts: Sequence[str], option_name: str = "api_key") -> tuple[str, ...]:
    """The keys of an option: `@FILE` stands for every line of the file but empty ones and those that begin with #.

    Raises:
        ConfigError: a file cannot be read, or holds no key.
    """
    keys: list[str] = []
    flag = f"--{option_name.replace('_', '-')}"
    for text in texts:
        keys += _keys_of_file(text[1:], flag) if isinstance(text, str) and text.startswith("@") else [text]
    return tuple(keys)


def _keys_of_file(path: str, flag: str) -> list[str]:
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_KEY_FILE_BYTES + 1)
    except (OSError, RuntimeError, UnicodeDecodeError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not a text file (UTF-8)"
        raise ConfigError(f"{flag} @{path} cannot be read: {reason}") from error
    if len(text) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{flag} @{path} is larger than {MAX_KEY_FILE_BYTES} bytes; is it a file with keys?")
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} @{path} has no keys; write one per line")
    return keys


class HttpStart(msgspec.Struct, kw_only=True):
    """The supervisor's message to an HTTP process, as JSON on its standard input.

    Attributes:
        directory: the server's private folder.
        worker: this process's index, unique in the life of the server.
        fd: the listening socket, inherited.
        server: the server's options.
        model_names: names of the model in requests; responses have the first.
        engine_options: every field of `EngineConfig`, before the memory plan.
        replicas: number of engines.
        origins: where each option came from: "flag", "file" or "preset"; absent means "default".
    """

    directory: str
    worker: int
    fd: int
    server: ServerConfig
    model_names: tuple[str, ...]
    engine_options: dict[str, Any] = {}
    replicas: int = 1
    origins: dict[str, str] = {}
