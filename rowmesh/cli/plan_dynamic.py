"""`rowmesh plan` and dynamic tables, which are not placed: what they take of memory, look-ups and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.text import Text

from rowmesh.placement import Plan, TableShape
from rowmesh.placement.cost import cost_of
from rowmesh.placement.request import Request
from rowmesh.placement.text import bytes_text
from rowmesh.placement.topology import Topology
from rowmesh.report.plan_text import Printer
from rowmesh.run.task import Task
from rowmesh.tables import TableSpec
from rowmesh.tables.dynamic.layout import num_kept, num_spare, rules_of, shards_of

RESOLVE_BYTES = 24
"""Messages for an id that a rank requests from another: the id with its count, and the frame in the answer."""
INDEX_BYTES = 40
"""The index entry of an id that a table knows: a record of four numbers, and its digest and slot."""


@dataclass(frozen=True)
class DynamicCost:
    """Memory and traffic of a dynamic table.

    Attributes:
        table: its name.
        capacity: ids that it holds at most, over all ranks.
        num_seen: ids in the data.
        memory_bytes: of the rank that has most: rows, optimizer state and index at capacity.
        spare_bytes: of that rank, rows of spare frames if all were in use at once.
        lookups: rows that a rank gathers in a step.
        link_bytes: received by the rank that receives most in a step.
    """

    table: str
    capacity: int
    num_seen: int
    memory_bytes: int
    spare_bytes: int
    lookups: float
    link_bytes: float


def memory_of(table: TableSpec, num_ranks: int) -> tuple[int, int]:
    """Bytes of the rank that has most of a dynamic table: at capacity, and of spare frames if all were in use.

    Args:
        table: which.
        num_ranks: of a replica group.
    """
    rules, row_bytes = rules_of(table), TableShape.of(table).row_bytes
    shards = [shards_of(rules, member, num_ranks) for member in range(num_ranks)]
    most = max(shards, key=lambda each: num_kept(rules, each))
    return num_kept(rules, most) * (row_bytes + INDEX_BYTES), 2 * num_spare(rules, most) * row_bytes


def dynamic_bytes(tables: Sequence[TableSpec], num_ranks: int) -> int:
    """Memory at capacity of those tables that are dynamic, on the rank that has most."""
    return sum(memory_of(table, num_ranks)[0] for table in tables if table.takes_any_id)


def dynamic_costs(tables: Sequence[TableSpec], task: Task, topology: Topology, request: Request) -> list[DynamicCost]:
    """Costs of dynamic tables. Hashes spread ids over ranks as cyclic rows are spread, with the counts of the data."""
    found, size = [], topology.world_size
    for table in tables:
        seen = task.data.table(table.name).num_rows
        shape = replace(TableShape.of(table), num_rows=seen)
        plan = Plan.cyclic([shape], size, topology.ranks_per_node)
        cost = cost_of(plan, task.profile([shape], request, size), request)
        asked = cost.lookup_rows.sum(axis=1) - np.diag(cost.lookup_rows)
        link_bytes = float((cost.link_bytes.sum(axis=1) + RESOLVE_BYTES * asked).max())
        memory = memory_of(table, size)
        found.append(
            DynamicCost(table.name, rules_of(table).capacity, seen, *memory, float(cost.lookups.max()), link_bytes)
        )
    return found


def print_dynamic(printer: Printer, found: Sequence[DynamicCost]) -> None:
    """A line a table."""
    heads = ("dynamic", "capacity", "ids in data", "memory", "spare, at most", "look-ups", "received")
    table = printer.table(*heads)
    for each in found:
        numbers = f"{each.capacity:,}", f"{each.num_seen:,}", bytes_text(each.memory_bytes)
        costs = bytes_text(each.spare_bytes), f"{each.lookups:,.0f}", bytes_text(each.link_bytes)
        table.add_row(Text(each.table), *numbers, *costs)
    printer.show(table)
    printer.write(
        "Dynamic tables are not placed: hashes of ids say where rows are. Numbers are of the rank that has most, in",
        "one replica. Memory is that at capacity, with optimizer state and index; spare frames take theirs where",
        "they are used. Of a step it is the rows gathered, and the bytes received with ids and frames. Two messages",
        "a step come before those of other tables.",
    )
    for each in found:
        if each.capacity < each.num_seen:
            printer.write(
                f"{each.table}: the data have {each.num_seen:,} ids, and the table holds {each.capacity:,}; others are "
                "evicted, and come again as new ones"
            )
