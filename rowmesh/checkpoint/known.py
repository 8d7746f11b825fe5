"""What a checkpoint, or a chain of them, has of a dynamic table: by logical shard, whatever ranks wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.checkpoint.files import SavedArray, SavedFiles
from rowmesh.checkpoint.manifest import KnownEntry, KnownPart, TableEntry
from rowmesh.dynamic import demoted_records as demoted
from rowmesh.dynamic.records import NOW, OF_CANDIDATES, OF_IDS, REMOVED, SIZES, SKETCH, TIMES
from rowmesh.dynamic.saved_shards import SavedShards
from rowmesh.errors import CheckpointError

_OF_DEMOTED = (demoted.SIZES, demoted.IDS, demoted.FACTS)
NUMBERS = (SIZES, SKETCH, NOW, REMOVED, TIMES, *OF_IDS, *OF_CANDIDATES, *_OF_DEMOTED)
_IDS, _CANDIDATES, _REMOVED, _KNOWN = 0, 1, 4, 5  # columns of SIZES

Ids = npt.NDArray[np.int64]


class SavedPart:
    """What one rank wrote; maps each file once.

    Args:
        table: its name.
        entry: of the table.
        part: of it.
        files: of the checkpoint.
        forms: of "values" and states: tensors of the shape, but for the first dimension, and the dtype that they must
            have; others are as they are in the files, of bfloat16 the bits.
    """

    def __init__(
        self, table: str, entry: TableEntry, part: KnownPart, files: SavedFiles, forms: Mapping[str, Tensor]
    ) -> None:
        assert entry.known is not None
        self._table, self._part, self._files, self._forms = table, part, files, forms
        self._rules, self._is_increment = entry.known.rules, REMOVED in part.files
        self._mapped: dict[str, SavedArray] = {}
        self.shards = range(part.first, part.first + part.num_shards)
        self.num_ids, self.num_demoted = part.num_ids, part.num_demoted

    def read(self, kind: str, which: slice) -> Tensor:
        """See `SavedShards`."""
        if kind not in self._mapped:
            form = self._form(kind)
            shape = (self._num(kind), *form.shape[1:])
            self._mapped[kind] = self._files.array(self._table, kind, self._part.files, form, shape)
        found = torch.from_numpy(np.array(self._mapped[kind][which]))
        wanted = self._forms.get(kind.removeprefix(demoted.PREFIX), found).dtype
        return found.view(wanted) if wanted == torch.bfloat16 else found

    def _form(self, kind: str) -> Tensor:
        shapes = {
            SIZES: (6 if self._is_increment else 4,),
            SKETCH: (int(self._rules["sketch_depth"]), int(self._rules["sketch_width"])),
            demoted.FACTS: (3,),
        }
        if kind in NUMBERS:
            return torch.empty(0, *shapes.get(kind, ()), dtype=torch.int64, device="cpu")
        of_row = kind.removeprefix(demoted.PREFIX)
        if of_row in self._forms or kind not in self._part.files:
            return self._forms.get(of_row, torch.empty(0, device="cpu"))
        return self._files.like(self._part.files[kind])

    def _num(self, kind: str) -> int:
        part = self._part
        if kind in (SIZES, SKETCH, NOW, demoted.SIZES):
            return part.num_shards
        if kind.startswith(demoted.PREFIX):
            return part.num_demoted
        if kind == REMOVED:
            return part.num_removed
        return part.num_candidates if kind in OF_CANDIDATES else part.num_ids


class _Place(NamedTuple):
    """Where a shard is in one checkpoint: in which part, its number there, and which of the part's elements it has."""

    part: int
    number: int
    ids: slice
    candidates: slice
    removed: slice


class MergedShards:
    """Shards of a chain: of each id the newest record, and none of ids that are gone.

    Args:
        table: its name.
        links: the parts of each checkpoint, the newest first; the last is full.
        shards: which are wanted.

    Raises:
        CheckpointError: an increment has an id twice, or a shard does not know as many ids as it must.
    """

    def __init__(self, table: str, links: Sequence[Sequence[SavedPart]], shards: range) -> None:
        self.shards, self._table = shards, table
        self._parts = [part for parts in links for part in parts]
        firsts = list(accumulate(map(len, links), initial=0))
        places = [_places(parts, first) for parts, first in zip(links, firsts, strict=False)]
        self._newest = [places[0][shard] for shard in shards]
        merged = [self._merge(shard, [each[shard] for each in places]) for shard in shards]
        none = np.empty(0, np.int64)
        self._ids, self._part_of, self._at = (
            np.concatenate([none, *(each[column] for each in merged)]) for column in range(3)
        )
        self.num_ids, self.num_demoted = len(self._ids), 0  # increments are of tables that demote nothing
        self._sizes = self._sizes_of([len(ids) for ids, _, _ in merged])

    def _merge(self, shard: int, places: Sequence[_Place]) -> tuple[Ids, Ids, Ids]:
        """The ids of a shard, ascending, and where the newest record of each is: in which part, and where there."""
        ids, parts, at = [], [], []
        for place in places:
            own = self._read(place, "ids", place.ids)
            gone = self._read(place, REMOVED, place.removed)
            both = np.concatenate([own, gone])
            if len(np.unique(both)) != len(both):
                raise CheckpointError(
                    f"table {self._table!r}: an id of shard {shard} is twice in a checkpoint of a chain"
                )
            ids.append(both)
            parts.append(np.full(len(both), place.part))
            at.append(np.concatenate([np.arange(place.ids.start, place.ids.stop), np.full(len(gone), -1)]))
        all_at = np.concatenate(at)
        found, first = np.unique(np.concatenate(ids), return_index=True)  # the first is the newest
        kept = all_at[first] >= 0
        if kept.sum() != (wanted := self._num_known(places[0])):
            raise CheckpointError(
                f"table {self._table!r}: shard {shard} knew {wanted:,} ids, and a chain of {len(places)} checkpoints "
                f"gives {kept.sum():,}; take an older checkpoint"
            )
        return found[kept], np.concatenate(parts)[first][kept], all_at[first][kept]

    def _read(self, place: _Place, kind: str, which: slice) -> Ids:
        return self._parts[place.part].read(kind, which).numpy() if which.stop > which.start else np.empty(0, np.int64)

    def _num_known(self, newest: _Place) -> int:
        sizes = self._read(newest, SIZES, slice(newest.number, newest.number + 1))
        return int(sizes[0, _KNOWN])

    def _sizes_of(self, num_ids: Sequence[int]) -> Ids:
        sizes = [self._read(place, SIZES, slice(place.number, place.number + 1))[0, :4] for place in self._newest]
        found = np.array(sizes, np.int64).reshape(-1, 4)
        found[:, _IDS] = num_ids
        return found

    def read(self, kind: str, which: slice) -> Tensor:
        """See `SavedShards`."""
        if kind == SIZES:
            return torch.from_numpy(self._sizes[which].copy())
        if kind == "ids":
            return torch.from_numpy(self._ids[which].copy())
        if kind in (SKETCH, NOW):
            wanted = [(self._parts[each.part], each.number) for each in self._newest[which]]
            none = self._parts[0].read(kind, slice(0))
            return torch.cat([none, *(part.read(kind, slice(number, number + 1)) for part, number in wanted)])
        if kind in OF_CANDIDATES:
            return self._candidates(kind)[which]
        return self._gather(kind, which)

    def _candidates(self, kind: str) -> Tensor:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.cat([none, *(self._parts[place.part].read(kind, place.candidates) for place in self._newest)])

    def _gather(self, kind: str, which: slice) -> Tensor:
        parts, at = self._part_of[which], self._at[which]
        out = None
        for number in np.unique(parts).tolist() or [0]:
            here = np.flatnonzero(parts == number)
            rows = at[here]
            first = int(rows.min(initial=2**62)) if len(rows) else 0
            found = self._parts[number].read(kind, slice(first, int(rows.max(initial=-1)) + 1))
            if out is None:
                out = torch.empty(len(at), *found.shape[1:], dtype=found.dtype, device="cpu")
            out[torch.from_numpy(here)] = found[torch.from_numpy(rows - first)]
        assert out is not None
        return out


def _places(parts: Sequence[SavedPart], first: int) -> dict[int, _Place]:
    """Where each shard is in one checkpoint, whose parts are numbered from `first` on."""
    found = {}
    for number, part in enumerate(parts, start=first):
        sizes = part.read(SIZES, slice(None)).numpy()
        if sizes.shape[1] == _REMOVED:
            sizes = np.pad(sizes, ((0, 0), (0, 1)))
        ends = np.concatenate([np.zeros((1, 3), np.int64), sizes[:, [_IDS, _CANDIDATES, _REMOVED]].cumsum(axis=0)])
        for place, shard in enumerate(part.shards):
            bounds = [slice(*pair) for pair in ends[place : place + 2].T.tolist()]
            found[shard] = _Place(number, place, *bounds)
    return found


def saved_shards(
    table: str,
    entries: Sequence[TableEntry],
    files: Sequence[SavedFiles],
    *,
    forms: Mapping[str, Tensor] | None = None,
    shards: range | None = None,
) -> Sequence[SavedShards]:
    """What a chain has of a dynamic table.

    Args:
        table: its name.
        entries: of the table, the newest first.
        files: of the same checkpoints.
        forms: see `SavedPart`.
        shards: those that are wanted, at least; None: all.

    Raises:
        CheckpointError: see `MergedShards`.
    """
    links = []
    for entry, of in zip(entries, files, strict=True):
        links.append([SavedPart(table, entry, part, of, forms or {}) for part in _known(entry).parts])
    if len(links) == 1:
        return links[0]
    return [MergedShards(table, links, range(int(_known(entries[0]).rules["shards"])) if shards is None else shards)]


def _known(entry: TableEntry) -> KnownEntry:
    assert entry.known is not None
    return entry.known
