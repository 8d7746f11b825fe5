"""The shape of a tensor-train table: how its rows and columns are factorized, and at which ranks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from rowmesh.errors import ConfigurationError

NUM_CORES = 3
DEFAULT_RANK = 16
MAX_ROWS = 2**62  # products of factors stay within 64 bits

Factors = tuple[int, int, int]


@dataclass(frozen=True)
class TensorTrainShape:
    """A table of `num_rows` × `dim` as the product of three cores.

    Attributes:
        num_rows: ids are 0 … num_rows − 1.
        dim: D.
        row_factors: p₁, p₂, p₃; their product is num_rows or more. Rows past num_rows are padding that nobody reads.
        dim_factors: q₁, q₂, q₃; their product is D.
        ranks: R₁ between the first two cores, R₂ between the last two.

    Raises:
        ConfigurationError: factors do not make the table, or a rank is larger than any table of this shape can have.

    Example:
        >>> shape = TensorTrainShape.choose(1_000_000, 64, rank=16)
        >>> shape.row_factors, shape.dim_factors, shape.num_parameters, round(shape.compression)
        ((100, 100, 100), (4, 4, 4), 115200, 556)
    """

    num_rows: int
    dim: int
    row_factors: Factors
    dim_factors: Factors
    ranks: tuple[int, int]

    def __post_init__(self) -> None:
        _check_factors("row_factors", self.row_factors)
        _check_factors("dim_factors", self.dim_factors)
        padded = math.prod(self.row_factors)
        if not 1 <= self.num_rows <= padded:
            fits = "num_rows must be 1 or more" if self.num_rows < 1 else f"{factor_rows(self.num_rows)} would do"
            raise ConfigurationError(
                f"row_factors {self.row_factors} make {padded} rows and cannot hold num_rows = {self.num_rows}; {fits}"
            )
        if math.prod(self.dim_factors) != self.dim:
            fits = f"{factor_dim(self.dim)} does" if self.dim >= 1 else "dim must be 1 or more"
            raise ConfigurationError(
                f"dim_factors {self.dim_factors} make {math.prod(self.dim_factors)} columns, not {self.dim}; {fits}"
            )
        _check_ranks(self.row_factors, self.dim_factors, self.ranks)

    @classmethod
    def choose(
        cls,
        num_rows: int,
        dim: int,
        *,
        rank: int | tuple[int, int] | None = None,
        memory_bytes: int | None = None,
        compression: float | None = None,
        row_factors: Sequence[int] | None = None,
        dim_factors: Sequence[int] | None = None,
        element_bytes: int = 4,
    ) -> TensorTrainShape:
        """Fills in what is not given.

        Args:
            num_rows: of the table; any number.
            dim: D; any number.
            rank: of both bonds, or of each; default 16, or the largest that the table can have.
            memory_bytes: instead of a rank: take the largest at which the cores fit into so much memory.
            compression: instead of a rank: take the largest at which the table is so many times smaller.
            row_factors: default: as equal as possible, with as little padding as that allows.
            dim_factors: default: as equal as possible.
            element_bytes: of one element, for `memory_bytes`.

        Raises:
            ConfigurationError: nothing fits; says what would.
        """
        num_rows, dim = _whole("num_rows and dim", (num_rows, dim))
        if num_rows < 1 or dim < 1 or num_rows > MAX_ROWS:
            raise ConfigurationError(f"num_rows must be 1 to 2**62 and dim 1 or more, got {num_rows} and {dim}")
        rows = factor_rows(num_rows) if row_factors is None else _three("row_factors", row_factors)
        columns = factor_dim(dim) if dim_factors is None else _three("dim_factors", dim_factors)
        probe = cls(num_rows, dim, rows, columns, (1, 1))
        if (rank is not None) + (memory_bytes is not None) + (compression is not None) > 1:
            raise ConfigurationError(
                f"give one of rank = {rank}, memory_bytes = {memory_bytes} and compression = {compression}: "
                "each decides the others"
            )
        if memory_bytes is not None:
            return _largest(probe, memory_bytes // element_bytes, f"memory_bytes = {memory_bytes}", element_bytes)
        if compression is not None:
            if not 0 < compression < math.inf:
                raise ConfigurationError(f"compression must be above 0 and finite, got {compression}")
            return _largest(probe, int(num_rows * dim / compression), f"compression = {compression:g}", element_bytes)
        if rank is None:
            return probe.at(DEFAULT_RANK)
        ranks = _whole("rank", rank if isinstance(rank, Sequence) else (rank, rank))
        return cls(num_rows, dim, rows, columns, ranks)  # pyright: ignore[reportArgumentType]

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """G₁ `[p₁, q₁, R₁]`, G₂ `[p₂, R₁, q₂, R₂]` and G₃ `[p₃, q₃, R₂]`: slices of each are contiguous."""
        (p1, p2, p3), (q1, q2, q3), (r1, r2) = self.row_factors, self.dim_factors, self.ranks
        return (p1, q1, r1), (p2, r1, q2, r2), (p3, q3, r2)

    @property
    def num_parameters(self) -> int:
        """Elements of all cores."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    @property
    def compression(self) -> float:
        """How many times smaller the cores are than the table."""
        return self.num_rows * self.dim / self.num_parameters

    @property
    def full_ranks(self) -> tuple[int, int]:
        """The ranks at which every table of this shape is represented exactly; no larger ones are of use."""
        return bounds(self.row_factors, self.dim_factors)

    def at(self, rank: int) -> TensorTrainShape:
        """The same factors at another rank, or at the largest that the table can have.

        >>> TensorTrainShape.choose(1000, 16).at(100).ranks
        (20, 40)
        """
        r1, r2 = self.full_ranks
        ranks = (min(rank, r1), min(rank, r2))
        return TensorTrainShape(self.num_rows, self.dim, self.row_factors, self.dim_factors, ranks)


@dataclass(frozen=True, kw_only=True)
class TensorTrain:
    """How big the cores of a table may be; what is left out is chosen, as in `TensorTrainShape.choose`.

    Attributes:
        rank: of both bonds, or of each.
        memory_bytes: instead of a rank: the largest at which the cores fit into so much.
        compression: instead of a rank: the largest at which the table is so many times smaller.
        row_factors, dim_factors: how rows and columns are factorized.

    Example:
        >>> TensorTrain(memory_bytes=1 << 20).shape(1_000_000, 64).ranks
        (24, 24)
    """

    rank: int | tuple[int, int] | None = None
    memory_bytes: int | None = None
    compression: float | None = None
    row_factors: Factors | None = None
    dim_factors: Factors | None = None

    def shape(self, num_rows: int, dim: int, element_bytes: int = 4) -> TensorTrainShape:
        """The shape of a table.

        Raises:
            ConfigurationError: it cannot have such a shape; says what fits.
        """
        return TensorTrainShape.choose(
            num_rows,
            dim,
            rank=self.rank,
            memory_bytes=self.memory_bytes,
            compression=self.compression,
            row_factors=self.row_factors,
            dim_factors=self.dim_factors,
            element_bytes=element_bytes,
        )


def factor_rows(num_rows: int) -> Factors:
    """Three factors, ascending, whose product is `num_rows` or a little more, with the least possible sum.

    Among factors of that sum, the product has the least padding. The last factor is the largest: ids that differ in it
    alone share their prefix.

    >>> factor_rows(1_000_000), factor_rows(7), factor_rows(10_000_019)
    ((100, 100, 100), (2, 2, 2), (212, 212, 223))
    """
    root = round(num_rows ** (1 / 3))
    around = range(max(1, root - 3), root + 4)
    candidates = []
    for first, second in itertools.combinations_with_replacement(around, 2):
        third = -(-num_rows // (first * second))
        candidates.append((first + second + third, first * second * third, tuple(sorted((first, second, third)))))
    return min(candidates)[2]


def factor_dim(dim: int) -> Factors:
    """Three factors, ascending, whose product is `dim`, with the least possible sum.

    >>> factor_dim(64), factor_dim(16), factor_dim(17)
    ((4, 4, 4), (2, 2, 4), (1, 1, 17))
    """
    divisors = [n for n in range(1, dim + 1) if dim % n == 0]
    triples = [
        (first, second, dim // (first * second))
        for first, second in itertools.combinations_with_replacement(divisors, 2)
        if dim % (first * second) == 0 and second <= dim // (first * second)
    ]
    return min(triples, key=lambda factors: (sum(factors), factors))


def bounds(row_factors: Factors, dim_factors: Factors) -> tuple[int, int]:
    """The largest ranks that a table of these factors can have: the smaller side of each unfolding.

    >>> bounds((2, 3, 4), (1, 2, 2))
    (2, 8)
    """
    first, second, third = (p * q for p, q in zip(row_factors, dim_factors, strict=True))
    return min(first, second * third), min(first * second, third)


def _three(name: str, factors: Sequence[int]) -> Factors:
    if len(factors) != NUM_CORES:
        raise ConfigurationError(f"{name} must be three numbers, one a core, got {tuple(factors)}")
    first, second, third = _whole(name, factors)
    return first, second, third


def _whole(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(number) for number in numbers)
    except TypeError:
        raise ConfigurationError(f"{name} must be whole numbers, got {numbers}") from None


def _check_factors(name: str, factors: Factors) -> None:
    if len(factors) != NUM_CORES or min(factors) < 1:
        raise ConfigurationError(f"{name} must be three numbers of 1 or more, got {factors}")


def _check_ranks(rows: Factors, columns: Factors, ranks: tuple[int, ...]) -> None:
    if len(ranks) != NUM_CORES - 1 or min(ranks) < 1:
        raise ConfigurationError(f"rank must be 1 or more, one number or two, got {ranks}")
    full, (r1, r2), middle = bounds(rows, columns), ranks, rows[1] * columns[1]
    if r1 > full[0] or r2 > full[1]:
        raise ConfigurationError(
            f"ranks {ranks} are larger than a table of row_factors {rows} and dim_factors {columns} can have: at most "
            f"{full}, where it is exact; pass rank = {min(r1, full[0]), min(r2, full[1])} or less"
        )
    if r1 > middle * r2 or r2 > middle * r1:
        raise ConfigurationError(
            f"ranks {ranks} are too far apart: between them stand {middle} = p₂ · q₂ values, so that neither may be "
            f"more than {middle} times the other"
        )


def _largest(probe: TensorTrainShape, most: int, wish: str, element_bytes: int) -> TensorTrainShape:
    """The shape of the largest rank with at most so many parameters; they grow with the rank."""
    if probe.num_parameters > most:
        raise ConfigurationError(
            f"no rank meets {wish} for {probe.num_rows} rows of {probe.dim}: row_factors {probe.row_factors} and "
            f"dim_factors {probe.dim_factors} take {probe.num_parameters * element_bytes} bytes at rank 1, "
            f"{probe.compression:.4g} times smaller than the table"
        )
    low, high = 1, max(probe.full_ranks)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if probe.at(middle).num_parameters <= most else (low, middle - 1)
    return probe.at(low)
