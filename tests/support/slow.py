"""Cases that `make test` leaves out and `make test-listed` runs."""

from functools import cache
from pathlib import Path

LIST = Path(__file__).parents[1] / "slow_cases.txt"


@cache
def slow_cases() -> frozenset[str]:
    """Their names, as pytest writes them."""
    return frozenset(line for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
