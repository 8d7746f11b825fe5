"""Tables of a run, its configuration and its environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rowmesh.placement.text import bytes_text, share_text
from rowmesh.report.html import data_table, section
from rowmesh.report.run_tables import TableFacts
from rowmesh.report.shown import Shown, heading_of, side_by_side
from rowmesh.report.traffic import hit_rate

FIRST_TABLES = 12


def tables_section(runs: Sequence[Shown]) -> str:
    """Tables with their copies and rare ids, and what fast memory found."""
    columns = [f"<div>{heading_of(run, runs)}{body}</div>" for run in runs if (body := _tables(run) + _tiers(run))]
    note = (
        "Copies: rows that every rank, or every node, has, and the share of accesses that they get. Rare: ids that "
        "share one row, since they were seldom or never in the training split."
    )
    return section("Tables", note if columns else "", side_by_side(columns))


def _tables(run: Shown) -> str:
    tables = sorted(run.tables.tables, key=lambda table: -table.rows)
    if not tables:
        return ""
    heads = ["table", "rows", "dim", "storage", "copies", "rare, training", "rare, test"]
    shown = data_table(heads, map(_row, tables[:FIRST_TABLES]), words=(0, 3))
    if len(tables) <= FIRST_TABLES:
        return shown
    rest = data_table(heads, map(_row, tables[FIRST_TABLES:]), words=(0, 3))
    return f"{shown}<details><summary>{len(tables) - FIRST_TABLES} smaller tables</summary>{rest}</details>"


def _row(table: TableFacts) -> list[str]:
    copies = "" if table.copied_rows is None else f"{table.copied_rows:,}"
    if table.copied_rows:
        copies += f"<small>{share_text(table.copied_share or 0.0)} of accesses</small>"
    rare = [share_text(table.rare_share[split]) if split in table.rare_share else "" for split in ("train", "test")]
    dim = "" if table.dim is None else str(table.dim)
    storage = escape(table.storage or "").replace("_", " ")
    storage += "<small>sends sums</small>" if table.sends == "sums" else ""
    return [escape(table.name), f"{table.rows:,}", dim, storage, copies, *rare]


def _tiers(run: Shown) -> str:
    rows = [
        [
            escape(name).replace("_", "_<wbr>"),
            share_text(rate) if (rate := hit_rate(counts)) is not None else "",
            f"{counts.get('rows_found', 0):,}",
            f"{counts.get('rows_forwarded', 0):,}",
            f"{counts.get('rows_read', 0):,}<small>{bytes_text(counts.get('bytes_read', 0))}</small>",
            f"{counts.get('rows_written', 0):,}<small>{bytes_text(counts.get('bytes_written', 0))}</small>",
        ]
        for name, counts in run.record.traffic.tiers.items()
    ]
    return (
        data_table(["fast memory of", "hit rate", "found", "of batches in sight", "read", "written"], rows)
        if rows
        else ""
    )


def settings_section(runs: Sequence[Shown]) -> str:
    """Configuration and environment; of two runs, what differs comes first."""
    configs = [flat(run.record.config) for run in runs]
    environments = [flat({**_described(run), **run.record.environment}) for run in runs]
    names = [run.name for run in runs]
    parts = (
        [_differences([{**c, **e} for c, e in zip(configs, environments, strict=True)], names)] if len(runs) > 1 else []
    )
    parts += [_folded("Configuration", configs, names), _folded("Environment", environments, names)]
    return section("Configuration and environment", "", *parts)


def flat(values: Mapping[str, object], above: str = "") -> dict[str, str]:
    """Keys with dots, and their values as text.

    >>> flat({"train": {"epochs": 2, "names": ["a", "b"]}})
    {'train.epochs': '2', 'train.names': 'a, b'}
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = _text(value)
    return found


def _text(value: object) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _described(run: Shown) -> dict[str, object]:
    keys = ("started", "ranks", "hosts", "device", "transport", "transport_reason", "placement", "network_parameters")
    return {"run": {key: run.record.about[key] for key in keys if key in run.record.about}}


def _differences(settings: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    keys = dict.fromkeys(key for values in settings for key in values)
    rows = list(_rows([key for key in keys if len({values.get(key) for values in settings}) > 1], settings))
    if not rows:
        return '<p class="note">The configurations and environments are the same.</p>'
    return f"<h3>What differs</h3>{data_table(['', *names], rows, words=range(len(names) + 1))}"


def _folded(title: str, settings: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    keys = list(dict.fromkeys(key for values in settings for key in values))
    if not keys:
        return ""
    heads = ["", *names] if len(names) > 1 else ["", ""]
    table = data_table(heads, _rows(keys, settings), words=range(len(heads)))
    return f"<details><summary>{title} <small>{len(keys)} keys</small></summary>{table}</details>"


def _rows(keys: Sequence[str], settings: Sequence[Mapping[str, str]]) -> Iterator[list[str]]:
    for key in keys:
        yield [
            escape(key),
            *(f'<div class="value">{escape(values.get(key, "not there"))}</div>' for values in settings),
        ]
