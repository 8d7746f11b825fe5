"""What `rowmesh plan` does: from a configuration and options to a comparison, and from that to text and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from rowmesh._support.files.output import check_output
from rowmesh.cli.plan_dynamic import dynamic_bytes, dynamic_costs, print_dynamic
from rowmesh.cli.plan_replicas import Replication
from rowmesh.cli.plan_tensor_train import cores_bytes
from rowmesh.cli.plan_tensor_train import report as report_cores
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.exchange.transports import reader_for
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import on_rank_0
from rowmesh.placement.comparison import Comparison, compare
from rowmesh.placement.measure import measure_topology
from rowmesh.placement.plan import Plan
from rowmesh.placement.request import Mode, Objective, Request
from rowmesh.placement.text import bytes_text, parse_bytes
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional import ReplicaComparison, compare_replicas
from rowmesh.report.explanation import explain
from rowmesh.report.html import is_page
from rowmesh.report.plan_page import write_report
from rowmesh.report.plan_text import Printer
from rowmesh.report.replica_page import write_replica_report
from rowmesh.report.replica_text import explain_replicas, print_replicas
from rowmesh.run.config import Config
from rowmesh.run.placement import INTER_OVER_INTRA, problem_of, request_of
from rowmesh.run.tables import table_specs
from rowmesh.run.task import Task
from rowmesh.run.tasks import open_data, task_of
from rowmesh.tables import TableSpec


@dataclass(frozen=True)
class Links:
    """Where ranks, nodes and the cost of links come from: one of three ways."""

    ranks: int | None = None
    ranks_per_node: int | None = None
    topology: str | None = None
    measure: bool = False

    def check(self, config: Config) -> None:
        """Raises ConfigurationError where none or several of the ways are given."""
        ways = {"--ranks": self.ranks, "--topology": self.topology, "--measure": self.measure or None}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise ConfigurationError(f"{' and '.join(given)} each say which ranks there are; give one of them")
        if not given and not config.placement.topology:
            raise ConfigurationError(
                "for which ranks? Give --ranks 8 (and --ranks-per-node 4), --topology with one of "
                f"{', '.join(Topology.shipped())} or a file, or --measure under torchrun"
            )
        if self.ranks_per_node is not None and "--topology" in given:
            raise ConfigurationError("--topology says how many ranks a node has; leave out --ranks-per-node")
        if self.measure and "WORLD_SIZE" not in os.environ:
            raise ConfigurationError(
                "--measure measures the links between the ranks of a run: start it with torchrun "
                "--nproc-per-node N -m rowmesh.cli plan …"
            )

    def stated(self, config: Config) -> Topology:
        """The topology that options or the configuration name."""
        if self.ranks is None:
            return Topology.load(self.topology or config.placement.topology)
        per_node = self.ranks if self.ranks_per_node is None else self.ranks_per_node
        for option, count in (("--ranks", self.ranks), ("--ranks-per-node", per_node)):
            if count < 1:
                raise ConfigurationError(f"{option} {count}: there is no such number of ranks; give 1 or more")
        if self.ranks % per_node:
            raise ConfigurationError(
                f"--ranks {self.ranks} do not make nodes of --ranks-per-node {per_node}: all nodes have equally many"
            )
        return Topology.grouped(self.ranks // per_node, per_node, INTER_OVER_INTRA)


@dataclass(frozen=True)
class PlanOptions:
    """Options of the plan; `None` uses the configuration."""

    strategy: str | None = None
    mode: Mode = "train"
    objective: Objective | None = None
    memory: str | None = None
    extra_memory: float | None = None
    max_hops: Literal[1, 2] = 2
    fetch_weight: float | None = None
    count_batches: bool = False

    def request(self, config: Config, topology: Topology, tables: Sequence[TableSpec] = ()) -> Request:
        """The request for the ranks of a topology; cores and dynamic tables take their part of a rank's memory."""
        request, world_size = request_of(config, topology), topology.world_size
        if self.memory is not None and self.extra_memory is not None:
            raise ConfigurationError("--memory and --extra-memory both limit a rank's memory; give one of them")
        return replace(
            request,
            mode=self.mode,
            objective=self.objective or request.objective,
            memory_limit_bytes=None if self.memory is None else self._limit(self.memory, tables, world_size),
            extra_memory=request.extra_memory if self.extra_memory is None else self.extra_memory,
            max_hops=self.max_hops,
            fetch_weight=self._fetch_weight(request),
        )

    def _fetch_weight(self, configured: Request) -> float:
        """That of the option, or of the configuration; without gradients there is nothing to weigh fetches against."""
        if self.fetch_weight is not None:
            return self.fetch_weight
        return configured.fetch_weight if self.mode == "train" else 1.0

    @staticmethod
    def _limit(memory: str, tables: Sequence[TableSpec], world_size: int) -> int:
        limit, cores, dynamic = parse_bytes(memory, "--memory"), cores_bytes(tables), dynamic_bytes(tables, world_size)
        if limit <= dynamic:
            raise ConfigurationError(
                f"--memory {memory} does not hold the {dynamic:,} bytes that dynamic tables take on a rank at their "
                "capacity; give more, lower tables.….dynamic.capacity, or take more ranks"
            )
        if limit - dynamic <= cores:
            raise ConfigurationError(
                f"--memory {memory} does not hold the {cores:,} bytes of tensor-train cores and their optimizer state "
                "that every rank has; give more, or make tables.….tensor_train.rank smaller"
            )
        return limit - dynamic - cores


@dataclass(frozen=True)
class Outputs:
    """The texts to print and the files to write."""

    explain: str | None = None
    plan: Path | None = None
    report: Path | None = None
    topology: Path | None = None
    tensor_train: tuple[int, ...] = ()

    def check(self, *, overwrite: bool) -> None:
        """Refuses files that are in the way.

        Raises:
            RowmeshError: a file is there that is no plan, page or topology, and `overwrite` is not given.
        """
        files = (
            ("--out", self.plan, partial(_is_read_by, Plan.load)),
            ("--report", self.report, is_page),
            ("--topology-out", self.topology, partial(_is_read_by, lambda path: Topology.load(str(path)))),
        )
        for option, path, is_own in files:
            if path is not None:
                check_output(path, overwrite=overwrite, option=option, is_own=is_own)

    def write(self, comparison: Comparison, title: str, printer: Printer) -> None:
        """Prints the comparison or the explanation, and writes the files.

        Raises:
            ConfigurationError: the plan of the strategy that was asked for does not fit.
        """
        written = list(self._write(comparison, title)) if comparison.chosen.fits else []
        if self.explain:
            printer.write(comparison.why, *explain(comparison, self.explain))
        else:
            printer.print(comparison, title)
        problem = comparison.problem
        problem.limited(comparison.plan).check(problem.limit_bytes)
        printer.write(*(f"wrote {path}" for path in written))

    def write_replicas(self, comparison: ReplicaComparison, title: str, printer: Printer) -> None:
        """`write`, for a comparison of numbers of replicas."""
        written = list(self._write(comparison, title))
        if self.explain:
            printer.write(comparison.why, *explain_replicas(comparison, self.explain))
        else:
            print_replicas(printer, comparison, title)
        printer.write(*(f"wrote {path}" for path in written))

    def _write(self, comparison: Comparison | ReplicaComparison, title: str) -> Iterator[Path]:
        writers: list[tuple[Path | None, Callable[[Path], None]]] = [
            (self.plan, comparison.plan.save),
            (self.report, lambda path: _write_report(comparison, path, title)),
            (self.topology, comparison.problem.topology.save),
        ]
        for path, write in writers:
            if path is not None:
                write(path)
                yield path


def _is_read_by(load: Callable[[Path], object], path: Path) -> bool:
    """Whether a file is what a former call of the command wrote there."""
    try:
        load(path)
    except (RowmeshError, OSError):
        return False
    return True


def _write_report(comparison: Comparison | ReplicaComparison, path: Path, title: str) -> None:
    if isinstance(comparison, Comparison):
        write_report(comparison, path, title)
    else:
        write_replica_report(comparison, path, title)


def run_plan(
    config: Config,
    title: str,
    links: Links,
    options: PlanOptions,
    outputs: Outputs,
    replication: Replication | None = None,
) -> None:
    """Searches, compares, prints and writes.

    Where links are measured, collective and blocking: every rank of a torchrun launch calls it, and rank 0 does the
    rest.

    Raises:
        RowmeshError: options that contradict each other, data or a topology that cannot be read, a request that cannot
            be met (says what does not fit, by how much, and what would make it fit).
    """
    links.check(config)
    replication = replication or Replication()
    replication.check()
    if config.data.is_raw:
        raise ConfigurationError(
            "plans are made by the counts of prepared data, and raw data have none; dynamic tables need no plan: "
            "hashes of ids say where rows are"
        )
    task, _ = task_of(config, open_data(config))
    question = _Question(task, title, options, outputs, replication)
    if not links.measure:
        question.answer(links.stated(task.config))
        return
    with Mesh.connect(task.config.parallel.timeout_s) as mesh:
        reader = reader_for(task.config.parallel.transport, mesh)
        topology = measure_topology(mesh, reader=reader, ranks_per_node=links.ranks_per_node)
        on_rank_0(mesh, "searching for a plan", lambda: question.answer(topology))


@dataclass(frozen=True)
class _Question:
    """A search, given everything but the topology."""

    task: Task
    title: str
    options: PlanOptions
    outputs: Outputs
    replication: Replication

    def answer(self, topology: Topology) -> None:
        """Plans, prints, and reports what cores would save if an option asks for it."""
        task, printer = self.task, Printer()
        tables = table_specs(task.config.tables, task.data)
        request = self.options.request(task.config, topology, tables)
        cored = [table for table in tables if not table.stores_rows]
        if cored:
            printer.write(
                f"cores     {bytes_text(cores_bytes(cored))} of cores and optimizer state on every rank, of "
                f"{len(cored)} tensor-train table(s), which are not placed: {', '.join(table.name for table in cored)}"
            )
        dynamic = [table for table in tables if table.takes_any_id]
        if dynamic:
            print_dynamic(printer, dynamic_costs(dynamic, task, topology, request))
        if len(cored) + len(dynamic) < len(tables):
            self._place(topology, request, printer)
        else:
            kinds = " or ".join(["tensor-train"] * bool(cored) + ["dynamic"] * bool(dynamic))
            printer.write(f"all tables are {kinds} tables: there is nothing to place, and no plan to write")
        if self.outputs.tensor_train and not self.outputs.explain:
            report_cores(task, request, topology.world_size, self.outputs.tensor_train, printer)

    def _place(self, topology: Topology, request: Request, printer: Printer) -> None:
        replication = self.replication
        problem = problem_of(self.task, topology, request, count_batches=self.options.count_batches)
        strategy = self.options.strategy or self.task.config.placement.strategy or "auto"
        if replication.counts is None:
            self.outputs.write(compare(problem, strategy), self.title, printer)
        else:
            comparison = compare_replicas(problem, strategy, replication.sync, replication.wanted)
            self.outputs.write_replicas(comparison, self.title, printer)
