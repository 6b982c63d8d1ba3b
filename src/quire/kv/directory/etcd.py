"""A directory in etcd, through its JSON gateway: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/.

Keys, all of which begin with `PREFIX`: `owner`, `n/NAME` and `b/HASH/NAME`, as in `redis.py`, but with one key for each
node that has a block. All of a node's keys are attached to its lease, and expire with it.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import os
import ssl
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

from quire.errors import ConfigError
from quire.kv.directory import masked
from quire.kv.directory.base import DirectoryError, Holders, Node, other_cluster

PREFIX = b"quire/kv/"

TIMEOUT_SECONDS = 1.0
"""Timeout of a call; no request waits for one."""

MOST_OPERATIONS = 100
"""Operations per transaction; etcd allows 128 (`--max-txn-ops`). A call with more blocks uses several."""

PASSWORD = "ETCDCTL_PASSWORD"
"""The environment variable (also etcdctl's) with the password, if the URL has none."""

UNAUTHENTICATED = 16
"""gRPC's code for a token that is unknown or has expired."""

_REFUSED = {
    "permission denied": "its user lacks permissions for a directory; grant it readwrite on the prefix quire/kv/",
    "user name is empty": "it wants a user and a password; name them as etcd://USER:PASSWORD@HOST",
}
"""etcd's messages about missing permissions, and what to do."""

OLDEST = 3, 4
"""The first version with the gateway at /v3."""

Operation = dict[str, Any]


class EtcdDirectory:
    """See `base.Directory`.

    Args:
        url: etcd://[USER[:PASSWORD]@]HOST[:PORT], or etcds:// for TLS, with `?ca=FILE` for a CA certificate.
        cluster: identifies the cluster's key.
        timeout: seconds per call.

    Raises:
        ConfigError: the URL is not valid.
    """

    def __init__(self, url: str, cluster: str, timeout: float = TIMEOUT_SECONDS) -> None:
        self._where, self._cluster = f"kv_directory {masked(url)}", cluster.encode()
        try:
            parts = urllib.parse.urlsplit(url)
            port, options = (
                parts.port or 2379,
                dict(urllib.parse.parse_qsl(parts.query, strict_parsing=bool(parts.query))),
            )
        except ValueError as error:
            raise ConfigError(f"{self._where}: {error}; such as etcd://10.0.0.1:2379") from error
        tls = parts.scheme == "etcds"
        unknown = options.keys() - ({"ca"} if tls else set())
        if not parts.hostname or parts.path.strip("/") or unknown:
            what = f"it has {', '.join(sorted(unknown))}" if unknown else "it is no such URL"
            raise ConfigError(
                f"{self._where}: {what}; allowed: etcd://[USER[:PASSWORD]@]HOST[:PORT], and with TLS "
                "etcds://[USER[:PASSWORD]@]HOST[:PORT][?ca=FILE]"
            )
        self._user = urllib.parse.unquote(parts.username or "")
        self._password = urllib.parse.unquote(parts.password or "") or os.environ.get(PASSWORD, "")
        self._token = ""  # the user's; replaced when it has expired
        to = parts.hostname, port
        self._connection: http.client.HTTPConnection
        if tls:
            context = self._tls(options.get("ca"))
            self._connection = http.client.HTTPSConnection(*to, timeout=timeout, context=context)
        else:
            self._connection = http.client.HTTPConnection(*to, timeout=timeout)
        self._leases: dict[str, str] = {}  # by node name

    def check(self) -> None:
        version = str(self._ask("/version", None).get("etcdserver", "0.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise ConfigError(f"{self._where}: etcd {version} is too old; use 3.4 or later")

    def join(self, node: Node, lease: float) -> bool:
        before = self._leases.get(node.name)
        kept = before is not None and self._ask("/v3/lease/keepalive", {"ID": before}).get("result", {}).get("TTL")
        own = before if kept else self._ask("/v3/lease/grant", {"TTL": str(math.ceil(lease))})["ID"]
        key, owner = PREFIX + b"n/" + node.name.encode(), PREFIX + b"owner"
        puts = [_range(key), _put(owner, self._cluster, own), _put(key, _record(node), own)]
        unless = _transaction([_is_absent(owner)], puts, [])
        done = self._ask("/v3/kv/txn", _transaction([_is(owner, self._cluster)], puts, [{"requestTxn": unless}]))
        if not done.get("succeeded"):
            done = done["responses"][0]["response_txn"]
            if not done.get("succeeded"):
                self._ask("/v3/lease/revoke", {"ID": own})
                raise ConfigError(other_cluster(self._where))
        self._leases[node.name] = str(own)
        return [value for _, value in _found(done["responses"][0])] == [_record(node)]

    def leave(self, node: Node) -> None:
        key = PREFIX + b"n/" + node.name.encode()
        self._ask("/v3/kv/txn", _transaction([_is(key, _record(node))], [_delete(key)], []))

    def publish(self, node: Node, blocks: Sequence[bytes]) -> bool:
        there = [_is(PREFIX + b"n/" + node.name.encode(), _record(node))]
        own = self._leases.get(node.name, "0")
        for some in _parts(blocks):
            puts = [_put(_block(each) + node.name.encode(), node.epoch.encode(), own) for each in some]
            if not self._ask("/v3/kv/txn", _transaction(there, puts, [])).get("succeeded"):
                return False
        return True

    def withdraw(self, node: Node, blocks: Sequence[bytes]) -> None:
        for some in _parts(blocks):
            keys = [_block(each) + node.name.encode() for each in some]
            each_one = [
                {"requestTxn": _transaction([_is(key, node.epoch.encode())], [_delete(key)], [])} for key in keys
            ]
            self._ask("/v3/kv/txn", _transaction([], each_one, []))

    def query(self, blocks: Sequence[bytes], needed: Sequence[bool] | None = None) -> Holders:
        found: Holders = []
        ends = iter(needed or [True] * len(blocks))
        for some in _parts(blocks):
            ranges = [_range(PREFIX + b"n/", True), *(_range(_block(each), True) for each in some)]
            names, *rows = self._ask("/v3/kv/txn", _transaction([], ranges, []))["responses"]
            nodes = {node.name: node for node in map(_node, _found(names))}
            for block, row in zip(some, rows, strict=True):
                held = [(key[len(_block(block)) :].decode(), value.decode()) for key, value in _found(row)]
                holders = [nodes[name] for name, epoch in held if name in nodes and nodes[name].epoch == epoch]
                if next(ends) and not holders:
                    return found
                found.append(holders)
        return found

    def nodes(self) -> list[Node]:
        [names] = self._ask("/v3/kv/txn", _transaction([], [_range(PREFIX + b"n/", True)], []))["responses"]
        return [_node(each) for each in _found(names)]

    def close(self) -> None:
        self._connection.close()

    def _tls(self, ca: str | None) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise ConfigError(
                f"{self._where}: ca={ca} is no file of certificates ({error.strerror or error})"
            ) from error

    def _ask(self, path: str, body: Any) -> dict[str, Any]:
        """Call the gateway, with its errors turned into ours. An expired token is replaced once."""
        if self._user and not self._token:
            self._log_in()
        status, document = self._exchange(path, body)
        if self._user and document.get("code") == UNAUTHENTICATED:
            self._log_in()
            status, document = self._exchange(path, body)
        if status != 200:
            said = str(document.get("error") or document)[:200]
            why = next((why for sign, why in _REFUSED.items() if sign in said), None)
            if why is not None:
                raise ConfigError(f"{self._where}: {why} ({said})")
            raise DirectoryError(f"{self._where} does not answer as it should (HTTP status {status}: {said})")
        return document

    def _log_in(self) -> None:
        """Get a token for the user: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/#authentication."""
        self._token = ""
        asked = {"name": self._user, "password": self._password}
        status, document = self._exchange("/v3/auth/authenticate", asked)
        if status != 200 and "not enabled" in str(document.get("error")):
            raise ConfigError(f"{self._where}: this etcd has no users; leave out USER@, or enable authentication there")
        if status != 200 or not document.get("token"):
            raise ConfigError(
                f"{self._where}: it does not accept this user and password; name them as etcd://USER:PASSWORD@HOST, or "
                f"the password in {PASSWORD}"
            )
        self._token = str(document["token"])

    def _exchange(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Send a request; returns the status and the answer, which may be an error from etcd."""
        headers = {"Authorization": self._token} if self._token else {}
        try:
            payload = None if body is None else json.dumps(body)
            self._connection.request("GET" if body is None else "POST", path, payload, headers)
            answer = self._connection.getresponse()
            said, status = answer.read(), answer.status
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next call opens a new one
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise ConfigError(
                    f"{self._where}: no TLS connection ({error}); add ?ca=FILE with its CA certificate, or use etcd://"
                ) from error
            if isinstance(error, http.client.HTTPException) and not isinstance(error, ConnectionError):
                raise ConfigError(f"{self._where}: what answers there is no etcd ({error!r}); name one") from error
            raise DirectoryError(f"{self._where} cannot be reached ({error})") from error
        with contextlib.suppress(ValueError):
            document = json.loads(said)
            if isinstance(document, dict):
                return status, document
        raise ConfigError(f"{self._where}: what answers there is no etcd (HTTP status {status}); name one")


def _parts(blocks: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (blocks[first : first + MOST_OPERATIONS] for first in range(0, len(blocks), MOST_OPERATIONS))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _block(block: bytes) -> bytes:
    return PREFIX + b"b/" + block + b"/"


def _range(key: bytes, all_below: bool = False) -> Operation:
    """The fields that name a key, or, if it ends with "/", all keys that begin with it."""
    end = {"rangeEnd": _b64(key[:-1] + bytes([key[-1] + 1]))} if all_below else {}
    return {"requestRange": {"key": _b64(key)} | end}


def _put(key: bytes, value: bytes, lease: str | None) -> Operation:
    return {"requestPut": {"key": _b64(key), "value": _b64(value), "lease": lease}}


def _delete(key: bytes) -> Operation:
    return {"requestDeleteRange": {"key": _b64(key)}}


def _is(key: bytes, value: bytes) -> Operation:
    return {"key": _b64(key), "target": "VALUE", "result": "EQUAL", "value": _b64(value)}


def _is_absent(key: bytes) -> Operation:
    return {"key": _b64(key), "target": "CREATE", "result": "EQUAL", "createRevision": "0"}


def _transaction(compare: list[Operation], success: list[Operation], failure: list[Operation]) -> dict[str, Any]:
    return {"compare": compare, "success": success, "failure": failure}


def _found(response: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """The keys and values in a range response."""
    kvs = response["response_range"].get("kvs", [])
    return [(base64.b64decode(each["key"]), base64.b64decode(each.get("value", ""))) for each in kvs]


def _record(node: Node) -> bytes:
    return f"{node.epoch}\n{node.address}".encode()


def _node(found: tuple[bytes, bytes]) -> Node:
    key, value = found
    epoch, _, address = value.decode(errors="replace").partition("\n")
    return Node(key[len(PREFIX) + 2 :].decode(errors="replace"), epoch, address)
