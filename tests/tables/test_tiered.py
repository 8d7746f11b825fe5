"""A tiered arena is a dense arena that fits into less memory: the same rows, to the bit, in any order of events."""

import gc
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError, NoRoomError, RowmeshError
from rowmesh.ops.merge_update import Singles
from rowmesh.optim import SGD, AdaGrad, Adam, RowWiseAdaGrad
from rowmesh.tables import DenseArena, FileStore, MemoryStore, Normal, TableSpec, TieredArena, fuse

NUM_A, NUM_SLOTS = 25, 60
RULES = [SGD(lr=0.1), RowWiseAdaGrad(lr=0.1, initial_accumulator=0.25), AdaGrad(lr=0.1), Adam(lr=0.1)]
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=12)


def u32(values):
    return np.array(values, np.uint32)


def make_group(rule=RULES[1], dtype=torch.float32, dim=5):
    """Two tables; the rows of the second are every third one from 7 on."""
    common = {"dim": dim, "optimizer": rule, "dtype": dtype, "initializer": Normal(std=1.0)}
    (group,) = fuse([TableSpec(name="a", num_rows=NUM_A, **common), TableSpec(name="b", num_rows=1000, **common)])
    return group


def held():
    rest = NUM_SLOTS - NUM_A
    first = SimpleNamespace(rows=range(NUM_A), slots=range(NUM_A))
    second = SimpleNamespace(rows=range(7, 7 + 3 * rest, 3), slots=range(NUM_A, NUM_SLOTS))
    return [[first], [second]]


def make_tiered(group, num_frames, make_store=MemoryStore, **options):
    arena = TieredArena(group, NUM_SLOTS, num_frames, make_store, **({"timeout_s": 20.0} | options))
    arena.initialize(3, held())
    return arena


def make_dense(group):
    arena = DenseArena(group, NUM_SLOTS)
    arena.initialize(3, held())
    return arena


def update(arena, slots, gradients, step, frames=None):
    """One gradient a slot, applied to a dense or (given frames) a tiered arena."""
    singles, slots = Singles(), u32(slots)
    gradient_bytes = gradients.element_size() * gradients.shape[1]
    singles(slots.ctypes.data, gradients.data_ptr(), gradient_bytes, len(slots))
    where = () if frames is None else (frames.ctypes.data,)
    arena.apply(singles, *where, 0.1, 0.5, step)


def gradients_of(group, slots, step):
    dtype = torch.float64 if group.dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(step)
    return torch.randn(len(slots), group.dim, generator=generator, dtype=dtype)


def lease_of(arena, slots, *may_wait):
    slots = u32(slots)
    return arena.lease(slots.ctypes.data, len(slots), *may_wait)


def index(slots):
    return torch.from_numpy(np.array(slots, np.int64))


def assert_same(rows, state, dense, slots):
    assert torch.equal(rows, dense.rows[index(slots)])
    for name, values in dense.state.items():
        assert torch.equal(state[name], values[index(slots)]), name


def assert_lease_holds(arena, lease, dense):
    frames = index(lease.frames)
    state = {name: values[frames] for name, values in arena.state.items()}
    assert_same(arena.rows[frames], state, dense, lease.slots)


class Pair:
    """A tiered arena and the dense one it must equal; the pipeline that drives them looks `depth` batches ahead."""

    def __init__(self, tiered, dense, depth):
        self.tiered, self.dense, self.depth = tiered, dense, depth
        self.leases, self.step = [], 0

    def train(self, batches):
        for batch in batches:
            self.leases.append(lease_of(self.tiered, batch))
            if len(self.leases) > self.depth:
                self.update_oldest()
        while self.leases:
            self.update_oldest()

    def update_oldest(self):
        lease = self.leases.pop(0)
        self.step += 1
        self.tiered.check(lease)
        assert_lease_holds(self.tiered, lease, self.dense)
        gradients = gradients_of(self.tiered.group, lease.slots, self.step)
        update(self.dense, lease.slots, gradients, self.step)
        update(self.tiered, lease.slots, gradients, self.step, lease.frames)
        self.tiered.release(lease)

    def check(self):
        slots = list(range(NUM_SLOTS))
        assert_same(*self.tiered.read_rows(np.array(slots)), self.dense, slots)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_rule_and_dtype(rule, dtype):
    group = make_group(rule, dtype)
    rng = np.random.default_rng(0)
    with make_tiered(group, 24, verify=True, poison=True) as tiered:
        pair = Pair(tiered, make_dense(group), depth=1)
        pair.train(rng.permutation(NUM_SLOTS)[:12] for _ in range(20))
        pair.check()


@settings(max_examples=150)
@given(
    batches=st.lists(SLOTS, max_size=12),
    depth=st.integers(0, 3),
    spare=st.integers(0, 10),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_any_batches_at_any_depth(batches, depth, spare, flags):
    retain, verify, poison = flags
    group = make_group()
    num_frames = max([len(set().union(*batches[i : i + depth + 1])) for i in range(len(batches))], default=0) + spare
    with make_tiered(group, max(num_frames, 1), retain=retain, verify=verify, poison=poison) as tiered:
        pair = Pair(tiered, make_dense(group), depth)
        pair.train(batches)
        pair.check()
        tiered.flush()
        pair.check()
        counters = tiered.counters
        read = counters.rows_found + counters.rows_read + counters.rows_initialized
        assert read == sum(map(len, batches))
        assert counters.peak_frames <= num_frames


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("poison", [False, True])
def test_over_a_file(tmp_path, direct, poison):
    group = make_group()
    rng = np.random.default_rng(1)
    store = partial(FileStore, path=tmp_path / "rows", num_threads=3, direct=direct)
    try:
        tiered = make_tiered(group, 30, store, verify=True, poison=poison)
    except ConfigurationError as error:
        pytest.skip(str(error))
    pair = Pair(tiered, make_dense(group), depth=2)
    pair.train(rng.permutation(NUM_SLOTS)[:10] for _ in range(60))
    pair.check()
    assert tiered.counters.rows_read > 0
    tiered.close()
    assert list(tmp_path.iterdir()) == []


SHAPES = {
    "the same hot row in every batch": [[5, 10 + i, 30 + i] for i in range(20)],
    "all rows shared": [list(range(8))] * 20,
    "no row shared": [list(range(8 * (i % 7), 8 * (i % 7) + 8)) for i in range(20)],
    "empty batches between": [[], list(range(12)), [], [], list(range(20, 24)), []],
}


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("batches", SHAPES.values(), ids=SHAPES)
def test_shapes_of_batches(batches, depth, poison):
    group = make_group()
    fits = max(len(set().union(*batches[i : i + depth + 1])) for i in range(len(batches)))
    with make_tiered(group, fits, verify=True, poison=poison) as tiered:
        pair = Pair(tiered, make_dense(group), depth)
        pair.train(batches)
        pair.check()
        if batches == SHAPES["all rows shared"] and not (poison and depth == 0):
            assert tiered.counters.rows_found == 19 * 8
            assert tiered.counters.rows_forwarded == (19 * 8 if depth else 0)


def test_retained_rows_are_found_again_and_others_are_not():
    group = make_group()
    for retain, found in ((True, 4), (False, 0)):
        with make_tiered(group, 20, retain=retain) as tiered:
            pair = Pair(tiered, make_dense(group), depth=0)
            pair.train([[1, 2, 3, 4]])
            tiered.flush()
            assert lease_of(tiered, [1, 2, 3, 4]).num_found == found


class Slow:
    """A store whose reads and writes take their time."""

    def __init__(self, store, seed):
        self._store, self._random = store, np.random.default_rng(seed)
        self.stride, self.num_bytes = store.stride, store.num_bytes
        self.flush, self.close = store.flush, store.close

    def read(self, slots, records):
        time.sleep(self._random.choice([0, 1e-4, 1e-3]))
        self._store.read(slots, records)

    def write(self, slots, records):
        time.sleep(self._random.choice([0, 1e-4, 2e-3]))
        self._store.write(slots, records)


def train_with_threads(tiered, dense, batches, depth, seed):
    """A look-ahead thread leases while this one updates; both pause at random. Returns what the thread raised."""
    leases, room, failures = [], threading.Semaphore(depth + 1), []
    ready = threading.Semaphore(0)

    def look_ahead():
        random = np.random.default_rng(seed)
        try:
            for batch in batches:
                room.acquire()
                time.sleep(random.choice([0, 1e-4, 1e-3]))
                leases.append(lease_of(tiered, batch))
                ready.release()
        except RowmeshError as error:
            failures.append(error)
            ready.release()

    thread = threading.Thread(target=look_ahead)
    thread.start()
    random = np.random.default_rng(seed + 1)
    try:
        for step in range(1, len(batches) + 1):
            ready.acquire()
            if failures:
                break
            lease = leases.pop(0)
            tiered.check(lease)
            assert_lease_holds(tiered, lease, dense)
            gradients = gradients_of(tiered.group, lease.slots, step)
            update(dense, lease.slots, gradients, step)
            order = random.permutation(len(lease.slots))
            slots, frames = lease.slots[order], np.empty(len(order), np.uint32)
            tiered.frames_of(slots.ctypes.data, len(slots), frames.ctypes.data)
            update(tiered, slots, gradients[index(order)].contiguous(), step, frames)
            time.sleep(random.choice([0, 1e-4, 1e-3]))
            tiered.release(lease)
            room.release()
    except RowmeshError as error:
        failures.append(error)
        room.release(len(batches))
        while leases:
            tiered.release(leases.pop(0), changed=False)
    thread.join()
    for lease in leases:
        tiered.release(lease, changed=False)
    return failures


def random_batches(rng, depth):
    """Hot rows in most batches, others now and then; and how many frames they need at that depth."""
    batches = [np.unique((NUM_SLOTS * rng.random(rng.integers(1, 14)) ** 2.5).astype(int)) for _ in range(25)]
    fits = max(len(set().union(*batches[i : i + depth + 1])) for i in range(len(batches)))
    return [rng.permutation(batch) for batch in batches], fits


@pytest.mark.parametrize("seed", range(24))
def test_race_hunt(seed):
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(0, 5))
    batches, fits = random_batches(rng, depth)
    group, num_frames = make_group(), fits + int(rng.integers(0, 6))
    store = lambda *sizes: Slow(MemoryStore(*sizes), seed)  # noqa: E731
    with make_tiered(group, num_frames, store, verify=True, poison=bool(seed % 3), retain=bool(seed % 2)) as tiered:
        dense = make_dense(group)
        assert train_with_threads(tiered, dense, batches, depth, seed) == []
        slots = list(range(NUM_SLOTS))
        assert_same(*tiered.read_rows(np.array(slots)), dense, slots)


class Forgetful(TieredArena):
    """Broken on purpose: reads rows from the backing store though they are in the fast arena, changed."""

    def _load(self, lease, taken, is_written):
        everything = np.arange(len(lease.slots))
        super()._load(lease, everything, self._tier.written.contains(lease.slots))


@pytest.mark.parametrize("seed", range(4))
def test_broken_forwarding_is_caught(seed):
    """The test of the test: versions notice it, in a plain loop and in the race hunt."""
    group = make_group()
    with Forgetful(group, NUM_SLOTS, NUM_SLOTS, verify=True) as tiered:
        tiered.initialize(3, held())
        lease = lease_of(tiered, [30, 4])
        update(tiered, [30, 4], gradients_of(group, [30, 4], 1), 1, lease.frames)
        tiered.release(lease)
        expected = r"table 'b', row 22: what was read from host memory is version 0, but its last update left version 1"
        with pytest.raises(RowmeshError, match=expected):
            lease_of(tiered, [30])

    batches, _ = random_batches(np.random.default_rng(seed), 2)
    store = lambda *sizes: Slow(MemoryStore(*sizes), seed)  # noqa: E731
    with Forgetful(group, NUM_SLOTS, NUM_SLOTS, store, verify=True) as tiered:
        tiered.initialize(3, held())
        try:
            failures = train_with_threads(tiered, make_dense(group), batches, 2, seed)
        except AssertionError as error:  # the rows were compared before versions were
            pytest.fail(f"versions did not notice: {error}")
        assert failures


def test_a_stale_copy_is_caught_when_it_is_used():
    """What a lease read is right when it reads it, and wrong once another copy of the row was updated."""
    group = make_group()
    with make_tiered(group, 20, verify=True) as tiered:
        lease = lease_of(tiered, [4, 9])
        other = lease_of(tiered, [4])
        update(tiered, [4, 9], gradients_of(group, [4, 9], 1), 1, lease.frames)
        tiered.check(other)
        other.frames[0] = lease.frames[1]
        with pytest.raises(RowmeshError, match="table 'a', row 4 is used, but its frame was given to another row"):
            tiered.check(other)
        with pytest.raises(RowmeshError, match="table 'a', row 4 is used"):
            update(tiered, [4], gradients_of(group, [4], 1), 1, other.frames)


def test_frames_given_up_are_poisoned():
    group = make_group()
    with make_tiered(group, 20, poison=True) as tiered:
        lease = lease_of(tiered, [4, 9])
        tiered.release(lease, changed=False)
        assert bool(tiered.rows[index(lease.frames)].isnan().all())
        assert bool(tiered.state["sum"][index(lease.frames)].isnan().all())


def test_too_few_frames_say_what_to_raise():
    group = make_group()
    with make_tiered(group, 10, timeout_s=0.2) as tiered:
        with pytest.raises(
            RowmeshError, match=r"a batch of 11 rows needs 11 more frames .* has 10; .*Let 11 rows or more fit"
        ):
            lease_of(tiered, range(11))
        first = lease_of(tiered, range(8))
        began = time.monotonic()
        message = (
            r"group dim5_row_wise_adagrad: a batch of 4 rows needs 3 more frames of the fast arena, which has 10; 8 "
            r"are held, by this batch and 1 other\(s\) in sight \(waited 0\.\d s\)\. Let 11 rows or more fit"
        )
        with pytest.raises(RowmeshError, match=message):
            lease_of(tiered, [7, 8, 9, 10])
        assert time.monotonic() - began >= 0.2
        tiered.release(first)
        assert lease_of(tiered, [7, 8, 9, 10]).num_found == 1


def test_a_lease_waits_for_frames_and_lets_others_read_meanwhile():
    group = make_group()
    with make_tiered(group, 10) as tiered:
        first, leases = lease_of(tiered, range(8)), []
        thread = threading.Thread(target=lambda: leases.append(lease_of(tiered, range(20, 26))))
        thread.start()
        time.sleep(0.05)
        tiered.read_rows(np.arange(NUM_SLOTS))
        tiered.flush()
        assert not leases
        tiered.release(first)
        thread.join()
        assert leases[0].num_found == 0
        assert 0.05 < tiered.counters.waited_s < 10


def test_a_lease_waits_as_long_as_it_may():
    asked = []

    def may_wait():
        asked.append(time.monotonic())
        return len(asked) < 3

    with make_tiered(make_group(), 10) as tiered:
        first = lease_of(tiered, range(8))
        with pytest.raises(NoRoomError, match=r"needs 3 more frames"):
            lease_of(tiered, [7, 8, 9, 10], may_wait)
        assert asked[2] - asked[0] < 5
        tiered.release(first)
        assert lease_of(tiered, [7, 8, 9, 10], lambda: False).num_found == 1  # others only have to be written back


def test_a_lease_that_waits_hears_that_the_arena_is_closed():
    arena, failures = make_tiered(make_group(), 10), []
    lease_of(arena, range(8))

    def wait():
        with pytest.raises(RowmeshError, match="the arena is closed") as failure:
            lease_of(arena, range(20, 26))
        failures.append(failure)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    arena.close()
    thread.join(10)
    assert failures
    for call in (partial(lease_of, arena, [1]), arena.flush):
        with pytest.raises(RowmeshError, match="the arena is closed"):
            call()


def test_a_lease_is_released_once():
    with make_tiered(make_group(), 10) as tiered:
        lease = lease_of(tiered, [1])
        tiered.release(lease)
        with pytest.raises(RowmeshError, match="is released twice"):
            tiered.release(lease)


def test_slots_outside_live_leases_are_not_translated():
    with make_tiered(make_group(), 10) as tiered:
        tiered.release(lease_of(tiered, [30]))
        frames = np.empty(1, np.uint32)
        for slot, name in ((30, "table 'b', row 22"), (2, "table 'a', row 2")):
            slots = u32([slot])
            with pytest.raises(RowmeshError, match=f"{name} is used, but no live lease holds it"):
                tiered.frames_of(slots.ctypes.data, 1, frames.ctypes.data)


@given(SLOTS, SLOTS, st.booleans(), st.booleans())
def test_rows_can_be_set_wherever_they_are(fast, slots, changed, poison):
    group = make_group()
    with make_tiered(group, 12, verify=True, poison=poison) as tiered:
        dense = make_dense(group)
        pair = Pair(tiered, dense, 0)
        if changed:
            pair.train([fast])
        lease = lease_of(tiered, fast)
        rows = gradients_of(group, slots, 77)
        state = {"sum": torch.rand(len(slots))}
        tiered.write_rows(u32(slots), rows, state)
        dense.rows[index(slots)], dense.state["sum"][index(slots)] = rows, state["sum"]
        tiered.check(lease)
        assert_lease_holds(tiered, lease, dense)
        pair.check()
        tiered.release(lease, changed=False)
        pair.train([slots, fast, list(range(12)), slots])
        pair.check()


def test_after_a_flush_the_file_has_what_the_last_updates_left(tmp_path):
    group = make_group(dim=4)
    with make_tiered(group, 40, partial(FileStore, path=tmp_path / "rows", keep=True)) as tiered:
        pair = Pair(tiered, make_dense(group), 0)
        pair.train([range(10), range(5, 20), range(30)])
        ahead = lease_of(tiered, range(8, 33))  # in sight, not updated
        tiered.flush()
        records = np.fromfile(tmp_path / "rows", np.float32).reshape(-1, 5)
        assert (records[:, :4] == pair.dense.rows[:30].numpy()).all()
        assert (records[:, 4] == pair.dense.state["sum"][:30].numpy()).all()
        tiered.release(ahead, changed=False)


class Failing:
    """A store that fails while `broken` names how."""

    def __init__(self, *sizes):
        self._store, self.broken = MemoryStore(*sizes), ""
        self.stride, self.num_bytes = self._store.stride, self._store.num_bytes
        self.flush, self.close = self._store.flush, self._store.close

    def read(self, slots, records):
        if self.broken == "read":
            raise RowmeshError("cannot read /some/file")
        self._store.read(slots, records)

    def write(self, slots, records):
        if self.broken == "write":
            raise RowmeshError("cannot write /some/file: No space left on device")
        self._store.write(slots, records)


def test_errors_of_the_writer_surface_and_lose_nothing():
    group = make_group()
    with make_tiered(group, 12, Failing) as tiered:
        pair = Pair(tiered, make_dense(group), 0)
        tiered.store.broken = "write"
        pair.train([range(12)])
        message = "group dim5_row_wise_adagrad: writing rows back failed: cannot write /some/file: No space left"
        with pytest.raises(RowmeshError, match=message):
            lease_of(tiered, range(20, 30))
        pair.check()  # a checkpoint can still be made
        with pytest.raises(RowmeshError, match=message):
            tiered.flush()
        tiered.store.broken = ""
        while True:  # failures of tries in between
            try:
                tiered.flush()
                break
            except RowmeshError:
                continue
        pair.train([range(20, 30), range(8)])
        pair.check()


def test_a_lease_that_cannot_read_leaves_no_trace():
    group = make_group()
    with make_tiered(group, 12, Failing, verify=True) as tiered:
        pair = Pair(tiered, make_dense(group), 0)
        pair.train([range(12), range(20, 30), range(11, 16)])
        tiered.store.broken = "read"
        for _ in range(5):
            with pytest.raises(RowmeshError, match="cannot read /some/file"):
                lease_of(tiered, [12, 13, 0, 1, 2, 3])
        tiered.store.broken = ""
        pair.train([[12, 13, 0, 1, 2, 3], range(12)])
        pair.check()


def test_threads_end_with_the_arena():
    def alive():
        return {thread for thread in threading.enumerate() if thread.name.startswith("rowmesh")}

    before = alive()
    arena = make_tiered(make_group(), 10)
    assert alive() > before
    arena.close()
    arena.close()
    assert alive() == before
    arena = make_tiered(make_group(), 10)
    del arena
    gc.collect()
    assert alive() == before


def test_memory_does_not_grow_with_the_table():
    group = make_group()
    small, large = (TieredArena(group, num_slots, 100) for num_slots in (1000, 8_000_000))
    assert large.num_bytes == small.num_bytes
    assert large.bookkeeping_bytes - small.bookkeeping_bytes == (8_000_000 - 1000) / 8
    small.close()
    large.close()


@pytest.mark.parametrize("num_frames", [0, 2**31])
def test_refuses_impossible_numbers_of_frames(num_frames):
    with pytest.raises(ConfigurationError, match="num_frames must be 1 to"):
        TieredArena(make_group(), 10, num_frames)
