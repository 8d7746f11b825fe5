"""`rowmesh checkpoint list | verify | show`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cyclopts import App

app = App(name="checkpoint", help="Look at the checkpoints of a run.")


@app.command(name="list")
def list_(run: Path, /) -> None:
    """List the checkpoints of a run, the oldest first: step, when it was written, size and place.

    Parameters
    ----------
    run
        The run's folder, or that of its checkpoints.
    """
    from rowmesh.checkpoint import CheckpointError

    for folder in _checkpoints(run):
        try:
            step, facts = _facts(folder)
            print(f"step {step:>12,}  {facts['written']}  {facts['size']:>10}  {folder}")  # noqa: T201
        except CheckpointError as error:
            print(f"damaged: {error}")  # noqa: T201


@app.command
def verify(run: Path, /) -> None:
    """Compare every byte of every checkpoint of a run with its checksums; status 2 where one is damaged.

    Parameters
    ----------
    run
        The run's folder, that of its checkpoints, or one checkpoint.
    """
    from rowmesh.checkpoint import CheckpointError
    from rowmesh.checkpoint.series import verify
    from rowmesh.placement.text import bytes_text

    damaged = []
    for folder in _checkpoints(run):
        try:
            count, num_bytes = verify(folder)
            print(f"whole    {folder}: {count:,} files, {bytes_text(num_bytes)}")  # noqa: T201
        except CheckpointError as error:
            print(f"damaged  {folder}: {error}")  # noqa: T201
            damaged.append(folder.name)
    if damaged:
        raise CheckpointError(f"{', '.join(damaged)} of {run} cannot be resumed from; a run goes on from the others")


@app.command
def show(run: Path, /) -> None:
    """Show what the newest checkpoint of a run holds: step, ranks, tables, what is beside them.

    Parameters
    ----------
    run
        The run's folder, that of its checkpoints, or one checkpoint.
    """
    print(*_description(_checkpoints(run)[-1]), sep="\n")  # noqa: T201


def _checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, of a folder of them, or the folder itself.

    Raises:
        RowmeshError: there are none.
    """
    from rowmesh.checkpoint.manifest import MANIFEST
    from rowmesh.checkpoint.series import STEP_PATTERN, Series
    from rowmesh.errors import RowmeshError
    from rowmesh.train.checkpoints import places_of

    if re.fullmatch(STEP_PATTERN, run.absolute().name) and (run / MANIFEST).exists():
        return [run]
    for folder in (run, *places_of(run)):
        series = Series(folder)
        if steps := series.steps():
            return [series.at(step) for step in steps]
    raise RowmeshError(f"{run} has no checkpoints; runs write them with checkpoint.every_steps or .every_minutes")


def _facts(folder: Path) -> tuple[int, dict[str, Any]]:
    from rowmesh.checkpoint import read_manifest
    from rowmesh.placement.text import bytes_text

    manifest = read_manifest(folder)
    num_bytes = sum(each.size_bytes for each in manifest.checksums.values())
    written = manifest.metadata.get("written", "")
    return int(manifest.metadata.get("steps", 0)), {"written": written, "size": bytes_text(num_bytes)}


def _description(folder: Path) -> Iterator[str]:
    from rowmesh.checkpoint import read_manifest
    from rowmesh.checkpoint.files import SavedFiles
    from rowmesh.checkpoint.series import BEST

    manifest, (step, facts) = read_manifest(folder), _facts(folder)
    dense = SavedFiles(folder, manifest).dense()
    progress = dense.get("progress", {})
    position = progress.get("loader", {})
    yield f"checkpoint  {folder}"
    yield f"step        {step:,}, written {facts['written']} by {manifest.world_size} rank(s), {facts['size']}"
    yield f"data        {manifest.metadata.get('data')}: epoch {position.get('epoch')}, batch {position.get('batch')}"
    for name, table in manifest.tables.items():
        kind = f"cores of ranks {table.cores.ranks}" if table.cores else "rows"
        state = sorted({kind for part in table.parts for kind in part.files} - {"values"})
        more = f" with {', '.join(state)}" if state else ""
        yield f"table       {name}: {table.num_rows:,} × {table.dim} {table.dtype}, {table.optimizer}, {kind}{more}"
    yield f"beside      {', '.join(sorted(dense))}"
    if (folder / BEST).exists():
        yield f"best        the best model so far, of step {progress.get('best_step'):,}"
