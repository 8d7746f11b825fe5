"""Joining a run: ranks that connect, their hosts and processes, and which of them died or stayed away."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from rowmesh.errors import PeerError, Terminated
from rowmesh.mesh.groups import extend_timeout
from rowmesh.mesh.interruptible import LOOK_S, run_interruptibly
from rowmesh.mesh.peers import Peers
from rowmesh.mesh.plain import decode, encode
from rowmesh.mesh.processes import state_of

CERTAIN_S = 1.0
"""A process that is gone for so long did not leave something that it had finished."""


def join(timeout_s: float) -> None:
    """Makes the default process group of the run that torchrun's variables describe. Collective and blocking.

    Raises:
        PeerError: not all ranks came within the timeout, or one died, or SIGTERM came; names those that are missing.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    failed = f"rank {rank} of {world_size} could not join at {address} within {timeout_s:.0f} s"
    limit = timedelta(seconds=timeout_s)
    try:
        store, _, _ = run_interruptibly(lambda: next(iter(rendezvous("env://", timeout=limit))))
        store = PrefixStore(f"{_attempt()}default_pg", store)
        arrivals = Arrivals(store, rank, world_size)
    except (RuntimeError, ValueError) as error:
        raise PeerError(f"{failed}: {error}") from error
    try:
        run_interruptibly(
            lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit),
            arrivals.check_alive,
        )
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError(f"{failed}: {arrivals.missing_text() or error}") from error
    except Terminated as stop:
        if text := arrivals.missing_text():
            raise PeerError(f"rank {rank}: SIGTERM came while ranks joined; {text}") from stop
        raise
    extend_timeout(dist.group.WORLD, timeout_s)


def meet(group: Any, timeout_s: float) -> list[tuple[str, int]]:
    """The host and the process of every rank of the default process group. Collective and blocking.

    Raises:
        PeerError: a rank did not come within the timeout, or died; names it.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    failed = (
        f"rank {rank} of {world_size}: the ranks met but not all of them sent their host within {timeout_s:.0f} s; "
        "every rank must call Mesh.connect"
    )
    arrivals, deadline = Arrivals(_get_default_store(), rank, world_size), time.monotonic() + timeout_s

    def look() -> None:
        arrivals.check_alive()
        if time.monotonic() > deadline:
            raise PeerError(f"{failed}: {arrivals.missing_text()}")

    try:
        peers = Peers(group, lambda call, _: run_interruptibly(call, look))
        everyone = peers.gather([host_identity(), os.getpid()], "joining")
    except RuntimeError as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError(f"{failed}: {arrivals.missing_text() or error}") from error
    return [_host_and_pid(each) for each in everyone]


class Arrivals:
    """Ranks that came: every rank writes its host and process into the store through which ranks meet.

    Args:
        store: that one; a copy of it is used, since a store serves one thread at a time.
        rank: this one, which is written down.
        world_size: how many there will be.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank = store.clone(), rank
        self._keys = [f"rowmesh/arrived/{other}" for other in range(world_size)]
        self._seen: dict[int, tuple[str, int]] = {}
        self._dead_since: float | None = None
        self._next_look = 0.0
        self._store.set(self._keys[rank], encode([host_identity(), os.getpid()]).decode())

    def missing(self) -> list[int]:
        """Ranks that have not come."""
        absent = [rank for rank in range(len(self._keys)) if rank not in self._seen]
        if absent and time.monotonic() >= self._next_look:
            written: dict[int, bytes] = {}
            with contextlib.suppress(RuntimeError):  # the rank that holds the store may be gone
                for rank in absent:
                    if self._store.check([self._keys[rank]]):
                        written[rank] = self._store.get(self._keys[rank])
            self._seen |= {rank: decode(text, rank, "joining", _host_and_pid) for rank, text in written.items()}
            absent = [rank for rank in absent if rank not in self._seen]
            self._next_look = time.monotonic() + LOOK_S * (1 + len(absent) // 64)  # of many, it takes a while
        return absent

    def dead(self) -> list[int]:
        """Ranks of this host that came and are gone."""
        self.missing()
        here = host_identity()
        return [rank for rank, (host, pid) in self._seen.items() if host == here and state_of(pid) == "gone"]

    def check_alive(self) -> None:
        """Raises PeerError where a rank of this host is gone, and was when this was called a while ago."""
        dead = self.dead()
        if not dead:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > CERTAIN_S:
            raise PeerError(f"rank {self._rank}: {self._died(dead)}")

    def missing_text(self) -> str:
        """Which ranks are gone, or never came; empty where none is."""
        dead, missing = self.dead(), self.missing()
        if dead:
            return self._died(dead)
        return f"{_names(missing)} did not come; its own output says why" if missing else ""

    def _died(self, dead: Sequence[int]) -> str:
        names = ", ".join(f"rank {rank} (process {self._seen[rank][1]})" for rank in dead)
        return f"{names} died while joining; its own output says why"


def _attempt() -> str:
    """Set apart in the store what ranks write under torchrun: of workers that it restarts the store is the same one.

    Else ranks would find the addresses and processes of those before, which are gone.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"attempt_{restarts}_of_{os.environ['WORLD_SIZE']}/" if restarts else ""


def host_identity() -> str:
    """Equal for two processes of one host, which can map each other's memory: one kernel, user and namespaces.

    The network namespace counts although memory could be shared across it: containers that have networks of their own
    talk to each other through links that placement must see.
    """
    parts = [socket.gethostname(), str(os.getuid()) if hasattr(os, "getuid") else ""]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/net"):
        try:
            parts.append(str(Path(path).readlink()) if "ns" in path else Path(path).read_text().strip())
        except OSError:
            parts.append("")
    return "/".join(parts)


def _host_and_pid(values: Any) -> tuple[str, int]:
    host, pid = values
    if not (isinstance(host, str) and isinstance(pid, int)):
        raise TypeError("no host and process")
    return host, pid


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(f"rank {rank}" for rank in ranks[:8])
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
