"""No command replaces a file that it did not write, unless it is told to; none destroys a part of a model or run."""

import inspect
import json

import pytest

from rowmesh._support.files.manifest import Manifest
from rowmesh._support.files.mark import mark
from rowmesh._support.files.output import check_output
from rowmesh.cli.data import prepare, reorder, synthesize, synthesize_events
from rowmesh.cli.doctor import doctor
from rowmesh.cli.env import env
from rowmesh.cli.evaluate import evaluate
from rowmesh.cli.export import export
from rowmesh.cli.plan import plan
from rowmesh.cli.predict import predict
from rowmesh.cli.recommend import recommend
from rowmesh.cli.report import report
from rowmesh.cli.train import train
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.observe.trackers.prometheus import check_free
from rowmesh.placement.topology import Topology
from rowmesh.report.html import is_page, page
from rowmesh.run.predict import is_quarantine
from tests.support.commands import run_command
from tests.support.runs import prepare_run

FOREIGN = {
    "text": b"mine\n",
    "json": b'{"mine": 1}',
    "html": b"<!doctype html><p>mine</p>",
    "toml": b"mine = 1\n",
    "empty": b"",
}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return prepare_run(tmp_path_factory.mktemp("foreign"))


OUTPUTS = {"--out": "plan.json", "--report": "plan.html", "--topology-out": "links.toml"}


@pytest.mark.parametrize("option", OUTPUTS)
@pytest.mark.parametrize("kind", FOREIGN)
def test_plan_replaces_its_own_files_alone(clicks, tmp_path, option, kind):
    out = tmp_path / OUTPUTS[option]
    command = ["plan", str(clicks), "--ranks", "2", option, str(out)]
    out.write_bytes(FOREIGN[kind])
    done = run_command(Mesh(), command)
    assert done.status == 2
    assert f"{out} is there already, and this command did not write it" in done.err
    assert out.read_bytes() == FOREIGN[kind]
    assert run_command(Mesh(), [*command, "--overwrite"]).status == 0
    assert out.read_bytes() != FOREIGN[kind]
    assert run_command(Mesh(), command).status == 0, "its own file is made again"


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_report_replaces_its_own_files_alone(tmp_path, kind):
    run, out = tmp_path / "run", tmp_path / "page.html"
    run.mkdir()
    (run / "config.toml").write_text("")
    out.write_bytes(FOREIGN[kind])
    done = run_command(Mesh(), ["report", str(run), "--out", str(out)])
    assert done.status == 2
    assert out.read_bytes() == FOREIGN[kind]
    assert run_command(Mesh(), ["report", str(run), "--out", str(out), "--overwrite"]).status == 0
    assert is_page(out)
    assert run_command(Mesh(), ["report", str(run), "--out", str(out)]).status == 0
    Manifest(kind="run").write(run)
    for options in ([], ["--overwrite"]):
        assert run_command(Mesh(), ["report", str(run), "--out", str(run / "config.toml"), *options]).status == 2
    assert not (run / "config.toml").read_text()


@pytest.mark.parametrize("kind", [kind for kind in FOREIGN if kind != "empty"])
def test_prometheus_files_of_others_stay(tmp_path, kind):
    path = tmp_path / "rowmesh.prom"
    check_free(path)
    path.write_bytes(b"# TYPE rowmesh_train_loss gauge\n")
    check_free(path)
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(ConfigurationError, match=r"run\.prometheus_file=.* is there, and no run of rowmesh wrote it"):
        check_free(path)


def test_prometheus_files_are_looked_at_before_a_run_begins(clicks, tmp_path):
    path = tmp_path / "mine.prom"
    path.write_text("mine")
    done = run_command(Mesh(), ["train", str(clicks), f"run.folder={tmp_path / 'run'}", f"run.prometheus_file={path}"])
    assert done.status == 2
    assert not (tmp_path / "run").exists()
    assert path.read_text() == "mine"


def folders(tmp_path):
    """Folders of every kind that rowmesh writes, each with a file that is a part of it."""
    for name, files in (("data", ("a.arrow",)), ("run", ())):
        folder = tmp_path / name
        folder.mkdir()
        (folder / (files or ("config.toml",))[0]).write_text("part")
        Manifest(kind=name, files=files).write(folder)
        yield folder / (files or ("config.toml",))[0]
        yield folder / "manifest.json"
    model = tmp_path / "run" / "model"
    (model / "files").mkdir(parents=True)
    (model / "manifest.json").write_text(json.dumps({"tables": {}, "xxh3_64": "0"}))
    (model / "files" / "rows.npy").write_text("part")
    yield model / "manifest.json"
    yield model / "files" / "rows.npy"
    published = tmp_path / "published"
    published.mkdir()
    mark(published, "published generations")
    (published / "newest.json").write_text("part")
    yield published / "newest.json"


def test_parts_of_folders_are_replaced_by_no_command(tmp_path):
    (tmp_path / "file.csv").write_text("")
    for path in list(folders(tmp_path)):
        before = path.read_bytes()
        with pytest.raises(ConfigurationError, match=r"is a part of .*, which it would destroy"):
            check_output(path, read=tmp_path / "file.csv", overwrite=True)
        (tmp_path / "link").symlink_to(path)
        with pytest.raises(ConfigurationError, match="is a part of"):
            check_output(tmp_path / "link", overwrite=True)
        (tmp_path / "link").unlink()
        assert path.read_bytes() == before
    check_output(tmp_path / "run" / "scores.parquet", overwrite=False)
    (tmp_path / "run" / "scores.parquet").write_bytes(b"PAR1")
    check_output(tmp_path / "run" / "scores.parquet", overwrite=True)
    with pytest.raises(RowmeshError, match="is there already"):
        check_output(tmp_path / "run" / "scores.parquet", overwrite=False)


def test_bad_rows_of_a_former_prediction_are_known(tmp_path):
    path = tmp_path / "x.quarantine.jsonl"
    for content, is_own in (
        (b'{"file": "a", "line": 1}\n', True),
        (b"", True),
        (b'{"mine": 1}', False),
        (b"mine", False),
    ):
        path.write_bytes(content)
        assert is_quarantine(path) == is_own
    assert Topology.shipped()
    assert "generator" in page("a", [])


def test_every_output_of_every_command_is_looked_at():
    """A command with another file or folder to write comes into this list, and into a test."""
    of_data = (synthesize, synthesize_events, prepare, reorder)
    commands = (plan, predict, recommend, report, export, train, evaluate, env, doctor, *of_data)
    found = {
        (command.__name__, name)
        for command in commands
        for name, parameter in inspect.signature(command).parameters.items()
        if "Path" in str(parameter.annotation) and (name in ("out", "report", "trace") or name.endswith("_out"))
    }
    checked = {("plan", "out"), ("plan", "report"), ("plan", "topology_out"), ("report", "out")}
    scores = {("predict", "out"), ("recommend", "out")}
    folders = {
        ("export", "out"),
        ("synthesize", "out"),
        ("synthesize_events", "out"),
        ("prepare", "out"),
        ("reorder", "out"),
    }  # replacing_folder
    assert found == checked | scores | folders


@pytest.mark.parametrize("name", ["manifest.json", "files/rows.npy"])
def test_scores_destroy_no_model(clicks, tmp_path, name):
    *_, _ = folders(tmp_path)
    out, rows = tmp_path / "run" / "model" / name, tmp_path / "rows.tsv"
    before = out.read_bytes()
    rows.write_text("1\n")
    done = run_command(Mesh(), ["predict", str(tmp_path / "run"), str(rows), "--out", str(out), "--overwrite"])
    assert done.status == 2
    assert "which it would destroy" in done.err
    assert out.read_bytes() == before
