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
    fetch_weight: float | None = None,
    count_batches: Switch = False,
    replicas: str | None = None,
    synchronization: Literal["exact", "average"] | None = None,
    sync_every: int | None = None,
    tensor_train: str | None = None,
    explain: str | None = None,
    out: Path | None = None,
    report: Path | None = None,
    topology_out: Path | None = None,
    overwrite: Switch = False,
) -> None:
    """Decide which ranks hold each row, from what steps of training read and the costs of links.

    Prints the plan beside those of other strategies. `rowmesh train … placement.plan=plan.json` trains by it.

    Parameters
    ----------
    config
        The TOML file of the run: gives the tables, the counts of its data, and the batch size.
    overrides
        Keys that replace those of the file, as in `tables.dim=32`.
    ranks
        Plan for this many ranks. All links within a node cost the same; links between nodes cost 4.21 times as much.
    ranks_per_node
        Ranks of a node; with --ranks or --measure, and all of them by default.
    topology
        A shipped topology (1x8, 2x4, 4x4, 16x8, 16x8-h100) or a TOML file: ranks, nodes and the cost of every link.
    measure
        Measure the links between the ranks of this run: start the command under torchrun.
    strategy
        auto (the best of those compared), cyclic, partitioned, exact, or any other in the printed comparison.
    mode
        Purpose of the plan: infer counts fetches alone, train also gradients and updates of copies.
    objective
        The cost to minimize: the sum over links (total, auto) or the slowest_link.
    memory
        Limit for rows and optimizer state on a rank, as in 40GB or 512MiB.
    extra_memory
        Memory for copies, as a share of what a rank holds without any; 0.05 by default.
    max_hops
        2 allows a node to merge its requests before it sends them to another; 1 does not.
    fetch_weight
        Cost of a fetched byte, relative to a byte of gradients; placement.fetch_weight by default, with mode train.
    count_batches
        Read the data once and count the batches that hold each row, instead of assuming that samples are independent;
        of sequences, those of the first epoch.
    replicas
        Numbers of replicas to compare, each replica on its own group of ranks: auto (all that divide the ranks), 4, or
        1,2,4. If 1 is among them, tables may differ.
    synchronization
        How replicas are synchronized: exact (gradients are summed, the default) or average (rows are averaged).
    sync_every
        Steps between two averages.
    tensor_train
        Print also what tensor-train cores in place of large tables would save, for ranks such as 16,32,64, and what
        they would cost a step on this machine.
    explain
        Print only why the rows of a table, or one row, are where they are, as in C3 or C3:17.
    out
        Write the plan (JSON).
    report
        Write a report (HTML, one file).
    topology_out
        Write the topology (TOML), for --topology.
    overwrite
        Replace the files of --out, --report and --topology-out also where this command did not write them.
    """
    from rowmesh.cli.plan_command import Links, Outputs, PlanOptions, run_plan
    from rowmesh.cli.plan_replicas import Replication
    from rowmesh.cli.plan_tensor_train import parse_ranks
    from rowmesh.run.resolve import resolve

    outputs = Outputs(explain, out, report, topology_out, () if tensor_train is None else parse_ranks(tensor_train))
    outputs.check(overwrite=overwrite)
    links = Links(ranks, ranks_per_node, topology, measure)
    options = PlanOptions(strategy, mode, objective, memory, extra_memory, max_hops, fetch_weight, count_batches)
    replication = Replication(replicas, synchronization, sync_every)
    run_plan(resolve(config, overrides), config.stem, links, options, outputs, replication)
