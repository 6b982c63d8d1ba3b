"""Measure how fast KV blocks move between two processes on this machine, with each installed transport.

  quire bench transfer
  quire bench transfer --transport socket --host 10.0.0.1

what is measured, for blocks of each size:
  one        latency of one block: the median
  coalesced  many adjacent blocks, requested as one range: the best of three
  scattered  as many blocks at random places on both sides: the best of three

Every byte of the scattered blocks is compared. Figures are only meaningful on an idle machine.
Exit codes: 0 done; 1 a transport given with --transport failed, or none worked; 2 an option is invalid."""

from __future__ import annotations

import argparse
import sys
from typing import IO, TYPE_CHECKING

import msgspec

from quire.cli.bench import json_file, table_row
from quire.errors import ConfigError, QuireError
from quire.system import require_linux

if TYPE_CHECKING:
    from quire.bench.transfer import Figures

HEADINGS = "transport", "block", "one, us", "coalesced, GB/s", "scattered, GB/s"
WIDTHS = -13, 8, 9, 15, 15
"""Of the table's columns; a negative one is flush left."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire bench transfer`."""
    parser.usage = "quire bench transfer [options]"
    parser.add_argument(
        "--transport",
        metavar="NAME,...",
        help="which to measure: shared_memory, socket, mooncake, nixl (default: those installed)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this machine, for transports that listen at one (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="one JSON line per row, as well as the table or instead"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 1 if a requested transport failed, or none worked."""
    require_linux("quire bench transfer")
    names = _names(args.transport)
    from quire.bench.transfer import devices
    from quire.curve import Address

    Address(args.host, 0).resolved("--host")

    with json_file(args.json) as lines:
        to = sys.stderr if lines is sys.stdout else sys.stdout
        for what, found in devices():
            print(f"{what}: {found}", file=to)
        print(f"\n{table_row(HEADINGS, WIDTHS)}", file=to, flush=True)
        failed = [name for name in names if not _measure(name, args.host, to, lines)]
    return int(len(failed) == len(names) or bool(failed and args.transport))


def _names(given: str | None) -> list[str]:
    from quire.kv.transport import TRANSPORTS, installed

    if given is None:
        return installed()
    names = list(dict.fromkeys(given.split(",")))
    for name in names:
        if name not in TRANSPORTS:
            raise ConfigError(f"--transport {name!r}: unknown transport; known: {', '.join(TRANSPORTS)}")
    return names


def _measure(name: str, host: str, to: IO[str], lines: IO[str] | None) -> bool:
    """Measure and print one transport; False if it failed, with a message."""
    from quire.bench.transfer import BLOCKS, measure
    from quire.cli.terminal import loading, visible

    try:
        with loading(name) as on_load:
            rows = []
            for row in measure(name, host):
                rows.append(row)
                if on_load:
                    on_load(f"blocks of {size(row.block)}", len(rows) / len(BLOCKS))
    except QuireError as error:
        print(f"{name}: {visible(' '.join(str(error).split()))}", file=to, flush=True)
        return False
    for row in rows:
        print(table_row(_texts(row), WIDTHS), file=to, flush=True)
        if lines:
            lines.write(msgspec.json.encode(row).decode() + "\n")
    return True


def _texts(row: Figures) -> tuple[str, ...]:
    rates = f"{row.coalesced_gb_s:.2f}", f"{row.scattered_gb_s:.2f}"
    return row.transport, size(row.block), f"{row.one_us:,.0f}", *rates


def size(count: int) -> str:
    """A block size, such as "128 KiB"."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
