"""Directories of which node has which KV blocks, chosen by the scheme of their URL."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.kv.directory.base import Directory, masked

SCHEMES = "redis", "rediss", "unix"


def open_directory(url: str, cluster: str) -> Directory:
    """Make the directory at a URL, without connecting to it yet.

    Args:
        cluster: identifies the cluster's key without revealing it.

    Raises:
        ConfigError: the scheme is unknown, or the client library is not installed.
    """
    if url.partition("://")[0] not in SCHEMES:
        raise ConfigError(
            f"kv_directory {masked(url)!r} is not the URL of a directory; allowed: "
            "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss:// (TLS), unix://PATH "
            "and mooncake://HOST:PORT (Mooncake Store)"
        )
    from quire.kv.directory.redis import RedisDirectory

    return RedisDirectory(url, cluster)
