"""PublishedReader: looks ids up in the newest generation, tables and network of one step."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rowmesh._support.files.checksums import verify_bytes
from rowmesh.errors import ConfigurationError, DataError, StoreError
from rowmesh.ops.initialize.cpu import STREAM, initialize_slots
from rowmesh.publish.chain import ADVICE, read_chain
from rowmesh.publish.generation import Generation, PublishedTable
from rowmesh.publish.guard import guarded
from rowmesh.publish.target import Rows, Target
from rowmesh.tables.dynamic.spec import Missing
from rowmesh.tables.initializer import table_key

_TRIES = 5  # a generation may be removed between finding it and opening it
_IDS = "int64 [N]: a list or a NumPy array of whole numbers"


class PublishedReader:
    """A generation, until `refresh` takes a newer one. Any number of readers, beside the publisher.

    Any number of threads may look up while others refresh or close: each look-up reads the generation with which it
    began, and a generation is freed with its last use. Values that belong together come from one `pin`.

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
                place = self._target.network_place(generation.number)
                verify_bytes(state, generation.network, place, ADVICE)
                rows = self._target.open_rows(read_chain(self._target, generation))
                return PinnedGeneration(generation, rows, state, place, self._missing)
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


@dataclass(frozen=True, eq=False)
class PinnedGeneration:
    """A generation that stays when its reader refreshes; see `PublishedReader.pin`. Any number of threads may read it.

    Attributes:
        generation: which one this is: number, step and tables.
        rows: of its tables.
        state: its network, as it was published.
        network_place: the file or key that has it.
        missing: what unknown ids read, in place of what the tables say.
    """

    generation: Generation
    rows: Rows = field(repr=False)
    state: bytes = field(repr=False)
    network_place: str
    missing: Missing | None

    def network(self) -> Mapping[str, Any]:
        """The network's `state_dict()`, on the CPU.

        Raises:
            StoreError: it is damaged.
        """
        try:
            state = torch.load(io.BytesIO(self.state), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds on damaged files
            raise StoreError(self._damaged_network(str(error) or type(error).__name__)) from None
        if not isinstance(state, Mapping):
            raise StoreError(self._damaged_network(f"it holds {type(state).__name__}, no state dictionary"))
        return state

    def _damaged_network(self, why: str) -> str:
        return (
            f"the published network in {self.network_place} cannot be read: {why.splitlines()[0]}; the next generation "
            "replaces it"
        )

    def look_up(self, table: str, ids: ArrayLike) -> np.ndarray:
        """The vectors of ids; see `PublishedReader.look_up`."""
        if table not in self.generation.tables:
            raise ConfigurationError(
                f"there is no published table {table!r}; there are {sorted(self.generation.tables)}"
            )
        wanted = _int64(table, ids)
        about = self.generation.tables[table]
        distinct, inverse = np.unique(wanted, return_inverse=True)
        vectors = np.zeros((len(distinct), about.dim), np.float32)
        found = self.rows.look_up(table, distinct, vectors)
        if not found.all():
            vectors[~found] = self._unknown(table, about, distinct[~found])
        return vectors[inverse]

    def _unknown(self, table: str, about: PublishedTable, ids: np.ndarray) -> np.ndarray:
        missing = self.missing or about.missing
        if missing == "error":
            raise DataError(
                f"table {table!r} of generation {self.generation.number} does not know {len(ids)} of the ids, the "
                f'first is {ids[0]}; correct the data, or let unknown ids read missing="initial" or "zero"'
            )
        vectors = torch.zeros(len(ids), about.dim)
        if missing == "initial":
            parameters = about.initializer.parameters(1)
            streams = np.array([(table_key(about.seed, table), *parameters)], STREAM)
            places, pieces = np.arange(len(ids), dtype=np.uint32), np.array([(0, 0, 1, 0)], np.int64)
            initialize_slots(vectors, places, np.ascontiguousarray(ids), pieces, streams, about.initializer.name)
        return vectors.numpy()


def _int64(table: str, ids: ArrayLike) -> NDArray[np.int64]:
    """Ids as they are looked up; raises DataError where they are no whole numbers `[N]`, or too large."""
    try:
        given = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError):  # of lists of unlike lengths, or a tensor on a GPU
        raise DataError(f"ids of table {table!r} must be {_IDS}, got {type(ids).__name__}") from None
    if given.shape == (0,) and not hasattr(ids, "dtype"):  # [] says nothing of what it would hold
        return np.empty(0, np.int64)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise DataError(f"ids of table {table!r} must be {_IDS}, got {given.dtype} {list(given.shape)}")
    if given.dtype == np.uint64 and len(given) and given.max() > np.iinfo(np.int64).max:
        raise DataError(f"ids of table {table!r} must be {_IDS}, got {given.max()}, which int64 does not hold")
    return given.astype(np.int64, copy=False)
