"""The commands `rowmesh data synthesize`, `prepare` and `reorder`."""

import pytest

from rowmesh._support.files.manifest import Manifest
from rowmesh.cli.data import app
from rowmesh.data import PlantedConfig, Prepared, ReorderOptions
from rowmesh.data.planted import CRITEO_ROWS
from rowmesh.errors import ConfigurationError, DataError, RowmeshError
from tests.support.cooccurrence import BATCH, draw_batches, prepare_batches


def run(*arguments):
    app([str(argument) for argument in arguments], result_action="return_value")


def test_from_nothing_to_prepared(tmp_path, capsys):
    run("synthesize", tmp_path / "raw", "--samples", 3000, "--held-out", 500, "--max-rows", 100, "--multi-hot.C1", 3)
    drawn = capsys.readouterr().out
    assert "best AUC" in drawn
    run("prepare", tmp_path / "raw", "--out", tmp_path / "out")
    summary = capsys.readouterr().out
    prepared = Prepared.open(tmp_path / "out")
    assert {name: split.samples for name, split in prepared.splits.items()} == {
        "train": 3000,
        "validation": 500,
        "test": 500,
    }
    assert prepared.table("C1").multi_hot
    optimum = prepared.splits["test"].optimum
    assert optimum is not None
    for text in ("3,000", f"{optimum['auc']:.4f}", "C26", "bad rows: 0"):
        assert text in summary
    with pytest.raises(RowmeshError, match="--overwrite"):
        run("prepare", tmp_path / "raw", "--out", tmp_path / "out")
    run("prepare", tmp_path / "raw", "--out", tmp_path / "out", "--overwrite")


def test_files_and_options(tmp_path, capsys):
    schema = tmp_path / "schema.toml"
    schema.write_text('label = "y"\ncategorical = ["a"]\n')
    files = [tmp_path / f"{name}.csv" for name in ("one", "two", "dev")]
    for file in files:
        file.write_text("y,a\n" + "1,p\n0,q\n" * 50 + "5,p\n")
    run("prepare", files[0], files[1], "--schema", schema, "--out", tmp_path / "cut", "--split-by", "random")
    assert "bad rows: 2, kept in" in capsys.readouterr().out.replace("\n", " ")
    assert set(Prepared.open(tmp_path / "cut").splits) == {"train", "validation", "test"}
    run("prepare", files[0], "--validation", files[2], "--schema", schema, "--out", tmp_path / "given")
    prepared = Prepared.open(tmp_path / "given")
    assert {name: split.samples for name, split in prepared.splits.items()} == {"train": 100, "validation": 100}
    assert "best AUC" not in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="files of the train and validation splits, so nothing is cut"):
        run(
            "prepare",
            files[0],
            "--validation",
            files[2],
            "--schema",
            schema,
            "--out",
            tmp_path / "o",
            "--test-share",
            0.2,
        )


def test_reuse(tmp_path, capsys):
    file, out = tmp_path / "[one].csv", tmp_path / "out"
    file.write_text("y,a\n" + "1,p\n0,q\n" * 50)
    (tmp_path / "schema.toml").write_text('label = "y"\ncategorical = ["a"]\n')
    command = ("prepare", file, "--schema", tmp_path / "schema.toml", "--out", out, "--reuse")
    run(*command)
    capsys.readouterr()
    before = (out / "train.arrow").stat().st_ino
    run(*command)
    assert capsys.readouterr().out == f"reused {out}: made from the same files with the same options\n"
    assert (out / "train.arrow").stat().st_ino == before
    run(*command, "--min-count", 3, "--seed", 5)
    assert f"making {out} again: split.seed was 0, is 5; min_count was 2, is 3\n" in capsys.readouterr().out
    assert Prepared.open(out).min_count == 3
    file.write_text("y,a\n" + "1,p\n0,q\n" * 60)
    run(*command, "--min-count", 3, "--seed", 5)
    assert f"again: files.train.1 was {file}, 404 bytes of " in capsys.readouterr().out
    assert sum(split.samples for split in Prepared.open(out).splits.values()) == 120


def test_reuse_replaces_nothing_but_its_own_kind(tmp_path):
    run("synthesize", tmp_path / "raw", "--samples", 100, "--held-out", 0, "--max-rows", 10)
    with pytest.raises(RowmeshError, match="holds drawn data, not prepared data"):
        run("prepare", tmp_path / "raw", "--out", tmp_path / "raw", "--reuse")
    assert (tmp_path / "raw" / "train-00000.parquet").exists()


def test_defaults_are_those_of_the_library(tmp_path):
    run("synthesize", tmp_path / "raw", "--samples", 10, "--held-out", 0)
    manifest = Manifest.read(tmp_path / "raw")
    assert manifest is not None
    assert PlantedConfig() == PlantedConfig(
        **manifest.request["model"] | {"num_rows": CRITEO_ROWS, "exponents": PlantedConfig().exponents}
    )


def test_mistakes(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--multi-hot\.c1: no such table.*did you mean 'C1'"):
        run("synthesize", tmp_path / "raw", "--multi-hot.c1", 3)
    assert not list(tmp_path.iterdir())


def test_a_terminal_gets_bars(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    run("synthesize", tmp_path / "raw", "--samples", 100, "--held-out", 0, "--max-rows", 10)
    assert "drawing" in capsys.readouterr().out


def test_reorder(tmp_path, capsys):
    prepared = prepare_batches(tmp_path, draw_batches(300))
    command = ("reorder", prepared.folder, "--out", tmp_path / "out", "--batch-size", BATCH, "--max-edges", 100_000)
    run(*command, "--tables", "item", "other", "--reuse")
    shown = capsys.readouterr().out
    reordered = Prepared.open(tmp_path / "out")
    rows = reordered.unordered_rows("item")
    for text in (f"reordered {tmp_path / 'out'}", f" {len(rows):,} ", "prefixes", "seconds"):
        assert text in shown
    assert "other stay in order of frequency: no other made batches read 2% fewer prefixes" in shown
    run(*command, "--tables", "item", "other", "--reuse")
    assert capsys.readouterr().out == f"reused {tmp_path / 'out'}: made from the same files with the same options\n"
    run(*command, "--tables", "item", "--reuse", "--seed", 1)
    assert "reordered.tables.2 is gone" in capsys.readouterr().out
    with pytest.raises(DataError, match="is reordered already"):
        run("reorder", tmp_path / "out", "--out", tmp_path / "twice", "--tables", "item")


def test_reorder_takes_the_defaults_of_the_library(tmp_path, capsys):
    prepared = prepare_batches(tmp_path, draw_batches(9))
    run("reorder", prepared.folder, "--out", tmp_path / "out", "--tables", "item")
    options = Prepared.open(tmp_path / "out").reordering["options"]
    assert ReorderOptions(**options) == ReorderOptions()
    assert "item stay in order of frequency: fewer than 40 batches, too few" in capsys.readouterr().out


def test_event_tables_become_sequences(tmp_path, capsys):
    (tmp_path / "u.data").write_text("".join(f"{n % 6}\t{n % 5}\t4\t{n}\n" for n in range(60)))
    command = ("prepare", tmp_path / "u.data", "--schema", "movielens-100k", "--out", tmp_path / "out")
    run(*command)
    summary = capsys.readouterr().out
    for text in ("users", "60", "0.0% of users have their last two events at one time"):
        assert text in summary
    run(*command, "--reuse")
    assert "reused" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="leave out --validation"):
        run(*command, "--min-count", 3)
    with pytest.raises(DataError, match="name files of events"):
        run("prepare", tmp_path, *command[2:], "--overwrite")
