"""`rowmesh train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def train(
    config: Path,
    /,
    *overrides: str,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    verify: Annotated[bool, Parameter(negative="--no-verify", show_default=False)] = True,
) -> None:
    """Train a model, evaluate it on the test split and write it to the run's folder, with a page about it.

    Alone it is one process; `torchrun --standalone --nproc-per-node 2 -m rowmesh.cli train …` makes it two.

    Parameters
    ----------
    config
        A TOML file; docs/command_line.md lists its keys.
    overrides
        Keys that replace those of the file, as in `train.epochs=2 tables.dim=32`.
    overwrite
        Replace the run that the folder holds, once the model of the new one is written.
    verify
        Compare the data with the checksums written beside them (the default); --no-verify reads damaged files too.
    """
    from rowmesh.cli.process import prepare_process
    from rowmesh.cli.report import write_page
    from rowmesh.train.commands import run_training
    from rowmesh.train.resolve import resolve

    prepare_process()
    run_training(resolve(config, overrides), overwrite=overwrite, verify=verify, fits_threads=True, at_end=write_page)
