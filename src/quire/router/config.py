"""RouterConfig: every option of `quire route`. Options that servers have too are taken from `ServerConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_type_hints

from quire.config import option, unknown_option
from quire.errors import ConfigError
from quire.kv.directory import masked
from quire.router.address import Address
from quire.server.config import (
    KEY_OPTIONS,
    ServerConfig,
    as_tuple,
    check_certificates,
    check_door,
    check_place,
    read_keys,
)
from quire.server.service_registry import SCHEMES

MAX_SERVERS = 1024
DNS = "dns+"
"""Prefix of the URL of a DNS name, each of whose addresses is a server."""


def is_server(url: str) -> bool:
    """Whether a URL is that of a single server, as opposed to a DNS name or a Redis that lists servers."""
    return not url.startswith((DNS, *SCHEMES))


def _as_served(name: str, default: Any = None) -> Any:
    """A field like the server's, with its help text and its range."""
    field = ServerConfig.__dataclass_fields__[name]
    return dataclasses.field(
        default=field.default if default is None else default, repr=field.repr, metadata=field.metadata
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Options of one router.

    Raises:
        ConfigError: an option has the wrong type, is out of range, or contradicts another one.
    """

    server: tuple[str, ...] = option(
        (),
        "URL of a server, such as http://127.0.0.1:8000 or unix:/PATH for a Unix socket; dns+http://NAME:PORT for all "
        "addresses of a name; redis://... for a Redis where servers register (quire serve --join)",
    )
    prefill_server: tuple[str, ...] = option(
        (), "URL of a server that computes prompts for the others, or dns+http://NAME:PORT"
    )
    servers_file: str | None = option(None, "file with one URL per line (or 'prefill URL'), reread when it changes")
    server_key: str | None = dataclasses.field(
        default=None, repr=False, metadata={"help": "API key to send to the servers, or @FILE; default: the client's"}
    )
    policy: Literal["cost", "round-robin", "least-loaded", "prefix-hash"] = option(
        "cost", "how servers are chosen; all but cost are for comparison"
    )
    host: str = _as_served("host")
    port: int = _as_served("port", 8080)
    uds: str | None = _as_served("uds")
    ssl_certfile: str | None = _as_served("ssl_certfile")
    ssl_keyfile: str | None = _as_served("ssl_keyfile")
    root_path: str | None = _as_served("root_path")
    cacert: str | None = _as_served("cacert")
    api_key: tuple[str, ...] = _as_served("api_key")
    metrics_key: tuple[str, ...] = _as_served("metrics_key")
    allowed_host: tuple[str, ...] = _as_served("allowed_host")
    cors_origin: tuple[str, ...] = _as_served("cors_origin")
    max_body_bytes: int = _as_served("max_body_bytes")
    drain_timeout: float = _as_served("drain_timeout")
    log_format: Literal["text", "json"] = _as_served("log_format")
    log_requests: bool = _as_served("log_requests")
    otlp_traces_endpoint: str | None = _as_served("otlp_traces_endpoint")
    debug: bool = _as_served("debug")

    def __post_init__(self) -> None:
        check_door(self)
        urls = [*self.server, *self.prefill_server]
        for url in urls:
            self._check_url(url)
        names = [Address(url).name if is_server(url) else url for url in urls]
        if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
            raise ConfigError(f"the server {twice} was given twice; remove one")
        if len(urls) > MAX_SERVERS:
            raise ConfigError(f"{len(urls)} servers were given; at most {MAX_SERVERS} are allowed")
        if not urls and self.servers_file is None and not self.api_key:
            raise ConfigError(
                "no servers were given; give --server URL, --servers-file FILE, or an --api-key with which servers may "
                "join (quire serve --join)"
            )

    def _check_url(self, url: str) -> None:
        """Check the URL of a server, a DNS name or a Redis."""
        if url.startswith(SCHEMES):
            if url in self.prefill_server:
                raise ConfigError(
                    f"prefill_server {masked(url)}: servers in a Redis register with their role; give it as --server"
                )
            if not self.api_key:
                other = " (a server's own Unix socket is unix:/PATH)" if url.startswith("unix:") else ""
                raise ConfigError(
                    f"server {masked(url)}, a Redis{other}, needs an api_key, which proves that servers "
                    "belong here; give the router and all servers the same first one"
                )
            return
        try:
            Address(url.removeprefix(DNS))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if url.startswith(DNS) and not url.startswith(f"{DNS}http://"):
            raise ConfigError(
                f"server {url!r}: certificates are for names, not for addresses; use {DNS}http://NAME:PORT"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RouterConfig:
        """Make a configuration from options by name, as given by flags; reads key files.

        Raises:
            ConfigError: an option is unknown, or invalid.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given: dict[str, Any] = dict(options)
        check_place(given)
        for name in given:
            if name not in names:
                raise ConfigError(unknown_option(name, names))
        hints = get_type_hints(cls)
        for name, value in given.items():
            given[name] = as_tuple(value) if hints[name] == tuple[str, ...] else value
        for name in KEY_OPTIONS:
            if isinstance(given.get(name), tuple):
                given[name] = read_keys(given[name], name)
        if isinstance(given.get("server_key"), str):
            [given["server_key"]] = read_keys((given["server_key"],), "server_key")[:1]
        config = cls(**given)
        check_certificates(config)
        return config
