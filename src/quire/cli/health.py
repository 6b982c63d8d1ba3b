"""Check whether the server or router on this machine accepts requests; for health checks of containers.

Give its --url, or the same --config, variables (QUIRE_PORT, ...) or flags as the server was started with. For a router,
the port must be given (8080 by default). No API key is needed. The certificate is not verified, since it is for
another name than the local address.

Exit codes: 0 it accepts requests; 1 it does not, or does not answer; 2 an option is invalid."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from quire.address import Address
from quire.cli.options import add_fields, option_names, read_config, read_environment
from quire.cli.terminal import visible
from quire.errors import ConfigError, RemoteError
from quire.http_client import HttpClient, HttpError
from quire.server.http_options import HttpOptions, check_place
from quire.server.processes import host_and_port, scheme_of

PLACE = "host", "port", "uds", "ssl_certfile"
"""Options that determine where a server listens, and its protocol."""

MAX_SECONDS = 10**6
POLL_SECONDS = 0.5
MAX_BODY_BYTES = 64 << 10
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address to contact for a server that listens on every address."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire health`."""
    parser.usage = "quire health [options]"
    parser.add_argument(
        "--live", action="store_true", help="only check that it runs (/live), even if it is still loading"
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="X", help="seconds to wait for an answer (default: 5)"
    )
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="X", help="seconds to wait until it is ready (default: 0)"
    )
    group = parser.add_argument_group("where the server listens")
    group.add_argument("--url", help="its URL, such as http://127.0.0.1:8000, instead of the other options")
    group.add_argument("--config", metavar="FILE", help="its YAML file of options; flags override it")
    add_fields(group, HttpOptions, PLACE)


def run(args: argparse.Namespace) -> int:
    """Ask the server and print its answer; returns the exit code.

    Raises:
        RemoteError: it does not accept requests.
    """
    address = _address(args)
    if not (0 < args.timeout <= MAX_SECONDS and 0 <= args.wait <= MAX_SECONDS):
        raise ConfigError(
            f"--timeout is {args.timeout:g} and --wait {args.wait:g}; --timeout must be above 0 seconds, --wait at "
            f"least 0, and both at most {MAX_SECONDS:,}"
        )
    deadline = time.monotonic() + args.wait
    while True:
        try:
            print(f"{address.url}: {_asked(address, '/live' if args.live else '/health', args.timeout)}")
            return 0
        except RemoteError:
            if time.monotonic() + POLL_SECONDS > deadline:
                raise
        time.sleep(POLL_SECONDS)


def _address(args: argparse.Namespace) -> Address:
    """The server's address: flags win over the file, and the file over the environment, as for the server."""
    if args.url is not None:
        if others := {"config", *PLACE} & {name for name, value in vars(args).items() if value is not None}:
            raise ConfigError(f"--url says where the server is; leave out {', '.join(sorted(others))}")
        return Address(args.url)
    from_file = read_config(args.config, [*option_names(), "preset"]) if args.config else {}
    given = from_file | vars(args)
    options: dict[str, Any] = read_environment(PLACE) | {name: given[name] for name in PLACE if name in given}
    check_place(options)
    place = HttpOptions(**options)
    if place.uds is None and place.port == 0:
        raise ConfigError(
            "port=0 is any free port, which only the server knows; give the server a port, or a Unix socket"
        )
    if place.uds is not None:
        return Address(f"unix:{place.uds}")
    return Address(f"{scheme_of(place)}://{host_and_port(LOOPBACK.get(place.host, place.host), place.port)}")


def _asked(address: Address, path: str, seconds: float) -> str:
    """Its answer, if that is positive.

    Raises:
        RemoteError: the answer is negative, or did not come in time.
    """
    client = HttpClient(address, verify=False, connect_seconds=seconds)
    try:
        status, body = asyncio.run(client.fetch("GET", path, seconds=seconds, most=MAX_BODY_BYTES))
    except HttpError as error:
        raise RemoteError(f"{address.url} does not answer: {visible(str(error))[:200]}") from error
    said = _said(body)
    if status != 200 or said is None:
        raise RemoteError(f"{address.url}{path} answers {status}: {said or 'is it another program?'}")
    return said


def _said(body: bytes) -> str | None:
    """The state in an answer, and the progress of loading; None if it is not a server's answer."""
    try:
        told = json.loads(body)
        words = [str(told["status"]), *(str(told[name]) for name in ("phase", "reason") if told.get(name))]
        share = [f"{told['percent']:.0f} %"] if told.get("percent") is not None else []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return visible(", ".join([*words, *share]))[:200]
