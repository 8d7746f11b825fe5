"""The index of dynamic tables in a device's memory: `DeviceIndexes` of all tables of a rank, `DeviceIndex` of each.

A batch whose ids are all known is found and counted by kernels (`look_up`, `touch`); the host learns no more than how
many ids each table was asked for, and how many it does not know. For the others it decides, given those ids alone, and
kernels choose who leaves and write the shards anew (`rowmesh.ops.dynamic_index.cuda`).

[Note: the index has a stream of its own] What the index does depends on ids and on what it did before, not on rows. So
the host, which waits for it once a batch, does not wait for the batches that the device computes meanwhile. All that
the index has is read and changed on that stream alone, in its order. Frames are read on the stream of whoever routes
the batch, which waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.dynamic_index import cpu, victims
from rowmesh.ops.dynamic_index.cpu import ID, SCORE, SEEN
from rowmesh.ops.dynamic_index.scored import IndexShape
from rowmesh.ops.streams import Stream
from rowmesh.ops.transfer import Late, upload

_MAX = 2**63 - 1
_NONE = np.empty(0, np.int64)
T = TypeVar("T")


@dataclass(frozen=True)
class SeenIds:
    """The ids of one table in a step, as its index found them.

    Attributes:
        ids: int64 `[n]`, those that are unknown, ascending.
        counts: int64 `[n]`, how often each occurs.
        places: int64 `[n]`, where they stand in the step.
        touched: int64 by shard: how many ids are known.
    """

    ids: np.ndarray
    counts: np.ndarray
    places: np.ndarray
    touched: np.ndarray


class LookedUp:
    """The distinct ids of a batch, by table, and their slots, on the device.

    Attributes:
        ids: int64 `[N]`, of which the first U are valid.
        counts: int32 `[N]`.
        inverse: int32 `[N]`: which of them each id of the batch is.
        offsets: int64 `[T + 1]`: where those of each table begin.
        slots: int32 `[N]`; −1 where an id is unknown.
        shards: int32 `[N]`.
        unknown: int64 `[T]`: how many of each table are unknown.
        bounds: the offsets; once `read` has waited for them.
        num_unknown: the same of `unknown`.
    """

    def __init__(self, ids: Tensor, counts: Tensor, inverse: Tensor, offsets: Tensor, num_tables: int) -> None:
        self.ids, self.counts, self.inverse, self.offsets = ids, counts, inverse, offsets
        self.slots, self.shards = (torch.empty_like(ids, dtype=torch.int32) for _ in range(2))
        self.unknown = torch.zeros(num_tables, dtype=torch.int64, device=ids.device)
        self.bounds: list[int] = []
        self.num_unknown: list[int] = []

    def part(self, table: int) -> slice:
        """Where the ids of a table are."""
        return slice(self.bounds[table], self.bounds[table + 1])


class DeviceIndexes:
    """The indexes of some tables.

    Args:
        shapes: of the tables.
        device: whose memory, and whose kernels.

    Attributes:
        tables: the index of each.
        stream: see [Note: the index has a stream of its own].
    """

    def __init__(self, shapes: Sequence[IndexShape], device: torch.device) -> None:
        from rowmesh.ops.dynamic_index import cuda

        self.device, self.stream = device, Stream.new(device, is_urgent=True)
        sizes = [int(shape.capacities.sum()) for shape in shapes]
        first_spans = [*accumulate((len(shape.capacities) for shape in shapes), initial=0)]
        first_records = [*accumulate((shape.num_slots for shape in shapes), initial=0)]
        begins = [2 * first for first in accumulate(sizes, initial=0)]
        described = np.zeros((len(shapes), cuda.TABLE_COLUMNS), np.int64)
        for row, shape, span, record in zip(described, shapes, first_spans, first_records, strict=False):
            row[cuda.SEED], row[cuda.NUM_SHARDS] = np.uint64(shape.seed).view(np.int64), shape.num_shards
            row[cuda.FIRST_SHARD], row[cuda.NUM_HERE] = shape.first_shard, len(shape.capacities)
            row[cuda.FIRST_SPAN], row[cuda.FIRST_RECORD] = span, record
            row[cuda.KIND], row[cuda.DECAY_STEPS] = shape.kind, shape.decay_steps
        self.num_steps = max((int(shape.capacities.max(initial=0)) for shape in shapes), default=0).bit_length()
        # Every shard has two places, one of which is empty.
        self.ids = self.stream.run(lambda: torch.zeros(begins[-1], dtype=torch.int64, device=device))
        self.slots = self.stream.run(lambda: torch.zeros(begins[-1], dtype=torch.int32, device=device))
        self.spans = self.stream.run(lambda: torch.zeros((first_spans[-1], 2), dtype=torch.int64, device=device))
        self.records = self.stream.run(
            lambda: torch.zeros((first_records[-1], cuda.RECORD_COLUMNS), dtype=torch.int64, device=device)
        )
        self.described = self.upload(described)
        firsts = zip(begins, first_spans, first_records, strict=True)
        self.tables = [
            DeviceIndex(self, number, shape, *first)
            for number, (shape, first) in enumerate(zip(shapes, firsts, strict=False))
        ]

    def upload(self, array: np.ndarray) -> Tensor:
        """A copy on the device, made in the order of the stream."""
        return self.stream.run(partial(upload, torch.from_numpy(np.ascontiguousarray(array)), self.device))

    def look_up(self, ids: Tensor, bounds: Sequence[int]) -> LookedUp:
        """Finds the distinct ids of a batch; the host goes on.

        Args:
            ids: int64 `[N]`, on the host or the device, of one table after the other.
            bounds: where those of each begin, and where the last one's end.
        """
        from rowmesh.ops.segment_unique.cuda import segment_unique

        if ids.device.type == "cuda":
            self.stream.wait_for([Stream.current(ids.device).mark()])

        def find() -> LookedUp:
            unique = segment_unique(upload(ids, self.device), upload(torch.tensor(bounds, device="cpu"), self.device))
            found = LookedUp(unique.unique, unique.counts, unique.inverse, unique.offsets, len(self.tables))
            self.find(found.ids, found.offsets, self.described, found.slots, found.shards, found.unknown)
            return found

        return self.stream.run(find)

    def find(
        self, ids: Tensor, offsets: Tensor, described: Tensor, slots: Tensor, shards: Tensor, unknown: Tensor
    ) -> None:
        """Launches `rowmesh.ops.dynamic_index.cuda.find` on the current stream."""
        from rowmesh.ops.dynamic_index import cuda

        index = (self.spans, self.ids, self.slots, self.num_steps)
        cuda.find(ids, offsets, described, *index, slots, shards, unknown)

    def touch(self, found: LookedUp, is_plain: Sequence[bool], step: int) -> None:
        """Counts the ids of those tables that are plain and know all of theirs; the host goes on."""
        from rowmesh.ops.dynamic_index import cuda

        most = self.upload(np.where(is_plain, 0, -1))
        self.stream.run(
            lambda: cuda.touch(
                found.slots, found.counts, found.offsets, self.described, found.unknown, most, self.records, step
            )
        )

    def read(self, found: LookedUp) -> None:
        """Waits until the host knows how many ids there are of each table, and how many are unknown."""
        late = self.stream.run(lambda: Late(torch.cat([found.offsets, found.unknown])))
        numbers = late.read()
        found.bounds, found.num_unknown = numbers[: len(self.tables) + 1], numbers[len(self.tables) + 1 :]

    def slots_of(self, found: LookedUp) -> Tensor:
        """The slot of each id of the batch, int64 `[N]`, for the current stream, which waits for it."""
        slots = self.stream.run(lambda: found.slots.index_select(0, found.inverse).to(torch.int64))
        current = Stream.current(self.device)
        current.wait_for([self.stream.mark()])
        current.uses(slots)
        return slots


class DeviceIndex:
    """The index of one table, as `ScoredIndex` is. Slots and ids come from the host, and go there.

    Args:
        indexes: that it is one of.
        number: which.
        shape: of the table.
        begin, first_span, first_record: where its shards, their spans, and its records begin.

    Attributes:
        used: how many ids each shard has.
    """

    def __init__(
        self,
        indexes: DeviceIndexes,
        number: int,
        shape: IndexShape,
        begin: int,
        first_span: int,
        first_record: int,
    ) -> None:
        self.indexes, self._number, self._shape = indexes, number, shape
        self.used = np.zeros_like(shape.capacities)
        self._begins = begin + 2 * (np.cumsum(shape.capacities) - shape.capacities)
        self._is_second = np.zeros(len(shape.capacities), bool)
        self._first_span, self._first_record = first_span, first_record
        self._spans = indexes.spans[first_span : first_span + len(self.used)]
        self._records = indexes.records[first_record : first_record + shape.num_slots]
        self._note_spans()

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """See `Index.locate`."""
        hashes, shards = np.empty(len(ids), np.uint64), np.empty(len(ids), np.int64)
        here = (np.uint64(self._shape.num_shards), self._shape.first_shard, len(self.used))
        return hashes, shards, cpu.locate(ids, np.uint64(self._shape.seed), *here, hashes, shards)

    def find(self, ids: np.ndarray, hashes: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """The slot of each id, int64 `[N]`, −1 where it is unknown."""
        wanted, offsets = self.indexes.upload(ids), self.indexes.upload(np.array([0, len(ids)]))

        def find() -> np.ndarray:
            slots, of_shards = (torch.empty_like(wanted, dtype=torch.int32) for _ in range(2))
            unknown = torch.zeros(1, dtype=torch.int64, device=wanted.device)
            self.indexes.find(wanted, offsets, self._described, slots, of_shards, unknown)
            return slots.cpu().numpy().astype(np.int64)

        return self._run(find)

    @property
    def _described(self) -> Tensor:
        return self.indexes.described[self._number : self._number + 1]

    def _run(self, work: Callable[[], T]) -> T:
        return self.indexes.stream.run(work)

    def touch(self, slots: np.ndarray, shards: np.ndarray, counts: np.ndarray, given: np.ndarray, step: int) -> None:
        """Counts known ids in a step; those of a slot below zero are passed over."""
        self._touch(self.indexes.upload(slots.astype(np.int32)), self.indexes.upload(counts), step)

    def _touch(self, slots: Tensor, counts: Tensor, step: int) -> None:
        from rowmesh.ops.dynamic_index import cuda

        offsets = self.indexes.upload(np.array([0, len(slots)]))
        none = self.indexes.upload(np.zeros(1, np.int64))
        at = (offsets, self._described, none, none, self.indexes.records, step)
        self._run(lambda: cuda.touch(slots, counts, *at))

    # A step whose ids were looked up on the device

    def seen(self, found: LookedUp) -> SeenIds:
        """The numbers of a step that the host needs to decide it; waits."""
        part = found.part(self._number)

        def read() -> SeenIds:
            slots = found.slots[part]
            is_new = slots < 0
            places = is_new.nonzero().squeeze(1)
            touched = torch.zeros(len(self.used), dtype=torch.int64, device=slots.device)
            touched.index_add_(0, found.shards[part], (~is_new).to(torch.int64))
            read = found.ids[part][places], found.counts[part][places].to(torch.int64), places, touched
            ids, counts, at, of_shards = (tensor.cpu().numpy() for tensor in read)
            order = np.argsort(ids)
            return SeenIds(ids[order], counts[order], at[order], of_shards)

        return self._run(read)

    def touch_found(self, found: LookedUp, step: int) -> None:
        """Counts those ids that are known."""
        part = found.part(self._number)
        self._touch(found.slots[part], found.counts[part], step)

    def put(self, found: LookedUp, places: np.ndarray, slots: np.ndarray) -> None:
        """Sets the slots of ids."""
        at, values = self.indexes.upload(places), self.indexes.upload(slots.astype(np.int32))
        self._run(lambda: found.slots[found.part(self._number)].index_copy_(0, at, values))

    def all_ids(self, found: LookedUp) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All distinct ids of a step, ascending; how often each occurs; and their places; waits."""
        part = found.part(self._number)
        ids, counts = self._run(lambda: (found.ids[part].cpu().numpy(), found.counts[part].cpu().numpy()))
        order = np.argsort(ids)
        return ids[order], counts[order].astype(np.int64), order

    # Ids that leave and ids that enter

    def evict(self, missing: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `ScoredIndex.evict`."""
        count, full = int(missing.sum()), np.flatnonzero(missing)
        if not count:
            return _NONE, _NONE, np.empty((0, 3), np.int64)
        from rowmesh.ops.dynamic_index import cuda

        upload, ends = self.indexes.upload, _ends(missing[full])
        shape = self._shape
        chosen = self._run(
            partial(
                cuda.choose,
                *(upload(full), upload(ends)),
                *(self.indexes.spans, self.indexes.ids, self.indexes.slots, self.indexes.records),
                count,
                first_span=self._first_span,
                first_record=self._first_record,
                kind=shape.kind,
                decay_steps=shape.decay_steps,
                step=step,
            )
        )
        shards = np.repeat(full, missing[full])
        places = self._run(lambda: chosen.cpu().numpy())
        places = places[np.lexsort((places, shards))]
        slots = self._slots_at(self._used_begins[shards] + places)
        records = self.read(slots)
        self._merge(full, ends, places, np.zeros_like(ends), _NONE, _NONE)
        return slots, records[:, ID], records[:, SEEN:]

    def enter(
        self,
        ids: np.ndarray,
        hashes: np.ndarray,
        shards: np.ndarray,
        slots: np.ndarray,
        counts: np.ndarray,
        given: np.ndarray,
        step: int,
    ) -> None:
        """See `ScoredIndex.enter`."""
        self.insert(ids, hashes, shards, slots)
        score = np.zeros_like(counts)
        if self._shape.kind != victims.RECENCY:
            score = np.where(counts > _MAX >> 16, _MAX, counts << 16)
        self.set_facts(slots, np.stack([np.full_like(counts, step + 1), counts, score], axis=1))

    def insert(self, ids: np.ndarray, hashes: np.ndarray, shards: np.ndarray, slots: np.ndarray) -> None:
        """Adds ids that are not there."""
        if not len(ids):
            return
        order = np.lexsort((ids, shards))
        changed, counts = np.unique(shards, return_counts=True)
        ends = _ends(counts)
        self._merge(changed, np.zeros_like(ends), _NONE, ends, ids[order], slots[order])
        self._set(slots, slice(ID, ID + 1), ids[:, None])

    def clear(self, shard: int) -> None:
        """Forgets all ids of one shard."""
        self.used[shard] = 0
        self._note_spans()

    def look_ahead(self, step: int) -> None:
        """No-op: nothing is ordered before it is needed."""

    def forget_order(self, shards: np.ndarray | slice = slice(None)) -> None:
        """No-op: no order is kept."""

    def _merge(
        self,
        changed: np.ndarray,
        leaving_ends: np.ndarray,
        leaving: np.ndarray,
        entering_ends: np.ndarray,
        entering: np.ndarray,
        slots: np.ndarray,
    ) -> None:
        """Writes shards anew; see `rowmesh.ops.dynamic_index.cuda.merge`."""
        from rowmesh.ops.dynamic_index import cuda

        upload, numbers = self.indexes.upload, np.diff(entering_ends)
        self._is_second[changed] = ~self._is_second[changed]
        merge = partial(
            cuda.merge,
            *(upload(changed), upload(self._used_begins[changed])),
            *(upload(leaving), upload(leaving_ends)),
            *(upload(entering), upload(slots.astype(np.int32)), upload(entering_ends)),
            *(self.indexes.spans, self.indexes.ids, self.indexes.slots),
            first_span=self._first_span,
            num_steps=self.indexes.num_steps,
            most=int(max(self.used[changed].max(), numbers.max())),
        )
        self._run(merge)
        self.used[changed] += numbers - np.diff(leaving_ends)
        self._note_spans()

    @property
    def _used_begins(self) -> np.ndarray:
        """Where the ids of each shard begin now."""
        return self._begins + np.where(self._is_second, self._shape.capacities, 0)

    def _note_spans(self) -> None:
        """Tells the device where shards are, and how many ids they have."""
        spans = self.indexes.upload(np.stack([self._used_begins, self.used], axis=1))
        self._run(lambda: self._spans.copy_(spans))

    # Known ids

    def _slots_at(self, places: np.ndarray) -> np.ndarray:
        at = self.indexes.upload(places)
        return self._run(lambda: self.indexes.slots[at].cpu().numpy().astype(np.int64))

    def slots_in(self, shard: int) -> np.ndarray:
        """All slots of one shard."""
        begin = int(self._used_begins[shard])
        part = slice(begin, begin + int(self.used[shard]))
        return self._run(lambda: self.indexes.slots[part].cpu().numpy().astype(np.int64))

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Copies of records."""
        at = self.indexes.upload(slots)
        return self._run(lambda: self._records[at].cpu().numpy())

    def facts(self, slots: np.ndarray) -> np.ndarray:
        """See `ScoredIndex.facts`."""
        return self.read(slots)[:, SEEN:]

    def set_facts(self, slots: np.ndarray, facts: np.ndarray) -> None:
        """See `ScoredIndex.set_facts`."""
        self._set(slots, slice(SEEN, SCORE + 1), facts)

    def _set(self, slots: np.ndarray, columns: slice, values: np.ndarray) -> None:
        at, new = self.indexes.upload(slots), self.indexes.upload(values)

        def set() -> None:
            self._records[at, columns] = new

        self._run(set)

    def ids_of(self, slots: np.ndarray) -> np.ndarray:
        """The ids in slots."""
        return self.read(slots)[:, ID]


def _ends(counts: np.ndarray) -> np.ndarray:
    """From 0: how many there are up to each."""
    return np.concatenate([[0], np.cumsum(counts)])
