"""Runs on raw rows with dynamic tables: on any number of ranks, followed, interrupted and gone on with."""

import json
import signal
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rowmesh.data.quarantine import Quarantine
from rowmesh.data.raw import ids_of
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.report.run_record import read_run
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.resolve import resolve
from rowmesh.run.run_folder import RunFolder
from rowmesh.tables import Dynamic
from rowmesh.tables.dynamic.reference import ReferenceShards
from tests.run.test_publications import model_rows
from tests.support.raw_runs import SCHEMA, TABLES, write_raw_run, write_rows
from tests.support.runs import start, wait_for_steps


@pytest.fixture
def config_file(tmp_path):
    return write_raw_run(tmp_path)


def lines_of(run, kind):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("options", [[], ["pipeline.depth=2"]], ids=["in turn", "pipeline"])
def test_any_number_of_ranks_trains_alike(config_file, tmp_path, command, options):
    found = []
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        more = [*TABLES, f"data.test={tmp_path / 'test'}", f"run.folder={run}", *options]
        done = command(["train", str(config_file), *more], ranks=ranks)
        assert done.status == 0, done.err
        test = json.loads((run / "evaluation" / "test.json").read_text())
        assert test["samples"] == 100
        found.append((lines_of(run, "progressive"), lines_of(run, "train"), test))
    (windows, steps, test), (_, others, other) = found
    assert [line["step"] for line in windows] == [3, 6, 9]
    assert [line["step"] for line in steps] == [4, 8, 10]  # 600 rows: ten batches, the last of 24
    assert sum(line["samples"] for line in windows) == 9 * 64
    for line, same in zip(steps, others, strict=True):
        assert same["loss"] == pytest.approx(line["loss"], abs=1e-9)
    assert other["log_loss"] == pytest.approx(test["log_loss"], abs=1e-6)


def test_a_finished_run_is_evaluated_on_other_rows(config_file, tmp_path, command):
    assert command(["train", str(config_file), *TABLES], ranks=1).status == 0
    done = command(["evaluate", str(tmp_path / "run")], ranks=1)
    assert done.status != 0
    assert "data.test: name a folder or file of raw rows" in done.err
    done = command(["evaluate", str(tmp_path / "run"), "--split", str(tmp_path / "test")], ranks=2)
    assert done.status == 0, done.err
    assert "test: 100 samples" in done.out


def test_metrics_of_other_rows_do_not_replace_those_of_the_test(config_file, tmp_path, command):
    run, days = tmp_path / "run", tmp_path / "days"
    for number, folder in enumerate((days, days / "test")):
        folder.mkdir()
        write_rows(folder / "friday.csv", 5 + number, 50)
    assert command(["train", str(config_file), *TABLES, f"data.test={tmp_path / 'test'}"], ranks=1).status == 0
    before = (run / "evaluation" / "test.json").read_bytes()
    for place in (days / "friday.csv", days / "test"):
        done = command(["evaluate", str(run), "--split", str(place)], ranks=1)
        assert done.status == 0, done.err
    assert (run / "evaluation" / "test.json").read_bytes() == before
    found = [json.loads((run / "evaluation" / f"{name}.json").read_text()) for name in ("friday.csv", "days-test")]
    assert [each["split"] for each in found] == ["friday.csv", "days-test"]
    assert [each["data"] for each in found] == [str(days / "friday.csv"), str(days / "test")]
    assert [result.split for result in read_run(run).results] == ["test", "days-test", "friday.csv"]
    assert "AUC, test" in (run / "report.html").read_text()
    done = command(["evaluate", str(run), "--split", str(tmp_path / "rows" / ".." / "test")], ranks=1)
    assert done.status == 0, done.err
    assert len(list((run / "evaluation").iterdir())) == 3, "the run's own test, by another way"
    before = (run / "evaluation" / "friday.csv.json").read_bytes()
    done = command(["evaluate", str(run), "--split", str(days / "test" / "friday.csv")], ranks=1)
    assert done.status == 0, done.err
    assert "test-friday.csv: 50 samples" in done.out
    assert (run / "evaluation" / "friday.csv.json").read_bytes() == before


def test_a_followed_folder_is_trained_on_to_its_end(config_file, tmp_path, command):
    def write():
        write_rows(tmp_path / "rows" / "3.csv", 3, 50)
        (tmp_path / "rows" / "_END").touch()

    later = threading.Timer(1.0, write)
    later.start()
    done = command(["train", str(config_file), *TABLES, "data.follow=true"], ranks=2)
    assert done.status == 0, done.err
    later.join()
    assert lines_of(tmp_path / "run", "train")[-1]["step"] == 11  # 650 rows
    once = command(["train", str(config_file), *TABLES, f"run.folder={tmp_path / 'once'}"], ranks=1)
    assert once.status == 0, once.err
    for line, same in zip(lines_of(tmp_path / "run", "train"), lines_of(tmp_path / "once", "train"), strict=True):
        assert same["loss"] == pytest.approx(line["loss"], abs=1e-9)


def test_a_run_that_waits_for_rows_ends_when_asked_to_and_goes_on(config_file, tmp_path, command):
    run, rows = tmp_path / "run", tmp_path / "rows"
    options = [*TABLES, "data.follow=true", "checkpoint.every_steps=4", "train.log_every=1"]
    process = start(config_file, *options, ranks=2)
    try:
        wait_for_steps(process, run / "metrics.jsonl", count=12)  # nine steps and three windows: it waits for more
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "after step 9" in out, (out, err)
    write_rows(rows / "3.csv", 3, 50)
    (rows / "_END").touch()
    resumed = command(["train", str(config_file), *options, "--resume"], ranks=1)
    assert resumed.status == 0, resumed.err
    untouched = [*TABLES, "train.log_every=1", f"run.folder={tmp_path / 'whole'}"]
    whole = command(["train", str(config_file), *untouched], ranks=1)
    assert whole.status == 0, whole.err
    for line, same in zip(lines_of(run, "train"), lines_of(tmp_path / "whole", "train"), strict=True):
        assert same["step"] == line["step"]
        assert same["loss"] == pytest.approx(line["loss"], abs=1e-9)


def test_rows_of_no_use_are_kept_and_counted(config_file, tmp_path, command):
    with (tmp_path / "rows" / "2.csv").open("a") as file:
        file.write("perhaps,0.5,u1,i1\n")
    assert command(["train", str(config_file), *TABLES], ranks=2).status == 0
    bad = [line for path in (tmp_path / "run" / "bad_rows").iterdir() for line in path.read_text().splitlines()]
    assert [json.loads(line)["line"] for line in bad] == [202]
    done = command(["train", str(config_file), *TABLES, "data.max_bad_rows=0", "--overwrite"], ranks=1)
    assert done.status != 0
    assert "2.csv" in done.err


def test_a_run_that_met_too_many_bad_rows_goes_on_with_a_larger_limit(config_file, tmp_path, monkeypatch):
    """The schema is named relative to the folder that the command runs in, as the documentation does."""
    monkeypatch.chdir(tmp_path)
    options = [*TABLES, "data.raw_schema=schema.toml", "checkpoint.every_steps=2"]
    with (tmp_path / "rows" / "2.csv").open("a") as file:
        file.write("perhaps,0.5,u1,i1\n")
    with pytest.raises(DataError, match=r"1 bad rows, more than the 0 allowed(.|\n)*raise data.max_bad_rows$"):
        run_training(resolve(config_file, [*options, "data.max_bad_rows=0"]))
    run_training(resolve(config_file, options), resume="latest")
    assert lines_of(tmp_path / "run", "train")[-1]["step"] == 10


def test_dynamic_tables_do_not_look_as_if_their_plan_was_replaced(config_file, tmp_path, capsys):
    run_training(resolve(config_file, TABLES))
    run = RunFolder(tmp_path / "run")
    assert not run.first_plan.exists()
    capsys.readouterr()
    run_evaluation(run.path, split=str(tmp_path / "test"))
    assert "as in training" in capsys.readouterr().out


def test_bad_rows_are_on_disk_at_once(tmp_path):
    with Quarantine(tmp_path / "bad", 9, tmp_path / "kept") as quarantine:
        quarantine.add(Path("rows.csv"), 3, "no label", b"x")
        assert json.loads((tmp_path / "bad").read_text())["line"] == 3


def test_bad_rows_of_an_evaluation_are_left_out_and_named(config_file, tmp_path, caplog):
    test = tmp_path / "test" / "0.csv"
    test.write_text(test.read_text() + "perhaps,0.5,u1,i1\n")
    options = [*TABLES, f"data.test={tmp_path / 'test'}"]
    run_training(resolve(config_file, options))
    assert json.loads((tmp_path / "run" / "evaluation" / "test.json").read_text())["samples"] == 100
    assert "bad rows are left out, the first: " in caplog.text
    assert "0.csv:102: click is 'perhaps'" in caplog.text
    with pytest.raises(DataError, match=r"1 bad rows, more than the 0 allowed; the first: .*0\.csv:102: click is"):
        run_training(resolve(config_file, [*options, "data.max_bad_rows=0"]), overwrite=True)


def test_a_window_without_a_row_of_use_has_no_line(config_file, tmp_path):
    path = tmp_path / "rows" / "0.csv"
    head, *lines = path.read_text().splitlines()
    lines[64:128] = ["perhaps,0.5,u1,i1"] * 64
    path.write_text("\n".join([head, *lines]) + "\n")
    run_training(resolve(config_file, [*TABLES, "train.progressive_every=1"]))
    assert [line["step"] for line in lines_of(tmp_path / "run", "progressive")] == [1, *range(3, 11)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tables.storage=dense"], "tables user, item: nobody knows how many ids raw data have"),
        (["train.epochs=2"], "train.epochs = 2: raw data are read once"),
        (["train.patience=3"], "train.patience = 3: raw data are read once"),
        (["schedule.name=cosine"], "nobody knows how many steps raw data have"),
        (["data.raw_schema="], "raw_schema: name the columns of raw data"),
        (["data.folder=redis://localhost"], "stream: the key of a stream goes with the URL"),
        (["data.train=other"], "train: raw data have no splits"),
        (["placement.strategy=auto"], "a placement by frequency needs prepared data"),
        (["data.folder=nowhere"], "nowhere is no file"),
    ],
)
def test_what_raw_data_cannot_have_is_refused(config_file, options, message):
    with pytest.raises(ConfigurationError, match=message):
        run_training(resolve(config_file, [*TABLES, *options]))


def test_ids_live_for_seconds_of_the_data(config_file, tmp_path):
    """Each row is a second after the one before, on any number of ranks: batches of 64 rows are a minute and more."""
    for path in sorted((tmp_path / "rows").iterdir()):
        header, *rows = path.read_text().splitlines()
        first = 200 * int(path.stem)
        stamped = [f"{row},{1_700_000_000 + first + number}" for number, row in enumerate(rows)]
        path.write_text("\n".join([f"{header},when", *stamped]) + "\n")
    own = [*TABLES, "tables.user.dynamic.ttl_seconds=100"]
    with pytest.raises(ConfigurationError, match=r"tables\.user\.dynamic\.ttl_seconds .* time = "):
        run_training(resolve(config_file, own))
    (tmp_path / "schema.toml").write_text((tmp_path / "schema.toml").read_text() + 'time = "when"\n')
    run_training(resolve(config_file, own))
    evicted = {"user, dynamic table": 0, "item, dynamic table": 0}
    for line in (tmp_path / "run" / "counters.jsonl").read_text().splitlines():
        counted = json.loads(line)
        if counted["group"] in evicted:
            evicted[counted["group"]] += counted["evicted"]
    assert evicted["user, dynamic table"] > 100
    assert evicted["item, dynamic table"] == 0


def test_ids_of_the_smallest_numbers_in_a_column_leave(config_file, tmp_path, command):
    """On any number of ranks those of the rules as written stay; other rules do not read the column."""
    own = [*TABLES, "tables.user.dynamic.capacity=70", "tables.user.dynamic.shards=1"]
    by_score = [*own, "tables.user.dynamic.eviction=score"]
    with pytest.raises(ConfigurationError, match=r"tables\.user\.dynamic\.eviction .* score = "):
        run_training(resolve(config_file, by_score))
    (tmp_path / "schema.toml").write_text(f'{SCHEMA}score = "worth"\n')
    users, scores = write_worth(tmp_path / "rows")
    expected = kept_by_the_rules(users, scores, capacity=70, batch_size=64)
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        done = command(["train", str(config_file), *by_score, f"run.folder={run}"], ranks=ranks)
        assert done.status == 0, done.err
        assert sorted(model_rows(run)["user"][0].tolist()) == expected
    other = command(["train", str(config_file), *own, f"run.folder={tmp_path / 'lru'}"], ranks=1)
    assert other.status == 0, other.err
    assert sorted(model_rows(tmp_path / "lru")["user"][0].tolist()) != expected


def write_worth(folder):
    """Gives rows a number that is not their user's alone; returns the users and the numbers, in order."""
    users, scores, drawn = [], [], np.random.default_rng(7)
    for path in sorted(folder.iterdir()):
        header, *rows = path.read_text().splitlines()
        worth = drawn.integers(-(2**63), 2**63 - 1, len(rows)).tolist()
        users += [row.split(",")[2] for row in rows]
        scores += worth
        lines = [f"{row},{score}" for row, score in zip(rows, worth, strict=True)]
        path.write_text("\n".join([f"{header},worth", *lines]) + "\n")
    return ids_of(pa.array(users)), np.array(scores)


def kept_by_the_rules(ids, scores, *, capacity, batch_size):
    rules = Dynamic(capacity=capacity, shards=1, eviction="score")
    reference = ReferenceShards("user", rules, range(1), capacity + batch_size)
    for step, first in enumerate(range(0, len(ids), batch_size)):
        some, worth = ids[first : first + batch_size], scores[first : first + batch_size]
        distinct, counts = np.unique(some, return_counts=True)
        largest = np.array([worth[some == each].max() for each in distinct])
        opened = reference.open(distinct, counts, step, largest)
        reference.release(np.concatenate([opened.evicted_frames, opened.frames[opened.guest]]))
    assert step == 9
    return sorted(each for each in {*ids.tolist()} if reference.find(np.array([each]))[0] >= 0)
