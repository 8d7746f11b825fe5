"""build, job_on: the tables and the network of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rowmesh._support.faults import reach
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.mesh.together import on_rank_0
from rowmesh.models.linear_layers import FastLinear, fast_linear
from rowmesh.ops.linear import Choices, bound_caches
from rowmesh.run.checks import SETTING_UP
from rowmesh.run.config import Config
from rowmesh.run.device import use_device
from rowmesh.run.job import Job
from rowmesh.run.networks import network_dtype
from rowmesh.run.placement import Placement
from rowmesh.run.precision import check_precision
from rowmesh.run.preflight import check_memory
from rowmesh.run.section import shared
from rowmesh.run.splits import check_same_data
from rowmesh.run.table_data import TableData
from rowmesh.run.tables import table_specs, with_own_stores
from rowmesh.run.task import Task
from rowmesh.tables import TableSpec, Tiers


def build(task: Task, mesh: Mesh, placement: Placement, *, trains: bool = True) -> Job:
    """Makes the tables and the network of a task.

    Collective and blocking: every rank calls it, with the same task. For training it measures how linear
    layers are computed best; a model that was trained says so itself.

    Raises:
        ConfigurationError: tables, sizes or a placement that cannot work.
    """
    config = task.config
    tables = table_specs(config.tables, task.data)
    check_precision(config.train.precision, config.train.device, tables)
    bound_caches()  # in bfloat16 torch's own layers are by oneDNN
    seed, device = config.train.seed, use_device(config)
    torch.manual_seed(seed)
    dtype = network_dtype(tables)
    if trains:
        check_rules(tables, task)
    else:
        tables = with_own_stores(tables)
    made, own = task.make_network(tables)
    network = made.to(dtype)
    transport = config.parallel.transport
    synchronization = Synchronization(config.parallel.synchronization, config.parallel.sync_every)
    embeddings = EmbeddingCollection(
        tables,
        mesh=mesh,
        seed=seed,
        transport=transport,
        plan=placement.plan,
        synchronization=synchronization,
        tiers=_tiers(config),
        device=device,
        wire_dtype=torch.bfloat16 if config.parallel.wire_dtype == "bfloat16" else None,
    )
    network = network.to(embeddings.device)
    linear = _linear(config, mesh, network, task) if trains else FastLinear(Choices(), "by torch")
    return Job(
        config=config,
        mesh=mesh,
        data=task.data,
        targets=task.targets,
        embeddings=embeddings,
        network=network,
        placement=placement,
        linear=linear,
        own=own,
    )


@contextmanager
def job_on(task: Task, mesh: Mesh, place: Callable[[], Placement], *, trains: bool) -> Iterator[Job]:
    """The pieces of a run, for the time of a block; collective.

    Rank 0 reads or makes the plan for all: files may be on its host alone.
    """
    config = task.config
    check_same_data(mesh, task.data)
    reach("train.plan")
    placement = on_rank_0(mesh, SETTING_UP, place, Placement)
    averages = config.parallel.synchronization == "average"
    on_host = config.train.device == "cpu"
    network = task.network_bytes(mesh.world_size, trains=trains) if on_host else 0
    check_memory(placement.plan, mesh, _elsewhere(config, task.data), averages=averages, network_bytes=network)
    reach("train.build")
    job = build(task, mesh, placement, trains=trains)
    reach("train.built")
    try:
        yield job
    finally:
        job.embeddings.close()


def _elsewhere(config: Config, data: TableData) -> list[str]:
    """Tables whose rows are not in the host's memory: in files, or on a GPU, which says for itself that it has no room.

    With `train.device=cuda` tiered tables have all rows on the host nevertheless, and some on the GPU.
    """
    of_tiers, of_others = bool(config.tiers.folder), config.train.device != "cpu"
    tables = table_specs(config.tables, data)
    return [table.name for table in tables if (of_tiers if table.caches_rows else of_others)]


def check_rules(tables: Sequence[TableSpec], task: Task) -> None:
    """Raises ConfigurationError where ids live for some seconds, or by their scores, and batches have none."""
    timed = [table.name for table in tables if table.dynamic is not None and table.dynamic.ttl_seconds]
    if timed and not task.has_times:
        raise ConfigurationError(
            f"tables.{timed[0]}.dynamic.ttl_seconds counts seconds of the data's own time, which these data do not "
            'give; train on raw rows (data.source = "raw") whose schema names the column: time = "…"; or take ttl_steps'
        )
    scored = [table.name for table in tables if table.takes_scores]
    if scored and not task.has_scores:
        raise ConfigurationError(
            f'tables.{scored[0]}.dynamic.eviction = "score" goes by numbers that these data do not give; train on raw '
            'rows (data.source = "raw") whose schema names the column: score = "…"; or take another eviction'
        )


def _linear(config: Config, mesh: Mesh, network: nn.Module, task: Task) -> FastLinear:
    if config.train.precision == "bfloat16":
        return FastLinear(Choices(), "in bfloat16, by torch; rows, parameters and optimizer state are not")
    shapes = task.score_shapes()
    use, varies = config.train.linear, task.linear_rows_vary
    return fast_linear(network, task.linear_rows(), mesh=mesh, use=use, score_shapes=shapes, varies=varies)


def _tiers(config: Config) -> Tiers:
    folder = Path(config.tiers.folder) if config.tiers.folder else None
    given: dict[str, Any] = shared(config.tiers, Tiers) | {"folder": folder}
    return Tiers(**given, verify=config.pipeline.verify, timeout_s=config.parallel.timeout_s)
