"""What dynamic tables know, by the rules in plain Python: where these say so, a row of the reference begins anew.

The ids are the rows of a dense table that stands in for the dynamic one, see `Scenario.dynamic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rowmesh.tables.dynamic.reference import ReferenceShards
from tests.support.scenario import Scenario


class Restartable(Protocol):
    """A table of the reference."""

    def begin_anew(self, rows: np.ndarray) -> None:
        """Sets rows and their states to what they start from, and drops their gradients."""
        ...


class KnownIds:
    """What the dynamic tables of a job know.

    Args:
        scenario: the job.
        tables: name → its reference.
    """

    def __init__(self, scenario: Scenario, tables: Mapping[str, Restartable]) -> None:
        self._scenario, self._num_opened = scenario, 0
        frozen = {table.name for table in scenario.tables if table.frozen}
        self._tables = {name: tables[name] for name, _ in scenario.dynamic}
        self._rules = {
            name: ReferenceShards(name, rules, range(rules.num_shards), rules.capacity + 1000)
            for name, rules in scenario.dynamic
            if name not in frozen  # of which look-ups decide nothing
        }

    def open(self, step: int, part: int) -> None:
        """Decides what a look-up with gradients admits and evicts."""
        self._num_opened += 1
        for name, rules in self._rules.items():
            found = np.array(self._scenario.ids_of(name, step, part), np.int64)
            ids, counts = np.unique(found, return_counts=True)
            opened = rules.open(ids, counts, self._num_opened)
            rules.release(np.concatenate([opened.evicted_frames, opened.frames[opened.guest]]))
            self._begin_anew(name, ids[opened.fresh])

    def forget_unknown(self) -> None:
        """Has rows of ids that are not known, nor demoted, be what a look-up without gradients reads."""
        for name, rules in self._rules.items():
            rows = np.arange(next(table.num_rows for table in self._scenario.tables if table.name == name))
            self._begin_anew(name, rows[~rules.statistics(rows).known])

    def _begin_anew(self, name: str, rows: np.ndarray) -> None:
        self._tables[name].begin_anew(rows)
