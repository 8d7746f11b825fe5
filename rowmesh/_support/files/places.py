"""Paths of this machine, and what looks like one and is none."""

from __future__ import annotations

import re
from pathlib import Path

from rowmesh._support.files.secrets import masked
from rowmesh.errors import ConfigurationError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # of two letters and more: C:/ is a drive


def local_path(path: str | Path, what: str) -> Path:
    """A path, which the file system of this machine has.

    Args:
        path: as a user gave it.
        what: names it in the error.

    Raises:
        ConfigurationError: it has a scheme, as `s3://bucket/run`: a folder `s3:` would be made here.

    >>> local_path("runs/clicks", "run.folder").name
    'clicks'
    """
    if (scheme := _SCHEME.match(str(path))) is not None:
        plain = f"; leave out {scheme[1]}://" if scheme[1].lower() == "file" else ""
        raise ConfigurationError(
            f"{what} = {masked(str(path))!r} has the scheme {scheme[1]}://, and rowmesh reads and writes files of this "
            f"machine alone: name a folder here, or mount the store as one{plain}"
        )
    return Path(path)


def local_store(url: str) -> str:
    """The URL of a store of demoted records itself, of which some name a folder.

    Raises:
        ConfigurationError: it names a folder that has a scheme, as `file:s3://bucket/records`.

    >>> local_store("rocksdb:/data/records")
    'rocksdb:/data/records'
    """
    kind, _, place = url.partition(":")
    if kind in ("file", "rocksdb"):
        local_path(place, f"the folder of store = {kind}:")
    return url
