"""`rowmesh plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

Switch = Annotated[bool, Parameter(negative=())]


def plan(
    config: Path,
    /,
    *overrides: str,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    topology: str | None = None,
    measure: Switch = False,
    strategy: str | None = None,
    mode: Literal["train", "infer"] = "train",
    objective: Literal["auto", "total", "slowest_link"] | None = None,
    memory: str | None = None,
    extra_memory: float | None = None,
    max_hops: Literal[1, 2] = 2,
    fetch_weight: float = 1.0,
    count_batches: Switch = False,
    replicas: str | None = None,
    synchronization: Literal["exact", "average"] | None = None,
    sync_every: int | None = None,
    tensor_train: str | None = None,
    explain: str | None = None,
    out: Path | None = None,
    report: Path | None = None,
    topology_out: Path | None = None,
) -> None:
    """Decide which ranks hold each row, from the access counts of the data and the costs of links.

    Prints the plan beside what other strategies come to; `rowmesh train … placement.plan=plan.json` uses it.

    Parameters
    ----------
    config
        The TOML file of the run; its tables, its data's counts and its batch size are planned for.
    overrides
        Keys that replace those of the file, as in `tables.dim=32`.
    ranks
        Plan for this many ranks; links within a node are alike, those between nodes 4.21 times as dear.
    ranks_per_node
        Ranks of a node; with --ranks or --measure, and all of them by default.
    topology
        A shipped topology (1x8, 2x4, 4x4, 16x8, 16x8-h100) or a TOML file: ranks, nodes and the cost of every link.
    measure
        Measure the links between the ranks of this run: start the command under torchrun.
    strategy
        auto (the best of those compared), dealt, partitioned, exact, or another that the comparison names.
    mode
        What the plan is for: infer pays for fetches alone, train for gradients and updates of copies too.
    objective
        What is made least: the sum over links (total, auto) or the slowest_link.
    memory
        For rows and optimizer state on a rank, as in 40GB or 512MiB.
    extra_memory
        For copies, as a share of what a rank holds without any; 0.05 by default.
    max_hops
        2 lets requests for other nodes be merged in their own node first.
    fetch_weight
        What a byte fetched costs, relative to a byte of gradients.
    count_batches
        Read the data once and count the batches that hold a row, which bursts of equal ids make fewer.
    replicas
        How many replicas of the tables are compared, each on a group of ranks of its own: auto (all that divide the
        ranks), 4, or 1,2,4; tables may differ where 1 is among them.
    synchronization
        How replicas are kept together: exact (gradients are summed, the default) or average (rows are averaged).
    sync_every
        Steps between two averages.
    tensor_train
        Say too what tensor-train cores in place of large tables would save, at ranks such as 16,32,64, and what they
        cost a step on this machine.
    explain
        Say why a table's rows, or one row, are where they are, as in C3 or C3:17; prints nothing else.
    out
        Write the plan (JSON).
    report
        Write a report (HTML, one file).
    topology_out
        Write the topology (TOML), for --topology.
    """
    from rowmesh.cli.plan_command import Links, Outputs, Wish, run_plan
    from rowmesh.cli.plan_replicas import Replication
    from rowmesh.cli.plan_tensor_train import parse_ranks
    from rowmesh.train.resolve import resolve

    links = Links(ranks, ranks_per_node, topology, measure)
    wish = Wish(strategy, mode, objective, memory, extra_memory, max_hops, fetch_weight, count_batches)
    outputs = Outputs(explain, out, report, topology_out, () if tensor_train is None else parse_ranks(tensor_train))
    replication = Replication(replicas, synchronization, sync_every)
    run_plan(resolve(config, overrides), config.stem, links, wish, outputs, replication)
