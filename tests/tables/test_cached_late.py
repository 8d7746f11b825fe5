"""A cached arena on a device holds what dense rows hold, however late its streams are, as long as they keep order."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rowmesh.errors import RowmeshError
from rowmesh.exchange.group import never
from rowmesh.ops.streams import Mark, Stream
from rowmesh.tables import (
    CachedArena,
    DenseArena,
    MemoryStore,
    Normal,
    TableSpec,
    cache,
    cache_memory,
    cached,
    fuse,
)
from rowmesh.tables.cache_memory import CacheMemory, Copier, Uses
from rowmesh.tables.update_rules import RowWiseAdaGrad
from tests.support.streams import Machine, Real
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
kernels_of("merge_update")  # or all are skipped

NUM_SLOTS = 60


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that a batch takes several, and more than there are buffers."""
    for module in (cache, cache_memory, cached):
        monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(cached, "_STAGES", 5)


def make_group(rule=RowWiseAdaGrad(initial_accumulator=0.25)):  # noqa: B008
    (group,) = fuse([TableSpec(name="a", num_rows=NUM_SLOTS, dim=3, optimizer=rule, initializer=Normal(std=1.0))])
    return group


def held():
    return [[SimpleNamespace(rows=range(NUM_SLOTS), slots=range(NUM_SLOTS))]]


class Program:
    """Looks `depth` batches ahead and updates: an arena whose kernels run when the machine comes to them, and, at once,
    dense rows."""

    def __init__(self, machine, depth, num_cached, seed, make_store=MemoryStore, **options):
        self.random, self.machine, self.depth, group = np.random.default_rng(seed), machine, depth, make_group()
        self.arena = CachedArena(
            group, NUM_SLOTS, num_cached, make_store, device=machine.device, streams=machine, timeout_s=20.0, **options
        )
        self.arena.initialize(3, held())
        self.dense = DenseArena(group, NUM_SLOTS)
        self.dense.initialize(3, held())
        self.pins, self.reads = [], []

    def look_ahead(self, slots):
        self.pins.append(self.arena.pin(np.array(slots, np.uint32), never))
        if len(self.pins) > self.depth:
            self.train_oldest()

    def train_oldest(self, changed=True):
        pinned = self.pins.pop(0)
        pinned.ready()
        cache_slots, slots = (torch.from_numpy(x.astype(np.int64)) for x in (pinned.cache_slots, pinned.slots))
        cache_slots = cache_slots.to(self.machine.device)
        self.read(self.arena, cache_slots, slots)
        if changed:
            change = torch.from_numpy(self.random.integers(-9, 10, size=(len(slots), 3))).float()
            self.machine.compute.run(partial(update, self.arena, cache_slots, change.to(self.machine.device)))
            update(self.dense, slots, change)
            pinned.note_use()
            pinned.unpin(changed=True)
        else:
            pinned.unpin()

    def read(self, arena, cache_slots, slots):
        """A kernel that reads, and what it should find."""
        expected = [tensor[slots].clone() for tensor in (self.dense.rows, *self.dense.state.values())]
        tensors = [arena.rows, *arena.state.values()]
        read = lambda: self.reads.append(([tensor[cache_slots].clone() for tensor in tensors], expected))  # noqa: E731
        self.machine.compute.run(read)

    def check_all(self):
        """What a checkpoint would hold."""
        slots = self.random.permutation(NUM_SLOTS)
        rows, state = self.arena.read_rows(slots)
        assert torch.equal(rows, self.dense.rows[slots])
        assert all(torch.equal(state[name], self.dense.state[name][slots]) for name in state)

    def set_some(self):
        slots = self.random.permutation(NUM_SLOTS)[:7]
        index, rows = torch.from_numpy(slots), torch.from_numpy(self.random.normal(size=(7, 3))).float()
        state = {"sum": torch.rand(7)}
        self.arena.write_rows(slots, rows, state)
        self.dense.rows[index], self.dense.state["sum"][index] = rows, state["sum"]

    def check_reads(self):
        self.machine.finish()
        for found, expected in self.reads:
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
        self.reads.clear()

    def run(self, num_batches):
        """Hot rows in most batches, others now and then; between batches what else a program may do."""
        for _ in range(num_batches):
            what = self.random.integers(12)
            if what == 0:
                self.check_all()
            elif what == 1 and self.pins:
                self.train_oldest(changed=False)
            elif what == 2:
                self.arena.flush()
            elif what == 3:
                self.set_some()
            self.look_ahead(np.unique((NUM_SLOTS * self.random.random(12) ** 2.0).astype(int)))
        while self.pins:
            self.train_oldest()
        self.check_all()
        self.check_reads()


def update(arena, places, change):
    """Whole numbers, which come out the same on every device."""
    arena.rows[places] += change
    arena.state["sum"][places] += change.square().sum(1)


def train(seed, machine=None, **options):
    random = np.random.default_rng(seed)
    depth, eagerness = int(random.integers(0, 3)), float(random.choice([0.0, 1.0, 4.0]))
    program = Program(machine or Machine(seed, eagerness), depth, 12 * (depth + 1) + 3, seed, **options)
    with program.arena:
        program.run(30)
    return program.arena


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_late_streams_change_nothing(seed, poison):
    arena = train(seed, poison=poison, verify=bool(seed % 2))
    assert arena.counters.rows_written > 0
    assert arena.counters.rows_read > 0


@pytest.mark.parametrize("seed", range(3))
def test_streams_of_the_device_change_nothing(device, seed):
    train(seed, Real(device), verify=True)


def read_what_is_on_its_way(seed):
    program = Program(Machine(seed, 0.0), 1, 12, seed)
    with program.arena:
        program.look_ahead([50])
        program.check_all()


@pytest.mark.parametrize("seed", range(8))
def test_what_is_on_its_way_can_be_read(seed):
    read_what_is_on_its_way(seed)


def no_marks(self, *_):
    return []


BROKEN = {
    "1, 4: kernels do not wait for copies": (CacheMemory, "marks", no_marks),
    "2, 3: copies do not wait for kernels": (Uses, "of", no_marks),
    "5: outward copies do not wait for inward ones": (
        CacheMemory,
        "take",
        lambda memory, *args: take_beside(memory, *args),
    ),
    "6, 7: the host does not wait for copies": (Copier, "packed", lambda copier: packed_at_once(copier)),
    "7: staging buffers are filled at once": (Copier, "_next_stage", lambda copier: copier._stages[0]),
}


def take_beside(memory, stage, cache_slots):
    inward, memory._inward = memory._inward, Stream(None)
    try:
        TAKE(memory, stage, cache_slots)
    finally:
        memory._inward = inward


def packed_at_once(copier):
    count = copier._count
    copier._packed.arrays.pack(copier._places[:count], copier.records[:count])
    return copier.records[:count]


TAKE = CacheMemory.take


class Done(Mark):
    is_done = True


@pytest.mark.parametrize("name", BROKEN)
def test_every_rule_is_needed(name, monkeypatch):
    """The test of the test."""
    where, method, replacement = BROKEN[name]
    monkeypatch.setattr(Stream, "mark", lambda _: Done())
    monkeypatch.setattr(where, method, replacement)
    for seed in range(20):
        try:
            train(seed)
            read_what_is_on_its_way(seed)
        except (AssertionError, RowmeshError):
            return
    pytest.fail(f"not noticed: {name}")


def test_copies_wait_for_the_cache_slots_they_need_alone():
    """While a batch is computed, that has not even begun, rows of the next one arrive in cache slots used before."""
    machine = Machine(0, 0.0)
    program = Program(machine, 0, 12, 0)
    with program.arena as arena:
        for first in (0, 4, 8):
            program.look_ahead(range(first, first + 4))
        machine.finish()
        arena.flush()  # all cache slots can be reused, the oldest first
        machine.stuck = machine.compute
        program.look_ahead(range(8, 12))
        pinned = arena.pin(np.arange(20, 24, dtype=np.uint32), never)
        arena.memory.wait()
        found = arena.rows[torch.from_numpy(pinned.cache_slots.astype(np.int64))]
        assert torch.equal(found, program.dense.rows[20:24])
        machine.stuck = None
        pinned.unpin()
        program.check_reads()
