"""Reads a cluster file and turns it into a list of processes, the cluster's members:

model: demo
options: {max_num_seqs: 16}         # of every server, by the names of `quire serve`
redis: auto                         # start one where it is installed; off; or the URL of one that runs
router: {port: 8000}                # and any option of `quire route`
servers:
  - {role: prefill, port: 8010}
  - {role: decode, port: 8020, count: 2, options: {host_kv_memory: 256MiB}}
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import UNSET

from quire.errors import ConfigError
from quire.kv.directory import SCHEMES
from quire.kv.directory.base import masked
from quire.server.processes import host_and_port
from quire.typed_json import mismatch
from quire.yaml_file import read_yaml

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of clusters, which are names of folders, too."""

MAX_COUNT = 256
"""Largest `count` of an entry of `servers`."""

KEY_FILE = "{folder}/cluster.key"
"""Path of the cluster's key, for each member."""

ROLES = ("prefill", "decode", "both")
REDIS_PORT = 6390
"""Default port of a cluster's own Redis; not Redis' usual one, which may be in use on this machine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a cluster.

    Attributes:
        name: unique in the cluster: "router", "decode-1", "redis".
        kind: "router", "server" or "redis".
        arguments: of the command `quire`, or of `redis-server` for "redis".
        files: contents by file name. They are written into the cluster's folder on its machine before it starts,
            readable only by this user. "{folder}" in arguments and files stands for that folder.
        host, port, scheme: where it listens, and whether by http, https or redis.
    """

    name: str
    kind: str
    arguments: tuple[str, ...]
    host: str
    port: int
    scheme: str = "http"
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def url(self) -> str:
        """Its URL."""
        return f"{self.scheme}://{host_and_port(self.host, self.port)}"


class Servers(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An entry of `servers`: servers that differ only in their ports, which are `port`, `port` + 1 and so on.

    Attributes:
        cpus, gpus: what Ray reserves for each.
    """

    port: int
    role: str | None = None
    count: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    options: dict[str, Any] = {}


class ClusterFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A cluster file.

    Attributes:
        model: the model of every server.
        name: the cluster's name; default: the file's.
        host: address at which all members listen.
        place: "processes" (on this machine) or "ray" (wherever Ray finds room).
        redis: "auto", "off", or the URL of a running one. redis_port: port of the one that "auto" starts.
        cluster_key_file: file with the key of all servers that share KV; default: a new one in the cluster's folder.
        options: options of every server. router: options of the router.
    """

    model: str
    servers: list[Servers]
    name: str | None = None
    host: str = "127.0.0.1"
    place: str = "processes"
    redis: str | bool = "auto"
    redis_port: int = REDIS_PORT
    cluster_key_file: str | None = None
    options: dict[str, Any] = {}
    router: dict[str, Any] = {}


def read_cluster(path: Path) -> ClusterFile:
    """Read and check a cluster file.

    Raises:
        ConfigError: the file cannot be read, or is not valid.
    """
    content = read_yaml(path, str(path), "a cluster file")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold 'name: value' lines such as 'model: demo'; see examples/cluster.yaml")
    _check_names(path, content, ClusterFile, "")
    for index, servers in enumerate(content["servers"] if isinstance(content.get("servers"), list) else []):
        if isinstance(servers, dict):
            _check_names(path, servers, Servers, f"servers[{index}]: ")
    try:
        found = msgspec.convert(content, ClusterFile)
    except msgspec.ValidationError as error:
        wrong = mismatch(error, ClusterFile, content)
        fault = "is missing; it" if wrong.missing else f"is {wrong.value!r:.80}; it" if wrong.value is not UNSET else ""
        text = " ".join(filter(None, [wrong.path, fault, f"must be {wrong.allowed}"]))
        raise ConfigError(f"{path}: {text}; see examples/cluster.yaml") from error
    _check(path, found)
    return found


def _check_names(path: Path, given: Mapping[Any, Any], kind: type[msgspec.Struct], where: str) -> None:
    for name in given:
        if name not in kind.__struct_fields__:
            near = difflib.get_close_matches(str(name), kind.__struct_fields__, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(kind.__struct_fields__)}"
            raise ConfigError(f"{path}: {where}unknown name {name!r}; {hint}")


def _check(path: Path, cluster: ClusterFile) -> None:
    """Refuse what the types allow, but no cluster could be started from."""
    if cluster.name is not None and not NAME.fullmatch(cluster.name):
        raise ConfigError(f"{path}: name={cluster.name!r:.80}; allowed: up to 64 letters, digits and ._-")
    if cluster.place not in ("processes", "ray"):
        raise ConfigError(f"{path}: place={cluster.place!r}; allowed: processes, ray")
    if not (cluster.redis in ("auto", False, "off") or str(cluster.redis).partition("://")[0] in SCHEMES):
        shown = masked(cluster.redis) if isinstance(cluster.redis, str) else cluster.redis
        raise ConfigError(f"{path}: redis={shown!r:.80}; allowed: auto, off, or a URL such as redis://127.0.0.1:6379")
    _check_options(str(path), cluster.options)
    if not cluster.servers:
        raise ConfigError(f"{path}: servers is empty; add one, such as '- port: 8010'")
    for index, servers in enumerate(cluster.servers):
        where = f"{path}: servers[{index}]"
        if servers.role is not None and servers.role not in ROLES:
            raise ConfigError(f"{where}: role={servers.role!r}; allowed: {', '.join(ROLES)}, or none at all")
        if not 1 <= servers.count <= MAX_COUNT:
            raise ConfigError(f"{where}: count={servers.count}; allowed: 1 to {MAX_COUNT}")
        _check_options(where, servers.options)
    if all(servers.role == "prefill" for servers in cluster.servers):
        raise ConfigError(
            f"{path}: every server has role=prefill, so none could answer requests; add one with role=decode"
        )
    taken: dict[int, str] = {}
    for name, port in _ports(cluster):
        if not 1 <= port <= 65535:
            raise ConfigError(f"{path}: {name} would listen on port {port}; allowed: 1 to 65535")
        if port in taken:
            raise ConfigError(
                f"{path}: {taken[port]} and {name} would both listen on port {port}; give one another port"
            )
        taken[port] = name


def _check_options(where: str, options: Mapping[str, Any]) -> None:
    for name in ("uds", "ssl_certfile", "ssl_keyfile", "root_path"):
        if name in options:
            raise ConfigError(
                f"{where}: options must not have {name}: the router reaches servers by host and port, over plain HTTP"
            )
    for name in ("port", "host", "kv_role", "role", "model"):
        if name in options:
            raise ConfigError(
                f"{where}: options must not have {name}; write it beside options, or into an entry of servers"
            )


def _ports(cluster: ClusterFile) -> Iterator[tuple[str, int]]:
    yield "router", _router_port(cluster)
    if cluster.redis == "auto":
        yield "redis", cluster.redis_port
    for name, servers, number in _servers(cluster):
        yield name, servers.port + number


def _router_port(cluster: ClusterFile) -> int:
    port = cluster.router.get("port", 8000)
    if not isinstance(port, int):
        raise ConfigError(f"router: port={port!r} is not a whole number")
    return port


def _servers(cluster: ClusterFile) -> Iterator[tuple[str, Servers, int]]:
    """Every server: its name, its entry, and its index in that entry."""
    numbers: dict[str, int] = {}
    for servers in cluster.servers:
        role = servers.role or "server"
        for number in range(servers.count):
            yield f"{role}-{numbers.setdefault(role, 0)}", servers, number
            numbers[role] += 1


@dataclasses.dataclass(frozen=True)
class Need:
    """What a server needs on the machine that it runs on."""

    name: str
    cpus: float
    gpus: float


def needs(cluster: ClusterFile) -> list[Need]:
    """The needs of every server, by name."""
    return [Need(name, servers.cpus, servers.gpus) for name, servers, _ in _servers(cluster)]


def members(cluster: ClusterFile, *, redis: bool, key: str, hosts: Mapping[str, str]) -> list[Member]:
    """The cluster's processes, in the order in which they start.

    Args:
        redis: whether to start a Redis if the file says "auto".
        key: the key of all servers that share KV.
        hosts: the address at which each server listens, by name; router and Redis listen at the cluster's `host`.
    """
    found: list[Member] = []
    directory = cluster.redis if isinstance(cluster.redis, str) and "://" in cluster.redis else None
    if redis and cluster.redis == "auto":
        found.append(_redis(cluster))
        directory = found[0].url
    servers = [(name, entry, hosts[name], entry.port + number) for name, entry, number in _servers(cluster)]
    urls = {name: f"http://{host_and_port(host, port)}" for name, _, host, port in servers}
    prefill = [urls[name] for name, entry, _, _ in servers if entry.role == "prefill"]
    for name, entry, host, port in servers:
        own: dict[str, Any] = {"model": cluster.model, "host": host, "port": port}
        if role := entry.role or (directory and "both"):
            own |= {"kv_role": role, "kv_host": host, "cluster_key_file": KEY_FILE}
        if entry.role in ("decode", "both") and prefill:
            own["prefill_url"] = ",".join(prefill)
        if directory is not None:
            own["kv_directory"] = directory
        found.append(_member(name, "server", "serve", own | cluster.options | entry.options, key))
    others = [url for url in urls.values() if url not in prefill]
    router = {"host": cluster.host, "port": _router_port(cluster), "server": others}
    if prefill:
        router["prefill_server"] = prefill
    found.append(_member("router", "router", "route", router | cluster.router, key))
    return found


def _redis(cluster: ClusterFile) -> Member:
    """A Redis without persistence: servers publish its contents again after a restart."""
    lines = [f"bind {cluster.host}", f"port {cluster.redis_port}", 'save ""', "appendonly no", "maxmemory 256mb"]
    return Member(
        name="redis",
        kind="redis",
        arguments=("{folder}/redis.conf",),
        files={"redis.conf": "\n".join(lines) + "\n"},
        host=cluster.host,
        port=cluster.redis_port,
        scheme="redis",
    )


def _member(name: str, kind: str, command: str, options: Mapping[str, Any], key: str) -> Member:
    """A member that is a `quire` command with a configuration file."""
    return Member(
        name=name,
        kind=kind,
        arguments=(command, "--config", f"{{folder}}/{name}.yaml"),
        files={f"{name}.yaml": yaml.safe_dump(dict(options), sort_keys=False)} | _key_file(options, key),
        host=options["host"],
        port=options["port"],
        scheme="https" if options.get("ssl_certfile") else "http",
    )


def _key_file(options: Mapping[str, Any], key: str) -> dict[str, str]:
    return {"cluster.key": f"{key}\n"} if options.get("cluster_key_file") == KEY_FILE else {}
