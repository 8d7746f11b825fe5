"""Layout: where each feature's ids are in a batch and where its vectors go in the output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rowmesh._support.suggest import nearest
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.ops.pool import DESCRIPTOR
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.sparse import SparseBatch
from rowmesh.tables.group import TableGroup

MAX_CELLS = 2**32


class Layouts:
    """Makes layouts; those of batches with equal bags depend on shapes alone and are made once.

    Args:
        groups: the fused groups.
        columns: feature → first column of its vector in the pooled output.
        width: columns of the pooled output.
    """

    def __init__(self, groups: Sequence[TableGroup], columns: dict[str, int], width: int) -> None:
        self._groups = groups
        self._columns = columns
        self._width = width
        self._known = {feature for group in groups for feature in group.features}
        self._cache: dict[tuple[object, ...], list[GroupLayout]] = {}

    def __call__(self, batch: SparseBatch) -> list[GroupLayout]:
        """The layout of each group.

        Raises:
            DataError: a feature is missing from the batch, or belongs to no table.
        """
        if batch.bag_size is None:
            return self._make(batch)
        key = (batch.features, batch.batch_size, batch.bag_size, batch.weights is None)
        if (layouts := self._cache.get(key)) is None:  # another thread may empty it after any other question
            if len(self._cache) > 64:  # shapes that never repeat would pile up
                self._cache.clear()
            self._cache[key] = layouts = self._make(batch)
        return layouts

    def parts(
        self, batch: SparseBatch, layouts: Sequence[GroupLayout], bounds: Sequence[int]
    ) -> list[list[GroupLayout]]:
        """The layouts of runs of samples, for each group: ids stay where they are, outputs begin anew.

        Args:
            batch: whose layouts are given.
            layouts: of the whole batch.
            bounds: the first sample of every run, and B.
        """
        ends = self._ids_before(batch, np.array(bounds))
        place = {name: i for i, name in enumerate(batch.features)}
        pairs = zip(self._groups, layouts, strict=True)
        return [
            self._cut(group, layout, ends[[place[name] for name in group.features]], bounds) for group, layout in pairs
        ]

    def _ids_before(self, batch: SparseBatch, samples: np.ndarray) -> np.ndarray:
        """int64 `[F, samples]`: where the ids of each sample begin, of every feature of the batch."""
        bags = np.arange(len(batch.features))[:, None] * batch.batch_size + samples
        return bags * batch.bag_size if batch.bag_size is not None else batch.offsets.numpy()[bags]

    def _cut(
        self, group: TableGroup, layout: GroupLayout, ends: np.ndarray, bounds: Sequence[int]
    ) -> list[GroupLayout]:
        cut = []
        for k, (first, last) in enumerate(pairwise(bounds)):
            features = layout.features.copy()
            features[:, 0], features[:, 1] = ends[:, k], ends[:, k + 1]
            lengths = ends[:, k + 1] - ends[:, k]
            if group.is_sequence:
                features[:, 4], features[:, 5] = lengths, (np.cumsum(lengths) - lengths) * group.dim
            else:
                features[:, 4] = last - first
                features[:, 2] += 8 * first * (features[:, 2] != 0)
            cut.append(GroupLayout(features, int(lengths.sum()), layout.is_weighted))
        return cut

    def _make(self, batch: SparseBatch) -> list[GroupLayout]:
        self.check(batch)
        num_bags, size = batch.batch_size, batch.bag_size
        if size is not None:
            bounds = np.arange(len(batch.features) + 1) * (num_bags * size)
            address = 0
        else:
            offsets = batch.offsets
            bounds = offsets.numpy()[:: max(num_bags, 1)][: len(batch.features) + 1]
            if num_bags == 0:
                bounds = np.zeros(len(batch.features) + 1, np.int64)
            address = offsets.data_ptr()
        place = {name: i for i, name in enumerate(batch.features)}
        return [self._layout(group, batch, place, bounds, address) for group in self._groups]

    def _layout(
        self, group: TableGroup, batch: SparseBatch, place: dict[str, int], bounds: np.ndarray, address: int
    ) -> GroupLayout:
        rows, total = [], 0
        for table in group.tables:
            for name in table.features:
                i = place[name]
                begin, end = int(bounds[i]), int(bounds[i + 1])
                mean = int(table.pooling == "mean")
                if group.is_sequence:
                    rows.append((begin, end, 0, 1, end - begin, total * group.dim, group.dim, 0))
                else:
                    offsets = address + 8 * i * batch.batch_size if address else 0
                    size = batch.bag_size or 0
                    column = self._columns[name]
                    rows.append((begin, end, offsets, size, batch.batch_size, column, self._width, mean))
                total += end - begin
        features = np.array(rows, np.int64).reshape(-1, DESCRIPTOR)
        self._check_size(group, batch.batch_size, total)
        several = batch.bag_size != 1
        is_weighted = batch.weights is not None or bool(several and features[:, 7].any())
        return GroupLayout(features, total, is_weighted)

    def _check_size(self, group: TableGroup, batch_size: int, num_ids: int) -> None:
        count, what, each = batch_size, "samples", self._width
        if group.is_sequence:
            count, what, each = num_ids, f"ids of features {list(group.features)}", group.dim
        if count * each >= MAX_CELLS:
            most = (MAX_CELLS - 1) // each
            raise ConfigurationError(
                f"group {group.name}: {count:,} {what} with {each:,} elements each make an output of {count * each:,} "
                f"elements, and fewer than {MAX_CELLS:,} are possible; use batches of at most {most:,} {what}"
            )

    def check(self, batch: SparseBatch) -> None:
        """Raises DataError where a feature is missing from the batch, or belongs to no table."""
        present = set(batch.features)
        if missing := sorted(self._known - present):
            near = nearest(missing[0], batch.features)
            hint = f" (did you mean {near!r} in the batch?)" if near else ""
            raise DataError(
                f"the batch lacks features {missing}{hint}; it has {sorted(present)}; to look up only what "
                "it has, give features=[…]"
            )
        if extra := sorted(present - self._known):
            near = nearest(extra[0], sorted(self._known))
            hint = f" (the nearest is {near!r}, which the batch has too)" if near else ""
            raise DataError(
                f"features {extra} of the batch belong to no table{hint}; leave them out of the batch, or add them to "
                f"a table's features"
            )
