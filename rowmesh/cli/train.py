"""`rowmesh train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def train(
    config: Path,
    /,
    *overrides: str,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    resume: Annotated[Literal["no", "latest", "auto"], Parameter(show_default=False)] = "no",
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
    resume
        Go on from the newest checkpoint that the run wrote; --resume alone is latest, and auto begins where there is
        none. docs/durability.md says more.
    verify
        Compare the data with the checksums written beside them (the default); --no-verify reads damaged files too.
    """
    from rowmesh.cli.process import prepare_process
    from rowmesh.cli.report import write_page
    from rowmesh.run.commands import run_training
    from rowmesh.run.resolve import resolve

    prepare_process()
    run_training(
        resolve(config, overrides),
        overwrite=overwrite,
        verify=verify,
        fits_threads=True,
        at_end=write_page,
        resume=resume,
    )


def with_resume(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with a value for `--resume` where it stands alone.

    >>> with_resume(["train", "clicks.toml", "--resume", "train.epochs=2"])
    ['train', 'clicks.toml', '--resume=latest', 'train.epochs=2']
    >>> with_resume(["train", "clicks.toml", "--resume", "auto"])
    ['train', 'clicks.toml', '--resume', 'auto']
    """
    following = [*arguments[1:], ""]
    return [
        "--resume=latest" if word == "--resume" and after not in ("no", "latest", "auto") else word
        for word, after in zip(arguments, following, strict=True)
    ]
