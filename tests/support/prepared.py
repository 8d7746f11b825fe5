"""Folders that tests change behind the back of what wrote them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rowmesh._support.files.checksums import checksums_of
from rowmesh._support.files.manifest import Manifest


def renew_checksums(folder: Path) -> Path:
    """Makes the checksums those of the files as they are now; returns the folder."""
    manifest = Manifest.read(folder)
    assert manifest is not None
    sums = {name: checksums_of(folder / name) for name in manifest.checksums}
    replace(manifest, checksums=sums).write(folder)
    return folder


def forget_own_sum(path: Path) -> Path:
    """Makes a manifest one without a checksum of itself, so that it can be changed; returns its path."""
    values = json.loads(path.read_text())
    values.pop("xxh3_64", None)
    path.write_text(json.dumps(values))
    return path
