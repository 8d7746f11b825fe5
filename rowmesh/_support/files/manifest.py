"""Manifest: what a folder that rowmesh wrote says about itself: what it holds, and what was asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from rowmesh._support.files.atomic import write_text
from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.regular import read_regular
from rowmesh.errors import DataError

MANIFEST = "manifest.json"
_SIGNATURE = "rowmesh"
OWN_SUM = "xxh3_64"
MAX_SHOWN = 200
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        kind: what the folder is, such as "prepared data".
        request: what was asked for: files, options, formats; plain JSON values.
        files: every file of the folder; empty while it is being written.
        checksums: of some of the files, or all: what they are to hold.
    """

    kind: str
    request: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    checksums: Mapping[str, Checksums] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """The manifest of a folder; None where rowmesh did not write the folder."""
        try:
            return Manifest.parse(read_regular(folder / MANIFEST), folder / MANIFEST)
        except (OSError, DataError):  # no such file, or one of something else
            return None

    @staticmethod
    def parse(text: bytes, path: Path) -> Manifest:
        """Reads the bytes of a `manifest.json`.

        Args:
            text: the bytes.
            path: the file, for messages.

        Raises:
            DataError: they are no manifest, or not what was written; names the key.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(values, dict) or values.get("written_by") != _SIGNATURE:
            raise DataError(f"{path}: written_by is not {_SIGNATURE!r}: something else wrote this file")
        files = _checked(path, values, "files", list if isinstance(values.get("files"), list) else dict)
        if not all(isinstance(name, str) for name in files):
            raise DataError(f"{path}: files: not all of them are names")
        checksums = {name: sums for name, sums in files.items() if sums} if isinstance(files, dict) else {}
        manifest = Manifest(
            kind=_checked(path, values, "kind", str),
            request=_checked(path, values, "request", dict),
            files=tuple(files),
            checksums={name: _parse_checksums(path, name, sums) for name, sums in checksums.items()},
        )
        if values.pop(OWN_SUM, None) not in (None, own_sum(values)):
            raise DataError(f"{path} is damaged: {OWN_SUM} is not that of the other keys")
        return manifest

    def write(self, folder: Path) -> None:
        """Writes `manifest.json`."""
        sums = {name: self.checksums[name].to_json() if name in self.checksums else None for name in self.files}
        values = {"written_by": _SIGNATURE, "kind": self.kind, "request": self.request}
        values["files"] = sums if self.checksums else list(self.files)
        text = json.dumps({**values, OWN_SUM: own_sum(values)}, indent=1)
        write_text(folder / MANIFEST, text + "\n")


def own_sum(values: Mapping[str, Any]) -> str:
    """The checksum of a manifest's other keys, whatever they are formatted like."""
    plain = json.loads(json.dumps(values))  # keys that are no strings become some before they are sorted
    return xxhash.xxh3_64_hexdigest(json.dumps(plain, sort_keys=True).encode())


def _checked(path: Path, values: Mapping[str, Any], key: str, kind: type) -> Any:
    if not isinstance(values.get(key), kind):
        what = f"is {_short(values[key])}, not a {kind.__name__}" if key in values else "is missing"
        raise DataError(f"{path}: {key} {what}")
    return values[key]


def _parse_checksums(path: Path, name: str, values: Any) -> Checksums:
    try:
        return Checksums.from_json(values)
    except (ValueError, KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{path}: files.{name}: no checksums ({what})") from None


def contents(folder: Path) -> list[str]:
    """Every file below a folder, relative to it, in order; a link is a file, whatever it leads to."""
    found = []
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        found += [(Path(root) / name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(found)


def why_stale(folder: Path, kind: str, request: Mapping[str, Any]) -> list[str] | None:
    """Differences between a folder and the present request, one reason each.

    Returns:
        An empty list where the folder can be used as it is; None where there is nothing to compare.
    """
    manifest = Manifest.read(folder)
    if manifest is None or manifest.kind != kind:
        return None
    lost = [f"{name} is missing" for name in manifest.files if not (folder / name).exists()]
    return lost + differences(manifest.request, json.loads(json.dumps(request)))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between two nested mappings of plain values, one reason each.

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
