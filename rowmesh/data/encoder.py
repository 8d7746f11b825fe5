"""Encoder: raw rows as a model sees them, by the readers, scales and vocabularies of the preparation.

A row takes the way that it would take through `rowmesh data prepare` and the loader, but for the files between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmesh.data.codes import encode_block
from rowmesh.data.parquet import column_forms, is_list
from rowmesh.data.prepared import Prepared, arrow_schema
from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.reader import Block, check_rows
from rowmesh.data.scales import scale_columns
from rowmesh.data.schema import ScoringSchema
from rowmesh.data.source import RawTable
from rowmesh.data.vocabulary import Vocabulary
from rowmesh.errors import DataError

VALUES = Path("the values")
"""What errors call a table in memory."""


class Encoder:
    """Maps the raw ids of checked rows to the rows of tables, and scales their dense values.

    Holds all vocabularies: the bytes of their values, up to twice, and 24 to 48 bytes a value.

    Args:
        prepared: the data whose vocabularies and scales are used.

    Attributes:
        ids: how many ids were mapped, by feature.
        unseen: how many of them have no row of their own and got the rare row: they are rare in, or absent from, the
            training split.

    Raises:
        DataError: a vocabulary is missing or damaged.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.ids: Counter[str] = Counter(dict.fromkeys(prepared.features, 0))
        self.unseen: Counter[str] = Counter(dict.fromkeys(prepared.features, 0))
        self._multi_hot = [table.multi_hot for table in prepared.tables]
        self._kinds = arrow_schema(prepared.schema, self._multi_hot)
        self._vocabularies: dict[str, Vocabulary] = {}
        self._encodings = [self._encoding(name) for name in prepared.features]

    def encode(self, block: Block) -> pa.RecordBatch:
        """The rows as a split's file has them: missing dense values are 0; labels are NaN where none were read.

        Raises:
            DataError: a column holds text where the training had integers.
        """
        columns = encode_block(block, self._multi_hot, self._encodings)
        dense = scale_columns(block.dense.T, self.prepared.dense_scales)  # the labels keep their NaN
        first = self.prepared.schema.num_targets
        columns[first : first + len(dense)] = [pa.array(values) for values in dense]
        kinds = self._kinds.types
        arrays = [column.cast(kind) for column, kind in zip(columns, kinds, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._kinds)

    def check_forms(self, path: Path, schema: ScoringSchema, types: pa.Schema) -> None:
        """Raises DataError where a column is missing, of no use, or holds lists where the training had single ids.

        And so for single ids where it had lists.

        Args:
            path: where the columns are, for the message.
            schema: what is read of them.
            types: their types.
        """
        forms = column_forms(path, schema, types)
        for table, feature, (has_lists, _) in zip(self.prepared.tables, schema.categorical, forms, strict=True):
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
        kinds = {name: table.schema.field(name).type for name in table.column_names}
        categorical = tuple(
            feature.model_copy(update={"separator": None}) if is_list(kinds.get(feature.source, pa.null())) else feature
            for feature in schema.categorical
        )
        plain = schema.model_copy(update={"format": "parquet", "categorical": categorical})
        self.check_forms(VALUES, plain, table.schema)
        lines = np.arange(1, table.num_rows + 1)
        raw = RawTable(table.select(list(plain.source_columns)), lines, lambda row: "", table.num_rows)
        return check_rows(raw, VALUES, plain, NoBadRows())

    def _encoding(self, name: str) -> Callable[[pa.Array], NDArray[np.int32]]:
        rare_row, table = self.prepared.table(name).rare_row, self.prepared.schema.table_of(name)
        if (vocabulary := self._vocabularies.get(table)) is None:
            vocabulary = self._vocabularies[table] = Vocabulary(table)
            vocabulary.encode(self.prepared.vocabulary(table))
        if len(vocabulary) != rare_row:
            raise DataError(
                f"{self.prepared.folder}: the vocabulary of {name!r} has a value twice; prepare the data again"
            )

        def encode(ids: pa.Array) -> NDArray[np.int32]:
            rows = vocabulary.find(ids)
            unseen = rows < 0
            rows[unseen] = rare_row
            self.ids[name] += len(rows)
            self.unseen[name] += int(unseen.sum())
            return rows

        return encode


def rebatched(batches: Sequence[pa.RecordBatch], size: int) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Record batches of `size` rows each, and what is left at the end, less than `size` rows of it."""
    total = sum(batch.num_rows for batch in batches)
    if total < size:
        return [], list(batches)
    joined = pa.concat_batches(batches)
    full = total // size
    rest = joined.slice(full * size)
    return [joined.slice(i * size, size) for i in range(full)], [rest] if rest.num_rows else []
