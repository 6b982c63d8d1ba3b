"""RouterConfig: every option of `quire route`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from quire.address import Address
from quire.config import option
from quire.errors import ConfigError
from quire.names import DNS, MAX_SERVERS, is_server
from quire.server.http_options import HttpOptions, read_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig(HttpOptions):
    """Options of one router."""

    server: tuple[str, ...] = option(
        (),
        "URL of a server, such as http://127.0.0.1:8000 or unix:/PATH for a Unix socket; dns+http://NAME:PORT for all "
        "addresses of a name",
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
    admin: bool = option(False, "offer /admin/drain/SERVER and /admin/undrain/SERVER; needs an api_key")
    mixed: bool = option(
        False,
        "let servers whose tokens differ (other kernels or precision) serve one model; no stream goes on from one to "
        "the other",
    )
    port: int = option(8080, "port to listen on; 0: any free one", low=0, high=65535)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.admin and not self.api_key:
            raise ConfigError("admin needs api_key, since without one all could drain servers; set --api-key, too")
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
        """Check the URL of a server or a DNS name."""
        Address(url.removeprefix(DNS))
        if url.startswith(DNS) and not url.startswith(f"{DNS}http://"):
            raise ConfigError(
                f"server {url!r}: certificates are for names, not for addresses; use {DNS}http://NAME:PORT"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build it from options by name; a server's key may be in a file. Raises ConfigError."""
        given = dict(options)
        if isinstance(given.get("server_key"), str):
            given["server_key"] = read_keys((given["server_key"],), "server_key")[0]
        return super().from_options(given)
