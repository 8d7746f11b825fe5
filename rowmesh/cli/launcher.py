"""Ranks end with the launcher that started them: a torchrun that is killed cannot stop them itself."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rowmesh._support.faults import reach

GRACE_S = 20.0
"""Time in which a rank can clean up before it is killed; torchrun itself gives 30 s."""
_POLL_S = 1.0
_INIT = 1  # adopts processes whose parent is gone


def end_with_launcher(complain: Callable[[str], None]) -> None:
    """Ends this process when torchrun, which started it, is gone; does nothing where torchrun did not.

    It ends by SIGTERM, which commands answer by cleaning up, and after `GRACE_S` by SIGKILL. A thread waits for the
    end of the launcher's process. (`PR_SET_PDEATHSIG` would report the end of the thread that started this process,
    and only on Linux.)

    Args:
        complain: prints the reason.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not hasattr(signal, "pthread_kill"):  # as on Windows
        return
    reach("launcher.watch")
    threading.Thread(target=_watch, args=(os.getppid(), complain), name="rowmesh launcher", daemon=True).start()


def _watch(launcher: int, complain: Callable[[str], None]) -> None:
    if not _is_adopted(launcher):
        _wait_for_end(launcher)
    with contextlib.suppress(OSError, ValueError):  # standard error may have gone with it
        complain("torchrun, which started this rank, is gone; the rank ends")
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_adopted(parent: int) -> bool:
    """Whether the launcher was gone before anybody looked: init is no launcher, unless it is a Python program."""
    if parent != _INIT:
        return False
    try:
        program = Path(f"/proc/{_INIT}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return True
    return not Path(os.fsdecode(program)).name.startswith("python")


def _wait_for_end(parent: int) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):  # not Linux, an old one, or the process is gone
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        return
    try:
        if os.getppid() == parent:  # else the number may be that of another process by now
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
    finally:
        os.close(descriptor)
