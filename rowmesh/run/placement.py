"""Which plan a run is placed by: from a file, made at the start from the data's counts, or every table cyclic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.grid import Together
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.comparison import compare
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request, WireDtype
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.summary import plan_levels
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional import compare_replicas
from rowmesh.placement.unseen import smoothed
from rowmesh.run.config import Config, ParallelConfig, chosen
from rowmesh.run.section import shared
from rowmesh.run.table_data import TableData
from rowmesh.run.tables import table_specs
from rowmesh.tables.spec import stored_tables

# What OPER (ATC'24) §6.3 measured between the nodes of its cluster; `rowmesh plan --measure` measures yours.
INTER_OVER_INTRA = 4.21


class PlacedTask(Protocol):
    """The part of a task that decides where rows are placed.

    Attributes:
        config: of the run, with a value in the place of every auto.
        data: what it reads.
    """

    @property
    def config(self) -> Config:
        """See `PlacedTask`."""
        ...

    @property
    def data(self) -> TableData:
        """See `PlacedTask`."""
        ...

    def profile(
        self, shapes: Sequence[TableShape], request: Request, world_size: int, *, count_batches: bool = False
    ) -> Profile:
        """How often steps read each row of tables that are named after those of the data.

        Args:
            shapes: of the tables.
            request: samples of a rank, and whether steps train.
            world_size: ranks.
            count_batches: read all batches once, and count how many hold each row.
        """
        ...


@dataclass(frozen=True)
class Placement:
    """A plan and where it is from.

    Attributes:
        plan: for the ranks of the run.
        source: where it is from and why it is used, for people.
    """

    plan: Plan
    source: str

    @property
    def text(self) -> str:
        """Strategy, levels and reason, in a line."""
        levels = ", ".join(f"{name} {rows:,}" for name, rows in plan_levels(self.plan).items())
        notes = [self.plan.notes[note] for note in ("copies", "sums", "why") if note in self.plan.notes]
        return "; ".join((f"{self.plan.strategy}, {self.source}: rows {levels}", *notes))

    def to_plain(self) -> list[str]:
        """To be sent to other ranks."""
        return [self.plan.to_json(), self.source]

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """From what another rank sent."""
        plan, source = values
        return cls(Plan.from_json(plan), source)


def configured_placement(task: PlacedTask, mesh: Mesh) -> Placement:
    """The placement that the configuration of a task asks for on a mesh.

    Raises:
        ConfigurationError: the plan cannot be read, is for other tables or ranks, or none can be made.
    """
    config, data = task.config, task.data
    placement, shapes = config.placement, shapes_of(config, data)
    replicas = wanted_replicas(config, data)
    if placement.plan:
        if config.parallel.replicas != 1 or max(replicas.values(), default=1) > 1:
            raise ConfigurationError(
                f"the plan {placement.plan} has its own replicas; leave parallel.replicas and tables.….replicas out, "
                "or plan again with `rowmesh plan --replicas`"
            )
        plan = _checked(Plan.load(Path(placement.plan)), placed_shapes(config, data), mesh, placement.plan)
        plan = _with_dynamic(plan, shapes, replicas)
        _check_replica_settings(config.parallel, plan.together if plan.is_replicated else None)
        return Placement(plan, placement.plan)
    if not shapes:
        return _cyclic(shapes, mesh, "all tables are tensor-train cores, which every rank has")
    if config.parallel.replicas == "auto" or max(replicas.values()) > 1:
        return _replicated(task, mesh, replicas)
    _check_replica_settings(config.parallel, None)
    if placement.strategy and config.data.is_raw:
        raise ConfigurationError(
            "a placement by frequency needs prepared data, and data.source is raw; leave placement.strategy out"
        )
    if placement.strategy and not placed_shapes(config, data):
        return _cyclic(shapes, mesh, "hashes of ids say where rows of dynamic tables are")
    if placement.strategy:
        topology = run_topology(config, mesh)
        plan = compare(problem_of(task, topology), placement.strategy).plan
        return Placement(_with_dynamic(plan, shapes, replicas), f"made for topology {topology.name}")
    return _cyclic(shapes, mesh, "no plan is given")


def evaluation_placement(task: PlacedTask, mesh: Mesh, recorded: Path, *, changed: bool) -> Placement:
    """The placement for an evaluation: the run's own where it fits the ranks, else every table cyclic.

    Args:
        task: of the evaluation.
        mesh: of the evaluation.
        recorded: the plan that the run was trained with.
        changed: whether the evaluation asks for another placement than the training had.

    Raises:
        ConfigurationError: another placement is asked for and does not work.
    """
    if changed:
        return configured_placement(task, mesh)
    shapes = shapes_of(task.config, task.data)
    if not recorded.exists():
        return _cyclic(shapes, mesh, "the run recorded no plan")
    plan = Plan.load(recorded)
    try:
        plan.check_fits(shapes, mesh.world_size, mesh.ranks_per_node)
    except ConfigurationError:
        reason = f"the run's plan is for {plan.world_size} ranks in nodes of {plan.ranks_per_node}"
        return _cyclic(shapes, mesh, reason if plan.world_size != mesh.world_size else f"{reason}, or other tables")
    return Placement(plan, f"{recorded}, as in training")


def problem_of(
    task: PlacedTask, topology: Topology, request: Request | None = None, *, count_batches: bool = False
) -> Problem:
    """The placement problem of a run's tables, with the counts of its training split.

    Training reads every row as often as it was counted. Inference reads samples that were not counted: seldom read
    rows are expected to be read less, and the rows of rare ids, which unseen ones share, more. Sequences have no such
    rows.

    Args:
        task: of the run.
        topology: of the ranks.
        request: what to plan for; by default the request of the configuration.
        count_batches: read all batches once to count how many hold each row.
    """
    request = request or request_of(task.config, topology)
    shapes = placed_shapes(task.config, task.data)
    profile = task.profile(shapes, request, topology.world_size, count_batches=count_batches)
    if not request.training:
        profile = smoothed(profile, rare_rows=not task.config.model.is_sequence)
    return Problem(profile, topology, request)


def request_of(config: Config, topology: Topology) -> Request:
    """The request that a configuration makes of a plan for the ranks of a topology."""
    return Request(
        batch_size=-(-chosen(config.data.batch_size) // topology.world_size),
        wire_dtype=_wire_dtype(config, topology),
        allows_sums=_has_messages(config, topology) and config.train.device == "cpu" and config.pipeline.is_off,
        **shared(config.placement, Request),
    )


def _has_messages(config: Config, topology: Topology) -> bool:
    """Whether rows travel in messages, and ranks do not read each other's memory, as "auto" has them on one host."""
    transport = config.parallel.transport
    return transport == "collective" or (
        transport == "auto" and (topology.num_nodes > 1 or config.train.device != "cpu")
    )


def _wire_dtype(config: Config, topology: Topology) -> WireDtype:
    """How rows travel: nothing is rounded where ranks read each other's memory; tiered rows always travel."""
    in_messages = _has_messages(config, topology) or config.tables.caches_rows
    return config.parallel.wire_dtype if in_messages else "float32"


def shapes_of(config: Config, data: TableData) -> list[TableShape]:
    """The run's tables with rows; tensor-train tables are on every rank, and in no plan."""
    return [TableShape.of(table) for table in stored_tables(table_specs(config.tables, data))]


def placed_shapes(config: Config, data: TableData) -> list[TableShape]:
    """The tables whose rows a search places; rows of dynamic tables lie where hashes of their ids say."""
    tables = stored_tables(table_specs(config.tables, data))
    return [TableShape.of(table) for table in tables if not table.takes_any_id]


def _with_dynamic(plan: Plan, shapes: Sequence[TableShape], replicas: Mapping[str, int]) -> Plan:
    """The plan with the dynamic tables too, by their capacity; each rank of a replica group has equally much."""
    placed = {table.shape.name for table in plan.tables}
    dynamic = [shape for shape in shapes if shape.name not in placed]
    if not dynamic:
        return plan
    counts = {shape.name: replicas[shape.name] for shape in dynamic}
    cyclic = Plan.cyclic(dynamic, plan.world_size, plan.ranks_per_node, replicas=counts, together=plan.together)
    return replace(plan, tables=(*plan.tables, *cyclic.tables))


def run_topology(config: Config, mesh: Mesh) -> Topology:
    """The links between the ranks of a run, as configured."""
    if not config.placement.topology:
        return Topology.grouped(mesh.world_size // mesh.ranks_per_node, mesh.ranks_per_node, INTER_OVER_INTRA)
    topology = Topology.load(config.placement.topology)
    if topology.world_size != mesh.world_size:
        raise ConfigurationError(
            f"placement.topology: {config.placement.topology} is for {topology.world_size} ranks, but "
            f"{mesh.world_size} take part; give another, or start as many"
        )
    return topology


def wanted_replicas(config: Config, data: TableData) -> dict[str, int]:
    """The number of replicas of each table with rows, as configured; 1 where prediction is to choose.

    Raises:
        ConfigurationError: the configuration asks for replicas of a tensor-train table.
    """
    tables, of_all = config.tables, 1 if config.parallel.replicas == "auto" else config.parallel.replicas
    specs = table_specs(tables, data)
    for table in specs:
        own = tables.of(table.name).replicas
        if not table.stores_rows and own is not None and own != tables.replicas:
            raise ConfigurationError(
                f"tables.{table.name}.replicas = {own}: every rank has the cores of a tensor-train table; leave it out"
            )
    return {table.name: tables.of(table.name).replicas or of_all for table in stored_tables(specs)}


def _replicated(task: PlacedTask, mesh: Mesh, replicas: dict[str, int]) -> Placement:
    """A plan whose tables have replicas.

    Where tables differ by their own settings, rows are cyclic over the ranks of a group. Otherwise the arrangement, and
    with "auto" the number too, is the one predicted to be fastest.
    """
    config, data = task.config, task.data
    parallel, strategy = config.parallel, config.placement.strategy or "cyclic"
    counts = None if parallel.replicas == "auto" else sorted(set(replicas.values()))
    if counts is None and any(config.tables.of(name).replicas is not None for name in replicas):
        raise ConfigurationError("tables.….replicas cannot be combined with parallel.replicas='auto'; give one of them")
    placed = placed_shapes(config, data)
    if counts is None and len(placed) < len(replicas):
        raise ConfigurationError(
            "parallel.replicas='auto' predicts what replicas of placed rows cost, and dynamic tables have none; give a "
            "number"
        )
    if counts is not None and (len(counts) > 1 or not placed):
        if config.placement.strategy and placed:
            raise ConfigurationError(
                f"tables.….replicas that differ cannot go with placement.strategy={strategy!r}; give one of them"
            )
        together = "shards" if parallel.together == "auto" else parallel.together
        plan = Plan.cyclic(
            shapes_of(config, data), mesh.world_size, mesh.ranks_per_node, replicas=replicas, together=together
        )
        return Placement(plan, "over the ranks of each replica group, as tables say")
    sync = Synchronization(parallel.synchronization, parallel.sync_every)
    problem = problem_of(task, run_topology(config, mesh))
    comparison = compare_replicas(problem, strategy, sync, counts)
    if parallel.together != "auto":
        comparison = comparison.arranged(parallel.together)
    plan = _with_dynamic(comparison.plan, shapes_of(config, data), replicas)
    return Placement(plan, f"made for topology {problem.topology.name}")


def _check_replica_settings(parallel: ParallelConfig, together: Together | None) -> None:
    """Refuses settings that would do nothing; `together` is what a plan from a file says, None without replicas."""
    if together is not None:
        if parallel.together not in ("auto", together):
            raise ConfigurationError(
                f"parallel.together={parallel.together!r} cannot change a plan from a file, which puts {together} next "
                "to each other; leave it out, or plan again"
            )
        return
    for key, idle in (("synchronization", "exact"), ("together", "auto")):
        if (value := getattr(parallel, key)) != idle:
            raise ConfigurationError(
                f"parallel.{key}={value!r} is for replicas, and there are none; give parallel.replicas too, or leave "
                "it out"
            )


def _cyclic(shapes: Sequence[TableShape], mesh: Mesh, reason: str) -> Placement:
    return Placement(Plan.cyclic(shapes, mesh.world_size, mesh.ranks_per_node), f"over all ranks, as {reason}")


def _checked(plan: Plan, shapes: Sequence[TableShape], mesh: Mesh, source: str) -> Plan:
    """The plan, if it is one for these tables and ranks."""
    try:
        plan.check_fits(shapes, mesh.world_size, mesh.ranks_per_node)
    except ConfigurationError as error:
        raise ConfigurationError(f"placement.plan {source}: {error}") from error
    return plan
