"""The simulated groups are Algorithm 1, gaps and intervals are right, and the command says them."""

import argparse
import json
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from benchmarks import two_dimensional
from benchmarks.click_sets import Criteo, Synthetic, read
from benchmarks.paired import Interval, relative_gaps
from benchmarks.replica_simulation import Network, ReplicatedTables, normalized_entropy, train
from benchmarks.two_dimensional_accuracy import DENSE_LRS, LRS, Case, Setting, cases, settings
from rowmesh.tables import TableSpec
from rowmesh.tables.update_rules import RowWiseAdaGrad
from tests.support.algorithm_1 import Algorithm1

DIM = 4
BATCH = 24


def two_tables(scale):
    """One that every sample finds crowded, one that is sparse; float64."""
    rule = RowWiseAdaGrad(lr=0.1, moment_scale=scale)
    return [
        TableSpec(name=n, num_rows=r, dim=DIM, optimizer=rule, dtype=torch.float64) for n, r in (("a", 5), ("b", 90))
    ]


def steps(count=6):
    """Ids `[F, B]` and gradients `[B, F, D]` of the mean loss with respect to the vectors."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.stack([torch.randint(rows, (BATCH,), generator=generator) for rows in (5, 90)])
        yield ids, torch.randn(BATCH, 2, DIM, generator=generator, dtype=torch.float64) / BATCH


def transcribed(tables, specs, groups):
    """The same steps by the transcription, table by table: weights and moments after the last."""
    ends = []
    starts = tables.weights.split([spec.num_rows for spec in specs])
    for place, (spec, start) in enumerate(zip(specs, starts, strict=True)):
        algorithm = Algorithm1(start.clone(), spec.optimizer, groups)
        for ids, gradient in steps():
            sums = torch.zeros(groups, spec.num_rows, DIM, dtype=torch.float64)
            touched = torch.zeros(groups, spec.num_rows, dtype=torch.bool)
            for sample, row in enumerate(ids[place].tolist()):
                group = sample // (BATCH // groups)
                sums[group, row] += groups * gradient[sample, place]  # of the mean loss of the group's samples
                touched[group, row] = True
            algorithm.iterate(list(sums), list(touched))
        ends.append((algorithm.weights[0].detach(), algorithm.moments[0]["sum"]))
    return [torch.cat(parts) for parts in zip(*ends, strict=True)]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [None, 0.5, 1.0, 2.0])
def test_simulated_groups_are_algorithm_1(groups, scale):
    specs = two_tables(scale)
    tables = ReplicatedTables(specs, groups, "average", seed=0)
    expected = transcribed(tables, specs, groups)
    for ids, gradient in steps():
        tables.update(ids, gradient)
    torch.testing.assert_close([tables.weights, tables.moments], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("groups", [2, 8])
def test_exact_groups_are_one_group(groups):
    one, many = (ReplicatedTables(two_tables(None), count, "exact", seed=0) for count in (1, groups))
    for ids, gradient in steps():
        one.update(ids, gradient)
        many.update(ids, gradient)
    torch.testing.assert_close([one.weights, one.moments], [many.weights, many.moments], rtol=1e-12, atol=1e-15)


def test_a_scale_is_a_larger_learning_rate():
    """√c times, but for eps: what the documentation says of c."""
    scaled = ReplicatedTables(two_tables(4.0), 8, "average", seed=0)
    rule = replace(scaled.rule, lr=2 * scaled.rule.lr, moment_scale=1.0)
    faster = ReplicatedTables([replace(spec, optimizer=rule) for spec in two_tables(None)], 8, "average", seed=0)
    for ids, gradient in steps():
        scaled.update(ids, gradient)
        faster.update(ids, gradient)
    torch.testing.assert_close(scaled.weights, faster.weights, rtol=1e-5, atol=1e-6)


def test_training_learns_what_is_planted(tmp_path):
    data = Synthetic(samples=16_384, held_out=4_096, rows=(50, 20), head=20)
    prepared = data.prepared(tmp_path, seed=0, tuning=False)
    batches, held_out = read(prepared, "train", 128), read(prepared, "test", 4_096)
    specs = [
        TableSpec(name=t.name, num_rows=t.num_rows, dim=8, optimizer=RowWiseAdaGrad(lr=0.05)) for t in prepared.tables
    ]
    untrained, trained = (ReplicatedTables(specs, 2, "average", seed=0) for _ in range(2))
    model = Network(lr=0.002)
    before = normalized_entropy(untrained, model.make(13, 2, torch.float32)[0], held_out)
    after = normalized_entropy(trained, train(trained, model, batches), held_out)
    assert after < 0.9 < before


@pytest.mark.parametrize("tuning", [False, True])
def test_seeds_have_data_of_their_own(tmp_path, tuning):
    data = Synthetic(samples=100, held_out=50, rows=(9,), head=5)
    labels = []
    for seed, tunes in ((0, tuning), (0, tuning), (1, tuning), (0, not tuning)):
        folder = tmp_path / str(len(labels))
        folder.mkdir()
        labels.append(read(data.prepared(folder, seed, tunes), "test", 50)[0].labels)
    assert torch.equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])
    assert not torch.equal(labels[0], labels[3])


def test_intervals_are_those_of_a_paired_t_test():
    values, base = [1.02, 1.05, 0.99, 1.04], [1.0, 1.01, 1.0, 0.98]
    gaps = relative_gaps(values, base)
    assert gaps == pytest.approx([2.0, 100 * (1.05 / 1.01 - 1), -1.0, 100 * (1.04 / 0.98 - 1)])
    interval, low_high = Interval.of(gaps), stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert (interval.mean - interval.half, interval.mean + interval.half) == pytest.approx(tuple(low_high))


def test_intervals_hold_the_truth_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    intervals = [Interval.of((torch.randn(6, generator=generator) + 3).tolist()) for _ in range(2000)]
    assert sum(abs(i.mean - 3) <= i.half for i in intervals) / 2000 == pytest.approx(0.95, abs=0.02)


def test_one_seed_says_nothing():
    interval = Interval.of([5.0])
    assert math.isinf(interval.half)
    assert interval.as_record() == {"mean": 5.0, "half": None, "seeds": 1, "excludes_zero": False}


def test_every_setting_has_a_base_and_a_name():
    found = settings((2, 4, 8, 16))
    assert len(set(map(str, found))) == len(found) == len(set(found))
    assert all(setting.base in found for setting in found)
    assert all(setting.scale <= setting.groups for setting in found)
    assert {s.scale for s in found if s.groups == 16 and s.mode == "average"} == {1, 2, 4, 8, 16}
    assert str(Setting(groups=4, mode="exact")) == "M = 4, exact"


def test_the_command_reports_every_setting(capsys, monkeypatch, tmp_path):
    small = Synthetic(samples=2_048, held_out=512, rows=(50, 20), head=20)
    tiny = Case(name="tiny", data=small, batch_size=256, seeds=2, tuning_seeds=1, groups=(2, 4))
    absent = Case(name="absent", data=Criteo(source=tmp_path), batch_size=64, seeds=2, tuning_seeds=1)
    monkeypatch.setattr("benchmarks.two_dimensional_accuracy.cases", lambda options: [tiny, absent])
    two_dimensional.main(["--accuracy", "--quick"])
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    of = {kind: [line for line in lines if line["accuracy"] == kind] for kind in ("tuning", "seed", "gap", "trend")}
    assert len(of["gap"]) == len(settings((2, 4)))
    assert (of["tuning"][0]["lr"], of["tuning"][0]["dense_lr"]) <= (max(LRS), max(DENSE_LRS))
    gaps = {line["setting"]: line["gap_percent"] for line in of["gap"]}
    assert abs(gaps["M = 4, exact"]["mean"]) < 1e-3
    assert [line["setting"] for line in of["trend"]] == ["M = 4, c = 1", "M = 4, c = 2", "M = 4, c = 4"]
    assert [line["seed"] for line in of["seed"]] == [0, 1]
    assert "lacks train.tsv.gz, dev.tsv.gz, test.tsv.gz" in lines[-1]["unavailable"]
    assert last["summary"]["accuracy absent"] is None


def test_cases_are_smaller_where_time_is_short():
    options = argparse.Namespace(quick=True, accuracy_criteo=None, accuracy_samples=1000, accuracy_seeds=3)
    quick, full = cases(options), cases(argparse.Namespace(**{**vars(options), "quick": False}))
    assert [case.seeds for case in full] == [3, 6, 6]
    assert all(case.seeds <= 2 for case in quick)
