"""`rowmesh export`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def export(
    run: Path,
    /,
    *,
    out: Path,
    tables: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None,
    data: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    verify: Annotated[bool, Parameter(negative="--no-verify", show_default=False)] = True,
) -> None:
    """Write the embedding tables of a finished run by the values of the raw data, and its dense network.

    Each table becomes a Parquet file with a line an id, the most frequent first: id, value, count, vector.

    Parameters
    ----------
    run
        The run's folder.
    out
        Folder to write; it appears whole or not at all.
    tables
        Which tables; all by default.
    data
        The prepared data of the training, where they are no longer where they were.
    overwrite
        Replace a folder that an earlier call of this command wrote.
    verify
        Compare what is read with the checksums written beside it (the default); --no-verify reads damaged files too.
    """
    from rich.console import Console

    from rowmesh.observe.progress import PartsProgress
    from rowmesh.report.printing import show, table_of_numbers
    from rowmesh.report.printing import write as write_line
    from rowmesh.run.export import export as write

    console = Console()
    with PartsProgress(console) as progress:
        exported = write(
            run,
            out,
            data=data,
            tables=tables or (),
            overwrite=overwrite,
            progress=progress,
            verify=verify,
            log=partial(write_line, console),
        )
    shown = table_of_numbers("table", "rows", "dim", "MB")
    for each in exported:
        shown.add_row(each.table, f"{each.num_rows:,}", str(each.dim), f"{each.num_bytes / 1e6:,.1f}")
    write_line(console, f"exported {out}")
    show(console, shown)
