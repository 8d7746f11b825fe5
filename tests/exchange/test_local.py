"""The local transport: one rank updates in place and sends nothing."""

from rowmesh import EmbeddingCollection
from rowmesh._support.counters import CommonCounters
from tests.support import behaviour


def test_gradients_of_several_look_ups_add_up():
    collection = EmbeddingCollection(behaviour.TABLES)
    before = collection.local_rows("a")[0].values.clone()
    for _ in range(2):
        collection(behaviour.batch_of(0, 0)).values.sum().backward()
    collection.push_pending([0.1, 0.1])
    ids = behaviour.batch_of(0, 0).ids[:20]
    counts = ids.bincount(minlength=300).float()
    expected = before - 0.1 * 2 * counts[:, None]
    assert (collection.local_rows("a")[0].values - expected).abs().max() < 1e-6
    assert collection.common_counters == CommonCounters()


def test_a_step_without_gradients():
    collection = EmbeddingCollection(behaviour.TABLES)
    collection.push_pending([0.1, 0.1])
    assert [counters.pushes for counters in collection.counters] == [1, 1]
