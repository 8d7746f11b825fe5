"""Entries of a manifest: what is saved of a table. Rows, cores and dynamic tables differ here, and in their readers.

A `TableEntry` has what all tables have; its `content` is a `RowsEntry`, a `CoresEntry` or a `KnownEntry`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field

from rowmesh.errors import CheckpointError
from rowmesh.tables.dynamic.demoted_records import IDS as DEMOTED_IDS
from rowmesh.tables.dynamic.demoted_records import REMOVED as DEMOTED_REMOVED
from rowmesh.tables.dynamic.records import REMOVED, facts_of
from rowmesh.tables.shard import ROWS, Form, LogicalShards
from rowmesh.tables.spec import TableSpec

_PRIME = 2**61 - 1
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
FORMAT, INCREMENT_FORMAT, KNOWN_FORMAT, KNOWN_INCREMENT_FORMAT, DEMOTED_INCREMENT_FORMAT = 1, 2, 3, 4, 5
"""Formats of full checkpoints, of increments, of both with dynamic tables, and of increments where these demote ids."""


@dataclass(frozen=True)
class SavedRange:
    """The rows start, start + stride, … , count of them: the rows of one rank under a cyclic placement."""

    start: Count
    stride: Positive
    count: Count

    @classmethod
    def of(cls, rows: range) -> SavedRange:
        """Describes a range of rows."""
        return cls(rows.start, rows.step, len(rows))

    @property
    def stop(self) -> int:
        """The end of the rows: one past the last."""
        return self.start + (self.count - 1) * self.stride + 1 if self.count else self.start


class WrittenTable(NamedTuple):
    """The part of a table that one rank wrote.

    Attributes:
        rank: the rank.
        files: kind → file name.
        sizes: of arrays beside rows: kind → entries.
        ranges: the rows that have numbers, in file order.
        logical: of a dynamic table the logical shards; None where this rank has none.
    """

    rank: int
    files: dict[str, str]
    sizes: Mapping[str, int]
    ranges: Sequence[SavedRange]
    logical: LogicalShards | None

    def to_plain(self) -> list[Any]:
        """Plain values, to be sent."""
        logical = self.logical
        numbers = None if logical is None else [logical.shards.start, logical.shards.stop, *logical[1:]]
        return [
            self.rank,
            self.files,
            self.sizes,
            [(each.start, each.stride, each.count) for each in self.ranges],
            numbers,
        ]

    @classmethod
    def from_plain(cls, values: Sequence[Any]) -> WrittenTable:
        """From such values."""
        rank, files, sizes, ranges, numbers = values
        logical = None if numbers is None else LogicalShards(range(*numbers[:2]), *numbers[2:])
        return cls(rank, files, sizes, [SavedRange(*each) for each in ranges], logical)


@dataclass(frozen=True)
class RowsPart:
    """The rows of one table that one rank wrote.

    Attributes:
        rank: the rank that wrote them.
        ranges: the rows, in file order, one range after the other; none in an increment.
        files: "values" and the names of optimizer states → file name; in an increment "rows" too.
        num_changed: in an increment, how many rows are in its files.
        num_removed: none: rows of a table are never gone.
    """

    rank: Count
    ranges: tuple[SavedRange, ...]
    files: dict[str, str]
    num_changed: Count = 0
    num_removed: Count = 0

    @property
    def count(self) -> int:
        """How many rows."""
        return self.num_changed + sum(part.count for part in self.ranges)


class Content:
    """The saved contents of a table, in one of three forms.

    Attributes:
        form: what finds its entries.
    """

    form: ClassVar[Form]

    @property
    def text(self) -> str:
        """A text that increments must have in common with their parents."""
        return self.form

    @property
    def formats(self) -> tuple[int, int]:
        """The number of a full manifest, and that of an increment, which has such a table."""
        return FORMAT, INCREMENT_FORMAT

    @property
    def file_names(self) -> list[str]:
        """The names of all its files."""
        raise NotImplementedError

    def check(self, name: str, *, is_increment: bool) -> None:
        """Raises ValueError where it is what no writer wrote."""

    def compared(self, spec: TableSpec, num_rows: int) -> dict[str, tuple[Any, Any]]:
        """By name, what is saved and what a table of the same form has.

        Args:
            spec: the table.
            num_rows: that were saved.

        Raises:
            CheckpointError: the table has no room.
        """
        return {"num_rows": (num_rows, spec.num_rows)}

    def advice(self, name: str) -> str:
        """Advice for the user where a table has something else of that name."""
        return "use the configuration it was trained with"


@dataclass(frozen=True)
class RowsEntry(Content):
    """The rows of a table that is stored by row.

    Attributes:
        num_rows: of the table.
        parts: in a full checkpoint, every row is in one of them.
    """

    form: ClassVar[Form] = "rows"

    num_rows: int
    parts: tuple[RowsPart, ...]

    @property
    def file_names(self) -> list[str]:
        """See `Content`."""
        return [name for part in self.parts for name in part.files.values()]

    def check(self, name: str, *, is_increment: bool) -> None:
        """See `Content`."""
        (self._check_changed if is_increment else self._check_whole)(name)

    def _check_whole(self, name: str) -> None:
        """Raises ValueError where a row is in no file, in two, or past the table."""
        if not all("values" in part.files for part in self.parts):
            raise ValueError(f"table {name!r} has a part without values")
        if any(part.num_changed or part.num_removed for part in self.parts):
            raise ValueError(f"table {name!r} has a part of an increment, and the checkpoint is full")
        ranges = [bounds for part in self.parts for bounds in part.ranges]
        if outside := [bounds for bounds in ranges if bounds.stop > self.num_rows]:
            raise ValueError(f"table {name!r} has {self.num_rows} rows, and a file those up to {outside[0].stop - 1}")
        found = sum(bounds.count for bounds in ranges)
        if found != self.num_rows or not _are_all_rows(ranges, self.num_rows):
            raise ValueError(
                f"table {name!r}: files hold {found} rows where each of {self.num_rows} must be in exactly one"
            )

    def _check_changed(self, name: str) -> None:
        """Raises ValueError where a part is none of an increment; its rows are known when they are read."""
        for part in self.parts:
            if part.num_removed:
                raise ValueError(f"table {name!r} has rows, and {part.num_removed} ids that are gone: it can have none")
            if part.ranges or not {ROWS, "values"} <= set(part.files):
                raise ValueError(f"table {name!r} has a part that does not say which rows changed")
        if (found := sum(part.count for part in self.parts)) > self.num_rows:
            raise ValueError(f"table {name!r} has {self.num_rows} rows, and {found} that changed")


@dataclass(frozen=True)
class CoresEntry(Content):
    """The cores of a tensor-train table.

    Attributes:
        row_factors, dim_factors, ranks: as in `TensorTrainShape`.
        files: "core1" … "core3", and "core1.sum" for a state → file name.
    """

    form: ClassVar[Form] = "cores"

    row_factors: tuple[Positive, ...]
    dim_factors: tuple[Positive, ...]
    ranks: tuple[Positive, ...]
    files: dict[str, str]

    @property
    def file_names(self) -> list[str]:
        """See `Content`."""
        return list(self.files.values())

    def compared(self, spec: TableSpec, num_rows: int) -> dict[str, tuple[Any, Any]]:
        """See `Content`."""
        names, here = ("row_factors", "dim_factors", "ranks"), spec.tensor_train_shape
        return super().compared(spec, num_rows) | {n: (getattr(self, n), getattr(here, n)) for n in names}


@dataclass(frozen=True)
class KnownPart:
    """The logical shards of a dynamic table that one rank wrote.

    Attributes:
        rank: the rank that wrote them.
        first: the first shard.
        num_shards: how many, one after the other.
        num_ids: that they know together; in an increment those that changed.
        num_candidates: ids that they count and do not know yet.
        step: how many batches the tables were given.
        files: "values", the names of optimizer states and of what is known by id or shard → file name.
        num_removed: in an increment, how many ids are gone (tombstones).
        num_demoted: ids whose records are in a store; those in fast memory are apart from them. In an increment those
            that came to it.
        num_demoted_removed: in an increment, how many ids left the store.
        seed: of the rows from which ids start.
    """

    rank: Count
    first: Count
    num_shards: Count
    num_ids: Count
    num_candidates: Count
    step: Count
    files: dict[str, str]
    num_removed: Count = 0
    num_demoted: Count = 0
    num_demoted_removed: Count = 0
    seed: int = 0


@dataclass(frozen=True)
class KnownEntry(Content):
    """The ids of a dynamic table, and what it knows of them.

    Attributes:
        rules: on which it depends.
        parts: every shard is in one of them.
    """

    form: ClassVar[Form] = "ids"

    rules: dict[str, int | str]
    parts: tuple[KnownPart, ...]

    @property
    def demotes(self) -> bool:
        """Whether ids that leave fast memory are kept in a store."""
        return self.rules.get("mode") == "demote"

    @property
    def seed(self) -> int:
        """Seed of the rows from which ids start, equal in all parts."""
        return self.parts[0].seed

    @property
    def step(self) -> int:
        """How many batches the table was given."""
        return max(part.step for part in self.parts)

    @property
    def formats(self) -> tuple[int, int]:
        """See `Content`."""
        return KNOWN_FORMAT, DEMOTED_INCREMENT_FORMAT if self.demotes else KNOWN_INCREMENT_FORMAT

    @property
    def file_names(self) -> list[str]:
        """See `Content`."""
        return [name for part in self.parts for name in part.files.values()]

    @property
    def text(self) -> str:
        """See `Content`."""
        return f"dynamic with {', '.join(f'{name} {value}' for name, value in sorted(self.rules.items()))}"

    def compared(self, spec: TableSpec, num_rows: int) -> dict[str, tuple[Any, Any]]:
        """See `Content`; its number of rows is its capacity, which may have grown."""
        if spec.num_rows < num_rows:
            raise CheckpointError(
                f"table {spec.name!r}: its capacity is {num_rows} in the checkpoint and {spec.num_rows} here; a "
                f"dynamic table may grow and cannot shrink: give a capacity of {num_rows} or more"
            )
        facts, rules = ({k: v for k, v in each.items() if k != "capacity"} for each in (facts_of(spec), self.rules))
        if "mode" not in rules:  # it has no demoted ids, which is as good as none
            facts = {name: value for name, value in facts.items() if name not in ("mode", "store_capacity")}
        elif "mode" not in facts:
            facts |= {"mode": "drop", "store_capacity": rules["store_capacity"]}
        return {name: (rules.get(name), facts.get(name)) for name in facts | rules}

    def advice(self, name: str) -> str:
        """See `Content`: what makes a rule that of the checkpoint, which capacity need not be."""
        saved = self.rules.get(name)
        if saved is None:
            return super().advice(name)
        if name == "store_capacity" and not saved:
            return "a dynamic table grows in its capacity alone: leave store_capacity out"
        return (
            f"a dynamic table grows in its capacity alone: give Dynamic({name}={saved!r}), or "
            f"tables.dynamic.{name}={saved} in a configuration"
        )

    def check(self, name: str, *, is_increment: bool) -> None:
        """Raises ValueError where a shard is in no part, or in two, or ids are gone of which nothing can be known."""
        if any(("removed" in part.files) != is_increment for part in self.parts):
            raise ValueError(
                f"table {name!r} has a part that {'does not say' if is_increment else 'says'} which ids are gone"
            )
        if self.demotes and not all({"demoted_shards", "demoted_ids"} <= set(part.files) for part in self.parts):
            raise ValueError(f"table {name!r} has a part that does not say which ids are demoted")
        if any(("demoted_removed" in part.files) != (is_increment and self.demotes) for part in self.parts):
            what = "does not say" if is_increment and self.demotes else "says"
            raise ValueError(f"table {name!r} has a part that {what} which ids are not demoted any more")
        shards = sorted(shard for part in self.parts for shard in range(part.first, part.first + part.num_shards))
        if shards != list(range(len(shards))) or len(shards) != self.rules.get("shards"):
            raise ValueError(f"table {name!r}: files hold shards {shards}, and it has {self.rules.get('shards')}")


@dataclass(frozen=True)
class TableEntry:
    """The entry of a table: its shape, its update rule, and its parts; the cores of a tensor-train table; or what a
    dynamic table knows, and its capacity as the number of rows.
    """

    num_rows: Positive
    dim: Positive
    dtype: str
    optimizer: str
    parts: tuple[RowsPart, ...]
    cores: CoresEntry | None = None
    known: KnownEntry | None = None

    @classmethod
    def of(cls, spec: TableSpec, form: Form, parts: Sequence[WrittenTable], *, is_increment: bool) -> TableEntry:
        """The entry of a table that ranks wrote.

        Raises:
            CheckpointError: no rank holds some of its rows.
        """
        facts = spec.num_rows, spec.dim, dtype_name(spec.dtype), spec.optimizer.name
        if form == "cores":
            shape = spec.tensor_train_shape
            return cls(*facts, (), CoresEntry(shape.row_factors, shape.dim_factors, shape.ranks, parts[0].files))
        if form == "ids":
            known = tuple(_known_part(part) for part in parts if part.files)
            return cls(*facts, (), known=KnownEntry(facts_of(spec), known))
        by_row = [RowsPart(part.rank, tuple(part.ranges), part.files, part.sizes.get(ROWS, 0)) for part in parts]
        if not is_increment and (found := sum(part.count for part in by_row)) != spec.num_rows:
            raise CheckpointError(f"table {spec.name!r} has {spec.num_rows} rows, but ranks hold {found}")
        return cls(*facts, tuple(part for part in by_row if part.count))

    @property
    def content(self) -> Content:
        """The saved contents of the table."""
        return self.known or self.cores or RowsEntry(self.num_rows, self.parts)

    def differences(self, spec: TableSpec, *, optimizer_state: bool) -> Iterator[tuple[str, Any, Any]]:
        """Name, what is saved and what a table has, where these differ.

        Raises:
            CheckpointError: see `Content.compared`.
        """
        pairs: dict[str, tuple[Any, Any]] = {
            "dim": (self.dim, spec.dim),
            "dtype": (self.dtype, dtype_name(spec.dtype)),
        }
        pairs |= self.content.compared(spec, self.num_rows)
        if optimizer_state:
            pairs["optimizer"] = self.optimizer, spec.optimizer.name
        yield from ((name, saved, here) for name, (saved, here) in pairs.items() if saved != here)


def _known_part(written: WrittenTable) -> KnownPart:
    logical, sizes = written.logical, written.sizes
    assert logical is not None, "it has files"
    return KnownPart(
        written.rank,
        logical.shards.start,
        len(logical.shards),
        sizes["ids"],
        sizes["candidate_ids"],
        logical.step,
        written.files,
        num_removed=sizes.get(REMOVED, 0),
        num_demoted=sizes.get(DEMOTED_IDS, 0),
        num_demoted_removed=sizes.get(DEMOTED_REMOVED, 0),
        seed=logical.seed,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _are_all_rows(ranges: Sequence[SavedRange], num_rows: int) -> bool:
    """Whether ranges have each of the rows 0 … num_rows − 1 once.

    Compares Σ x^row over the ranges with that over all rows, at a random x modulo a prime: unequal sets of rows agree
    with a probability of num_rows / 2⁶¹. Each range is a geometric series, so it takes no time by row.

    >>> _are_all_rows([SavedRange(0, 2, 5), SavedRange(1, 2, 5)], 10)
    True
    >>> _are_all_rows([SavedRange(0, 2, 5), SavedRange(2, 2, 4), SavedRange(1, 1, 1)], 10)
    False
    """
    x = 2 + secrets.randbelow(_PRIME - 3)
    return sum(_series(x, bounds) for bounds in ranges) % _PRIME == _series(x, SavedRange(0, 1, num_rows))


def _series(x: int, rows: SavedRange) -> int:
    """Σ x^row modulo the prime."""
    ratio, first = pow(x, rows.stride, _PRIME), pow(x, rows.start, _PRIME)
    if ratio == 1:
        return first * rows.count % _PRIME
    return first * (pow(ratio, rows.count, _PRIME) - 1) * pow(ratio - 1, -1, _PRIME) % _PRIME
