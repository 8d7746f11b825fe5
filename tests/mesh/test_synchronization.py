"""Settings of synchronization that do not exist are refused."""

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.synchronization import Synchronization


def test_bad_settings_are_named():
    with pytest.raises(ConfigurationError, match="'exact' or 'average', got 'mean'"):
        Synchronization("mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="every 1 or more steps, not every 0"):
        Synchronization("average", every=0)
    with pytest.raises(ConfigurationError, match="take 'average'"):
        Synchronization("exact", every=2)
