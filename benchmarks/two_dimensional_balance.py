"""Imbalance of look-ups: most of a rank over the mean, for more and more replicas.

Plans of others, which place by memory, by table or in shards of neighbouring rows, look up most on few ranks. The fewer
ranks a replica is spread over, the less a rank differs from the mean: of N ranks none has more than N times the mean.
Plans of cyclic rows, as rowmesh makes them, are even from the start.

Look-ups are expectations from access counts, as `rowmesh.placement.two_dimensional_cost` has them: no rank runs. Counts
are drawn from curves of real data (`benchmarks.shapes`), of 26 tables, and of 416 whose bags are drawn to hold more or
fewer ids, which is nearer to the thousands of tables of industry. Rows are in order of frequency, so that shards of
neighbouring rows are as uneven as can be; where ids are hashed, they are not.

Source: two-dimensional sparse parallelism §4.2, Table 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.command import Report
from benchmarks.shapes import draw
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional import compare_replicas
from rowmesh.placement.two_dimensional_cost import ReplicaCost

PAPER = {"CTR model": {1: 5.70, 2: 2.01, 4: 1.57, 8: 1.53}, "ExFM": {1: 5.18, 2: 2.23, 4: 1.65, 8: 1.63}}
SKEWED = ("memory_greedy", "table_wise", "torchrec_like", "row_wise")
EXCHANGES = {"deduplicated": True, "raw": False}
BATCH_SIZE = 512  # samples a rank
COPIES = 16  # of the 26 tables
QUICK_SCALE = 0.01


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add("--balance", action="store_true", help="imbalance of look-ups (Table 1)")
    add("--balance-ranks", type=_integers, default=[64, 256], help="simulated ranks, separated by commas")
    add("--balance-replicas", type=_integers, default=[1, 2, 4, 8], help="numbers of replicas, separated by commas")
    add("--balance-shape", default="kaggle", help="avazu, kaggle or terabyte")


def run(report: Report, options: argparse.Namespace) -> None:
    """Every strategy with every number of replicas, on few tables and on many."""
    name, ranks = options.balance_shape, options.balance_ranks[:1] if options.quick else options.balance_ranks
    few = draw(name, scale=QUICK_SCALE if options.quick else 1.0).counted
    for case, profile in ((name, few), (f"{name} x {COPIES}", multiplied(few, 2 if options.quick else COPIES))):
        for num_ranks in ranks:
            for exchange in EXCHANGES:
                for strategy in (*SKEWED, "cyclic"):
                    _strategy(report, case, profile, num_ranks, exchange, strategy, options.balance_replicas)


def multiplied(profile: Profile, copies: int, seed: int = 0) -> Profile:
    """Every table so many times, each time with bags of another size: 1 to about 30 ids, 2 in the middle."""
    rng = np.random.default_rng(seed)
    tables = [
        TableProfile(
            replace(table.shape, name=f"{table.name}_{copy}"),
            table.lengths,
            table.accesses * max(1, round(rng.lognormal(0.5, 1.0))),
        )
        for copy in range(copies)
        for table in profile.tables
    ]
    return Profile(tuple(tables), profile.num_samples)


def costs(
    profile: Profile, num_ranks: int, strategy: str, replicas: Sequence[int], *, deduplicated: bool
) -> dict[int, ReplicaCost]:
    """A step for each number of replicas."""
    request = Request(batch_size=BATCH_SIZE, deduplicated=deduplicated)
    problem = Problem(profile, Topology.uniform(num_ranks), request)
    found = {}
    for count in replicas:
        cost = compare_replicas(problem, strategy, counts=[count]).chosen.cost
        assert cost is not None
        found[count] = cost
    return found


def _strategy(
    report: Report, case: str, profile: Profile, num_ranks: int, exchange: str, strategy: str, replicas: Sequence[int]
) -> None:
    found = costs(profile, num_ranks, strategy, replicas, deduplicated=EXCHANGES[exchange])
    line: dict[str, Any] = {
        "case": case,
        "tables": len(profile.tables),
        "ranks": num_ranks,
        "exchange": exchange,
        "strategy": strategy,
    }
    for count, cost in found.items():
        memory = cost.memory_bytes / 2**20
        report.line(
            balance="lookups",
            **line,
            replicas=count,
            imbalance=round(cost.imbalance, 4),
            lookups_max=round(float(cost.lookups.max()), 1),
            lookups_mean=round(float(cost.lookups.mean()), 1),
            memory_max_mib=round(float(memory.max()), 3),
            memory_mean_mib=round(float(memory.mean()), 3),
            paper={model: ratios.get(count) for model, ratios in PAPER.items()},
        )
    texts = {count: round(cost.imbalance, 3) for count, cost in found.items()}
    report.ratio(
        f"balance {case}, {num_ranks} ranks, {exchange}, {strategy}: imbalance {texts}; last over first",
        round(found[replicas[-1]].imbalance / found[replicas[0]].imbalance, 4),
    )


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
