"""Replica groups, which decide alone, merge what they know of a dynamic table before its rows are averaged.

Between two averages the ranks of a replica group decide alone, on the ids of their own samples. A group's table is a
function of all ids: the row and the optimizer state of an id that it knows; the initial row and a fresh state of any
other. An average puts the mean of these functions into the place of each, for the ids that some group knows. So that it
can be kept, all groups know the same ids afterwards:

    known        an id that some group knows in its index
    count        what it was after the last average, and what every group has counted since
    last step    the last one of all groups
    frequency    as the count, of frequencies as of that step
    score        of the caller: the largest of those groups that saw the id in that step, as it has the largest of its
                 occurrences in a batch
    time         a step is at the latest event of all groups up to it; ids that are past their time to live then leave
    too many     where a shard has more ids than it holds, those of the smallest (score, id) leave. Where no id may
                 leave before its time, all ranks refuse the average, and nothing has changed
    sightings    of other ids: as the count. They admit no id until it comes again. Ids that some group has
                 admitted since the last average begin anew

An id that a group has evicted counts as unknown there: its share of the mean is the initial row. Earlier counts
of the id are not lost with it, as long as another group knows it. An id that it has demoted is not unknown: its record
is its share. After an average all groups demote the ids that no group has in its index, and the ids that leave:

    order        in which they are forgotten: of ids that no group has seen, demoted or forgotten since the last average
                 as it was; then the others in ascending order of ids

Only ids travel that some group has seen, evicted or forgotten since the last average; the others are the same
everywhere.
Differs from the paper, whose groups all have the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import StoreError
from rowmesh.exchange.resolve.asked import message_of
from rowmesh.mesh.channel import Channel
from rowmesh.tables.dynamic.changes import find_in
from rowmesh.tables.dynamic.known_ids import KnownIds
from rowmesh.tables.dynamic.owned import OwnedTable
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.dynamic.state import MAX, NONE, MergedFacts

DOING = "making one of what replicas know of dynamic tables"
SEEN, COUNT, SCORE = 0, 1, 2
"""Columns of facts: last step + 1, or 0 of an unknown id; count; frequency as of that step, or the caller's score."""


@dataclass
class _Sightings:
    """The sightings of ids that are not admitted, as of the last average."""

    window: int
    ids: np.ndarray
    counts: np.ndarray
    sketch: np.ndarray


@dataclass(frozen=True)
class MergedIds:
    """Ids whose rows may differ between groups, and which all of them know, demoted or not.

    Attributes:
        ids: int64 `[n]`, ascending.
        slots: int64 `[n]`, of their rows on this rank; a row is the initial one where this group did not know the id.
    """

    ids: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Draft:
    """The facts that all groups will know, as this rank has found them.

    Attributes:
        merged: facts of ids that groups may know differently.
        local: facts of these ids on this rank.
        failure: why this group cannot say what it knows.
    """

    merged: MergedFacts
    local: KnownIds
    failure: StoreError | None


class Merging:
    """A table on the ranks that have the same shards, one of each replica group. Making one is local.

    Args:
        owned: what this rank has of it; it is told of every decision.
    """

    def __init__(self, owned: OwnedTable) -> None:
        self._owned, self._demotes = owned, owned.shards.rules.mode == "demote"
        self._common = np.zeros((owned.num_frames, 3), np.int64)  # facts after the last average, by frame
        self._left: list[tuple[np.ndarray, np.ndarray]] = []  # ids that were demoted since, and these facts of them
        self._changed: list[np.ndarray] = []
        self._sightings = self._read_sightings()
        self._step = owned.shards.clock[0]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        left = sum(ids.nbytes + facts.nbytes for ids, facts in self._left)
        return self._common.nbytes + left + sum(ids.nbytes for ids in self._changed)

    def note(
        self, ids: np.ndarray, fresh: np.ndarray = NONE, left_ids: np.ndarray = NONE, left_frames: np.ndarray = NONE
    ) -> None:
        """Notes the changes of a step: ids, frames that have a new id, ids that left and their frames.

        Also notes the ids of an average that was not carried out.
        """
        self._changed.append(ids)
        if self._demotes and len(left_ids):
            self._left.append((left_ids, self._common[left_frames]))
        self._common[fresh] = 0

    def take_back(self, noted: np.ndarray) -> None:
        """The last step was not: forgets the ids that it noted. Facts by frame are set anew when ids enter again."""
        self._changed = [each for each in self._changed if each is not noted]

    def note_back(self, ids: np.ndarray, frames: np.ndarray, facts: np.ndarray) -> None:
        """Demoted ids are in these frames again. Facts are those of their records."""
        self._common[frames] = self._common_of_demoted(ids, facts)

    def _common_of_demoted(self, ids: np.ndarray, facts: np.ndarray) -> np.ndarray:
        """Facts of demoted ids after the last average; where they were demoted before it, those of their records."""
        common = facts.copy()
        for left_ids, of_left in self._left:
            places, found = find_in(left_ids, ids)
            common[found] = of_left[places[found]]
        return common

    def begin_anew(self) -> None:
        """Takes what is known here as what all groups know: it was loaded."""
        self._changed, self._left, self._sightings = [], [], self._read_sightings()
        self._step = self._owned.shards.clock[0]
        self._common = np.zeros_like(self._common)
        frames, facts = self._owned.shards.all_facts()
        self._common[frames] = facts

    def find(self, channel: Channel, counters: CommonCounters) -> Draft:
        """Merges the facts of ids that groups may know differently. Collective among the ranks with the same shards.

        Args:
            channel: between them, in the order of their groups.
            counters: of messages.
        """
        shards, failure = self._owned.shards, None
        changed = np.unique(np.concatenate([NONE, *self._changed]))
        union = np.unique(np.concatenate(_gather(channel, changed[:, None], counters)))
        try:
            local = self._owned.held(union)
        except StoreError as error:  # which all ranks must learn of: they wait for what comes next
            failure, local = error, KnownIds.nothing(len(union))
        is_here, demoted = local.frames >= 0, local.demoted
        common = np.where(is_here[:, None], self._common[local.frames], 0)
        common[demoted] = self._common_of_demoted(union[demoted], local.facts[demoted])
        mine = [local.facts, common, is_here[:, None]] if self._demotes else [local.facts, common]
        every = np.stack(_gather(channel, np.concatenate(mine, axis=1), counters))
        known = np.any(every[:, :, SEEN] > 0, axis=0, keepdims=True)[0]
        enters = every[:, known, 6].max(axis=0) > 0 if self._demotes else known[known]
        clock = shards.expiry.clock
        if shards.rules.ttl_seconds:
            clock = clock.joined(np.concatenate(_gather(channel, clock.since(self._step), counters)))
        facts = merge_facts(every[:, known, :6], shards.rules)
        return Draft(MergedFacts(union[known], facts, enters, clock, union), local.at(known), failure)

    def check(self, draft: Draft) -> None:
        """Raises where this cannot be what this group knows; changes nothing.

        Raises:
            StoreError: the store does not answer; names it.
            NoRoomError: ids do not fit, or pins hold the frames.
        """
        if draft.failure is not None:
            raise draft.failure
        self._owned.shards.check_merged(draft.merged, draft.local.rows_at)

    def unite(self, draft: Draft, channel: Channel, counters: CommonCounters, number: int) -> MergedIds:
        """Makes it what this group knows, where `check` has passed on all ranks. Collective as `find` is.

        Args:
            draft: what `find` has found.
            channel, counters: as there.
            number: of the last batch that was opened.
        """
        merged = draft.merged
        slots, has_row, stays = self._owned.unite(number, merged, draft.local)
        self._common[self._owned.frames(slots[stays])] = merged.facts[stays]
        self._merge_sightings(channel, counters, merged.changed)
        self._changed, self._left, self._step = [], [], self._owned.shards.clock[0]
        return MergedIds(merged.ids[has_row], slots[has_row])

    def _merge_sightings(self, channel: Channel, counters: CommonCounters, without: np.ndarray) -> None:
        shards, base, mine = self._owned.shards, self._sightings, self._read_sightings()
        if shards.rules.admit_after == 1:
            return
        if mine.window != base.window:  # the counts of an earlier one are forgotten
            base = _Sightings(mine.window, NONE, NONE, np.zeros_like(mine.sketch))
        if mine.sketch.size:
            more = np.maximum(mine.sketch - base.sketch, 0)
            every = np.stack(_gather(channel, more.reshape(len(more), -1), counters))
            sketch = _total(base.sketch, every.reshape(channel.size, *more.shape))
            shards.set_sightings(NONE, NONE, sketch)
        else:
            more = np.maximum(mine.counts - _counts_at(mine.ids, base.ids, base.counts), 0)
            every = _gather(channel, np.stack([mine.ids, more], axis=1)[more > 0], counters)
            ids = np.unique(np.concatenate([base.ids, *(came[:, 0] for came in every)]))
            ids = ids[~np.isin(ids, without)]
            more = np.stack([_counts_at(ids, *came.T) for came in every])
            shards.set_sightings(ids, _total(_counts_at(ids, base.ids, base.counts), more), mine.sketch)
        self._sightings = self._read_sightings()

    def _read_sightings(self) -> _Sightings:
        return _Sightings(*self._owned.shards.sightings())


def merge_facts(every: np.ndarray, rules: Dynamic) -> np.ndarray:
    """Facts of ids after an average.

    Args:
        every: int64 `[M, N, 6]`: the facts in each group, and those after the last average as far as it has them. All
            groups that have them have the same.
        rules: of the table.

    Returns:
        int64 `[N, 3]`.

    Example:
        >>> facts = np.array([[[8, 5, 0, 3, 4, 0]], [[9, 7, 0, 3, 4, 0]]])  # 4 until step 2, then 1 and 3 more
        >>> merge_facts(facts, Dynamic(capacity=9))
        array([[9, 8, 0]])
    """
    facts, common = every[:, :, :3], every[:, :, 3:]
    last = facts[:, :, SEEN].max(axis=0)
    merged = [last]
    for column in (COUNT, SCORE):
        if column == SCORE and rules.eviction == "score":
            merged.append(np.where(facts[:, :, SEEN] == last, facts[:, :, SCORE], -MAX - 1).max(axis=0))
            continue
        now, before = (_halved(each, column, last, rules.decay_steps) for each in (facts, common))
        merged.append(_total(before.max(axis=0), np.maximum(now - before, 0)))
    return np.stack(merged, axis=1)


def _halved(facts: np.ndarray, column: int, last: np.ndarray, decay_steps: int) -> np.ndarray:
    """Counts, or frequencies as of the last sighting of any group."""
    if column == COUNT or not decay_steps:
        return facts[:, :, column]
    halvings = (last - 1) // decay_steps - (facts[:, :, SEEN] - 1) // decay_steps
    return facts[:, :, column] >> np.minimum(halvings, 63)


def _total(base: np.ndarray, more: np.ndarray) -> np.ndarray:
    """`base + more.sum(axis=0)`, which stops at 2^63 − 1."""
    total = base
    for each in more:
        total = np.where(total > MAX - each, MAX, total + each)
    return total


def _counts_at(wanted: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The count of each id that is wanted, 0 where it has none; `ids` ascend."""
    if not len(ids):
        return np.zeros(len(wanted), np.int64)
    places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[places] == wanted, counts[places], 0)


def _gather(channel: Channel, rows: np.ndarray, counters: CommonCounters) -> list[np.ndarray]:
    """The rows `[n, C]` of each member; n may differ."""
    sizes = channel.post_gather(torch.tensor([len(rows)]), counters, DOING).wait().tolist()
    out = np.zeros((max(sizes), rows.shape[1]), np.int64)
    out[: len(rows)] = rows
    came = channel.post_gather(message_of(out), counters, DOING).wait().numpy()
    return [part[:size] for part, size in zip(came.reshape(channel.size, *out.shape), sizes, strict=True)]
