"""Tables of a run: what they are, how many rows have copies, how much goes to rare ids, and what the plan predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rowmesh.errors import RowmeshError
from rowmesh.placement import Plan
from rowmesh.placement.cost import cost_of
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.summary import levels_of
from rowmesh.report.run_record import RunRecord
from rowmesh.run.config import chosen
from rowmesh.run.resolve import resolve
from rowmesh.run.tasks import open_data, task_of


@dataclass(frozen=True)
class TableFacts:
    """A table of a run; None is not known.

    Attributes:
        name: of the table.
        rows: how many it has.
        dim: their length.
        storage: how they are kept.
        copied_rows: rows with a copy on every rank or node.
        copied_share: of the accesses of training, how many such rows get.
        rare_share: split → of its ids, how many went to the row of rare ids.
        sends: what its plan has it send in messages.
    """

    name: str
    rows: int
    dim: int | None = None
    storage: str | None = None
    copied_rows: int | None = None
    copied_share: float | None = None
    rare_share: Mapping[str, float] = field(default_factory=dict)
    sends: str = "rows"


@dataclass(frozen=True)
class Tables:
    """All tables, and what their plan predicts.

    Attributes:
        tables: in the order of the plan; those without one after it.
        predicted_bytes: between all ranks in a step; None where nothing is predicted.
        why_not: the reason then.
    """

    tables: Sequence[TableFacts]
    predicted_bytes: float | None
    why_not: str = ""


def tables_of(record: RunRecord) -> Tables:
    """Reads the plan, and the counts of the data where they still are."""
    plan, why_not = _plan(record)
    if plan is None:
        return Tables(list(_facts(record, None, None)), None, why_not)
    try:
        profile, request = _profile(record, plan)
    except (RowmeshError, OSError, ValueError, KeyError) as error:
        return Tables(list(_facts(record, plan, None)), None, f"the counts of the data cannot be read: {error}")
    if plan.is_replicated:
        return Tables(list(_facts(record, plan, profile)), None, "a step with replicas is predicted by rowmesh plan")
    if plan.world_size == 1:
        return Tables(list(_facts(record, plan, profile)), None, "there is one rank")
    travelling = plan if request.allows_sums else _with_rows(plan)
    return Tables(list(_facts(record, plan, profile)), cost_of(travelling, profile, request).total_bytes)


def _plan(record: RunRecord) -> tuple[Plan | None, str]:
    try:
        return Plan.load(record.folder.plan), ""
    except (RowmeshError, OSError) as error:
        return None, str(error)


def _profile(record: RunRecord, plan: Plan) -> tuple[Profile, Request]:
    """How often the steps of a run read each row, and what these steps are."""
    config = resolve(record.folder.config)
    task, _ = task_of(config, open_data(config, verify=False))
    # Where ranks read each other's memory, nothing is rounded.
    is_rounded = record.about.get("transport") == "collective" and task.config.parallel.wire_dtype == "bfloat16"
    request = Request(
        batch_size=-(-chosen(task.config.data.batch_size) // plan.world_size),
        wire_dtype="bfloat16" if is_rounded else "float32",
        allows_sums=record.about.get("transport") == "collective" and task.config.pipeline.is_off,
    )
    return task.profile([table.shape for table in plan.tables], request, plan.world_size), request


def _facts(record: RunRecord, plan: Plan | None, profile: Profile | None) -> Iterator[TableFacts]:
    """The facts of all tables: the tables of the plan, then the tables that only the run knows."""
    about = record.about.get("tables") or {}
    rare = record.about.get("rare_share") or {}
    counts = {table.name: table for table in profile.tables} if profile is not None else {}
    for table in plan.tables if plan is not None else ():
        copied, share = None, None
        if table.name in counts:
            levels = levels_of(table, counts[table.name])
            copied = levels["hot"].rows + levels["warm"].rows
            share = levels["hot"].share + levels["warm"].share
        known = about.get(table.name, {})
        yield TableFacts(
            table.name,
            table.shape.num_rows,
            known.get("dim"),
            known.get("storage"),
            copied,
            share,
            rare.get(table.name, {}),
            table.send,
        )
    planned = {table.name for table in plan.tables} if plan is not None else set()
    for name, known in about.items():
        if name not in planned:
            yield TableFacts(name, known["rows"], known["dim"], known["storage"], None, None, rare.get(name, {}))


def _with_rows(plan: Plan) -> Plan:
    """The same owners, and rows from all: what a run does whose tables send no sums."""
    return replace(plan, tables=tuple(replace(table, send="rows") for table in plan.tables))
