"""Unseen accesses: what rows that were seldom counted are really read.

A row that was counted once was, more often than not, lucky, and one that was never counted will be read. Where counts
are the draws of a finite sample, rows that were counted c times are read

    (c + 1) · N_{c+1} / N_c

times in another sample as large, on average, with N_c the rows that were counted c times (Good–Turing). A plan for the
slowest link, which weighs what copies serve against what is left to fetch, is off by as much as these rows move.

Source: Good, "The population frequencies of species and the estimation of population parameters", Biometrika 1953.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rowmesh.placement.profile import Profile, TableProfile

MOST_COUNTED = 10
FEWEST_ROWS = 30


def smoothed(profile: Profile, *, rare_rows: bool = False) -> Profile:
    """The profile with the expected accesses of seldom read rows instead of their counts.

    Rows counted up to 10 times change, where at least 30 rows were counted as often and 30 once more, and the batches
    that contain them in proportion; tables whose counts are means or out of order stay as they are.

    Args:
        profile: whose counts are of some samples.
        rare_rows: the last row of every table stands for all rare ids, also those that were never met, as in prepared
            data: it is read as much more often as the others are read less.

    Example:
        >>> from rowmesh.placement import TableShape
        >>> shape = TableShape("item", 15_000, value_bytes=64, gradient_bytes=64)
        >>> counts = np.repeat([2, 1, 0], [1_000, 4_000, 10_000])
        >>> profile = Profile.from_counts({"item": counts}, [shape], num_samples=6_000)
        >>> smoothed(profile).tables[0].accesses.tolist()
        [2.0, 0.5, 0.4]
    """
    return replace(profile, tables=tuple(_smoothed(table, profile.num_batches, rare_rows) for table in profile.tables))


def _smoothed(table: TableProfile, num_batches: int, rare_row: bool) -> TableProfile:
    table = _with_last_row_apart(table) if rare_row else table
    counts = table.accesses
    # The last row may stand for all rare ids, and be read often.
    falls = bool(np.all(np.diff(counts[:-1]) <= 0))
    if not falls or not np.array_equal(counts, np.rint(counts)):
        return table
    accesses = _expected(table)
    if rare_row:
        accesses[-1] = counts[-1]
        accesses[-1] += max(float((counts - accesses) @ table.lengths), 0.0)
    if table.batches is None:
        return replace(table, accesses=accesses)
    with np.errstate(invalid="ignore"):
        share = np.where(counts > 0, table.batches / counts, 1.0)
    return replace(table, accesses=accesses, batches=np.minimum(share * accesses, num_batches))


def _expected(table: TableProfile) -> np.ndarray:
    """[K], of each run."""
    counts = table.accesses
    rows = np.zeros(MOST_COUNTED + 2)
    seldom = np.flatnonzero(counts <= MOST_COUNTED + 1)
    np.add.at(rows, counts[seldom].astype(int), table.lengths[seldom])
    known = np.flatnonzero((rows[1:] >= FEWEST_ROWS) & (rows[:-1] >= FEWEST_ROWS))
    expected = np.arange(MOST_COUNTED + 2, dtype=np.float64)
    expected[known] = (known + 1) * rows[known + 1] / rows[known]
    expected = np.maximum.accumulate(np.minimum(expected, MOST_COUNTED + 1.0))
    accesses = counts.copy()
    accesses[seldom] = expected[counts[seldom].astype(int)]
    return accesses


def _with_last_row_apart(table: TableProfile) -> TableProfile:
    """The profile with a run for the last row alone."""
    if table.lengths[-1] == 1:
        return table
    lengths = np.append(table.lengths, 1)
    lengths[-2] -= 1
    columns: dict[str, Any] = {name: np.append(values, values[-1]) for name, values in table.columns.items()}
    return replace(table, lengths=lengths, **columns)
