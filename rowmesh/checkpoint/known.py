"""Dynamic tables in a checkpoint, or in a chain of them: by logical shard, whatever ranks wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.checkpoint.entries import KnownEntry, KnownPart, TableEntry
from rowmesh.checkpoint.files import SavedArray, SavedFiles
from rowmesh.errors import DamagedCheckpointError
from rowmesh.tables.dynamic import demoted_records as demoted
from rowmesh.tables.dynamic.records import NOW, OF_CANDIDATES, OF_IDS, REMOVED, SIZES, SKETCH, TIMES
from rowmesh.tables.dynamic.saved_shards import SavedShards

_OF_DEMOTED = (demoted.SIZES, demoted.IDS, demoted.FACTS, demoted.REMOVED)
NUMBERS = (SIZES, SKETCH, NOW, REMOVED, TIMES, *OF_IDS, *OF_CANDIDATES, *_OF_DEMOTED)
_COLUMNS = {SIZES: {"ids": 0, "candidate_ids": 1, REMOVED: 4}, demoted.SIZES: {demoted.IDS: 0, demoted.REMOVED: 1}}
"""Which column of sizes says how many of a kind each shard has."""

Ids = npt.NDArray[np.int64]


class SavedPart:
    """The part of a dynamic table that one rank wrote; maps each file once.

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
        self.num_ids, self.num_demoted, self.demotes = part.num_ids, part.num_demoted, demoted.SIZES in part.files

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
            demoted.SIZES: (3,) if self._is_increment else (),
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
            return part.num_demoted_removed if kind == demoted.REMOVED else part.num_demoted
        if kind == REMOVED:
            return part.num_removed
        return part.num_candidates if kind in OF_CANDIDATES else part.num_ids


class _Place(NamedTuple):
    """Where a shard is in one checkpoint: in which part, its number there, and which of the part's elements it has."""

    part: int
    number: int
    elements: dict[str, slice]


class _Book(NamedTuple):
    """Ids that are saved with their records, and those that are gone: of fast memory, or of the store."""

    sizes: str
    ids: str
    removed: str
    num_all: int  # the column of sizes in an increment: how many a shard has in all
    verb: str


_KNOWN = _Book(SIZES, "ids", REMOVED, 5, "knew")
_DEMOTED = _Book(demoted.SIZES, demoted.IDS, demoted.REMOVED, 2, "had demoted")


class _MergedIds:
    """The ids of some shards of a chain, and where the newest record of each is; none of ids that are gone.

    Args:
        table: its name.
        book: which ids.
        parts: of all checkpoints.
        shards: by number, where each is in each checkpoint, the newest first.
        in_order: whether what is newer comes after what is older, each in its own order; else they are ascending.

    Attributes:
        ids: int64 `[N]`, shard by shard.
        num_ids: of each shard.
    """

    def __init__(
        self,
        table: str,
        book: _Book,
        parts: Sequence[SavedPart],
        shards: Mapping[int, Sequence[_Place]],
        *,
        in_order: bool = False,
    ) -> None:
        self._table, self._book, self._parts, self._in_order = table, book, parts, in_order
        merged = [self._merge(shard, places) for shard, places in shards.items()]
        none = np.empty(0, np.int64)
        self.ids, self._part_of, self._at = (
            np.concatenate([none, *(each[column] for each in merged)]) for column in range(3)
        )
        self.num_ids = [len(ids) for ids, _, _ in merged]

    def _merge(self, shard: int, places: Sequence[_Place]) -> tuple[Ids, Ids, Ids]:
        """The ids of a shard, and where the newest record of each is: in which part, and where there."""
        book, ids, parts, at = self._book, [], [], []
        for place in places:
            own, gone = self._read(place, book.ids), self._read(place, book.removed)
            both = np.concatenate([own, gone])
            if len(np.unique(both)) != len(both):
                raise DamagedCheckpointError(
                    f"table {self._table!r}: an id of shard {shard} is twice in a checkpoint of a chain"
                )
            ids.append(both)
            parts.append(np.full(len(both), place.part))
            first = place.elements[book.ids].start
            at.append(np.concatenate([np.arange(first, first + len(own)), np.full(len(gone), -1)]))
        all_parts, all_at = np.concatenate(parts), np.concatenate(at)
        found, first = np.unique(np.concatenate(ids), return_index=True)  # the first is the newest
        kept = all_at[first] >= 0
        if kept.sum() != (wanted := self._num_all(places[0])):
            raise DamagedCheckpointError(
                f"table {self._table!r}: shard {shard} {book.verb} {wanted:,} ids, and a chain of {len(places)} "
                f"checkpoints gives {kept.sum():,}; take an older checkpoint"
            )
        found, first = found[kept], first[kept]
        if self._in_order:  # parts of older checkpoints have higher numbers
            order = np.lexsort((all_at[first], -all_parts[first]))
            found, first = found[order], first[order]
        return found, all_parts[first], all_at[first]

    def _read(self, place: _Place, kind: str) -> Ids:
        which = place.elements[kind]
        return self._parts[place.part].read(kind, which).numpy() if which.stop > which.start else np.empty(0, np.int64)

    def _num_all(self, newest: _Place) -> int:
        sizes = self._parts[newest.part].read(self._book.sizes, slice(newest.number, newest.number + 1))
        return int(sizes[0, self._book.num_all])

    def gather(self, kind: str, which: slice) -> Tensor:
        """The saved values of one kind, for some of the ids."""
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


class MergedShards:
    """Shards of a chain: of each id the newest record, and none of ids that are gone.

    Args:
        table: its name.
        links: the parts of each checkpoint, the newest first; the last is full.
        shards: which are wanted.
        in_order: whether demoted ids have an order.

    Raises:
        CheckpointError: an increment has an id twice, or a shard does not know as many ids as it must.
    """

    def __init__(
        self, table: str, links: Sequence[Sequence[SavedPart]], shards: range, *, in_order: bool = False
    ) -> None:
        self.shards = shards
        self._parts = [part for parts in links for part in parts]
        firsts = list(accumulate(map(len, links), initial=0))
        places = [_places(parts, first) for parts, first in zip(links, firsts, strict=False)]
        of_shards = {shard: [each[shard] for each in places] for shard in shards}
        self._newest = [each[0] for each in of_shards.values()]
        self._known = _MergedIds(table, _KNOWN, self._parts, of_shards)
        self._demoted = None
        if any(part.demotes for part in self._parts):
            self._demoted = _MergedIds(table, _DEMOTED, self._parts, of_shards, in_order=in_order)
            if len(both := np.intersect1d(self._known.ids, self._demoted.ids)):
                raise DamagedCheckpointError(
                    f"table {table!r}: a chain of {len(links)} checkpoints has id {both[0]} both in fast memory and "
                    "demoted; take an older checkpoint"
                )
        self.num_ids = len(self._known.ids)
        self.num_demoted = 0 if self._demoted is None else len(self._demoted.ids)

    def read(self, kind: str, which: slice) -> Tensor:
        """See `SavedShards`."""
        if kind == SIZES:
            return torch.from_numpy(self._sizes()[which])
        if kind == "ids":
            return torch.from_numpy(self._known.ids[which].copy())
        if kind in (SKETCH, NOW):
            wanted = [(self._parts[each.part], each.number) for each in self._newest[which]]
            none = self._parts[0].read(kind, slice(0))
            return torch.cat([none, *(part.read(kind, slice(number, number + 1)) for part, number in wanted)])
        if kind in OF_CANDIDATES:
            return self._candidates(kind)[which]
        if not kind.startswith(demoted.PREFIX):
            return self._known.gather(kind, which)
        assert self._demoted is not None
        if kind == demoted.SIZES:
            return torch.tensor(self._demoted.num_ids, dtype=torch.int64, device="cpu")[which]
        return self._demoted.gather(kind, which)

    def _sizes(self) -> Ids:
        sizes = [
            self._parts[each.part].read(SIZES, slice(each.number, each.number + 1))[0, :4] for each in self._newest
        ]
        found = np.array([each.numpy() for each in sizes], np.int64).reshape(-1, 4)
        found[:, 0] = self._known.num_ids
        return found

    def _candidates(self, kind: str) -> Tensor:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        found = [self._parts[place.part].read(kind, place.elements[OF_CANDIDATES[0]]) for place in self._newest]
        return torch.cat([none, *found])


def _places(parts: Sequence[SavedPart], first: int) -> dict[int, _Place]:
    """Where each shard is in one checkpoint, whose parts are numbered from `first` on."""
    found = {}
    for number, part in enumerate(parts, start=first):
        starts, stops = {}, {}
        for kind, columns in _COLUMNS.items():
            if kind == demoted.SIZES and not part.demotes:
                continue
            sizes = part.read(kind, slice(None)).numpy().reshape(len(part.shards), -1)
            for of, column in columns.items():
                num = sizes[:, column] if column < sizes.shape[1] else np.zeros(len(sizes), np.int64)
                stops[of] = num.cumsum().tolist()
                starts[of] = [0, *stops[of][:-1]]
        for place, shard in enumerate(part.shards):
            elements = {of: slice(starts[of][place], stops[of][place]) for of in starts}
            found[shard] = _Place(number, place, elements)
    return found


def saved_shards(
    table: str,
    entries: Sequence[TableEntry],
    files: Sequence[SavedFiles],
    *,
    forms: Mapping[str, Tensor] | None = None,
    shards: range | None = None,
) -> Sequence[SavedShards]:
    """The shards of a dynamic table in a chain.

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
        links.append([SavedPart(table, entry, part, of, forms or {}) for part in known_entry(entry).parts])
    if len(links) == 1:
        return links[0]
    rules = known_entry(entries[0]).rules
    wanted = range(int(rules["shards"])) if shards is None else shards
    return [MergedShards(table, links, wanted, in_order=bool(rules.get("store_capacity")))]


def known_entry(entry: TableEntry) -> KnownEntry:
    """The entry of a dynamic table."""
    assert entry.known is not None
    return entry.known
