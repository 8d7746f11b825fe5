"""Threads that look up at once, beside one that trains, or that all train."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec, TensorTrainOptimizer
from rowmesh._support.faults import arm
from rowmesh.errors import RowmeshError
from rowmesh.pipeline import Pipeline
from rowmesh.tables import TensorTrain, Tiers, Uniform
from rowmesh.tables.update_rules import SGD
from rowmesh.tensor_train.module import TensorTrainEmbeddingBag
from tests.support.threads import in_threads

NUM_ROWS = 500
KINDS = {
    "pooled": {},
    "not pooled": {"pooling": "none"},
    "tiered": {"storage": "tiered"},
    "tensor-train": {"storage": "tensor_train", "tensor_train": TensorTrain(rank=2)},
}


def tables(**options):
    made = {"num_rows": NUM_ROWS, "dim": 4, "initializer": Uniform(), "optimizer": SGD(lr=1.0)} | options
    return [TableSpec(name="item", **made), TableSpec(name="user", **made)]


def collection_of(**options):
    return EmbeddingCollection(tables(**options), tiers=Tiers(fast_share=1.0))


def batch_of(number, size=64):
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ids = torch.randint(NUM_ROWS, (int(offsets[-1]),), generator=generator)
    return SparseBatch(("item", "user"), ids, size, jagged_offsets=offsets)


def vectors(embeddings, batch):
    out = embeddings(batch)
    return torch.cat([part if isinstance(part, torch.Tensor) else part.values for part in map(out.__getitem__, out)])


def look_up(embeddings, batch):
    with torch.no_grad():
        return vectors(embeddings, batch).clone()


def in_thread(function, *args):
    """The result of a function in a thread of its own, as a future."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=function.__name__)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


class Held:
    """Holds the first thread that comes to a point, until it is released."""

    def __init__(self):
        self.came, self.go, self._is_first = threading.Event(), threading.Event(), threading.Lock()

    def __call__(self):
        if self._is_first.acquire(blocking=False):
            self.came.set()
            assert self.go.wait(60)


# Look-ups alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_up_in_the_middle_of_another_ones_changes_nothing(kind):
    embeddings, held = collection_of(**KINDS[kind]), Held()
    expected = [look_up(embeddings, batch_of(number)) for number in range(2)]
    with arm(point="engine.fetched", action=held):
        first = in_thread(look_up, embeddings, batch_of(0))
        assert held.came.wait(60)
        second = look_up(embeddings, batch_of(1))
        held.go.set()
        assert torch.equal(first.result(60), expected[0])
    assert torch.equal(second, expected[1])


@pytest.mark.parametrize("num_pushes", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_look_ups_of_many_threads_find_their_own_rows(kind, num_pushes):
    embeddings = collection_of(**KINDS[kind])
    optimizer = EmbeddingOptimizer(embeddings)
    for number in range(num_pushes):
        vectors(embeddings, batch_of(number)).sum().backward()
        optimizer.step()
    batches = [batch_of(number, 1 + 7 * number) for number in range(12)]
    expected = [look_up(embeddings, batch) for batch in batches]
    before = [(each.routes, each.ids, each.unique_ids) for each in embeddings.counters]

    def serve(thread):
        for number in range(30):
            number = (number + 5 * thread) % len(batches)
            assert torch.equal(look_up(embeddings, batches[number]), expected[number])

    in_threads(serve, 4)
    for counters, counted in zip(embeddings.counters, before, strict=True):
        assert counters.routes - counted[0] == 120
        assert counters.ids > counted[1]
        assert counters.unique_ids > counted[2]


def test_models_are_served_by_many_threads():
    embeddings, dense = collection_of(), torch.nn.Linear(8, 1)

    def predict(batch):
        with torch.no_grad():
            return dense(embeddings(batch).values)

    batches = [batch_of(number) for number in range(20)]
    expected = [predict(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for mine, theirs in zip(pool.map(predict, batches), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_a_tensor_train_bag_is_read_by_many_threads():
    bag = TensorTrainEmbeddingBag(NUM_ROWS, 8, mode="sum", rank=4, seed=0)
    ids = [torch.randint(NUM_ROWS, (40, 3), generator=torch.Generator().manual_seed(n)) for n in range(8)]

    def read(number):
        with torch.no_grad():
            return bag(ids[number])

    expected = [read(number) for number in range(8)]
    in_threads(lambda thread: [torch.testing.assert_close(read(n), expected[n], rtol=0, atol=0) for n in range(8)], 4)


def serve_on_a_rank(mesh, transport, replicas):
    torch.set_num_threads(1)
    embeddings = EmbeddingCollection(tables(), mesh=mesh, transport=transport, replicas=replicas)
    optimizer = EmbeddingOptimizer(embeddings)
    vectors(embeddings, batch_of(mesh.rank)).sum().backward()
    optimizer.step()
    batches = [batch_of(10 * mesh.rank + number) for number in range(6)]
    expected = [look_up(embeddings, batch) for batch in batches]
    vectors(embeddings, batch_of(5 + mesh.rank)).mul(0.0).sum().backward()
    optimizer.step()  # replicas send rows to each other, and some thread waits for them

    def serve(thread):
        for number in range(12):
            number = (number + thread) % len(batches)
            assert torch.equal(look_up(embeddings, batches[number]), expected[number])

    in_threads(serve, 3)
    vectors(embeddings, batch_of(mesh.rank)).sum().backward()
    optimizer.step()  # ranks are still in step
    return embeddings.step_count


@pytest.mark.parametrize(
    "transport, replicas, world_size",
    [
        ("collective", 1, 2),
        pytest.param("one_sided", 1, 2, marks=pytest.mark.slow),
        pytest.param("one_sided", 2, 4, marks=pytest.mark.slow),
        pytest.param("collective", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_threads_of_every_rank_look_up(ranks, transport, replicas, world_size):
    assert ranks.run(serve_on_a_rank, transport, replicas, world_size=world_size) == [3] * world_size


# Beside training


def train(embeddings, optimizer, number=3):
    vectors(embeddings, batch_of(number)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_look_ups_that_began_before(kind):
    embeddings, held = collection_of(**KINDS[kind]), Held()
    optimizer = EmbeddingOptimizer(embeddings)
    before = look_up(embeddings, batch_of(0))
    with arm(point="engine.fetched", action=held), arm(point="gate.wait_to_write", action=held.go.set):
        reader = in_thread(look_up, embeddings, batch_of(0))
        assert held.came.wait(60)
        train(embeddings, optimizer, 0)  # which releases the reader, since it waits for it
    assert torch.equal(reader.result(60), before)
    assert not torch.equal(look_up(embeddings, batch_of(0)), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_up_waits_for_a_step_that_began_before(kind):
    embeddings, held = collection_of(**KINDS[kind]), Held()
    optimizer = EmbeddingOptimizer(embeddings)
    before = look_up(embeddings, batch_of(0))
    with arm(point="engine.push", action=held), arm(point="gate.wait_to_read", action=held.go.set):
        trainer = in_thread(train, embeddings, optimizer, 0)
        assert held.came.wait(60)
        found = look_up(embeddings, batch_of(0))
        trainer.result(60)
    assert torch.equal(found, look_up(embeddings, batch_of(0)))
    assert not torch.equal(found, before)


@pytest.mark.triton
def test_look_ups_on_a_device_take_turns(device):
    embeddings, held = EmbeddingCollection(tables(), device="cuda"), Held()
    expected = [look_up(embeddings, batch_of(number, 3)) for number in range(2)]
    with arm(point="engine.fetched", action=held), arm(point="gate.wait_to_read", action=held.go.set):
        first = in_thread(look_up, embeddings, batch_of(0, 3))
        assert held.came.wait(60)
        second = look_up(embeddings, batch_of(1, 3))
    assert torch.equal(first.result(60), expected[0])
    assert torch.equal(second, expected[1])


# Two that train


def test_two_threads_that_train_at_once_are_refused():
    embeddings = collection_of()
    optimizer = EmbeddingOptimizer(embeddings)
    in_thread(lambda: vectors(embeddings, batch_of(0)).sum().backward()).result(60)
    vectors(embeddings, batch_of(1)).sum().backward()
    with pytest.raises(RowmeshError, match=r"threads .*'MainThread'.* trained at the same time"):
        optimizer.step()
    optimizer.zero_grad()
    train(embeddings, optimizer)


def test_a_step_between_the_look_up_and_the_step_of_another_thread_is_refused():
    embeddings = collection_of()
    optimizer = EmbeddingOptimizer(embeddings)
    loss = vectors(embeddings, batch_of(0)).sum()
    in_thread(train, embeddings, optimizer).result(60)
    loss.backward()
    rows = embeddings.local_rows("item")[0].values.clone()
    with pytest.raises(RowmeshError, match=r"stepped between a look-up of thread 'MainThread' and its step"):
        optimizer.step()
    assert torch.equal(embeddings.local_rows("item")[0].values, rows)
    optimizer.zero_grad()
    train(embeddings, optimizer)


def test_threads_may_train_one_after_the_other():
    found = []
    for in_turns in (False, True):
        embeddings = collection_of()
        optimizer = EmbeddingOptimizer(embeddings)
        for number in range(4):
            if in_turns and number % 2:
                in_thread(train, embeddings, optimizer, number).result(60)
            elif in_turns:  # looked up and stepped in different ones
                in_thread(lambda n=number, e=embeddings: vectors(e, batch_of(n)).sum().backward()).result(60)
                optimizer.step()
            else:
                train(embeddings, optimizer, number)
        found.append(embeddings.local_rows("item")[0].values.clone())
    assert torch.equal(*found)


def a_bag():
    bag = TensorTrainEmbeddingBag(NUM_ROWS, 8, mode="sum", rank=4, seed=0)
    return bag, TensorTrainOptimizer(bag, SGD(lr=1.0))


IDS = torch.arange(40).view(20, 2)


def read_bag(bag):
    with torch.no_grad():
        return bag(IDS)


def test_a_step_of_a_tensor_train_bag_waits_for_those_who_read_it():
    (bag, optimizer), held = a_bag(), Held()
    before = read_bag(bag)
    bag(IDS).sum().backward()
    with arm(point="tensor_train.looked_up", action=held), arm(point="gate.wait_to_write", action=held.go.set):
        reader = in_thread(read_bag, bag)
        assert held.came.wait(60)
        optimizer.step()
    assert torch.equal(reader.result(60), before)
    assert not torch.equal(read_bag(bag), before)


def test_two_threads_that_train_a_tensor_train_bag_at_once_are_refused():
    bag, optimizer = a_bag()
    in_thread(lambda: bag(IDS).sum().backward()).result(60)
    bag(IDS).sum().backward()
    with pytest.raises(RowmeshError, match="'tensor_train' had backward passes in 2 threads since the last step"):
        optimizer.step()
    optimizer.zero_grad()
    in_thread(lambda: bag(IDS).sum().backward()).result(60)
    optimizer.step()


def test_a_bag_that_threads_read_is_copied_and_pickled():
    bag, _ = a_bag()
    for copied in (copy.deepcopy(bag), pickle.loads(pickle.dumps(bag))):
        assert torch.equal(read_bag(copied), read_bag(bag))


class Item:
    def __init__(self, sparse):
        self.sparse = sparse


def test_while_a_pipeline_runs_its_thread_alone_looks_up():
    embeddings = collection_of()
    optimizer = EmbeddingOptimizer(embeddings)
    with Pipeline(embeddings) as pipeline:
        for window in pipeline.windows([Item(batch_of(0)), Item(batch_of(1))]):
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()
            with pytest.raises(RowmeshError, match=r"a pipeline trains in another thread than 'look_up_0'"):
                in_thread(look_up, embeddings, batch_of(0)).result(60)
            look_up(embeddings, batch_of(0))
    in_thread(look_up, embeddings, batch_of(0)).result(60)
