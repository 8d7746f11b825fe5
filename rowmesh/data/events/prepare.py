"""prepare_events: from event tables to sequences, in memory that does not grow with the number of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rowmesh
from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.folder import replacing_folder
from rowmesh._support.files.regular import why_no_file
from rowmesh.data.events.read import CodedEvents, read_events
from rowmesh.data.events.schema import EventSchema, EventSplit
from rowmesh.data.events.sequences import ARRAYS, SEQUENCES, EventCounts, Sequences, side_file
from rowmesh.data.inputs import check_once
from rowmesh.data.prepared import write_vocabulary
from rowmesh.data.progress import Progress, silent
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.request import stamp, unchanged
from rowmesh.errors import ConfigurationError, DataError

FORMAT_VERSION = 1
PART_EVENTS = 1 << 22
_QUARANTINE = "quarantine.jsonl"
_SECOND = 1_000_000


def prepare_events(
    files: Sequence[Path],
    out: Path,
    schema: EventSchema,
    *,
    max_bad_rows: int = 100,
    overwrite: bool = False,
    part_events: int = PART_EVENTS,
    progress: Progress = silent,
    optimum: Mapping[str, Mapping[str, float]] | None = None,
    request: Mapping[str, Any] | None = None,
) -> Sequences:
    """Sorts the events of tables by user and time; the output folder appears whole or not at all.

    Users are numbered in the order in which they appear first, items by falling number of kept events (ties: the item
    that appears first). Events are read once, counted once for every round of the k-core, put beside their user's
    others on disk, and sorted `part_events` at a time. Memory: that many events (more where one user has more), and the
    distinct users, items and values of side columns. Disk: 32 bytes an event while it works, 8 for each side column.

    Args:
        files: read in order.
        out: the folder to write.
        schema: the columns, filters, order and split.
        max_bad_rows: one bad row more stops the preparation.
        overwrite: replace a folder that an earlier call wrote.
        part_events: how many events are sorted at a time; the result does not depend on it.
        progress: receives every step.
        optimum: split → what the best ranking reaches, where it is known.
        request: what the folder depends on, in place of the files, the schema and `max_bad_rows`.

    Raises:
        DataError: too many bad rows, a missing column, an unreadable file, or no event is left.
        RowmeshError: the output folder is in use or not empty, or the disk is full.
    """
    if not files:
        raise ConfigurationError("no files of events; name one or more")
    out, sums = out.absolute(), dict[str, Checksums]()
    request = dict(request or event_request(files, schema, max_bad_rows))
    with replacing_folder(out, kind=SEQUENCES, request=request, overwrite=overwrite, checksums=sums) as folder:
        keep_at = out.with_name(f"{out.name}.{_QUARANTINE}")
        with unchanged(files), Quarantine(folder / _QUARANTINE, max_bad_rows, keep_at) as quarantine:
            events = read_events(files, folder / "events.codes", schema, quarantine, progress)
        progress("k-core", 0.0)
        core = find_core(events, schema.k_core)
        if not core.user_counts.any():
            raise DataError(_nothing_left(events, schema, quarantine))
        progress("k-core", 1.0)
        counts = _write(folder, events, core, schema, part_events, progress)
        num_side = _write_side(folder, events)
        counts = EventCounts(**counts, bad_rows=quarantine.num_bad_rows, num_negative=events.num_negative)
        Sequences.write_metadata(folder, rowmesh.__version__, schema, counts, num_side, optimum)
        events.path.unlink()
    return Sequences.open(out)


def _nothing_left(events: CodedEvents, schema: EventSchema, quarantine: Quarantine) -> str:
    advice = [f"no event is left of {events.num_events:,}"]
    if quarantine.num_bad_rows:
        advice.append(f"{quarantine.num_bad_rows:,} rows were bad: check the schema; {quarantine.first()}")
    if events.num_negative:
        advice.append(f"{events.num_negative:,} rows were left out as not positive: check `positive` in the schema")
    if events.num_events:
        advice.append(f"users and items have fewer than k_core = {schema.k_core} of them: lower k_core")
    return "; ".join(advice)


def event_request(files: Sequence[Path], schema: EventSchema, max_bad_rows: int) -> dict[str, Any]:
    """The inputs that the output of `prepare_events` depends on; the arguments are those of `prepare_events`."""
    for path in files:
        if path.is_dir():
            raise DataError(f"{path} is a folder; name files of events")
        if why := why_no_file(path):
            raise DataError(f"{path}: {why}")
    check_once(files)
    return {
        "format_version": FORMAT_VERSION,
        "files": [stamp(path) for path in files],
        "schema": schema.model_dump(mode="json"),
        "max_bad_rows": max_bad_rows,
    }


def _write(
    folder: Path, events: CodedEvents, core: Core, schema: EventSchema, part_events: int, progress: Progress
) -> dict[str, int]:
    """Writes arrays and vocabularies; returns what is to be counted."""
    users, items = np.flatnonzero(core.user_counts), _by_frequency(core.item_counts)
    item_rows = np.zeros(len(core.item_counts), np.int32)
    item_rows[items] = np.arange(len(items), dtype=np.int32)
    offsets = np.concatenate([[0], core.user_counts[users].cumsum()])
    user_rows = np.zeros(len(core.user_counts), np.int32)
    user_rows[users] = np.arange(len(users), dtype=np.int32)

    grouped = _group(folder / "events.grouped", events, core, user_rows, item_rows, offsets)
    total = int(offsets[-1])
    out_items, out_times = _new(folder, "items", total), _new(folder, "times", total)
    out_side = [_new(folder, side_file(number), total) for number in range(len(events.side))]
    num_ties = 0
    for first, last in _parts(offsets, part_events):
        low, high = offsets[first], offsets[last]
        part = _sort(np.array(grouped[low:high]), schema)
        is_same = (part["time"][1:] == part["time"][:-1]) & (part["user"][1:] == part["user"][:-1])
        has_two = np.diff(offsets[first : last + 1]) > 1
        num_ties += int(is_same[(offsets[first + 1 : last + 1] - low - 2)[has_two]].sum())
        out_items[low:high] = part["item"]
        out_times[low:high] = part["time"] // _SECOND
        for number, out in enumerate(out_side):
            out[low:high] = part["side"][:, number]
        progress("sort", high / total)
    del grouped
    (folder / "events.grouped").unlink()

    ends = _ends(out_times, offsets, schema.split)
    for name, values in {"offsets": offsets, "train_ends": ends[0], "validation_ends": ends[1]}.items():
        np.save(folder / f"{name}.npy", values.astype(ARRAYS[name]))
    for out in (out_items, out_times, *out_side):
        out.flush()
    write_vocabulary(folder / "users.arrow", events.users.values(users))
    write_vocabulary(folder / "items.arrow", events.items.values(items))
    return {
        "num_users": len(users),
        "num_items": len(items),
        "num_events": total,
        "num_outside_core": events.num_events - total,
        "num_tied_last": num_ties,
    }


def _write_side(folder: Path, events: CodedEvents) -> dict[str, int]:
    """Numbers the values of side columns anew, the most frequent first; writes them, and returns how many there are."""
    num_side = {}
    for number, (name, vocabulary) in enumerate(events.side.items()):
        codes = np.load(folder / f"{side_file(number)}.npy", mmap_mode="r+")
        blocks = [slice(at, at + PART_EVENTS) for at in range(0, len(codes), PART_EVENTS)]
        counts = sum((np.bincount(codes[block], minlength=len(vocabulary)) for block in blocks), np.int64(0))
        kept = _by_frequency(np.asarray(counts))
        rows = np.zeros(len(vocabulary), np.int32)
        rows[kept] = np.arange(len(kept), dtype=np.int32)
        for block in blocks:
            codes[block] = rows[codes[block]]
        codes.flush()
        write_vocabulary(folder / f"{side_file(number)}.arrow", vocabulary.values(kept))
        num_side[name] = len(kept)
    return num_side


def _by_frequency(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Codes that have events, the most frequent first."""
    order = np.argsort(-counts, kind="stable")
    return order[: int((counts > 0).sum())]


def _group(
    path: Path,
    events: CodedEvents,
    core: Core,
    user_rows: NDArray[np.int32],
    item_rows: NDArray[np.int32],
    offsets: NDArray[np.int64],
) -> NDArray[np.void]:
    """Kept events on disk, those of a user side by side, in the order of the files: a counting sort."""
    grouped = np.memmap(path, events.dtype, "w+", shape=(int(offsets[-1]),))
    cursors = offsets[:-1].copy()
    for block in events.blocks():
        kept = block[core.keeps(block)]
        kept["user"], kept["item"] = user_rows[kept["user"]], item_rows[kept["item"]]
        kept = kept[np.argsort(kept["user"], kind="stable")]
        users, starts, sizes = np.unique(kept["user"], return_index=True, return_counts=True)
        within = np.arange(len(kept)) - np.repeat(starts, sizes)
        grouped[np.repeat(cursors[users], sizes) + within] = kept
        cursors[users] += sizes
    return grouped


def _parts(offsets: NDArray[np.int64], part_events: int) -> Iterator[tuple[int, int]]:
    """Runs of users whose events are sorted together."""
    first, num_users = 0, len(offsets) - 1
    while first < num_users:
        last = int(np.searchsorted(offsets, offsets[first] + part_events, side="right")) - 1
        last = min(max(last, first + 1), num_users)
        yield first, last
        first = last


def _sort(events: NDArray[np.void], schema: EventSchema) -> NDArray[np.void]:
    """By user and time; what is equal stays in the order of the files, unless items decide."""
    keys = (events["time"], events["user"])
    return events[np.lexsort((events["item"], *keys) if schema.ties == "item" else keys)]


def _new(folder: Path, name: str, length: int) -> np.memmap:
    dtype = np.dtype(ARRAYS.get(name, np.int32))
    return np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (length,), version=(1, 0))


def _ends(
    times: NDArray[np.int64], offsets: NDArray[np.int64], split: EventSplit
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the training events of every user end, and where those of the validation do."""
    starts, ends = offsets[:-1], offsets[1:]
    if split.by == "last":
        held = np.where(ends - starts >= 3, 1, 0)
        return ends - 2 * held, ends - held
    moments = [_moment(times, 1 - split.validation - split.test), _moment(times, 1 - split.test)]
    before = [np.zeros(len(starts), np.int64) for _ in moments]
    for first, last in _parts(offsets, PART_EVENTS):
        part = np.asarray(times[offsets[first] : offsets[last]])
        users = np.repeat(np.arange(first, last), np.diff(offsets[first : last + 1]))
        for counts, moment in zip(before, moments, strict=True):
            counts[first:last] = np.bincount(users[part < moment] - first, minlength=last - first)
    return starts + before[0], starts + before[1]


def _moment(times: NDArray[np.int64], share: float) -> int:
    """The first second before which that share of all events lies, or more: found by halving, in blocks."""
    blocks = range(0, len(times), PART_EVENTS)
    low = min(int(times[at : at + PART_EVENTS].min()) for at in blocks)
    high = max(int(times[at : at + PART_EVENTS].max()) for at in blocks) + 1
    wanted = round(share * len(times))
    while low < high:
        middle = (low + high) // 2
        if sum(int((times[at : at + PART_EVENTS] < middle).sum()) for at in blocks) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Core:
    """The kept events, counted by user and by item.

    Attributes:
        user_counts, item_counts: int64, kept events by code; 0 for users and items that are left out.
    """

    user_counts: NDArray[np.int64]
    item_counts: NDArray[np.int64]

    def keeps(self, events: NDArray[np.void]) -> NDArray[np.bool_]:
        """Whether each event has a user and an item that are kept."""
        return (self.user_counts[events["user"]] > 0) & (self.item_counts[events["item"]] > 0)


def find_core(events: CodedEvents, k: int) -> Core:
    """The k-core: leaves out users and items of fewer than k events until all have k or more.

    It reads the events once a round; the result does not depend on the order of rounds. Memory: 8 bytes a user and an
    item.
    """
    core = _count(events, None)
    while True:
        users = np.where(core.user_counts < k, 0, core.user_counts)
        items = np.where(core.item_counts < k, 0, core.item_counts)
        if (users == core.user_counts).all() and (items == core.item_counts).all():
            return core
        core = _count(events, Core(users, items))


def _count(events: CodedEvents, kept: Core | None) -> Core:
    """Counts the events of kept users and items."""
    users, items = np.zeros(len(events.users), np.int64), np.zeros(len(events.items), np.int64)
    for block in events.blocks():
        if kept is not None:
            block = block[kept.keeps(block)]
        users += np.bincount(block["user"], minlength=len(users))
        items += np.bincount(block["item"], minlength=len(items))
    return Core(users, items)
