"""Directories of which node holds which KV blocks, by the scheme of their URL."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.kv.directory.base import Directory

SCHEMES = "redis", "rediss", "unix", "etcd", "etcds"


def open_directory(url: str, cluster: str) -> Directory:
    """The directory at a URL; nothing is asked of it yet.

    Args:
        cluster: names the cluster's key, without telling it.

    Raises:
        ConfigError: there is no such kind, or what speaks with it is not installed.
    """
    if url.partition("://")[0] not in SCHEMES:
        raise ConfigError(
            f"kv_directory {masked(url)!r} is no URL of a directory; allowed: "
            "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss:// (TLS), unix://PATH, "
            "etcd://[USER:PASSWORD@]HOST[:PORT] etcds:// (TLS) and mooncake://HOST:PORT (Mooncake Store)"
        )
    if url.startswith(("etcd:", "etcds:")):
        from quire.kv.directory.etcd import EtcdDirectory

        return EtcdDirectory(url, cluster)
    from quire.kv.directory.redis import RedisDirectory

    return RedisDirectory(url, cluster)


def masked(url: str) -> str:
    """A URL without its password."""
    scheme, found, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{found}{user + ':***' if at else ''}{at}{place}"
