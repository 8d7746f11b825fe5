"""The index of dynamic tables on a GPU, or as Triton interprets it, against dictionaries: equal to the bit."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from rowmesh.ops.dynamic_index import victims
from rowmesh.ops.dynamic_index.device import DeviceIndexes, LookedUp
from rowmesh.ops.dynamic_index.scored import IndexShape
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("dynamic_index")
INT64 = np.iinfo(np.int64)
POISON, DECAY_STEPS, NUM_SLOTS = -7, 3, 150
CAPACITIES = np.array([41, 1, 17, 33])  # of shards: whole blocks, one id, and odd numbers
KINDS = (victims.RECENCY, victims.FREQUENCY, victims.BOTH)


class Table:
    """What one index should be, in dictionaries."""

    def __init__(self, index, shape):
        self.index, self.shape, self.slots, self.facts = index, shape, {}, {}
        self.free = list(range(NUM_SLOTS))

    def shard(self, i):
        return int(self.index.locate(np.array([i]))[1][0])

    def key(self, i, step):
        seen, _, score = self.facts[i]
        if self.shape.kind == victims.RECENCY:
            return seen, 0, i
        return self.halved(score, seen, step), seen if self.shape.kind == victims.BOTH else 0, i

    def halved(self, score, seen, step):
        every = self.shape.decay_steps
        return score >> min(63, step // every - (seen - 1) // every) if every else score

    def touch(self, counts, step):
        for i, count in counts.items():
            if i in self.slots:
                seen, before, score = self.facts[i]
                score = min(INT64.max, self.halved(score, seen, step) + (count << 16))
                score = 0 if self.shape.kind == victims.RECENCY else score
                self.facts[i] = step + 1, before + count, score

    def enter(self, ids, step):
        """Lets those of some ids enter for which there is room, with as many sightings as their place says."""
        chosen = []
        for i in ids:
            held = [other for other in (*self.slots, *chosen) if self.shard(other) == self.shard(i)]
            if i not in self.slots and i not in chosen and len(held) < CAPACITIES[self.shard(i)]:
                chosen.append(i)
        new, counts = np.array(chosen, np.int64), np.arange(1, len(chosen) + 1)
        slots = np.array([self.free.pop() for _ in chosen], np.int64)
        hashes, shards, _ = self.index.locate(new)
        self.index.enter(new, hashes, shards, slots, counts, counts, step)
        for i, slot, count in zip(chosen, slots.tolist(), counts.tolist(), strict=True):
            score = 0 if self.shape.kind == victims.RECENCY else count << 16
            self.slots[i], self.facts[i] = slot, (step + 1, count, score)

    def evict(self, step, share):
        """Has a share of those leave which the step has not seen."""
        missing, gone = np.zeros(len(CAPACITIES), np.int64), []
        for shard in range(len(CAPACITIES)):
            others = [i for i in self.slots if self.shard(i) == shard and self.facts[i][0] != step + 1]
            missing[shard] = int(share * len(others))
            gone += sorted(others, key=lambda i: self.key(i, step))[: missing[shard]]
        slots, ids, facts = self.index.evict(missing, step)
        assert sorted(ids.tolist()) == sorted(gone)
        for i, slot, of_id in zip(ids.tolist(), slots.tolist(), facts.tolist(), strict=True):
            assert self.slots.pop(i) == slot
            assert tuple(of_id) == self.facts.pop(i)
            self.free.append(slot)

    def check(self):
        assert self.index.used.sum() == len(self.slots)
        for shard in range(len(CAPACITIES)):
            expected = [self.slots[i] for i in sorted(self.slots) if self.shard(i) == shard]
            assert self.index.slots_in(shard).tolist() == expected
        if self.slots:
            records = self.index.read(np.array([*self.slots.values()]))
            assert records.tolist() == [[i, *self.facts[i]] for i in self.slots]


def tables_of(device, kinds=KINDS):
    shapes = [
        IndexShape(CAPACITIES, 77 + number + 2**63 * (number % 2), 4, 0, NUM_SLOTS, kind, DECAY_STEPS * (number != 2))
        for number, kind in enumerate(kinds)
    ]
    indexes = DeviceIndexes(shapes, device)
    for tensor in (indexes.ids, indexes.slots):
        indexes.stream.run(lambda tensor=tensor: tensor.fill_(POISON))
    return indexes, [Table(index, shape) for index, shape in zip(indexes.tables, shapes, strict=True)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Shards and batches of a few dozen ids have several blocks."""
    monkeypatch.setattr(cuda, "_BLOCK", 16)
    monkeypatch.setattr(cuda, "_SHARD_BLOCK", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_equals_dictionaries(device, seed):
    """Batches are looked up, ids enter and leave, in tables of all rules at once."""
    rng = np.random.default_rng(seed)
    edges = np.array([INT64.min, INT64.max, 0, -1, POISON, 2**31, 2**32])
    every = np.concatenate([edges, rng.integers(-60, 60, 60), rng.integers(INT64.min, INT64.max, 60)])
    indexes, tables = tables_of(device)
    for step in range(0, 9, 3):
        batches = [rng.choice(every, size) for size in (int(rng.integers(0, 40)), 0 if step == 3 else 21, 5)]
        found = indexes.look_up(torch.from_numpy(np.concatenate(batches)), np.cumsum([0, *map(len, batches)]).tolist())
        is_plain = [not set(batches[0].tolist()) - {*tables[0].slots}, False, True]
        indexes.touch(found, is_plain, step)
        check_found(indexes, found, tables, batches)
        for number, (table, batch) in enumerate(zip(tables, batches, strict=True)):
            counts = dict(zip(*(each.tolist() for each in np.unique(batch, return_counts=True)), strict=True))
            is_known = not found.num_unknown[number]
            if not (is_plain[number] and is_known):
                seen = table.index.seen(found)
                assert seen.ids.tolist() == [i for i in sorted(counts) if i not in table.slots]
                assert seen.counts.tolist() == [counts[i] for i in seen.ids.tolist()]
                assert seen.touched.sum() == len(counts) - len(seen.ids)
                table.index.touch_found(found, step)
            table.touch(counts, step)
            table.check()
            table.evict(step, rng.random())
            table.enter(rng.choice(every, 30).tolist(), step)
            table.check()


def check_found(indexes, found: LookedUp, tables, batches):
    indexes.read(found)
    for number, (table, batch, (begin, end)) in enumerate(zip(tables, batches, pairwise(found.bounds), strict=True)):
        ids = found.ids[begin:end].tolist()
        assert sorted(ids) == np.unique(batch).tolist()
        assert found.slots[begin:end].tolist() == [table.slots.get(i, -1) for i in ids]
        assert found.shards[begin:end].tolist() == [table.shard(i) for i in ids]
        assert found.num_unknown[number] == sum(i not in table.slots for i in ids)
    every = [table.slots.get(i, -1) for table, batch in zip(tables, batches, strict=True) for i in batch.tolist()]
    assert indexes.slots_of(found).tolist() == every


def test_counts_and_frequencies_stop_at_the_largest_number(device):
    indexes, (table,) = tables_of(device, kinds=[victims.FREQUENCY])
    table.enter([5], 0)
    for step in (0, 1, 2):
        table.index.touch(np.array([table.slots[5], -1]), np.zeros(2, int), np.full(2, 2**62), np.zeros(2, int), step)
    assert table.index.read(np.array([table.slots[5]])).tolist() == [[5, 3, INT64.max, INT64.max]]
    assert not indexes.records[: table.slots[5]].any()


def test_refuses_what_does_not_fit(device):
    indexes, _ = tables_of(device, kinds=[victims.RECENCY])
    ids, offsets = torch.tensor([1], device=device), torch.tensor([0, 1], device=device)
    index = (indexes.described, indexes.spans, indexes.ids, indexes.slots, 7)
    out = [torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int32, torch.int32, torch.int64)]
    with pytest.raises(TypeError, match="wanted must be int64, got int32"):
        cuda.find(ids.int(), offsets, *index, *out)
    with pytest.raises(ValueError, match="offsets must have 2 elements, got 1"):
        cuda.find(ids, offsets[:1], *index, *out)
    with pytest.raises(ValueError, match="unknown must have 1 elements, got 2"):
        cuda.find(ids, offsets, *index, *out[:2], out[2].new_zeros(2))
