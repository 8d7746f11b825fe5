"""Expected accesses of seldom read rows, against the rates that counts were drawn from."""

import subprocess
import sys

import numpy as np
import pytest

import rowmesh.placement
from rowmesh.placement import Profile, TableShape, smoothed


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
