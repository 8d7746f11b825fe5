"""How many threads of torch a rank can use: ranks of a host share its cores.

Without `OMP_NUM_THREADS` each process has a thread for every core. Several ranks on a host then have several times as
many threads as there are cores, and at the end of each operation all wait for those that did not get one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence

import psutil
import torch

from rowmesh.mesh.mesh import Mesh

logger = logging.getLogger("rowmesh")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def fair_threads(
    mine: Collection[int], of_host: Sequence[Collection[int]], *, threads_per_core: int = 1, limit: float | None = None
) -> int:
    """A rank's share of the cores that it may use; at least 1.

    Args:
        mine: numbers of the processors that this rank may run on.
        of_host: the same of every rank on its host, this one included. Ranks that are bound to cores of their own
            share none of them.
        threads_per_core: processors of a core.
        limit: the time of how many processors all of these ranks may use together.

    Example:
        >>> everything, half = range(8), range(4)
        >>> fair_threads(everything, [everything] * 2), fair_threads(half, [half, range(4, 8)])
        (4, 4)
        >>> fair_threads(everything, [everything] * 2, limit=3.0)
        1
    """
    sharing = sum(not set(mine).isdisjoint(theirs) for theirs in of_host)
    share = len(mine) // threads_per_core // max(sharing, 1)
    if limit is not None:
        share = min(share, int(limit / max(len(of_host), 1)))
    return max(share, 1)


def share_of(mesh: Mesh) -> int:
    """`fair_threads` of this rank, as the system has it."""
    from rowmesh._support import control_groups  # with rich, for which an import of tables need not wait

    logical, physical = psutil.cpu_count() or 1, psutil.cpu_count(logical=False)
    return fair_threads(
        processors(),
        [processors(pid) for pid in _pids(mesh)],
        threads_per_core=max(logical // (physical or logical), 1),
        limit=control_groups.processor_limit(),
    )


def cores_of(mesh: Mesh) -> float:
    """How many processors this rank has to itself, on average: those that it may run on, over the ranks on them."""
    from rowmesh._support import control_groups

    mine, of_host = set(processors()), [processors(pid) for pid in _pids(mesh)]
    cores = len(mine) / max(sum(not mine.isdisjoint(theirs) for theirs in of_host), 1)
    limit = control_groups.processor_limit()
    return cores if limit is None else min(cores, limit / max(len(of_host), 1))


def _pids(mesh: Mesh) -> list[int]:
    """The processes of the ranks of this host."""
    here = mesh.run.hosts[mesh.run.rank]
    return [pid for pid, host in zip(mesh.run.pids, mesh.run.hosts, strict=True) if host == here]


def processors(pid: int = 0) -> Collection[int]:
    """Numbers of the processors that a process of this host may run on, 0: this one; all where that is not known."""
    try:
        return os.sched_getaffinity(pid)
    except (AttributeError, OSError):  # not Linux, or the process is gone
        return range(os.cpu_count() or 1)


def fit_threads(mesh: Mesh) -> str | None:
    """Lowers torch's threads to this rank's share; for programs that do not choose torch's threads.

    Returns:
        The change, for the log; None where the user chose by a variable, or the threads fit.
    """
    if any(name in os.environ for name in VARIABLES):
        return None
    before, share = torch.get_num_threads(), share_of(mesh)
    if before <= share:
        return None
    torch.set_num_threads(share)
    return (
        f"{share} of torch on each rank, not {before}: ranks of a host share {len(processors())} cores; "
        "OMP_NUM_THREADS=… decides otherwise"
    )


def warn_of_threads(mesh: Mesh) -> None:
    """Logs on the first rank of each host that ranks have more threads than their share; changes nothing."""
    threads, run = torch.get_num_threads(), mesh.run
    if run.world_size == 1 or threads == 1 or run.hosts.index(run.hosts[run.rank]) != run.rank:
        return
    if threads > (share := share_of(mesh)):
        logger.warning(
            "rank %d has %d threads of torch where its share of the host's cores is %d: ranks slow each other down, "
            "often tenfold; set OMP_NUM_THREADS=%d, or call torch.set_num_threads(%d) on every rank",
            run.rank,
            threads,
            share,
            share,
            share,
        )
