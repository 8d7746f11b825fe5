"""Order: which row each id of a table gets, and whether that is better than the order of frequency."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rowmesh.data.bijection import Bijection
from rowmesh.data.prepared import Prepared, Table
from rowmesh.data.progress import Progress, silent
from rowmesh.data.reorder.communities import Graph
from rowmesh.data.reorder.edges import draw_edges
from rowmesh.data.reorder.groups import Column, count_prefixes
from rowmesh.data.reorder.options import ReorderOptions

RESOLUTIONS = (1.0, 10.0, 100.0)
LEAST_GAIN = 0.02
LEAST_HELD_OUT = 4
STANDARD_ERRORS = 3


@dataclass(frozen=True, kw_only=True)
class TableOrder:
    """The outcome of the search for a better order of one table.

    Attributes:
        bijection: from ranks to rows; the identity where no order was better than that of frequency.
        num_edges: pairs of ids that were looked at.
        communities: how many of several ids were found, 0 where the order stays.
        resolution: of the communities, 0 where the order stays.
        prefix_rows: so many consecutive rows share a prefix.
        held_out_batches: how many batches judged the orders.
        prefixes_before: distinct prefixes that such a batch reads in order of frequency.
        prefixes_after: the same in the order that was taken.
        elapsed_s: how long it took.
    """

    bijection: Bijection = field(default_factory=Bijection)
    num_edges: int = 0
    communities: int = 0
    resolution: float = 0.0
    prefix_rows: int
    held_out_batches: int
    prefixes_before: float
    prefixes_after: float
    elapsed_s: float


def find_order(data: Prepared, table: Table, options: ReorderOptions, progress: Progress = silent) -> TableOrder:
    """The order in which held out batches read the fewest prefixes: by frequency, or by communities of three sizes.

    That of frequency stays where none reads 2 % fewer, beyond chance, or there are fewer than 40 batches to judge by.

    Args:
        data: in order of frequency.
        table: one of its tables.
        options: see there.
        progress: receives how far it is.
    """
    started = time.perf_counter()
    column, span = Column(data, table, options.batch_size), options.span(table.num_rows)
    prefix_rows, held_out = options.rows_of_a_prefix(table.num_rows), column.held_out()
    before = count_prefixes(held_out, prefix_rows)
    best, best_after, communities, resolution, num_edges = Bijection(), before, 0, 0.0, 0
    if len(held_out) >= LEAST_HELD_OUT and len(span):
        edges = draw_edges(column, span, options.max_edges, options.seed, progress)
        counts = data.counts(table.name)[span.start : span.stop]
        graph, num_edges = Graph(edges, len(span)), len(edges)
        del edges
        for done, candidate in enumerate(RESOLUTIONS, start=1):
            labels = graph.communities(candidate)
            bijection = Bijection(span.start, rows_by_community(labels, counts, span.start))
            after = count_prefixes([bijection.rows(ids) for ids in held_out], prefix_rows)
            if is_better(before, after) and after.sum() < best_after.sum():
                communities = int((np.bincount(labels) > 1).sum())
                best, best_after, resolution = bijection, after, candidate
            progress(f"communities of {table.name}", done / len(RESOLUTIONS))
    return TableOrder(
        bijection=best,
        num_edges=num_edges,
        communities=communities,
        resolution=resolution,
        prefix_rows=prefix_rows,
        held_out_batches=len(held_out),
        prefixes_before=float(before.sum() / max(len(before), 1)),
        prefixes_after=float(best_after.sum() / max(len(before), 1)),
        elapsed_s=time.perf_counter() - started,
    )


def is_better(before: NDArray[np.int64], after: NDArray[np.int64]) -> bool:
    """Whether the same batches read 2 % fewer prefixes after than before, and chance does not explain it.

    >>> is_better(np.array([50, 60, 55, 58]), np.array([40, 49, 44, 48]))
    True
    >>> is_better(np.array([50, 60, 55, 58]), np.array([30, 69, 40, 60]))  # fewer, but not in all
    False
    """
    fewer = before - after
    error = fewer.std(ddof=1) / len(fewer) ** 0.5
    return bool(fewer.mean() >= max(LEAST_GAIN * before.mean(), STANDARD_ERRORS * error))


def rows_by_community(labels: NDArray[np.int64], counts: NDArray[np.int64], first: int) -> NDArray[np.int32]:
    """The row of each id: communities by their mean count, falling; in each, ids as they were, which is by frequency.

    Args:
        labels: the community of each id of a span.
        counts: of the ids.
        first: the first row of the span.

    Example:
        >>> rows_by_community(np.array([0, 1, 0, 1]), np.array([9, 8, 2, 5]), first=10).tolist()
        [12, 10, 13, 11]
    """
    sizes = np.maximum(np.bincount(labels), 1)
    means = np.bincount(labels, counts) / sizes
    order = np.lexsort((labels, -means[labels]))
    rows = np.empty(len(labels), np.int32)
    rows[order] = np.arange(first, first + len(labels), dtype=np.int32)
    return rows
