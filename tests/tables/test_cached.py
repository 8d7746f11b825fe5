"""A cached arena is a dense arena that fits into less memory: the same rows, to the bit, in any order of events."""

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

from rowmesh._support import faults
from rowmesh._support.faults import arm
from rowmesh.errors import ConfigurationError, NoRoomError, RowmeshError
from rowmesh.ops.merge_update import Singles
from rowmesh.tables import CachedArena, DenseArena, FileStore, MemoryStore, Normal, PinnedRows, TableSpec, fuse
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad
from tests.support.triton import find_device, kernels_of

NUM_A, NUM_SLOTS = 25, 60
RULES = [SGD(lr=0.1), RowWiseAdaGrad(lr=0.1, initial_accumulator=0.25), AdaGrad(lr=0.1), Adam(lr=0.1)]
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=12)


def u32(values):
    return np.array(values, np.uint32)


def make_group(rule=RULES[1], dtype=torch.float32, dim=3):
    """Two tables; the rows of the second are every third one from 7 on."""
    common = {"dim": dim, "optimizer": rule, "dtype": dtype, "initializer": Normal(std=1.0)}
    (group,) = fuse([TableSpec(name="a", num_rows=NUM_A, **common), TableSpec(name="b", num_rows=1000, **common)])
    return group


def held():
    rest = NUM_SLOTS - NUM_A
    first = SimpleNamespace(rows=range(NUM_A), slots=range(NUM_A))
    second = SimpleNamespace(rows=range(7, 7 + 3 * rest, 3), slots=range(NUM_A, NUM_SLOTS))
    return [[first], [second]]


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.triton)])
def memory(request):
    """Whose memory the cache is: None is the host's."""
    if request.param == "host":
        return None
    kernels_of("merge_update")  # or the test is skipped
    return find_device()


def make_cached(group, num_cached, make_store=MemoryStore, **options):
    arena = CachedArena(group, NUM_SLOTS, num_cached, make_store, **({"timeout_s": 20.0} | options))
    arena.initialize(3, held())
    return arena


def make_dense(group, device=None):
    arena = DenseArena(group, NUM_SLOTS, device)
    arena.initialize(3, held())
    return arena


def is_on_device(arena):
    """A CPU may be the device, whose kernels are interpreted then."""
    return arena.memory.uses is not None if isinstance(arena, CachedArena) else not arena.has_views


def update(rows, slots, gradients, step):
    """One gradient a slot, applied to a dense arena, or to pinned rows."""
    arena = rows._arena if isinstance(rows, PinnedRows) else rows
    if is_on_device(arena):
        places = index(slots if arena is rows else rows.cache_slots).to(arena.device)
        count = torch.tensor([len(places)], dtype=torch.int32, device=arena.device)
        merged = kernels_of("merge").singles(places, count)
        arena.apply(merged.with_gradients(gradients.to(arena.device)), 0.1, 0.5, step)
        return
    singles, slots = Singles(), u32(slots)
    gradient_bytes = gradients.element_size() * gradients.shape[1]
    singles(slots.ctypes.data, gradients.data_ptr(), gradient_bytes, len(slots))
    rows.apply(singles, 0.1, 0.5, step)


def gradients_of(group, slots, step):
    dtype = torch.float64 if group.dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(step)
    return torch.randn(len(slots), group.dim, generator=generator, dtype=dtype)


def pin(arena, slots, *may_wait):
    return arena.pin(u32(slots), *may_wait)


def index(slots):
    return torch.from_numpy(np.array(slots, np.int64))


def assert_same(rows, state, dense, slots):
    expected, expected_state = dense.read_rows(np.array(slots))
    assert torch.equal(rows.cpu(), expected)
    for name, values in expected_state.items():
        assert torch.equal(state[name].cpu(), values), name


def assert_holds(arena, pinned, dense):
    cache_slots = index(pinned.cache_slots).to(arena.device)
    state = {name: values[cache_slots] for name, values in arena.state.items()}
    assert_same(arena.rows[cache_slots], state, dense, pinned.slots)


class Pair:
    """A cached arena and the dense one it must equal; the pipeline that drives them looks `depth` batches ahead."""

    def __init__(self, cached, dense, depth):
        self.cached, self.dense, self.depth = cached, dense, depth
        self.pins, self.step = [], 0

    def train(self, batches):
        for batch in batches:
            self.pins.append(pin(self.cached, batch))
            if len(self.pins) > self.depth:
                self.update_oldest()
        while self.pins:
            self.update_oldest()

    def update_oldest(self):
        pinned = self.pins.pop(0)
        self.step += 1
        pinned.ready()
        assert_holds(self.cached, pinned, self.dense)
        gradients = gradients_of(self.cached.group, pinned.slots, self.step)
        update(self.dense, pinned.slots, gradients, self.step)
        update(pinned, pinned.slots, gradients, self.step)
        pinned.unpin(changed=True)

    def check(self):
        slots = list(range(NUM_SLOTS))
        assert_same(*self.cached.read_rows(np.array(slots)), self.dense, slots)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_rule_and_dtype(rule, dtype):
    group = make_group(rule, dtype)
    rng = np.random.default_rng(0)
    with make_cached(group, 24, verify=True, poison=True) as cached:
        pair = Pair(cached, make_dense(group), depth=1)
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
    num_cached = max([len(set().union(*batches[i : i + depth + 1])) for i in range(len(batches))], default=0) + spare
    with make_cached(group, max(num_cached, 1), retain=retain, verify=verify, poison=poison) as cached:
        pair = Pair(cached, make_dense(group), depth)
        pair.train(batches)
        pair.check()
        cached.flush()
        pair.check()
        counters = cached.counters
        read = counters.rows_found + counters.rows_read + counters.rows_initialized
        assert read == sum(map(len, batches))
        assert counters.peak_frames <= num_cached


@settings(max_examples=60)
@given(
    batches=st.lists(st.tuples(SLOTS, SLOTS), min_size=1, max_size=8),
    depth=st.integers(0, 2),
    spare=st.integers(1, 4),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_rows_that_no_batch_asked_for(batches, depth, spare, flags):
    """They change beside batches that have all the room there is."""
    retain, verify, poison = flags
    asked = [slots for slots, _ in batches]
    most = max(len(set().union(*asked[i : i + depth + 1])) for i in range(len(asked)))
    options = {"spare": spare, "retain": retain, "verify": verify, "poison": poison}
    with make_cached(make_group(), max(most, 1), **options) as cached:
        pair = Pair(cached, make_dense(cached.group), depth)
        for slots, others in batches:
            pair.pins.append(pin(cached, slots))
            if len(pair.pins) > depth:
                pair.update_oldest()
            pair.step += 1
            gradients = gradients_of(cached.group, others, pair.step)
            update(pair.dense, others, gradients, pair.step)
            for part, pinned in cached.pin_some(u32(others)):
                update(pinned, others[part], gradients[part], pair.step)
        pair.train([])
        pair.check()
        assert cached.counters.peak_frames <= max(most, 1)


def test_a_batch_that_waits_leaves_room_for_rows_that_no_batch_asked_for():
    """Also where it found some of its rows in the cache, beyond those that batches may pin."""
    with make_cached(make_group(), 4, spare=2, poison=False) as cached:
        first = pin(cached, [0, 1, 2, 3])
        for _, pinned in cached.pin_some(u32([4, 5])):
            update(pinned, pinned.slots, gradients_of(cached.group, pinned.slots, 1), 1)
        second: list[PinnedRows] = []
        thread = threading.Thread(target=lambda: second.append(pin(cached, [4, 5, 6])))
        thread.start()
        for _, pinned in cached.pin_some(u32(range(7, 20))):
            update(pinned, pinned.slots, gradients_of(cached.group, pinned.slots, 2), 2)
        assert not second
        first.unpin()
        thread.join()
        second[0].unpin()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("poison", [False, True])
def test_over_a_file(tmp_path, direct, poison, memory):
    group = make_group()
    rng = np.random.default_rng(1)
    store = partial(FileStore, path=tmp_path / "rows", num_threads=3, direct=direct)
    try:
        cached = make_cached(group, 30, store, verify=True, poison=poison, device=memory)
    except ConfigurationError as error:
        pytest.skip(str(error))
    pair = Pair(cached, make_dense(group, memory), depth=2)
    pair.train(rng.permutation(NUM_SLOTS)[:10] for _ in range(60 if memory is None else 15))
    pair.check()
    assert cached.counters.rows_read > 0
    cached.close()
    assert list(tmp_path.iterdir()) == []


SHAPES = {
    "the same hot row in every batch": [[5, 10 + i, 30 + i] for i in range(20)],
    "all rows shared": [list(range(8))] * 20,
    "no row shared": [list(range(8 * (i % 7), 8 * (i % 7) + 8)) for i in range(20)],
    "empty batches between": [[], list(range(12)), [], [], list(range(20, 24)), []],
}


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("batches", SHAPES.values(), ids=SHAPES)
def test_shapes_of_batches(batches, depth, poison, memory):
    group = make_group()
    fits = max(len(set().union(*batches[i : i + depth + 1])) for i in range(len(batches)))
    with make_cached(group, fits, verify=True, poison=poison, device=memory) as cached:
        pair = Pair(cached, make_dense(group, memory), depth)
        pair.train(batches)
        pair.check()
        if batches == SHAPES["all rows shared"] and not (poison and depth == 0):
            assert cached.counters.rows_found == 19 * 8
            assert cached.counters.rows_forwarded == (19 * 8 if depth else 0)


def test_retained_rows_are_found_again_and_others_are_not():
    group = make_group()
    for retain, found in ((True, 4), (False, 0)):
        with make_cached(group, 20, retain=retain) as cached:
            pair = Pair(cached, make_dense(group), depth=0)
            pair.train([[1, 2, 3, 4]])
            cached.flush()
            assert pin(cached, [1, 2, 3, 4]).num_found == found


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


def train_with_threads(cached, dense, batches, depth, seed):
    """A look-ahead thread pins while this one updates; both pause at random. Returns what the thread raised."""
    pins, room, failures = [], threading.Semaphore(depth + 1), []
    ready = threading.Semaphore(0)

    def look_ahead():
        random = np.random.default_rng(seed)
        try:
            for batch in batches:
                room.acquire()
                time.sleep(random.choice([0, 1e-4, 1e-3]))
                pins.append(pin(cached, batch))
                ready.release()
        except RowmeshError as error:
            failures.append(error)
            ready.release()

    thread = threading.Thread(target=look_ahead, daemon=True)
    thread.start()
    random = np.random.default_rng(seed + 1)
    try:
        for step in range(1, len(batches) + 1):
            ready.acquire()
            if failures:
                break
            pinned = pins.pop(0)
            pinned.check()
            assert_holds(cached, pinned, dense)
            gradients = gradients_of(cached.group, pinned.slots, step)
            update(dense, pinned.slots, gradients, step)
            update(pinned, pinned.slots, gradients, step)
            time.sleep(random.choice([0, 1e-4, 1e-3]))
            pinned.unpin(changed=True)
            room.release()
    except RowmeshError as error:
        failures.append(error)
        room.release(len(batches))
        while pins:
            pins.pop(0).unpin()
    except AssertionError:  # between a check and this comparison the other thread may have read a stale row
        room.release(len(batches))
        thread.join()
        if not failures:
            raise
    thread.join()
    for pinned in pins:
        pinned.unpin()
    return failures


def random_batches(rng, depth):
    """Hot rows in most batches, others now and then; and how many cache slots they need at that depth."""
    batches = [np.unique((NUM_SLOTS * rng.random(rng.integers(1, 14)) ** 2.5).astype(int)) for _ in range(25)]
    fits = max(len(set().union(*batches[i : i + depth + 1])) for i in range(len(batches)))
    return [rng.permutation(batch) for batch in batches], fits


@pytest.mark.parametrize("seed", range(24))
def test_race_hunt(seed):
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(0, 5))
    batches, fits = random_batches(rng, depth)
    group, num_cached = make_group(), fits + int(rng.integers(0, 6))
    store = lambda *sizes: Slow(MemoryStore(*sizes), seed)  # noqa: E731
    with make_cached(group, num_cached, store, verify=True, poison=bool(seed % 3), retain=bool(seed % 2)) as cached:
        dense = make_dense(group)
        assert train_with_threads(cached, dense, batches, depth, seed) == []
        slots = list(range(NUM_SLOTS))
        assert_same(*cached.read_rows(np.array(slots)), dense, slots)


class Forgetful(CachedArena):
    """Broken on purpose: reads rows from the backing store though they are in the cache, changed."""

    def _load(self, pinned, assigned, is_written):
        everything = np.arange(len(pinned.slots))
        super()._load(pinned, everything, self._cache.written.contains(pinned.slots))


@pytest.mark.parametrize("seed", range(4))
def test_broken_forwarding_is_caught(seed):
    """The test of the test: versions notice it, in a plain loop and in the race hunt."""
    group = make_group()
    with Forgetful(group, NUM_SLOTS, NUM_SLOTS, verify=True) as cached:
        cached.initialize(3, held())
        pinned = pin(cached, [30, 4])
        update(pinned, [30, 4], gradients_of(group, [30, 4], 1), 1)
        pinned.unpin(changed=True)
        expected = r"table 'b', row 22: what was read from host memory is version 0, but its last update left version 1"
        with pytest.raises(RowmeshError, match=expected):
            pin(cached, [30])

    batches, _ = random_batches(np.random.default_rng(seed), 2)
    store = lambda *sizes: Slow(MemoryStore(*sizes), seed)  # noqa: E731
    with Forgetful(group, NUM_SLOTS, NUM_SLOTS, store, verify=True) as cached:
        cached.initialize(3, held())
        try:
            failures = train_with_threads(cached, make_dense(group), batches, 2, seed)
        except AssertionError as error:  # the rows were compared before versions were
            pytest.fail(f"versions did not notice: {error}")
        assert failures


def test_a_stale_copy_is_caught_when_it_is_used():
    """What a batch read is right when it reads it, and wrong once another copy of the row was updated."""
    group = make_group()
    with make_cached(group, 20, verify=True) as cached:
        pinned = pin(cached, [4, 9])
        other = pin(cached, [4])
        update(pinned, [4, 9], gradients_of(group, [4, 9], 1), 1)
        other.check()
        other.cache_slots[0] = pinned.cache_slots[1]
        with pytest.raises(RowmeshError, match="table 'a', row 4 is used, but its cache slot was given to another row"):
            other.check()
        with pytest.raises(RowmeshError, match="table 'a', row 4 is used"):
            update(other, [4], gradients_of(group, [4], 1), 1)


def test_rows_that_left_are_poisoned():
    group = make_group()
    with make_cached(group, 20, poison=True) as cached:
        pinned = pin(cached, [4, 9])
        pinned.unpin()
        assert bool(cached.rows[index(pinned.cache_slots)].isnan().all())
        assert bool(cached.state["sum"][index(pinned.cache_slots)].isnan().all())


def test_too_few_cache_slots_say_what_to_raise():
    group = make_group()
    with make_cached(group, 10, timeout_s=0.2) as cached:
        with pytest.raises(
            RowmeshError, match=r"a batch of 11 rows needs 11 more slots .* has 10; .*Let 11 rows or more fit"
        ):
            pin(cached, range(11))
        first = pin(cached, range(8))
        began = time.monotonic()
        message = (
            r"group dim3_row_wise_adagrad: a batch of 4 rows needs 3 more slots of the cache, which has 10; 8 "
            r"are pinned, by this batch and 1 other\(s\) in sight \(waited 0\.\d s\)\. Let 11 rows or more fit"
        )
        with pytest.raises(RowmeshError, match=message):
            pin(cached, [7, 8, 9, 10])
        assert time.monotonic() - began >= 0.2
        first.unpin(changed=True)
        assert pin(cached, [7, 8, 9, 10]).num_found == 1


def test_a_batch_waits_for_cache_slots_and_lets_others_read_meanwhile():
    group = make_group()
    with make_cached(group, 10) as cached:
        first, pins = pin(cached, range(8)), []
        thread = threading.Thread(target=lambda: pins.append(pin(cached, range(20, 26))))
        thread.start()
        time.sleep(0.05)
        cached.read_rows(np.arange(NUM_SLOTS))
        cached.flush()
        assert not pins
        first.unpin(changed=True)
        thread.join()
        assert pins[0].num_found == 0
        assert 0.05 < cached.counters.waited_s < 10


def test_a_batch_waits_as_long_as_it_may():
    asked = []

    def may_wait():
        asked.append(time.monotonic())
        return len(asked) < 3

    with make_cached(make_group(), 10) as cached:
        first = pin(cached, range(8))
        with pytest.raises(NoRoomError, match=r"needs 3 more slots"):
            pin(cached, [7, 8, 9, 10], may_wait)
        assert asked[2] - asked[0] < 5
        first.unpin(changed=True)
        assert pin(cached, [7, 8, 9, 10], lambda: False).num_found == 1  # others only have to be written back


def test_a_batch_that_waits_hears_that_the_arena_is_closed():
    arena, failures = make_cached(make_group(), 10), []
    pin(arena, range(8))

    def wait():
        with pytest.raises(RowmeshError, match="the arena is closed") as failure:
            pin(arena, range(20, 26))
        failures.append(failure)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    arena.close()
    thread.join(10)
    assert failures
    for call in (partial(pin, arena, [1]), arena.flush):
        with pytest.raises(RowmeshError, match="the arena is closed"):
            call()


def test_rows_are_unpinned_once(memory):
    with make_cached(make_group(), 10, device=memory) as cached:
        pinned = pin(cached, [1])
        pinned.unpin(changed=True)
        pinned.unpin()
        assert not pinned.is_pinned
        assert cached.counters.pins == 1


@given(SLOTS, SLOTS, st.booleans(), st.booleans())
def test_rows_can_be_set_wherever_they_are(fast, slots, changed, poison):
    group = make_group()
    with make_cached(group, 12, verify=True, poison=poison) as cached:
        dense = make_dense(group)
        pair = Pair(cached, dense, 0)
        if changed:
            pair.train([fast])
        pinned = pin(cached, fast)
        rows = gradients_of(group, slots, 77)
        state = {"sum": torch.rand(len(slots))}
        cached.write_rows(u32(slots), rows, state)
        dense.rows[index(slots)], dense.state["sum"][index(slots)] = rows, state["sum"]
        pinned.check()
        assert_holds(cached, pinned, dense)
        pair.check()
        pinned.unpin()
        pair.train([slots, fast, list(range(12)), slots])
        pair.check()


def test_after_a_flush_the_file_has_what_the_last_updates_left(tmp_path):
    group = make_group()
    with make_cached(group, 40, partial(FileStore, path=tmp_path / "rows", keep=True)) as cached:
        pair = Pair(cached, make_dense(group), 0)
        pair.train([range(10), range(5, 20), range(30)])
        ahead = pin(cached, range(8, 33))  # in sight, not updated
        cached.flush()
        records = np.fromfile(tmp_path / "rows", np.float32).reshape(-1, 4)
        assert (records[:, :3] == pair.dense.rows[:30].numpy()).all()
        assert (records[:, 3] == pair.dense.state["sum"][:30].numpy()).all()
        ahead.unpin()


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
    with make_cached(group, 12, Failing) as cached:
        pair = Pair(cached, make_dense(group), 0)
        cached.store.broken = "write"
        pair.train([range(12)])
        message = "group dim3_row_wise_adagrad: writing rows back failed: cannot write /some/file: No space left"
        with pytest.raises(RowmeshError, match=message):
            pin(cached, range(20, 30))
        pair.check()  # a checkpoint can still be made
        with pytest.raises(RowmeshError, match=message):
            cached.flush()
        cached.store.broken = ""
        while True:  # failures of tries in between
            try:
                cached.flush()
                break
            except RowmeshError:
                continue
        pair.train([range(20, 30), range(8)])
        pair.check()


def test_a_batch_that_cannot_be_read_leaves_no_trace():
    group = make_group()
    with make_cached(group, 12, Failing, verify=True) as cached:
        pair = Pair(cached, make_dense(group), 0)
        pair.train([range(12), range(20, 30), range(11, 16)])
        cached.store.broken = "read"
        for _ in range(5):
            with pytest.raises(RowmeshError, match="cannot read /some/file"):
                pin(cached, [12, 13, 0, 1, 2, 3])
        cached.store.broken = ""
        pair.train([[12, 13, 0, 1, 2, 3], range(12)])
        pair.check()


def test_threads_end_with_the_arena():
    def alive():
        return {thread for thread in threading.enumerate() if thread.name.startswith("rowmesh")}

    before = alive()
    arena = make_cached(make_group(), 10)
    assert alive() > before
    arena.close()
    arena.close()
    assert alive() == before
    arena = make_cached(make_group(), 10)
    del arena
    gc.collect()
    assert alive() == before


@pytest.mark.parametrize("rule", [RowWiseAdaGrad(), Adam()])
def test_memory_is_counted_and_does_not_grow_with_the_table(rule, memory):
    sizes = []
    for num_slots in (1000, 8_000_000):
        with CachedArena(make_group(rule), num_slots, 100, device=memory) as cached:
            assert cached.num_bytes == (100 * 3 * 4, 100 * 4 if rule.name == "row_wise_adagrad" else 100 * 24)
            sizes.append(cached.bookkeeping_bytes)
    assert sizes[1] - sizes[0] == (8_000_000 - 1000) / 8


@pytest.mark.parametrize("num_cached", [0, 2**31])
def test_refuses_impossible_sizes(num_cached):
    with pytest.raises(ConfigurationError, match="num_cached must be 1 to"):
        CachedArena(make_group(), 10, num_cached)


def out_of_memory():
    raise MemoryError("no memory")


@pytest.mark.parametrize("point", ["cached.assigned", "cached.load"])
def test_without_memory_a_pin_has_no_turn_and_no_rows(point):
    with make_cached(make_group(), 10, timeout_s=5.0) as arena:
        first = arena.read_rows(u32([3, 4]))[0]
        with pytest.raises(MemoryError), arm(point=point, action=out_of_memory):
            arena.pin(u32([3, 4]))
        pinned = arena.pin(u32(range(10)), lambda: False)  # all slots are free
        assert torch.equal(arena.rows[torch.from_numpy(pinned.cache_slots.astype(np.int64))][3:5], first)
        pinned.unpin()


def test_a_turn_that_does_not_end_is_waited_for_no_longer_than_the_timeout():
    with make_cached(make_group(), 10, timeout_s=0.2) as arena:
        arena._is_taken = True
        with pytest.raises(RowmeshError, match=r"another thread has read or written rows of .* and has not ended"):
            arena.pin(u32([1]))
        with pytest.raises(RowmeshError, match="has not ended"):
            arena.read_rows(u32([1]))
        arena._is_taken = False
        arena.pin(u32(range(10)), lambda: False).unpin()


def test_the_thread_that_writes_back_survives_a_lack_of_memory():
    with make_cached(make_group(), 4, timeout_s=5.0) as arena, arm(point="cache.pack", action=out_of_memory):
        arena.pin(u32([1, 2, 3, 4])).unpin(changed=True)
        with pytest.raises(RowmeshError, match="writing rows back failed: no memory"):
            arena.pin(u32([5, 6, 7, 8]))
        with pytest.raises(RowmeshError, match="writing rows back failed: no memory"):
            arena.flush()
        faults._armed.clear()
        arena.pin(u32([5, 6, 7, 8])).unpin()
