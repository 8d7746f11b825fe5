"""Dynamic index: from any int64 id to a slot, in shards that grow one at a time; and the ids of the smallest scores.

`Index.find`, `insert` and `erase` know nothing of scores. `victims` updates scores and finds the smallest exactly. Ids
come with their hash and shard, as `locate` gives them. Nothing here locks.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.dynamic_index import cpu

_PER_GROUP = 14  # of 16 places: load 7/8
_GROWTH = 1.25
_GOLDEN_RATIO = 0.6180339887498949
_LINE = 64


class Index:
    """Shards of (id → slot), and the records of the slots.

    Args:
        capacities: ids that each shard holds at most.
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
        self.records = np.zeros((num_slots, num_columns), np.int64)
        self.headers = np.zeros((len(capacities), cpu.COLUMNS), np.int64)
        self.headers[:, cpu.HEAP_SIZE] = -1
        self._buffers: list[np.ndarray] = [np.empty(0, np.uint8)] * len(capacities)
        for shard in range(len(capacities)):
            self._set_groups(shard, -(-min(initial, int(capacities[shard])) // _PER_GROUP))

    @property
    def num_bytes(self) -> int:
        """Of digests, slots and overflow, without records."""
        return sum(buffer.nbytes for buffer in self._buffers)

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
        self._reserve(shards)
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

    def clear(self, shard: int) -> None:
        """Forgets all ids of one shard."""
        self.records[self.slots_in(shard), cpu.SEEN] = 0
        self._buffers[shard][:] = 0
        self.headers[shard, cpu.USED], self.headers[shard, cpu.HEAP_SIZE] = 0, -1

    def set_num_slots(self, num_slots: int) -> None:
        """More records; those there are stay."""
        records = np.zeros((num_slots, self.records.shape[1]), np.int64)
        records[: len(self.records)] = self.records
        self.records = records

    def _reserve(self, shards: np.ndarray) -> None:
        wanted = self.headers[:, cpu.USED] + np.bincount(shards, minlength=len(self.headers))
        needed = -(-wanted // _PER_GROUP)
        growing = np.flatnonzero(needed > self.headers[:, cpu.GROUPS])
        if len(growing):
            # Sizes are powers of the factor, shifted by shard, so that shards which fill alike do not grow together.
            phase = growing * _GOLDEN_RATIO % 1.0
            exponent = np.ceil(np.log(needed[growing]) / np.log(_GROWTH) - phase) + phase
            most = -(-self.capacities[growing] // _PER_GROUP)
            groups = np.minimum(most, np.ceil(_GROWTH**exponent).astype(np.int64))
            for shard, number in zip(growing.tolist(), np.maximum(groups, needed[growing]).tolist(), strict=True):
                self._grow(shard, number)

    def _grow(self, shard: int, groups: int) -> None:
        kept, (old, old_groups) = self._buffers[shard], self.headers[shard, : cpu.GROUPS + 1].tolist()
        self._set_groups(shard, groups)
        new = int(self.headers[shard, cpu.ADDRESS])
        cpu.rehash(old, old_groups, new, groups, self.records, self.records.ctypes.data, self.seed)
        del kept  # until here its memory was read

    def _set_groups(self, shard: int, groups: int) -> None:
        self._buffers[shard] = buffer = np.zeros(groups * cpu.GROUP_BYTES + _LINE, np.uint8)
        self.headers[shard, cpu.ADDRESS] = -(-buffer.ctypes.data // _LINE) * _LINE
        self.headers[shard, cpu.GROUPS] = groups


__all__ = ["Index"]
