"""Ids are whole numbers of 64 bits: nothing is cut to one."""

import numpy as np
import pytest
import torch

from rowmesh import EmbeddingCollection, SparseBatch, TableSpec
from rowmesh.errors import DataError
from rowmesh.sparse.whole import whole_numbers
from rowmesh.tables import Dynamic, Uniform

WRONG = [
    1.7,
    2.0,
    None,
    float("nan"),
    float("inf"),
    2**63,
    -(2**63) - 1,
    "7",
    1j,
    [1],
    np.float64(3),
    torch.tensor(1.5),
]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_what_is_no_whole_number_is_refused_with_its_place(value):
    with pytest.raises(DataError, match="feature 'u', sample 1: ids must be whole numbers"):
        SparseBatch.from_bags({"u": [[1], [2, value]]})


@pytest.mark.parametrize("value", [7, -(2**63), 2**63 - 1, np.int32(7), np.uint8(7), torch.tensor(7)], ids=repr)
def test_whole_numbers_are_taken_as_they_are(value):
    assert SparseBatch.from_bags({"u": [[value]]}).ids.tolist() == [int(value)]


@pytest.mark.parametrize(
    "values",
    [
        np.array([3, 5], ">i4"),
        np.array([3, 5], np.uint16),
        torch.tensor([3, 5], dtype=torch.int8),
        (3, 5),
        range(3, 7, 2),
    ],
    ids=repr,
)
def test_arrays_of_any_integers(values):
    found = whole_numbers(values, "ids")
    assert (found.dtype, found.tolist()) == (torch.int64, [3, 5])


@pytest.mark.parametrize("values", [[1.7], np.array([1.7]), torch.tensor([1.7]), [None], np.array([True])], ids=repr)
def test_statistics_of_no_whole_numbers_are_refused(values):
    dynamic = Dynamic(capacity=10)
    spec = TableSpec(name="u", dim=4, storage="dynamic", dynamic=dynamic, initializer=Uniform(bound=0.1))
    table = EmbeddingCollection([spec])
    for nothing in ([], np.array([]), torch.tensor([])):
        assert table.statistics("u", nothing).known.tolist() == []
    with pytest.raises(DataError, match="the ids of table 'u' must be whole numbers"):
        table.statistics("u", values)
