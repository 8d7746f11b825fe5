"""The quality of tensor-train tables is measured as it says: equal but for cores, paired, and able to see a loss."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import tensor_train, tensor_train_quality_chart
from benchmarks.click_sets import Criteo, Synthetic
from benchmarks.click_training import Clicks, train
from benchmarks.tensor_train_footprint import Footprint, sizes
from benchmarks.tensor_train_quality import RANKS, Case, Model, Rates, cases, difference_percent
from rowmesh.tables.update_rules import AdaGrad

LARGE = {"C1": 4.0}
RATES = Rates(tables=0.05, large=0.05, network=0.002)
DIM = 8


@pytest.fixture(scope="module")
def clicks():
    """Planted clicks, nearly all of whose signal is in the ids of one table."""
    data = Synthetic(samples=24_576, held_out=8_192, rows=(1_000, 10), head=1_000)
    with Clicks.of(data, 0, tuning=False, batch_size=256, epochs=1) as found:
        yield found


def trained(clicks, compression, rates=RATES):
    """The curve of a model; dense where there is no compression."""
    model = Model(rank=None if compression is None else 1, compressions={"C1": compression or 1.0})
    return train(model.specs(clicks.prepared, DIM, rates), clicks, rates.network, seed=0, num_points=4)


def test_cores_of_a_table_are_as_many_times_smaller_as_in_the_footprint():
    footprint = Footprint.of("kaggle")
    found = footprint.compressions(128, 1_000_000)
    assert set(found) == {"C3", "C4", "C12", "C16", "C21"}
    smaller = sum(rows / found.get(name, 1.0) for name, rows in footprint.tables.items())
    dense, cored, _ = sizes(list(footprint.tables.values()), 16, 128, 1_000_000)
    assert sum(footprint.tables.values()) / smaller == pytest.approx(dense / cored) == pytest.approx(13.58, abs=0.01)


def test_models_differ_in_the_storage_of_large_tables_alone(clicks):
    dense, cored = (
        Model(rank=rank, compressions=LARGE).specs(clicks.prepared, DIM, replace(RATES, large=0.01))
        for rank in (None, 64)
    )
    assert [spec.storage for spec in dense] == ["dense", "dense"]
    assert [spec.storage for spec in cored] == ["tensor_train", "dense"]
    assert [spec.optimizer for spec in dense] == [AdaGrad(lr=0.01), AdaGrad(lr=0.05)]
    assert [replace(spec, storage="dense", tensor_train=None) for spec in cored] == dense
    shape = cored[0].tensor_train_shape
    assert shape.compression >= 4 > shape.num_rows * DIM / (1.5 * shape.num_parameters)


def test_a_model_that_is_not_trained_stays_as_it_is(clicks):
    still = replace(RATES, tables=0.0, large=0.0, network=0.0)
    points = trained(replace(clicks, held_out=clicks.batches), None, still)
    assert [point.samples for point in points] == [6_144, 12_288, 18_432, 24_576]
    assert len({point.auc for point in points}) == 1
    mean = sum(point.train_log_loss for point in points) / len(points)
    assert mean == pytest.approx(points[0].log_loss, rel=1e-5)


def test_a_loss_is_seen_where_there_is_one(clicks):
    """Small cores cannot hold the effects of a thousand ids, cores as large as the table nearly can."""
    dense, roomy, cramped = (trained(clicks, compression)[-1] for compression in (None, 1.0, 60.0))
    assert dense.auc > 0.65
    assert abs(roomy.auc - dense.auc) < 0.01
    assert cramped.auc < dense.auc - 0.02
    assert cramped.log_loss > dense.log_loss + 0.005
    assert difference_percent([cramped], [dense], "auc").mean == pytest.approx(100 * (cramped.auc - dense.auc))


def test_training_is_the_same_every_time(clicks):
    assert trained(clicks, 4.0) == trained(clicks, 4.0)


@pytest.mark.slow
def test_the_command_reports_differences_of_equal_seeds(capsys, monkeypatch, tmp_path):
    data = Synthetic(samples=4_096, held_out=1_024, rows=tuple(Footprint.of("kaggle").tables.values()), head=50)
    tiny = Case(
        name="tiny",
        shape="kaggle",
        data=data,
        batch_size=256,
        seeds=2,
        tuning_seeds=1,
        lrs=(0.02, 0.04),
        network_lrs=(0.001,),
        large_factors=(1.0,),
        ranks=(128,),
    )
    absent = replace(tiny, name="absent", data=Criteo(source=tmp_path))
    monkeypatch.setattr("benchmarks.tensor_train_quality.cases", lambda options: [tiny, absent])
    tensor_train.main(["--quality"])
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    of = {kind: [line for line in lines if line["quality"] == kind] for kind in ("tuning", "curve", "sizes", "model")}
    assert [line["model"] for line in of["tuning"]] == ["dense", "dense", "rank 128"]
    assert [line["whole_times_smaller"] for line in of["sizes"]] == [13.58]
    assert [len(line["points"]) for line in of["curve"]] == [8] * 4
    ends = {(line["model"], line["seed"]): line["points"][-1]["auc"] for line in of["curve"]}
    differences = [100 * (ends["rank 128", seed] - ends["dense", seed]) for seed in (0, 1)]
    dense, cored = of["model"]
    assert "auc_difference_percent" not in dense
    assert cored["auc_difference_percent"]["mean"] == pytest.approx(sum(differences) / 2, abs=1e-3)
    assert cored["planted_auc"] == dense["planted_auc"] > 0.75
    assert "lacks train.tsv.gz" in lines[-1]["unavailable"]
    assert last["summary"]["AUC absent"] is None
    tensor_train.main(["--quality", "--quality-cases", "bsen"])
    assert [json.loads(line).get("case") for line in capsys.readouterr().out.splitlines()] == ["absent", None]


def test_cases_are_smaller_where_time_is_short():
    given = {"quick": True, "quality_data": Path("data"), "quality_samples": 1000, "quality_seeds": 3}
    options = argparse.Namespace(**given, quality_more_samples=0)
    quick, full = cases(options), cases(argparse.Namespace(**{**vars(options), "quick": False}))
    assert [case.seeds for case in full] == [3, 3, 9, 9, 9]
    assert [case.dim for case in full] == [16, 64, 16, 16, 16]
    assert all(case.ranks == RANKS and case.data.min_count == 1 for case in full)
    more = cases(argparse.Namespace(**{**vars(options), "quick": False, "quality_more_samples": 7000}))[0]
    assert (more.data.samples, more.ranks, more.seeds) == (7000, RANKS[:1], 3)
    assert all(case.seeds == 2 and case.data.samples <= 16_384 for case in quick if isinstance(case.data, Synthetic))


def test_the_chart_shows_every_case_and_model(tmp_path):
    lines = [
        {
            "quality": "curve",
            "case": case,
            "seed": seed,
            "model": model,
            "points": [{"samples": n, "log_loss": 0.6 - 0.1 * n + 0.01 * seed} for n in (1, 2)],
        }
        for case in ("a & b", "c")
        for seed in (0, 1)
        for model in ("dense", "rank 64")
    ]
    lines.append({"quality": "tuning", "case": "d"})
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tensor_train_quality_chart.main([str(tmp_path / "lines"), str(tmp_path / "chart.svg")])
    root = ElementTree.parse(tmp_path / "chart.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in root.iter(f"{space}text") if text.get("class") == "title"] == ["a & b", "c"]
    drawn = [line.get("points") for line in root.iter(f"{space}polyline") if line.find(f"{space}title") is not None]
    assert len(drawn) == 4
    assert all(curve == drawn[0] for curve in drawn)
    (_, upper), (_, lower) = (map(float, place.split(",")) for place in drawn[0].split())
    assert upper < lower  # a smaller loss stands further down
