"""Pieces of HTML that all pages share. A page needs nothing beside it, and asks for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

_GENERATOR = '<meta name="generator" content="rowmesh">'


def is_page(path: Path) -> bool:
    """Whether a file is a page of rowmesh's."""
    with path.open("rb") as file:
        return _GENERATOR.encode() in file.read(500)


def page(title: str, parts: Iterable[str]) -> str:
    """An HTML file of parts, in their order.

    Args:
        title: of the window.
        parts: HTML.
    """
    style = (resources.files("rowmesh.report") / "assets" / "report.css").read_text(encoding="utf-8")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{_GENERATOR}\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def fact_list(facts: Iterable[tuple[str, str, str]]) -> str:
    """Boxes of (name, value, what to know about it)."""
    items = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in facts)
    return f'<dl class="facts">{"".join(items)}</dl>'


def measure(name: str, texts: Sequence[str], values: Sequence[float]) -> str:
    """A line above bars: what they are, and from where to where they go."""
    low, high = (texts[values.index(extreme)] for extreme in (min(values), max(values)))
    return f'<div class="measure"><span>{escape(name)}</span><b>{high if low == high else f"{low} to {high}"}</b></div>'


def data_table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """A card with a table, which scrolls by itself where it is too wide.

    Args:
        heads: of the columns, as text.
        rows: cells, as HTML.
        words: columns that are no numbers.
    """
    kinds = [' class="words"' if column in words else "" for column in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, heads, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def card(title: str, body: str, right: str = "") -> str:
    """A box with a title, and something small at the right of it."""
    head = f'<div class="head"><h3>{escape(title)}</h3><span>{escape(right)}</span></div>'
    return f'<div class="card">{head}{body}</div>'


def section(title: str, note: str, *parts: str) -> str:
    """A part of a page; empty where it has no parts."""
    found = [part for part in parts if part]
    if not found:
        return ""
    about = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<h2>{escape(title)}</h2>{about}{''.join(found)}"


def sentence(text: str) -> str:
    """With a full stop at its end."""
    return text if text.endswith(".") else f"{text}."
