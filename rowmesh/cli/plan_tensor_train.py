"""`rowmesh plan --tensor-train`: what cores in place of rows would save, table by table, and what they cost a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.memory import Buffer
from rowmesh.placement import TableShape
from rowmesh.placement.request import Request
from rowmesh.placement.text import bytes_text
from rowmesh.report.plan_text import Printer
from rowmesh.run.table_config import TablesConfig
from rowmesh.run.tables import table_specs, update_rule
from rowmesh.run.task import Task
from rowmesh.tables import TableSpec, TensorTrain, fuse
from rowmesh.tables.cores import CoreArena
from rowmesh.tables.update_rules import AdaGrad, UpdateRule

MIN_ROWS = 100_000  # of tables that are looked at, where the configuration says nothing


@dataclass(frozen=True)
class Compressed:
    """A table as cores of one rank.

    Attributes:
        cores_bytes: of the cores and their optimizer state, on every rank.
        gradient_bytes: that ranks add up in every step.
        step_s: look-up, gradients and update of a rank's batch, in seconds.
    """

    cores_bytes: int
    gradient_bytes: int
    step_s: float


@dataclass(frozen=True)
class Compression:
    """Costs of tensor-train storage for a table.

    Attributes:
        table: its name.
        num_rows: its rows.
        rows_bytes: of all rows and their optimizer state, over all ranks together.
        num_distinct: distinct ids of a rank's batch.
        by_rank: for each tensor-train rank.
    """

    table: str
    num_rows: int
    rows_bytes: int
    num_distinct: int
    by_rank: tuple[Compressed, ...]


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks of `--tensor-train`.

    >>> parse_ranks("16, 64")
    (16, 64)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigurationError(f"--tensor-train: {text!r} are no ranks; write 16 or 16,32,64")
    return tuple(dict.fromkeys(int(part) for part in parts))


def cores_bytes(tables: Sequence[TableSpec]) -> int:
    """Memory of the cores and their state, of those that are tensor-train tables; every rank has all of it."""
    return sum(_size(table)[0] for table in tables if not table.stores_rows)


def compressions(task: Task, request: Request, world_size: int, ranks: Sequence[int]) -> Iterator[Compression]:
    """Savings and costs of tensor-train storage for every large table; measures for about a second a table.

    Args:
        task: of the run, whose data say how many distinct ids a batch has.
        request: samples of a rank.
        world_size: ranks that read them.
        ranks: tensor-train ranks; a table that cannot have one takes the largest that it can.
    """
    config = task.config
    least = config.tables.tensor_train.min_rows or MIN_ROWS
    for table in table_specs(config.tables, task.data):
        if table.num_rows >= least:
            as_rows = update_rule(table.name, config.tables, is_cored=False)
            dense = replace(table, storage="dense", tensor_train=None, optimizer=as_rows)
            ids, rule = _distinct(task, dense, request, world_size), _core_rule(table.name, config.tables)
            found = tuple(_compressed(_cored(dense, rank, rule), ids) for rank in ranks)
            shape = TableShape.of(dense)
            yield Compression(table.name, table.num_rows, table.num_rows * shape.row_bytes, len(ids), found)


def print_compressions(printer: Printer, found: Sequence[Compression], ranks: Sequence[int], least: int) -> None:
    """A line a table, and one for all together."""
    if not found:
        printer.write(
            f"tensor-train: no table has {least:,} rows or more; tables.tensor_train.min_rows lowers what is looked at"
        )
        return
    heads = [head for rank in ranks for head in (f"rank {rank}: cores", "smaller", "a step")]
    table = printer.table("tensor-train", "rows", "dense, all ranks", "distinct ids", *heads)
    for each in found:
        cells = [text for part in each.by_rank for text in _cells(each.rows_bytes, part.cores_bytes, part.step_s)]
        table.add_row(
            Text(each.table), f"{each.num_rows:,}", bytes_text(each.rows_bytes), f"{each.num_distinct:,}", *cells
        )
    rows_bytes, totals = sum(each.rows_bytes for each in found), _totals(found)
    cells = [text for part in totals for text in _cells(rows_bytes, part.cores_bytes, part.step_s)]
    num_rows, distinct = sum(each.num_rows for each in found), sum(each.num_distinct for each in found)
    table.add_row("all", f"{num_rows:,}", bytes_text(rows_bytes), f"{distinct:,}", *cells, style="bold")
    printer.show(table)
    sums = ", ".join(f"{bytes_text(p.gradient_bytes)} at rank {r}" for p, r in zip(totals, ranks, strict=True))
    printer.write(
        "Sizes are with optimizer state. Every rank has all cores; a step is one thread's look-up, gradients and "
        f"update of a rank's batch, measured here; in each, ranks add up gradients of {sums}. "
        'tables.NAME.storage = "tensor_train" or tables.tensor_train.min_rows takes them.'
    )


def report(task: Task, request: Request, world_size: int, ranks: Sequence[int], printer: Printer) -> None:
    """Measures and prints."""
    found = list(compressions(task, request, world_size, ranks))
    printer.write("")
    print_compressions(printer, found, ranks, task.config.tables.tensor_train.min_rows or MIN_ROWS)


def _cells(rows_bytes: int, cores_bytes: int, step_s: float) -> tuple[str, str, str]:
    return bytes_text(cores_bytes), f"{rows_bytes / cores_bytes:,.0f} ×", f"{step_s * 1e3:.2f} ms"


def _totals(found: Sequence[Compression]) -> list[Compressed]:
    return [
        Compressed(
            sum(part.cores_bytes for part in parts),
            sum(part.gradient_bytes for part in parts),
            sum(part.step_s for part in parts),
        )
        for parts in zip(*(each.by_rank for each in found), strict=True)
    ]


def _core_rule(name: str, tables: TablesConfig) -> UpdateRule:
    """That of the cores where it is given, else that of the rows, or AdaGrad where cores cannot have it."""
    if tables.of(name).tensor_train.optimizer is not None:
        return update_rule(name, tables, is_cored=True)
    rule = update_rule(name, tables, is_cored=False)
    return AdaGrad(lr=rule.lr) if "row" in rule.state.values() else rule


def _cored(table: TableSpec, rank: int, rule: UpdateRule) -> TableSpec:
    """The table as cores."""
    ranks = TensorTrain().shape(table.num_rows, table.dim).at(rank).ranks
    dtype = torch.float32 if table.dtype == torch.bfloat16 else table.dtype
    return replace(table, storage="tensor_train", tensor_train=TensorTrain(rank=ranks), optimizer=rule, dtype=dtype)


def _size(table: TableSpec) -> tuple[int, int]:
    """Bytes of the cores with their state, and of their gradients."""
    num_bytes = table.dtype.itemsize * table.tensor_train_shape.num_parameters
    return num_bytes * (1 + len(table.optimizer.state)), num_bytes


def _compressed(table: TableSpec, ids: torch.Tensor) -> Compressed:
    return Compressed(*_size(table), step_seconds(table, ids))


def _distinct(task: Task, table: TableSpec, request: Request, world_size: int) -> torch.Tensor:
    """Distinct ids of a batch that is drawn from the counts of the data, int64."""
    counted = task.profile([TableShape.of(table)], request, world_size)
    profile, generator = counted.tables[0], np.random.default_rng(0)
    sums = np.cumsum(profile.lengths * profile.accesses)
    draws = round(request.batch_size * sums[-1] / counted.num_samples)
    runs = np.searchsorted(sums, generator.random(draws) * sums[-1], side="right")
    rows = profile.starts[runs] + generator.integers(profile.lengths[runs])
    return torch.from_numpy(np.unique(rows))


def step_seconds(table: TableSpec, ids: Tensor, repeats: int = 7) -> float:
    """Seconds that the look-up of distinct ids, their gradients and the update of the cores take one thread.

    Finding the distinct ids, pooling, and the sum over ranks come on top; the first two are the same for dense rows.

    Args:
        table: a tensor-train table.
        ids: int64 `[U]`, distinct.
        repeats: steps, of which the median counts; one more goes before them, which compiles.
    """
    (group,) = fuse([table])
    arena = CoreArena(group)
    arena.initialize(seed=0)
    rows = Buffer(len(ids) * table.dim * table.dtype.itemsize)
    generator = torch.Generator("cpu").manual_seed(0)
    gradients = 1e-3 * torch.randn(len(ids), table.dim, generator=generator, dtype=table.dtype, device="cpu")
    elapsed = []
    for step in range(1, repeats + 2):
        began = time.perf_counter()
        lookup = arena.look_up(0, ids, rows.address, keep=True)
        arena.update(0, lookup, gradients, table.optimizer.numbers(table.optimizer.lr, 1.0, step))
        elapsed.append(time.perf_counter() - began)
    return statistics.median(elapsed[1:])
