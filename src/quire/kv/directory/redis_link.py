"""A connection to Redis or Valkey, with short timeouts and errors that say what to do."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Any

from quire.errors import ConfigError
from quire.kv.directory.base import DirectoryError, masked

PASSWORD = "REDISCLI_AUTH"
"""The environment variable (also redis-cli's) with the password, if the URL has none."""

TIMEOUT_SECONDS = 1.0
"""Timeout of a command; no request waits for one."""

OLDEST = 6
"""The first version with users (ACL) and TLS."""


class RedisLink:
    """A redis-py client.

    Args:
        url: the server's URL, in redis-py's format.
        option: the option that gave it, for error messages.
        timeout: seconds per command.

    Raises:
        ConfigError: the URL is not valid, or redis-py is not installed.
    """

    def __init__(self, url: str, option: str, timeout: float = TIMEOUT_SECONDS) -> None:
        self.where = f"{option} {masked(url)}"
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError(f"{self.where} needs redis-py ({error}): pip install '.[redis]'") from error
        self._known = redis.exceptions
        options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        try:
            self.client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
            known = self.client.connection_pool.connection_kwargs
            if password := os.environ.get(PASSWORD):
                known.setdefault("password", password)
            self.client.connection_pool.make_connection()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self.where}: {error}; such as redis://10.0.0.1:6379/0") from error

    def check(self) -> None:
        """Check that the server can be used.

        Raises:
            DirectoryError, ConfigError: see `call`.
        """
        version = str(self.call(lambda: self.client.info("server")).get("redis_version", "0"))
        if int(version.partition(".")[0]) < OLDEST:
            raise ConfigError(f"{self.where}: Redis {version} is too old; use {OLDEST}.0 or later, or Valkey")

    def call(self, call: Callable[[], Any]) -> Any:
        """The result of a command, with redis-py's errors turned into ours.

        Raises:
            DirectoryError: the server does not answer now. ConfigError: it never will, as it is configured.
        """
        known = self._known
        try:
            return call()
        except known.AuthenticationError as error:
            why = "it does not accept this user and password", "name them as redis://USER:PASSWORD@HOST"
            raise self._refused(error, *why) from error
        except known.NoPermissionError as error:
            why = "its user lacks permissions for a directory", "allow it '~quire:* +@read +@write +@scripting +info'"
            raise self._refused(error, *why) from error
        except known.InvalidResponse as error:
            raise self._refused(error, "the server there is not a Redis", "name one") from error
        except known.ConnectionError as error:
            if isinstance(error.__context__, ssl.SSLError):
                why = "no TLS connection", "add ?ssl_ca_certs=FILE with its CA certificate"
                raise self._refused(error.__context__, *why) from error
            raise DirectoryError(f"{self.where} cannot be reached ({error})") from error
        except (known.RedisError, OSError) as error:
            raise DirectoryError(f"{self.where} does not answer as it should ({error})") from error

    def _refused(self, error: Exception, what: str, help: str) -> ConfigError:
        said = str(error).rstrip(".")
        if said.startswith("HELLO"):  # a long explanation of its protocol
            said = "it asks for one"
        return ConfigError(f"{self.where}: {what} ({said}); {help}")
