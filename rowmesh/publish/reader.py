"""PublishedReader: looks ids up in the newest generation, tables and network of one step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike

from rowmesh._support.files.checksums import verify_bytes
from rowmesh.errors import ConfigurationError, DataError, StoreError
from rowmesh.publish.chain import ADVICE, read_chain
from rowmesh.publish.generation import Generation
from rowmesh.publish.guard import guarded
from rowmesh.publish.pinned import PinnedGeneration
from rowmesh.publish.target import Target
from rowmesh.tables.dynamic.spec import Missing

_TRIES = 5  # a generation may be removed between finding it and opening it


class PublishedReader:
    """A generation, until `refresh` takes a newer one. Any number of readers, beside the publisher.

    Any number of threads may look up while others refresh or close: each look-up reads the generation with which it
    began, which is freed when the last one that uses it ends. What belongs together is taken from one `pin`.

    Args:
        target: where generations are published; see `open_target`.
        missing: what unknown ids read, in place of what the tables say.

    Raises:
        StoreError: nothing is published yet, or the store does not answer, or has lost rows. Once this is closed, all
            but `close` raises it.
        DataError: what is published is damaged; names it.
    """

    def __init__(self, target: Target, *, missing: Missing | None = None) -> None:
        if missing is not None and missing not in get_args(Missing):
            raise ConfigurationError(f"missing must be one of {', '.join(get_args(Missing))}, got {missing!r}")
        self._target = guarded(target, target.name)
        self._missing: Missing | None = missing
        self._refreshing = threading.Lock()  # else the older one of two could be taken last
        self._lock = threading.Lock()  # of what follows; held for moments only
        self._current: PinnedGeneration | None = self._open()  # None once this is closed
        self._num_users = {self._current: 1}  # the reader is one, while it is current

    @property
    def generation(self) -> Generation:
        """Which one this is: number, step and tables."""
        return self._opened().generation

    def _opened(self) -> PinnedGeneration:
        current = self._current
        if current is None:
            raise StoreError(f"the reader of {self._target.name} was closed; make another PublishedReader")
        return current

    def _open(self) -> PinnedGeneration:
        for left in reversed(range(_TRIES)):
            newest = self._target.newest()
            if newest is None:
                raise StoreError(f"nothing is published in {self._target.name} yet")
            generation = Generation.read(newest, self._target.name)
            try:
                state = self._target.network(generation.number)
                verify_bytes(state, generation.network, f"the network of {self._target.name}", ADVICE)
                rows = self._target.open_rows(read_chain(self._target, generation))
                return PinnedGeneration(generation=generation, rows=rows, state=state, missing=self._missing)
            except (StoreError, DataError):
                again = self._target.newest()
                if not left or again is None or Generation.read(again, self._target.name) == generation:
                    raise
        raise AssertionError

    def refresh(self) -> bool:
        """Takes the newest generation; returns whether it is another one. On an error this stays as it was.

        It waits for no look-up, and no look-up for it.
        """
        with self._refreshing:
            current, newest = self._opened(), self._target.newest()
            if newest is not None and Generation.read(newest, self._target.name) == current.generation:
                return False
            opened = self._open()
            with self._lock:
                is_closed = self._current is None
                if not is_closed:
                    self._current, self._num_users[opened] = opened, 1
            if is_closed:  # meanwhile
                opened.rows.close()
                self._opened()  # raises
            self._unpin(current)
        return True

    @contextmanager
    def pin(self) -> Iterator[PinnedGeneration]:
        """The current generation, for as long as a `with` lasts, whatever other threads refresh to or close.

        Example:
            >>> import tempfile, torch
            >>> from rowmesh.publish import Changes, PublishedTable, Publisher, open_target
            >>> from rowmesh.tables import Constant
            >>> target = open_target(f"parquet:{tempfile.mkdtemp()}")
            >>> publisher = Publisher(target, {"user": PublishedTable(dim=2, initializer=Constant(value=1))})
            >>> network = torch.nn.Linear(2, 1)
            >>> _ = publisher.publish(100, {"user": Changes()}, network.state_dict())
            >>> reader = PublishedReader(target)
            >>> with reader.pin() as pinned:
            ...     keys = network.load_state_dict(pinned.network())
            ...     vectors = pinned.look_up("user", np.array([8, 7]))
            >>> vectors.shape, pinned.generation.step
            ((2, 2), 100)
        """
        with self._lock:
            pinned = self._opened()
            self._num_users[pinned] += 1
        try:
            yield pinned
        finally:
            self._unpin(pinned)

    def _unpin(self, pinned: PinnedGeneration) -> None:
        with self._lock:
            self._num_users[pinned] -= 1
            is_last = not self._num_users[pinned]
            if is_last:
                del self._num_users[pinned]
        if is_last:
            pinned.rows.close()

    def network(self) -> Mapping[str, Any]:
        """The network's `state_dict()`, on the CPU."""
        return self._opened().network()

    def look_up(self, table: str, ids: ArrayLike) -> np.ndarray:
        """The vectors of ids.

        Args:
            table: its name.
            ids: int64 `[N]`, or a list or an array of other integers; may repeat.

        Returns:
            float32 `[N, D]`.

        Raises:
            ConfigurationError: there is no such table.
            DataError: an id is unknown, where that is an error; or ids are no integers `[N]`.
            StoreError: the generation was removed meanwhile, and `refresh` finds a newer one; or the store is away; or
                this is closed.
        """
        with self.pin() as pinned:
            return pinned.look_up(table, ids)

    def close(self) -> None:
        """Frees what this holds, when the last look-up under way has ended; may be called again."""
        with self._lock:
            current, self._current = self._current, None
        if current is not None:
            self._unpin(current)
