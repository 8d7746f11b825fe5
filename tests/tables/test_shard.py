"""What a rank holds of a table is read, set and frozen in the same way, however the table is stored."""

import numpy as np
import pytest
import torch

from rowmesh import AdaGrad, EmbeddingCollection, SparseBatch, TableSpec
from rowmesh.tables import Dynamic, TensorTrain, Tiers, Uniform
from rowmesh.tables.shard import Changed, fields_of, row_dtype
from tests.support.shards import shard_of

TABLES = [
    TableSpec(name="dense", num_rows=40, dim=3),
    TableSpec(name="tiered", num_rows=30, dim=4, storage="tiered"),
    TableSpec(
        name="cores", num_rows=60, dim=4, storage="tensor_train", tensor_train=TensorTrain(rank=2), optimizer=AdaGrad()
    ),
    TableSpec(
        name="dynamic", dim=2, storage="dynamic", dynamic=Dynamic(capacity=20, shards=2), initializer=Uniform(bound=1)
    ),
]
BATCH = {"dense": [[7, 9]], "tiered": [[3]], "cores": [[1, 2]], "dynamic": [[-5, 8, 8]]}


@pytest.fixture
def embeddings():
    made = EmbeddingCollection(TABLES, tiers=Tiers(fast_rows=64))
    made(SparseBatch.from_bags(BATCH))
    yield made
    made.close()


def test_all_tables_have_a_shard(embeddings):
    for which in ("owned", "held", "group"):
        assert [(each.spec.name, each.form) for each in embeddings.shards(which)] == [
            ("dense", "rows"),
            ("tiered", "rows"),
            ("cores", "cores"),
            ("dynamic", "ids"),
        ]


@pytest.mark.parametrize("name", ["dense", "tiered", "cores"])
def test_what_is_set_is_read(embeddings, name):
    for view in shard_of(embeddings, name).views:
        view.values.fill_(3.0)
        view.commit()
    for view in shard_of(embeddings, name).views:
        assert view.values.eq(3.0).all()


def test_fields_say_what_there_is(embeddings):
    for spec in TABLES[:3]:
        shard = shard_of(embeddings, spec.name)
        found = [(name, tuple(t.shape), t.dtype) for view in shard.views for name, t in view.fields.items()]
        assert sorted((field.name, field.shape, field.dtype) for field in fields_of(spec)) == sorted(found)


@pytest.mark.parametrize("name", ["dense", "tiered"])
def test_marked_rows_alone_changed(embeddings, name):
    shard = shard_of(embeddings, name)
    marks = np.zeros(shard.num_slots, np.uint8)
    marks[[2, 5]] = 1
    changed = Changed({id(shard.store): marks})
    moment = shard.freeze(changed)
    ((rows, slots),) = moment.places
    assert rows.tolist() == slots.tolist() == [2, 5]
    ((rows, values),) = shard.vectors(changed, 0, 1)
    assert rows.tolist() == [2, 5]
    assert torch.equal(values, shard.views[0].values[[2, 5]])
    ((kind, numbers),) = moment.arrays
    assert (kind, numbers.dtype, numbers.tolist()) == ("rows", np.int32, [2, 5])
    assert not list(shard.freeze(Changed({id(shard.store): np.zeros_like(marks)})).arrays)


def test_a_moment_of_cores_is_a_copy(embeddings):
    shard = shard_of(embeddings, "cores")
    before = {name: array.copy() for name, array in shard.arrays}
    moment = shard.freeze(None)
    shard.views[0].values.fill_(7.0)
    assert all((array == before[name]).all() for name, array in moment.arrays)


def test_ids_have_rows_and_facts(embeddings):
    shard = shard_of(embeddings, "dynamic")
    assert sorted(shard.ids.tolist()) == [-5, 8]
    arrays = dict(shard.arrays)
    assert dict(zip(arrays["ids"].tolist(), arrays["counts"].tolist(), strict=True)) == {-5: 1, 8: 2}
    (piece,) = shard.pieces[""]
    known = embeddings.known_rows("dynamic")
    assert dict(zip(piece.rows.tolist(), piece.values.tolist(), strict=True)) == dict(
        zip(known.ids.tolist(), known.values.tolist(), strict=True)
    )
    ((ids, values),) = shard.vectors(None, 0, 1)
    assert (ids.tolist(), values.tolist()) == (piece.rows.tolist(), piece.values.tolist())
    assert shard.gone(np.array([-5, 7]), None).tolist() == [7]


def test_ranks_share_what_all_can_compute(embeddings):
    shard = shard_of(embeddings, "cores")
    (whole,) = shard.vectors(None, 0, 1)
    shares = [next(shard.vectors(None, rank, 3)) for rank in range(3)]
    assert np.array_equal(np.concatenate([ids for ids, _ in shares]), whole[0])
    assert torch.equal(torch.cat([values for _, values in shares]), whole[1])


def test_large_tables_need_large_numbers():
    assert (row_dtype(2**31), row_dtype(2**31 + 1)) == (torch.int32, torch.int64)
