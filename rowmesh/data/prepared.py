"""Prepared: a data set that preparation has written, and what it says about itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rowmesh._support.files.names import shortened
from rowmesh._support.suggest import hint
from rowmesh.data.bijection import Bijection
from rowmesh.data.metadata import FORMAT_VERSION as FORMAT_VERSION
from rowmesh.data.metadata import SPLITS as SPLITS
from rowmesh.data.metadata import check, parse_json
from rowmesh.data.pinned import PinnedFolder
from rowmesh.data.scales import DenseScale
from rowmesh.data.schema import Schema
from rowmesh.errors import DataError

METADATA = "metadata.json"
PREPARED = "prepared data"
"""The kind of folder that the manifest of prepared data names."""

BLOCK_SAMPLES = 16_384


@dataclass(frozen=True, kw_only=True)
class Table:
    """A categorical feature after preparation.

    Attributes:
        name: the feature.
        num_rows: ids are 0 … num_rows − 1; the last is the rare row.
        multi_hot: whether a sample holds a list of ids instead of one.
        num_distinct: distinct values met in all splits.
        rare_share: the share of all ids, by split, that went to the rare row.
    """

    name: str
    num_rows: int
    multi_hot: bool
    num_distinct: int
    rare_share: dict[str, float]

    @property
    def rare_row(self) -> int:
        """The row of ids that are rare in, or absent from, the training split."""
        return self.num_rows - 1


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split of prepared data.

    Attributes:
        samples: their number.
        positive_rate: the share of label 1; None where the (first) label is not of 0 and 1.
        label_means: label → its mean, by sample weights where there are any.
        optimum: scores of the true probabilities where they are known: "auc", "log_loss".
    """

    samples: int
    positive_rate: float | None
    optimum: dict[str, float] | None = None
    label_means: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared data set.

    What `open` gave reads the data as they were then: a folder that is renamed, removed or replaced meanwhile changes
    nothing for the splits, and other files of it are refused when they are read.

    Attributes:
        folder: where it lies.
        schema: what it was read with.
        tables: one a categorical feature, in the schema's order.
        splits: "train" and those of "validation" and "test" that exist.
        min_count: ids seen less often in training are rare.
        bad_rows: how many rows are in the quarantine.
        block_samples: samples in every record batch but the last.
        rowmesh_version: what wrote it.
        sources: the files each split (or all of them, where "train" was cut) was read from.
        dense_scales: how dense columns were standardised, by column; None where they were not: the schema has another
            `dense_transform`, or there are none.
        reordering: how `rowmesh data reorder` put ids in another order ("options"), and what came of it ("tables");
            None where ids are frequency ranks.
    """

    folder: Path
    schema: Schema
    tables: tuple[Table, ...]
    splits: dict[str, Split]
    min_count: int
    bad_rows: int
    block_samples: int
    rowmesh_version: str
    sources: dict[str, list[str]]
    dense_scales: tuple[DenseScale, ...] | None = None
    reordering: Mapping[str, Any] | None = None
    _pinned: PinnedFolder | None = field(default=None, init=False, repr=False, compare=False)

    @staticmethod
    def open(folder: str | Path, *, verify: bool = True) -> Prepared:
        """Reads the metadata of a prepared folder, and opens its splits.

        Args:
            folder: what `rowmesh data prepare` wrote.
            verify: whether all that is read, from now on too, is compared with the checksums that preparation left.

        Raises:
            DataError: the folder was not written by `rowmesh data prepare`, or by another version's format; or a file
                of it is damaged or malformed: names file and key.
        """
        folder = Path(folder)
        files = _pinned_folder(folder, verify)
        if (text := files.find(METADATA)) is None:
            raise _not_prepared(folder)
        values = parse_json(text, folder / METADATA)
        files.whole(METADATA)  # now that it is known that this version reads them
        schema = check(values, folder / METADATA)
        del values["format_version"]
        prepared = Prepared(
            **values
            | {
                "folder": folder,
                "schema": schema,
                "tables": tuple(Table(**table) for table in values["tables"]),
                "splits": {name: Split(**split) for name, split in values["splits"].items()},
                "dense_scales": _scales(values.get("dense_scales")),
            }
        )
        object.__setattr__(prepared, "_pinned", files)
        prepared._pin()
        return prepared

    @property
    def files(self) -> PinnedFolder:
        """The files, as they were when this was opened."""
        if self._pinned is None:  # made here, not opened: the first read opens it
            object.__setattr__(self, "_pinned", _pinned_folder(self.folder, verify=True))
            self._pin()
        assert self._pinned is not None
        return self._pinned

    @property
    def place(self) -> str:
        """Where it lies, wherever a command is run."""
        return str(self.folder.absolute())

    @property
    def verification(self) -> str:
        """Why what is read is not verified, in words; "" where it is."""
        return "" if self.files.is_verified else "not verified, as asked for"

    @property
    def identity(self) -> str:
        """A digest of what the data are, the same for copies of a folder; with checksums, of every byte of them."""
        facts = {key: value for key, value in self._values().items() if key not in ("rowmesh_version", "sources")}
        sums = {
            name: each.to_json() for name, each in self.files.checksums.items() if name.endswith((".arrow", ".npy"))
        }
        return xxhash.xxh3_128_hexdigest(json.dumps([facts, sums], sort_keys=True).encode())

    def _pin(self) -> None:
        others = [
            str(path(Path(), table.name))
            for path in (counts_path, vocabulary_path, bijection_path)
            for table in self.tables
            if self.schema.table_of(table.name) == table.name
        ]
        self.files.pin([split_file(split) for split in self.splits], others)

    def save(self) -> None:
        """Writes the metadata into the folder."""
        (self.folder / METADATA).write_text(json.dumps(self._values(), indent=1) + "\n", encoding="utf-8")

    def _values(self) -> dict[str, Any]:
        """The metadata as plain values."""
        values = {
            "format_version": FORMAT_VERSION,
            "rowmesh_version": self.rowmesh_version,
            "splits": {name: asdict(split) for name, split in self.splits.items()},
            "tables": [asdict(table) for table in self.tables],
            "min_count": self.min_count,
            "bad_rows": self.bad_rows,
            "block_samples": self.block_samples,
            "sources": self.sources,
            "schema": self.schema.model_dump(mode="json"),
        }
        if self.dense_scales is not None:
            values["dense_scales"] = [asdict(scale) for scale in self.dense_scales]
        if self.reordering is not None:
            values["reordering"] = self.reordering
        return values

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the categorical features."""
        return tuple(table.name for table in self.tables)

    @property
    def num_dense(self) -> int:
        """The number of dense features."""
        return len(self.schema.dense)

    def table(self, name: str) -> Table:
        """The table of a feature."""
        for table in self.tables:
            if table.name == name:
                return table
        raise DataError(f"{self.folder} has no feature {name!r}{hint(name, self.features)}")

    def table_of(self, feature: str) -> str:
        """The feature after which the table of a feature is named: itself, unless it shares another's."""
        return self.schema.table_of(feature)

    def split_path(self, split: str) -> Path:
        """The Arrow file of a split.

        Raises:
            DataError: there is no such split.
        """
        if split not in self.splits:
            raise DataError(
                f"{self.folder} has no split {split!r}, only: {', '.join(self.splits)}{hint(split, self.splits)}"
            )
        return self.folder / split_file(split)

    def counts(self, name: str) -> NDArray[np.int64]:
        """How often each row of a table occurs in the training split, in all features that share it: `[num_rows]`.

        Memory-mapped.

        Non-increasing up to the rare row, which is last and holds the sum of the rare ids, but for `unordered_rows`.

        Raises:
            DataError: the file is missing, damaged, of another table, or was replaced since the data set was opened.
        """
        table = self.table(self.schema.table_of(name))
        return self.files.array(str(counts_path(Path(), table.name)), np.int64, table.num_rows)

    def vocabulary(self, name: str) -> pa.Array:
        """The value of each row but the rare one, memory-mapped; null stands for missing.

        Raises:
            DataError: see `counts`.
        """
        table = self.table(self.schema.table_of(name))
        return self.files.column(str(vocabulary_path(Path(), table.name)), table.num_rows - 1)

    def unordered_rows(self, name: str) -> range:
        """The rows of a table that are in order of communities; all others but the rare row are by frequency."""
        facts = (self.reordering or {}).get("tables", {}).get(self.table(name).name)
        return range(facts["first"], facts["first"] + facts["num_ids"]) if facts else range(0)

    def bijection(self, name: str) -> Bijection:
        """From the frequency ranks of a table's ids to its rows, memory-mapped; the identity where both are the same.

        `bijection(name).ranks(rows)` is its inverse.

        Raises:
            DataError: the file is missing, damaged, of another table, or was replaced since the data set was opened.
        """
        rows = self.unordered_rows(name)
        if not rows:
            return Bijection()
        row_of_rank = self.files.array(str(bijection_path(Path(), name)), np.int32, len(rows))
        try:
            return Bijection(rows.start, row_of_rank)
        except DataError as error:
            raise DataError(f"{bijection_path(self.folder, name)}: {error}; reorder the data again") from error


def _scales(values: Sequence[Mapping[str, Any]] | None) -> tuple[DenseScale, ...] | None:
    return None if values is None else tuple(DenseScale(**each) for each in values)


def split_file(split: str) -> str:
    """The name of a split's file."""
    return f"{split}.arrow"


def counts_path(folder: Path, name: str) -> Path:
    """Where a table's counts lie."""
    return folder / "counts" / f"{_file_name(name)}.npy"


def vocabulary_path(folder: Path, name: str) -> Path:
    """Where a table's values lie."""
    return folder / "vocabulary" / f"{_file_name(name)}.arrow"


def write_vocabulary(path: Path, values: pa.Array) -> None:
    """Writes the values of a table's rows."""
    table = pa.table({"value": values})
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.combine_chunks())


def bijection_path(folder: Path, name: str) -> Path:
    """Where a table's rows by rank lie."""
    return folder / "bijection" / f"{_file_name(name)}.npy"


def _file_name(feature: str) -> str:
    """A feature's name with everything that is awkward in a file name escaped, injectively; long ones are shortened.

    >>> _file_name("C1"), _file_name("a/b")
    ('C1', 'a%2Fb')
    """
    return shortened("".join(c if c.isalnum() or c in "_-." else _escaped(c) for c in feature))


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _pinned_folder(folder: Path, verify: bool) -> PinnedFolder:
    try:
        return PinnedFolder(folder, verify=verify)
    except FileNotFoundError as error:
        raise _not_prepared(folder) from error
    except OSError as error:
        raise DataError(f"{folder}: cannot be opened as a prepared data set ({error.strerror})") from error


def _not_prepared(folder: Path) -> DataError:
    return DataError(
        f"{folder} holds no prepared data set ({METADATA} is missing); run: rowmesh data prepare INPUT --out {folder}"
    )


def arrow_schema(
    schema: Schema, multi_hot: Sequence[bool], ids: pa.DataType | None = None, dense: pa.DataType | None = None
) -> pa.Schema:
    """The columns of a split's Arrow file: the labels, the weight, dense features, categorical features.

    Args:
        schema: of the raw rows.
        multi_hot: which categorical features hold lists.
        ids: their type; default: int32, rows of tables.
        dense: the type of dense features; default: float32.
    """
    one = pa.int32() if ids is None else ids
    weight = () if schema.weight is None else (schema.weight,)
    numbers = dict.fromkeys((*schema.label_names, *weight), pa.float32())
    numbers |= dict.fromkeys(schema.dense, dense or pa.float32())
    fields = [pa.field(name, kind, nullable=False) for name, kind in numbers.items()]
    for name, is_list in zip(schema.features, multi_hot, strict=True):
        kind = pa.list_(one) if is_list else one
        fields.append(pa.field(name, kind, nullable=False))
    return pa.schema(fields)
