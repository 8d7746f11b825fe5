"""Samples of a SparseBatch in another order, and micro-batches."""

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rowmesh.errors import DataError
from rowmesh.sparse import SparseBatch, micro_batches, take
from rowmesh.sparse.convert import with_empty_bags
from rowmesh.sparse.split import concatenated


def bags_of(batch):
    offsets = batch.offsets.tolist()
    ids = batch.ids.tolist()
    bags = [ids[begin:end] for begin, end in itertools.pairwise(offsets)]
    return [bags[f * batch.batch_size : (f + 1) * batch.batch_size] for f in range(batch.num_features)]


def weighted(batch):
    """Weights that identify each id."""
    return SparseBatch(
        batch.features,
        batch.ids,
        batch.batch_size,
        bag_size=batch.bag_size,
        weights=batch.ids.double() / 7,
        jagged_offsets=batch.jagged_offsets,
    )


@st.composite
def batches(draw):
    batch_size, num_features = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        shape = (num_features, batch_size, draw(st.integers(0, 3)))
        batch = SparseBatch.from_dense(
            [f"f{i}" for i in range(num_features)], torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
        )
    else:
        bag = st.lists(st.integers(0, 99), max_size=4)
        batch = SparseBatch.from_bags({f"f{i}": [draw(bag) for _ in range(batch_size)] for i in range(num_features)})
    return weighted(batch) if draw(st.booleans()) else batch


@given(batches(), st.data())
def test_take_has_the_bags_of_its_samples(batch, data):
    most = batch.batch_size - 1
    samples = data.draw(st.lists(st.integers(0, most), max_size=8)) if most >= 0 else []
    part = take(batch, torch.tensor(samples, dtype=torch.int64))
    assert (part.features, part.batch_size, part.bag_size) == (batch.features, len(samples), batch.bag_size)
    assert bags_of(part) == [[bags[s] for s in samples] for bags in bags_of(batch)]
    assert (part.weights is None) == (batch.weights is None)
    assert part.weights is None or torch.equal(part.weights, part.ids.double() / 7)


@given(batches(), st.data())
def test_micro_batches_hold_every_sample_once(batch, data):
    order = data.draw(st.permutations(range(batch.batch_size)))
    bounds = sorted(data.draw(st.lists(st.integers(0, batch.batch_size), max_size=4)))
    sizes = [end - begin for begin, end in zip([0, *bounds], [*bounds, batch.batch_size], strict=True)]
    parts = micro_batches(batch, sizes, torch.tensor(order, dtype=torch.int64))
    assert [part.batch_size for part in parts] == sizes
    for feature, bags in enumerate(bags_of(batch)):
        joined = [bag for part in parts for bag in bags_of(part)[feature]]
        assert joined == [bags[s] for s in order]


def test_split_keeps_the_order_where_none_is_given():
    batch = SparseBatch.from_bags({"a": [[1], [2, 3], []], "b": [[], [4], [5]]})
    assert [bags_of(part) for part in micro_batches(batch, [1, 2])] == [[[[1]], [[]]], [[[2, 3], []], [[4], [5]]]]


def test_parts_do_not_share_memory_with_the_batch():
    batch = SparseBatch.from_dense(("a",), torch.tensor([[1, 2]]))
    (whole,) = micro_batches(batch, [2])
    whole.ids[0] = 9
    assert batch.ids.tolist() == [1, 2]


def test_refuses_what_does_not_fit():
    batch = SparseBatch.from_bags({"a": [[1], [2]]})
    with pytest.raises(DataError, match=r"\[0, 2\), the batch's; got 0 to 2"):
        take(batch, torch.tensor([0, 2]))
    with pytest.raises(DataError, match=r"int64 with one dimension, got torch.int32"):
        take(batch, torch.tensor([0]).int())
    with pytest.raises(DataError, match=r"sizes \[1\] add up to 1; the batch has 2 samples"):
        micro_batches(batch, [1])
    with pytest.raises(DataError, match=r"sizes \[3, -1\]"):
        micro_batches(batch, [3, -1])
    with pytest.raises(DataError, match="each of the 2 samples once, got 2"):
        micro_batches(batch, [1, 1], torch.tensor([0, 0]))
    with pytest.raises(DataError, match="each of the 2 samples once, got 1"):
        micro_batches(batch, [1, 1], torch.tensor([0]))


def test_does_not_follow_the_default_device():
    batch = SparseBatch.from_bags({"a": [[1], [2, 3]]})
    with torch.device("meta"):
        assert [part.ids.tolist() for part in micro_batches(batch, [1, 1])] == [[1], [2, 3]]


def test_parts_keep_the_time_of_their_batch():
    batch = SparseBatch.from_dense(["a", "b"], torch.arange(6).view(2, 3))
    jagged = SparseBatch.from_bags({"a": [[1], []], "b": [[], [2]]})
    for each in (replace(batch, time=7), replace(jagged, time=7)):
        parts = [take(each, torch.tensor([1, 0])), each.select(["b"]), each.with_aliases({"c": "a"})]
        parts += [
            with_empty_bags(each, ["a"], ["a", "b"]),
            each.routed(lambda count: torch.empty(count, dtype=torch.int64)),
        ]
        assert [part.time for part in parts] == 5 * [7]


def test_what_is_concatenated_has_all_bags():
    bags = [{"a": [[1], [2, 3]], "b": [[], [4]]}, {"a": [[5, 6]], "b": [[7]]}, {"a": [], "b": []}]
    batches = [SparseBatch.from_bags(each) for each in bags]
    weighted = replace(batches[0], weights=torch.arange(4, dtype=torch.float64))
    both = concatenated([weighted, *batches[1:]])
    expected = SparseBatch.from_bags({"a": [[1], [2, 3], [5, 6]], "b": [[], [4], [7]]})
    assert torch.equal(both.ids, expected.ids)
    assert torch.equal(both.offsets, expected.offsets)
    assert both.weights is not None
    assert both.weights.tolist() == [0.0, 1.0, 2.0, 1.0, 1.0, 3.0, 1.0]
    with pytest.raises(DataError, match="have the same features"):
        concatenated([batches[0], SparseBatch.from_bags({"a": [[1]]})])
