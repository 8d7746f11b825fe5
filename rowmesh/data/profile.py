"""The profile of a data set: how often each row of each table is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rowmesh.data.loader import Loader
from rowmesh.data.prepared import Prepared
from rowmesh.placement.batches import BatchCounter
from rowmesh.placement.plan import TableShape
from rowmesh.placement.profile import Profile, TableProfile


def profile_prepared(
    data: str | Path | Prepared,
    shapes: Sequence[TableShape],
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
) -> Profile:
    """The profile of a prepared data set's training split, from its counts, which are memory-mapped.

    The last row of a table stands for all rare ids: counts fall up to it, and it may be among the most read. Where
    data are reordered, rows that are in order of communities are about a thousand runs with mean counts.

    Args:
        data: what `rowmesh data prepare` wrote.
        shapes: of the tables, named after their features; features without one are left out.
        batch_size: samples of a rank's batch. Given, all batches are read once, and how many contain a row is
            counted; memory is needed for one window of the loader. A smaller last batch is left out, and the
            others stand for its samples.
        shuffle: whether batches are those of a shuffled epoch, as in training.
        seed: of the shuffle.

    Raises:
        ConfigurationError: a table has another number of rows than the data.
        DataError: not a prepared folder, or it has no such feature.
    """
    prepared = Prepared.open(data) if isinstance(data, str | Path) else data
    tables = [_profile_table(prepared, shape) for shape in shapes]
    num_samples = prepared.splits["train"].samples
    if batch_size is None:
        return Profile(tuple(tables), num_samples)
    counters = {table.name: BatchCounter(table.name, table.starts) for table in tables}
    loader = Loader(
        prepared, "train", batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=num_samples > batch_size
    )
    for batch in loader:
        ids, found = batch.sparse.ids.numpy(), {name: [] for name in counters}
        for feature, name in enumerate(batch.sparse.features):
            if (table := prepared.schema.table_of(name)) in counters:  # which several features may share
                found[table].append(slice(*batch.sparse.feature_range(feature)))
        for table, parts in found.items():
            counters[table].add(np.concatenate([ids[part] for part in parts]))
    scale = max(num_samples / batch_size, 1.0) / loader.num_batches
    counted = tuple(replace(t, batches=counters[t.name].pairs / t.lengths * scale) for t in tables)
    return Profile(counted, num_samples, batch_size)


def _profile_table(prepared: Prepared, shape: TableShape) -> TableProfile:
    """The counts of a table, and which bags its features have."""
    readers = [table for table in prepared.tables if prepared.schema.table_of(table.name) == shape.name]
    table = TableProfile.of_counts(shape, prepared.counts(shape.name), unordered=prepared.unordered_rows(shape.name))
    return replace(table, num_features=len(readers), num_jagged=sum(each.multi_hot for each in readers))
