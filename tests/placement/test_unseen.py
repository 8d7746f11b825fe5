"""Expected accesses of seldom read rows, against the rates that counts were drawn from."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rowmesh.placement
from rowmesh.data import Loader, prepare
from rowmesh.data.profile import profile_prepared
from rowmesh.data.schema import SCHEMAS
from rowmesh.placement import Profile, TableShape, smoothed
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import search
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

REAL_DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
SAMPLES = {"criteo": "criteo_kaggle/train.tsv.gz", "avazu": "avazu/train.csv.gz"}


def profile_of(counts, **counted):
    shapes = [TableShape("item", len(counts), 64, 64)]
    return Profile.from_counts({"item": counts}, shapes, max(1, int(np.sum(counts))), **counted)


@pytest.mark.parametrize("exponent", [0.8, 1.1])
def test_rows_are_read_as_often_as_expected(exponent):
    rates = 2_000_000 * np.arange(1, 300_001) ** -exponent
    rates *= 300_000 / rates.sum()
    counts = np.random.default_rng(0).poisson(rates)
    order = np.argsort(-counts, kind="stable")
    table = smoothed(profile_of(counts[order])).tables[0]
    expected = np.repeat(table.accesses, table.lengths)
    for count in range(4):
        of_count = counts[order] == count
        assert expected[of_count].mean() == pytest.approx(rates[order][of_count].mean(), rel=0.1)
    assert np.all(np.diff(expected) <= 0)
    often = counts[order] > 10
    assert np.array_equal(expected[often], counts[order][often])


def test_a_last_row_for_rare_ids_stays():
    counts = np.concatenate([[50], np.repeat([2, 1], [2_000, 5_000]), [9_000]])
    assert smoothed(profile_of(counts)).tables[0].accesses.tolist() == [50, 2, 0.8, 9_000]


def test_a_last_row_for_rare_ids_is_read_as_much_more_as_others_are_read_less():
    counts = np.concatenate([[50], np.repeat([3, 2], [2_000, 5_000]), [9_000]])
    table = smoothed(profile_of(counts), rare_rows=True).tables[0]
    assert table.accesses.tolist() == [50, 3, 1.2, 9_000 + 0.8 * 5_000]
    assert table.total_accesses == counts.sum()


@pytest.mark.parametrize("last", [0, 1])
def test_one_last_row_without_rare_ids_says_nothing_of_others(last):
    """Ids that are met once all have rows of their own: unseen ones will read the last row."""
    counts = np.concatenate([np.repeat([2, 1], [2_000, 5_000]), [last]])
    table = smoothed(profile_of(counts), rare_rows=True).tables[0]
    assert table.lengths.tolist()[-1] == 1
    assert table.accesses == pytest.approx([2, 0.8, last + 1_000], rel=2e-3)
    assert smoothed(profile_of(counts)).tables[0].accesses[-1] <= 1


def test_batches_that_contain_a_row_follow_its_accesses():
    counts = np.repeat([40, 2, 1, 0], [3, 2_000, 5_000, 20_000])
    batches = np.repeat([30, 1, 1, 0], [3, 2_000, 5_000, 20_000])
    table = smoothed(profile_of(counts, batches={"item": batches}, batch_size=100)).tables[0]
    assert table.accesses == pytest.approx([40, 2, 0.8, 0.25])
    assert table.batches == pytest.approx([30, 1, 0.8, 0.25])


@pytest.mark.parametrize(
    "profile",
    [
        profile_of(np.repeat([2, 1, 0], [10, 20, 30])),
        profile_of(np.repeat([1, 2, 0, 0.0], 2_000)),
        profile_of(np.repeat([1.5, 0.5], 2_000)),
    ],
    ids=["few rows", "no order", "means"],
)
def test_other_tables_stay_as_they_are(profile):
    assert np.array_equal(smoothed(profile).tables[0].accesses, profile.tables[0].accesses)


def halves(name, folder):
    """Every second sample of a real data set, to plan from, and the others, which the plan has not seen."""
    lines = gzip.decompress((REAL_DATA / SAMPLES[name]).read_bytes()).decode().splitlines(keepends=True)
    head = [lines.pop(0)] if name == "avazu" else []
    files = {}
    for start, split in enumerate(("train", "test")):
        files[split] = [folder / f"{split}{SAMPLES[name].removesuffix('.gz')[-4:]}"]
        files[split][0].write_text("".join(head + lines[start::2]))
    return files


def unseen_profile(data, shapes):
    counts = {shape.name: np.zeros(shape.num_rows, np.int64) for shape in shapes}
    for batch in Loader(data, "test", batch_size=1024):
        for shape in shapes:
            ids = batch.sparse.select([shape.name]).ids.numpy()
            counts[shape.name] += np.bincount(ids, minlength=shape.num_rows)
    return Profile.from_counts(counts, shapes, data.splits["test"].samples)


@pytest.mark.skipif(not REAL_DATA.exists(), reason="real data are not here")
@pytest.mark.parametrize("name", ["criteo", "avazu"])
def test_plans_of_expected_accesses_serve_unseen_samples_better(name, tmp_path):
    data = prepare(halves(name, tmp_path), tmp_path / "prepared", SCHEMAS[name], min_count=1)
    shapes = [TableShape(table.name, table.num_rows, 64, 64, 4) for table in data.tables]
    counted = profile_prepared(data, shapes)
    topology = Topology.grouped(2, 4, 4.21)
    for objective in ("total", "slowest_link"):
        request = Request(batch_size=64, mode="infer", objective=objective, extra_memory=0.2)
        unseen = Problem(unseen_profile(data, shapes), topology, request)
        costs, errors = [], []
        for profile in (counted, smoothed(counted, rare_rows=True)):
            plan = search("cyclic", profile, topology, request)
            costs.append(unseen.objective(plan))
            errors.append(abs(Problem(profile, topology, request).objective(plan) / costs[-1] - 1))
        assert costs[1] < 0.99 * costs[0]
        assert errors[1] < 0.5 * errors[0]


def test_all_names_of_the_package_are_there():
    for name in rowmesh.placement.__all__:
        assert getattr(rowmesh.placement, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rowmesh.placement.nothing


def test_what_makes_plans_is_imported_late():
    code = "import sys, rowmesh; print([m for m in sys.modules if m.startswith('rowmesh.placement.')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "rowmesh.placement.profile" not in loaded
    assert "rowmesh.placement.strategies" not in loaded
