"""recommend: the items that a finished run ranks highest for users, from their histories as raw rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from rowmesh._support.files.atomic import replacing_file
from rowmesh.data.events import Sequences
from rowmesh.data.events.batch import SequenceBatch, spans
from rowmesh.data.events.read import read_events
from rowmesh.data.progress import silent
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.raw.ids import ids_of
from rowmesh.data.scalars import shown
from rowmesh.data.vocabulary import Vocabulary
from rowmesh.errors import ConfigurationError, DataError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.placement import Plan
from rowmesh.run.build import job_on
from rowmesh.run.fingerprint import mismatch
from rowmesh.run.finished import FinishedRun
from rowmesh.run.job import Job
from rowmesh.run.loading import load_model
from rowmesh.run.placement import Placement, shapes_of
from rowmesh.run.sequence.candidates import Candidates
from rowmesh.run.sequence.data import SequenceData
from rowmesh.run.sequence.evaluation import queries_of, vectors_of
from rowmesh.run.sequence.ranking import OVERFLOW, overflows
from rowmesh.run.tasks import task_of
from rowmesh.run.trained_model import for_one_process

USERS = 512
"""Users that are scored at a time."""
SHOWN = 10
"""Rows that are printed."""
_SECOND = 1_000_000


@dataclass(frozen=True)
class Recommended:
    """What `recommend` found.

    Attributes:
        table: `user`, `rank` (1 is the best), `item`, `score`; users in the order in which they appear first.
        at: when it was asked for, seconds since 1970.
        num_unknown: events of items that the training did not have, which are not read.
        num_later: events after `at`, which are not read.
        num_bad_rows: rows without a user, an item or a time.
        without: users of whom nothing is left to read, who get nothing.
    """

    table: pa.Table
    at: int
    num_unknown: int
    num_later: int
    num_bad_rows: int
    without: list[str]


@dataclass(frozen=True, eq=False)
class _Histories:
    """Events of users, one user after the other, oldest first."""

    users: NDArray[np.int32]
    items: NDArray[np.int64]
    times: NDArray[np.int64]
    offsets: NDArray[np.int64]
    side: dict[str, NDArray[np.int64]]


def recommend(
    run: Path,
    file: Path,
    *,
    top: int = 10,
    at: int | None = None,
    seen: Literal["remove", "keep"] = "remove",
    data: Path | None = None,
    max_bad_rows: int = 100,
    verify: bool = True,
) -> Recommended:
    """Ranks all items for every user of a file of events, in one process.

    Where the model's item ids are raw, what is ranked are the items of `data` that its table knows.

    Args:
        run: the folder of a finished run of a sequence model.
        file: events in the format and with the columns of the training's event table.
        top: items of each user, the best first; fewer where fewer are left.
        at: when is asked, seconds since 1970; later events are not read. None: at the latest event of the file.
        seen: whether items of a user's history are recommended again.
        data: the prepared events of the training, where they are no longer where they were; of raw item ids any.
        max_bad_rows: one bad row more is an error.
        verify: compare what is read with its checksums.

    Raises:
        RowmeshError: there is no model of sequences, the data are not those of the training, or the file cannot be
            read or has no event that can be.
    """
    if top < 1:
        raise ConfigurationError(f"--top {top}: give 1 or more")
    with _loaded(run, data, verify) as (job, sequence):
        known = sequence.sequences
        with tempfile.TemporaryDirectory() as folder:
            keep_at = file.with_name(f"{file.name}.quarantine.jsonl")
            with Quarantine(Path(folder) / "bad", max_bad_rows, keep_at) as quarantine:
                schema = known.schema.model_copy(update={"side": sequence.side})  # what the model reads
                events = read_events([file], Path(folder) / "events", schema, quarantine, silent)
            coded = np.concatenate([np.zeros(0, events.dtype), *events.blocks()])
        if not len(coded):
            raise DataError(f"{file} holds no event that counts; it is read with the schema of {known.folder}")
        asked = int(coded["time"].max()) // _SECOND if at is None else at
        is_later = coded["time"] // _SECOND > asked
        ids, is_known = _item_ids(job, known, events.items, coded["item"])
        side = {
            name: _rows_of(vocabulary, known.side_values(name))[coded["side"][:, number]]
            for number, (name, vocabulary) in enumerate(events.side.items())
        }
        ties = known.item_numbers(ids) if known.schema.ties == "item" else None
        histories = _histories(coded, ids, side, ~is_later & is_known, ties)
        if not len(histories.users):
            raise DataError(
                f"{file}: no event is left of {len(coded):,}: {int(is_later.sum()):,} are after {asked} and "
                f"{int((~is_known).sum()):,} of items that {run} does not know"
            )
        names = _as_text(events.users.values(np.arange(len(events.users))))
        has = np.isin(np.arange(len(events.users)), histories.users)
        table = _ranked(job, sequence, histories, names, top, asked, seen)
    return Recommended(
        table,
        asked,
        int((~is_known).sum()),
        int(is_later.sum()),
        quarantine.num_bad_rows,
        [str(each) for each in names.filter(pa.array(~has)).to_pylist()],
    )


def first_user(table: pa.Table) -> list[dict[str, Any]]:
    """The best rows of the first user in a table of `recommend`, at most SHOWN: to be looked at.

    >>> first_user(pa.table({"user": ["u7", "u7", "u1"], "rank": [1, 2, 1]}))
    [{'user': 'u7', 'rank': 1}, {'user': 'u7', 'rank': 2}]
    """
    rows = table.slice(0, SHOWN).to_pylist()
    return [row for row in rows if row["user"] == rows[0]["user"]]


def write_recommended(table: pa.Table, out: Path) -> None:
    """Writes a Parquet file, whole or not at all."""
    with replacing_file(out) as sink:
        pq.write_table(table, sink)


@contextmanager
def _loaded(run: Path, moved_to: Path | None, verify: bool) -> Iterator[tuple[Job, SequenceData]]:
    """The model of a run, in this process."""
    finished = FinishedRun.open(run)
    config = for_one_process(finished.config)
    if not config.model.is_sequence:
        raise RowmeshError(f"{run} is a run of {config.model.name}, which scores samples; rowmesh predict reads it")
    data = SequenceData.open(moved_to or config.data.folder, config.model.sequence, verify=verify)
    task, _ = task_of(config, data)
    if what := mismatch(finished.manifest.metadata, task.fingerprint, finished.folder.model):
        raise RowmeshError(f"{data.folder} differs from the data of the training in {what}; name these with --data")
    mesh = Mesh(timeout_s=config.parallel.timeout_s)
    plan = Plan.cyclic(shapes_of(task.config, data), 1, 1)
    with ExitStack() as stack:
        job = stack.enter_context(job_on(task, mesh, lambda: Placement(plan, "in one process"), trains=False))
        load_model(job, finished.folder, verify)
        job.network.eval()
        yield job, data


def _item_ids(
    job: Job, data: Sequences, coded: Vocabulary, items: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The ids of coded items, and which of them the model knows: numbers, or raw ids that its table has."""
    if data.raw is None:
        rows = _rows_of(coded, data.item_values())[items]
        return rows, rows >= 0
    ids = ids_of(coded.values(np.arange(len(coded))))[items]
    with torch.no_grad():
        return ids, np.isin(ids, Candidates.of(job, data.num_items).ids.numpy())


def _rows_of(coded: Vocabulary, known: pa.Array) -> NDArray[np.int64]:
    """The row of each coded value; −1 where the training had none of its name."""
    given = coded.values(np.arange(len(coded)))
    rows = {value: row for row, value in enumerate(map(_name, known.to_pylist()))}
    return np.array([rows.get(_name(value), -1) for value in given.to_pylist()], np.int64)


def _name(value: object) -> bytes:
    """As bytes, since names may be no UTF-8; a missing value of a side column is empty in files of text."""
    if isinstance(value, bytes):
        return value
    return b"" if value is None else str(value).encode("utf-8", "surrogatepass")


def _as_text(values: pa.Array) -> pa.Array:
    """Names for the table; one that is no UTF-8 has backslashes in the place of its bytes, and changes no other."""
    if not pa.types.is_large_binary(values.type):
        return values
    return pa.array([shown(value) for value in values], pa.large_string())


def _histories(
    coded: NDArray[np.void],
    ids: NDArray[np.int64],
    side: dict[str, NDArray[np.int64]],
    kept: NDArray[np.bool_],
    ties: NDArray[np.int64] | None,
) -> _Histories:
    """Sorted by user and time; what is equal stays in the order of the file, or comes in that of `ties`."""
    coded, ids = coded[kept], ids[kept]
    keys = (coded["time"], coded["user"])
    order = np.lexsort(keys if ties is None else (ties[kept], *keys))
    users, starts = np.unique(coded["user"][order], return_index=True)
    side = {name: values[kept][order] for name, values in side.items()}
    return _Histories(users, ids[order], coded["time"][order] // _SECOND, np.append(starts, len(order)), side)


def _ranked(job: Job, data: SequenceData, known: _Histories, names: pa.Array, top: int, at: int, seen: str) -> pa.Table:
    options, values = job.config.model.sequence, _as_text(data.sequences.item_values())
    parts = []
    with torch.no_grad():
        candidates = Candidates.of(job, data.sequences.num_items).named(data.sequences.raw)
        items = vectors_of(job, candidates.ids, options)
        for first in range(0, len(known.users), USERS):
            users = np.arange(first, min(first + USERS, len(known.users)))
            batch = _batch(known, users, options.max_length, at)
            scores = queries_of(job, batch, options)[batch.offsets[1:] - 1] @ items.T
            if overflows(scores):
                raise RowmeshError(OVERFLOW)
            if seen == "remove":
                events, offsets = spans(known.offsets[:-1][users], known.offsets[1:][users])
                of_user = np.repeat(np.arange(len(users)), np.diff(offsets))
                places = candidates.places(torch.from_numpy(known.items[events]))
                scores[torch.from_numpy(of_user)[places >= 0], places[places >= 0]] = -torch.inf
            best, which = scores.topk(min(top, len(items)), dim=1)
            there = best > -torch.inf
            ranks = torch.arange(1, best.shape[1] + 1).expand_as(best)[there]
            of = torch.from_numpy(known.users[users].astype(np.int64))[:, None].expand_as(best)[there]
            columns = [
                names.take(pa.array(of.numpy())),
                pa.array(ranks.numpy()),
                values.take(pa.array(data.sequences.item_numbers(candidates.ids[which[there]].numpy()))),
            ]
            parts.append(pa.table([*columns, pa.array(best[there].numpy())], ["user", "rank", "item", "score"]))
    return pa.concat_tables(parts)


def _batch(known: _Histories, users: NDArray[np.int64], max_length: int, at: int) -> SequenceBatch:
    """The latest events of some users; the prediction after the last is asked for at a time."""
    ends = known.offsets[1:][users]
    events, offsets = spans(np.maximum(known.offsets[:-1][users], ends - max_length), ends)
    asked = np.append(known.times, at)[events + 1]
    asked[offsets[1:] - 1] = at
    return SequenceBatch(
        users=torch.from_numpy(users),
        offsets=torch.from_numpy(offsets),
        items=torch.from_numpy(known.items[events]),
        times=torch.from_numpy(known.times[events]),
        request_times=torch.from_numpy(asked),
        targets=torch.full((len(events),), -1),
        side={name: torch.from_numpy(values[events]) for name, values in known.side.items()},
    )
