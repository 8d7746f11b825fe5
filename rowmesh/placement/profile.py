"""Profile: how often each row is read, which is all that a placement is made from.

Rows stand in order, and neighbours that were read equally often are one *run*. After preparation rows are in order of
frequency, so 33.8 M rows of Criteo Kaggle are about 14,000 runs, and everything that is computed from a profile takes
time and memory by the run, not by the row.

Two numbers are kept of a row, because an exchange pays one or the other:

    accesses   how often it was read: what an exchange moves that sends every access on its own
    batches    in how many batches it stood: what a deduplicating exchange moves; bursts of one row make it smaller
               than independent draws would

Ids come in bags, one for each sample and feature. How many there are, and whether their lengths and weights travel with
the ids, says what it takes to have an owner sum them.

A step may read rows whatever its samples are: negatives that all ranks draw alike (`drawn`), or all rows of a table,
of which each rank reads a part (`is_split`).

Source: OPER §3.2 (access frequency), §4.1. Differs: batches that contain a row are counted too; nothing is averaged
over GPUs, since samples go to ranks at random.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rowmesh._support.files.atomic import replacing_file
from rowmesh.errors import ConfigurationError
from rowmesh.placement.plan import TableShape

FORMAT = 1
CHUNK_ROWS = 1 << 22
MAX_BANDS = 1024

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TableProfile:
    """How often the rows of one table were read, run by run.

    Attributes:
        shape: of the table.
        lengths: int64 `[K]`, rows of each run; they add up to the table's rows.
        accesses: float64 `[K]`, how often a row of the run was read; the mean where rows were merged.
        batches: float64 `[K]`, in how many batches a row of the run stood; the mean where rows were merged. None where
            it was not counted.
        drawn: float64 `[K]`, the chance that all ranks read a row of the run in a step, whatever samples they have.
            None where they read only what their samples hold.
        is_split: whether every step reads all rows too, each on one of the ranks.
        num_features: features that read the table, each with a bag of every sample.
        num_jagged: how many of these have bags that differ in length.
        weight_bytes: of the weight of an id; 0 where ids have none.

    Raises:
        ConfigurationError: the arrays do not fit each other or the table.
    """

    shape: TableShape
    lengths: Ints
    accesses: Floats
    batches: Floats | None = None
    drawn: Floats | None = None
    is_split: bool = False
    num_features: int = 1
    num_jagged: int = 1
    weight_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _frozen(self.lengths, np.int64))
        object.__setattr__(self, "accesses", _frozen(self.accesses, np.float64))
        for name in ("batches", "drawn"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, _frozen(values, np.float64))
        _check_runs(self)

    @staticmethod
    def of_counts(
        shape: TableShape, counts: ArrayLike, batches: ArrayLike | None = None, *, unordered: range = range(0)
    ) -> TableProfile:
        """The profile of a table whose counts are known row by row, in any order; memory-mapped counts are streamed.

        Rows of one run have equal counts; their `batches` are the mean.

        Args:
            shape: of the table.
            counts: how often each row was read, `[num_rows]`.
            batches: in how many batches each row stood, `[num_rows]`.
            unordered: rows in no order of frequency, where neighbours seldom have equal counts: they are cut into at
                most MAX_BANDS runs of equal length, with mean counts.

        Example:
            >>> shape = TableShape("item", 5, value_bytes=64, gradient_bytes=64)
            >>> table = TableProfile.of_counts(shape, [7, 3, 3, 0, 0])
            >>> table.lengths.tolist(), table.accesses.tolist()
            ([1, 2, 2], [7.0, 3.0, 0.0])
        """
        values = np.asanyarray(counts)
        if values.shape != (shape.num_rows,):
            raise ConfigurationError(
                f"table {shape.name!r} has {shape.num_rows:,} rows, but counts of shape {values.shape} came"
            )
        starts = _run_starts(values, unordered)
        lengths = np.diff(starts, append=shape.num_rows)
        accesses = _run_sums(values, starts) / lengths if unordered else values[starts].astype(np.float64)
        means = None
        if batches is not None:
            in_batches = np.asanyarray(batches)
            if in_batches.shape != values.shape:
                raise ConfigurationError(
                    f"table {shape.name!r}: counts of {len(values):,} rows, but batches of {in_batches.shape}"
                )
            means = _run_sums(in_batches, starts) / lengths
        return TableProfile(shape, lengths, accesses, means)

    @property
    def name(self) -> str:
        """Rows of the table."""
        return self.shape.name

    @property
    def starts(self) -> Ints:
        """int64 `[K + 1]`: run k holds the rows `starts[k]` … `starts[k + 1] − 1`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @property
    def columns(self) -> dict[str, Floats]:
        """What was counted of each run, by the name of the attribute."""
        optional = {"batches": self.batches, "drawn": self.drawn}
        return {"accesses": self.accesses, **{name: each for name, each in optional.items() if each is not None}}

    @property
    def total_accesses(self) -> float:
        """Of all rows."""
        return float(self.lengths @ self.accesses)

    @property
    def is_falling(self) -> bool:
        """Whether no row was read more often than one before it."""
        return bool(np.all(np.diff(self.accesses) <= 0))


@dataclass(frozen=True, eq=False)
class Profile:
    """How often the rows of all tables were read.

    Attributes:
        tables: one a table.
        num_samples: how many samples were counted.
        batch_size: samples of a batch, where batches were counted.

    Raises:
        ConfigurationError: no samples, or a table whose batches were counted without a size.

    Example:
        >>> shape = TableShape("item", 5, value_bytes=64, gradient_bytes=64)
        >>> profile = Profile.from_counts({"item": [5, 2, 2, 1, 0]}, [shape], num_samples=10)
        >>> profile.access_rate(0).tolist()
        [0.5, 0.2, 0.1, 0.0]
        >>> profile.presence(0, samples=2).round(2).tolist()
        [0.75, 0.36, 0.19, 0.0]
        >>> profile.uniques(0, samples=2).round(2).tolist()
        [0.0, 0.75, 1.47, 1.66, 1.66]
    """

    tables: tuple[TableProfile, ...]
    num_samples: int
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigurationError(f"a profile needs samples, got {self.num_samples}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigurationError(f"batch_size must be 1 or more, got {self.batch_size}")
        names = [table.name for table in self.tables]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigurationError(f"tables {twice} are in the profile more than once")
        for table in self.tables:
            if table.batches is None:
                continue
            if self.batch_size is None:
                raise ConfigurationError(f"table {table.name!r}: batches were counted, but batch_size is not given")
            if len(table.batches) and (most := float(table.batches.max())) > self.num_batches:
                raise ConfigurationError(
                    f"table {table.name!r}: a row is in {most:,.0f} batches, but {self.num_samples:,} samples make "
                    f"{self.num_batches:,} batches of {self.batch_size:,}"
                )

    @staticmethod
    def from_counts(
        counts: Mapping[str, ArrayLike],
        shapes: Sequence[TableShape],
        num_samples: int,
        *,
        batches: Mapping[str, ArrayLike] | None = None,
        batch_size: int | None = None,
    ) -> Profile:
        """From what is known row by row.

        Args:
            counts: table → how often each row was read, `[num_rows]`.
            shapes: of the tables, whose order the profile takes.
            num_samples: how many samples were counted.
            batches: table → in how many batches each row stood, `[num_rows]`; tables may be missing.
            batch_size: samples of those batches.

        Raises:
            ConfigurationError: a table has no counts, or counts have no table.
        """
        names = [shape.name for shape in shapes]
        if set(names) != set(counts):
            raise ConfigurationError(
                f"tables without counts: {sorted(set(names) - set(counts))}, "
                f"counts without a table: {sorted(set(counts) - set(names))}"
            )
        contained = batches or {}
        tables = tuple(TableProfile.of_counts(s, counts[s.name], contained.get(s.name)) for s in shapes)
        return Profile(tables, num_samples, batch_size)

    @property
    def shapes(self) -> tuple[TableShape, ...]:
        """Shapes of the tables."""
        return tuple(table.shape for table in self.tables)

    @property
    def num_batches(self) -> int:
        """Batches that were counted, 0 where none were; the last may be smaller."""
        return 0 if self.batch_size is None else -(-self.num_samples // self.batch_size)

    def access_rate(self, table: int) -> Floats:
        """f, `[K]`: expected accesses of a row in one sample; more than 1 where a bag repeats a row."""
        return self.tables[table].accesses / self.num_samples

    def ids_per_sample(self, table: int) -> float:
        """How many ids of a table a sample has, in all bags of its features."""
        return self.tables[table].total_accesses / self.num_samples

    def is_one_hot(self, table: int) -> bool:
        """Whether no sample can have had two ids, by the sum of the counts."""
        return self.tables[table].total_accesses <= self.num_samples * (1 + 1e-9)

    def presence(self, table: int, samples: int, *, share: float = 1.0, steps: int = 1) -> Floats:
        """u, `[K]`: the chance that a batch contains a row, 0 … 1.

        Where batches were counted: 1 − (1 − p)^(samples / batch_size), with p the share of batches that contained the
        row; a smaller last one counts as the part of a batch that it is. A row that was in every batch is in every
        larger one; for smaller ones it counts as a row without batches.
        Without batches, draws count as independent: 1 − (1 − f)^samples for one-hot tables, and Poisson,
        1 − exp(−f · samples), where samples hold several ids.
        What a step reads whatever its samples are comes beside that, independently.

        Args:
            table: its number.
            samples: of the batch, or of the batches of several ranks and steps together.
            share: of a split table, what the ranks of these samples read; 1 of all ranks.
            steps: whose samples they are.
        """
        found, chance = self.tables[table], self._in_samples(table, samples)
        if found.drawn is not None:
            chance = chance + (1.0 - chance) * _at_least_once(found.drawn, steps)
        return chance + (1.0 - chance) * share if found.is_split else chance

    def _in_samples(self, table: int, samples: int) -> Floats:
        """`[K]`: the chance that samples contain a row."""
        independent = self._independent(table, samples)
        batches = self.tables[table].batches
        if batches is None:
            return independent
        assert self.batch_size is not None
        share = batches * (self.batch_size / self.num_samples)
        counted = _at_least_once(share, samples / self.batch_size)
        return np.where((share >= 1) & (samples < self.batch_size), independent, counted)

    def uniques(self, table: int, samples: int) -> Floats:
        """Expected distinct rows of a batch among the rows before each run, `[K + 1]`: prefix sums of `presence`."""
        return np.concatenate([np.zeros(1), np.cumsum(self.presence(table, samples) * self.tables[table].lengths)])

    def _independent(self, table: int, samples: int) -> Floats:
        rate = self.access_rate(table)
        return _at_least_once(rate, samples) if self.is_one_hot(table) else -np.expm1(-rate * samples)

    def save(self, path: str | Path) -> None:
        """Writes the profile (npz); what stood at `path` stays where that fails."""
        arrays: dict[str, Any] = {}
        for index, table in enumerate(self.tables):
            arrays[f"lengths_{index}"] = table.lengths
            arrays |= {f"{name}_{index}": values for name, values in table.columns.items()}
        head = {
            "format": FORMAT,
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "shapes": [asdict(shape) for shape in self.shapes],
            "split": [table.is_split for table in self.tables],
            "bags": [[table.num_features, table.num_jagged, table.weight_bytes] for table in self.tables],
        }
        with replacing_file(Path(path)) as file:
            np.savez_compressed(file, head=np.array(json.dumps(head)), **arrays)

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Reads a profile.

        Raises:
            ConfigurationError: the file is missing, no profile, or of another format.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                head = json.loads(str(arrays["head"]))
                if head["format"] != FORMAT:
                    raise ConfigurationError(
                        f"{path}: format {head['format']}, this rowmesh reads {FORMAT}; make the profile again"
                    )
                tables = tuple(
                    TableProfile(
                        TableShape(**shape),
                        arrays[f"lengths_{i}"],
                        arrays[f"accesses_{i}"],
                        arrays.get(f"batches_{i}"),
                        arrays.get(f"drawn_{i}"),
                        is_split,
                        *bags,
                    )
                    for i, (shape, is_split, bags) in enumerate(
                        zip(head["shapes"], head["split"], head.get("bags", [()] * len(head["shapes"])), strict=True)
                    )
                )
                return Profile(tables, head["num_samples"], head["batch_size"])
        except OSError as error:
            raise ConfigurationError(f"cannot read the profile {path}: {error.strerror or error}") from error
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{path}: not a profile ({error})") from error


def _at_least_once(share: Floats, times: float) -> Floats:
    """1 − (1 − share)^times, also for shares that round to nothing."""
    with np.errstate(divide="ignore"):
        return -np.expm1(times * np.log1p(-np.minimum(share, 1.0)))


def _frozen(values: ArrayLike, dtype: type) -> NDArray[Any]:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


def _check_runs(table: TableProfile) -> None:
    name, lengths = table.name, table.lengths
    for what, values in table.columns.items():
        if values.shape != lengths.shape or lengths.ndim != 1:
            raise ConfigurationError(f"table {name!r}: {lengths.shape} lengths, but {values.shape} {what}")
        if not np.all(np.isfinite(values) & (values >= 0)):
            raise ConfigurationError(f"table {name!r}: {what} must be finite and 0 or more")
    if len(lengths) and lengths.min() < 1:
        raise ConfigurationError(f"table {name!r}: a run of {int(lengths.min())} rows")
    if int(lengths.sum()) != table.shape.num_rows:
        raise ConfigurationError(
            f"table {name!r} has {table.shape.num_rows:,} rows, but the runs of its profile {int(lengths.sum()):,}; "
            "profile the data that the table was made for"
        )


def _run_starts(counts: NDArray[Any], unordered: range) -> Ints:
    """Where runs of equal counts begin; those of unordered rows, at equal distances."""
    parts = [np.zeros(min(len(counts), 1), np.int64)]
    for first in range(1, len(counts), CHUNK_ROWS):
        chunk = counts[first - 1 : first + CHUNK_ROWS]
        found = np.flatnonzero(chunk[1:] != chunk[:-1]) + first
        parts.append(found[(found < unordered.start) | (found >= unordered.stop)])
    bands = np.arange(unordered.start, unordered.stop, max(1, -(-len(unordered) // MAX_BANDS)))
    ends = [unordered.stop] if 0 < unordered.stop < len(counts) else []
    return np.unique(np.concatenate([*parts, bands, np.array(ends, np.int64)]))


def _run_sums(values: NDArray[Any], starts: Ints) -> Floats:
    """Sums of values by run, without a copy of all values."""
    sums = np.zeros(len(starts))
    for first in range(0, len(values), CHUNK_ROWS):
        chunk = np.asarray(values[first : first + CHUNK_ROWS], np.float64)
        low = int(np.searchsorted(starts, first, "right")) - 1
        high = int(np.searchsorted(starts, first + len(chunk), "left"))
        sums[low:high] += np.add.reduceat(chunk, np.maximum(starts[low:high] - first, 0))
    return sums
