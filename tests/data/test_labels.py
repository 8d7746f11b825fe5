"""Several labels, values and weights: from raw files to batches."""

import json

import numpy as np
import pytest
import torch

from rowmesh.data import Loader, Prepared, prepare
from rowmesh.data.schema import Label, Schema
from rowmesh.errors import ConfigurationError, DataError
from tests.support.labelled import BUY, CLICK, RATING, labelled_schema, prepare_labelled

LINES = "click,buy,rating,weight,price,age,user,item,tags"


def table(path):
    return np.genfromtxt(path, delimiter=",", names=True, usecols=range(6))


@pytest.mark.parametrize(("label", "weight"), [([CLICK, RATING], "weight"), (RATING, None), (CLICK, "weight")])
def test_batches_hold_what_the_file_says(tmp_path, label, weight):
    data = prepare_labelled(tmp_path, label, weight)
    raw, names = table(tmp_path / "train.csv"), data.schema.label_names
    batches = [*Loader(data, "train", batch_size=60)]
    labels = torch.cat([batch.labels for batch in batches]).reshape(len(raw), -1)
    for column, name in zip(labels.unbind(1), names, strict=True):
        np.testing.assert_array_equal(column.numpy(), raw[name].astype(np.float32))
    assert batches[0].labels.dim() == (1 if len(names) == 1 else 2)
    if weight is None:
        assert batches[0].weights is None
    else:
        weights = torch.cat([batch.weights for batch in batches if batch.weights is not None])
        np.testing.assert_array_equal(weights.numpy(), raw["weight"].astype(np.float32))
    chosen = batches[0].take(torch.tensor([5, 3]))
    assert torch.equal(chosen.labels, batches[0].labels[[5, 3]])
    assert (chosen.weights is None) == (weight is None)
    split = Prepared.open(data.folder).splits["train"]
    means = {name: np.average(raw[name], weights=raw["weight"] if weight else None) for name in names}
    assert split.label_means == pytest.approx(means, rel=1e-6)
    assert (split.positive_rate is None) == (names[0] == "rating")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1,0,3,-0.5,1,1,a,b,", "weight is '-0.5', not a weight: a finite number, 0 or more"),
        ("1,0,3,nan,1,1,a,b,", "weight is 'nan', not a weight: a finite number, 0 or more"),
        ("1,0,3,,1,1,a,b,", "weight is '', not a weight: a finite number, 0 or more"),
        ("1,0,3,1e39,1,1,a,b,", "weight is '1e39', not a weight: a finite number, 0 or more"),
        ("1,0,3,much,1,1,a,b,", "weight is 'much', not a number"),
        ("1,0,,1,1,1,a,b,", "rating is '', not a finite number"),
        ("1,0,inf,1,1,1,a,b,", "rating is 'inf', not a finite number"),
        (
            "1,3,3,1,1,1,a,b,",
            'buy is \'3\', not 0 or 1; a label of other numbers is label = { name = "buy", kind = "value" }',
        ),
    ],
)
def test_malformed_rows_are_quarantined(tmp_path, row, reason):
    path = tmp_path / "train.csv"
    path.write_text("\n".join([LINES, "1,0,3,1,1,1,a,b,", row, "0,0,2,0,1,1,a,b,"]) + "\n")
    data = prepare({"train": [path]}, tmp_path / "out", labelled_schema([CLICK, BUY, RATING], "weight"))
    assert (data.splits["train"].samples, data.bad_rows) == (2, 1)
    bad = json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())
    assert (bad["line"], bad["row"]) == (3, row)
    assert bad["reason"].startswith(reason)


def test_a_split_needs_weight(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("\n".join([LINES, "1,0,3,0,1,1,a,b,", "0,0,2,0,1,1,a,b,"]) + "\n")
    with pytest.raises(DataError, match="every sample of the train split has weight 0 in column 'weight'; give"):
        prepare({"train": [path]}, tmp_path / "out", labelled_schema(CLICK, "weight"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label": []}, "label is empty; name at least one column"),
        ({"label": ["y", "y"]}, "named more than once: y"),
        ({"label": "y", "weight": "y"}, "named more than once: y"),
        ({"label": {"name": "y", "kind": "number"}}, "label.0.kind: Input should be 'binary' or 'value'"),
        ({"label": {"name": "y", "kinds": "value"}}, "unknown key 'label.0.kinds'; did you mean 'kind'"),
    ],
)
def test_mistakes_of_a_schema_are_named(values, message):
    with pytest.raises(ConfigurationError, match=message):
        Schema.parse({"categorical": ["a"], **values})


def test_a_schema_is_kept_as_it_is(tmp_path):
    for label in ("y", ["y", "z"], [{"name": "y", "kind": "value"}]):
        schema = Schema.parse({"label": label, "weight": "w", "categorical": ["a"]})
        schema.save(tmp_path / "schema.toml")
        assert Schema.load(tmp_path / "schema.toml") == schema
    assert Schema.parse({"label": {"name": "y"}, "categorical": ["a"]}).labels == (Label(name="y"),)
