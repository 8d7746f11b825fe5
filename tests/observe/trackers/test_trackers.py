import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.observe import trackers
from rowmesh.observe.trackers import TrackedRun, Trackers, check_trackers
from rowmesh.observe.trackers.prometheus import PrometheusFile

FAKE = f"{__name__}:Fake"


class Fake:
    """Notes what it is told; fails where it is told to."""

    made: ClassVar[list["Fake"]] = []

    def __init__(self, run):
        self.run, self.calls = run, []
        Fake.made.append(self)

    def write(self, kind, step, numbers):
        if numbers.get("fails"):
            raise OSError("no connection")
        self.calls.append((kind, step, dict(numbers)))

    def close(self):
        self.calls.append("closed")


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """This file under the name that it is imported by, and no trackers of other tests."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Fake=Fake, number=3))
    monkeypatch.setattr(Fake, "made", [])


def tracked(folder, said=None):
    config = {"train": {"epochs": 2}, "run": {"folder": "x" * 600}}
    return TrackedRun(Path(folder), "criteo", config, (said if said is not None else []).append)


def test_numbers_go_to_a_class_of_the_users(tmp_path):
    group = Trackers(tracked(tmp_path), [FAKE])
    group.write("train", 5, {"loss": 0.5})
    group.close()
    (fake,) = Fake.made
    assert fake.run.config["train"] == {"epochs": 2}
    assert fake.calls == [("train", 5, {"loss": 0.5}), "closed"]


def test_one_that_fails_is_said_once_and_left_out(tmp_path):
    said = []
    group = Trackers(tracked(tmp_path, said), [FAKE], {"other": Fake})
    group.write("train", 1, {"fails": 1.0})
    group.write("train", 2, {"loss": 0.5})
    group.close()
    expected = "tracker {} failed (OSError: no connection); the run goes on without it"
    assert said == [expected.format(FAKE), expected.format("other")]
    assert [fake.calls for fake in Fake.made] == [[], []]


def test_one_that_cannot_begin_is_left_out(tmp_path):
    said = []
    group = Trackers(tracked(tmp_path, said), [], {"broken": lambda run: 1 / 0})
    group.write("train", 1, {"loss": 0.5})
    group.close()
    assert said == ["tracker broken failed (ZeroDivisionError: division by zero); the run goes on without it"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("tensorbord", "no tracker 'tensorbord'; did you mean 'tensorboard'"),
        ("x", "there are tensorboard, wandb, mlflow, and module:Class"),
        ("no_such_module:Class", "'no_such_module:Class' cannot be imported"),
        (f"{__name__}:Other", "cannot be imported"),
        (f"{__name__}:number", "is no class"),
    ],
)
def test_what_is_not_there_is_named(name, message):
    with pytest.raises(ConfigurationError, match=message):
        check_trackers([name])


@pytest.mark.parametrize("name", trackers.BUILT_IN)
def test_a_package_that_is_missing_is_named(monkeypatch, name):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=rf"pip install '\.\[{name}\]'"):
        check_trackers([name])


def test_weights_and_biases(monkeypatch, tmp_path):
    calls = []
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append((numbers, step)), finish=lambda: calls.append("finished")
    )

    def init(**options):
        calls.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_PROJECT", "clicks")
    group = Trackers(tracked(tmp_path), ["wandb"])
    group.write("validation", 5, {"auc": 0.75})
    group.close()
    assert calls[0]["project"] == "clicks"
    assert calls[0]["name"] == "criteo"
    assert calls[0]["config"]["train"] == {"epochs": 2}
    assert calls[1:] == [({"validation/auc": 0.75}, 5), "finished"]


def test_mlflow(monkeypatch, tmp_path):
    calls = []
    fake = SimpleNamespace(
        start_run=lambda run_name, tags: calls.append(run_name),
        log_params=calls.append,
        log_metrics=lambda numbers, step: calls.append((numbers, step)),
        end_run=lambda: calls.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    group = Trackers(tracked(tmp_path), ["mlflow"])
    group.write("train", 5, {"embedding_lr/dim16, a": 0.5})
    group.close()
    parameters = {"train.epochs": "2", "run.folder": "x" * 500}
    assert calls == ["criteo", parameters, ({"train/embedding_lr/dim16_ a": 0.5}, 5), "ended"]


def test_mlflow_goes_on_with_a_run_that_is_resumed(monkeypatch, tmp_path):
    calls = []
    known = [SimpleNamespace(info=SimpleNamespace(run_id="theirs"))]
    fake = SimpleNamespace(
        start_run=lambda **options: calls.append(options),
        search_runs=lambda filter_string, output_format: known if "'ours'" in filter_string else [],
        log_params=calls.append,
        end_run=lambda: calls.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    Trackers(replace(tracked(tmp_path), id="ours"), ["mlflow"]).close()
    assert calls[0] == {"run_name": "criteo", "tags": {"rowmesh.run": "ours"}}
    calls.clear()
    Trackers(replace(tracked(tmp_path), id="ours", resumed_after=7), ["mlflow"]).close()
    assert calls == [{"run_id": "theirs"}, "ended"]


def test_weights_and_biases_goes_on_with_a_run_that_is_resumed(monkeypatch, tmp_path):
    calls = []
    made = SimpleNamespace(finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: calls.append(options) or made))
    Trackers(replace(tracked(tmp_path), id="ours", resumed_after=7), ["wandb"]).close()
    assert (calls[0]["id"], calls[0]["resume"]) == ("ours", "allow")


def test_a_file_for_prometheus_has_the_latest_numbers(tmp_path):
    path = tmp_path / "metrics" / "criteo.prom"
    file = PrometheusFile(path, tracked(tmp_path))
    file.write("train", 1, {"loss": 0.6, "step_ms/network": 5.0, "step_ms/rows": 2.0})
    file.write("train", 2, {"loss": 0.5, "step_ms/network": 4.5, "step_ms/rows": 2.0})
    file.write('a "split"', 2, {"auc": 0.75})
    file.close()
    lines = [line for line in path.read_text().splitlines() if "timestamp" not in line]
    assert lines == [
        "# TYPE rowmesh_evaluation_auc gauge",
        r'rowmesh_evaluation_auc{run="criteo",split="a \"split\""} 0.75',
        "# TYPE rowmesh_evaluation_step gauge",
        r'rowmesh_evaluation_step{run="criteo",split="a \"split\""} 2.0',
        "# TYPE rowmesh_train_loss gauge",
        'rowmesh_train_loss{run="criteo"} 0.5',
        "# TYPE rowmesh_train_step gauge",
        'rowmesh_train_step{run="criteo"} 2.0',
        "# TYPE rowmesh_train_step_ms gauge",
        'rowmesh_train_step_ms{run="criteo",of="network"} 4.5',
        'rowmesh_train_step_ms{run="criteo",of="rows"} 2.0',
    ]
    assert [each.name for each in path.parent.iterdir()] == ["criteo.prom"]
