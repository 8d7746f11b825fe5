"""Report of replica groups: all numbers of replicas beside each other, then the placement within a group."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from rowmesh._support.files.atomic import replacing_file
from rowmesh.placement.text import bytes_text
from rowmesh.placement.two_dimensional import ReplicaComparison
from rowmesh.placement.two_dimensional_candidates import ReplicaCandidate
from rowmesh.report.html import page
from rowmesh.report.plan_page import footer, heading, sections

HEADS = (
    "replicas",
    "tables",
    "next to each other",
    "memory, fullest rank",
    "look-ups, busiest rank",
    "all-to-all",
    "synchronisation",
    "averaging whole tables",
    "step",
)


def write_replica_report(comparison: ReplicaComparison, path: Path, title: str) -> None:
    """Writes the report as one HTML file; what stood at `path` stays where that fails.

    Args:
        comparison: what to show.
        path: of the file.
        title: what was planned, such as the name of the configuration.
    """
    with replacing_file(path) as file:
        file.write(replica_report(comparison, title).encode())


def replica_report(comparison: ReplicaComparison, title: str) -> str:
    """The report as HTML."""
    first = next(iter(comparison.parts.values()))
    return page(f"{title}: placement", [heading(title, comparison.why), *_sections(comparison), footer(first)])


def _sections(comparison: ReplicaComparison) -> Iterator[str]:
    yield "<h2>Replica groups</h2>" + _note(comparison) + _table(comparison)
    for replicas, part in comparison.parts.items():
        if len(comparison.parts) > 1 or replicas > 1:
            yield f'<h1>{_part_text(comparison, replicas)}</h1><p class="note">{escape(part.why)}</p>'
        yield from sections(part)


def _part_text(comparison: ReplicaComparison, replicas: int) -> str:
    T, tables = comparison.plan.world_size, len(comparison.plan.part(replicas).tables)
    counted = f"{tables} table{'s'[: tables != 1]}"
    return (
        f"{counted} with {replicas} replicas: a group of {T // replicas} ranks"
        if replicas > 1
        else (f"{counted} on all {T} ranks")
    )


def _note(comparison: ReplicaComparison) -> str:
    every = comparison.sync.every
    often = "in every step" if every == 1 else f"every {every} steps, of which a step pays 1 / {every}"
    return (
        '<p class="note">M replicas of a table are each spread over a group of T / M ranks. All-to-alls stay in a '
        f"group; what keeps replicas equal ({comparison.sync.mode}, {often}) goes between the ranks that hold the same "
        "rows. Times are of the busiest rank, one part after the other.</p>"
    )


def _table(comparison: ReplicaComparison) -> str:
    rows = "".join(_row(comparison, candidate) for candidate in comparison.candidates)
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(comparison: ReplicaComparison, candidate: ReplicaCandidate) -> str:
    chosen, cost = candidate is comparison.chosen, candidate.cost
    badge = '<span class="badge">chosen</span>' if chosen else ""
    small = f"<small>{escape(candidate.complaint)}</small>" if candidate.complaint else ""
    cells = [
        f"<td>{candidate.replicas}{badge}</td><td>{comparison.tables_text(candidate)}</td>"
        f"<td>{comparison.together_text(candidate)}</td>"
        f"<td{' class=bad' if candidate.complaint else ''}>{bytes_text(candidate.needed_bytes)}{small}</td>"
    ]
    if cost is None:
        cells.append('<td colspan="5"></td>')
    else:
        cells.append(f"<td>{cost.lookups.max():,.0f} rows<small>{cost.imbalance:.3f} × mean</small></td>")
        times = (cost.exchange_s, cost.sync_s, cost.dense_s, cost.total_s)
        cells += [f"<td>{comparison.cost_text(seconds)}</td>" for seconds in times]
    return f"<tr{' class=chosen' if chosen else ''}>{''.join(cells)}</tr>"
