"""Serve a model over HTTP, with an OpenAI-compatible API.

The first argument is the model unless --model names it. The port is open immediately, and requests are answered
once the model is loaded. Ctrl-C or SIGTERM lets running requests finish; a second one ends them with what they have."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.options import (
    Given,
    add_engine_options,
    add_server_options,
    given_options,
    option_names,
    unknown_variables,
)
from quire.config import EngineConfig
from quire.devices import count_gpus
from quire.errors import ConfigError, QuireError
from quire.models.hub import HUB_NAME, resolve, tokenizer_folder
from quire.server.config import ServerConfig

if TYPE_CHECKING:
    from quire.server.serve_options import ServeOptions

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire serve`."""
    parser.usage = "quire serve MODEL [options]"
    parser.add_argument("words", nargs="*", metavar="MODEL", help="folder, GGUF file, org/name on the Hub, or 'demo'")
    parser.add_argument("--inject-fault", metavar="KIND:TOKEN", help=argparse.SUPPRESS)
    add_server_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; the exit code."""
    began = time.monotonic()
    given, options = read_options(args)

    import asyncio

    from quire import log
    from quire.cli.serve_screen import make_screen
    from quire.server.processes import listening
    from quire.server.supervisor import Supervisor

    with listening(options.server) as listener:
        log.configure(options.server.log_format, options.server.debug)
        for text in unknown_variables(option_names()):
            logger.warning(text)
        screen = make_screen(options, listener, given.preset_options)
        try:
            return asyncio.run(Supervisor(options, listener, screen, began).run())
        except QuireError:
            if options.server.debug:
                logger.exception("the server failed")
            raise
        finally:
            log.flush()  # what comes after this is the last line


def read_options(args: argparse.Namespace) -> tuple[Given, ServeOptions]:
    """Read and check the options.

    Raises:
        ConfigError: an option is not valid.
        CheckpointNotFoundError: the model is neither a folder nor a name on the Hub.
    """
    if len(args.words) > 1 or (args.words and hasattr(args, "model")):
        named = [*args.words, *([args.model] if hasattr(args, "model") else [])]
        raise ConfigError(
            f"{len(named)} models were given ({', '.join(named)}); a server serves one, remove the others"
        )
    given = given_options(args, args.words[0] if args.words else None, server=True)
    server = ServerConfig.from_options(given.server)
    engine = EngineConfig.from_options(given.engine, given.preset)
    if engine.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend=external_launcher is for programs started by torchrun, not for a server; "
            "start it with --nnodes, and 'quire rank --join' on the other machines"
        )
    check_devices(engine)
    if engine.cluster_key_file is not None:  # several processes read it: one says what is wrong with it
        from quire.curve import read_token

        read_token(engine.cluster_key_file, "--cluster-key-file", quiet=True)  # the engine's process warns
    if not HUB_NAME.fullmatch(engine.model):  # that may be a download: when the model is loaded
        resolve(engine.model, engine.revision)
    if engine.tokenizer is not None and not HUB_NAME.fullmatch(engine.tokenizer):
        tokenizer_folder(engine, Path(engine.model))

    from quire.server.serve_options import ServeOptions

    return given, ServeOptions(server=server, engine=engine, origins=given.origins, fault=args.inject_fault)


def check_devices(engine: EngineConfig) -> None:
    """Check that each rank of each replica can have its own GPU, if they run on GPUs.

    Raises:
        ConfigError: there are too few.
    """
    needed = engine.replicas * engine.num_ranks
    if engine.replicas > 1 and engine.device == "cuda" and (found := count_gpus()) < needed:
        ranks = f" x {engine.num_ranks} ranks" if engine.num_ranks > 1 else ""
        raise ConfigError(
            f"data_parallel_size={engine.replicas}{ranks} needs that many GPUs, but there are {found}; lower it, or "
            "set device=cpu"
        )
