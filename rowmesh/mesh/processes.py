"""The states of the processes of this host: alive, stopped or gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from rowmesh.errors import PeerError

State = Literal["alive", "stopped", "gone"]


def state_of(pid: int) -> State:
    """The state of a process: "stopped" by SIGSTOP, Ctrl-Z or a debugger; a zombie that is not reaped yet is "gone".

    Where there is no /proc, a stopped process looks alive.

    Example:
        >>> import os
        >>> state_of(os.getpid())
        'alive'
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "gone" if Path("/proc/self/stat").exists() or not psutil.pid_exists(pid) else "alive"
    except ProcessLookupError:  # it ended while it was read
        return "gone"
    except OSError:
        return "alive"
    letter = stat.rpartition(")")[2].split()[0]
    return "gone" if letter in "ZX" else "stopped" if letter in "Tt" else "alive"


@dataclass(frozen=True)
class RankProcesses:
    """The processes of all ranks of a run, as one of them sees those of its host; others cannot be seen.

    Attributes:
        rank: the one that looks.
        hosts: the index of the host of every rank.
        pids: the process of every rank, on its host.

    Example:
        >>> import os
        >>> RankProcesses(rank=0, hosts=(0, 1), pids=(os.getpid(), 7)).describe([1])
        'rank 1 (process 7 on another host)'
    """

    rank: int
    hosts: tuple[int, ...]
    pids: tuple[int, ...]

    def seen(self, state: State) -> list[int]:
        """Other ranks on this host whose process is in a state."""
        here = self.hosts[self.rank]
        return [
            rank
            for rank, (host, pid) in enumerate(zip(self.hosts, self.pids, strict=True))
            if host == here and rank != self.rank and state_of(pid) == state
        ]

    def describe(self, ranks: Sequence[int]) -> str:
        """Ranks with their processes, and what is seen of them; a part of a message."""
        here, names = self.hosts[self.rank], []
        for rank in ranks:
            seen = " on another host"
            if self.hosts[rank] == here:
                state = state_of(self.pids[rank])
                seen = f", {state}"
                if state == "stopped":
                    seen += f": `kill -CONT {self.pids[rank]}` continues it"
            names.append(f"rank {rank} (process {self.pids[rank]}{seen})")
        return ", ".join(names)

    def died(self, dead: Sequence[int], doing: str) -> PeerError:
        """The error for ranks whose process is gone."""
        names = ", ".join(f"rank {rank} (process {self.pids[rank]})" for rank in dead)
        return PeerError(
            f"rank {self.rank}: {names} died while {doing}; its own output says why, unless it came to its end: all "
            "ranks must take part equally often"
        )
