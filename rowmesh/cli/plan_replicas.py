"""`rowmesh plan --replicas`: what is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.synchronization import Mode, Synchronization


@dataclass(frozen=True)
class Replication:
    """Which numbers of replicas to compare, and how replicas are kept together; None is what was not given."""

    counts: str | None = None
    synchronization: Mode | None = None
    sync_every: int | None = None

    def check(self) -> None:
        """Raises ConfigurationError where an option is given that nothing uses, or that does not read."""
        if self.counts is None:
            for name, value in (("--synchronization", self.synchronization), ("--sync-every", self.sync_every)):
                if value is not None:
                    raise ConfigurationError(f"{name} is for replicas: give --replicas auto too, or a number of them")
            return
        _ = self.wanted, self.sync

    @property
    def wanted(self) -> list[int] | None:
        """The numbers of replicas, None where all are."""
        if self.counts is None or self.counts == "auto":
            return None
        parts = self.counts.split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise ConfigurationError(f"--replicas: {self.counts!r} is no number of replicas; write auto, 4 or 1,2,4")
        return [int(part) for part in parts]

    @property
    def sync(self) -> Synchronization:
        """How replicas are kept together."""
        return Synchronization(self.synchronization or "exact", 1 if self.sync_every is None else self.sync_every)
