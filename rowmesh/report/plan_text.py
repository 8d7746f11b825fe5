"""What `rowmesh plan` prints: the strategies side by side, the ranks of the chosen plan, the levels of its tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowmesh.placement.comparison import Candidate, Comparison
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.summary import LEVELS, levels_of
from rowmesh.placement.text import bytes_text, share_text
from rowmesh.report.printing import show, table_of_numbers, write
from rowmesh.report.sums_text import sums_lines

MAX_RANKS = 16
PLAIN_WIDTH = 160


class Printer:
    """Prints tables with lines on a terminal, and plain ones of any width elsewhere."""

    def __init__(self) -> None:
        console = Console()
        self.console = console if console.is_terminal else Console(width=PLAIN_WIDTH)

    def write(self, *lines: str) -> None:
        """Prints lines as they are."""
        write(self.console, *lines)

    def show(self, table: Table) -> None:
        """Prints a table."""
        show(self.console, table)

    def print(self, comparison: Comparison, title: str) -> None:
        """Everything about a comparison."""
        self.write(*facts(comparison.problem, title), _memory(comparison), "")
        self.show(self._strategies(comparison))
        for candidate in comparison.candidates:
            if candidate.complaint:
                self.write(f"  {candidate.name} does not fit: {candidate.complaint}")
        self.write("", comparison.why, *sums_lines(comparison), "")
        self.show(self._ranks(comparison))
        self.write("")
        self.levels(comparison.plan, comparison.problem.profile)

    def _strategies(self, comparison: Comparison) -> Table:
        table = self.table(
            "strategy",
            "memory (balance)",
            "look-ups (balance)",
            "fetched",
            "gradients",
            "bytes a step",
            "busiest link (balance)",
            "cost",
            "",
        )
        chosen = comparison.chosen
        for candidate in sorted(comparison.candidates, key=lambda c: (c is not chosen, not c.fits, c.objective)):
            mark = "→ " if candidate is chosen else "  "
            table.add_row(
                Text(mark + candidate.name),
                *_numbers(comparison, candidate),
                style="bold" if candidate is chosen else "",
            )
        return table

    def _ranks(self, comparison: Comparison) -> Table:
        cost = comparison.chosen.cost
        assert cost is not None
        columns = {
            "memory": ([*map(bytes_text, cost.memory_bytes)], cost.memory_bytes),
            "look-ups a step": ([f"{rows:,.0f}" for rows in cost.lookups], cost.lookups),
            "received a step": _column(cost.links.received),
            "sent a step": _column(cost.links.sent),
        }
        table = self.table("rank", *columns)
        if comparison.plan.world_size <= MAX_RANKS:
            for rank in range(comparison.plan.world_size):
                table.add_row(str(rank), *(texts[rank] for texts, _ in columns.values()))
        else:
            table.add_row("least", *(texts[int(values.argmin())] for texts, values in columns.values()))
            table.add_row("most", *(texts[int(values.argmax())] for texts, values in columns.values()))
        return table

    def levels(self, plan: Plan, profile: Profile) -> None:
        """Prints the levels of each table, its replicas where there are any, and what it sends where some send sums."""
        replicated, sums = plan.is_replicated, any(table.send == "sums" for table in plan.tables)
        heads = [head for name in LEVELS for head in (f"{name} rows", "accesses")]
        table = self.table(
            "table", "rows", *["replicas"][: int(replicated)], *heads, "two hops", *["sends"][: int(sums)]
        )
        for planned, counted in zip(plan.tables, profile.tables, strict=True):
            cells = [
                text
                for level in levels_of(planned, counted).values()
                for text in (f"{level.rows:,}", share_text(level.share))
            ]
            hops = sum(len(part) for part in planned.ranges if part.two_hop)
            count = [f"{planned.replicas}"][: int(replicated)]
            table.add_row(
                Text(planned.name),
                f"{planned.shape.num_rows:,}",
                *count,
                *cells,
                f"{hops:,}",
                *[planned.send][: int(sums)],
            )
        self.show(table)

    def table(self, first: str, *others: str) -> Table:
        """A table without rows yet, whose other columns are numbers."""
        return table_of_numbers(first, *others, box=HEAVY_HEAD if self.console.is_terminal else None)


def _column(values: np.ndarray) -> tuple[Sequence[str], np.ndarray]:
    return [bytes_text(value) for value in values], values


def facts(problem: Problem, title: str) -> list[str]:
    """The tables, the ranks and the step that a plan is for."""
    topology, request = problem.topology, problem.request
    num_rows = sum(shape.num_rows for shape in problem.shapes)
    counted = f"counts of {problem.profile.num_samples:,} samples"
    batches = f" in batches of {size:,}" if (size := problem.profile.batch_size) else ""
    objective = "the slowest link" if request.minimizes_slowest_link else "the sum over links"
    links = f"{topology.num_nodes} × {topology.ranks_per_node} ({topology.name})"
    rounded = "; values and gradients travel as bfloat16" if request.wire_dtype == "bfloat16" else ""
    source = " ".join(topology.source.split()).partition(". ")[0]
    return [
        f"tables    {title}: {len(problem.shapes)} tables, {num_rows:,} rows; {counted}{batches}",
        f"ranks     {topology.world_size} = {links}; {source}",
        f"step      {request.batch_size:,} samples a rank, {request.mode}; minimized: {objective}{rounded}",
    ]


def _memory(comparison: Comparison) -> str:
    problem = comparison.problem
    text = (
        f"memory    {bytes_text(problem.limit_bytes)} a rank for rows and optimizer state, "
        f"{bytes_text(problem.spare_bytes)} of them for copies"
    )
    return text if problem.limited(comparison.plan) is comparison.plan else f"{text}; beside tables that send sums"


def _numbers(comparison: Comparison, candidate: Candidate) -> list[str]:
    cost = candidate.cost
    if cost is None:
        return ["no plan", *[""] * 7]
    return [
        f"{bytes_text(cost.memory_bytes.max())} ({cost.memory_balance:.3f})",
        f"{cost.lookups.max():,.0f} ({cost.lookup_balance:.3f})",
        bytes_text(cost.fetched_bytes),
        bytes_text(cost.pushed_bytes),
        bytes_text(cost.total_bytes),
        f"{bytes_text(cost.links.most)} ({cost.link_balance():.3f})",
        comparison.cost_text(candidate.objective),
        "too big" if candidate.over_bytes else comparison.more_text(candidate),
    ]
