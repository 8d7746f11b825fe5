"""Output: the questions that a command asks about the file it is to write, before it computes anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from rowmesh._support.files.manifest import MANIFEST, OWN_SUM, Manifest
from rowmesh._support.files.mark import MARK
from rowmesh.errors import ConfigurationError, RowmeshError

_FREE_KINDS = (b"PAR1",)
"""How files begin that a user may have put into the folder of a run: tables of scores."""


def check_output(
    out: Path,
    *,
    overwrite: bool,
    read: Path | None = None,
    option: str = "--out",
    is_own: Callable[[Path], bool] | None = None,
) -> None:
    """Refuses a file to write that is in the way, whatever links lead to it.

    Args:
        out: the file to write.
        overwrite: whether `out` may be replaced; a file that is part of a folder of rowmesh's never is.
        read: the file that the command reads.
        option: which names `out`.
        is_own: whether this command wrote the file before, which it then may replace.

    Raises:
        RowmeshError: `out` is the file to read, it is there and may not be replaced, or its folder is not there.
    """
    if read is not None and out.exists() and read.exists() and read.samefile(out):
        raise ConfigurationError(f"{option} {out} is the file to read; name another")
    if out.is_dir():
        raise ConfigurationError(f"{option} {out} is a folder; name a file in it")
    if out.is_file():
        if (owner := _owner(Path(os.path.realpath(out)))) is not None:
            raise ConfigurationError(f"{option} {out} is a part of {owner}, which it would destroy; name another file")
        if not overwrite and not (is_own is not None and is_own(out)):
            what = "" if is_own is None else ", and this command did not write it"
            raise RowmeshError(
                f"{out} is there already{what}; name another file with {option}, or replace it with --overwrite"
            )
    if not out.parent.is_dir():
        raise RowmeshError(f"{out.parent}: no such folder; make it, or name another file with {option}")


def _owner(path: Path) -> str | None:
    """The folder of rowmesh's that a file is a part of; None where it only lies there."""
    for folder in path.parents:
        manifest = Manifest.read(folder)
        if manifest is not None:
            name = path.relative_to(folder).as_posix()
            if name in (MANIFEST, *manifest.files) or not (manifest.files or _begins_freely(path)):
                return f"{folder}, which holds {manifest.kind}"
        elif (folder / MARK).exists() or _has_summed_manifest(folder):
            return f"{folder}, which rowmesh wrote"
    return None


def _has_summed_manifest(folder: Path) -> bool:
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and OWN_SUM in values


def _begins_freely(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8).startswith(_FREE_KINDS)
