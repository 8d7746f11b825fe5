"""Folders that tests change behind the back of what wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rowmesh._support.files.checksums import checksums_of
from rowmesh._support.files.manifest import OWN_SUM, Manifest, own_sum


def renew_checksums(folder: Path) -> Path:
    """Makes the checksums those of the files as they are now; returns the folder."""
    manifest = Manifest.read(folder)
    assert manifest is not None
    sums = {name: checksums_of(folder / name) for name in manifest.checksums}
    replace(manifest, checksums=sums).write(folder)
    return folder


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Changes the values of a manifest, whose checksum is that of the new ones; returns its path."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(sealed(values))
    return path


def sealed(values: Any) -> str:
    """The text of a manifest, whose checksum fits, whatever the values are."""
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name != OWN_SUM}
        values[OWN_SUM] = own_sum(values)
    return json.dumps(values)
