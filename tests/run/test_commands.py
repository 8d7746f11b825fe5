import json
import math
import os
import re
import shutil
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from rowmesh import EmbeddingCollection, checkpoint
from rowmesh.cli.__main__ import main
from rowmesh.data import DataSource, Prepared, Splitter, prepare
from rowmesh.errors import ConfigurationError, DataError, RowmeshError
from rowmesh.observe.progress import Progress
from rowmesh.observe.step_clock import STAGES
from rowmesh.run import phases
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.losses import Losses
from rowmesh.run.resolve import resolve
from rowmesh.run.run_folder import RunFolder
from rowmesh.run.schedule import factor
from rowmesh.run.tables import table_specs
from tests.support.prepared import change_manifest, renew_checksums


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_model(folder):
    """The rows and the network of a run, in one process."""
    run = RunFolder(folder)
    config = resolve(run.config)
    embeddings = EmbeddingCollection(table_specs(config.tables, Prepared.open(config.data.folder)), seed=99)
    state = checkpoint.load(run.model, embeddings)
    tensors = {f"network.{name}": value for name, value in state["network"].items()}
    for table in embeddings.tables:
        (local,) = embeddings.local_rows(table.name)
        tensors |= {f"{table.name}.{kind}": each for kind, each in {"values": local.values, **local.state}.items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_a_run_leaves_everything_that_describes_it(config_file, tmp_path, capsys):
    metrics = run_training(resolve(config_file, ["train.eval_every=8"]))
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        "about.json",
        "config.toml",
        "counters.jsonl",
        "environment.json",
        "evaluation",
        "manifest.json",
        "metrics.jsonl",
        "model",
        "plan.json",
    ]
    lines = records(folder / "metrics.jsonl")
    assert [(line["kind"], line["step"]) for line in lines] == [
        *[("train", 5), ("validation", 8), ("train", 10), ("train", 15)],
        *[("train", 16), ("validation", 16)],
    ]
    assert {"loss", "samples_per_s", "lr", "memory_bytes"} <= lines[0].keys()
    assert lines[0]["memory_bytes_by_rank"] == [lines[0]["memory_bytes"]]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    step_ms = {name: value for name, value in lines[-2].items() if name.startswith("step_ms/")}
    assert step_ms.keys() == {f"step_ms/{stage}" for stage in STAGES}
    assert min(step_ms["step_ms/rows"], step_ms["step_ms/network"], step_ms["step_ms/update"]) > 0
    about = json.loads((folder / "about.json").read_text())
    assert (about["ranks"], about["total_steps"], about["transport"]) == (1, 16, "local")
    counters = records(folder / "counters.jsonl")
    assert [line["step"] for line in counters] == list(range(1, 17))
    assert [line["ids"] > 0 and line["unique_ids"] <= line["ids"] for line in counters] == [True] * 16
    assert tomllib.loads((folder / "config.toml").read_text())["tables"]["optimizer"]["lr"] == 0.05
    assert json.loads((folder / "environment.json").read_text())["software"]["torch"] == torch.__version__
    report = json.loads((folder / "evaluation" / "test.json").read_text())
    assert report["auc"] == metrics.auc
    assert report["planted_optimum"]["auc"] > metrics.auc
    assert sum(report["score_bins"]["samples"]) == report["samples"]
    out = capsys.readouterr().out
    assert "transport local: there is one rank" in out
    assert "planted optimum" in out
    assert "train step 16/16, loss" in out
    assert re.search(r"^network   dlrm: bottom 13→8→4, top 19→16→1, 485 parameters, float32", out, re.MULTILINE)
    assert re.search(r"^memory    rank 0: rows .* MB, .* network 0.0 MB$", out, re.MULTILINE)


def test_too_little_room_for_the_model_is_said_before_training(config_file, tmp_path, capsys, monkeypatch):
    options = ["train.steps=2", "tables.dim=64"]
    run_training(resolve(config_file, options))
    assert "disk " not in capsys.readouterr().out
    size = sum(path.stat().st_size for path in (tmp_path / "run" / "model").rglob("*") if path.is_file())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1234))
    run_training(resolve(config_file, options), overwrite=True)
    pattern = rf"^disk      {tmp_path}/run has 1\.23 kB free and the model needs (\d+) kB: make room before training"
    needed = re.search(pattern, capsys.readouterr().out, re.MULTILINE)
    assert needed
    assert 0.75 < size / (1000 * int(needed[1])) < 1.25


def test_the_loss_falls(config_file, tmp_path):
    run_training(resolve(config_file, ["train.epochs=15"]))
    losses = [line["loss"] for line in records(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.05


def test_the_learning_rates_are_those_of_the_step(config_file, tmp_path):
    options = ["schedule.name=linear", "schedule.warmup_steps=6", "train.log_every=1", "tables.optimizer.lr=0.1"]
    config = resolve(config_file, [*options, "optimizer.lr=0.002"])
    run_training(config)
    for line in records(tmp_path / "run" / "metrics.jsonl"):
        expected = factor(config.schedule, line["step"] - 1, 16)
        assert line["lr"] == pytest.approx(0.002 * expected)
        assert line["embedding_lr/dim4_row_wise_adagrad"] == pytest.approx(0.1 * expected)


def test_evaluation_repeats_what_training_measured(config_file, tmp_path, clicks):
    metrics = run_training(resolve(config_file))
    assert run_evaluation(tmp_path / "run") == metrics
    validation = run_evaluation(tmp_path / "run", split="validation")
    assert validation.samples == 300
    assert validation != metrics
    moved = shutil.copytree(clicks.folder, tmp_path / "elsewhere")
    again = run_evaluation(tmp_path / "run", [f"data.folder={moved}", "data.batch_size=64"])
    assert again.auc == pytest.approx(metrics.auc, abs=1e-9)


def test_evaluation_prints_what_it_runs_on_and_the_result(config_file, tmp_path, capsys):
    run_training(resolve(config_file, ["train.steps=2"]))
    trained = capsys.readouterr().out
    run_evaluation(tmp_path / "run")
    out = capsys.readouterr().out
    assert "" not in out.splitlines()
    for name in ("ranks", "device", "data", "transport", "group", "network", "memory"):
        line = next(line for line in out.splitlines() if line.startswith(f"{name:<10}"))
        assert line in trained
    assert "after 2 steps" in out
    results = trained[trained.index("test: 501 samples") :]
    assert out.endswith(results.partition("warning ")[0])


def test_a_long_evaluation_shows_how_far_it_is(config_file, tmp_path, capsys, monkeypatch):
    run_training(resolve(config_file, ["train.steps=2"]))
    capsys.readouterr()
    monkeypatch.setattr("rowmesh.run.console.Progress", partial(Progress, interval_s=0.0))
    run_evaluation(tmp_path / "run", ["data.batch_size=100"])
    assert re.search(r"^test step 3/6, \d+ s left$", capsys.readouterr().out, re.MULTILINE)


def test_metrics_that_cannot_be_written_are_printed(config_file, tmp_path, capsys, monkeypatch):
    run_training(resolve(config_file, ["train.steps=2"]))
    before = (tmp_path / "run" / "evaluation" / "test.json").read_text()
    capsys.readouterr()
    monkeypatch.setattr(Path, "replace", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(RowmeshError, match=r"cannot write .*test.json: No space left.*; the metrics are printed above"):
        run_evaluation(tmp_path / "run")
    assert "norm. entropy" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run" / "evaluation").iterdir()] == ["test.json"]
    assert (tmp_path / "run" / "evaluation" / "test.json").read_text() == before


def test_a_model_knows_its_vocabulary(config_file, tmp_path, clicks, capsys):
    run_training(resolve(config_file, ["train.steps=2"]))
    source = DataSource.find([clicks.folder.parent / "raw"], None, validation=(), test=())
    random = Splitter(how="random", seed=5)
    files = {"train": source.files["train"]}
    other = prepare(files, tmp_path / "other", source.schema, splitter=random, min_count=1).folder
    options = [f"data.folder={other}"]
    with pytest.raises(RowmeshError) as error:
        run_evaluation(tmp_path / "run", options)
    assert f"was trained on {clicks.folder}, and {other} differs from it in vocabulary of C1" in str(error.value)
    assert "--other-vocabulary" in str(error.value)
    capsys.readouterr()
    message = r"but not another number of them: table C\d has [\d,]+ rows in the model and [\d,]+ values in the data"
    with pytest.raises(RowmeshError, match=message):
        run_evaluation(tmp_path / "run", options, other_vocabulary=True)
    assert "accepted" not in capsys.readouterr().out
    with mock.patch.object(phases, "mismatch", return_value="vocabulary of C1"):  # as many values
        run_evaluation(tmp_path / "run", other_vocabulary=True)
    assert "data      differ from those of the training in vocabulary of C1; accepted" in capsys.readouterr().out


def test_a_model_without_its_vocabulary_is_refused(config_file, tmp_path):
    run_training(resolve(config_file, ["train.steps=2"]))
    change_manifest(tmp_path / "run/model/manifest.json", lambda values: values["metadata"].pop("fingerprint"))
    with pytest.raises(RowmeshError, match="does not say what it was trained on"):
        run_evaluation(tmp_path / "run")


def test_a_model_of_one_rank_is_evaluated_on_several(config_file, tmp_path, command):
    metrics = run_training(resolve(config_file, ["train.steps=6"]))
    done = command(["evaluate", str(tmp_path / "run"), "--split", "test"], ranks=2)
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "run" / "evaluation" / "test.json").read_text())
    assert report["auc"] == pytest.approx(metrics.auc, abs=1e-6)
    assert report["log_loss"] == pytest.approx(metrics.log_loss, rel=1e-6)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["C3.0.values.npy", "dense.pt"])
def test_a_flipped_bit_is_not_evaluated(config_file, tmp_path, command, name):
    run_training(resolve(config_file, ["train.steps=6"]))
    flip(next((tmp_path / "run").rglob(name)))
    ends = command(["evaluate", str(tmp_path / "run")], ranks=2)
    assert ends.status == 2
    assert ends.err.count(f"{name} is damaged: bytes 0 to ") == 2, "both ranks say it, though one alone may read it"
    assert "--no-verify" in ends.err
    if name != "dense.pt":
        assert run_evaluation(tmp_path / "run", verify=False).samples == 501


def test_a_model_without_checksums_is_refused(config_file, tmp_path):
    run_training(resolve(config_file, ["train.steps=2"]))
    change_manifest(tmp_path / "run/model/manifest.json", lambda values: values.pop("checksums"))
    with pytest.raises(RowmeshError, match=r"no checksum of dense\.pt; restore it from a copy, or train again"):
        run_evaluation(tmp_path / "run")


def test_steps_end_a_run_before_its_epochs(config_file, tmp_path):
    run_training(resolve(config_file, ["train.steps=3", "schedule.name=linear"]))
    last = records(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 3
    assert last["lr"] == 0.0


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "row_wise_adagrad"])
def test_every_optimizer_trains(config_file, name):
    dense = "sgd" if name == "row_wise_adagrad" else name
    options = [f"tables.optimizer.name={name}", f"optimizer.name={dense}", "train.steps=4"]
    assert run_training(resolve(config_file, options)).log_loss < 1.0


@pytest.mark.parametrize("options", [["tables.dtype=bfloat16"], ["tables.dtype=float64"], ["tables.C1.pooling=mean"]])
def test_other_tables(config_file, options):
    assert run_training(resolve(config_file, [*options, "train.steps=4"])).log_loss < 1.0


def test_a_diverging_run_names_the_step(config_file, tmp_path):
    with pytest.raises(RowmeshError, match=r"step \d+ on rank 0: the loss is .*lower optimizer.lr"):
        run_training(resolve(config_file, ["optimizer.name=sgd", "optimizer.lr=1e300", "tables.dtype=float64"]))
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / ".lock").exists()


def test_losses_that_come_late_are_the_same_and_stop_a_run_before_its_model(config_file, tmp_path, monkeypatch):
    run_training(resolve(config_file, [f"run.folder={tmp_path / 'at_once'}", "train.eval_every=8"]))
    monkeypatch.setattr("rowmesh.run.trainer.Losses", partial(Losses, lag=3))
    run_training(resolve(config_file, [f"run.folder={tmp_path / 'late'}", "train.eval_every=8"]))
    lines = (records(tmp_path / name / "metrics.jsonl") for name in ("at_once", "late"))
    at_once, late = ([line["loss"] for line in of_run if line["kind"] == "train"] for of_run in lines)
    assert late == pytest.approx(at_once, rel=1e-12)

    options = ["optimizer.name=sgd", "optimizer.lr=1e300", "tables.dtype=float64", "train.steps=4", "train.log_every=9"]
    with pytest.raises(RowmeshError, match=r"step 2 on rank 0: the loss is .*lower optimizer.lr"):
        run_training(resolve(config_file, options))
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tables.C9.dim=4"], r"tables.C9: .* has no table of this name; known: C1, C2"),
        (["tables.C1.dtype=float64"], "tables C1 are float64 and others are not"),
        (["tables.optimizer.beta1=0.5"], "tables.optimizer: row_wise_adagrad has no beta1; its options: lr, .*eps"),
        (["tables.C3.optimizer.beta1=0.5"], "tables.C3.optimizer: row_wise_adagrad has no beta1"),
        (["tables.initializer.std=0.5", "tables.C1.pooling=mean"], "tables.initializer: uniform has no std"),
        (["tables.C2.initializer.std=0.5"], "tables.C2.initializer: uniform has no std; its options: bound"),
        (["tables.out_of_range=9999"], "table 'C1': out_of_range must be 'error' or a row below"),
        (
            ["model.top=[]", "data.train=trian"],
            "data.train: .*prepared has no split 'trian', only: train, .*; did you mean 'train'?",
        ),
        (["data.test=tset"], "data.test: .*prepared has no split 'tset', .*; did you mean 'test'?"),
        (["data.validation=valid"], "data.validation: .* has no split 'valid', .*; did you mean 'validation'?"),
        (["data.validation=qqq"], "data.validation: .* has no split 'qqq', only: train, validation, test"),
    ],
)
def test_what_the_data_do_not_allow(config_file, tmp_path, options, message):
    with pytest.raises((ConfigurationError, DataError), match=message):
        run_training(resolve(config_file, options))
    assert not (tmp_path / "run").exists()


def test_missing_data_and_runs(config_file, tmp_path):
    with pytest.raises(DataError, match="holds no prepared data set"):
        run_training(resolve(config_file, [f"data.folder={tmp_path}"]))
    with pytest.raises(RowmeshError, match=r"is no run: config.toml is missing"):
        run_evaluation(tmp_path)
    run_training(resolve(config_file, ["train.steps=1"]))
    with pytest.raises(RowmeshError, match=r"holds a run; .*--overwrite"):
        run_training(resolve(config_file))
    with pytest.raises(RowmeshError, match=r"dim is 4 in the checkpoint and 8 here"):
        run_evaluation(tmp_path / "run", ["tables.dim=8"])
    with pytest.raises(
        RowmeshError, match=r"the network in .*model is another; leave model.… as it was trained"
    ) as found:
        run_evaluation(tmp_path / "run", ["model.top=[9]"])
    shapes = r"trained: \S+\.weight is \[\d+, \d+\] there and \[9, \d+\] here, and \d+ more differ"
    assert re.search(shapes, str(found.value))
    assert "\n" not in str(found.value)
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(RowmeshError, match=r"no model in .*did training finish"):
        run_evaluation(tmp_path / "run")


def test_a_warm_up_that_is_longer_than_the_run_is_named(config_file, capsys):
    run_training(resolve(config_file, ["train.steps=2", "schedule.warmup_steps=2000"]))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "schedule.warmup_steps" in line]
    assert line.endswith("of 2 steps: learning rates reach 0.001 of what they are; lower it")


@pytest.mark.parametrize("section", ["tables", "tables.C1"])
def test_the_bound_of_a_dynamic_table_is_asked_for_by_its_key(config_file, section):
    rules = [f"{section}.storage=dynamic", f"{section}.dynamic.capacity=9"]
    with pytest.raises(ConfigurationError, match=rf"^{section}\.initializer\.bound: .* give {section}\.initializer\.b"):
        run_training(resolve(config_file, rules))


def test_without_a_test_split_a_run_ends_without_metrics(config_file, clicks, tmp_path):
    folder = shutil.copytree(clicks.folder, tmp_path / "no_test")
    prepared = Prepared.open(folder)
    replace(prepared, splits={"train": prepared.splits["train"]}).save()
    renew_checksums(folder)
    assert run_training(resolve(config_file, [f"data.folder={folder}", "train.steps=2"])) is None
    with pytest.raises(DataError, match=r"data.validation: .* has no split 'validation'"):
        run_training(
            resolve(config_file, [f"data.folder={folder}", "train.eval_every=2", "train.validation_fraction=0"]),
            overwrite=True,
        )
    with pytest.raises(DataError, match=r"data.test: .* has no split 'test', only: train$"):
        run_evaluation(tmp_path / "run")
    with pytest.raises(DataError, match=r"--split: .* has no split 'tset'"):
        run_evaluation(tmp_path / "run", [f"data.folder={clicks.folder}"], split="tset")
    replace(prepared, splits={"train": replace(prepared.splits["train"], samples=0)}).save()
    renew_checksums(folder)
    with pytest.raises(DataError, match=r"data.train: split 'train' of .* has no samples"):
        run_training(resolve(config_file, [f"data.folder={folder}"]), overwrite=True)


@pytest.mark.parametrize(("num_ranks", "transport"), [(2, "one_sided"), (3, "collective")])
def test_any_number_of_ranks_trains_the_same_model(config_file, tmp_path, command, num_ranks, transport):
    options = ["tables.dtype=float64", f"run.folder={tmp_path / 'alone'}"]
    alone = run_training(resolve(config_file, options))
    options = ["tables.dtype=float64", f"parallel.transport={transport}"]
    done = command(["train", str(config_file), *options], ranks=num_ranks)
    assert done.status == 0, done.err
    expected, actual = load_model(tmp_path / "alone"), load_model(tmp_path / "run")
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    report = json.loads((tmp_path / "run" / "evaluation" / "test.json").read_text())
    assert report["auc"] == pytest.approx(alone.auc, abs=1e-9)
    assert math.isclose(report["log_loss"], alone.log_loss, rel_tol=1e-7)
    assert f"transport {transport}" in done.out
    rounds = {(line["group"], line["all_to_all_rounds"] > 0) for line in records(tmp_path / "run" / "counters.jsonl")}
    with_messages = {("dim4_row_wise_adagrad_float64", True), ("all groups", True)}
    without = {("dim4_row_wise_adagrad_float64", False)}
    assert rounds == (with_messages if transport == "collective" else without)


def test_commands_fit_threads_to_the_cores_and_say_so(config_file, capsys, monkeypatch):
    """`tests/mesh/test_threads.py` has the number. Called as a function, nothing is changed."""
    asked = []
    monkeypatch.setattr(phases, "fit_threads", lambda mesh: asked.append(mesh) or "1 of torch on each rank, not 8")
    for arguments in (["train", str(config_file), "train.steps=1"], ["evaluate", str(config_file.parent / "run")]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert "threads   1 of torch on each rank, not 8\n" in capsys.readouterr().out
    assert len(asked) == 2
    run_evaluation(config_file.parent / "run")
    assert len(asked) == 2


def test_metrics_go_to_trackers_and_a_file_for_prometheus(config_file, tmp_path):
    pytest.importorskip("tensorboard")
    file = tmp_path / "clicks.prom"
    options = ["train.steps=6", "train.eval_every=3", f"run.prometheus_file={file}", 'run.trackers=["tensorboard"]']
    run_training(resolve(config_file, options))
    text = file.read_text()
    assert 'rowmesh_train_step{run="run"} 6.0' in text
    assert 'rowmesh_evaluation_auc{run="run",split="validation"} 0.' in text
    assert 'of="network"} ' in text
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    assert run_evaluation(tmp_path / "run").samples == 501


def test_training_by_the_command_line_writes_a_page(config_file, tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(config_file), "train.steps=4", "train.log_every=2"])
    page = tmp_path / "run" / "report.html"
    assert capsys.readouterr().out.splitlines()[-1] == f"report    {page}"
    assert "What to do next" in page.read_text()


def test_a_page_that_cannot_be_written_ends_no_run(config_file, capsys, monkeypatch):
    monkeypatch.setattr("rowmesh.report.run_page.run_report", lambda records: 1 / 0)
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(config_file), "train.steps=1"])
    assert "report    could not be written (division by zero)" in capsys.readouterr().out
