"""Sequences: the events of every user in order, memory-mapped, and which of them each split predicts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rowmesh.data.events.raw_ids import RawIds
from rowmesh.data.events.schema import EventSchema
from rowmesh.data.metadata import parse_json
from rowmesh.data.pinned import PinnedFolder
from rowmesh.errors import ConfigurationError, DataError

METADATA = "metadata.json"
SEQUENCES = "sequences of events"
"""The kind of folder that the manifest of event sequences names."""

ARRAYS: dict[str, type[np.generic]] = {
    "items": np.int32,
    "times": np.int64,
    "offsets": np.int64,
    "train_ends": np.int64,
    "validation_ends": np.int64,
}
SplitName = Literal["train", "validation", "test"]
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class EventCounts:
    """The numbers of users, items and events that preparation kept or left out.

    Attributes:
        num_users, num_items, num_events: kept.
        num_negative: events that are not positive.
        num_outside_core: positive events of users or items with too few.
        num_tied_last: users whose last two events have one time, so that the rule for ties decides which is the last.
        bad_rows: in the quarantine.
    """

    num_users: int
    num_items: int
    num_events: int
    num_negative: int
    num_outside_core: int
    num_tied_last: int
    bad_rows: int


class _Metadata(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    format_version: int
    rowmesh_version: str
    columns: Annotated[dict[str, Any], Field(alias="schema")]
    counts: dict[str, _Count]
    optimum: dict[str, dict[str, float]] = {}
    side: dict[str, _Count] = {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """What `prepare_events` wrote.

    Attributes:
        folder: where it lies.
        schema: what it was read with.
        counts: what was found and left out.
        items: int32 `[E]`, the events of user 0 in order, then those of user 1, …; the most frequent item is 0.
        times: int64 `[E]`, seconds since 1970.
        offsets: int64 `[users + 1]`, where the events of each user begin.
        train_ends, validation_ends: int64 `[users]`, where the training events of each user end, and where those of the
            validation, which follow, do.
        side: int32 `[E]` of each side column, rows by falling frequency.
        num_side: how many rows each of these columns has.
        raw: by which ids batches name items; None: by their numbers.
        optimum: split → `hr@K`, `ndcg@K` and `mrr` of the model that events were drawn from; empty of real ones.
    """

    folder: Path
    schema: EventSchema
    counts: EventCounts
    items: NDArray[np.int32]
    times: NDArray[np.int64]
    offsets: NDArray[np.int64]
    train_ends: NDArray[np.int64]
    validation_ends: NDArray[np.int64]
    files: PinnedFolder
    side: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    num_side: Mapping[str, int] = field(default_factory=dict)
    optimum: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    raw: RawIds | None = None

    @staticmethod
    def open(folder: str | Path, *, verify: bool = True) -> Sequences:
        """Maps a prepared folder.

        Raises:
            DataError: it is none, or damaged, or its arrays do not fit together.
        """
        folder = Path(folder)
        files = PinnedFolder(folder, verify=verify)
        if (text := files.find(METADATA)) is None:
            raise DataError(f"{folder} holds no sequences ({METADATA} is missing); run rowmesh data prepare first")
        values = parse_json(text, folder / METADATA)
        files.whole(METADATA)
        try:
            metadata = _Metadata.model_validate(values)
            counts = EventCounts(**metadata.counts)
            schema = EventSchema.parse(metadata.columns)
        except (ValidationError, TypeError, ConfigurationError) as error:
            raise DataError(f"{folder / METADATA}: not as it was written ({error}); prepare the data again") from None
        lengths = {"items": counts.num_events, "times": counts.num_events, "offsets": counts.num_users + 1}
        arrays = {
            name: files.array(f"{name}.npy", dtype, lengths.get(name, counts.num_users))
            for name, dtype in ARRAYS.items()
        }
        if list(metadata.side) != list(schema.side):
            raise DataError(f"{folder / METADATA}: its side columns are not the schema's; prepare the data again")
        side = {
            name: files.array(f"{side_file(number)}.npy", np.int32, counts.num_events)
            for number, name in enumerate(schema.side)
        }
        opened = Sequences(
            folder=folder,
            schema=schema,
            counts=counts,
            files=files,
            side=side,
            num_side=metadata.side,
            optimum=metadata.optimum,
            raw=None,
            **arrays,
        )
        opened._check()
        return opened

    @staticmethod
    def write_metadata(
        folder: Path,
        version: str,
        schema: EventSchema,
        counts: EventCounts,
        num_side: Mapping[str, int],
        optimum: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Writes what `open` reads beside the arrays."""
        values = {
            "format_version": 1,
            "rowmesh_version": version,
            "schema": schema.model_dump(mode="json"),
            "counts": asdict(counts),
            **({"side": dict(num_side)} if num_side else {}),
            **({"optimum": optimum} if optimum else {}),
        }
        (folder / METADATA).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @property
    def num_items(self) -> int:
        """Rows that a table of the items needs."""
        return self.counts.num_items

    def item_values(self) -> pa.Array:
        """The items as the files name them, by row."""
        return self.files.column("items.arrow", self.counts.num_items)

    def with_raw_ids(self) -> Sequences:
        """The same events, whose items batches name by ids that mean the same in all data.

        Raises:
            DataError: two items have one id.
        """
        return replace(self, raw=RawIds.of(self.item_values()))

    def item_ids(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The ids by which batches name items, of their numbers."""
        return numbers.astype(np.int64) if self.raw is None else self.raw.ids[numbers]

    def item_numbers(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of items that batches name."""
        return ids if self.raw is None else self.raw.numbers(ids)

    def user_values(self) -> pa.Array:
        """The users as the files name them, by number."""
        return self.files.column("users.arrow", self.counts.num_users)

    def side_values(self, name: str) -> pa.Array:
        """The values of a side column as the files have them, by row; null or "" where it is missing."""
        number = list(self.side).index(name)
        return self.files.column(f"{side_file(number)}.arrow", self.num_side[name])

    def users(self, split: SplitName) -> NDArray[np.int64]:
        """The users of whom a split predicts something: after one event or more."""
        starts = self.offsets[:-1]
        if split == "train":
            return np.flatnonzero(self.train_ends - starts >= 2)
        targets = self.targets(split)
        return np.flatnonzero((targets > starts) & (targets < self._ends(split)))

    def targets(self, split: SplitName) -> NDArray[np.int64]:
        """The index of each user's first event that a held-out split predicts; all events before it are known then."""
        return self.train_ends if split == "validation" else self.validation_ends

    def popularity(self, split: SplitName) -> NDArray[np.int64]:
        """How often each item occurs in what is known when a split is predicted: what popularity ranks by.

        That is the training events, and for the test those of the validation too.
        """
        ends = self.validation_ends if split == "test" else self.train_ends
        bounds = np.zeros(len(self.items) + 1, np.int8)
        np.add.at(bounds, self.offsets[:-1], 1)
        np.add.at(bounds, ends, -1)
        return np.bincount(self.items[bounds[:-1].cumsum(dtype=np.int64) > 0], minlength=self.num_items)

    def _ends(self, split: SplitName) -> NDArray[np.int64]:
        return self.validation_ends if split == "validation" else self.offsets[1:]

    def _check(self) -> None:
        bounds = (self.offsets[:-1], self.train_ends, self.validation_ends, self.offsets[1:])
        rising = all((low <= high).all() for low, high in itertools.pairwise(bounds))
        if not rising or self.offsets[0] != 0 or self.offsets[-1] != len(self.items):
            raise DataError(f"{self.folder}: the bounds of its users do not rise; prepare the data again")
        if len(self.items) and int(self.items.view(np.uint32).max()) >= self.num_items:
            raise DataError(f"{self.folder}: items.npy holds items that do not exist; prepare the data again")
        for name, rows in self.side.items():
            if len(rows) and int(rows.view(np.uint32).max()) >= self.num_side[name]:
                raise DataError(f"{self.folder}: side column {name!r} holds rows that do not exist; prepare it again")


def side_file(number: int) -> str:
    """The base name of a side column's files: a column's own name may not be valid as a file name."""
    return f"side_{number}"
