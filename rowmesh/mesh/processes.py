"""What is seen of a process of this host: alive, stopped or gone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import psutil

State = Literal["alive", "stopped", "gone"]


def state_of(pid: int) -> State:
    """Of a process: "stopped" by SIGSTOP, Ctrl-Z or a debugger; a zombie that is not reaped yet is "gone".

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
