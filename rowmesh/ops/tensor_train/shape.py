"""The shape of cores, and of the tiles in which a GPU multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.ops.gpu import check, next_power_of_2

LINES = 64  # of a matrix product's tile, and about as many columns: 32 sums a thread
STEP = 32  # columns and lines that a matrix product takes at a time
_MOST_TERMS = 8  # columns of the last core whose loads do not wait for one another
_CHUNK_LINES = 512  # lines, Q₁·Q₂ an id, over which a program sums a gradient of the last core
_PRECISIONS = {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}


@dataclass(frozen=True)
class Shape:
    """The shape of cores, and of the tiles that they are multiplied in."""

    q1: int
    q2: int
    q3: int
    r1: int
    r2: int
    precision: str

    @staticmethod
    def of(cores: Sequence[Tensor], precision: str | None) -> Shape:
        for index, (core, dim) in enumerate(zip(cores, (3, 4, 3), strict=True)):
            check(f"core {index + 1}", core, (torch.float32, torch.float64), dim, cores[0].device)
        (_, q1, r1), (_, _, q2, r2), (_, q3, _) = (core.shape for core in cores)
        torch_precision = torch.get_float32_matmul_precision() if precision is None else precision
        of_products = "ieee" if cores[0].dtype == torch.float64 else _PRECISIONS[torch_precision]
        return Shape(q1, q2, q3, r1, r2, of_products)

    @property
    def dim(self) -> int:
        return self.q1 * self.q2 * self.q3

    @property
    def q12(self) -> int:
        return self.q1 * self.q2

    @property
    def width(self) -> int:
        """Columns of a slice of G₂ as a matrix of R₁ lines."""
        return self.q2 * self.r2

    @property
    def prefixes(self) -> int:
        """Prefixes of a tile, each of q₁ lines."""
        return max(LINES // self.q1, 1)

    @property
    def ids(self) -> int:
        """Ids over which a program sums a gradient of the last core."""
        return max(_CHUNK_LINES // self.q12, 1)

    @property
    def terms(self) -> int:
        """Columns of the last core at a time: the most that q₃ divides into."""
        return max(n for n in range(1, _MOST_TERMS + 1) if self.q3 % n == 0)

    def tile(self, num_columns: int) -> dict[str, int]:
        """The constants that matrix products over prefixes are compiled for."""
        lines = max(next_power_of_2(self.prefixes * self.q1), 16)
        of_cores = {"Q1": self.q1, "R1": self.r1, "WIDTH": self.width}
        return {**of_cores, "PREFIXES": self.prefixes, "LINES": lines, "COLUMNS": self.columns(num_columns)}

    @staticmethod
    def columns(num_columns: int) -> int:
        """Columns of a tile; matrix products take no fewer than 16."""
        return min(max(next_power_of_2(num_columns), 16), LINES)

    @staticmethod
    def step(length: int) -> int:
        """How many terms of a sum a matrix product takes at a time."""
        return min(max(next_power_of_2(length), 16), STEP)
