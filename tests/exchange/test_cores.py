"""What tensor-train tables keep and count; whole collections are tested in `tests/test_tensor_train_tables.py`."""

import torch

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.tables import TensorTrain


def cored(name, rows):
    return TableSpec(
        name=name, num_rows=rows, dim=4, optimizer=SGD(), storage="tensor_train", tensor_train=TensorTrain(rank=2)
    )


def count(mesh, transport):
    tables = [cored("a", 100), cored("b", 200)]
    collection = EmbeddingCollection(tables, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    for _ in range(3):
        collection(SparseBatch.from_bags({"a": [[1, 1], [2]], "b": [[5], [mesh.rank]]})).values.sum().backward()
        optimizer.step()
    (counters,), common = collection.counters, collection.common_counters
    collection.close()
    return counters.table_accesses, counters.table_distinct, counters.pushes, common.all_gathers, common.bytes_received


def test_one_message_a_step_for_all_tables(ranks):
    for transport, messages in (("one_sided", 0), ("collective", 3)):
        for accesses, distinct, pushes, gathers, received in ranks.run(count, transport):
            assert (accesses, distinct) == ({"a": 9, "b": 6}, {"a": 6, "b": 6})
            assert (pushes, gathers) == (3, messages)
            assert bool(received) == bool(messages)


def test_buffers_are_reused():
    collection = EmbeddingCollection([cored("a", 100_000)])
    optimizer = EmbeddingOptimizer(collection)
    sizes = []
    for step in range(6):
        ids = torch.arange(2000) * 7 + step
        collection(SparseBatch(("a",), ids, 2000, bag_size=1)).values.sum().backward()
        optimizer.step()
        sizes.append(collection.memory_bytes["buffers"])
    assert sizes[2:] == [sizes[2]] * 4
