"""More inputs of `benchmarks.gpu_ops`: the index of a dynamic table, full."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_cases import Sizes
from benchmarks.gpu_timing import Case
from rowmesh.ops.dynamic_index.device import DeviceIndexes
from rowmesh.ops.streams import Stream
from rowmesh.tables import Dynamic
from rowmesh.tables.dynamic.shards import shape_of

_ID_BYTES, _SLOT_BYTES, _RECORD_BYTES = 8, 4, 32
_NEW = 100  # of so many distinct ids of a batch one is new


def full_index(sizes: Sizes, device: torch.device) -> tuple[DeviceIndexes, np.ndarray]:
    """An index of as many ids as it holds, and these, seen in steps of their own."""
    rules = Dynamic(capacity=sizes.table_rows)
    shape = shape_of("benchmark", rules, range(rules.num_shards), sizes.table_rows)
    indexes = DeviceIndexes([shape], device)
    (index,) = indexes.tables
    drawn = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 2 * sizes.table_rows))
    hashes, shards, _ = index.locate(drawn)
    order = np.argsort(shards, kind="stable")
    first = np.searchsorted(shards[order], shards[order])
    kept = order[np.arange(len(order)) - first < shape.capacities[shards[order]]]
    ids, slots = drawn[kept], np.arange(len(kept))
    index.insert(ids, hashes[kept], shards[kept], slots)
    seen = np.random.default_rng(1).integers(1, 1000, len(ids))
    index.set_facts(slots, np.stack([seen, np.ones_like(seen), np.zeros_like(seen)], axis=1))
    return indexes, ids


def dynamic_index_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """A batch of known ids; and ids that enter a full table, from which as many leave."""
    indexes, known = full_index(sizes, device)
    yield _known_case(indexes, known, sizes, device)
    yield _new_case(indexes, known, sizes, device)


def _known_case(indexes: DeviceIndexes, known: np.ndarray, sizes: Sizes, device: torch.device) -> Case:
    """The peer has the same facts beside ids in ascending order, as torch can search them."""
    drawn = np.random.default_rng(2).choice(known[: sizes.distinct], sizes.entries)
    ids, (index,) = torch.from_numpy(drawn).to(device), indexes.tables
    ascending = torch.from_numpy(np.sort(known)).to(device)
    counts, seen = torch.zeros_like(ascending), torch.zeros_like(ascending)

    def ours() -> Tensor:
        found = indexes.look_up(ids, [0, len(ids)])
        indexes.touch(found, [True], 1000)
        return indexes.slots_of(found)

    def peer() -> Tensor:
        unique, inverse, number = torch.unique(ids, return_inverse=True, return_counts=True)
        places = torch.searchsorted(ascending, unique)
        counts[places] += number
        seen[places] = 1001
        return places[inverse]

    def check() -> None:
        places = dict(zip(known.tolist(), range(len(known)), strict=True))
        assert ours().tolist() == [places[i] for i in drawn.tolist()], "dynamic_index finds other slots"
        before = index.read(ours()[:1].cpu().numpy())
        ours()
        number = int((drawn == drawn[0]).sum())
        assert (index.read(ours()[:1].cpu().numpy())[:, 2] == before[:, 2] + 2 * number).all(), "counts are wrong"

    num_unique = len(np.unique(drawn))
    moved = len(ids) * (2 * _ID_BYTES + _SLOT_BYTES) + num_unique * (_ID_BYTES + _SLOT_BYTES + 2 * _RECORD_BYTES)
    name = f"dynamic_index {len(ids)} known ids of {len(known)}"
    return Case(name, ours, {"unique, searchsorted": peer}, moved, check, {})


def _new_case(indexes: DeviceIndexes, known: np.ndarray, sizes: Sizes, device: torch.device) -> Case:
    """Ids that no call before had enter, with the host's part; the peer is the sort of all keys alone."""
    (index,), count, calls = indexes.tables, max(sizes.distinct // _NEW, 1), iter(range(1 << 40))
    keys = torch.randint(1 << 40, (len(known),), device=device)

    def ours() -> np.ndarray:
        call = next(calls)
        ids = np.arange(call * count, (call + 1) * count)
        hashes, shards, _ = index.locate(ids)

        def change() -> np.ndarray:
            left, gone, _ = index.evict(np.bincount(shards, minlength=len(index.used)), 2000 + call)
            index.enter(ids, hashes, shards, left, np.ones_like(ids), ids, 2000 + call)
            return gone

        return in_turn(indexes, device, change)

    def check() -> None:
        hashes, shards, _ = index.locate(known)
        seen = index.read(index.find(known, hashes, shards))[:, 1]
        used, gone = index.used.copy(), ours()
        left = np.isin(known, gone)
        assert left.sum() == count, "dynamic_index evicts others than it has"
        for shard in np.unique(shards[left]).tolist():
            mine = shards == shard
            assert seen[mine & left].max() <= seen[mine & ~left].min(), "dynamic_index evicts others than the oldest"
        assert (index.used == used).all(), "dynamic_index does not stay full"

    moved = 2 * len(known) * (_ID_BYTES + _SLOT_BYTES) + len(known) * _RECORD_BYTES
    return Case(f"dynamic_index {count} new ids", ours, {"sort": lambda: torch.sort(keys)}, moved, check, {})


def in_turn(indexes: DeviceIndexes, device: torch.device, work: Callable[[], np.ndarray]) -> np.ndarray:
    """Does on the index's stream what begins and ends amid what is timed on the current one."""
    current = Stream.current(device)
    indexes.stream.wait_for([current.mark()])
    done = work()
    current.wait_for([indexes.stream.mark()])
    return done


CASES = {"dynamic_index": dynamic_index_cases}
