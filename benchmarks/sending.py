"""Contestants of rowmesh by what their tables send: `--send rows,sums,auto` of `embedding_step` and `train_step`.

One-sided nothing is sent; over messages there is a contestant for each value. With `auto` the planner decides, table by
table, from the counts of all batches; rows are cyclic as without a plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.command import Options
from benchmarks.hosts import NUM_HOSTS, Hosts
from benchmarks.planned_step import topology
from benchmarks.ranks.setup import table_specs
from benchmarks.workload import Workload, make_batches
from rowmesh.placement import TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import search

SENDS = ("rows", "sums", "auto")


def ours(
    options: Options, workload: Workload, hosts: Hosts | None, module: str, **settings: Any
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Contestants over both transports, or between hosts over messages alone: name → module and its options.

    Raises:
        SystemExit: tables cannot send this.
    """
    made = {} if hosts is not None else {"rowmesh one_sided": (module, {"transport": "one_sided", **settings})}
    for send in options.extra["send"].split(","):
        if send not in SENDS:
            raise SystemExit(f"--send {send}: there are {', '.join(SENDS)}")
        sums = numbers_of_sums(workload, options.ranks, 1 if hosts is None else NUM_HOSTS, send)
        name = "rowmesh collective" if send == "rows" else f"rowmesh collective, {send}"
        made[name] = module, {"transport": "collective", **({"sums": sums} if sums else {}), **settings}
    return made


def short_name(contestant: str) -> str:
    """The name of one of ours in a summary.

    >>> short_name("rowmesh collective, sums")
    'collective_sums'
    """
    return contestant.removeprefix("rowmesh ").replace(", ", "_")


def numbers_of_sums(workload: Workload, num_ranks: int, num_hosts: int, send: str) -> list[int]:
    """The numbers of the tables that send sums."""
    if send != "auto":
        return list(range(len(workload.table_rows))) if send == "sums" else []
    samples = workload.global_batch // num_ranks
    request = Request(batch_size=samples)
    plan = search("cyclic", counted_profile(workload, num_ranks), topology(num_ranks, num_ranks // num_hosts), request)
    return [number for number, table in enumerate(plan.tables) if table.send == "sums"]


def counted_profile(workload: Workload, num_ranks: int) -> Profile:
    """The counts of all batches of a workload whose tables may send sums; rows stand in order of frequency."""
    shapes = [TableShape.of(table) for table in table_specs(workload, send="auto")]
    batches = [make_batches(workload, rank, num_ranks, workload.num_batches) for rank in range(num_ranks)]
    counts, contained = {}, {}
    for number, shape in enumerate(shapes):
        distinct = [np.unique(part.bags[number]) for of_rank in batches for part in of_rank]
        ids = np.concatenate([part.bags[number].flatten() for of_rank in batches for part in of_rank])
        found = np.bincount(ids, minlength=shape.num_rows)
        order = np.argsort(-found, kind="stable")
        counts[shape.name] = found[order]
        contained[shape.name] = np.bincount(np.concatenate(distinct), minlength=shape.num_rows)[order]
    num_samples, size = workload.num_batches * workload.global_batch, workload.global_batch // num_ranks
    return Profile.from_counts(counts, shapes, num_samples, batches=contained, batch_size=size)
