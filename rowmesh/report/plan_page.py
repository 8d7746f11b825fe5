"""Report: a comparison of placements as one HTML file, which needs nothing beside it.

Shown are the chosen plan and why it was chosen, all strategies beside it, what each rank of each strategy holds, looks
up and receives, the bytes between every two ranks, the frequency curve of each table with its levels, and all ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

import rowmesh
from rowmesh._support.files.atomic import replacing_file
from rowmesh.placement.comparison import Candidate, Comparison
from rowmesh.placement.cost import Cost
from rowmesh.placement.plan import TablePlan
from rowmesh.placement.profile import TableProfile
from rowmesh.placement.summary import LEVEL_OF, Level, accesses_before, levels_of, stretches
from rowmesh.placement.text import bytes_text, rows_text, share_text
from rowmesh.report.charts import bars, frequency_curve, heatmap
from rowmesh.report.html import fact_list, measure, page, sentence
from rowmesh.report.sums_text import sums_lines

MAX_STRETCHES = 400
FIRST_TABLES = 12
CUT_OFF = 4


def write_report(comparison: Comparison, path: Path, title: str) -> None:
    """Writes the report; what stood at `path` stays where that fails.

    Args:
        comparison: what to show.
        path: of the HTML file.
        title: what was planned, such as the name of the configuration.
    """
    with replacing_file(path) as file:
        file.write(report(comparison, title).encode())


def report(comparison: Comparison, title: str) -> str:
    """The report as HTML."""
    why = "; ".join((comparison.why, *sums_lines(comparison)))
    return page(f"{title}: placement", [heading(title, why), *sections(comparison), footer(comparison)])


def heading(title: str, why: str) -> str:
    """The problem, and the reason for the chosen plan."""
    return f'<h1>{escape(title)}: where every row lives</h1>\n<p class="why">{escape(sentence(why))}</p>'


def sections(comparison: Comparison) -> Iterator[str]:
    """All about a comparison and its plan."""
    yield _facts(comparison)
    yield "<h2>Strategies</h2>" + _comparison_table(comparison)
    yield (
        "<h2>Ranks and links</h2>"
        '<p class="note">Bars are ranks, on one scale for all strategies; the dashed line is the memory limit, and '
        "pink bars go beyond it or off the scale. In the squares, row i, column j is what rank i receives from rank j "
        "in a step.</p>"
        f'<div class="scale">0 <i></i> {_link_scale_text(comparison)} a step and link</div>'
    )
    yield f'<div class="grid-cards">{"".join(_strategy_cards(comparison))}</div>'
    yield (
        "<h2>Tables</h2>"
        '<p class="note">How often each row was read, most frequent first; both axes are logarithmic. '
        "A dot at the end is the row that stands for all rare ids.</p>"
        f'<div class="levels legend">{_legend()}</div>'
    )
    yield _table_cards(comparison)
    yield '<h2>Ranges</h2><p class="note">The whole plan: all rows of all tables, and the ranks that hold them.</p>'
    yield from (_ranges(table, profile) for table, profile in _tables(comparison))


def _tables(comparison: Comparison) -> Iterable[tuple[TablePlan, TableProfile]]:
    return zip(comparison.plan.tables, comparison.problem.profile.tables, strict=True)


def _facts(comparison: Comparison) -> str:
    problem, plan, cost = comparison.problem, comparison.plan, comparison.chosen.cost
    assert cost is not None
    request, topology = problem.request, problem.topology
    num_rows = sum(shape.num_rows for shape in problem.shapes)
    objective = "slowest link" if request.minimizes_slowest_link else "sum over links"
    step = cost.total_bytes / plan.world_size
    facts = [
        ("Ranks", f"{plan.world_size}", f"{plan.num_nodes} × {plan.ranks_per_node}, topology {topology.name}"),
        ("Tables", f"{len(plan.tables)}", f"{num_rows:,} rows, {bytes_text(_table_bytes(comparison))}"),
        ("Samples a step", f"{request.batch_size * plan.world_size:,}", f"{request.batch_size:,} a rank"),
        ("Memory a rank", bytes_text(max(plan.memory_bytes)), f"of {bytes_text(problem.limit_bytes)} allowed"),
        ("Bytes a step", bytes_text(cost.total_bytes), f"{bytes_text(step)} a rank, predicted"),
        (f"Cost, {objective}", comparison.cost_text(comparison.chosen.objective), f"mode {request.mode}"),
    ]
    return fact_list(facts)


def _table_bytes(comparison: Comparison) -> int:
    return sum(shape.num_rows * shape.row_bytes for shape in comparison.problem.shapes)


def _comparison_table(comparison: Comparison) -> str:
    heads = [
        "strategy",
        "memory, fullest rank",
        "look-ups, busiest rank",
        "fetched a step",
        "gradients a step",
        "bytes a step",
        "busiest link",
        "cost a step",
    ]
    rows = "".join(_comparison_row(comparison, candidate) for candidate in _ordered(comparison))
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _comparison_row(comparison: Comparison, candidate: Candidate) -> str:
    name, cost = escape(candidate.name), candidate.cost
    if cost is None:
        return f'<tr><td>{name}</td><td class="words wrap bad" colspan="7">{escape(candidate.refusal)}</td></tr>'
    cells = [
        (bytes_text(cost.memory_bytes.max()), candidate.complaint or _balance_text(cost.memory_balance)),
        (f"{cost.lookups.max():,.0f} rows", _balance_text(cost.lookup_balance)),
        (bytes_text(cost.fetched_bytes), ""),
        (bytes_text(cost.pushed_bytes), ""),
        (bytes_text(cost.total_bytes), ""),
        (bytes_text(cost.links.most), _balance_text(cost.link_balance())),
        (comparison.cost_text(candidate.objective), comparison.more_text(candidate).replace("%", " %")),
    ]
    bad = [bool(candidate.complaint)] + [False] * (len(cells) - 1)
    filled = "".join(
        f"<td{' class=bad' if is_bad else ''}>{value}<small>{escape(below)}</small></td>"
        for (value, below), is_bad in zip(cells, bad, strict=True)
    )
    chosen = candidate is comparison.chosen
    return f"<tr{' class=chosen' if chosen else ''}><td>{name}{_badge(chosen)}</td>{filled}</tr>"


def _balance_text(balance: float) -> str:
    return f"balance {balance:.4f}"


def _badge(chosen: bool) -> str:
    return '<span class="badge">chosen</span>' if chosen else ""


def _ordered(comparison: Comparison) -> list[Candidate]:
    """The chosen one first, then by cost; those without a plan last."""
    chosen = comparison.chosen
    return sorted(comparison.candidates, key=lambda each: (each is not chosen, not each.fits, each.objective))


def _strategy_cards(comparison: Comparison) -> Iterator[str]:
    scales = _Scales.of(comparison)
    for candidate in _ordered(comparison):
        if candidate.cost is not None:
            yield _strategy_card(comparison, candidate, scales)


@dataclass(frozen=True)
class _Scales:
    """Where the bars and shades of all strategies end: what they need, or a few times what the chosen one needs."""

    memory: float
    lookups: float
    received: float
    link: float

    @staticmethod
    def of(comparison: Comparison) -> _Scales:
        """The scales of a comparison."""
        costs = [candidate.cost for candidate in comparison.candidates if candidate.cost is not None]

        def scale(of: Callable[[Cost], np.ndarray], least: float = 0.0) -> float:
            chosen = comparison.chosen.cost
            assert chosen is not None
            needed = max(float(of(cost).max()) for cost in costs)
            return min(max(needed, least), CUT_OFF * max(float(of(chosen).max()), least))

        return _Scales(
            scale(lambda cost: cost.memory_bytes, comparison.problem.limit_bytes),
            scale(lambda cost: cost.lookups),
            scale(lambda cost: cost.links.received),
            scale(lambda cost: cost.link_bytes),
        )


def _strategy_card(comparison: Comparison, candidate: Candidate, scales: _Scales) -> str:
    cost, problem = candidate.cost, comparison.problem
    assert cost is not None
    chosen = candidate is comparison.chosen
    complaint = f'<span class="bad">{escape(candidate.complaint)}</span>' if candidate.complaint else ""
    received = cost.links.received
    sizes = [bytes_text(value) for value in cost.memory_bytes]
    rows = [f"{value:,.0f} rows" for value in cost.lookups]
    most = f"{bytes_text(cost.links.most)} on the busiest link"
    measures = [
        measure("memory", sizes, cost.memory_bytes.tolist())
        + bars(cost.memory_bytes.tolist(), scales.memory, sizes, problem.limit_bytes),
        measure("look-ups a step", rows, cost.lookups.tolist()) + bars(cost.lookups.tolist(), scales.lookups, rows),
        measure("received a step", got := [bytes_text(value) for value in received], received.tolist())
        + bars(received.tolist(), scales.received, got),
        f'<div class="measure"><span>bytes between ranks</span><b>{most}</b></div>'
        + heatmap(cost.link_bytes, scales.link, comparison.plan.ranks_per_node, f"{candidate.name}: {most}"),
    ]
    right = complaint or f"<span>{comparison.cost_text(candidate.objective)} a step</span>"
    head = f'<div class="head"><h3>{escape(candidate.name)}{_badge(chosen)}</h3>{right}</div>'
    return f'<div class="card{" chosen" if chosen else ""}">{head}{"".join(measures)}</div>'


def _link_scale_text(comparison: Comparison) -> str:
    end = _Scales.of(comparison).link
    most = max(float(each.cost.links.most) for each in comparison.candidates if each.cost is not None)
    return bytes_text(end) + (" or more," if most > end else "")


def _legend() -> str:
    texts = {"hot": "hot: a copy on every rank", "warm": "warm: a copy on every node", "cold": "cold: one copy"}
    return "".join(f'<span><span class="dot {level}"></span>{text}</span>' for level, text in texts.items())


def _table_cards(comparison: Comparison) -> str:
    """The tables that are read most first; many tables fold."""
    cards = [_table_card(table, profile) for table, profile in _tables(comparison)]
    shown = f'<div class="grid-cards">{"".join(cards[:FIRST_TABLES])}</div>'
    if len(cards) <= FIRST_TABLES:
        return shown
    rest = f'<div class="grid-cards">{"".join(cards[FIRST_TABLES:])}</div>'
    return f"{shown}<details><summary>{len(cards) - FIRST_TABLES} more tables</summary>{rest}</details>"


def _table_card(table: TablePlan, profile: TableProfile) -> str:
    levels = levels_of(table, profile)
    texts = "".join(_level_text(name, level) for name, level in levels.items() if level.rows)
    shares = "".join(f'<i class="{name}" style="width:{level.share:.2%}"></i>' for name, level in levels.items())
    size = f"{table.shape.num_rows:,} rows, {bytes_text(table.shape.num_rows * table.shape.row_bytes)}"
    size += f", sums from rank {table.ranges[0].rank}" if table.send == "sums" else ""
    return (
        f'<div class="card"><div class="head"><h3>{escape(table.name)}</h3><span>{size}</span></div>'
        f'{frequency_curve(table, profile)}<div class="share">{shares}</div><div class="levels">{texts}</div></div>'
    )


def _level_text(name: str, level: Level) -> str:
    text = f"<b>{level.rows:,}</b> {name}, {share_text(level.share)} of accesses"
    return f'<span><span class="dot {name}"></span>{text}</span>'


def _ranges(table: TablePlan, profile: TableProfile) -> str:
    found = stretches(table)
    total = max(profile.total_accesses, 1e-300)
    rows = []
    for stretch in found[:MAX_STRETCHES]:
        first, last = accesses_before(profile, np.array([stretch.start, stretch.stop]))
        level = LEVEL_OF[stretch.rule]
        rows.append(
            f'<tr><td>{rows_text(stretch.start, stretch.stop)}</td><td class="words"><span class="dot {level}"></span>'
            f"{stretch.rule}{', two hops' if stretch.two_hop else ''}</td>"
            f'<td class="words">{escape(stretch.owners_text())}</td><td>{share_text((last - first) / total)}</td></tr>'
        )
    more = f'<p class="note">and {len(found) - MAX_STRETCHES:,} more</p>' if len(found) > MAX_STRETCHES else ""
    count = f"{len(table.ranges):,} range{'s'[: len(table.ranges) != 1]}"
    return (
        f"<details><summary>{escape(table.name)} <small>{table.shape.num_rows:,} rows in {count}</small></summary>"
        '<div class="card scroll"><table><thead><tr><th>rows</th><th class="words">rule</th>'
        '<th class="words">owner</th>'
        f"<th>accesses</th></tr></thead><tbody>{''.join(rows)}</tbody></table>{more}</div></details>"
    )


def footer(comparison: Comparison) -> str:
    """A note on the numbers."""
    problem = comparison.problem
    counted = "and the batches that hold a row" if problem.profile.batch_size else "as independent draws"
    unit = (
        "Links have relative costs, so cost is bytes weighted by them"
        if comparison.is_relative
        else "Cost is bytes times the seconds a byte of their link"
    )
    return (
        "<footer><p>Expectations of one step, from access counts of "
        f"{problem.profile.num_samples:,} samples {counted}. {unit}. Balance is the least over the most. Topology "
        f"{escape(problem.topology.name)}: {escape(problem.topology.source or 'no source given')}</p>"
        f"<p>rowmesh {rowmesh.__version__}</p></footer>"
    )
