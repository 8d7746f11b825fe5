"""A vocabulary that features share: one table, which every command knows."""

import csv
import json
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

import rowmesh
from rowmesh.data import Loader, prepare
from rowmesh.data.profile import profile_prepared
from rowmesh.data.reorder.reorder import choose_tables
from rowmesh.data.schema import Schema
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.export import export
from rowmesh.run.placement import shapes_of
from rowmesh.run.resolve import resolve
from rowmesh.run.table_config import TablesConfig
from rowmesh.run.tables import table_specs
from tests.support.clicks import write_config

CATEGORICAL = ["user", "item", {"name": "history", "separator": "|", "vocabulary": "item"}]


def schema_of(categorical: object = CATEGORICAL) -> Schema:
    return Schema.parse({"label": "click", "categorical": categorical})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("shared"), np.random.default_rng(0)
    files = {}
    for name, size in {"train": 200, "test": 60}.items():
        files[name] = [folder / f"{name}.csv"]
        with files[name][0].open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["click", "user", "item", "history"])
            for _ in range(size):
                item, seen = int(draw.integers(15)), draw.integers(20, size=draw.integers(4)).tolist()
                click = int(draw.random() < (0.7 if item in seen else 0.3))
                lines.writerow([click, f"u{draw.integers(9)}", f"i{item}", "|".join(f"i{each}" for each in seen)])
    return prepare(files, folder / "prepared", schema_of(), block_samples=64)


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_shared_table_has_bags_of_all_its_features(data):
    shapes = shapes_of(
        resolve(write_config(data.folder.parent / "bags.toml", data.folder.parent / "bags", data.folder), []), data
    )
    tables = profile_prepared(data, shapes).tables
    assert [(t.name, t.num_features, t.num_jagged) for t in tables] == [("user", 1, 0), ("item", 2, 1)]


def test_one_vocabulary_counts_all_columns(data):
    counts = Counter()
    for row in rows_of(data.folder.parent / "train.csv"):
        counts.update([row["item"], *filter(None, row["history"].split("|"))])
    values = data.vocabulary("history").to_pylist()
    assert values == data.vocabulary("item").to_pylist()
    assert dict(zip(values, data.counts("item").tolist(), strict=False)) == {value: counts[value] for value in values}
    assert not (data.folder / "counts" / "history.npy").exists()
    (batch,) = Loader(data, "test", batch_size=60)
    for number, row in enumerate(rows_of(data.folder.parent / "test.csv")):
        low, high = (int(batch.sparse.offsets[60 * 2 + number + each]) for each in (0, 1))
        found = [values[each] if each < len(values) else None for each in batch.sparse.ids[low:high].tolist()]
        expected = list(filter(None, row["history"].split("|")))
        assert found == [each if counts[each] >= 2 else None for each in expected]


def test_one_table_has_both_features(data, tmp_path):
    user, item = table_specs(TablesConfig(dim=4), data)
    assert (user.features, item.name, item.features) == (("user",), "item", ("item", "history"))
    config = resolve(write_config(tmp_path / "shared.toml", tmp_path / "run", data.folder))
    profile = profile_prepared(data, shapes_of(config, data), batch_size=50, shuffle=False)
    assert [table.name for table in profile.tables] == ["user", "item"]
    with pytest.raises(ConfigurationError, match=r"feature 'history' has the table 'item', .* write tables\.item"):
        table_specs(TablesConfig.model_validate({"dim": 4, "history": {"dim": 8}}), data)
    with pytest.raises(DataError, match="history share the vocabulary of another feature"):
        choose_tables(data, [])


def test_every_command_knows_the_shared_table(data, tmp_path, command):
    path, found = write_config(tmp_path / "shared.toml", tmp_path / "run", data.folder, batch_size=64), {}
    for ranks in (1, 2):
        run = tmp_path / f"ranks{ranks}"
        done = command(["train", str(path), "tables.dtype=float64", "train.epochs=2", f"run.folder={run}"], ranks=ranks)
        assert done.status == 0, done.err
        found[ranks] = json.loads((run / "evaluation" / "test.json").read_text())["log_loss"]
    assert found[1] == pytest.approx(found[2], abs=1e-9)
    assert run_evaluation(tmp_path / "ranks1").log_loss == pytest.approx(found[1], abs=1e-12)
    export(tmp_path / "ranks1", tmp_path / "export")
    assert sorted(each.name for each in (tmp_path / "export" / "tables").iterdir()) == ["item.parquet", "user.parquet"]
    lines = pq.read_table(tmp_path / "export" / "tables" / "item.parquet")
    assert lines["count"].to_pylist() == data.counts("item").tolist()
    rows = rows_of(data.folder.parent / "test.csv")
    scores = rowmesh.load_run(tmp_path / "ranks1")(
        {name: [row[name] for row in rows] for name in ("user", "item", "history")}
    ).numpy()
    labels = np.array([int(row["click"]) for row in rows])
    assert -np.log(np.where(labels == 1, scores, 1 - scores)).mean() == pytest.approx(found[1])


def test_a_vocabulary_must_be_a_features_own():
    wrong = ["user", {"name": "history", "vocabulary": "itme"}, "item"]
    with pytest.raises(ConfigurationError, match=r"'history' has vocabulary 'itme', .*; did you mean 'item'"):
        schema_of(wrong)
    with pytest.raises(ConfigurationError, match="'a' has vocabulary 'b', which is no categorical feature with a voc"):
        schema_of([{"name": "a", "vocabulary": "b"}, {"name": "b", "vocabulary": "a"}])


def test_a_column_in_two_tables(data, tmp_path):
    """A column read under two names has two tables, of different dims and pooling, with the same ids."""
    path = data.folder.parent / "train.csv"
    tags = {"column": "history", "separator": "|"}
    schema = schema_of(["user", {"name": "history", **tags}, {"name": "wide", **tags}])
    prepared = prepare({"train": [path], "test": [path]}, tmp_path / "prepared", schema)
    (batch,) = Loader(prepared, "train", batch_size=200)
    ids = [batch.sparse.ids[slice(*batch.sparse.feature_range(place))].tolist() for place in (1, 2)]
    assert ids[0] == ids[1]
    config = write_config(
        tmp_path / "two.toml", tmp_path / "run", prepared.folder, "wide.dim = 6", "wide.pooling = 'mean'"
    )
    config.write_text(config.read_text().replace("bottom = [8]\ntop = [16]\n", ""))
    trained = run_training(resolve(config, ["model.name=tests.support.own_models:Wide", "train.epochs=1"]))
    assert trained is not None
    assert run_evaluation(tmp_path / "run") == trained
