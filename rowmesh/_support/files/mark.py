"""A mark in a folder: rowmesh made it, so that what is removed there was never something else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rowmesh._support.files.atomic import write_text

MARK = "rowmesh.json"
_SIGNATURE = "rowmesh"


def mark(folder: Path, kind: str, **about: str | int) -> None:
    """Marks a folder that was just made.

    Args:
        folder: the folder.
        kind: what it is for.
        about: what else is to be known of it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mark(Path(folder), "a version", number=3)
        ...     read_mark(Path(folder), "a version"), read_mark(Path(folder), "a run")
        ({'number': 3}, None)
    """
    write_text(folder / MARK, json.dumps({"written_by": _SIGNATURE, "kind": kind, **about}) + "\n")


def read_mark(folder: Path, kind: str) -> dict[str, Any] | None:
    """The contents of a mark; None where the folder has none of this kind, or is a link."""
    if folder.is_symlink():
        return None
    try:
        values = json.loads((folder / MARK).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or (values.pop("written_by", None), values.pop("kind", None)) != (_SIGNATURE, kind):
        return None
    return values


def is_unmarked(folder: Path) -> bool:
    """Whether a folder is empty, or has what a crash leaves of a mark that was being written, and nothing else."""
    return all(path.name.startswith(f".{MARK}.") and path.name.endswith(".partial") for path in folder.iterdir())
