"""TableSpec: defaults, and what it refuses."""

import pytest
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.tables import TableSpec, TensorTrain
from rowmesh.tables.update_rules import SGD, AdaGrad, RowWiseAdaGrad


def test_defaults():
    table = TableSpec(name="item", num_rows=9, dim=4)
    assert (table.features, table.pooling, table.dtype) == (("item",), "sum", torch.float32)
    assert (table.out_of_range, table.send) == ("error", "rows")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_rows": 0}, "num_rows must be 1 or more, got 0"),
        ({"dim": 0}, "dim must be 1 to 1024, got 0"),
        ({"dim": 1025}, "dim must be 1 to 1024, got 1025"),
        ({"pooling": "max"}, "'sum', 'mean' or 'none', got 'max'"),
        ({"dtype": torch.float16}, r"dtype must be one of .*got torch.float16"),
        ({"features": ("a", "a")}, "a feature twice"),
        ({"out_of_range": 9}, "'error' or a row below 9, got 9"),
        ({"out_of_range": -1}, "'error' or a row below 9, got -1"),
        ({"out_of_range": "clamp"}, "'error' or a row below 9, got 'clamp'"),
        ({"out_of_range": None}, "'error' or a row below 9, got None"),
        ({"features": ()}, "no features.*leave the table out"),
        ({"send": "ids"}, r"send must be one of \('auto', 'rows', 'sums'\), got 'ids'"),
        ({"send": "sums", "pooling": "none"}, "send='sums', but it has pooling='none'.*send 'rows' or 'auto'"),
        ({"send": "sums", "storage": "tiered"}, "send='sums', but the table is tiered, and sums are of dense tables"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ConfigurationError, match=f"table 'item'.*{message}"):
        TableSpec(**({"name": "item", "num_rows": 9, "dim": 4} | change))


def test_features_are_names_not_letters():
    with pytest.raises(ConfigurationError, match=r"table 'item': features must be a tuple.*\('user',\)"):
        TableSpec(name="item", num_rows=3, dim=4, features="user")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": "hashed"}, r"storage must be one of \('dense', 'tiered', 'tensor_train', 'dynamic'\), got"),
        ({"storage": "dense"}, r"is dense and has no cores for TensorTrain\(rank=4.*storage='tensor_train' too"),
        ({"optimizer": RowWiseAdaGrad()}, r"row_wise_adagrad keeps 'sum' by row.*take the optimizer adagrad, sgd or"),
        ({"dtype": torch.bfloat16}, "cores of tensor-train tables are float32 or float64, not bfloat16"),
        ({"tensor_train": TensorTrain(rank=99)}, r"ranks \(99, 99\) are larger than .* at most \(\d+, \d+\)"),
        (
            {"tensor_train": TensorTrain(memory_bytes=1)},
            "no rank meets memory_bytes = 1 for .* at rank 1",
        ),
    ],
)
def test_tensor_train_tables_that_cannot_be(changes, message):
    cored = {"storage": "tensor_train", "tensor_train": TensorTrain(rank=4), "optimizer": AdaGrad()}
    with pytest.raises(ConfigurationError, match=f"table 'item'.*{message}"):
        TableSpec(name="item", num_rows=100, dim=8, **(cored | changes))


def test_the_shape_of_cores():
    table = TableSpec(name="item", num_rows=100, dim=8, storage="tensor_train", optimizer=AdaGrad())
    assert table.tensor_train_shape == TensorTrain().shape(100, 8)
    assert table.tensor_train_shape.row_factors == (4, 5, 5)


@pytest.mark.parametrize("optimizer", [SGD, "sgd", torch.optim.SGD])
def test_an_optimizer_that_is_no_rule_is_refused(optimizer):
    with pytest.raises(ConfigurationError, match=r"table 'a': the optimizer is .*give an update rule"):
        TableSpec(name="a", num_rows=4, dim=4, optimizer=optimizer)


def test_a_table_without_a_name_is_refused():
    with pytest.raises(ConfigurationError, match="has no name"):
        TableSpec(name="", num_rows=4, dim=4)
