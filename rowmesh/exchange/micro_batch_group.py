"""Micro-batch group: the messages of one group in windows by micro-batch, and what the host does with them.

The rows of a phase stand together at both ends, in the order of the ranks: requests are sorted by phase, stably. So a
message is one piece of memory, pooling finds rows where they arrived, and on a CPU the update finds gradients so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import RowmeshError
from rowmesh.exchange.copies import Copies
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.exchange.incoming import Incoming, merged_requests
from rowmesh.exchange.replica_rows import ReplicatedSums
from rowmesh.exchange.window import FIRST, Form, WindowGroup
from rowmesh.mesh.channel import Channel, Message, Wire
from rowmesh.ops.memory import array_at, held_bytes
from rowmesh.ops.merge_update import Merger, merge
from rowmesh.ops.window import FINAL
from rowmesh.tables.update_rules import Update


class MicroBatchGroup:
    """The messages of one group.

    Args:
        exchange: the group's.
        rows: channel of keys and rows.
        gradients: channel of gradients.
        form: how rows travel.

    Attributes:
        is_tiered: whether rows must be put into fast memory before they are read.
        num_sizes: numbers of the handshake.
    """

    num_sizes = 0

    def __init__(self, exchange: GroupExchange, rows: Channel, gradients: Channel, form: Form) -> None:
        self._rows, self._gradients, self._form = rows, gradients, form
        self._counters, self.is_tiered = exchange.counters, exchange.is_tiered
        self._row_wire, self._gradient_wire = exchange.row_wire, exchange.gradient_wire
        self._doing = f"exchanging group {exchange.group.name}"

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        return 0

    def begin(self) -> None:
        """All windows so far are updated, or will never be."""

    def write_sizes(self, window: WindowGroup, sizes: np.ndarray) -> None:
        """Writes the sizes of requests into the handshake, int64 `[W, num_sizes]`."""

    def expect(self, window: WindowGroup, sizes: np.ndarray) -> None:
        """Takes the same of all ranks."""
        raise NotImplementedError

    def _keys(self, window: WindowGroup) -> tuple[Tensor, Tensor | None]:
        """The slots that this rank requests, int32 `[U]`, and room for those that other ranks request."""
        raise NotImplementedError

    def post_keys(self, window: WindowGroup) -> list[Message]:
        """Sends requests to the owners, with the micro-batches that use each row."""
        memory, keys = window.memory, [self._keys(window)]
        if (uses := memory.uses(self._form)) is not None:
            keys.append(uses)
        return [self._post(self._rows, out, memory.sent, memory.asked, into) for out, into in keys]

    def take_keys(self, window: WindowGroup, messages: Sequence[Message]) -> None:
        """Merges what ranks ask for, once it is here."""
        raise NotImplementedError

    def merged_slots(self, window: WindowGroup) -> np.ndarray:
        """The distinct slots that this replica asks this rank for, uint32."""
        raise NotImplementedError

    def take_others(self, window: WindowGroup, slots: Sequence[np.ndarray]) -> None:
        """Takes what each of the other replicas asks the rank for that holds there what this one holds here."""
        raise NotImplementedError

    def hold(self, window: WindowGroup, number: int, may_wait: Callable[[], bool], *, finds_final: bool) -> None:
        """Pins the merged rows, and finds which are final."""

    def _find_final(self, window: WindowGroup, before: WindowGroup | None) -> None:
        """Finds which rows the window before does not touch, where `hold` does not."""

    def post_final(self, window: WindowGroup, before: WindowGroup | None) -> Message:
        """Sends ranks which of their requested rows the window before does not touch."""
        self._find_final(window, before)
        out, sizes_out, sizes_in, into = window.memory.final()
        return self._post(self._rows, out, sizes_out, sizes_in, into)

    def _begin_phase(self, window: WindowGroup, phase: int) -> None:
        """Rows of a phase are about to be read."""

    def post_rows(self, window: WindowGroup, phase: int) -> Message:
        """Sends the rows that others need in a phase, and receives those that are needed here."""
        self._begin_phase(window, phase)
        memory = window.memory
        sizes = memory.rows_out.sizes[phase], memory.rows_in.sizes[phase]
        rows, into = memory.take_rows(phase), memory.rows_into(phase)
        return self._post(self._rows, rows, *sizes, into, self._row_wire)

    def post_gradients(self, window: WindowGroup, phase: int) -> Message:
        """Sends the packed gradients of a phase, and receives those of others."""
        memory = window.memory
        sizes = memory.gradients_out.sizes[phase], memory.gradients_in.sizes[phase]
        packed = memory.packed_gradients(phase)
        into = memory.gradients_into(phase)
        return self._post(self._gradients, packed, *sizes, into, self._gradient_wire)

    def sums(self, window: WindowGroup, guests: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        """The slots of the requested rows, `[M]`, and the sums of the gradients of all ranks for them, `[M, D]`.

        Args:
            window: whose gradients have come.
            guests: of each dynamic table the rows that are left out.
        """
        slots, sums = self._sums(window)
        exchange = window.group.exchange
        tables = enumerate(exchange.group.tables)
        left_out = [_slots_of(exchange, number, guests[table.name]) for number, table in tables if table.name in guests]
        if not any(map(len, left_out)):
            return slots, sums
        stays = ~torch.isin(slots, torch.from_numpy(np.concatenate(left_out)).to(slots))
        return slots[stays], sums[stays]

    def _sums(self, window: WindowGroup) -> tuple[Tensor, Tensor]:
        """The same of all rows."""
        raise NotImplementedError

    def update(self, window: WindowGroup, update: Update, number: int) -> None:
        """Updates the requested rows."""
        raise NotImplementedError

    def forget(self, window: WindowGroup, number: int) -> None:
        """The gradients that came are not used: the requested rows stay as they are."""
        window.group.unpin()

    def _post(
        self,
        channel: Channel,
        out: Tensor,
        sizes_out: Sequence[int],
        sizes_in: Sequence[int],
        into: Tensor | None,
        wire: Wire | None = None,
    ) -> Message:
        return channel.post(out, sizes_out, sizes_in, self._counters, self._doing, into, wire=wire)


class OnHost(MicroBatchGroup):
    """On a CPU: a number for every row says which window requested it last. Own rows are read in place.

    Args:
        exchange, rows, gradients, form: as for `MicroBatchGroup`.
        ranks_per_node: G, of the mesh: gradients are summed node by node.
        common: counts what serves all groups.
        verifies: whether every row that is read must have been changed last by the window that touched it last.
    """

    def __init__(
        self,
        exchange: HostGroupExchange,
        rows: Channel,
        gradients: Channel,
        ranks_per_node: int,
        form: Form,
        common: CommonCounters,
        *,
        verifies: bool,
    ) -> None:
        super().__init__(exchange, rows, gradients, form)
        self.exchange = exchange
        self._ranks_per_node, self._verifies, self.num_sizes = ranks_per_node, verifies, 2 * exchange.num_segments + 1
        self._num_fetched = exchange.copies.start  # segments of rows that travel; every rank has the others itself
        self._copies = Copies(exchange, common) if exchange.copies else None
        num_slots = exchange.arena.num_slots
        # The last window that requested the row in each place. A row moves to another place only where no window in
        # sight touched it, since that window would have pinned it.
        self._touched = np.zeros(num_slots if verifies else exchange.num_places, np.uint32)
        self._versions = np.zeros(num_slots if verifies else 0, np.uint32)  # the last one that changed it
        self._union = Merger(1)  # of what replicas ask for

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        copies = 0 if self._copies is None else self._copies.num_bytes
        return held_bytes(self._union) + copies + self._touched.nbytes + self._versions.nbytes

    def begin(self) -> None:
        """All windows so far are updated, or will never be."""
        if self._verifies:
            self._touched[:] = self._versions

    def write_sizes(self, window: WindowGroup, sizes: np.ndarray) -> None:
        """Fills in where the requests for each rank and segment begin, then for how many ids they are."""
        send, split = window.group.look_up.send, self.exchange.num_segments + 1
        sizes[:, :split], sizes[:, split:] = send.segment_offsets, send.accesses

    def expect(self, window: WindowGroup, sizes: np.ndarray) -> None:
        """Takes the same of all ranks."""
        group, split = window.group, self.exchange.num_segments + 1
        incoming = Incoming(sizes[:, :split], sizes[:, split:], self.exchange.num_segments)
        group.keep(incoming)
        window.on_host.open(np.array(group.look_up.bounds), incoming.bounds)

    def _keys(self, window: WindowGroup) -> tuple[Tensor, Tensor]:
        group, num_asked = window.group, window.on_host.num_asked
        send, requests = group.look_up.send, group.look_up.requests
        requests.reserve(4 * num_asked)
        keys = send.lists.tensor(torch.int32, group.num_unique, offset=send.slots_offset)
        return keys, requests.buffer.tensor(torch.int32, num_asked)

    def take_keys(self, window: WindowGroup, messages: Sequence[Message]) -> None:
        """Merges what ranks ask for; where their gradients will be is known when what travels is sorted."""
        for message in messages:
            message.wait()
        group, exchange, memory = window.group, self.exchange, window.on_host
        incoming = group.opened_as(Incoming)
        merged_requests(exchange, [group], self._ranks_per_node, memory.merger)
        memory.choose(self._form)
        if self._copies is not None:  # segments of copied rows come last in each list
            first, offsets = self._num_fetched, incoming.offsets
            ahead = incoming.bounds[:-1] - offsets[:, 0]
            memory.leave_out(group.look_up.send.segment_offsets[:, first], offsets[:, first] + ahead)

    def merged_slots(self, window: WindowGroup) -> np.ndarray:
        """See `MicroBatchGroup.merged_slots`; a view."""
        return window.on_host.merger.slots

    def take_others(self, window: WindowGroup, slots: Sequence[np.ndarray]) -> None:
        """Takes which rows other replicas will change that this one does not ask for."""
        own = window.on_host.merger.slots
        merge([torch.from_numpy(each) for each in (own, *slots)], into=self._union)
        window.on_host.take_others(self._union.slots[len(own) :].copy())

    def hold(self, window: WindowGroup, number: int, may_wait: Callable[[], bool], *, finds_final: bool) -> None:
        """Pins the merged rows, and those that other replicas change, in the arena; finds which are final."""
        group, memory, merger = window.group, window.on_host, window.on_host.merger
        pinned, places = self.exchange.pin(merger, may_wait, memory.others), merger.merged_slots
        others = memory.others if pinned is None or self._verifies else pinned.cache_slots[merger.num_merged :]
        group.pin(pinned)
        if pinned is None:
            memory.read_at(group.look_up.requests.buffer.address)
        else:
            places = pinned.cache_slots.ctypes.data
            memory.spread_places(places)
            self.exchange.place_own(group, merger, int(group.opened_as(Incoming).bounds[self.exchange.rank]))
        if finds_final or self._verifies:
            memory.note_touched(merger.merged_slots if self._verifies else places, self._touched, number)
            self._touched[others] = number
        if finds_final:
            memory.mark_final(number, int(merger.merged_offsets[self._num_fetched]))

    def _begin_phase(self, window: WindowGroup, phase: int) -> None:
        if self._verifies:
            self._check_versions(window, phase)

    def _sums(self, window: WindowGroup) -> tuple[Tensor, Tensor]:
        """See `MicroBatchGroup`; the update takes these sums in the place of gradients."""
        sums = window.on_host.sum_up()
        return torch.from_numpy(window.on_host.merger.slots.astype(np.int64)), sums

    def update(self, window: WindowGroup, update: Update, number: int) -> None:
        """Updates the requested rows, and their copies."""
        group, merger = window.group, window.on_host.merger
        if self.exchange.is_frozen:
            group.unpin()
        else:
            self._change(window, update)
        self.exchange.counters.count_tables(group.opened_as(Incoming).accesses.sum(0), merger.merged_offsets)
        self._note_change(window, number)

    def forget(self, window: WindowGroup, number: int) -> None:
        """The gradients that came are not used."""
        super().forget(window, number)
        self._note_change(window, number)

    def _note_change(self, window: WindowGroup, number: int) -> None:
        if self._verifies:
            for slots in (window.on_host.merger.slots, window.on_host.others):
                self._versions[slots] = number

    def _change(self, window: WindowGroup, update: Update) -> None:
        group, merger = window.group, window.on_host.merger
        pinned, copied, merged = group.pinned, int(merger.merged_offsets[self._num_fetched]), window.on_host.merged
        keeps_sums = isinstance(self.exchange.replicated, ReplicatedSums)
        if pinned is not None and not keeps_sums:  # no turn: a batch that waits for these cache slots may have it
            self.exchange.apply_pinned(pinned, merged, update, (0, copied))
        else:
            self.exchange.apply(merged, update, (0, copied))
        if self._copies is not None:
            self._copies.share(merged, (copied, merged.num_merged), self._gradients, update)
        if pinned is not None and not keeps_sums:
            pinned.unpin(changed=True)

    def _check_versions(self, window: WindowGroup, phase: int) -> None:
        """Raises RowmeshError where a row that is about to be read is not the one that steps in turn would read.

        Rows of this rank's own requests are read in place, from the first micro-batch on.
        """
        memory, group = window.on_host, window.group
        if phase == FINAL + 1 and group.pinned is not None:  # when no update can be under way
            group.pinned.check()
        slots = array_at(group.look_up.requests.buffer.address, np.uint32, memory.num_asked)
        read, expected = memory.read_in(phase), memory.expected()
        wrong = read[self._versions[slots[read]] != expected[read]]
        if len(wrong):
            slot = int(slots[wrong[0]])
            raise RowmeshError(
                f"{self._name(slot)} was read as batch {int(self._versions[slot]) - FIRST} left it, and batch "
                f"{int(expected[wrong[0]]) - FIRST} changes it after that ({len(wrong)} such rows of {len(read)})"
            )

    def _name(self, slot: int) -> str:
        """The row in a slot."""
        for number, table in enumerate(self.exchange.group.tables):
            for piece in self.exchange.address_map.held(number):
                if slot in piece.slots:
                    return f"row {piece.rows[piece.slots.index(slot)]} of table {table.name!r}"
        return f"slot {slot}"


def _slots_of(exchange: GroupExchange, number: int, rows: np.ndarray) -> np.ndarray:
    """The slots of those rows of a table that this rank has."""
    held = [np.empty(0, np.int64)]
    for piece in exchange.address_map.held(number):
        mine = rows[(rows >= piece.rows.start) & (rows < piece.rows.stop)]
        held.append((mine - piece.rows.start) // piece.rows.step * piece.slots.step + piece.slots.start)
    return np.concatenate(held)
