"""Encoder: raw rows as a model sees them, by the readers, scales and ids of its training.

A row takes the way that it would take through `rowmesh data prepare` and the loader, but for the files between; of
raw data that of `rowmesh.data.raw`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmesh.data.codes import encode_block
from rowmesh.data.parquet import column_forms
from rowmesh.data.plain_columns import is_list, plain_type
from rowmesh.data.prepared import Prepared, Table, arrow_schema
from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.reader import Block, check_rows
from rowmesh.data.scales import DenseScale, scale_columns
from rowmesh.data.schema import Schema, ScoringSchema
from rowmesh.data.source import RawTable
from rowmesh.data.vocabulary import Vocabulary
from rowmesh.errors import DataError

VALUES = Path("the values")
"""The path that errors name for a table in memory."""


class EncodedData(Protocol):
    """The training data as an encoder reads them: `Prepared`, or `RawData`."""

    @property
    def schema(self) -> Schema: ...
    @property
    def features(self) -> tuple[str, ...]: ...
    @property
    def tables(self) -> tuple[Table, ...]: ...
    @property
    def dense_scales(self) -> Sequence[DenseScale] | None: ...


Encoding = Callable[[str, pa.Array], NDArray[np.integer]]
"""The ids, as batches have them, of raw values of a feature."""


class Encoder:
    """Maps the raw ids of checked rows to those of batches, and transforms their dense values.

    Args:
        data: of the training.
        encoding: of ids.
        kind: the type of ids in batches.

    Attributes:
        ids: how many ids were mapped, by feature.
        unseen: how many of them have no row of their own: they got the rare row, as they are rare in, or absent from,
            the training split; or a dynamic table does not know them, which its caller counts.
    """

    def __init__(self, data: EncodedData, encoding: Encoding, kind: pa.DataType | None = None) -> None:
        self.data, self._encoding = data, encoding
        self.ids: Counter[str] = Counter(dict.fromkeys(data.features, 0))
        self.unseen: Counter[str] = Counter(dict.fromkeys(data.features, 0))
        self._multi_hot = [table.multi_hot for table in data.tables]
        self._kinds = arrow_schema(data.schema, self._multi_hot, kind)

    def encode(self, block: Block) -> pa.RecordBatch:
        """The rows as a split's file has them: missing dense values are 0; labels are NaN where none were read.

        Raises:
            DataError: a column holds text where the training had integers.
        """
        encodings = [partial(self._encode, name) for name in self.data.features]
        columns = encode_block(block, self._multi_hot, encodings)
        dense = scale_columns(block.dense.T, self.data.dense_scales)  # the labels keep their NaN
        first = self.data.schema.num_targets
        columns[first : first + len(dense)] = [pa.array(values) for values in dense]
        kinds = self._kinds.types
        arrays = [column.cast(kind) for column, kind in zip(columns, kinds, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._kinds)

    def _encode(self, name: str, values: pa.Array) -> NDArray[np.integer]:
        self.ids[name] += len(values)
        return self._encoding(name, values)

    def check_forms(self, path: Path, schema: ScoringSchema, types: pa.Schema) -> None:
        """Raises DataError where a column is missing, of no use, or holds lists where the training had single ids.

        And so for single ids where it had lists.

        Args:
            path: where the columns are, for the message.
            schema: what is read of them.
            types: their types.
        """
        forms = column_forms(path, schema, types)
        for table, feature, (has_lists, _) in zip(self.data.tables, schema.categorical, forms, strict=True):
            if has_lists is not None and has_lists != table.multi_hot:
                found, trained = ("lists", "single ids") if has_lists else ("single ids", "lists")
                raise DataError(
                    f"{path}: column {feature.source!r} holds {found}, and in training it held {trained}; "
                    "give it as in training"
                )

    def check_table(self, table: pa.Table, schema: ScoringSchema) -> Block:
        """The rows of a table in memory, all of them; multi-hot ids are lists, or text as in the files.

        Raises:
            DataError: a column is missing or of no use, or a value is none that the preparation takes; names row and
                column.
        """
        kinds = {name: plain_type(table.schema.field(name).type) for name in table.column_names}
        categorical = tuple(
            feature.model_copy(update={"separator": None}) if is_list(kinds.get(feature.source, pa.null())) else feature
            for feature in schema.categorical
        )
        plain = schema.model_copy(update={"format": "parquet", "categorical": categorical})
        self.check_forms(VALUES, plain, table.schema)
        lines = np.arange(1, table.num_rows + 1)
        raw = RawTable(table.select(list(plain.source_columns)), lines, lambda row: "", table.num_rows)
        return check_rows(raw, VALUES, plain, NoBadRows())


def prepared_encoder(prepared: Prepared) -> Encoder:
    """Maps raw ids to the rows of tables.

    Holds all vocabularies: the bytes of their values, up to twice, and 24 to 48 bytes a value.

    Args:
        prepared: the data whose vocabularies and scales are used.

    Raises:
        DataError: a vocabulary is missing or damaged.
    """
    vocabularies: dict[str, Vocabulary] = {}
    for name in prepared.features:
        table = prepared.schema.table_of(name)
        if (vocabulary := vocabularies.get(table)) is None:
            vocabulary = vocabularies[table] = Vocabulary(table)
            vocabulary.encode(prepared.vocabulary(table))
        if len(vocabulary) != prepared.table(name).rare_row:
            raise DataError(f"{prepared.folder}: the vocabulary of {name!r} has a value twice; prepare the data again")

    def encode(name: str, values: pa.Array) -> NDArray[np.int32]:
        rows = vocabularies[prepared.schema.table_of(name)].find(values)
        is_unseen = rows < 0
        rows[is_unseen] = prepared.table(name).rare_row
        unseen[name] += int(is_unseen.sum())
        return rows

    encoder = Encoder(prepared, encode)
    unseen = encoder.unseen  # the encoder itself would be part of a cycle, and its vocabularies stay for a while
    return encoder


def rebatched(batches: Sequence[pa.RecordBatch], size: int) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Record batches of `size` rows each, and what is left at the end, less than `size` rows of it."""
    total = sum(batch.num_rows for batch in batches)
    if total < size:
        return [], list(batches)
    joined = pa.concat_batches(batches)
    full = total // size
    rest = joined.slice(full * size)
    return [joined.slice(i * size, size) for i in range(full)], [rest] if rest.num_rows else []
