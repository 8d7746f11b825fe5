"""Splits: every sample in one of them, whatever the pieces it is asked for in."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from rowmesh.data import Splitter
from rowmesh.data.prepared import SPLITS
from rowmesh.errors import ConfigurationError


@hypothesis.given(
    total=st.integers(0, 500), validation=st.floats(0, 0.49), test=st.floats(0, 0.49), cut=st.integers(0, 500)
)
def test_order_keeps_the_last_samples_for_the_test(total, validation, test, cut):
    splitter = Splitter(validation=validation, test=test)
    assigned = splitter.assign(0, total, total=total)
    assert (np.diff(assigned) >= 0).all()
    assert (assigned == 2).sum() == round(total * test)
    assert (assigned == 1).sum() == round(total * validation)
    cut = min(cut, total)
    assert splitter.sizes(total) == dict(zip(SPLITS, np.bincount(assigned, minlength=3).tolist(), strict=True))
    pieces = [splitter.assign(0, cut, total=total), splitter.assign(cut, total, total=total)]
    np.testing.assert_array_equal(np.concatenate(pieces), assigned)


def test_random_split_is_reproducible_and_of_the_right_size():
    splitter = Splitter(validation=0.1, test=0.2, how="random", seed=3)
    assigned = splitter.assign(0, 100_000, total=100_000)
    np.testing.assert_allclose(np.bincount(assigned) / 100_000, [0.7, 0.1, 0.2], atol=0.01)
    np.testing.assert_array_equal(splitter.assign(500, 700, total=100_000), assigned[500:700])
    other = Splitter(validation=0.1, test=0.2, how="random", seed=4).assign(0, 100_000, total=100_000)
    assert (other != assigned).mean() > 0.3


def test_mistakes():
    with pytest.raises(ConfigurationError, match="leave something for training"):
        Splitter(validation=0.5, test=0.5)
    with pytest.raises(ConfigurationError, match="must be 0 or more"):
        Splitter(validation=float("nan"))
    with pytest.raises(ConfigurationError, match="'order' or 'random'"):
        Splitter(how="hash")  # pyright: ignore
    assert Splitter(validation=0, test=0.1).splits == ("train", "test")
