"""How much memory this process uses, such that the processes of a host add up to what they use together."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from rowmesh._support.control_groups import control_groups

_ROLLUP = Path("/proc/self/smaps_rollup")
_MAX_SHARE = 0.02


class MemoryGauge:
    """Measures memory now and then: the kernel walks the page tables, 7 ms a GB in small pages.

    Spends at most one fiftieth of the time on it; in between, `read` repeats what it measured last.

    Example:
        >>> MemoryGauge().read() > 1_000_000
        True
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._due_s = 0.0

    def read(self) -> int:
        """Bytes, as `used_bytes` gives them, a little old perhaps."""
        started_s = time.perf_counter()
        if not self._num_bytes or started_s >= self._due_s:
            self._num_bytes = used_bytes()
            ended_s = time.perf_counter()
            self._due_s = ended_s + (ended_s - started_s) / _MAX_SHARE
        return self._num_bytes


def used_bytes() -> int:
    """The proportional set size: a page that n processes map counts 1/n in each of them.

    Resident memory counts the shared tables of a host on every rank. It is what is returned where the
    system does not give the proportional size (other than Linux, or sealed off).
    """
    try:
        lines = _ROLLUP.read_text().splitlines()
    except OSError:
        lines = []
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return kilobytes[0] * 1024 if kilobytes else resident_bytes()


def rooms(root: Path = Path("/")) -> dict[str, int]:
    """Memory that processes may still take, by the name of the limit: "" is this host, the others its control groups.

    A page cache gives way to them, and counts as available; swap does not. Processes share what they have a name in
    common for: ranks of a host may be in one control group or have one each.

    Args:
        root: of the file system that says so; another one in tests.
    """
    return {"": psutil.virtual_memory().available} | {
        group.identity: group.left_bytes for group in control_groups(root)
    }


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: the kernel's estimate, or the rest of its control groups."""
    return min(rooms(root).values())


def resident_bytes() -> int:
    """Memory of this process, shared pages counted in full."""
    return psutil.Process().memory_info().rss
