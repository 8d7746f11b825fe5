"""Optimal levels by integer programming: what the default strategy is measured against.

The linear program's multiplier λ prices memory: a row at a level costs seconds + λ · extra bytes, and its best level is
the cheapest. The levels of the default strategy are above the program's optimum by some gap, and a row cannot deviate
from its best level in an optimal plan where that alone costs more than the gap. So of 33.8 M rows of Criteo Kaggle, or
242 M of Terabyte, few are open, and HiGHS (scipy) decides on those. Owners are as in
`rowmesh.placement.strategies.cyclic`.

Source: OPER §3.3 and Table 3 (a commercial solver over partitions, hours). Differs: over runs of equal rows, not
partitions; fixing by reduced costs is textbook (Wolsey, Integer Programming, §7.6).
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from rowmesh._support import extras
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.cyclic import describe, fit
from rowmesh.placement.strategies.level_search import LevelSearch
from rowmesh.placement.strategies.levels import COLD, HOT, WARM, Choices, Levels, Steps
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

SOLVER_GAP = 1e-6  # of what is left open, which is far less than the whole
ROUNDING = 1e-12


def search(profile: Profile, topology: Topology, request: Request) -> Plan:
    """The plan with optimal levels, as far as `request.time_limit_s` allows.

    Notes hold `bound`, below which no levels come, `gap`, how far the levels may be above the optimum for as many bytes
    as whole rows on whole ranks can use, and `solver_s`. Where time runs out before the solver has levels, they are
    those of the default strategy, and the gap is to the linear program.

    Raises:
        ConfigurationError: the rows do not fit.
    """
    problem = Problem(profile, topology, request)
    found = LevelSearch.of(problem)
    began, bounds = time.perf_counter(), []

    def solve(budget_bytes: int) -> Levels:
        left_s = request.time_limit_s - (time.perf_counter() - began)
        levels = optimal(found.choices, found.steps, budget_bytes, left_s)
        bounds.append(levels.bound_seconds)
        return levels

    levels, spans, ranges = fit(problem, found, solve)
    solver_s = time.perf_counter() - began
    notes = describe(found, levels, spans)
    if notes["bound"] is not None:
        notes["bound"] = bounds[0]
    notes |= {"gap": gap(found.choices, levels), "solver_s": solver_s}
    return problem.plan(ranges, "exact", notes)


def optimal(choices: Choices, steps: Steps, budget_bytes: int, time_limit_s: float) -> Levels:
    """The best levels within a budget of bytes over all ranks, with the best bound that was found."""
    quick = steps.take(budget_bytes, len(choices.lengths))
    above = seconds_of(choices, quick) - quick.bound_seconds
    if above <= ROUNDING * quick.bound_seconds or time_limit_s <= 0:
        return quick
    priced = choices.seconds + quick.multiplier * choices.extra_bytes
    best = priced.argmin(axis=0)
    more = priced - np.take_along_axis(priced, best[None], axis=0)
    level, run = np.nonzero((more <= above) & (np.arange(3)[:, None] != best))
    if not len(run):
        return quick
    num_rows = choices.lengths[run]
    with np.errstate(divide="ignore"):
        most = np.minimum(num_rows, np.floor(above / more[level, run] * (1 + 1e-9)))
    used = choices.extra_bytes[best, np.arange(len(best))]
    rows, bound = _deviations(
        choices.seconds[level, run] - choices.seconds[best[run], run],
        choices.extra_bytes[level, run] - used[run],
        run,
        num_rows,
        most,
        budget_bytes - float(used @ choices.lengths),
        above,
        time_limit_s,
    )
    everywhere_best = float((priced.min(axis=0) - quick.multiplier * used) @ choices.lengths)
    bound = max(quick.bound_seconds, everywhere_best + bound)
    if rows is None:
        return replace(quick, bound_seconds=bound)
    counts = (best == np.arange(3)[:, None]) * choices.lengths
    np.add.at(counts, (level, run), rows)
    np.subtract.at(counts, (best[run], run), rows)
    solved = Levels(counts[HOT], counts[HOT] + counts[WARM], quick.multiplier, bound)
    return min(solved, replace(quick, bound_seconds=bound), key=lambda levels: seconds_of(choices, levels))


def seconds_of(choices: Choices, levels: Levels) -> float:
    """Seconds that levels cost in a step."""
    rows = np.zeros(choices.seconds.shape)
    rows[HOT], rows[WARM], rows[COLD] = levels.hot, levels.copied - levels.hot, choices.lengths - levels.copied
    return float((np.where(rows > 0, choices.seconds, 0.0) * rows).sum())


def gap(choices: Choices, levels: Levels) -> float:
    """How far levels are above their bound, as a share."""
    reached = seconds_of(choices, levels)
    return max(0.0, (reached - levels.bound_seconds) / reached) if reached > 0 else 0.0


def _deviations(
    seconds: np.ndarray,
    extra_bytes: np.ndarray,
    run: np.ndarray,
    num_rows: np.ndarray,
    most: np.ndarray,
    budget_bytes: float,
    scale: float,
    time_limit_s: float,
) -> tuple[np.ndarray | None, float]:
    """(rows of each choice that deviate from the best level, the least seconds that adds): at most `most`, of a run
    at most all, within the bytes that are left. The rows are None where time ran out, or the solver's tolerance hides
    that they do not fit.
    """
    optimize = extras.load("scipy.optimize", "exact", "strategy 'exact' solves integer programs")
    sparse = extras.load("scipy.sparse", "exact", "strategy 'exact' solves integer programs")
    _, first, place = np.unique(run, return_index=True, return_inverse=True)
    # The solver's tolerances are absolute: what decides should be about 1.
    unit = float(np.abs(extra_bytes[extra_bytes != 0]).min(initial=np.inf))
    unit = unit if np.isfinite(unit) else 1.0
    of_run = sparse.csr_matrix((np.ones(len(run)), (place, np.arange(len(run)))))
    limits = np.concatenate([[budget_bytes / unit], num_rows[first]])
    result = optimize.milp(
        seconds / scale,
        integrality=np.ones(len(run)),
        bounds=optimize.Bounds(0, most),
        constraints=optimize.LinearConstraint(
            sparse.vstack([sparse.csr_matrix(extra_bytes / unit), of_run]).tocsc(), ub=limits
        ),
        options={"time_limit": time_limit_s, "mip_rel_gap": SOLVER_GAP},
    )
    bound = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) * scale
    if result.x is None:
        return None, bound
    rows = np.rint(result.x).astype(np.int64)
    return (rows if extra_bytes @ rows <= budget_bytes else None), bound
