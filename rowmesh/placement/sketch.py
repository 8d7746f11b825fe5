"""Sketch: a profile from a stream of batches, in memory that does not grow with the tables.

A table of up to `capacity` rows is counted exactly. For a larger table, a hash table holds the rows that were read
most, with their own counts. When it is full, all but the `capacity` largest are dropped; their counts go to a counter
of their *range* (neighbouring rows, ranges as wide as 2^−6 of where they begin), so that nothing is lost from sums.

    floor     what a row that is not held may have at most: the largest bound that was ever dropped
    count     of a row that is held, since it came in; it may have had up to the floor of that time before (its error)

    count ≤ true count ≤ count + error,        error ≤ floor ≤ N / (capacity + 1) after N accesses

because whenever the floor rises by d, capacity + 1 rows have d accesses each above the old floor that are spent by it.
So every row with more than N / (capacity + 1) accesses is held; one that was never dropped has no error at all, and
such are, in a stream that does not drift, all rows that matter. Batches that contain a row are bounded alike.

Source: Misra and Gries, Finding repeated elements, 1982; Agarwal et al., Mergeable summaries, 2012. Differs: counts of
rows that stay are kept whole instead of being lowered, and what is dropped goes to its range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import ConfigurationError
from rowmesh.ops.simd import kernel
from rowmesh.placement.batches import check_rows
from rowmesh.placement.plan import TableShape
from rowmesh.placement.profile import Profile, TableProfile

Ints = NDArray[np.int64]
_RANGE_BITS = 7  # ranges hold 1 row below 2^7, then 64 ranges an octave
_MULTIPLIER = 0x9E3779B97F4A7C15
_EMPTY = -1
# Columns of an entry of the hash table.
_ROW, _ACCESSES, _BATCHES, _LAST, _ERROR, _COLUMNS = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True)
class HeavyRows:
    """The rows of a table that are counted one by one, in order.

    Attributes:
        rows: int64 `[n]`.
        accesses: int64 `[n]`, counted; at most `error` less than the truth.
        batches: int64 `[n]`, counted; at most `error` less than the truth.
        error: int64 `[n]`; 0 where the counts are exact.
    """

    rows: Ints
    accesses: Ints
    batches: Ints
    error: Ints


class AccessSketch:
    """Counts accesses and batches of all tables from a stream.

    Memory is 80 to 160 bytes for each row that is held, of which there are up to twice `capacity`, or `capacity` and
    the ids of one batch where that is more; and 24 bytes a range, of which a table of 2^32 rows has 1,728.

    Args:
        shapes: of the tables.
        capacity: rows of each table that are counted one by one.

    Example:
        >>> sketch = AccessSketch([TableShape("item", 1000, value_bytes=64, gradient_bytes=64)], capacity=100)
        >>> sketch.add({"item": np.array([7, 7, 999])}, num_samples=3)
        >>> sketch.add({"item": np.array([7, 5, 5])}, num_samples=3)
        >>> heavy = sketch.heavy("item")
        >>> heavy.rows.tolist(), heavy.accesses.tolist(), heavy.batches.tolist()
        ([5, 7, 999], [2, 3, 1], [1, 2, 1])
        >>> sketch.profile().tables[0].total_accesses
        6.0
    """

    def __init__(self, shapes: Sequence[TableShape], *, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise ConfigurationError(f"capacity must be 1 or more, got {capacity}")
        self._tables = {shape.name: _TableSketch(shape, min(capacity, shape.num_rows)) for shape in shapes}
        self._num_samples = 0
        self._num_batches = 0
        self._batch_size = 0
        self._last_size = 0

    def add(self, ids: Mapping[str, NDArray[np.int64]], num_samples: int) -> None:
        """Counts one batch.

        Args:
            ids: table → the ids that all its features read, int64; tables that nothing read may be missing.
            num_samples: of the batch; only the last may be smaller than the first.

        Raises:
            ConfigurationError: there is no such table, or batches differ in size.
            IdRangeError: an id is not a row of its table; nothing is counted.
        """
        if strangers := sorted(set(ids) - set(self._tables)):
            raise ConfigurationError(f"the sketch has no tables {strangers}; it has {sorted(self._tables)}")
        self._check_size(num_samples)
        arrays = {name: np.ascontiguousarray(values, np.int64).reshape(-1) for name, values in ids.items()}
        for name, values in arrays.items():
            if len(values):
                check_rows(name, values, self._tables[name].shape.num_rows)
        for name, values in arrays.items():
            self._tables[name].add(values, self._num_batches)
        self._num_samples += num_samples
        self._num_batches += 1
        self._last_size = num_samples

    @property
    def num_samples(self) -> int:
        """Samples counted so far."""
        return self._num_samples

    @property
    def memory_bytes(self) -> int:
        """Memory of the counters."""
        return sum(table.memory_bytes for table in self._tables.values())

    def floor(self, table: str) -> int:
        """An upper bound of the reads of a row without a counter; 0 while all rows have one."""
        return self._tables[table].floor

    def heavy(self, table: str) -> HeavyRows:
        """The rows that are held and were read more often than any other row can have been."""
        return self._tables[table].heavy()

    def profile(self) -> Profile:
        """The counts so far: of heavy rows one by one, of others the mean of their range.

        The sum of accesses is exact; so is that of batches, unless the mean of a range is in more than there were.
        Heavy rows stand with what was counted, which is what they have at least; what they had before they came in is
        in the mean of their range.

        Raises:
            ConfigurationError: nothing was counted.
        """
        tables = tuple(table.profile(self._num_batches) for table in self._tables.values())
        return Profile(tables, self._num_samples, self._batch_size or None)

    def _check_size(self, num_samples: int) -> None:
        if num_samples < 1:
            raise ConfigurationError(f"a batch of {num_samples} samples; leave empty batches out")
        self._batch_size = self._batch_size or num_samples
        if num_samples > self._batch_size or self._last_size not in (0, self._batch_size):
            raise ConfigurationError(
                f"a batch of {num_samples} samples came after one of {self._last_size or self._batch_size}; all but "
                f"the last must have {self._batch_size}, else the batches that contain a row cannot be compared"
            )


class _TableSketch:
    """The counters of one table."""

    def __init__(self, shape: TableShape, capacity: int) -> None:
        self.shape = shape
        self.floor = 0
        self._capacity = capacity
        self._edges = range_edges(shape.num_rows)
        self._spilled = np.zeros((2, len(self._edges) - 1), np.int64)  # accesses, batches
        self._size = 0
        self._entries = _empty_table(0)

    @property
    def memory_bytes(self) -> int:
        return self._entries.nbytes + self._spilled.nbytes + self._edges.nbytes

    def add(self, ids: Ints, batch: int) -> None:
        most = min(len(ids), self.shape.num_rows)
        if self._size + most > max(2 * self._capacity, self._capacity + most):
            self._prune()
        if 2 * (self._size + most) > len(self._entries):
            self._rebuild(self._held(), self._size + most)
        self._size += _count(ids, batch, self.floor, self._entries, _bits(self._entries))

    def _held(self) -> Ints:
        return self._entries[self._entries[:, _ROW] != _EMPTY]

    def _rebuild(self, held: Ints, num_entries: int) -> None:
        self._entries = _empty_table(num_entries)
        _insert(held, self._entries, _bits(self._entries))
        self._size = len(held)

    def _prune(self) -> None:
        """Keeps the rows with the largest bounds, and spills the others; the floor rises to the largest of those."""
        held = self._held()
        bounds = held[:, _ACCESSES] + held[:, _ERROR]
        order = np.argpartition(bounds, len(held) - self._capacity)
        dropped, kept = np.split(order, [len(held) - self._capacity])
        self.floor = int(bounds[dropped].max())
        self._spilled += self._by_range(held[dropped])
        self._rebuild(held[kept], 2 * self._capacity)

    def _by_range(self, entries: Ints) -> Ints:
        """Accesses and batches of some entries, by range."""
        places = np.searchsorted(self._edges, entries[:, _ROW], "right") - 1
        sums = np.zeros_like(self._spilled)
        for out, column in zip(sums, (_ACCESSES, _BATCHES), strict=True):
            np.add.at(out, places, entries[:, column])
        return sums

    def heavy(self) -> HeavyRows:
        held = self._held()
        kept = held[held[:, _ACCESSES] > self.floor]
        kept = kept[np.argsort(kept[:, _ROW])]
        return HeavyRows(kept[:, _ROW], kept[:, _ACCESSES], kept[:, _BATCHES], kept[:, _ERROR])

    def profile(self, num_batches: int) -> TableProfile:
        heavy, edges = self.heavy(), self._edges
        held = self._held()
        light = self._spilled + self._by_range(held[held[:, _ACCESSES] <= self.floor])
        num_heavy = np.diff(np.searchsorted(heavy.rows, edges))
        num_light = np.diff(edges) - num_heavy
        cuts = np.unique(np.concatenate([edges, heavy.rows, heavy.rows + 1]))
        starts, lengths = cuts[:-1], np.diff(cuts)
        place = np.searchsorted(edges, starts, "right") - 1
        is_heavy = np.zeros(len(starts), np.bool_)
        is_heavy[np.searchsorted(starts, heavy.rows)] = True
        # Where all rows of a range are heavy, they share what it has from before they came in.
        shares = np.where(num_light > 0, num_light, num_heavy)
        values = np.where(is_heavy & (num_light[place] > 0), 0.0, (light / shares)[:, place])
        values[:, is_heavy] += [heavy.accesses, heavy.batches]
        values[1] = np.minimum(values[1], num_batches)
        return _merged(self.shape, lengths, values)


def range_edges(num_rows: int) -> Ints:
    """Where ranges begin, and the end: one row each below 2^7, then 64 ranges from each power of two to the next.

    Example:
        >>> edges = range_edges(1000)
        >>> edges[126:132].tolist(), edges[-3:].tolist()
        ([126, 127, 128, 130, 132, 134], [984, 992, 1000])
    """
    octaves = max(int(num_rows - 1).bit_length() - _RANGE_BITS, 0)
    half = np.arange(1 << (_RANGE_BITS - 1), 1 << _RANGE_BITS)
    edges = np.concatenate([np.arange(1 << _RANGE_BITS), *(half << shift for shift in range(1, octaves + 1))])
    return np.append(edges[edges < num_rows], num_rows).astype(np.int64)


def _merged(shape: TableShape, lengths: Ints, values: NDArray[np.float64]) -> TableProfile:
    """Neighbours with equal values as one run."""
    first = np.flatnonzero(np.append(True, np.any(values[:, 1:] != values[:, :-1], axis=0)))
    return TableProfile(shape, np.add.reduceat(lengths, first), *values[:, first])


def _bits(entries: Ints) -> int:
    return len(entries).bit_length() - 1


def _empty_table(num_entries: int) -> Ints:
    """At most half full with so many entries; a power of two."""
    entries = np.zeros((1 << max(4, (2 * num_entries).bit_length()), _COLUMNS), np.int64)
    entries[:, _ROW] = _EMPTY
    return entries


@kernel
def _count(ids, batch, floor, entries, bits):  # pragma: no cover - compiled
    """Counts the ids of a batch in a table of 2^bits cells; returns how many rows came in."""
    mask = len(entries) - 1
    shift = np.uint64(64 - bits)
    came = 0
    for i in range(len(ids)):
        row = ids[i]
        cell = np.int64((np.uint64(row) * np.uint64(_MULTIPLIER)) >> shift)
        while entries[cell, _ROW] != row and entries[cell, _ROW] != _EMPTY:
            cell = cell + 1 & mask
        if entries[cell, _ROW] == _EMPTY:
            entries[cell, _ROW] = row
            entries[cell, _LAST] = -1
            entries[cell, _ERROR] = floor
            came += 1
        entries[cell, _ACCESSES] += 1
        if entries[cell, _LAST] != batch:
            entries[cell, _LAST] = batch
            entries[cell, _BATCHES] += 1
    return came


@kernel
def _insert(held, entries, bits):  # pragma: no cover - compiled
    """Puts entries into an empty table of 2^bits cells."""
    mask = len(entries) - 1
    shift = np.uint64(64 - bits)
    for i in range(len(held)):
        cell = np.int64((np.uint64(held[i, _ROW]) * np.uint64(_MULTIPLIER)) >> shift)
        while entries[cell, _ROW] != _EMPTY:
            cell = cell + 1 & mask
        for column in range(_COLUMNS):
            entries[cell, column] = held[i, column]
