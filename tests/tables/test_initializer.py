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


def test_refuses_a_negative_deviation():
    with pytest.raises(ConfigurationError, match="std must be 0 or more, got -1"):
        Normal(std=-1.0)
