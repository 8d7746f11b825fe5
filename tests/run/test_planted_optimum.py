"""The claim that a model trained with the main job's configuration comes near the best that can be reached."""

import json
from pathlib import Path

import pytest

from rowmesh.data import prepare
from rowmesh.data.inputs import DataSource
from rowmesh.data.planted import PlantedConfig
from rowmesh.data.synthetic import synthesize
from tests.support.commands import launch

CONFIG = Path(__file__).parents[2] / "configs" / "criteo.toml"


@pytest.mark.slow
def test_a_trained_model_comes_near_the_planted_optimum(tmp_path):
    samples = {"train": 4_000_000, "validation": 1_000, "test": 200_000}
    synthesize(tmp_path / "raw", samples, PlantedConfig(seed=2))
    source = DataSource.find([tmp_path / "raw"], None, validation=(), test=())
    prepare(source.files, tmp_path / "prepared", source.schema, optimum=source.optimum, min_count=1)
    options = [f"data.folder={tmp_path / 'prepared'}", f"run.folder={tmp_path / 'run'}"]
    done = launch(["train", str(CONFIG), *options], ranks=2, timeout_s=280)
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "run" / "evaluation" / "test.json").read_text())
    trained, optimum = report["auc"], report["planted_optimum"]["auc"]
    assert trained > 0.5 + 0.9 * (optimum - 0.5)
    print(f"trained {trained:.5f}, planted optimum {optimum:.5f}")  # noqa: T201
    assert trained > optimum - 0.005
