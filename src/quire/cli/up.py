"""Start a cluster: a router, its servers and their Redis, as a YAML file describes them.

Members that die are restarted; one whose options or model are not valid ends the cluster. Ctrl-C or 'quire down FILE'
stops all of them, after running requests have finished."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from quire.cli.options import CommandParser
from quire.cli.terminal import console, note
from quire.cluster.folder import ClusterFolder, folder_of
from quire.cluster.keeper import Keeper, Kept
from quire.cluster.place import Here, Place, log_of, write_files
from quire.cluster.screen import make_screen
from quire.cluster.spec import ClusterFile, Member, members, needs, read_cluster
from quire.curve import read_token
from quire.errors import ClusterError, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire up`."""
    parser.usage = "quire up FILE [options]"
    parser.add_argument("file", metavar="FILE", help="YAML file of the cluster, such as examples/cluster.yaml")
    parser.add_argument(
        "--restart-limit",
        type=int,
        default=20,
        metavar="N",
        help="restarts of a member within an hour before giving up (default: 20)",
    )
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="X",
        help="seconds that running requests have to finish (default: 30)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the cluster until a signal ends it; returns the exit code."""
    file = Path(args.file)
    cluster = read_cluster(file)
    with ClusterFolder(folder_of(file, cluster.name or file.stem)) as folder:
        redis = cluster.redis == "auto" and shutil.which("redis-server") is not None
        if cluster.redis == "auto" and not redis:
            note("redis-server is not installed, so servers share KV only between prefill and decode servers")
        key = folder.key()
        if cluster.cluster_key_file is not None:
            key = read_token(cluster.cluster_key_file, f"{file}: cluster_key_file").decode()
        place = _place(cluster, folder.path)
        found = members(cluster, redis=redis, key=key, hosts=place.hosts(needs(cluster)))
        check(found, folder.path)
        note(f"logs of every member: {folder.path}/NAME.log")
        return asyncio.run(_keep(cluster, found, place, folder.path, args.restart_limit, args.drain_timeout))


def check(found: Sequence[Member], folder: Path) -> None:
    """Parse every member's command line as the member will, so that errors are reported before anything starts.

    Raises:
        ConfigError: an option of a member is not valid.
    """
    for member in found:
        write_files(member, folder)
        if member.kind == "redis":
            continue
        command, *rest = (argument.replace("{folder}", str(folder)) for argument in member.arguments)
        module = importlib.import_module(f"quire.cli.{command}")
        parser = CommandParser(prog=f"quire {command}", description="")
        module.add_arguments(parser)
        try:
            module.read_options(parser.parse(rest))
        except ConfigError as error:
            raise ConfigError(f"{member.name}: {error}") from error


async def _keep(
    cluster: ClusterFile, found: Sequence[Member], place: Place, folder: Path, limit: int, drain: float
) -> int:
    """Run the members until a signal; returns the exit code.

    Raises:
        ConfigError: an option or the model of a member is not valid. ClusterError: too many members have failed.
    """
    keeper = Keeper(found, place, restart_limit=limit, drain_seconds=drain)
    screen = make_screen(console(stderr=True), f"{cluster.name or 'cluster'} of {cluster.model}", keeper.kept)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, keeper.leave)
    with screen:
        asked = await keeper.run(screen.changed)
    if invalid := next((kept for kept in keeper.kept if kept.invalid), None):  # others may say the same
        raise ConfigError(_last_words(invalid, folder))
    if not asked:
        raise ClusterError("; ".join(_last_words(kept, folder) for kept in keeper.kept if kept.state == "failed"))
    return 0


def _place(cluster: ClusterFile, folder: Path) -> Place:
    if cluster.place == "ray":
        from quire.cluster.ray_place import RayPlace

        return RayPlace(folder, cluster.host)
    return Here(folder, cluster.host)


def _last_words(kept: Kept, folder: Path) -> str:
    """Why a member has failed, with the last line that it printed: of one that is not valid, its own message."""
    log = log_of(kept.member, folder)
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    last = f": {lines[-1].removeprefix('quire: error: ').rstrip('.')}" if lines else ""
    if kept.invalid:
        return f"{kept.member.name}{last or ': an option or the model is not valid'}; see {log}"
    return f"{kept.member.name} has failed ({kept.why}{last}); see {log}"
