"""`rowmesh checkpoint list | verify | show | compact`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from rowmesh._support.files.printable import say

if TYPE_CHECKING:
    from rowmesh.checkpoint import Manifest
    from rowmesh.checkpoint.entries import KnownEntry

app = App(name="checkpoint", help="Look at the checkpoints of a run, and compact them.")


@app.command(name="list")
def list_(run: Path, /) -> None:
    """List the checkpoints of a run, the oldest first: step, when it was written, size, what it adds to, and place.

    Parameters
    ----------
    run
        The run's folder, or that of its checkpoints.
    """
    from rowmesh.checkpoint import CheckpointError

    for folder in _checkpoints(run):
        try:
            step, facts = _facts(folder)
            say(f"step {step:>12,}  {facts['written']}  {facts['size']:>10}  {facts['kind']:<22}  {folder}")
        except CheckpointError as error:
            say(f"damaged: {error}")


@app.command
def verify(run: Path, /) -> None:
    """Compare every byte of every checkpoint of a run with its checksums; status 2 where one is damaged.

    An increment is damaged where what it adds to is.

    Parameters
    ----------
    run
        The run's folder, that of its checkpoints, or one checkpoint.
    """
    from rowmesh.checkpoint import CheckpointError
    from rowmesh.placement.text import bytes_text

    damaged, known = [], {}
    for folder in _checkpoints(run):
        try:
            count, num_bytes = _verified(folder, known)
            say(f"whole    {folder}: {count:,} files, {bytes_text(num_bytes)}")
        except CheckpointError as error:
            say(f"damaged  {folder}: {error}")
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
    say(*_description(_checkpoints(run)[-1]))


@app.command(name="compact")
def compact_(run: Path, step: int | None = None, /) -> None:
    """Make a full checkpoint of an increment and what it adds to, in its place; increments of it add to the full one.

    Checkpoints that it adds to stay until the run writes its next one; then keep_last and keep_every decide.

    Parameters
    ----------
    run
        The run's folder, that of its checkpoints, or one checkpoint.
    step
        After which step the checkpoint is; default: the newest.
    """
    from rowmesh.checkpoint.compact import compact
    from rowmesh.checkpoint.manifest import step_name
    from rowmesh.errors import RowmeshError

    found = _checkpoints(run)
    places = found[-1:] if step is None else [each for each in found if each.absolute().name == step_name(step)]
    if not places:
        names = ", ".join(each.absolute().name for each in found)
        raise RowmeshError(f"{run} has no checkpoint after step {step}, only: {names}")
    is_new = compact(places[0])
    say(f"{places[0]} {'is a full checkpoint now' if is_new else 'was a full checkpoint before'}")


def _verified(folder: Path, known: dict[Path, tuple[int, int] | str]) -> tuple[int, int]:
    """Files and bytes of a checkpoint, verified once, as those are that it adds to.

    Raises:
        CheckpointError: it is damaged, or one of those.
    """
    from rowmesh.checkpoint import CheckpointError
    from rowmesh.checkpoint.chain import read_chain
    from rowmesh.checkpoint.series import verify

    for place in reversed([link.folder.absolute() for link in read_chain(folder)]):
        if place not in known:
            try:
                known[place] = verify(place)
            except CheckpointError as error:
                known[place] = str(error)
        outcome = known[place]
        if isinstance(outcome, str):
            is_own = place == folder.absolute()
            raise CheckpointError(outcome if is_own else f"it adds to {place.name}, which is damaged: {outcome}")
    outcome = known[folder.absolute()]
    assert not isinstance(outcome, str)
    return outcome


def _checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, of a folder of them, or the folder itself.

    Raises:
        RowmeshError: there are none.
    """
    from rowmesh.checkpoint.manifest import MANIFEST
    from rowmesh.checkpoint.series import STEP_PATTERN, Series
    from rowmesh.errors import RowmeshError
    from rowmesh.run.checkpoints import places_of

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
    parent = manifest.parent
    kind = "full" if parent is None else f"adds to {parent.step:,}"
    return int(manifest.metadata.get("steps", 0)), {"written": written, "size": bytes_text(num_bytes), "kind": kind}


def _description(folder: Path) -> Iterator[str]:
    from rowmesh.checkpoint import read_manifest
    from rowmesh.checkpoint.files import SavedFiles
    from rowmesh.checkpoint.series import BEST
    from rowmesh.tables.shard import ROWS

    manifest, (step, facts) = read_manifest(folder), _facts(folder)
    dense = SavedFiles(folder, manifest).dense()
    is_of_run = "data" in manifest.metadata  # rowmesh.Checkpoints know of no data
    progress = dense["progress"] if is_of_run else {}
    yield f"checkpoint  {folder}"
    yield f"step        {step:,}, written {facts['written']} by {manifest.world_size} rank(s), {facts['size']}"
    yield from _chain_text(folder, manifest)
    if is_of_run:
        yield f"data        {manifest.metadata['data']}: {_position(progress['loader'])}"
    for name, table in manifest.tables.items():
        kind = f"cores of ranks {table.cores.ranks}" if table.cores else "rows"
        if table.known is not None:
            kind = f"dynamic, {_known_text(table.known, is_increment=manifest.parent is not None)}"
        state = sorted({kind for part in table.parts for kind in part.files} - {"values", ROWS})
        more = f" with {', '.join(state)}" if state else ""
        if manifest.parent is not None and not table.cores and table.known is None:
            more += f", {sum(part.count for part in table.parts):,} of them changed"
        yield f"table       {name}: {table.num_rows:,} × {table.dim} {table.dtype}, {table.optimizer}, {kind}{more}"
    yield f"beside      {', '.join(sorted(dense))}"
    if (folder / BEST).exists():
        yield f"best        the best model so far, of step {progress.get('best_step'):,}"


def _known_text(known: KnownEntry, *, is_increment: bool) -> str:
    num_ids, num_removed, num_demoted, num_returned = (
        sum(getattr(part, name) for part in known.parts)
        for name in ("num_ids", "num_removed", "num_demoted", "num_demoted_removed")
    )
    if is_increment:
        of_store = (
            f" from fast memory, {num_demoted:,} records stored, {num_returned:,} removed" if known.demotes else ""
        )
        return f"{num_ids:,} ids changed, {num_removed:,} gone{of_store}"
    return f"{num_ids:,} ids known" + (f" in fast memory, {num_demoted:,} demoted" if num_demoted else "")


def _position(loader: dict[str, Any]) -> str:
    at = loader.get("position") or {}  # of raw rows
    place = ", ".join(f"{name} {value}" for name, value in at.items() if name != "before")
    return place or f"epoch {loader.get('epoch')}, batch {loader.get('batch')}"


def _chain_text(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Lines on the checkpoints that an increment adds to, and whether all of them are there."""
    from rowmesh.checkpoint import CheckpointError
    from rowmesh.checkpoint.chain import read_chain

    if manifest.parent is None:
        return
    try:
        steps = [link.manifest.parent.step for link in read_chain(folder) if link.manifest.parent is not None]
        yield f"adds to     {', '.join(f'{step:,}' for step in steps)}, which is full"
    except CheckpointError as error:
        yield f"adds to     {manifest.parent.step:,}, and cannot be read: {error}"
