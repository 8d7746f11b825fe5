"""The comparison of defaults with a tuned grid: what is chosen by what, and that the drawn sets can be prepared."""

import json

import pytest

from benchmarks import own_data
from benchmarks.own_data_sets import SETS
from rowmesh.run.metrics import Metrics
from rowmesh.run.score_bins import ScoreBins


def trained(validation_auc, test_auc):
    bins = ScoreBins(highest=(), samples=(), positives=(), predicted=())
    metrics = Metrics(
        samples=9,
        base_rate=0.5,
        auc=test_auc,
        log_loss=0.6,
        normalized_entropy=0.9,
        calibration=1.0,
        score_bins=bins,
    )
    return own_data.Trained(validation_auc, metrics, 10, 0.1)


def test_the_grid_is_judged_on_validation_and_compared_on_the_test(monkeypatch, capsys):
    def train(prepared, setting, seed):
        if not setting:
            return trained(0.7, 0.70 + 0.01 * seed)
        return trained(0.8, 0.73) if setting["table_lr"] == 0.1 else trained(0.75, 0.76)

    monkeypatch.setattr(own_data, "train", train)
    monkeypatch.setattr(own_data, "QUICK_GRID", {"batch_size": (256,), "lr": (0.001,), "table_lr": (0.01, 0.1)})
    own_data.main(["--quick", "--sets", "shop,movielens"])
    *lines, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (shop,) = [line for line in lines if line["set"] == "shop"]
    assert shop["tuned_setting"] == {"batch_size": 256, "lr": 0.001, "table_lr": 0.1}
    assert (shop["default_auc"], shop["tuned_auc"], shop["gap"], shop["misses_by"]) == (0.7, 0.73, 0.03, 0.02)
    assert shop["gap_to_best_on_test"] == 0.06
    movielens = [line for line in lines if "movielens" in line["set"]]
    assert len(movielens) == 2
    assert movielens[0]["unavailable"].startswith("--data has no")
    assert summary["summary"]["shop"] == 0.03


@pytest.mark.parametrize("own", [own for own in SETS if not own.files], ids=lambda own: own.name)
def test_drawn_sets_are_prepared(own, tmp_path):
    prepared = own.make(tmp_path, tmp_path, 0, 0.05)
    assert set(prepared.splits) == {"train", "validation", "test"}
    assert all(split.samples > 20 for split in prepared.splits.values())
