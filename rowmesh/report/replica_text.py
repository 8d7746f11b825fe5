"""The outcome of a comparison of numbers of replicas, for a terminal."""

from __future__ import annotations

from rich.text import Text

from rowmesh.placement.text import bytes_text
from rowmesh.placement.two_dimensional import ReplicaComparison
from rowmesh.placement.two_dimensional_candidates import ReplicaCandidate
from rowmesh.report.explanation import explain
from rowmesh.report.plan_text import Printer, facts


def print_replicas(printer: Printer, comparison: ReplicaComparison, title: str) -> None:
    """Everything about a comparison of numbers of replicas."""
    printer.write(*facts(comparison.problem, title), _memory(comparison), _synchronization(comparison), "")
    table = printer.table(
        "replicas",
        "tables",
        "next to each other",
        "memory a rank",
        "look-ups, most",
        "over mean",
        "all-to-all",
        "synchronisation",
        "averaging all",
        "step",
        "",
    )
    for candidate in comparison.candidates:
        chosen = candidate is comparison.chosen
        table.add_row(
            Text(f"{'→' if chosen else ' '} {candidate.replicas}"),
            comparison.tables_text(candidate),
            comparison.together_text(candidate),
            bytes_text(candidate.needed_bytes),
            *_numbers(comparison, candidate),
            style="bold" if chosen else "",
        )
    printer.show(table)
    printer.write("", comparison.why, "")
    printer.levels(comparison.plan, comparison.problem.profile)


def explain_replicas(comparison: ReplicaComparison, what: str) -> list[str]:
    """Lines on `TABLE` or `TABLE:ROW`, within a group of the table's replicas.

    Raises:
        ConfigurationError: the plan has no such table or row.
    """
    names = [table.name for table in comparison.plan.tables]
    table = comparison.plan.table(what if what in names else what.rpartition(":")[0] or what)
    lines = explain(comparison.parts[table.replicas], what)
    if table.replicas == 1:
        return lines
    groups = comparison.plan.grid(table.replicas).groups
    shown = ", ".join(str(list(group)) for group in groups[:2]) + (", …" if len(groups) > 2 else "")
    return [
        f"{table.name} has {table.replicas} replicas, each on a group of {len(groups[0])} ranks: {shown}; below, ranks "
        "are those of a group",
        *lines,
    ]


def _numbers(comparison: ReplicaComparison, candidate: ReplicaCandidate) -> list[str]:
    cost = candidate.cost
    if cost is None:
        return [*[""] * 6, candidate.complaint]
    times = (cost.exchange_s, cost.sync_s, cost.dense_s, cost.total_s)
    return [
        f"{cost.lookups.max():,.0f}",
        f"{cost.imbalance:.3f}",
        *map(comparison.cost_text, times),
        candidate.complaint,
    ]


def _memory(comparison: ReplicaComparison) -> str:
    limit = comparison.chosen.limit_bytes
    if limit is None:
        return "memory    no limit for rows and optimizer state is known; --memory gives one"
    return f"memory    {bytes_text(limit)} a rank for rows and optimizer state"


def _synchronization(comparison: ReplicaComparison) -> str:
    mode, every = comparison.sync.mode, comparison.sync.every
    often = "in every step" if every == 1 else f"every {every} steps; a step pays 1 / {every} of it"
    return f"replicas  synchronised {often} ({mode}); averaging all is the paper's, of whole tables"
