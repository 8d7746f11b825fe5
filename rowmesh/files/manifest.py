"""Manifest: what a folder that rowmesh wrote says about itself: what it holds, and what was asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rowmesh.files.atomic import write_text

MANIFEST = "manifest.json"
_SIGNATURE = "rowmesh"
MAX_SHOWN = 200
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        kind: what the folder is, such as "prepared data".
        request: what was asked for: files, options, formats; plain JSON values.
        files: every file of the folder; empty while it is being written.
    """

    kind: str
    request: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """The manifest of a folder; None where rowmesh did not write the folder."""
        try:
            values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if values["written_by"] != _SIGNATURE:
                return None
            kind, request, files = values["kind"], values["request"], values["files"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # no such file, or one of something else
            return None
        is_ours = isinstance(kind, str) and isinstance(request, dict) and isinstance(files, list)
        if not is_ours or not all(isinstance(name, str) for name in files):
            return None
        return Manifest(kind=kind, request=request, files=tuple(files))

    def write(self, folder: Path) -> None:
        """Writes `manifest.json`."""
        values = {"written_by": _SIGNATURE, "kind": self.kind, "request": self.request, "files": self.files}
        write_text(folder / MANIFEST, json.dumps(values, indent=1) + "\n")


def contents(folder: Path) -> list[str]:
    """Every file below a folder, relative to it, in order; a link is a file, whatever it leads to."""
    found = []
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        found += [(Path(root) / name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(found)


def why_stale(folder: Path, kind: str, request: Mapping[str, Any]) -> list[str] | None:
    """What differs between a folder and what is asked for now, one reason each.

    Returns:
        An empty list where the folder can be used as it is; None where there is nothing to compare.
    """
    manifest = Manifest.read(folder)
    if manifest is None or manifest.kind != kind:
        return None
    lost = [f"{name} is missing" for name in manifest.files if not (folder / name).exists()]
    return lost + differences(manifest.request, json.loads(json.dumps(request)))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two nested mappings of plain values, one reason each.

    >>> differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}, "d": 4})
    ['b.c was 2, is 3', 'd is new: 4']
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    reasons = []
    for key in {**old, **new}:
        was, value = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if was is _ABSENT:
            reasons.append(f"{key} is new: {_short(value)}")
        elif value is _ABSENT:
            reasons.append(f"{key} is gone (it was {_short(was)})")
        elif was != value:
            reasons.append(f"{key} was {_short(was)}, is {_short(value)}")
    return reasons


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, list):
            value = {str(position): item for position, item in enumerate(value, start=1)}
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
