"""Folders that tests change behind the back of what wrote them."""

from __future__ import annotations

import json
from pathlib import Path


def forget_checksums(folder: Path) -> Path:
    """Makes the folder one of an earlier version, without checksums; returns it."""
    path = forget_own_sum(folder / "manifest.json")
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"files": list(values["files"])}))
    return folder


def forget_own_sum(path: Path) -> Path:
    """Makes a manifest one without a checksum of itself, so that it can be changed; returns its path."""
    values = json.loads(path.read_text())
    values.pop("xxh3_64", None)
    path.write_text(json.dumps(values))
    return path
