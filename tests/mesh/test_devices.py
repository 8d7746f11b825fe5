"""Devices: one that cannot be is refused with what can."""

import pytest

from rowmesh import EmbeddingCollection, TableSpec
from rowmesh.errors import ConfigurationError


@pytest.mark.parametrize("device", ["tpu", "meta"])
def test_devices_that_cannot_be(device):
    pattern = rf"device must be 'cpu' or 'cuda' \(or 'cuda:1', …\), got '{device}'"
    with pytest.raises(ConfigurationError, match=pattern):
        EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)], device=device)
