"""Drawn counts: what a sample would show of the frequencies behind them."""

import numpy as np
import pytest

from benchmarks.fit_shapes import fit
from benchmarks.placement_plans import oracle
from benchmarks.shapes import NAMES, draw, power_law, sorted_counts


@pytest.mark.parametrize("name, num_rows, zero_share", [("avazu", 8.9e6, 0.28), ("kaggle", 33.8e6, 0.32)])
def test_shapes_are_those_of_the_paper(name, num_rows, zero_share):
    shape = draw(name)
    assert shape.num_rows == pytest.approx(num_rows, rel=0.002)
    never = sum(int(table.lengths[table.accesses == 0].sum()) for table in shape.counted.tables)
    assert never / shape.num_rows == pytest.approx(zero_share, abs=0.02)
    for table, counted in enumerate(shape.counted.tables):
        assert counted.is_falling
        assert counted.total_accesses == shape.counted.num_samples
        assert shape.counted.is_one_hot(table)
        assert shape.truth.tables[table].total_accesses == pytest.approx(shape.counted.num_samples)


def test_what_is_counted_is_what_is_true_but_for_the_tail():
    shape = draw("avazu")
    for table, counted in enumerate(shape.counted.tables):
        true = shape.truth.tables[table]
        often = counted.accesses > 10_000
        assert counted.accesses[often] == pytest.approx(true.accesses[often], rel=0.06)
        for samples in (512, 16_384):
            distinct = (profile.uniques(table, samples)[-1] for profile in (shape.truth, oracle(shape)))
            assert next(distinct) == pytest.approx(next(distinct), rel=1e-9)
            # Rows of one count differ, which makes a batch hold fewer of them than their mean says.
            mean = -np.expm1(samples * np.log1p(-np.minimum(true.accesses / shape.truth.num_samples, 1 - 1e-16)))
            assert np.all(shape.truth.presence(table, samples) <= mean + 1e-12)


def test_a_seed_is_a_sample():
    assert "terabyte" in NAMES
    one, two = draw("avazu", seed=1), draw("avazu", seed=2)
    assert np.array_equal(sorted_counts(one.counted, 3), np.sort(sorted_counts(one.counted, 3))[::-1])
    assert not np.array_equal(one.counted.tables[3].accesses, two.counted.tables[3].accesses)


def test_a_power_law_is_found_again():
    rng = np.random.default_rng(0)
    rows, frequency = power_law(0, 50_000, 0.9, 0.0, 1.0)
    weights = np.repeat(frequency, rows)
    values = rng.choice(50_000, 20_000, p=weights / weights.sum())
    curve = fit([str(value) for value in values], 50_000, 1e12)
    assert curve["exponent"] == pytest.approx(0.9, abs=0.1)
