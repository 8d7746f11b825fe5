"""Models of a user's in the command: the same results as rowmesh's own, on any number of ranks, and clear errors."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.config import ModelConfig
from rowmesh.run.export import export
from rowmesh.run.graphs import check_graphs
from rowmesh.run.own_model import ModelError, find_class, make_own
from rowmesh.run.resolve import resolve, validate
from rowmesh.tables import TableSpec
from tests.support.clicks import write_config

MODELS = "tests.support.own_models"
SIZES = ("model.options.bottom=[8]", "model.options.top=[16]")


@pytest.fixture
def own_file(clicks, tmp_path):
    """A configuration without the widths of DLRM."""
    path = write_config(tmp_path / "clicks.toml", tmp_path / "run", clicks.folder, "[train]", "steps = 6")
    path.write_text(path.read_text().replace("bottom = [8]\ntop = [16]\n", ""))
    return path


def test_the_same_model_trains_alike(own_file):
    expected = run_training(resolve(own_file, ["model.bottom=[8]", "model.top=[16]"]), overwrite=True)
    for name in ("OwnDLRM", "SampleLoss", "MeanLoss"):
        found = run_training(resolve(own_file, [f"model.name={MODELS}:{name}", *SIZES]), overwrite=True)
        assert found is not None
        assert expected is not None
        assert found.auc == pytest.approx(expected.auc, abs=1e-6), name
        assert found.log_loss == pytest.approx(expected.log_loss, abs=1e-6), name


@pytest.mark.parametrize("options", [[], ["pipeline.depth=1", "pipeline.micro_batches=2"]], ids=["plain", "pipeline"])
def test_two_ranks_train_what_one_does(own_file, tmp_path, command, options):
    """The last batch leaves one of two ranks without samples, which the mean of a loss must survive."""
    found = {}
    for ranks in (1, 2):
        run = tmp_path / f"ranks{ranks}"
        more = ["train.steps=0", "tables.dtype=float64", f"run.folder={run}", f"model.name={MODELS}:MeanLoss"]
        done = command(["train", str(own_file), *more, *SIZES, *options], ranks=ranks)
        assert done.status == 0, done.err
        found[ranks] = json.loads((run / "evaluation" / "test.json").read_text())
    assert found[2]["log_loss"] == pytest.approx(found[1]["log_loss"], abs=1e-9)


def test_tables_of_other_dims_and_running_means(own_file, tmp_path, command):
    """Ranks evaluate with the running means that are saved, so that one rank finds the same again."""
    config = [f"model.name={MODELS}:Wide", "model.options.width=5", "tables.C1.dim=16", "train.steps=0"]
    done = command(["train", str(own_file), *config], ranks=2)
    assert done.status == 0, done.err
    assert re.search(rf"^network   {MODELS}:Wide: width 5, \d+ parameters, float32, on every rank$", done.out, re.M)
    trained = json.loads((tmp_path / "run" / "evaluation" / "test.json").read_text())
    assert run_evaluation(tmp_path / "run").log_loss == pytest.approx(trained["log_loss"], abs=1e-6)
    export(tmp_path / "run", tmp_path / "export")
    network = torch.load(tmp_path / "export" / "network.pt", weights_only=True)
    assert network["layers.0.weight"].shape[0] == 5


def test_a_model_in_the_current_folder_is_found_again(own_file, tmp_path, monkeypatch, clicks):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "click_model.py").write_text(f"from {MODELS} import Wide\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    metrics = run_training(resolve(own_file, ["model.name=click_model:Wide"]))
    assert run_evaluation(tmp_path / "run") == metrics
    monkeypatch.delitem(sys.modules, "click_model")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(folder)])
    monkeypatch.chdir(tmp_path)
    message = f"no module 'click_model' in the current folder .* PYTHONPATH.* its training was started in {folder}$"
    with pytest.raises(ModelError, match=message):
        run_evaluation(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere.models:Mine", [], "there is no module 'nowhere' in the current folder"),
        (f"{MODELS}:Wyde", [], r"own_models.py has no Wyde; did you mean 'Wide'\?"),
        (f"{MODELS}:function", [], "is a function; it must be a class derived from torch.nn.Module"),
        (f"{MODELS}:Wide", ["model.options.widht=3"], r"Wide\(.*unexpected keyword argument 'widht'; change its"),
        (f"{MODELS}:Wide", ["model.options.dims=3"], "model.options.dims: rowmesh gives dims itself"),
        (f"{MODELS}:OwnDLRM", [], "missing a required .*argument: 'bottom'"),
        (f"{MODELS}:Refuses", [], r"Refuses\(dims=…, num_dense=13\) failed: ValueError: no such luck \(.*py:\d+\)"),
        (f"{MODELS}:NoForward", [], r"NoForward.forward.* is called with \(dense, embeddings\): too many"),
        (f"{MODELS}:Column", [], r"must return logits \[B\] = \[2\], got a tensor \[2, 1\] .*; return logits.squeeze"),
        (f"{MODELS}:Fails", [], r"Fails.forward failed on dense \[2, 13\] and .*own_models.py:\d+"),
        (f"{MODELS}:WrongLoss", [], r"loss must return the losses of the samples \[B\] = \[2\], or their mean, got a"),
        (f"{MODELS}:NoParameters", [], "has no parameters; give it at least one"),
        (f"{MODELS}:Detached", [], "returned logits without a gradient"),
    ],
)
def test_mistakes_are_named(own_file, name, options, message):
    with pytest.raises(ModelError, match=message) as caught:
        run_training(resolve(own_file, [f"model.name={name}", *options]))
    assert "model.name" in str(caught.value) or "model.options" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"name": "dlmr"},
            "model.name: should be one of dlrm, dcn_v2, deep_fm, mmoe, shared_bottom, two_tower, wide_and_deep, "
            "sasrec, hstu, fuxi_alpha, fuxi_beta, or a class of your own as 'package.module:Class', got 'dlmr'; did "
            "you mean 'dlrm'?",
        ),
        ({"name": "model.py:Mine"}, "'package.module:Class', without .py, got 'model.py:Mine'"),
        ({"options": {"width": 3}}, "model: options width are for other models; dlrm has bottom and top"),
        ({"name": "a:B", "top": [3]}, "model: top: of dlrm alone; give what a:B takes as model.options"),
    ],
)
def test_the_section_is_checked(values, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        validate({"data": {"folder": "clicks"}, "model": values}, source="here")


def test_graphs_are_refused(own_file, monkeypatch):
    config = resolve(own_file, ["model.name=a:B", "train.cuda_graphs=on", "train.device=cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match=r"records dlrm alone, and model\.name is a:B"):
        check_graphs(config)


def test_a_module_that_fails_says_where(tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text(
        "import torch\n\nraise KeyError('no')\nclass Mine(torch.nn.Module): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=r"importing broken_model failed: KeyError: 'no' \(.*broken_model.py:3\)"):
        find_class("broken_model:Mine")


def test_the_page_runs_as_it_stands(own_file, tmp_path, monkeypatch):
    """Its Python is a module in the current folder, its TOML is the section of a configuration."""
    page = (Path(__file__).parents[2] / "docs" / "own_model.md").read_text()
    (python, *_), (toml, *_) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "toml"))
    (tmp_path / "two_towers.py").write_text(python)
    lines = own_file.read_text().replace("[model]\n", toml.replace("user_id", "C1").replace("age_group", "C2"))
    own_file.write_text(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    metrics = run_training(resolve(own_file))
    assert metrics is not None
    assert run_evaluation(tmp_path / "run") == metrics


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "dcn_v2",
            {"num_crosses": 2},
            r"model\.options\.num_crosses: dcn_v2 has no such option; did you mean 'num_cross'",
        ),
        ("two_tower", {}, r"two_tower' needs model\.options\.item"),
        ("dcn_v2", {"deep": "512"}, "dcn_v2: deep must be whole numbers, got '512'"),
        ("mmoe", {"num_experts": 2.5}, "mmoe: num_experts must be whole numbers, got 2.5"),
    ],
)
def test_options_of_named_models_are_checked(name, options, message):
    tables = [TableSpec(name="user", num_rows=5, dim=4)]
    with pytest.raises(ModelError, match=message):
        make_own(ModelConfig(name=name, options=options), tables, 2, torch.float32)


@pytest.mark.parametrize("name", ["dcn_v2", "deep_fm", "mmoe", "shared_bottom", "two_tower", "wide_and_deep"])
def test_named_models_learn(own_file, name):
    options = ['model.options.item=["C2", "C3"]'] if name == "two_tower" else []
    metrics = run_training(resolve(own_file, [f"model.name={name}", "train.steps=0", *options]))
    assert metrics is not None
    assert metrics.auc > 0.55, name


def test_dlrm_projects_vectors_of_other_dims(own_file, tmp_path, command):
    more = ["tables.C1.dim=16", "tables.dtype=float64", "train.steps=0", "model.bottom=[8]", "model.top=[16]"]
    run = tmp_path / "two"
    done = command(["train", str(own_file), f"run.folder={run}", *more], ranks=2)
    assert done.status == 0, done.err
    assert re.search(r"^network   dlrm: vectors projected to 16, bottom 13→8→16, top ", done.out, re.M)
    two = json.loads((run / "evaluation" / "test.json").read_text())
    one = run_training(resolve(own_file, [f"run.folder={tmp_path / 'one'}", *more]))
    assert one is not None
    assert two["log_loss"] == pytest.approx(one.log_loss, abs=1e-9)
    assert run_evaluation(tmp_path / "one").log_loss == pytest.approx(one.log_loss, abs=1e-9)
