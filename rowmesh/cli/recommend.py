"""`rowmesh recommend`."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

_LATEST_S = 1 << 42  # in microseconds they are int64


def recommend(
    run: Path,
    /,
    *,
    user_history: Path,
    top: int = 10,
    at: str | None = None,
    seen: Literal["remove", "keep"] = "remove",
    out: Path | None = None,
    data: Path | None = None,
    max_bad_rows: int = 100,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    verify: Annotated[bool, Parameter(negative="--no-verify", show_default=False)] = True,
) -> None:
    """Rank items for users by the model of a finished run of a sequence model, in one process.

    Writes a Parquet file with user, rank, item and score, the best first; users and items as the raw files name them.

    Parameters
    ----------
    run
        The run's folder.
    user_history
        Events of one user or many, in the format and with the columns of the training's event table.
    top
        Items of each user.
    at
        When is asked: seconds since 1970, or a time as 2026-01-31T12:00, UTC; later events are not read. By default at
        the latest event of the file.
    seen
        remove leaves out the items of a user's history; keep does not.
    out
        File to write; USER_HISTORY.top.parquet by default. It appears whole or not at all.
    data
        The prepared events of the training, where they are no longer where they were; of a model with raw item ids any,
        whose items are ranked as far as the model knows them.
    max_bad_rows
        How many bad rows are left out; one more stops the command.
    overwrite
        Replace the file of recommendations.
    verify
        Compare what is read with the checksums written beside it (the default); --no-verify reads damaged files too.
    """
    from rich.console import Console

    from rowmesh._support.files.output import check_output
    from rowmesh.errors import ConfigurationError
    from rowmesh.report.printing import show, table_of_numbers, write
    from rowmesh.run.sequence.recommend import first_user, write_recommended
    from rowmesh.run.sequence.recommend import recommend as rank

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError("rowmesh recommend is one process; start it without torchrun")
    out = out or user_history.with_name(f"{user_history.name}.top.parquet")
    check_output(out, read=user_history, overwrite=overwrite)
    done = rank(
        run,
        user_history,
        top=top,
        at=None if at is None else _seconds(at),
        seen=seen,
        data=data,
        max_bad_rows=max_bad_rows,
        verify=verify,
    )
    write_recommended(done.table, out)
    console = Console()
    shown = table_of_numbers("user", "rank", "item", "score")
    rows = first_user(done.table)
    for row in rows:
        shown.add_row(str(row["user"]), str(row["rank"]), str(row["item"]), f"{row['score']:.5f}")
    show(console, shown)
    if len(rows) < done.table.num_rows:
        write(console, f"shown     the first user, {len(rows)} of {done.table.num_rows:,} rows; the file has the rest")
    write(console, f"items     {out}: {done.table.num_rows:,} rows, asked for at {_moment(done.at)}")
    for count, what in (
        (done.num_unknown, "of items that the training did not have"),
        (done.num_later, "after that time"),
        (done.num_bad_rows, "without a user, an item or a time"),
    ):
        if count:
            write(console, f"left out  {count:,} events {what}")
    if done.without:
        more = f" and {len(done.without) - 5} more" if len(done.without) > 5 else ""
        write(console, f"nothing   for {', '.join(done.without[:5])}{more}: no event of theirs can be read")


def _moment(seconds: int) -> str:
    """Since 1970, as a time where that is in the years that Python has.

    >>> _moment(86400), _moment(1 << 40)
    ('1970-01-02T00:00:00+00:00', '1,099,511,627,776 s after 1970')
    """
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return f"{seconds:,} s after 1970"


def _seconds(text: str) -> int:
    """Since 1970.

    >>> _seconds("86400"), _seconds("1970-01-02T00:00")
    (86400, 86400)
    """
    from rowmesh.errors import ConfigurationError

    with suppress(ValueError):
        seconds = int(text)
        if abs(seconds) < _LATEST_S:
            return seconds
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"--at {text!r} is no time; give seconds since 1970, or as 2026-01-31T12:00") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
