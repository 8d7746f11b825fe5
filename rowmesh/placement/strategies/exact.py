"""Optimal levels by integer programming: what the default strategy is measured against.

Rows that cost the same at every level and take the same memory are one group; 33.8 M rows of Criteo Kaggle are some
ten thousand groups. How many of each group are warm and hot is an integer program with one row of memory, which HiGHS
(scipy) solves to a gap that the plan's notes report. Dealing is as in `rowmesh.placement.strategies.dealt`.

Source: OPER §3.3 and Table 3 (a commercial solver over partitions, hours). Differs: over equal rows, not partitions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.dealt import deal_spans, describe
from rowmesh.placement.strategies.level_search import LevelSearch
from rowmesh.placement.strategies.levels import COLD, HOT, WARM, Choices, Levels, Steps
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

WANTED_GAP = 1e-7


def search(profile: Profile, topology: Topology, request: Request) -> Plan:
    """The plan with optimal levels, as far as `request.time_limit_s` allows.

    Notes hold `gap`, how far the solver's levels are above its bound, and `solver_s`.

    Raises:
        ConfigurationError: the rows do not fit, or no levels were found in time.
    """
    problem = Problem(profile, topology, request)
    found = LevelSearch.of(problem)
    program = _Program.of(found.choices, found.steps, request.time_limit_s)
    began = time.perf_counter()
    levels, spans = found.fitting(program.solve)
    notes = describe(problem, levels, spans) | {"gap": program.gap, "solver_s": time.perf_counter() - began}
    return problem.plan(deal_spans(problem, spans), "exact", notes)


@dataclass(eq=False)
class _Program:
    """Rows to be warm and hot of each group of equal rows: maximize what they save within the budget."""

    choices: Choices
    steps: Steps
    group: np.ndarray
    num_rows: np.ndarray
    saved: np.ndarray
    extra_bytes: np.ndarray
    time_limit_s: float
    gap: float = 0.0

    @staticmethod
    def of(choices: Choices, steps: Steps, time_limit_s: float) -> _Program:
        """Collects runs whose rows are alike."""
        alike = np.concatenate([choices.seconds, choices.extra_bytes]).T
        _, first, group = np.unique(alike, axis=0, return_index=True, return_inverse=True)
        saved = choices.seconds[COLD, first] - choices.seconds[[WARM, HOT]][:, first]
        saved = np.where(np.isfinite(saved), saved, 0.0)
        num_rows = np.bincount(group, choices.lengths).astype(np.int64)
        extra_bytes = choices.extra_bytes[[WARM, HOT]][:, first]
        return _Program(choices, steps, group, num_rows, saved, extra_bytes, time_limit_s)

    def solve(self, budget_bytes: int) -> Levels:
        """The best levels within a budget of bytes over all ranks."""
        useful = np.flatnonzero((self.saved > 0).any(axis=0))
        rows = np.zeros((2, len(self.num_rows)), np.int64)
        cold = float(self.choices.seconds[COLD] @ self.choices.lengths)
        bound = cold
        if len(useful) and budget_bytes > 0:
            rows[:, useful], most_saved = self._optimum(useful, budget_bytes)
            bound = cold - most_saved
        reached = cold - float((self.saved * rows).sum())
        self.gap = float((reached - bound) / reached) if reached > 0 else 0.0
        warm, hot = rows
        return Levels(self._first(hot), self._first(hot + warm), 0.0, bound)

    def _optimum(self, useful: np.ndarray, budget_bytes: int) -> tuple[np.ndarray, float]:
        """(rows [2, groups] to be warm and hot, the most that can be saved)."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix, eye, hstack, vstack

        num_rows, identity = self.num_rows[useful], eye(len(useful), format="csr")
        saved, extra = self.saved[:, useful].ravel(), self.extra_bytes[:, useful].ravel()
        pays = np.flatnonzero(saved > 0)
        # The solver's tolerances are absolute: what decides should be about 1.
        unit = extra[pays].min()
        scale = unit * (self.steps.take(budget_bytes, len(self.group)).multiplier or saved.max() / unit)
        limits: Any = np.concatenate([[budget_bytes / unit], num_rows])
        warm_too = bool(pays[0] < len(useful))
        most: Any = np.tile(num_rows, 2)[pays]
        matrix = vstack([csr_matrix(extra / unit), hstack([identity, identity])]).tocsc()[:, pays]
        result: Any = milp(
            -saved[pays] / scale, integrality=np.ones(len(pays)), bounds=Bounds(0, most),
            constraints=LinearConstraint(matrix, ub=limits),
            # With one constraint alone, HiGHS 1.12 does not come out of its presolve.
            options={"time_limit": self.time_limit_s, "mip_rel_gap": WANTED_GAP, "presolve": warm_too},
        )  # fmt: skip
        if result.x is None:
            raise ConfigurationError(
                f"strategy 'exact' found no levels of {len(useful):,} groups of rows in {self.time_limit_s:g} s "
                f"({result.message}); raise time_limit_s, or take strategy 'dealt'"
            )
        rows = np.zeros(len(saved), np.int64)
        rows[pays] = np.rint(result.x)
        return rows.reshape(2, -1), float(-result.mip_dual_bound * scale)

    def _first(self, rows: np.ndarray) -> np.ndarray:
        """[K], rows of each group given to its runs in order."""
        order = np.argsort(self.group, kind="stable")
        lengths = self.choices.lengths[order]
        before = np.cumsum(lengths) - lengths
        start_of_group = before[np.searchsorted(self.group[order], np.arange(len(rows)))]
        taken = np.clip(rows[self.group[order]] - (before - start_of_group[self.group[order]]), 0, lengths)
        result = np.zeros(len(order), np.int64)
        result[order] = taken
        return result
