"""`rowmesh evaluate`."""

from __future__ import annotations

from pathlib import Path


def evaluate(run: Path, /, *overrides: str, split: str | None = None) -> None:
    """Evaluate the model of a finished run, on any number of ranks.

    Prints the metrics and writes them to evaluation/SPLIT.json in the run's folder.

    Parameters
    ----------
    run
        The run's folder.
    overrides
        Keys that replace those the run was trained with, as in `data.folder=elsewhere`.
    split
        Which split; the run's test split by default.
    """
    from rowmesh.train.commands import run_evaluation

    run_evaluation(run, overrides, split)
