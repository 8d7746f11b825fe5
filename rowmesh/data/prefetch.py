"""prefetch: run an iterator ahead on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from rowmesh._support.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True)
class _End(Generic[T]):
    error: BaseException | None = None


def prefetch(items: Iterator[T], depth: int) -> Generator[T]:
    """Yields the items, up to `depth` of them made ahead by a thread; 0 makes each when it is asked for.

    No more than `depth` items exist that were not yielded, the one that is being made included. An exception
    of the iterator is raised here, after the items that came before it. The thread ends when this generator
    does: at its end, when it is closed, or when it is garbage collected. Then `items` is closed too.

    >>> list(prefetch(iter("abc"), depth=2))
    ['a', 'b', 'c']
    """
    if depth == 0:
        yield from items
        return
    ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    room, stop = threading.Semaphore(depth), threading.Event()

    def produce() -> None:
        try:
            while room.acquire() and not stop.is_set():
                ready.put(next(items))
        except StopIteration:
            ready.put(_End())
        except BaseException as error:
            ready.put(_End(error))

    thread = Worker(target=produce, name="rowmesh-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            room.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        room.release()  # wakes a waiting producer
        thread.join()
        if isinstance(items, Generator):
            items.close()
