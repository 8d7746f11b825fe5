"""Values for `load_run` in every form: read row by row, or refused; an order that nobody gave is not made up."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from rowmesh.errors import DataError
from rowmesh.run.trained_model import as_table, with_whole_ids


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({0: 1.5, 1: 2.5}, r"column 'x' is a dictionary, .* give a list, as df.to_dict\(\"list\"\)"),
        ({1, 2}, "column 'x' is a set, which has no order; give a list"),
        (frozenset([1, 2]), "column 'x' is a frozenset, which has no order"),
        ({"a": 1}.keys(), "column 'x' is a dict_keys, which has no order"),
        ([[1], {2, 3}], "column 'x' has a set as a value; give a list of ids for a bag"),
        ([set(), [1]], "column 'x' has a set as a value"),
        ([{"a": 1}], "column 'x' has a dict as a value"),
        (torch.zeros(3, device="meta"), r"column 'x' is a tensor without values \(on meta\); give a dense one"),
        (torch.ones(3).to_sparse(), "column 'x' is a tensor sparse_coo; give a dense one"),
        (torch.ones(3, dtype=torch.complex64), "column 'x' cannot be read"),
        (torch.tensor(1.0), "column 'x' cannot be read"),
        (7, "column 'x' is one value; give a list of them"),
    ],
    ids=repr,
)
def test_what_has_no_rows_is_refused(column, message):
    with pytest.raises(DataError, match=message):
        as_table({"x": column})


@pytest.mark.parametrize(
    "column",
    [
        [1.5, 2.0],
        (1.5, 2.0),
        np.array([1.5, 2.0]),
        {0: 1.5, 1: 2.0}.values(),
        pa.chunked_array([[1.5], [2.0]]),
        *(
            torch.tensor([1.5, 2.0]).to(kind)
            for kind in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
        ),
        torch.tensor([1.5, 2.0], requires_grad=True),
        torch._neg_view(torch.tensor([-1.5, -2.0])),
    ],
    ids=lambda column: f"{type(column).__name__} {getattr(column, 'dtype', '')}",
)
def test_values_are_read_in_their_order(column):
    assert as_table({"x": column})["x"].to_pylist() == [1.5, 2.0]


def test_ids_that_pandas_made_floats_are_integers_again():
    """It has no integer that is missing."""
    table = pa.table({"user": [3.0, None, 8.0], "half": [1.5, None, 2.0], "price": [1.0, 2.0, 3.0]})
    found = with_whole_ids(table, ["user", "half"])
    assert found.to_pydict() == table.to_pydict()
    assert [str(field.type) for field in found.schema] == ["int64", "double", "double"]


def test_a_frame_with_missing_ids():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"user": [3, None, 8], "price": [1.0, None, 3.0], "tags": [["a"], None, []]})
    assert str(frame["user"].dtype) == "float64"
    found = as_table(frame, ["user", "tags"])
    assert found.to_pydict() == {"user": [3, None, 8], "price": [1.0, None, 3.0], "tags": [["a"], None, []]}
    assert found.schema.field("user").type == pa.int64()
    assert as_table(frame[:1], ["user"]).schema.field("user").type == pa.int64()
    with pytest.raises(DataError, match=r"column 'user' is a dictionary"):
        as_table(frame.to_dict())
    assert as_table(frame.to_dict("list"))["price"].to_pylist()[0] == 1.0
