"""SparseBatch: the shapes it takes, and what it refuses."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional as F

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, TableSpec
from rowmesh.errors import DataError
from rowmesh.sparse import SparseBatch


class Keyed:
    """As much of a KeyedJaggedTensor as rowmesh uses."""

    def __init__(self, keys, values, weights=None, lengths=None, offsets=None, stride=None):
        self._keys, self._values, self._weights, self._offsets, self._stride = keys, values, weights, offsets, stride

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def offsets(self):
        return self._offsets

    def weights_or_none(self):
        return self._weights

    def stride(self):
        return self._stride


@given(st.integers(0, 4), st.integers(1, 4), st.data())
def test_bags_of_any_size(batch_size, num_features, data):
    bag = st.lists(st.integers(0, 99), max_size=4)
    bags = {f"f{i}": [data.draw(bag) for _ in range(batch_size)] for i in range(num_features)}
    batch = SparseBatch.from_bags(bags)
    assert batch.batch_size == batch_size
    offsets = batch.offsets.tolist()
    for i, (name, expected) in enumerate(bags.items()):
        assert batch.features[i] == name
        begin, end = batch.feature_range(i)
        assert batch.ids[begin:end].tolist() == [row for bag in expected for row in bag]
        own = offsets[i * batch_size : (i + 1) * batch_size + 1]
        assert [batch.ids[a:b].tolist() for a, b in itertools.pairwise(own)] == expected


@pytest.mark.parametrize("bag_size", [0, 1, 3])
def test_equal_bags_derive_their_offsets(bag_size):
    ids = torch.arange(2 * 4 * bag_size).view(2, 4, bag_size)
    batch = SparseBatch.from_dense(("a", "b"), ids)
    assert batch.jagged_offsets is None
    assert batch.feature_range(1) == (4 * bag_size, 8 * bag_size)
    assert batch.offsets.tolist() == [i * bag_size for i in range(9)]
    assert batch.feature_range(1) == (4 * bag_size, 8 * bag_size)
    if bag_size:
        assert batch.ids.data_ptr() == ids.data_ptr()


def test_to_and_from_a_keyed_jagged_tensor_without_a_copy():
    values, offsets = torch.tensor([5, 6, 7]), torch.tensor([0, 1, 1, 2, 3])
    weights = torch.tensor([0.5, 1.0, 2.0])
    batch = SparseBatch.from_keyed_jagged_tensor(Keyed(["a", "b"], values, weights, offsets=offsets, stride=2))
    assert batch.features == ("a", "b")
    assert batch.batch_size == 2
    assert batch.ids.data_ptr() == values.data_ptr()
    assert batch.offsets.data_ptr() == offsets.data_ptr()
    assert batch.weights is weights
    back = batch.to_keyed_jagged_tensor(Keyed)
    assert back.keys() == ["a", "b"]
    assert back.values() is batch.ids
    assert back.stride() == 2


def test_a_keyed_jagged_tensor_of_int32_is_widened():
    keyed = Keyed(
        ["a"], torch.tensor([1], dtype=torch.int32), offsets=torch.tensor([0, 1], dtype=torch.int32), stride=1
    )
    batch = SparseBatch.from_keyed_jagged_tensor(keyed)
    assert batch.ids.dtype == batch.offsets.dtype == torch.int64


def test_views_are_laid_out_before_kernels_read_them():
    """Kernels read addresses: a strided view must not reach them."""
    ids, offsets = torch.arange(10)[::2], torch.tensor([[0, 9], [2, 9], [5, 9]])[:, 0]
    batch = SparseBatch(("a",), ids, 2, jagged_offsets=offsets, weights=torch.arange(10.0)[1::2])
    assert batch.ids.is_contiguous()
    assert batch.offsets.is_contiguous()
    assert batch.weights.is_contiguous()
    assert batch.ids.tolist() == [0, 2, 4, 6, 8]


IDS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"features": ("a", "b", "a")}, r"\['a'\] stand more than once"),
        ({"ids": IDS.int()}, r"int64.*got torch.int32"),
        ({"ids": IDS.view(1, 3)}, r"one dimension.*\(1, 3\)"),
        ({"bag_size": 2}, r"1 features × 2 samples × 2 ids a bag make 4 ids, got 3"),
        ({"jagged_offsets": None}, "need offsets"),
        ({"jagged_offsets": torch.tensor([0, 3])}, r"\[F·B \+ 1\] = \[3\]"),
        ({"jagged_offsets": torch.tensor([0, 1, 2])}, r"from 0 to 3 .*got 0 to 2"),
        ({"jagged_offsets": torch.tensor([1, 2, 3])}, r"from 0 to 3 .*got 1 to 3"),
        ({"jagged_offsets": torch.tensor([0, 4, 3])}, "must not decrease; they do at bag 1"),
        ({"jagged_offsets": torch.tensor([0, 1, 3]).int()}, "offsets must be int64"),
        (
            {"ids": torch.arange(4), "bag_size": 2, "jagged_offsets": torch.tensor([0, 3, 4])},
            "bag_size is 2, but by the offsets bag 0 has 3 ids",
        ),
        ({"weights": torch.ones(2)}, r"3 ids need as many weights, got \(2,\)"),
    ],
)
def test_refuses(arguments, message):
    fields = {"features": ("a",), "ids": IDS, "batch_size": 2, "jagged_offsets": torch.tensor([0, 1, 3])} | arguments
    with pytest.raises(DataError, match=message):
        SparseBatch(**fields)


def test_refuses_lists_and_tensors_that_disagree():
    with pytest.raises(DataError, match=r"number of samples: \{'a': 1, 'b': 2\}"):
        SparseBatch.from_bags({"a": [[1]], "b": [[1], [2]]})
    with pytest.raises(DataError, match=r"F = 2, got \(3, 4\)"):
        SparseBatch.from_dense(("a", "b"), torch.zeros(3, 4, dtype=torch.int64))
    keyed = Keyed(["a"], IDS, offsets=IDS)
    keyed.variable_stride_per_key = lambda: True
    with pytest.raises(DataError, match="variable stride"):
        SparseBatch.from_keyed_jagged_tensor(keyed)


@given(st.integers(0, 4), st.integers(1, 4), st.booleans(), st.data())
def test_select_keeps_the_bags_of_its_features(batch_size, num_features, is_weighted, data):
    bag = st.lists(st.integers(0, 99), max_size=4)
    bags = {f"f{i}": [data.draw(bag) for _ in range(batch_size)] for i in range(num_features)}
    batch = SparseBatch.from_bags(bags)
    if is_weighted:
        weights = batch.ids.float() / 7
        batch = SparseBatch(batch.features, batch.ids, batch.batch_size, jagged_offsets=batch.offsets, weights=weights)
    chosen = data.draw(st.lists(st.sampled_from(list(bags)), unique=True, min_size=1))
    part = batch.select(chosen)
    expected = SparseBatch.from_bags({name: bags[name] for name in chosen})
    assert part.features == tuple(chosen)
    assert part.ids.tolist() == expected.ids.tolist()
    assert part.offsets.tolist() == expected.offsets.tolist()
    assert part.weights is None or torch.equal(part.weights, part.ids.float() / 7)


def test_select_of_equal_bags_stays_equal():
    batch = SparseBatch.from_dense(("a", "b", "c"), torch.arange(12).view(3, 2, 2)).select(["c", "a"])
    assert (batch.bag_size, batch.jagged_offsets, batch.ids.tolist()) == (2, None, [8, 9, 10, 11, 0, 1, 2, 3])


def test_select_refuses_what_is_not_there():
    with pytest.raises(DataError, match=r"lacks features \['b'\]"):
        SparseBatch.from_bags({"a": [[1]]}).select(["a", "b"])


@pytest.mark.parametrize("weighted", [False, True])
def test_a_feature_is_looked_up_in_two_tables(weighted):
    """As two look-ups of the same ids in plain torch."""
    narrow, wide = torch.randn(9, 4, requires_grad=True), torch.randn(9, 12, requires_grad=True)
    ids, offsets, weights = torch.tensor([3, 3, 1, 8]), torch.tensor([0, 1, 1, 4]), torch.rand(4)
    batch = SparseBatch(("item",), ids, 3, jagged_offsets=offsets, weights=weights if weighted else None)
    embeddings = EmbeddingCollection(
        [
            TableSpec(name="item", num_rows=9, dim=4, optimizer=SGD(lr=0.5)),
            TableSpec(name="wide", num_rows=9, dim=12, features=("item@wide",), optimizer=SGD(lr=0.5)),
        ]
    )
    for name, values in (("item", narrow), ("wide", wide)):
        (view,) = embeddings.local_rows(name)
        view.values[:] = values.detach()
    out = embeddings(batch.with_aliases({"item@wide": "item"}))
    scale = {"per_sample_weights": weights} if weighted else {}
    plain = [F.embedding_bag(ids, rows, offsets[:-1], mode="sum", **scale) for rows in (narrow, wide)]
    torch.testing.assert_close([out["item"], out["item@wide"]], plain)
    (out["item"].sum() + out["item@wide"].square().sum()).backward()
    (plain[0].sum() + plain[1].square().sum()).backward()
    EmbeddingOptimizer(embeddings).step()
    for name, values in (("item", narrow), ("wide", wide)):
        (view,) = embeddings.local_rows(name)
        torch.testing.assert_close(view.values, values.detach() - 0.5 * values.grad)


def test_aliases_that_cannot_be():
    batch = SparseBatch.from_bags({"item": [[1]]})
    with pytest.raises(DataError, match=r"aliases \['item'\] are features of the batch"):
        batch.with_aliases({"item": "item"})
    with pytest.raises(DataError, match=r"the batch lacks features \['itm'\]"):
        batch.with_aliases({"wide": "itm"})
