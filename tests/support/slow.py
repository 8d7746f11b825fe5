"""Cases that take seconds where faster ones are much like them: `make test` leaves them out."""

from functools import cache
from pathlib import Path

LIST = Path(__file__).parents[1] / "slow_cases.txt"


@cache
def slow_cases() -> frozenset[str]:
    """Their names, as pytest writes them."""
    return frozenset(line for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
