"""Limits on memory and processors of groups of processes: those of containers, batch systems and systemd.

A process is in one group of each hierarchy: version 2 has one hierarchy, version 1 one for every kind of resource. Each
group above it limits it too. A process sees them through its namespaces and mounts, so both are read:
`/proc/self/cgroup` has its paths, `/proc/self/mountinfo` says where which part of the hierarchies is mounted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 62  # what version 1 writes is a little below 2⁶³
# Version → files of limits, file of what is used, prefix of sums over groups below in `memory.stat`.
_FILES = {1: (("limit_in_bytes",), "usage_in_bytes", "total_"), 2: (("max", "high"), "current", "")}


@dataclass(frozen=True)
class ControlGroup:
    """A group that limits memory.

    Attributes:
        identity: the same for all processes of a host that are in it, whatever they see of it.
        limit_bytes: its limit, or of version 2 the mark beyond which processes are slowed down.
        left_bytes: what its processes may still take; a page cache gives way to them.
    """

    identity: str
    limit_bytes: int
    left_bytes: int


def control_groups(root: Path = Path("/")) -> list[ControlGroup]:
    """The groups that limit this process, from its own upwards; none where there are none, or nothing can be read.

    Args:
        root: of the file system that has `proc` and the mounts; another one in tests.
    """
    found = (_read(folder, version) for folder, version in _folders(root, "memory"))
    return [group for group in found if group is not None]


def processor_limit(root: Path = Path("/")) -> float | None:
    """How many cores' time the groups of this process let it use; None where nothing limits it.

    A container that may use 2 of 64 cores sees all 64, and is stopped for the rest of each period once it has used the
    time of 2.

    Args:
        root: as for `control_groups`.
    """
    limits = [_processor_limit(folder, version) for folder, version in _folders(root, "cpu")]
    return min((limit for limit in limits if limit is not None), default=None)


def _processor_limit(folder: Path, version: int) -> float | None:
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _read(folder: Path, version: int) -> ControlGroup | None:
    limits, used, prefix = _FILES[version]
    try:
        limit = min(_NO_LIMIT, *(_number(folder / f"memory.{name}") for name in limits))
        if limit == _NO_LIMIT:
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(statistics[f"{prefix}inactive_file"]) + int(statistics[f"{prefix}active_file"])
        left = max(limit - _number(folder / f"memory.{used}") + cached, 0)
        status = folder.stat()
        return ControlGroup(f"{status.st_dev}:{status.st_ino}", limit, left)
    except (OSError, ValueError, KeyError):  # the root of version 2 has no limit; folders may be sealed off
        return None


def _number(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return _NO_LIMIT  # of the high mark, which old kernels do not have
    return _NO_LIMIT if text == "max" else int(text)


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Every folder of a group of this process, with the version."""
    own = dict(_own_paths(root, controller))
    for version, top, shown in _mounts(root, controller):
        if version in own:
            path = PurePosixPath(own[version])
            inside = path.relative_to(shown) if path.is_relative_to(shown) and ".." not in path.parts else "."
            folder = top / inside
            yield folder, version
            for above in folder.parents:
                if not above.is_relative_to(top):
                    break
                yield above, version


def _own_paths(root: Path, controller: str) -> Iterator[tuple[int, str]]:
    """Version → path in its hierarchy of a controller."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, Path, str]]:
    """Version, folder, and which group of the hierarchy is there, of all hierarchies that a controller may be in."""
    for line in _lines(root / "proc/self/mountinfo"):
        here, _, kind = line.partition(" - ")
        place, kinds = [_unescaped(field) for field in here.split()], kind.split()
        if len(place) < 5 or len(kinds) < 3:
            continue
        version = {"cgroup2": 2, "cgroup": 1 if controller in kinds[2].split(",") else 0}.get(kinds[0], 0)
        if version:
            yield version, root / place[4].lstrip("/"), place[3]


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
