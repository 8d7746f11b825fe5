"""`rowmesh evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def evaluate(
    run: Path,
    /,
    *overrides: str,
    split: str | None = None,
    other_vocabulary: Annotated[bool, Parameter(negative="")] = False,
    verify: Annotated[bool, Parameter(negative="--no-verify", show_default=False)] = True,
    trust: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Evaluate the model of a finished run, on any number of ranks.

    Prints the metrics and writes them to evaluation/SPLIT.json in the run's folder, and the page report.html anew.

    Parameters
    ----------
    run
        The run's folder.
    overrides
        Keys that replace those the run was trained with, as in `data.folder=elsewhere`.
    split
        The split; by default the run's test split. For a run on raw rows, a file or folder of other rows, whose name
        the metrics get.
    other_vocabulary
        Accept data whose ids or dense features have another meaning than those the model was trained on.
    verify
        Compare what is read with the checksums written beside it (the default); --no-verify reads damaged files too.
    trust
        Import the module of an own model (package.module:Class) that the run's folder names, also where the run was not
        trained by you on this machine. Importing runs it.
    """
    from rowmesh.cli.process import prepare_process
    from rowmesh.cli.report import write_page
    from rowmesh.run.commands import run_evaluation

    prepare_process()
    run_evaluation(
        run,
        overrides,
        split,
        other_vocabulary=other_vocabulary,
        verify=verify,
        fits_threads=True,
        trust=trust,
        at_end=write_page,
    )
