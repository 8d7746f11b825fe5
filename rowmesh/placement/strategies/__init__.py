"""Strategies: ways to make a plan, behind one contract.

    cyclic            levels by one multiplier, then all owners cyclic; the default
    partitioned       the paper's
    memory_greedy, access_greedy, table_wise, row_wise, torchrec_like     what others do
    exact             optimal levels by integer programming, with its gap
    exact_partitions  the paper's problem by integer programming, with its bound
    auto              the best of all quick ones

Example:
    >>> from rowmesh.placement import TableShape
    >>> from rowmesh.placement.profile import Profile
    >>> from rowmesh.placement.request import Request
    >>> from rowmesh.placement.topology import Topology
    >>> shape = TableShape("item", 8, value_bytes=64, gradient_bytes=64)
    >>> profile = Profile.from_counts({"item": [9, 5, 3, 2, 1, 1, 1, 1]}, [shape], num_samples=30)
    >>> plan = search("auto", profile, Topology.uniform(4), Request(batch_size=4))
    >>> plan.notes["auto"].split(":")[0]
    'cyclic'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

from rowmesh.errors import ConfigurationError

if TYPE_CHECKING:
    from rowmesh.placement.plan import Plan
    from rowmesh.placement.profile import Profile
    from rowmesh.placement.request import Request
    from rowmesh.placement.topology import Topology


class Strategy(Protocol):
    """Makes a plan for a profile on a topology.

    Every row has one owner. `cyclic`, `partitioned`, both exact ones and `auto` never exceed the request's memory and
    raise `ConfigurationError` where they cannot; the others do not look at it.
    """

    def __call__(self, profile: Profile, topology: Topology, request: Request) -> Plan: ...


# Imported at first use: some need Numba or scipy.
STRATEGIES = {
    "auto": "strategies.auto.search",
    "cyclic": "strategies.cyclic.search",
    "partitioned": "baselines.partitioned.search",
    "memory_greedy": "baselines.heuristics.memory_greedy",
    "access_greedy": "baselines.heuristics.access_greedy",
    "table_wise": "baselines.heuristics.table_wise",
    "row_wise": "baselines.heuristics.row_wise",
    "torchrec_like": "baselines.heuristics.torchrec_like",
    "exact": "baselines.exact.search",
    "exact_partitions": "baselines.exact_partitions.search",
}
BASELINES = ("memory_greedy", "access_greedy", "table_wise", "row_wise", "torchrec_like")
QUICK = ("cyclic", "partitioned", *BASELINES)
# Strategies that place rows by their numbers alone, or whole tables; `auto` asks the others one by one.
ANY_ORDER = ("auto", "memory_greedy", "table_wise", "row_wise", "torchrec_like")


def find(name: str) -> Strategy:
    """A strategy by name.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if name not in STRATEGIES:
        raise ConfigurationError(f"no placement strategy {name!r}; there are {', '.join(STRATEGIES)}")
    module, function = STRATEGIES[name].rsplit(".", 1)
    return getattr(importlib.import_module(f"rowmesh.placement.{module}"), function)


def search(name: str, profile: Profile, topology: Topology, request: Request) -> Plan:
    """A plan by the strategy of that name, checked: every plan is made here.

    A strategy that goes by frequency sees the rows of every table in order of their counts, whatever order they are in
    (`rowmesh.placement.strategies.unsorted`).

    Raises:
        ConfigurationError: there is no such strategy, or the request cannot be met.
    """
    from rowmesh.placement.strategies.problem import Problem
    from rowmesh.placement.strategies.sums import with_chosen_sums, with_forced_sums, without_choice

    def rows(problem: Problem) -> Plan:
        return _search_rows(name, problem.profile, problem.topology, problem.request)

    problem = Problem(profile, topology, request)
    alike = without_choice(problem)
    # `auto` asks the others, which know of tables that must send sums.
    plan = with_chosen_sums(problem, rows(alike) if name == "auto" else with_forced_sums(alike, name, rows))
    plan.check()
    return plan


def _search_rows(name: str, profile: Profile, topology: Topology, request: Request) -> Plan:
    """The plan of a strategy, which places rows whatever its tables are to send."""
    strategy = find(name)
    if name in ANY_ORDER or all(table.is_falling for table in profile.tables):
        return strategy(profile, topology, request)
    from rowmesh.placement.strategies.unsorted import search_sorted

    return search_sorted(strategy, profile, topology, request)
