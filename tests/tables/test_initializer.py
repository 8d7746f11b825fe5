"""Initializers as values; their numbers are tested in tests/ops/test_initialize.py."""

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.tables import Constant, Normal, Uniform
from rowmesh.tables.initializer import table_key


def test_parameters():
    assert Uniform().parameters(16) == (-0.25, 0.25)
    assert Uniform(bound=2.0).parameters(16) == (-2.0, 2.0)
    assert Normal(mean=1.0, std=2.0).parameters(16) == (1.0, 2.0)
    assert Constant(value=3.0).parameters(16) == (3.0, 0.0)


def test_keys_differ_by_seed_and_table_and_never_change():
    keys = {table_key(seed, name) for seed in range(20) for name in ("a", "b", "1/a", "")}
    assert len(keys) == 80
    assert table_key(0, "item") == 3635486795723193194


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Normal(std=-1.0), "normal initializer: std must be 0 or more and finite, got -1"),
        (lambda: Normal(mean=float("nan")), "normal initializer: mean must be finite, got nan"),
        (lambda: Uniform(bound=-0.5), "uniform initializer: bound must be 0 or more and finite, got -0.5"),
        (lambda: Uniform(bound=float("inf")), "uniform initializer: bound must be 0 or more and finite, got inf"),
        (lambda: Constant(value=float("nan")), "constant initializer: value must be finite, got nan"),
    ],
)
def test_refuses_numbers_that_make_no_rows(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
