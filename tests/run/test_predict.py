"""Scores of raw files and raw values: those that an evaluation of the same rows computes, however a run was trained."""

import gc
import gzip
import json
import weakref
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rowmesh
from rowmesh.cli.__main__ import main
from rowmesh.data import Loader, ReorderOptions, prepare, reorder
from rowmesh.data.inputs import DataSource
from rowmesh.errors import ConfigurationError, DataError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.run import predict as predict_module
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.metrics import Predictions
from rowmesh.run.predict import predict
from rowmesh.run.resolve import resolve
from tests.support.clicks import write_config

FEATURES = [f"C{number}" for number in range(1, 6)]
LAYOUTS = {
    "plain": [],
    "double": ["tables.dtype=float64"],
    "bfloat16": ["tables.dtype=bfloat16"],
    "network in bfloat16": ["train.precision=bfloat16"],
    "tensor-train": [
        "tables.C3.storage=tensor_train",
        "tables.C3.tensor_train.rank=2",
        "tables.tensor_train.optimizer.name=adagrad",
    ],
    "tiered": ["tables.storage=tiered", "tiers.fast_share=0.5"],
}


def raw_test_file(clicks):
    """What the test split was prepared from."""
    return next((clicks.folder.parent / "raw").glob("test*"))


def evaluated(run):
    """The scores of the test split, as an evaluation computes them."""
    logits, add = [], Predictions.add

    def listen(self, these, labels, weights=None):
        logits.append(these.clone())
        add(self, these, labels, weights)

    with patch.object(Predictions, "add", listen):
        run_evaluation(run)
    return torch.cat([torch.sigmoid(each) for each in logits]).numpy()


@pytest.fixture
def run(config_file):
    run_training(resolve(config_file, ["train.epochs=1"]))
    return config_file.parent / "run"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_an_evaluation(clicks, config_file, tmp_path, layout):
    run_training(resolve(config_file, ["train.epochs=1", *LAYOUTS[layout]]))
    run, file = config_file.parent / "run", raw_test_file(clicks)
    expected = evaluated(run)
    done = predict(run, file, tmp_path / "scores.parquet")
    found = pq.read_table(tmp_path / "scores.parquet")
    assert found.column_names == ["line", "score"]
    assert np.array_equal(found["score"].to_numpy(), expected)
    assert (done.num_rows, done.bad_rows, done.quarantine) == (501, 0, None)
    shares = {table.name: table.rare_share["test"] for table in clicks.tables}
    assert {name: done.unseen[name] / count for name, count in done.ids.items()} == shares
    model = rowmesh.load_run(run)
    assert not model.training
    table = pq.read_table(file)
    scores = model(table)
    assert np.array_equal(scores.numpy(), expected)
    assert not scores.requires_grad
    assert dict(model.unseen) == done.unseen


@pytest.mark.parametrize(
    "options",
    [[], ["placement.strategy=auto"], ["parallel.replicas=2", "parallel.synchronization=average"]],
    ids=["cyclic", "planned", "replicas"],
)
def test_a_run_of_two_ranks(clicks, config_file, tmp_path, command, options):
    done = command(["train", str(config_file), "train.epochs=1", *options], ranks=2)
    assert done.status == 0, done.err
    run = config_file.parent / "run"
    predict(run, raw_test_file(clicks), tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy().astype(float)
    labels = pq.read_table(raw_test_file(clicks))[clicks.schema.label].to_numpy()
    metrics = json.loads((run / "evaluation" / "test.json").read_text())
    assert -np.log(np.where(labels == 1, scores, 1 - scores)).mean() == pytest.approx(metrics["log_loss"], rel=1e-6)


@pytest.fixture(scope="module", params=[True, False], ids=["header", "no header"])
def lines(request, tmp_path_factory):
    """A run on text, with lists and missing values, with a header or without; and its folder of raw files."""
    folder = tmp_path_factory.mktemp("lines")
    rng = np.random.default_rng(1)
    (folder / "raw").mkdir()
    names = ["request", "clicked", "price", "user", "tags"]
    for split, size in (("train", 600), ("test", 130)):
        rows = [",".join(names)] if request.param else []
        for number in range(size):
            tags = " ".join(str(tag) for tag in rng.integers(0, 12, rng.integers(0, 4)))
            price = f"{rng.random():.3f}" if rng.random() < 0.9 else ""
            rows.append(f"r{number},{rng.integers(0, 2)},{price},{rng.integers(0, 40)},{tags}")
        (folder / "raw" / f"{split}.csv").write_text("\n".join(rows) + "\n")
    columns = "" if request.param else f"columns = {names}\n"
    (folder / "raw" / "schema.toml").write_text(
        f'{columns}label = "clicked"\ndense = ["price"]\ncategorical = ["user", {{ name = "tags", separator = " " }}]\n'
    )
    source = DataSource.find([folder / "raw"])
    data = prepare(source.files, folder / "prepared", source.schema)
    config = write_config(folder / "lines.toml", folder / "run", data.folder, batch_size=50)
    run_training(resolve(config, ["train.epochs=1"]))
    return folder


def test_blocks_of_any_size_give_the_same_bits(lines, tmp_path, monkeypatch):
    monkeypatch.setattr("rowmesh.data.text.BLOCK_BYTES", 300)
    predict(lines / "run", lines / "raw" / "test.csv", tmp_path / "scores.parquet")
    found = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    assert np.array_equal(found, evaluated(lines / "run"))


def test_the_best_model_of_a_run_scores_and_is_named(clicks, config_file, tmp_path):
    run_training(resolve(config_file, ["train.eval_every=2", "train.patience=1", "tables.optimizer.lr=3.0"]))
    run, lines = config_file.parent / "run", []
    done = predict(run, raw_test_file(clicks), tmp_path / "scores.parquet", log=lines.append)
    assert np.array_equal(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), evaluated(run))
    assert done.num_rows == 501
    (line,) = lines
    assert line.startswith(f"model     {run / 'model'}, the best of ")


def test_reordered_rows(clicks, tmp_path):
    data = reorder(clicks, tmp_path / "reordered", tables=["C3"], options=ReorderOptions(batch_size=256))
    config = write_config(tmp_path / "clicks.toml", tmp_path / "run", data.folder)
    run_training(resolve(config, ["train.epochs=1"]))
    predict(tmp_path / "run", raw_test_file(clicks), tmp_path / "scores.parquet")
    assert np.array_equal(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), evaluated(tmp_path / "run"))


def test_the_command_keeps_columns_and_quarantines_bad_rows(lines, tmp_path, capsys):
    run, rows = lines / "run", (lines / "raw" / "test.csv").read_text().splitlines()
    first = len(rows) - 130
    rows[first + 2] += ",1"
    rows[first + 4] = rows[first + 4].replace(rows[first + 4].split(",")[2] + ",", "dear,", 1)
    file = tmp_path / "rows.gz"
    file.write_bytes(gzip.compress("\n".join(rows).encode()))
    with pytest.raises(SystemExit, match="0"):
        main(["predict", str(run), str(file), "--keep", "request", "clicked"])
    out = capsys.readouterr().out
    assert f"scores    {file}.scores.parquet: 128 rows, mean 0." in out
    assert f"bad rows  2 without a score, in {file}.scores.parquet.quarantine.jsonl" in out
    assert "rare or unseen" in out
    found = pq.read_table(f"{file}.scores.parquet")
    assert found.column_names == ["line", "score", "request", "clicked"]
    good = [number for number in range(130) if number not in (2, 4)]
    assert found["line"].to_pylist() == [number + 1 + first for number in good]
    assert found["request"].to_pylist() == [f"r{number}" for number in good]
    assert set(found["clicked"].to_pylist()) == {"0", "1"}
    np.testing.assert_allclose(found["score"].to_numpy(), evaluated(run)[good], rtol=1e-6)
    with pytest.raises(RowmeshError, match=r"is there already; name another .*, or replace it with --overwrite"):
        predict(run, file, tmp_path / "rows.gz.scores.parquet")
    with pytest.raises(DataError, match=rf"1 bad rows, more than the 0 allowed; the first:\n  {file}:{3 + first}: "):
        predict(run, file, tmp_path / "none.parquet", max_bad_rows=0)
    assert not (tmp_path / "none.parquet").exists()


def test_files_without_a_label(lines, tmp_path):
    rows = [row.split(",") for row in (lines / "raw" / "test.csv").read_text().splitlines()]
    (tmp_path / "rows.csv").write_text("".join(",".join(row[:1] + row[2:]) + "\n" for row in rows))
    is_headed = len(rows) > 130
    if is_headed:
        with pytest.raises(ConfigurationError, match=r"only of files without a header"):
            predict(lines / "run", tmp_path / "rows.csv", tmp_path / "scores.parquet", has_label=False)
    else:
        with pytest.raises(DataError, match=r"4 columns instead of 5"):
            predict(lines / "run", tmp_path / "rows.csv", tmp_path / "scores.parquet")
    predict(lines / "run", tmp_path / "rows.csv", tmp_path / "scores.parquet", has_label=is_headed, overwrite=True)
    found = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    assert np.array_equal(found, evaluated(lines / "run"))


def test_integers_are_found_as_the_text_that_files_hold(lines):
    model = rowmesh.load_run(lines / "run")
    text = model({"price": ["0.5", ""], "user": ["3", "39"], "tags": ["1 2", ""]})
    assert torch.equal(model({"price": [0.5, None], "user": [3, 39], "tags": [[1, 2], []]}), text)
    assert model.unseen.total() == 0


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """A run on Parquet files: integers, text with missing values, lists; and its folder of raw files."""
    folder = tmp_path_factory.mktemp("items")
    rng = np.random.default_rng(0)
    (folder / "raw").mkdir()
    for split, size in (("train", 600), ("test", 130)):
        table = pa.table(
            {
                "clicked": rng.integers(0, 2, size),
                "price": pa.array(rng.random(size) * 9, mask=rng.random(size) < 0.1),
                "user": rng.integers(-5, 40, size),
                "city": pa.array([f"c{n}" if n else None for n in rng.integers(0, 9, size)]),
                "tags": [rng.integers(0, 12, rng.integers(0, 4)).tolist() for _ in range(size)],
                "request": [f"r{number}" for number in range(size)],
            }
        )
        pq.write_table(table, folder / "raw" / f"{split}.parquet")
    (folder / "raw" / "schema.toml").write_text(
        'format = "parquet"\nlabel = "clicked"\ndense = ["price"]\ncategorical = ["user", "city", "tags"]\n'
    )
    source = DataSource.find([folder / "raw"])
    data = prepare(source.files, folder / "prepared", source.schema)
    config = write_config(folder / "items.toml", folder / "run", data.folder, batch_size=50)
    run_training(resolve(config, ["train.epochs=1"]))
    return folder


def test_parquet(items, tmp_path):
    file = items / "raw" / "test.parquet"
    predict(items / "run", file, tmp_path / "scores.parquet", keep=["request", "clicked"])
    found, expected = pq.read_table(tmp_path / "scores.parquet"), evaluated(items / "run")
    assert np.array_equal(found["score"].to_numpy(), expected)
    assert found["line"].to_pylist() == list(range(1, 131))
    assert found.drop_columns(["line", "score"]) == pq.read_table(file, columns=["request", "clicked"])


@pytest.fixture(scope="module")
def priced(tmp_path_factory):
    """A run on standardised dense features with missing values, one of them after a logarithm, and their raw files."""
    folder = tmp_path_factory.mktemp("priced")
    rng = np.random.default_rng(2)
    (folder / "raw").mkdir()
    for split, size in (("train", 600), ("test", 130)):
        table = pa.table(
            {
                "clicked": rng.integers(0, 2, size),
                "price": pa.array(rng.lognormal(3, 2, size), mask=rng.random(size) < 0.2),
                "age": pa.array(rng.normal(40, 9, size) + 100 * (split == "test"), mask=rng.random(size) < 0.2),
                "user": rng.integers(0, 40, size),
            }
        )
        pq.write_table(table, folder / "raw" / f"{split}.parquet")
    (folder / "raw" / "schema.toml").write_text(
        'format = "parquet"\nlabel = "clicked"\ndense = ["price", "age"]\ndense_transform = "standardize"\n'
        'categorical = ["user"]\n'
    )
    source = DataSource.find([folder / "raw"])
    data = prepare(source.files, folder / "prepared", source.schema)
    assert [scale.log1p for scale in data.dense_scales or ()] == [True, False]
    config = write_config(folder / "priced.toml", folder / "run", data.folder, batch_size=50)
    run_training(resolve(config, ["train.epochs=1"]))
    return folder


def test_standardized_values_are_scaled_as_in_training(priced, tmp_path):
    file, expected = priced / "raw" / "test.parquet", evaluated(priced / "run")
    model = rowmesh.load_run(priced / "run")
    with torch.no_grad():
        loader = Loader(priced / "prepared", "test", batch_size=50)
        scores = torch.cat([torch.sigmoid(model.job.logits(batch)) for batch in loader])
    assert np.array_equal(scores.numpy(), expected)
    predict(priced / "run", file, tmp_path / "scores.parquet")
    assert np.array_equal(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), expected)
    table = pq.read_table(file)
    assert np.array_equal(model(table).numpy(), expected)
    assert np.array_equal(model(table.drop_columns(["clicked"]).to_pydict()).numpy(), expected)


def test_a_missing_dense_value_counts_as_the_mean_of_training(priced):
    model = rowmesh.load_run(priced / "run")
    age = next(scale.mean for scale in model.job.data.dense_scales or () if scale.name == "age")
    scores = model({"price": [None, None, None], "age": [None, age, 0.0], "user": [3, 3, 3]})
    assert scores[0] == pytest.approx(scores[1].item(), rel=1e-6)
    assert scores[0] != pytest.approx(scores[2].item(), rel=1e-6)


def test_values_in_any_form(items):
    model, expected = rowmesh.load_run(items / "run"), evaluated(items / "run")
    table = pq.read_table(items / "raw" / "test.parquet").drop_columns(["clicked"])
    columns = table.to_pydict()
    assert np.array_equal(model(table).numpy(), expected)
    assert np.array_equal(model(columns).numpy(), expected)
    columns["user"] = torch.tensor(columns["user"])
    columns["city"] = np.array(columns["city"], object)
    assert np.array_equal(model(columns).numpy(), expected)
    np.testing.assert_allclose(model({name: column[3:4] for name, column in columns.items()}), expected[3:4], rtol=1e-6)
    assert model({name: [] for name in columns}).shape == (0,)


def test_a_frame_of_pandas(items):
    pytest.importorskip("pandas")
    model = rowmesh.load_run(items / "run")
    frame = pq.read_table(items / "raw" / "test.parquet").to_pandas()
    assert np.array_equal(model(frame).numpy(), evaluated(items / "run"))


def test_ids_that_were_never_seen_get_the_rare_row(items):
    model = rowmesh.load_run(items / "run")
    values = {"price": [1.0, 1.0], "user": [10**9, 10**9 + 1], "city": ["nowhere", "elsewhere"], "tags": [[999], [-3]]}
    scores = model(values)
    assert scores[0] == scores[1]
    assert dict(model.unseen) == {"user": 2, "city": 2, "tags": 2}
    assert (
        model.job.data.table("user").rare_row
        == model.encoder.encode(model.encoder.check_table(rowmesh.run.trained_model.as_table(values), model.schema))[
            "user"
        ][0].as_py()
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"city": None}, r"the values: column 'city' is missing"),
        ({"price": [1.0, float("nan")]}, r"the values: row 1: price is nan, not a finite number"),
        ({"price": ["1", "dear"]}, r"the values: row 1: price is 'dear', not a number"),
        ({"user": [1.5, 2.0]}, r"column 'user' is categorical but of type double"),
        ({"user": ["ann", "bob"]}, r"column 'user' holds text, and the values it is compared with are integers"),
        ({"tags": [1, 2]}, r"column 'tags' holds single ids, and in training it held lists"),
        ({"city": [["a"], ["b"]]}, r"column 'city' holds lists, and in training it held single ids"),
        ({"city": ["a"]}, r"columns differ in length \(price 2, user 2, city 1, tags 2\)"),
        ({"city": "ab"}, r"column 'city' is one value; give a list"),
        ({"city": ["a", 1]}, r"column 'city' cannot be read .*; give values of one type"),
    ],
)
def test_values_that_cannot_be_used(items, changed, message):
    model = rowmesh.load_run(items / "run")
    values = {"price": [1.0, None], "user": [3, 4], "city": ["c1", None], "tags": [[1], []]} | changed
    with pytest.raises(DataError, match=message):
        model({name: column for name, column in values.items() if column is not None})


def test_mistakes_say_what_fits(clicks, run, items, tmp_path, monkeypatch, capsys):
    file, out = raw_test_file(clicks), tmp_path / "scores.parquet"
    with pytest.raises(RowmeshError, match=r"is no run: config.toml is missing"):
        rowmesh.load_run(tmp_path)
    with pytest.raises(RowmeshError, match=r"differs from it in .*: the same ids and values mean something else"):
        rowmesh.load_run(run, data=items / "prepared")
    with pytest.raises(DataError, match=r"no such file"):
        predict(run, tmp_path / "nothing", out)
    with pytest.raises(ConfigurationError, match=r"--keep score: the scores have a column of this name"):
        predict(run, file, out, keep=["score"])
    with pytest.raises(RowmeshError, match=r"nowhere: no such folder"):
        predict(run, file, tmp_path / "nowhere" / "scores.parquet")
    with pytest.raises(ConfigurationError, match=r"is the file to read"):
        predict(run, file, file, overwrite=True)
    with pytest.raises(RowmeshError, match=r"request"):
        predict(run, file, out, keep=["request"])
    with pytest.raises(DataError, match=r"is missing"):
        predict(items / "run", _renamed(items, tmp_path), out)
    assert not out.exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        main(["predict", str(run), str(file)])
    assert "is one process; start it without torchrun" in capsys.readouterr().err


def _renamed(items, folder):
    table = pq.read_table(items / "raw" / "test.parquet")
    pq.write_table(table.rename_columns(["a", *table.column_names[1:-2], "b", "c"]), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_a_model_that_diverged_gives_no_scores(items, tmp_path):
    model = rowmesh.load_run(items / "run")
    with torch.no_grad():
        next(model.network.parameters()).fill_(torch.nan)
    with (
        patch.object(predict_module, "load_finished", return_value=model),
        pytest.raises(RowmeshError, match=r"50 of 50 scores are not finite"),
    ):
        predict(items / "run", items / "raw" / "test.parquet", tmp_path / "scores.parquet")
    assert list(tmp_path.iterdir()) == []


def test_one_process_even_where_others_are_launched(items, monkeypatch):
    with patch.object(Mesh, "connect", side_effect=AssertionError):
        assert rowmesh.load_run(items / "run").job.mesh.world_size == 1


FREED = {
    **{name: LAYOUTS[name] for name in ("plain", "tensor-train", "tiered")},
    "dynamic": ["tables.storage=dynamic", "tables.dynamic.capacity=500", "tables.initializer.bound=0.1"],
}


@pytest.mark.parametrize("layout", FREED)
def test_a_model_is_freed_with_its_last_reference(config_file, tmp_path, layout):
    """Programs that load one model after the other hold one, and do not wait for the collector of cycles."""
    run_training(resolve(config_file, ["train.steps=2", *FREED[layout]]))
    gc.collect()
    gc.disable()
    try:
        model = rowmesh.load_run(tmp_path / "run")
        ids = {name: [1, 2] for name in FEATURES} | {"C3": [[1], []]}
        model(ids | {f"I{number}": [1.0, 2.0] for number in range(1, 14)})
        parts = (model, model.job, model.embeddings, model.network, model.encoder, model.embeddings.engine)
        left = [weakref.ref(each) for each in parts]
        del model, parts
        assert [each() for each in left] == [None] * len(left)
    finally:
        gc.enable()
