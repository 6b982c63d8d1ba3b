"""Join an engine on another machine with ranks on this one; when it ends, wait for the next engine.

Start the engine with '--nnodes', '--master-addr' and '--token-file', a file that is the same on all machines. Options
come from the engine; the checkpoint is read from this machine, and must be the same."""

from __future__ import annotations

import argparse
import os
import sys

from quire.errors import ConfigError
from quire.system import require_linux

MOST_RANKS = 255
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire rank`."""
    parser.usage = "quire rank --join HOST:PORT --token-file FILE [options]"
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="the engine's master_addr and master_port")
    parser.add_argument(
        "--token-file", required=True, metavar="FILE", help="the same secret as the engine's token_file"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks on this machine (default: the same number on all machines)"
    )
    parser.add_argument(
        "--model", metavar="DIR", help="folder of the checkpoint on this machine (default: as on the engine's)"
    )
    parser.add_argument("--once", action="store_true", help="exit when the engine ends")


def run(args: argparse.Namespace) -> int:
    """Serve engines until a signal ends it."""
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks {args.ranks} is out of range; allowed: from 1 to {MOST_RANKS}")

    require_linux("quire rank")
    from quire.curve import Address, read_token
    from quire.engine.joining import Joining
    from quire.models.hub import resolve

    address, token = Address.read(args.join, "--join"), read_token(args.token_file, "--token-file")
    model = "" if args.model is None else str(resolve(args.model).absolute())
    joining = Joining(
        address, token, args.ranks or 0, model, lambda what: print(f"quire rank: {what}", file=sys.stderr)
    )
    try:
        joining.run_once()
        while not args.once:
            joining.run_once()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        os._exit(INTERRUPTED)  # ZeroMQ might wait for what was interrupted; the ranks have ended, or do now
    return 0
