"""RedisConnection: calls of a Redis server, for records and for publishing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rowmesh._support import extras
from rowmesh._support.files.secrets import HIDDEN
from rowmesh.errors import ConfigurationError, StoreError
from rowmesh.tables.dynamic.stores.retry import Retry

_TIMEOUT_S = 10.0  # for a connection, and for an answer


class RedisConnection:
    """A client whose calls are retried, and whose errors name the server without its password.

    Args:
        url: of the server, `redis://[user:password@]host:port/database`, or `rediss://` for TLS; with the parameters
            that the package redis knows (`?ssl_ca_certs=…`).
        retry: for what may pass: a connection that is refused or lost, a server that loads its data or is replaced.

    Attributes:
        name: of the server, for errors.

    Raises:
        ConfigurationError: the package redis is not installed, the URL cannot be used, or the server throws keys away
            when its memory is full.
        StoreError: the server does not answer.
    """

    def __init__(self, url: str, retry: Retry | None = None) -> None:
        self._redis = extras.load("redis", "redis", "Redis is used")
        backoff = extras.load("redis.backoff", "redis", "Redis is used")
        retries = extras.load("redis.retry", "redis", "Redis is used")
        once = retries.Retry(backoff.NoBackoff(), 0)  # trying again is done here
        timeouts = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
        try:
            self._client: Any = self._redis.Redis.from_url(url, retry=once, **timeouts)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"the URL of a Redis server cannot be used: {error}") from error
        options = self._client.connection_pool.connection_kwargs
        place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self.name = f"Redis {place}/{options.get('db', 0)}"
        self._retry, self._password = retry or Retry(), options.get("password")
        if self._password == HIDDEN:
            raise ConfigurationError(
                f"{self.name}: the password stands as {HIDDEN} where it was written down; give the URL again, with the "
                "password in a variable of the environment: redis://:$NAME@…"
            )
        self._check_policy()

    def _check_policy(self) -> None:
        try:
            memory = self.call(lambda client: client.info("memory"))
        except StoreError as error:
            if isinstance(error.__cause__, self._redis.exceptions.NoPermissionError):
                return  # a user who may not ask
            raise
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory", 0) and policy != "noeviction":
            raise ConfigurationError(
                f"{self.name} throws keys away when its memory is full (maxmemory-policy {policy}), and records would "
                "be lost; set maxmemory-policy to noeviction, or take another server"
            )

    def call(self, operation: Callable[[Any], Any]) -> Any:
        """Runs what may be repeated, with a client.

        Raises:
            StoreError: the server does not answer, or refuses; names it.
        """
        try:
            return self._retry(lambda: operation(self._client), self._may_pass, self.name)
        except StoreError as error:
            raise StoreError(self._without_password(str(error))) from error.__cause__
        except self._redis.RedisError as error:
            raise StoreError(self._without_password(f"{self.name} refused: {error}")) from error

    def once(self, operation: Callable[[Any], None]) -> None:
        """Runs what need not succeed, with a client; errors are those of the package."""
        operation(self._client)

    def pipeline(self, fill_in: Callable[[Any], None]) -> list[Any]:
        """Sends commands together, which may be repeated; returns the answers."""

        def run(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                fill_in(pipe)
                return pipe.execute()

        return self.call(run)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _may_pass(self, error: Exception) -> bool:
        away = (self._redis.ConnectionError, self._redis.TimeoutError, self._redis.exceptions.ReadOnlyError)
        return isinstance(error, away) and not isinstance(error, self._redis.AuthenticationError)

    def _without_password(self, text: str) -> str:
        return text.replace(self._password, "***") if self._password else text
