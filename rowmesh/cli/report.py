"""`rowmesh report`, and the page that other commands write at their end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from rowmesh.run.run_folder import RunFolder


def report(
    run: Path,
    other: Path | None = None,
    /,
    *,
    out: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write one HTML page about a run, or about two side by side; it works offline.

    Shows curves, ROC and calibration, where a step's time goes, bytes between ranks, memory, tables, the configuration,
    and what to do next. A run may be unfinished: the page says what is missing.

    Parameters
    ----------
    run
        The run's folder.
    other
        The folder of a run to compare it with.
    out
        The file; by default report.html in the run's folder, or comparison.html there for two runs.
    overwrite
        Replace the file also where it is no page of rowmesh's.
    """
    from rich.console import Console

    from rowmesh._support.files.output import check_output
    from rowmesh.report.html import is_page
    from rowmesh.report.printing import write
    from rowmesh.report.run_page import write_run_report
    from rowmesh.run.run_folder import RunFolder

    folder = RunFolder(run)
    if out is not None and out not in (folder.report, folder.compared):
        check_output(out, overwrite=overwrite, is_own=is_page)
    target = out or (folder.report if other is None else folder.compared)
    write_run_report([run] if other is None else [run, other], target)
    write(Console(), f"wrote {target}")


def write_page(run: RunFolder) -> str:
    """Writes the page of a run into its folder; returns a line about it. A page is no reason for a run to fail."""
    try:
        from rowmesh.report.run_page import write_run_report

        write_run_report([run.path], run.report)
    except Exception as error:
        return f"report    could not be written ({error}); rowmesh report {run.path} tries again"
    return f"report    {run.report}"
