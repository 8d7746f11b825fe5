"""Lease: keys of one process on a Redis server, which it alone uses, and which go when it has ended.

rowmesh:leases          a set: the prefixes of all that use the server
PREFIX                  who it is; gone `LEASE_S` after it last asked the server for something
PREFIX:keys             a set: what it has there
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rowmesh.tables.dynamic.stores.redis_connection import RedisConnection

LEASE_S = 4 * 3600
"""How long a process may be silent before others remove its keys."""
_RENEW_S = 60.0
_LEASES = "rowmesh:leases"


class Lease:
    """A prefix that no other process has. Making one first removes the keys of processes that have ended.

    A process of this host has ended when it is not there any more, however long it has been silent; one of another host
    when its lease has run out.

    Args:
        connection: to the server.

    Attributes:
        prefix: of the keys.
        holder: who holds the lease, as it is written by `prefix`.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self._connection, self._noted = connection, set[str]()
        self.prefix = f"rowmesh:{uuid.uuid4().hex[:16]}"
        own = psutil.Process()
        self.holder = json.dumps({"host": _host(), "process": own.pid, "started": own.create_time()}).encode()
        self._renewed_s = time.monotonic()
        self._remove_ended()

        def take(pipe: Any) -> None:
            pipe.sadd(_LEASES, self.prefix)
            pipe.set(self.prefix, self.holder, ex=LEASE_S)

        connection.pipeline(take)

    def note(self, pipe: Any, keys: Iterable[str]) -> None:
        """Adds commands to a pipeline: they keep the lease, and say that it has some keys. `noted` follows."""
        if time.monotonic() >= self._renewed_s + _RENEW_S:
            pipe.expire(self.prefix, LEASE_S)  # one that was taken away stays away
        if new := set(keys) - self._noted:
            pipe.sadd(f"{self.prefix}:keys", *new)

    def noted(self, keys: Iterable[str]) -> None:
        """Says that the server has what `note` was to tell it."""
        if (now_s := time.monotonic()) >= self._renewed_s + _RENEW_S:
            self._renewed_s = now_s
        self._noted.update(keys)

    def release(self) -> None:
        """Removes all, if the server answers now; else another process will."""
        with suppress(Exception):
            self._connection.once(lambda client: _remove(client, self.prefix))

    def _remove_ended(self) -> None:
        names = [name.decode() for name in self._connection.call(lambda client: client.smembers(_LEASES))]
        holders = self._connection.call(lambda client: client.mget(names)) if names else []
        for name, holder in zip(names, holders, strict=True):
            if holder is None or _has_ended(holder):
                self._connection.call(lambda client, name=name: _remove(client, name))


def _remove(client: Any, prefix: str) -> None:
    """Removes all keys of a lease, its name last, so that what fails halfway is done again."""
    keys = client.smembers(f"{prefix}:keys")
    client.unlink(prefix, *keys)
    client.unlink(f"{prefix}:keys")
    client.srem(_LEASES, prefix)


def _has_ended(holder: bytes) -> bool:
    """Whether a process of this host is not there any more; False for other hosts, which cannot be asked."""
    try:
        about = json.loads(holder)
        if about["host"] != _host():
            return False
        return abs(psutil.Process(about["process"]).create_time() - about["started"]) > 1.0
    except psutil.NoSuchProcess:
        return True
    except (ValueError, KeyError, TypeError, psutil.Error):
        return False


def _host() -> str:
    """The host since it was started, and what numbers its processes: a container has numbers of its own."""
    facts = [platform.node()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - no path, but a name
    return " ".join(facts)
