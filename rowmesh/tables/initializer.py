"""Initial values of rows, as a counter-based function of (seed, table, row).

A row's first value depends on nothing else: not on the rank that holds it, not on the world size,
not on when it is first touched. Element e of row r is the (r·D + e)-th output of a SplitMix64
stream whose key is a hash of the seed and the table's name.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA'14).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar

from rowmesh.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Initializer:
    """Base of the initializers."""

    name: ClassVar[str]

    def parameters(self, num_rows: int) -> tuple[float, float]:
        """(a, b): the interval of a uniform, mean and deviation of a normal distribution."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Uniform(Initializer):
    """Uniform in [−bound, bound); bound None means 1/√num_rows, as in DLRM."""

    bound: float | None = None
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        if self.bound is not None and not 0.0 <= self.bound < math.inf:
            raise ConfigurationError(f"uniform initializer: bound must be 0 or more and finite, got {self.bound}")

    def parameters(self, num_rows: int) -> tuple[float, float]:
        """(−bound, bound)."""
        bound = num_rows**-0.5 if self.bound is None else self.bound
        return (-bound, bound)


@dataclass(frozen=True, kw_only=True)
class Normal(Initializer):
    """Normal with the given mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01
    name: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        if not 0.0 <= self.std < math.inf:
            raise ConfigurationError(f"normal initializer: std must be 0 or more and finite, got {self.std}")
        if not math.isfinite(self.mean):
            raise ConfigurationError(f"normal initializer: mean must be finite, got {self.mean}")

    def parameters(self, num_rows: int) -> tuple[float, float]:
        """(mean, std)."""
        return (self.mean, self.std)


@dataclass(frozen=True, kw_only=True)
class Constant(Initializer):
    """Every element equal."""

    value: float = 0.0
    name: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigurationError(f"constant initializer: value must be finite, got {self.value}")

    def parameters(self, num_rows: int) -> tuple[float, float]:
        """(value, 0)."""
        return (self.value, 0.0)


INITIALIZERS: dict[str, type[Initializer]] = {c.name: c for c in (Uniform, Normal, Constant)}


def table_key(seed: int, table: str) -> int:
    """The 64-bit key of a table's stream.

    >>> table_key(0, "item") == table_key(0, "item") != table_key(1, "item")
    True
    """
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
