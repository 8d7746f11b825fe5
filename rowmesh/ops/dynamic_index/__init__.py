"""Dynamic index: from any int64 id to a slot, in shards that grow one at a time; and the ids of the smallest scores.

`Index.find`, `insert` and `erase` know nothing of scores. `victims` updates scores and finds the smallest exactly. Ids
come with their hash and shard, as `locate` gives them. Nothing here locks.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.dynamic_index import cpu
from rowmesh.ops.memory import Buffer, Scratch, advise_huge_pages, array_at

_PER_TWO_GROUPS = 21  # of 24 places: load 7/8
_UNBOUNDED_IDS = 1 << 40  # from here on shards have memory of their own
_MOST_EAGER_BYTES = 256 << 20  # groups of more are not committed at once
_GROWTH = 1.25
_GOLDEN_RATIO = 0.6180339887498949


class Index:
    """Shards of (id → slot), and the records of the slots.

    Args:
        capacities: ids that each shard holds at most. Where that is known, groups of all shards are in one memory, on
            huge pages, each with room for all it may get; else (from 2^40 on) each has memory of its own.
        seed: of the hash.
        num_shards: P, of which these are some, beginning with `first_shard`.
        num_slots: slots are below it.
        num_columns: int64 numbers a record: id, last step + 1, count, and the score where it is none of these.
        initial: ids that each shard has room for from the start.
    """

    def __init__(
        self,
        capacities: np.ndarray,
        seed: int,
        num_shards: int,
        first_shard: int,
        num_slots: int,
        num_columns: int,
        initial: int = 1,
    ) -> None:
        self.capacities, self.seed = capacities, np.uint64(seed)
        self._num_shards, self._first_shard = np.uint64(num_shards), first_shard
        self.records = _records(num_slots, num_columns)
        self.headers = np.zeros((len(capacities), cpu.COLUMNS), np.int64)
        self.headers[:, cpu.NUM_LATER] = -1
        self._buffers: dict[int, np.ndarray] = {}
        self._scratch = Scratch()
        most = int(_groups_for(capacities).max(initial=1))
        self._stride, self._region, self._is_eager = cpu.GROUP_BYTES * most, None, True
        if len(capacities) and int(capacities.max()) < _UNBOUNDED_IDS:
            num_bytes = self._stride * len(capacities)
            self._is_eager = num_bytes <= _MOST_EAGER_BYTES
            self._region = Buffer(num_bytes, is_sparse=not self._is_eager)
            self.headers[:, cpu.ADDRESS] = self._region.address + self._stride * np.arange(len(capacities))
        every = np.arange(len(capacities))
        self._grow(every, _groups_for(np.minimum(initial, capacities)))

    @property
    def num_bytes(self) -> int:
        """Memory of digests, slots and overflow, without records."""
        return cpu.GROUP_BYTES * int(self.headers[:, cpu.GROUPS].sum())

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Hash (uint64) and local shard (int64) of each id, and where one is that is not of these, or −1."""
        hashes, shards = np.empty(len(ids), np.uint64), np.empty(len(ids), np.int64)
        here = (self._num_shards, self._first_shard, len(self.capacities))
        return hashes, shards, cpu.locate(ids, self.seed, *here, hashes, shards)

    def find(self, ids: np.ndarray, hashes: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """The slot of each id, int64 `[N]`, −1 where it is unknown."""
        slots = np.empty(len(ids), np.int64)
        cpu.find(self.headers, self.records, self.records.ctypes.data, ids, hashes, shards, slots)
        return slots

    def insert(self, ids: np.ndarray, hashes: np.ndarray, shards: np.ndarray, slots: np.ndarray) -> None:
        """Adds ids that are not there."""
        self.reserve(shards)
        cpu.insert(self.headers, self.records, self.records.ctypes.data, ids, hashes, shards, slots)

    def erase(self, ids: np.ndarray, hashes: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """Removes ids that are there; returns their slots."""
        slots = np.empty(len(ids), np.int64)
        cpu.erase(self.headers, self.records, ids, hashes, shards, slots)
        return slots

    def slots_in(self, shard: int) -> np.ndarray:
        """All slots of one shard."""
        slots = np.empty(int(self.headers[shard, cpu.USED]), np.int64)
        cpu.slots_in(self.headers[shard, cpu.ADDRESS], self.headers[shard, cpu.GROUPS], slots)
        return slots

    def add_shards(self, count: int) -> None:
        """More shards, without a bound, which `locate` does not know."""
        assert self._region is None, "shards of known capacities share one memory"
        first, more = len(self.headers), np.zeros((count, cpu.COLUMNS), np.int64)
        more[:, cpu.NUM_LATER] = -1
        self.headers = np.concatenate([self.headers, more])
        self.capacities = np.concatenate([self.capacities, np.full(count, _UNBOUNDED_IDS)])
        self._grow(np.arange(first, first + count), np.ones(count, np.int64))

    def clear(self, shard: int) -> None:
        """Forgets all ids of one shard."""
        self.records[self.slots_in(shard), cpu.SEEN] = 0
        address, groups = self.headers[shard, : cpu.GROUPS + 1].tolist()
        array_at(address, np.int64, cpu.GROUP_BYTES // 8 * groups)[:] = 0
        self.headers[shard, cpu.USED], self.headers[shard, cpu.NUM_LATER] = 0, -1

    def set_num_slots(self, num_slots: int) -> None:
        """More records; those there are stay."""
        records = _records(num_slots, self.records.shape[1])
        records[: len(self.records)] = self.records
        self.records = records

    def reserve(self, shards: np.ndarray) -> None:
        """Makes room for ids that are not there, of the given shards."""
        needed = _groups_for(self.headers[:, cpu.USED] + np.bincount(shards, minlength=len(self.headers)))
        growing = np.flatnonzero(needed > self.headers[:, cpu.GROUPS])
        if len(growing):
            # Sizes are powers of the factor, shifted by shard, so that shards which fill alike do not grow together.
            phase = growing * _GOLDEN_RATIO % 1.0
            exponent = np.ceil(np.log(needed[growing]) / np.log(_GROWTH) - phase) + phase
            groups = np.minimum(_groups_for(self.capacities[growing]), np.ceil(_GROWTH**exponent).astype(np.int64))
            self._grow(growing, np.maximum(groups, needed[growing]))

    def _grow(self, shards: np.ndarray, groups: np.ndarray) -> None:
        kept = [self._buffers.get(shard) for shard in shards.tolist()]
        if self._region is None:
            for shard, number in zip(shards.tolist(), groups.tolist(), strict=True):
                self._buffers[shard] = np.zeros(cpu.GROUP_BYTES * (number + 1), np.uint8)
            addresses = np.array([self._buffers[shard].ctypes.data for shard in shards.tolist()], np.int64)
            addresses = -(-addresses // cpu.GROUP_BYTES) * cpu.GROUP_BYTES
        else:
            addresses = self.headers[shards, cpu.ADDRESS]
        scratch = self._scratch.reserve(cpu.GROUP_BYTES * int(self.headers[shards, cpu.GROUPS].max(initial=0)))
        records = self.records, self.records.ctypes.data
        cpu.grow(self.headers, shards, groups, addresses, *records, self.seed, scratch)
        del kept  # until here its memory was read
        if not self._is_eager and self._region is not None and 2 * self.num_bytes > self._region.num_bytes:
            self._is_eager = True
            advise_huge_pages(self._region.address, self._region.num_bytes)


def _records(num_slots: int, num_columns: int) -> np.ndarray:
    """Zeros, on huge pages; committed where they are used, from the first on."""
    return Buffer(8 * num_slots * num_columns).array(np.int64, num_slots, num_columns)


def _groups_for(num_ids: np.ndarray) -> np.ndarray:
    """How many groups hold so many ids."""
    return -(-2 * num_ids // _PER_TWO_GROUPS)


__all__ = ["Index"]
