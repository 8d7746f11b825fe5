"""Raw rows to be scored, with the ids that they have in training on raw rows."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from rowmesh.data.encoder import Encoder
from rowmesh.data.loader import Batch
from rowmesh.data.raw.data_set import RawData
from rowmesh.data.raw.ids import ids_of
from rowmesh.errors import DataError
from rowmesh.sparse import SparseBatch


def raw_encoder(data: RawData) -> Encoder:
    """Maps raw values to ids of 64 bits, as `ids_of` does.

    Text files hold text alone: integers are taken as the digits that such a file has of them, but for those that are
    derived, which are integers in training too.
    """
    is_text = data.schema.format == "text"
    as_read = {feature.name for feature in data.schema.categorical if feature.derive is None}
    known = zip(data.features, data.forms.forms, strict=True)
    by_table = {data.table_of(name): kind for name, (_, kind) in known if name in as_read and kind is not None}
    kinds = {name: by_table.get(data.table_of(name)) for name in as_read}

    def encode(name: str, values: pa.Array) -> NDArray[np.int64]:
        found = "integers" if pa.types.is_integer(values.type) else "text"
        if is_text and name in as_read and found == "integers":
            values = values.cast(pa.string())
        elif not pa.types.is_null(values.type) and kinds.get(name) not in (None, found):
            raise DataError(
                f"feature {name!r} holds {found}, and in training it held {kinds[name]}, which have other ids; give it "
                "as in training"
            )
        return ids_of(values, data.hash_seed)

    return Encoder(data, encode, pa.int64())


def raw_batch(samples: pa.RecordBatch, data: RawData) -> Batch:
    """The batch of all samples of a record batch that `raw_encoder`'s encoder made, without labels and weights."""
    first, count = data.schema.num_targets, samples.num_rows
    dense = np.empty((count, data.num_dense), np.float32)
    for number in range(data.num_dense):
        dense[:, number] = samples.column(first + number).to_numpy()
    columns = [[column] for column in samples.columns[first + data.num_dense :]]
    sparse = sparse_of(data.features, columns, count, is_jagged=any(data.multi_hot))
    return Batch(torch.from_numpy(dense), sparse, torch.empty(count), None)


def sparse_of(
    features: Sequence[str], columns: Sequence[Sequence[pa.Array]], num_samples: int, *, is_jagged: bool
) -> SparseBatch:
    """A batch of ids from Arrow columns.

    Args:
        features: names, in the order of the columns.
        columns: of each feature chunks of int64, or of lists of int64.
        num_samples: B.
        is_jagged: whether any feature has lists.

    Raises:
        DataError: one has lists where none should.
    """
    ids: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    lengths: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    for name, chunk in ((name, chunk) for name, chunks in zip(features, columns, strict=True) for chunk in chunks):
        if pa.types.is_nested(chunk.type):
            if not is_jagged:
                raise DataError(f"feature {name!r} has lists of ids, and no feature was said to have any")
            lengths.append(pc.list_value_length(chunk).to_numpy().astype(np.int64))
            ids.append(chunk.flatten().to_numpy())
        else:
            lengths.append(np.ones(len(chunk), np.int64))
            ids.append(chunk.to_numpy())
    flat = torch.from_numpy(np.concatenate(ids))
    if not is_jagged:
        return SparseBatch.from_dense(tuple(features), flat.view(len(features), num_samples))
    offsets = torch.from_numpy(np.concatenate(lengths).cumsum())
    return SparseBatch(tuple(features), flat, num_samples, jagged_offsets=offsets)
