"""A module that only the folder of a run names is not imported unless the user trained that run here, or says so."""

import sys

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.run import trust
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.own_model import ModelError, find_class
from rowmesh.run.resolve import resolve

MODULE = """
import pathlib
import torch
pathlib.Path("imported").touch()
class Plain: pass
class Mean(torch.nn.Module):
    def __init__(self, dims, num_dense):
        super().__init__()
        self.last = torch.nn.Linear(sum(dims.values()) + num_dense, 1)
    def forward(self, dense, embeddings):
        return self.last(torch.cat([dense, embeddings.values], 1)).squeeze(1)
def function(): pass
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trusted_or_not.py").write_text(MODULE)
    yield tmp_path / "imported"
    sys.modules.pop("trusted_or_not", None)


@pytest.fixture
def run(config_file, tmp_path, module):
    options = ["model.name=trusted_or_not:Mean", "train.steps=1", "train.patience=0"]
    run_training(resolve(config_file, options))
    sys.modules.pop("trusted_or_not")
    module.unlink()
    return tmp_path / "run"


def test_a_run_of_this_user_is_evaluated(run, module):
    run_evaluation(run)
    assert module.exists()


def test_a_run_from_elsewhere_imports_nothing_unless_it_is_trusted(run, module, monkeypatch, tmp_path):
    from rowmesh import load_run

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    for call in (lambda: run_evaluation(run), lambda: load_run(run)):
        with pytest.raises(ConfigurationError, match=r"names the model trusted_or_not:Mean.*pass --trust"):
            call()
    assert not module.exists()
    run_evaluation(run, ["model.name=trusted_or_not:Mean"], trust=True)
    assert module.exists()
    assert load_run(run, trust=True).score_names == ("score",)


def test_another_name_in_the_folder_is_not_trusted(run, module):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("trusted_or_not:Mean", "trusted_or_not:function"))
    with pytest.raises(ConfigurationError, match="names the model trusted_or_not:function"):
        run_evaluation(run)
    assert not module.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trusted_or_not:Meen", "has no Meen; did you mean 'Mean'"),
        ("trusted_or_not:Plain", "is a class derived from nothing"),
    ],
)
def test_what_is_seen_to_be_no_model_is_not_imported(module, name, message):
    with pytest.raises(ModelError, match=message):
        find_class(name)
    assert not module.exists()


def test_a_key_that_cannot_be_kept_seals_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "trusted_or_not.py"))
    assert trust.seal_of("a:B") is None
    with pytest.raises(ConfigurationError, match="names the model a:B"):
        trust.check_trusted(tmp_path, "a:B", "", trust=False, how="pass --trust")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    seal = trust.seal_of("a:B")
    assert (tmp_path / "state" / "rowmesh" / "key").stat().st_mode & 0o77 == 0
    trust.check_trusted(tmp_path, "a:B", seal, trust=False, how="")
    assert [path.name for path in (tmp_path / "state" / "rowmesh").iterdir()] == ["key"]
