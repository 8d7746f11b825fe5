"""Runs as a page shows them: each with a name and a colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rowmesh.report.run_record import RunRecord
from rowmesh.report.run_tables import Tables

STYLES = ("a", "b")


@dataclass(frozen=True)
class Shown:
    """A run on a page.

    Attributes:
        record: what it left.
        tables: its tables.
        name: on this page.
        style: its colour.
    """

    record: RunRecord
    tables: Tables
    name: str
    style: str


def heading_of(run: Shown, runs: Sequence[Shown]) -> str:
    """Which run something is of, where there are two."""
    if len(runs) == 1:
        return ""
    return f'<h3 class="of"><span class="dot {run.style}"></span>{escape(run.name)}</h3>'


def side_by_side(parts: Sequence[str]) -> str:
    """Parts in columns, where there is room for them."""
    kind = "columns" if len(parts) > 1 else "column"
    return f'<div class="{kind}">{"".join(parts)}</div>' if parts else ""
