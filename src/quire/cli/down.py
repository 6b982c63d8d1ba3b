"""Stop a cluster that 'quire up FILE' started, from any terminal. Running requests finish first."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.cli.terminal import note
from quire.cluster.folder import end, folder_of
from quire.cluster.spec import read_cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire down`."""
    parser.usage = "quire down FILE [options]"
    parser.add_argument("file", metavar="FILE", help="the cluster's file, as given to 'quire up'")
    parser.add_argument("--now", action="store_true", help="do not wait for running requests")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="X", help="seconds to wait (default: 120)")


def run(args: argparse.Namespace) -> int:
    """Stop the cluster; returns the exit code."""
    file = Path(args.file)
    there = end(folder_of(file, read_cluster(file).name or file.stem), args.timeout, args.now)
    note("the cluster has stopped" if there else "this cluster is not running")
    return 0
