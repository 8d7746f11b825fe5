"""Named points in the code at which tests let things fail, so that no test of a fault depends on when it strikes.

    reach("checkpoint.write_rows")        # in the code; costs one comparison where nothing is armed

A test arms points in its own process (`arm`) or, for commands and ranks that it starts, by the environment:

    ROWMESH_FAULTS="checkpoint.write_rows=ENOSPC; loop.step@3,rank1=kill" rowmesh train …

A fault is `POINT[@N][,rankR]=ACTION`: the N-th time (from 1; without it every time) that a process, or rank R alone,
reaches the point. Actions: an errno's name raises that OSError; `kill` and `stop` send SIGKILL and SIGSTOP to the
process, and a signal's name, such as `SIGTERM`, that one; `exit` ends it at once with status 7; `raise` raises
RuntimeError; `note:PATH` adds a line to a file, with the point, the process and times; `hold:PATH` makes the file PATH
and waits until PATH with `.go` behind it exists, so that a test acts at exactly this point.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ROWMESH_FAULTS"
_PATTERN = re.compile(r"(?P<point>[\w.]+)(?:@(?P<at>\d+))?(?:,rank(?P<rank>\d+))?=(?P<action>.+)")
_HOLD_S = 120.0


@dataclass
class _Fault:
    point: str
    at: int | None
    rank: str | None
    action: Callable[[str], None]
    count: int = 0


_armed: list[_Fault] = []


def reach(point: str, path: Path | str = "") -> None:
    """Marks that the code has come to `point`; does nothing unless a fault is armed there.

    Args:
        point: a name of the form "module.what".
        path: what is being written there, for the message of an injected OSError.
    """
    if not _armed:
        return
    for fault in _armed:
        if fault.point == point and fault.rank in (None, os.environ.get("RANK", "0")):
            fault.count += 1
            if fault.at in (None, fault.count):
                fault.action(str(path))


@contextlib.contextmanager
def arm(faults: str | None = None, *, point: str = "", action: Callable[[], None] | None = None) -> Iterator[None]:
    """Arms faults in this process for the time of a `with` block.

    Args:
        faults: as in the environment variable.
        point: together with `action`, a point at which to call a function instead.
        action: the function.
    """
    before = len(_armed)
    _armed.extend(_parse(faults or ""))
    if action is not None:
        _armed.append(_Fault(point, None, None, lambda path: action()))
    try:
        yield
    finally:
        del _armed[before:]


def _parse(text: str) -> Iterator[_Fault]:
    for part in filter(None, map(str.strip, text.split(";"))):
        found = _PATTERN.fullmatch(part)
        if found is None:
            raise ValueError(f"{VARIABLE}: {part!r} is no fault; write POINT[@N][,rankR]=ACTION")
        at = None if found["at"] is None else int(found["at"])
        yield _Fault(found["point"], at, found["rank"], _action(found["action"], found["point"]))


def _action(name: str, point: str) -> Callable[[str], None]:
    if hasattr(errno, name):
        return lambda path: _raise_os_error(getattr(errno, name), path)
    if name in signal.Signals.__members__:
        return lambda path: os.kill(os.getpid(), signal.Signals[name])
    if name.startswith("hold:"):
        return lambda path: _hold(Path(name.removeprefix("hold:")))
    if name.startswith("note:"):
        return lambda path: _note(Path(name.removeprefix("note:")), point)
    try:
        return {
            "kill": lambda path: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda path: os.kill(os.getpid(), signal.SIGSTOP),
            "exit": lambda path: os._exit(7),
            "raise": _raise,
        }[name]
    except KeyError:
        raise ValueError(f"{VARIABLE}: there is no action {name!r}") from None


def _raise_os_error(number: int, path: str) -> None:
    raise OSError(number, os.strerror(number), path or None)


def _raise(path: str) -> None:
    raise RuntimeError("injected fault")


def _note(path: Path, point: str) -> None:
    import psutil  # for this action alone

    process = psutil.Process()
    times = {"created_s": process.create_time(), "time_s": time.time()}
    line = {"point": point, "rank": os.environ.get("RANK", "0"), "pid": process.pid, **times}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _hold(path: Path) -> None:
    path.touch()
    deadline = time.monotonic() + _HOLD_S
    while not path.with_name(f"{path.name}.go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}.go did not appear within {_HOLD_S:.0f} s")
        time.sleep(0.005)


_armed.extend(_parse(os.environ.get(VARIABLE, "")))
