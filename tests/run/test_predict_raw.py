"""Scores by runs on raw rows, and by runs with dynamic tables: those that an evaluation computes."""

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch

import rowmesh
from rowmesh.errors import ConfigurationError, DataError, RowmeshError
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.export import export
from rowmesh.run.predict import predict
from rowmesh.run.resolve import resolve
from tests.run.test_predict import evaluated, raw_test_file
from tests.support.raw_runs import TABLES, write_raw_run

SMALL = ["tables.dynamic.capacity=100"]
"""Most users are forgotten by the end."""


@pytest.fixture
def raw_run(tmp_path):
    """A run, and rows that it was not trained on."""

    raw_config = write_raw_run(tmp_path)

    def train(*options):
        run_training(resolve(raw_config, [*TABLES, f"data.test={tmp_path / 'test'}", *options]))
        return tmp_path / "run", tmp_path / "test" / "0.csv"

    return train


@pytest.mark.parametrize("missing", ["initial", "zero"])
def test_scores_of_raw_rows_are_those_of_an_evaluation(raw_run, tmp_path, missing):
    run, file = raw_run(*SMALL, f"tables.dynamic.missing={missing}")
    expected = evaluated(run)
    done = predict(run, file, tmp_path / "scores.parquet", keep=["user"])
    found = pq.read_table(tmp_path / "scores.parquet")
    assert found.column_names == ["line", "score", "user"]
    assert np.array_equal(found["score"].to_numpy(), expected)
    assert 0 < done.unseen["user"] < done.ids["user"] == 100
    model = rowmesh.load_run(run)
    known = model.embeddings.known_rows("user").ids
    assert np.array_equal(model(pc.read_csv(file)).numpy(), expected)
    assert dict(model.unseen) == done.unseen
    assert torch.equal(model.embeddings.known_rows("user").ids, known)  # nothing is admitted


def test_unknown_ids_are_an_error_where_the_table_says_so(raw_run, tmp_path):
    run, file = raw_run("tables.dynamic.missing=error", "data.test=test")
    with pytest.raises(DataError, match="dynamic table 'user' does not know"):
        predict(run, file, tmp_path / "scores.parquet")
    assert not (tmp_path / "scores.parquet").exists()
    model = rowmesh.load_run(run)
    known = {"price": [0.5], "user": ["u1"], "item": ["i1"]}
    assert model(known).shape == (1,)
    with pytest.raises(DataError, match="does not know 1 of the ids"):
        model({**known, "item": ["new"]})


def test_integers_are_the_text_that_a_file_has_of_them(raw_run, tmp_path):
    (tmp_path / "rows" / "3.csv").write_text("click,price,user,item\n" + 20 * "1,0.5,7,i1\n")
    run, _ = raw_run()
    model = rowmesh.load_run(run)
    text, number = ({"price": [0.5], "user": [user], "item": ["i1"]} for user in ("7", 7))
    assert torch.equal(model(text), model(number))
    assert model.unseen["user"] == 0


def test_what_is_derived_is_what_it_is_in_training(raw_run, tmp_path):
    schema = (tmp_path / "schema.toml").read_text()
    derived = '["user", {name = "hour", column = "item", derive = "hour_of_day", time_format = "i%H"}]'
    (tmp_path / "schema.toml").write_text(schema.replace('["user", "item"]', derived))
    for path in [*(tmp_path / "rows").iterdir(), *(tmp_path / "test").iterdir()]:
        head, *lines = path.read_text().splitlines()
        hours = (f"{line.rsplit(',', 1)[0]},i{number % 24:02}" for number, line in enumerate(lines))
        path.write_text("\n".join([head, *hours]) + "\n")
    run, file = raw_run()
    expected = evaluated(run)
    done = predict(run, file, tmp_path / "scores.parquet")
    assert np.array_equal(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), expected)
    assert done.unseen["hour"] == 0


def test_lists_of_parquet_files_are_read_as_in_training(raw_run, tmp_path):
    schema = tmp_path / "schema.toml"
    schema.write_text('format = "parquet"\n' + schema.read_text())
    for path in (*(tmp_path / "rows").iterdir(), tmp_path / "test" / "0.csv"):
        table = pc.read_csv(path)
        bags = [[int(item[1:])] * (number % 3) for number, item in enumerate(table["item"].to_pylist())]
        pq.write_table(table.set_column(3, "item", pa.array(bags)), path)
    run, file = raw_run()
    expected = evaluated(run)
    predict(run, file, tmp_path / "scores.parquet")
    assert np.array_equal(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), expected)
    model, table = rowmesh.load_run(run), pq.read_table(file)
    assert np.array_equal(model(table).numpy(), expected)
    with pytest.raises(DataError, match="'item' holds single ids, and in training it held lists"):
        model({"price": [0.5], "user": ["u1"], "item": [1]})
    with pytest.raises(DataError, match="'item' holds text, and in training it held integers"):
        model({"price": [0.5], "user": ["u1"], "item": [["1"]]})
    pq.write_table(table.set_column(3, "item", pa.array([["1"]] * len(table))), file)
    with pytest.raises(DataError, match=r"0.csv: column 'item' holds text, in the training it holds integers"):
        run_evaluation(run, split=str(file))
    with pytest.raises(ConfigurationError, match=r"--split = 's3://b/x\.csv' has the scheme s3://"):
        run_evaluation(run, split="s3://b/x.csv")
    with pytest.raises(DataError, match=r"0.csv: column 'item' holds text, in .*rows/0.csv it holds integers"):
        raw_run(f"run.folder={tmp_path / 'other'}")
    (tmp_path / "rows" / "0.csv").rename(tmp_path / "0.csv")
    for path in (tmp_path / "rows").iterdir():
        path.unlink()
    file.rename(tmp_path / "rows" / "0.csv")
    with pytest.raises(DataError, match=r"0.csv: column 'item' holds text, in the training it holds integers"):
        raw_run(f"run.folder={tmp_path / 'more'}", f"train.start_from={run}", f"data.test={tmp_path / '0.csv'}")


@pytest.mark.parametrize("change", ["order", "column", "gone"])
def test_a_schema_that_is_edited_later_changes_no_score(raw_run, tmp_path, change):
    """The model keeps that of its training."""
    run, file = raw_run()
    expected, metrics = evaluated(run), run_evaluation(run)
    schema = tmp_path / "schema.toml"
    edited = schema.read_text().replace(
        '["user", "item"]', '["item", "user"]' if change == "order" else '["user", {name = "item", column = "user"}]'
    )
    schema.write_text(edited)
    other = tmp_path / "other.toml"
    other.write_text(edited)
    if change == "gone":
        schema.unlink()
    assert run_evaluation(run) == metrics
    predict(run, file, tmp_path / "scores.parquet")
    assert np.array_equal(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), expected)
    assert np.array_equal(rowmesh.load_run(run)(pc.read_csv(file)).numpy(), expected)
    if change == "order":
        with pytest.raises(RowmeshError, match="differs from it in features and labels: the same ids and values mean"):
            run_evaluation(run, [f"data.raw_schema={other}"])
        with pytest.raises(RowmeshError, match=r"train.start_from: .* differs from it in features and labels"):
            raw_run(f"run.folder={tmp_path / 'more'}", f"train.start_from={run}")
    elif change == "column":  # on purpose
        assert run_evaluation(run, [f"data.raw_schema={other}"]) != metrics


def test_raw_runs_say_what_they_have_not(raw_run, tmp_path):
    run, _ = raw_run()
    with pytest.raises(RowmeshError, match="leave out --data"):
        rowmesh.load_run(run, data=tmp_path)
    with pytest.raises(RowmeshError, match="there is no vocabulary"):
        export(run, tmp_path / "export")


def test_scores_of_prepared_rows_by_dynamic_tables(clicks, tmp_path, config_file):
    dynamic = ["tables.storage=dynamic", "tables.dynamic.capacity=150", "tables.dynamic.shards=2"]
    more = ["tables.initializer.bound=0.1", "data.batch_size=32", "train.patience=0", "train.steps=30"]
    run_training(resolve(config_file, [*dynamic, *more]))
    run, file = config_file.parent / "run", raw_test_file(clicks)
    expected = evaluated(run)
    done = predict(run, file, tmp_path / "scores.parquet")
    assert np.array_equal(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), expected)
    rare = {table.name: table.rare_share["test"] * done.ids[table.name] for table in clicks.tables}
    assert done.unseen["C3"] > rare["C3"]
    assert all(done.unseen[name] >= count for name, count in rare.items())
