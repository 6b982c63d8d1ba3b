"""Route requests to several servers, each to the one where it costs least.

Servers come from --server and --prefill-server (a URL, the addresses of a DNS name, or a Redis), from a file
(--servers-file), and join by themselves (quire serve --join). Any OpenAI-compatible server works; streams of Quire's
servers continue on another one if theirs dies. Ctrl-C or SIGTERM lets running requests finish; a second one ends
them."""

from __future__ import annotations

import argparse
import dataclasses
import logging

from quire.cli.options import add_fields, option_names, read_config, read_environment, unknown_variables
from quire.names import is_server
from quire.router.config import RouterConfig
from quire.server.http_options import HttpOptions

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire route`."""
    parser.usage = "quire route --server URL ... [--prefill-server URL ...] [options]"
    group = parser.add_argument_group("router options")
    group.add_argument("--config", metavar="FILE", help="YAML file of options, by these names; flags override it")
    shared, names = ([field.name for field in dataclasses.fields(kind)] for kind in (HttpOptions, RouterConfig))
    add_fields(group, RouterConfig, [name for name in names if name not in shared])
    add_fields(parser.add_argument_group("HTTP options"), RouterConfig, shared)


def run(args: argparse.Namespace) -> int:
    """Route until a signal ends it; returns the exit code."""
    config = read_options(args)

    import uvloop

    from quire import log
    from quire.cli.serve_screen import OPEN_TO_ALL
    from quire.cli.terminal import note
    from quire.router.run import Router
    from quire.server.processes import is_loopback, listening, url_of
    from quire.server.transport import raise_file_limit

    raise_file_limit()
    with listening(config) as listener:
        log.configure(config.log_format, config.debug)
        for text in unknown_variables(option_names()):
            logger.warning(text)
        given = [*config.server, *config.prefill_server]
        count = sum(map(is_server, given))
        more = "".join(f" and those of {one}" for one in given if not is_server(one))
        url = url_of(listener, config)
        note(f"listening on {url}, in front of {count} server{'s' * (count != 1)}{more} (Ctrl-C to stop)")
        if not config.api_key and not is_loopback(listener):
            note(OPEN_TO_ALL)

        async def route() -> int:
            return await Router(config, listener).run()

        try:
            return uvloop.run(route())
        finally:
            log.flush()


def read_options(args: argparse.Namespace) -> RouterConfig:
    """Read and check the options.

    Raises:
        ConfigError: an option is not valid.
    """
    names = [field.name for field in dataclasses.fields(RouterConfig)]
    from_file = read_config(args.config, names) if args.config else {}
    flags = {name: value for name, value in vars(args).items() if name in names}
    return RouterConfig.from_options(read_environment(names) | from_file | flags)
