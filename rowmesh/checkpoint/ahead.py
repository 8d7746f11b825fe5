"""Reading ahead: rows are copied at the memory's speed, before the disk wants them.

A row that is not read when a step updates it costs the step a copy of it. The disk is ten times slower than the memory:
read as it takes them, most rows of a table are updated before. So a thread of its own copies as many as there is memory
for, in the order in which they are written, and steps pay for the time that this takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from rowmesh._support.worker import Worker
from rowmesh.checkpoint.room import CopyBuffers
from rowmesh.errors import RowmeshError


class ReadableAhead(Protocol):
    """Rows that are read once, by this thread or by the one that writes, whichever comes first."""

    @property
    def num_bytes(self) -> int: ...
    def read_ahead(self, buffer: Tensor, release: Callable[[Tensor], None]) -> bool:
        """Copies the rows to a buffer, and calls `release` with it when they are not needed any more.

        Returns:
            False where they are read already; the buffer is not used then.
        """
        ...


class ReadAhead:
    """A thread that reads shards one after the other, into buffers that become free as they are written.

    It never fails a checkpoint: where there is no memory or no thread, the thread that writes reads the shards itself.

    Args:
        shards: in the order in which they are written; gone through in the thread.
        copies: the buffers. No others take any.

    Attributes:
        failure: why it ended early.
    """

    def __init__(self, shards: Iterable[ReadableAhead], copies: CopyBuffers) -> None:
        self._shards, self._copies = shards, copies
        self._thread = Worker(target=self._run, name="rowmesh checkpoint, reading", daemon=True)
        self._is_begun = False
        self.failure: Exception | None = None
        try:
            self._thread.start()
            self._is_begun = True
        except RuntimeError as error:  # the system has no more threads
            self.failure = error
            copies.has_ended.set()
        except BaseException:  # it may have begun, and nobody would end it
            copies.close()
            raise

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until it has read all, or as much as there is memory for: steps run beside one thread, not two."""
        self._copies.has_ended.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread after the shard that it is at, and waits for that; may be called again."""
        self._copies.close()
        if self._is_begun:
            self._thread.join()

    def _run(self) -> None:
        try:
            for shard in self._shards:
                buffer = self._copies.take(shard.num_bytes)
                if self._copies.is_closed:
                    return
                if buffer is not None and not shard.read_ahead(buffer, self._copies.give):
                    self._copies.give(buffer)
        except (OSError, MemoryError, RowmeshError) as error:
            self.failure = error  # the thread that writes reads the rest, and fails where it cannot either
        finally:
            self._copies.has_ended.set()
