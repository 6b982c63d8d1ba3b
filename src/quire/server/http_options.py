"""HttpOptions: the options that servers and routers have in common, as processes that answer over HTTP."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_type_hints

from quire.config import check_field, option, unknown_option
from quire.errors import ConfigError
from quire.tls import CACERT, ServerCertificate, client_context

if TYPE_CHECKING:
    from quire.server.traces import Traces

MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket, in bytes."""
KEY_OPTIONS = ("api_key", "metrics_key")
MAX_KEYS = 1024
MAX_KEY_LENGTH = 512
MAX_KEY_FILE_BYTES = 1 << 20
MAX_NAMES = 64
"""Most values of an option that lists names."""

_KEY = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_ENDPOINT = re.compile(r"https?://[^\s/?#]+[^\s]*")
_HOST = re.compile(r"\*|[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Where a process listens, by http or https, who may send requests, and what it logs.

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
    cors_origin: tuple[str, ...] = option((), "web origin whose pages may use this server, or * for all")
    max_body_bytes: int = option(16 << 20, "largest request body, in bytes", low=1024, high=1 << 30)
    drain_timeout: float = option(
        30.0, "seconds that running requests have to finish after SIGTERM or Ctrl-C", low=0.0, high=10**6
    )
    log_format: Literal["text", "json"] = option("text", "lines for people, or one JSON object per line")
    log_requests: bool = option(True, "log one line per request")
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector for traces of requests, such as http://127.0.0.1:4318/v1/traces"
    )
    debug: bool = option(False, "log more, with tracebacks")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            if hints[field.name] == tuple[str, ...]:
                _check_texts(field.name, getattr(self, field.name))
            else:
                check_field(field, hints[field.name], getattr(self, field.name))
        if not self.host or any(char.isspace() or char in "[]/@" for char in self.host):
            raise ConfigError(f"host={self.host!r} is not an address or a name; give, for example, 127.0.0.1 or ::1")
        self._check_transport()
        _check_keys("api_key", self.api_key)
        _check_keys("metrics_key", self.metrics_key)
        if self.metrics_key and not self.api_key:
            raise ConfigError("metrics_key needs api_key, since without one /metrics is open to all; set --api-key too")
        if set(self.metrics_key) & set(self.api_key):
            raise ConfigError("a metrics_key is also an api_key; use a different key for metrics")
        check_each("allowed_host", self.allowed_host, _HOST, "a name such as quire.example.org, without a port, or *")
        check_each("cors_origin", self.cors_origin, _ORIGIN, "an origin such as https://example.org, or *")
        if self.otlp_traces_endpoint is not None:
            _check_endpoint(self.otlp_traces_endpoint)

    def _check_transport(self) -> None:
        """Check the socket's path, the TLS options, and `root_path`."""
        if self.uds is not None and not 1 <= len(os.fsencode(self.uds)) <= MAX_SOCKET_PATH:
            raise ConfigError(
                f"uds={self.uds!r} has {len(os.fsencode(self.uds))} bytes; paths of Unix sockets may have 1 to "
                f"{MAX_SOCKET_PATH}"
            )
        if self.uds is not None and self.ssl_certfile is not None:
            raise ConfigError(
                "uds and ssl_certfile cannot be combined, since a Unix socket never leaves this machine; leave one of "
                "them out"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate that the key belongs to")
        if self.root_path is not None and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path={self.root_path!r} is not a valid path such as /llm; it must begin with a slash and not "
                "end with one, and contain only letters, digits, slashes and ._~-"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make a configuration from options by name, as given by flags or YAML keys; reads the files with keys and
        certificates.

        Raises:
            ConfigError: an option is unknown (the message names the nearest one), or invalid.
        """
        hints, given = get_type_hints(cls), dict(options)
        names = [field.name for field in dataclasses.fields(cls)]
        check_place(given)
        for name, value in given.items():
            if name not in names:
                raise ConfigError(unknown_option(name, names))
            if hints[name] == tuple[str, ...]:
                given[name] = _as_tuple(value)
        for name in KEY_OPTIONS:
            if isinstance(given.get(name), tuple):
                given[name] = read_keys(given[name], name)
        config = cls(**given)
        config.certificate()
        if config.cacert is not None:
            client_context(config.cacert)
        return config

    def certificate(self) -> ServerCertificate | None:
        """The certificate, if it speaks https.

        Raises:
            ConfigError: it cannot be used.
        """
        return None if self.ssl_certfile is None else ServerCertificate(self.ssl_certfile, self.ssl_keyfile)

    def open_traces(self, service: str, model: str = "") -> Traces | None:
        """The trace exporter, if one was requested; see `Traces`."""
        if self.otlp_traces_endpoint is None:
            return None
        from quire.server.traces import Traces

        return Traces(self.otlp_traces_endpoint, service, model)


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


def _check_endpoint(url: str) -> None:
    """Check a trace collector's URL, and that OpenTelemetry is installed."""
    if not _ENDPOINT.fullmatch(url):
        raise ConfigError(f"otlp_traces_endpoint={url!r} is not a URL such as http://127.0.0.1:4318/v1/traces (HTTP)")
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry: pip install '.[otel]', or leave it out")


def _as_tuple(value: Any) -> Any:
    """A tuple of one string or a list of them, as in YAML; other values are left for the check."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _check_texts(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{name} must be a string or a list of strings; quote what YAML would read as a number")


def check_each(name: str, values: tuple[str, ...], allowed: re.Pattern[str], what: str) -> None:
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
