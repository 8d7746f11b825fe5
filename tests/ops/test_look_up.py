"""Look-ups on the host: what grows is announced, and what a route borrows comes back."""

import gc

import numpy as np
import pytest
import torch

from rowmesh import EmbeddingCollection, SparseBatch, TableSpec
from rowmesh.errors import IdRangeError
from rowmesh.ops.look_up import SendBuffer, slots_offset
from rowmesh.ops.memory import Buffer

TABLES = [TableSpec(name="a", num_rows=9, dim=3), TableSpec(name="b", num_rows=9, dim=4)]


def test_a_send_buffer_grows_under_a_new_generation():
    send = SendBuffer(Buffer, world_size=3, num_segments=2)
    assert send.slots_offset == slots_offset(3, 2) == 128
    send.reserve_lists(10)
    send.reserve_lists(1000)
    assert send.slots_address == send.lists.address + 128
    assert send.generation == 0
    send.reserve_lists(10_000)
    assert send.generation == 1
    assert send.lists.num_bytes >= 128 + 40_000
    send.reserve_gradients(100_000)
    assert send.generation == 2
    send.reserve_gradients(1000)
    assert send.generation == 2


def test_the_parts_of_the_lists_do_not_overlap():
    send = SendBuffer(Buffer, world_size=3, num_segments=2)
    slots = np.frombuffer(send.lists.bytes, np.uint32, offset=send.slots_offset)
    slots[:], send.segment_offsets[:], send.accesses[:] = 1, 2, 3
    assert bool((slots == 1).all())
    assert bool((send.segment_offsets == 2).all())
    assert send.segment_offsets.shape == (3, 3)
    assert send.accesses.shape == (3, 2)


def num_idle(embeddings):
    gc.collect()
    return [len(exchange.look_ups.idle) for exchange in embeddings.engine.exchanges]


def test_look_ups_come_back():
    embeddings = EmbeddingCollection(TABLES)
    batch = SparseBatch.from_bags({"a": [[1]], "b": [[2]]})
    routes = [embeddings.route(batch) for _ in range(3)]
    assert num_idle(embeddings) == [0, 0]
    out = embeddings.pool(embeddings.fetch(routes[0])).values
    del routes
    assert num_idle(embeddings) == [2, 2]  # the graph keeps one
    out.sum().backward()
    del out
    assert num_idle(embeddings) == [2, 2]  # its gradients wait for the step
    embeddings.push_pending([0.1, 0.1])
    assert num_idle(embeddings) == [3, 3]


@pytest.mark.parametrize("bags", [{"a": [[99]], "b": [[2]]}, {"a": [[1]], "b": [[99]]}])
def test_look_ups_come_back_from_refused_batches(bags):
    embeddings = EmbeddingCollection(TABLES)
    with torch.no_grad():
        embeddings(SparseBatch.from_bags({"a": [[1]], "b": [[2]]}))
    for _ in range(3):
        with pytest.raises(IdRangeError):
            embeddings(SparseBatch.from_bags(bags))
    assert num_idle(embeddings) == [1, 1]
    assert len(embeddings.engine.router.idle) == 1
