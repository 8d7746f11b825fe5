"""What a checkpoint holds: which file has which rows of which table.

::

    model/
      manifest.json            names one folder of files; replaced in one step, so it is always whole
      3f9c…/                   the folder
        dense.pt               the dense network and whatever else the caller gave
        C1.0.values.npy        rows of table C1 that rank 0 wrote, in the order the manifest gives
        C1.0.sum.npy           a state of their optimizer
        C1.1.values.npy        …
        C2.0.core1.npy         a core of tensor-train table C2, which rank 0 alone writes
        C2.0.core1.sum.npy     a state of its optimizer

Of a dynamic table there are the ids that it knows, in the order of their logical shards, with counts, last steps and
scores, the rows in the same order, and what its shards count beside::

        C3.0.shards.npy        how many ids and candidates each shard has, its step, and its window of counting
        C3.0.ids.npy           …, counts, last_steps, scores, values, sum: by id
        C3.0.candidate_ids.npy …, candidate_counts; and sketch, by shard

An increment has only the rows that changed since its parent, another checkpoint beside it:

::

    checkpoints/
      step-000000200/          a full one, or an increment itself
      step-000000400/          its manifest names step 200, with the folder of its files and the digest of its manifest
        manifest.json
        85d2…/
          dense.pt             whole, as are cores
          C1.0.rows.npy        which rows of C1, by rank 0
          C1.0.values.npy      … in this order
          C3.0.removed.npy     of a dynamic table the ids that are gone (tombstones), and as above those that were seen,
          C3.0.ids.npy         …; what its shards count beside is whole
          C3.0.demoted_removed.npy  where ids are demoted, those that left the store, and as above those that came to it
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy.typing as npt
import torch
from pydantic import Field, PlainValidator, TypeAdapter, ValidationError
from torch import Tensor

from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.manifest import OWN_SUM, own_sum
from rowmesh._support.files.names import file_stem
from rowmesh.errors import CheckpointError, DamagedCheckpointError
from rowmesh.tables.shard import ROWS, Form

FORMAT, INCREMENT_FORMAT, KNOWN_FORMAT, KNOWN_INCREMENT_FORMAT, DEMOTED_INCREMENT_FORMAT = 1, 2, 3, 4, 5
"""Of full ones, of increments, of both where there are dynamic tables, and of increments where these demote ids."""
MANIFEST = "manifest.json"
DENSE = "dense.pt"
FOLDER_PATTERN = "[0-9a-f]{16}"
_ADVICE = "restore it from a copy, or train again"
_MOST_OF_TABLE = 200  # bytes of a file's name; rank and kind come after it
_PRIME = 2**61 - 1
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]


@dataclass(frozen=True)
class RowRange:
    """The rows start, start + stride, … , count of them: the rows of one rank under a cyclic placement."""

    start: Count
    stride: Positive
    count: Count

    @classmethod
    def of(cls, rows: range) -> RowRange:
        """The same rows."""
        return cls(rows.start, rows.step, len(rows))

    @property
    def stop(self) -> int:
        """One past the last of the rows."""
        return self.start + (self.count - 1) * self.stride + 1 if self.count else self.start


@dataclass(frozen=True)
class Part:
    """The rows of one table that one rank wrote.

    Attributes:
        rank: the rank that wrote them.
        ranges: the rows, in file order, one range after the other; none in an increment.
        files: "values" and the names of optimizer states → file name; in an increment "rows" too.
        num_changed: in an increment, how many rows are in its files.
        num_removed: none: rows of a table are never gone.
    """

    rank: Count
    ranges: tuple[RowRange, ...]
    files: dict[str, str]
    num_changed: Count = 0
    num_removed: Count = 0

    @property
    def count(self) -> int:
        """How many rows."""
        return self.num_changed + sum(part.count for part in self.ranges)


@dataclass(frozen=True)
class CoresEntry:
    """The cores of a tensor-train table.

    Attributes:
        row_factors, dim_factors, ranks: as in `TensorTrainShape`.
        files: "core1" … "core3", and "core1.sum" for a state → file name.
    """

    row_factors: tuple[Positive, ...]
    dim_factors: tuple[Positive, ...]
    ranks: tuple[Positive, ...]
    files: dict[str, str]


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
class KnownEntry:
    """What a dynamic table knows.

    Attributes:
        rules: on which it depends.
        parts: every shard is in one of them.
    """

    rules: dict[str, int | str]
    parts: tuple[KnownPart, ...]

    @property
    def demotes(self) -> bool:
        """Whether ids that leave fast memory are kept in a store."""
        return self.rules.get("mode") == "demote"

    @property
    def seed(self) -> int | None:
        """Seed of the rows from which ids start, equal in all parts."""
        return self.parts[0].seed


@dataclass(frozen=True)
class TableEntry:
    """One table: its shape, its update rule, and its parts; its cores where it is a tensor-train table; or what it
    knows where it is a dynamic one, whose number of rows is its capacity.
    """

    num_rows: Positive
    dim: Positive
    dtype: str
    optimizer: str
    parts: tuple[Part, ...]
    cores: CoresEntry | None = None
    known: KnownEntry | None = None

    @property
    def form(self) -> Form:
        """What finds an entry of the table."""
        if self.known is not None:
            return "ids"
        return "rows" if self.cores is None else "cores"

    @property
    def files(self) -> list[str]:
        """The names of all its files."""
        owners: list[Part | CoresEntry | KnownPart] = [*self.parts, *([self.cores] if self.cores else [])]
        owners += self.known.parts if self.known else ()
        return [name for owner in owners for name in owner.files.values()]


@dataclass(frozen=True)
class Identity:
    """Which checkpoint it is.

    Attributes:
        folder: of its files.
        digest: of its manifest.
    """

    folder: str
    digest: str


@dataclass(frozen=True)
class Parent:
    """What an increment adds to.

    Attributes:
        step: after which the parent was written; it is beside the increment.
        identity: of the parent.
        depth: how many increments there are between it and the full one; 0: it is full.
    """

    step: Count
    identity: Identity
    depth: Count


def _checksums(values: Any) -> Checksums:
    """From the values in a manifest; ValueError where they are none."""
    try:
        return values if isinstance(values, Checksums) else Checksums.from_json(values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no checksums ({type(error).__name__} {error})") from None


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except the numbers.

    Attributes:
        folder: of the files, beside the manifest.
        world_size: how many ranks wrote it.
        tables: by name.
        metadata: of the caller.
        checksums: by file name.
        parent: of an increment; None: it is full.
        replaces: the increment that was made a full one of; those that add to it add to this one.
        digest: of the text that it was read from; "" where it was not read.
    """

    folder: str
    world_size: Positive
    tables: dict[str, TableEntry]
    metadata: dict[str, Any]
    checksums: dict[str, Annotated[Checksums, PlainValidator(_checksums)]] = field(default_factory=dict)
    format: int = FORMAT
    parent: Parent | None = None
    replaces: Identity | None = None
    digest: str = field(default="", compare=False)

    @property
    def identity(self) -> Identity:
        """By which increments name it."""
        return Identity(self.folder, self.digest)

    @property
    def depth(self) -> int:
        """How many increments there are from the full one to it."""
        return self.parent.depth + 1 if self.parent else 0

    def to_json(self) -> str:
        """The text of `manifest.json`, with a checksum of itself."""
        checksums = {name: each.to_json() for name, each in self.checksums.items()}
        values = {**asdict(self), "checksums": checksums}
        del values["digest"]
        return json.dumps({**values, OWN_SUM: own_sum(values)}, indent=1)

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """From the text of the file at `path`, which errors name.

        Raises:
            DamagedCheckpointError: it is not what was written, or describes what cannot be: rows in no file or in two,
                a file elsewhere.
            CheckpointError: it is none, or that of a later version.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{path} is no checkpoint manifest: {type(error).__name__} {error}") from None
        try:
            found = values.pop(OWN_SUM, None)
            if found is None:
                raise DamagedCheckpointError(
                    f"{path} is damaged, or no checkpoint manifest: {OWN_SUM} is missing, the checksum of the other "
                    f"keys; {_ADVICE}"
                )
            if found != own_sum(values):
                raise DamagedCheckpointError(f"{path} is damaged: {OWN_SUM} is not that of the other keys; {_ADVICE}")
            if values["format"] not in range(FORMAT, DEMOTED_INCREMENT_FORMAT + 1):
                raise CheckpointError(
                    f"{path} has format {values['format']!r}; this rowmesh reads 1 to {DEMOTED_INCREMENT_FORMAT}"
                )
            values["digest"] = found
            manifest = _ADAPTER.validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            detail = error.errors()[0]
            where = ".".join(str(part) for part in detail["loc"])
            reason = f"{where}: {detail['msg']}" if where else detail["msg"]
            raise CheckpointError(f"{path} is no checkpoint manifest: {reason}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no checkpoint manifest: {type(error).__name__} {error}") from None
        try:
            manifest.check()
        except ValueError as error:
            raise DamagedCheckpointError(f"{path} is damaged: {error}; {_ADVICE}") from None
        return manifest

    def check(self) -> None:
        """Raises ValueError where it describes what no writer wrote."""
        if not re.fullmatch(FOLDER_PATTERN, self.folder):
            raise ValueError(f"folder {self.folder!r} is no name that rowmesh gives")
        if (self.format not in (FORMAT, KNOWN_FORMAT)) != (self.parent is not None):
            raise ValueError(f"format {self.format} is {'of increments' if self.parent is None else 'of full ones'}")
        for name, table in self.tables.items():
            if strangers := [file for file in table.files if not _is_plain(file)]:
                raise ValueError(f"table {name!r} has a file {strangers[0]!r}, which is no name of a file beside it")
            if not isinstance(dtype := getattr(torch, table.dtype, None), torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"table {name!r} has dtype {table.dtype!r}, which is none of rows")
            if table.known is not None:
                _check_known(name, table.known, is_increment=self.parent is not None)
            elif table.cores is None:
                (_check_changed if self.parent else _check_rows)(name, table)
        names = [DENSE, *(file for table in self.tables.values() for file in table.files)]
        if twice := [(name, count) for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{twice[0][0]} is named {twice[0][1]} times, and every file has a use of its own")
        if lacking := [name for name in names if name not in self.checksums]:
            raise ValueError(f"there is no checksum of {lacking[0]}")


def step_name(step: int) -> str:
    """The name of the folder of a checkpoint after a step.

    >>> step_name(200)
    'step-000000200'
    """
    return f"step-{step:09}"


def file_name(table: str, rank: int, kind: str) -> str:
    """A file name for any table name.

    >>> file_name(".hidden/a", 0, "values")
    '%2Ehidden%2Fa.0.values.npy'
    """
    name = file_stem(table, _MOST_OF_TABLE)
    return f"{'%2E' + name[1:] if name.startswith('.') else name}.{rank}.{kind}.npy"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def as_numpy(values: Tensor) -> npt.NDArray[Any]:
    """A view for files; NumPy has no bfloat16, whose bits are kept as int16."""
    values = values.detach()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def _is_plain(name: str) -> bool:
    """Whether it names a file of the folder itself."""
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")


def _check_rows(name: str, table: TableEntry) -> None:
    """Raises ValueError where a row is in no file, in two, or past the table."""
    if not all("values" in part.files for part in table.parts):
        raise ValueError(f"table {name!r} has a part without values")
    if any(part.num_changed or part.num_removed for part in table.parts):
        raise ValueError(f"table {name!r} has a part of an increment, and the checkpoint is full")
    ranges = [bounds for part in table.parts for bounds in part.ranges]
    if outside := [bounds for bounds in ranges if bounds.stop > table.num_rows]:
        raise ValueError(f"table {name!r} has {table.num_rows} rows, and a file those up to {outside[0].stop - 1}")
    found = sum(bounds.count for bounds in ranges)
    if found != table.num_rows or not _are_all_rows(ranges, table.num_rows):
        raise ValueError(
            f"table {name!r}: files hold {found} rows where each of {table.num_rows} must be in exactly one"
        )


def _check_changed(name: str, table: TableEntry) -> None:
    """Raises ValueError where a part is none of an increment; its rows are known when they are read."""
    for part in table.parts:
        if part.num_removed:
            raise ValueError(f"table {name!r} has rows, and {part.num_removed} ids that are gone: it can have none")
        if part.ranges or not {ROWS, "values"} <= set(part.files):
            raise ValueError(f"table {name!r} has a part that does not say which rows changed")
    if (found := sum(part.count for part in table.parts)) > table.num_rows:
        raise ValueError(f"table {name!r} has {table.num_rows} rows, and {found} that changed")


def _check_known(name: str, known: KnownEntry, *, is_increment: bool) -> None:
    """Raises ValueError where a shard is in no part, or in two, or ids are gone of which nothing can be known."""
    if any(("removed" in part.files) != is_increment for part in known.parts):
        raise ValueError(
            f"table {name!r} has a part that {'does not say' if is_increment else 'says'} which ids are gone"
        )
    if known.demotes and not all({"demoted_shards", "demoted_ids"} <= set(part.files) for part in known.parts):
        raise ValueError(f"table {name!r} has a part that does not say which ids are demoted")
    if any(("demoted_removed" in part.files) != (is_increment and known.demotes) for part in known.parts):
        what = "does not say" if is_increment and known.demotes else "says"
        raise ValueError(f"table {name!r} has a part that {what} which ids are not demoted any more")
    shards = sorted(shard for part in known.parts for shard in range(part.first, part.first + part.num_shards))
    if shards != list(range(len(shards))) or len(shards) != known.rules.get("shards"):
        raise ValueError(f"table {name!r}: files hold shards {shards}, and it has {known.rules.get('shards')}")


def _are_all_rows(ranges: Sequence[RowRange], num_rows: int) -> bool:
    """Whether ranges have each of the rows 0 … num_rows − 1 once.

    Compares Σ x^row over the ranges with that over all rows, at a random x modulo a prime: unequal sets of rows agree
    with a probability of num_rows / 2⁶¹. Each range is a geometric series, so it takes no time by row.

    >>> _are_all_rows([RowRange(0, 2, 5), RowRange(1, 2, 5)], 10)
    True
    >>> _are_all_rows([RowRange(0, 2, 5), RowRange(2, 2, 4), RowRange(1, 1, 1)], 10)
    False
    """
    x = 2 + secrets.randbelow(_PRIME - 3)
    return sum(_series(x, bounds) for bounds in ranges) % _PRIME == _series(x, RowRange(0, 1, num_rows))


def _series(x: int, rows: RowRange) -> int:
    """Σ x^row modulo the prime."""
    ratio, first = pow(x, rows.stride, _PRIME), pow(x, rows.start, _PRIME)
    if ratio == 1:
        return first * rows.count % _PRIME
    return first * (pow(ratio, rows.count, _PRIME) - 1) * pow(ratio - 1, -1, _PRIME) % _PRIME


_ADAPTER = TypeAdapter(Manifest)
