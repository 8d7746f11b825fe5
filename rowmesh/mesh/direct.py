"""Direct messages: sends and receives that are waited for in a thread of their own.

A collective of gloo can be waited for again after a wait with a time limit. A send or a receive cannot: it closes its
connections. A thread therefore waits for sends and receives without a limit, and others wait for that thread.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from rowmesh.mesh.groups import abort


class Messages:
    """Sends and receives that are waited for together; looks like a collective that was posted."""

    def __init__(self, works: Sequence[dist.Work], abort: Callable[[], None]) -> None:
        self.works, self.abort = works, abort
        self.outcome: Future[None] = Future()

    def wait(self, timeout: timedelta) -> None:
        """Until all are through.

        Raises:
            RuntimeError: they are not within the time given, or failed.
        """
        try:
            error = self.outcome.exception(timeout.total_seconds())
        except FutureTimeoutError as late:
            raise RuntimeError("timed out: messages are not through yet") from late
        if error is not None:  # not itself: it stays here, and would keep the frames of the waiting thread alive
            raise RuntimeError(str(error)) from error

    def is_completed(self) -> bool:
        """Whether all are through, or have failed."""
        return self.outcome.done()


class Waiter:
    """Waits for the messages of one process group, in the order in which they were posted.

    Args:
        group: the process group.
        timeout: how long at most.
    """

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self._abort = partial(abort, group)  # without a reference to this
        self._posted: queue.SimpleQueue[Messages | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._posted, timeout), name="rowmesh messages", daemon=True)
        thread.start()
        weakref.finalize(self, self._posted.put, None)

    def take(self, works: Sequence[dist.Work]) -> Messages:
        """Has messages that were posted waited for."""
        messages = Messages(works, self._abort)
        if works:
            self._posted.put(messages)
        else:
            messages.outcome.set_result(None)
        return messages


def _serve(posted: queue.SimpleQueue[Messages | None], timeout: timedelta) -> None:
    while _serve_next(posted, timeout):  # holds no messages, nor their memory, while there are none
        pass


def _serve_next(posted: queue.SimpleQueue[Messages | None], timeout: timedelta) -> bool:
    if (messages := posted.get()) is None:
        return False
    try:
        for work in messages.works:
            work.wait(timeout)
    except Exception as error:
        messages.outcome.set_exception(error)
    else:
        messages.outcome.set_result(None)
    return True
