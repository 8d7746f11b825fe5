"""What a table sends, and what the other way would take: for explanations and reports of plans."""

from __future__ import annotations

from dataclasses import replace

from rowmesh.placement.comparison import Comparison
from rowmesh.placement.plan import Plan, TablePlan
from rowmesh.placement.text import bytes_text


def sums_lines(comparison: Comparison) -> list[str]:
    """A line on the tables that send sums, where any might."""
    if "sums" not in comparison.plan.notes:
        return []
    others = "; the other strategies are shown as plans of rows" if len(comparison.candidates) > 1 else ""
    return [comparison.plan.notes["sums"] + others]


def sums_text(comparison: Comparison, name: str) -> str:
    """The bags of a table, the bytes that the mean rank gets in a step as rows and as sums, and which it sends.

    Empty where rows are sent without a choice, and bags have one id.
    """
    plan, problem = comparison.plan, comparison.problem.of_tables([name])
    table, demand, W = plan.table(name), problem.demand, plan.world_size
    send, bags, ids = problem.shapes[0].send, float(demand.bags[0]), float(demand.ids[0])
    if table.send == send == "rows" and ids <= bags * (1 + 1e-9):
        return ""
    cyclic = Plan.cyclic([replace(table.shape, send="rows")], W).tables[0]
    as_rows = table if table.send == "rows" else cyclic
    rows, sums = (problem.cost(replace(plan, tables=(each,))) for each in (as_rows, TablePlan.of_sums(table.shape, 0)))
    distinct = float(demand.rank @ demand.lengths)
    text = (
        f"{ids / bags:.3g} ids a bag, {distinct / bags:.3g} distinct rows: "
        f"rows {bytes_text(rows.total_bytes / W)}, sums {bytes_text(sums.total_bytes / W)}: {table.send}"
    )
    if table.send == "sums":
        return f"{text} from rank {table.ranges[0].rank}" + (", as asked for" if send == "sums" else "")
    if send == "rows":
        return f"{text}, as asked for"
    cost = comparison.chosen.cost
    assert cost is not None
    if sums.total_bytes < rows.total_bytes and problem.request.allows_sums and W > 1:
        if sums.busiest_bytes < cost.busiest_bytes:
            return f"{text}, since the busiest rank would have no less"
        owner, busiest = bytes_text(sums.busiest_bytes), bytes_text(cost.busiest_bytes)
        return f"{text}, since its owner would have {owner} a step, and the busiest rank has {busiest}"
    return text
