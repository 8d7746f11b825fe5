"""`rowmesh predict`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def predict(
    run: Path,
    file: Path,
    /,
    *,
    out: Path | None = None,
    keep: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None,
    label: Annotated[bool, Parameter(negative="--no-label", show_default=False)] = True,
    data: Path | None = None,
    max_bad_rows: int = 100,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    verify: Annotated[bool, Parameter(negative="--no-verify", show_default=False)] = True,
    trust: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Score raw rows with the model of a finished run, in one process.

    Writes a Parquet file with the line and the score of each row: the probability of label 1, or the value that is
    predicted; a score a label where there are several.

    Parameters
    ----------
    run
        The run's folder.
    file
        Raw rows, in the format and with the columns of the training's raw files; labels and weight may be missing.
    out
        File to write; FILE.scores.parquet by default. It appears whole or not at all.
    keep
        Columns of the file to copy beside the scores, such as an id or the label.
    label
        Whether lines hold labels and weight, in a file without a header; --no-label where they do not.
    data
        The prepared data of the training, where they are no longer where they were; not of a run on raw rows.
    max_bad_rows
        How many bad rows are left out and written to OUT.quarantine.jsonl; one more stops the command.
    overwrite
        Replace the file of scores.
    verify
        Compare what is read with the checksums written beside it (the default); --no-verify reads damaged files too.
    trust
        Import the module of an own model (package.module:Class) that the run's folder names, also where the run was not
        trained by you on this machine. Importing runs it.
    """
    from rich.console import Console

    from rowmesh.errors import ConfigurationError
    from rowmesh.observe.allocator import keep_memory
    from rowmesh.observe.progress import PartsProgress
    from rowmesh.report.printing import show, table_of_numbers
    from rowmesh.report.printing import write as write_line
    from rowmesh.run.predict import predict as score

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError("rowmesh predict is one process; start it without torchrun")
    keep_memory()
    out = out or file.with_name(f"{file.name}.scores.parquet")
    console = Console()
    with PartsProgress(console) as progress:
        done = score(
            run,
            file,
            out,
            keep=keep or (),
            has_label=label,
            data=data,
            max_bad_rows=max_bad_rows,
            overwrite=overwrite,
            verify=verify,
            trust=trust,
            progress=progress,
            log=partial(write_line, console),
        )
    write_line(console, f"scores    {out}: {done.num_rows:,} rows, {_means(done.means)}")
    if done.quarantine is not None:
        write_line(console, f"bad rows  {done.bad_rows:,} without a score, in {done.quarantine}")
    shown = table_of_numbers("feature", "ids", "rare or unseen", "share")
    for name, count in done.ids.items():
        unseen = done.unseen[name]
        shown.add_row(name, f"{count:,}", f"{unseen:,}", f"{unseen / max(count, 1):.2%}")
    show(console, shown)


def _means(means: Mapping[str, float]) -> str:
    """The mean score, or that of each label.

    >>> _means({"score": 0.25}), _means({"score_click": 0.5, "score_buy": 0.25})
    ('mean 0.25', 'means score_click 0.5, score_buy 0.25')
    """
    if len(means) == 1:
        return f"mean {next(iter(means.values())):.6g}"
    return "means " + ", ".join(f"{name} {mean:.6g}" for name, mean in means.items())
