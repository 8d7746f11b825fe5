"""What the data tests share."""

from pathlib import Path

import pytest

REAL_DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


@pytest.fixture
def real_data():
    """The folder of real samples; tests that use it are skipped where it is absent."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no real data at {REAL_DATA}")
    return REAL_DATA.resolve()
