"""What a command asks of the file that it is to write, before it computes anything."""

from __future__ import annotations

from pathlib import Path

from rowmesh.errors import ConfigurationError, RowmeshError


def check_output(out: Path, *, read: Path, overwrite: bool) -> None:
    """Refuses a file to write that is in the way, whatever links lead to it.

    Args:
        out: the file to write, as `--out` names it.
        read: the file that the command reads.
        overwrite: whether `out` may be replaced.

    Raises:
        RowmeshError: `out` is the file to read, it is there and may not be replaced, or its folder is not there.
    """
    if out.exists() and read.exists() and read.samefile(out):
        raise ConfigurationError(f"--out {out} is the file to read; name another")
    if out.is_dir():
        raise ConfigurationError(f"--out {out} is a folder; name a file in it")
    if out.is_file() and not overwrite:
        raise RowmeshError(f"{out} is there already; name another file with --out, or replace it with --overwrite")
    if not out.parent.is_dir():
        raise RowmeshError(f"{out.parent}: no such folder; make it, or name another file with --out")
