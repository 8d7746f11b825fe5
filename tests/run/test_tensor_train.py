"""Training with tensor-train tables, by configuration."""

import json
import re

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.placement import wanted_replicas
from rowmesh.run.resolve import resolve
from rowmesh.run.tables import table_specs
from rowmesh.tables import TensorTrain
from tests.support.pages import blocks

ADAGRAD = 'tables.tensor_train.optimizer.name="adagrad"'


def specs(config_file, clicks, *overrides):
    config = resolve(config_file, overrides)
    return {table.name: table for table in table_specs(config.tables, clicks)}


def test_large_tables_become_cores(config_file, clicks):
    """Those of min_rows rows or more; a table's own storage comes first, and so do its ranks."""
    own = ["tables.C3.tensor_train.rank=[2, 3]", 'tables.C4.storage="dense"']
    small = ['tables.C5.storage="tensor_train"', "tables.C5.tensor_train.rank=1"]
    all_of_them = ["tables.tensor_train.min_rows=40", ADAGRAD, "tables.tensor_train.rank=2"]
    tables = specs(config_file, clicks, *all_of_them, *own, *small)
    rows = {name: table.num_rows for name, table in tables.items()}
    storage = {name: table.storage for name, table in tables.items()}
    expected = {name: "tensor_train" if count >= 40 else "dense" for name, count in rows.items()}
    assert storage == expected | {"C4": "dense", "C5": "tensor_train"}
    assert tables["C3"].tensor_train == TensorTrain(rank=(2, 3))
    assert tables["C1"].tensor_train == TensorTrain(rank=2)
    assert (tables["C1"].optimizer.name, tables["C4"].optimizer.name) == ("adagrad", "row_wise_adagrad")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ['tables.C3.storage="tensor_train"'],
            r"'C3' has tensor-train cores, and row_wise_adagrad keeps state by row.*tables.tensor_train.optimizer.name",
        ),
        (['tables.C3.storage="cores"'], r"tables.C3.storage"),
        (
            ['tables.C3.storage="tensor_train"', ADAGRAD, "tables.C3.tensor_train.rank=500"],
            r"table 'C3': ranks \(500, 500\) are larger than .* pass rank = \(\d+, \d+\) or less",
        ),
        (
            ['tables.C3.storage="tensor_train"', ADAGRAD, "tables.C3.tensor_train.memory_bytes=20"],
            r"table 'C3': no rank meets memory_bytes = 20 for .* at rank 1",
        ),
        (
            ['tables.C3.storage="tensor_train"', ADAGRAD, "tables.C3.tensor_train.row_factors=[2, 2, 2]"],
            r"table 'C3': row_factors \(2, 2, 2\) make 8 rows and cannot hold .* would do",
        ),
        (
            ['tables.C3.storage="tensor_train"', ADAGRAD, 'tables.dtype="bfloat16"'],
            r"table 'C3': cores of tensor-train tables are float32 or float64, not bfloat16",
        ),
        (["tables.tensor_train.rank=4"], r"tensor_train.rank = 4 is given, and no table is a tensor-train table"),
        (
            ["tables.C3.tensor_train.compression=9.0"],
            r"tables.C3.tensor_train.compression = 9.0 is given, and table 'C3' of \d+ rows is dense; give tables.C3",
        ),
        (
            [
                "tables.tensor_train.min_rows=1_000",
                'tables.C4.storage="tensor_train"',
                ADAGRAD,
                "tables.C3.tensor_train.rank=4",
            ],
            r"tables.C3.tensor_train.rank = 4 is given, and table 'C3' .* is dense",
        ),
        (
            [
                "tables.tensor_train.min_rows=1",
                ADAGRAD,
                'tables.C3.storage="tiered"',
                'tables.C3.tensor_train.optimizer.name="sgd"',
            ],
            r"tables.C3.tensor_train.optimizer = \{'name': 'sgd'.* is tiered",
        ),
        (["tables.tensor_train.ranks=4"], r"tables.tensor_train.ranks.*rank"),
    ],
)
def test_mistakes_say_what_fits(config_file, clicks, overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        specs(config_file, clicks, *overrides)


@pytest.mark.parametrize("kept_out", ['tables.storage="dense"', "tables.tensor_train.min_rows=1_000_000"])
def test_a_rank_may_wait_for_larger_tables(config_file, clicks, kept_out):
    tables = specs(config_file, clicks, kept_out, "tables.tensor_train.rank=4")
    assert {table.storage for table in tables.values()} == {"dense"}


def test_a_rank_of_one_table_waits_for_as_many_rows_as_it_says(config_file, clicks):
    own = ["tables.C3.tensor_train.min_rows=1_000_000", "tables.C3.tensor_train.rank=4"]
    tables = specs(config_file, clicks, 'tables.C4.storage="tensor_train"', ADAGRAD, *own)
    assert (tables["C3"].storage, tables["C4"].storage) == ("dense", "tensor_train")


def test_cores_have_no_replicas(config_file, clicks):
    overrides = ['tables.C3.storage="tensor_train"', ADAGRAD]
    assert "C3" not in wanted_replicas(resolve(config_file, overrides), clicks)
    with pytest.raises(ConfigurationError, match=r"tables.C3.replicas = 2: every rank has the cores"):
        wanted_replicas(resolve(config_file, [*overrides, "tables.C3.replicas=2"]), clicks)


@pytest.mark.parametrize("storage", ["all", "some"])
def test_one_rank_trains_and_evaluates(config_file, storage, capsys):
    ranks = ["tables.tensor_train.rank=2", "tables.C5.tensor_train.rank=1"]  # tables of one shape share their kernels
    rows, ranks = (1, ranks) if storage == "all" else (100, [])
    overrides = [f"tables.tensor_train.min_rows={rows}", *ranks, ADAGRAD, 'placement.drift.enabled="on"']
    config = resolve(config_file, overrides)
    trained = run_training(config)
    out = capsys.readouterr().out
    assert "tensor-train cores of ranks" in out
    assert "C3" in out
    assert run_evaluation(config_file.parent / "run") == trained


@pytest.mark.parametrize("pipeline", [[], ["pipeline.depth=2", "pipeline.micro_batches=2"]], ids=["loop", "pipeline"])
def test_two_ranks_train_and_one_evaluates(config_file, command, pipeline):
    run = config_file.parent / "run"
    overrides = ["tables.tensor_train.min_rows=40", "tables.tensor_train.rank=2", ADAGRAD]
    done = command(["train", str(config_file), *overrides, *pipeline], ranks=2)
    assert done.status == 0, done.err
    assert "group     dim4_adagrad_tensor_train" in done.out
    trained = json.loads((run / "evaluation" / "test.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    again = run_evaluation(run)
    assert again.auc == pytest.approx(trained["auc"], rel=1e-6)
    with pytest.raises(Exception, match=r"table 'C3' is tensor-train cores .* in the checkpoint and dense here"):
        run_evaluation(run, ['tables.C3.storage="dense"'])


def test_the_page_has_cores_a_tier_and_dense_tables_behind_a_pipeline(clicks, tmp_path):
    """Its configuration, for smaller data, trains the model of the loop in turn."""
    (text,) = (block.text for block in blocks("docs/el_rec.md") if block.language == "toml")
    (tmp_path / "page.toml").write_text(re.sub(r"^C\d\d\.storage.*\n", "", text, flags=re.MULTILINE))
    here = [f'data.folder="{clicks.folder}"', "data.batch_size=256", f'tiers.folder="{tmp_path}"', "tiers.direct=false"]
    small = ["model.bottom=[8]", "model.top=[8]", "train.linear=torch", "train.epochs=1", "tables.dim=4"]
    small += ["tables.tensor_train.min_rows=100", "tables.tensor_train.rank=2"]
    found = {}
    for name, options in {"ahead": (), "in turn": ("pipeline.depth=0",)}.items():
        config = resolve(tmp_path / "page.toml", [*here, *small, f'run.folder="{tmp_path / name}"', *options])
        storages = {table.name: table.storage for table in table_specs(config.tables, clicks)}
        assert (storages["C1"], storages["C3"], storages["C4"]) == ("dense", "tensor_train", "tiered")
        assert config.pipeline.depth == (2 if name == "ahead" else 0)
        found[name] = run_training(config)
    assert found["ahead"] == found["in turn"]
