"""prefetch: run an iterator ahead on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _End(Generic[T]):
    error: BaseException | None = None


def prefetch(items: Iterator[T], depth: int) -> Generator[T]:
    """Yields the items, up to `depth` of them made ahead by a thread; 0 makes each when it is asked for.

    An exception of the iterator is raised here, after the items that came before it. The thread ends when
    this generator does: at its end, when it is closed, or when it is garbage collected.

    >>> list(prefetch(iter("abc"), depth=2))
    ['a', 'b', 'c']
    """
    if depth == 0:
        yield from items
        return
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | _End) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_End())
        except BaseException as error:
            put(_End(error))

    thread = threading.Thread(target=produce, name="rowmesh-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        while not ready.empty():  # lets a waiting producer see `stop` at once
            ready.get_nowait()
        thread.join()
