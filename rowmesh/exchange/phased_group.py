"""What the phased exchange does for one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rowmesh.errors import RowmeshError
from rowmesh.exchange.collective import Incoming
from rowmesh.exchange.copies import Copies
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.group import GroupExchange, Sources, never
from rowmesh.exchange.messages import Parts, bounds_of, post_parts
from rowmesh.exchange.window import Form, WindowGroup, phase_counts
from rowmesh.mesh.channel import Channel, Message
from rowmesh.ops import window as ops
from rowmesh.ops.memory import array_at
from rowmesh.ops.simd import STORAGE
from rowmesh.optim.rules import Update
from rowmesh.tables import PinnedRows

FIRST = 2  # the number of the first window; a row that no window touched has number 0


class Travel:
    """One group of one window under way.

    Attributes:
        window: what travels.
        sources: the requests that this rank merged.
        slots: address of uint32 `[entries]`: the slot of each entry.
        places: the same: where its row is in the arena.
        held: keeps the rows there.
        rows_out, rows_in: int64 `[32, W]`: rows that go to and come from each rank in each phase.
        gradients_out, gradients_in: the same of gradients.
        num_rows: rows that have come.
        num_gradients: gradients that were packed.
    """

    def __init__(self, window: WindowGroup) -> None:
        self.window = window
        self.slots = self.places = self.num_rows = self.num_gradients = 0
        self.held: PinnedRows | None = None
        self.sources: Sources
        self.rows_out = self.rows_in = self.gradients_out = self.gradients_in = np.zeros((0, 0), np.int64)

    def count(self) -> None:
        """Counts what travels when, as far as it is known."""
        window = self.window
        group, space, own = window.group, window.space, window.group.exchange.rank
        mine, asked = group.look_up.bounds, group.incoming.bounds.tolist()
        self.rows_out = phase_counts(space.asked_fetches.buffer.address, asked, own)
        self.rows_in = phase_counts(space.fetches.buffer.address, mine, own)
        self.gradients_out = phase_counts(space.pushes.buffer.address, mine, own)
        self.gradients_in = phase_counts(space.asked_pushes.buffer.address, asked, own)


class PhasedGroup:
    """One group's messages.

    Args:
        exchange: the group's.
        rows: channel of keys and rows.
        gradients: channel of gradients.
        ranks_per_node: G, of the mesh: gradients are summed node by node.
        form: how rows travel.
        common: counts what serves all groups.
        verifies: whether every row that is read must have been changed last by the window that touched it last.
    """

    def __init__(
        self,
        exchange: GroupExchange,
        rows: Channel,
        gradients: Channel,
        ranks_per_node: int,
        form: Form,
        common: CommonCounters,
        *,
        verifies: bool,
    ) -> None:
        self.exchange = exchange
        self._num_fetched = exchange.copies.start  # segments of rows that travel; every rank has the others itself
        self._replicas = Copies(exchange, common) if exchange.copies else None
        self._rows, self._gradients, self._ranks_per_node, self._form = rows, gradients, ranks_per_node, form
        self._kernels = ops.kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self._doing = f"exchanging group {exchange.group.name}"
        num_slots = exchange.arena.num_slots
        # The last window that asked for the row in each place. A row that moves to another place was touched by no
        # window in sight, which would have kept it where it was.
        self._touched = np.zeros(num_slots if verifies else exchange.num_places, np.uint32)
        self._versions = np.zeros(num_slots if verifies else 0, np.uint32)  # the last one that changed it
        self._verifies = verifies

    @property
    def num_bytes(self) -> int:
        """Memory beside that of windows."""
        copies = 0 if self._replicas is None else self._replicas.num_bytes
        return copies + self._touched.nbytes + self._versions.nbytes

    def begin(self) -> None:
        """All windows so far are updated, or will never be."""
        if self._verifies:
            self._touched[:] = self._versions

    def post_keys(self, window: WindowGroup, offsets: np.ndarray, accesses: np.ndarray) -> list[Message]:
        """Tells the stops which rows are needed, and which micro-batches use them."""
        group, space, workspace = window.group, window.space, window.group.look_up
        group.incoming = incoming = Incoming(offsets, accesses, self.exchange.num_segments)
        works = []
        for out, begin, into in (
            (workspace.send.lists.bytes, workspace.send.slots_offset, workspace.requests),
            (space.uses.buffer.bytes, 0, space.asked_uses),
        ):
            into.reserve(4 * incoming.num_entries)
            sent = Parts(out, begin, group.look_up.bounds, 4)
            received = Parts(into.buffer.bytes, 0, incoming.bounds.tolist(), 4)
            works.append(post_parts(self._rows, sent, received, self.exchange.counters, self._doing))
        return works

    def settle(
        self, window: WindowGroup, keys: Sequence[Message], number: int, num_parts: int, *, finds_final: bool
    ) -> Travel:
        """Merges what was asked, once it is here, and settles what travels when."""
        for work in keys:
            work.wait()
        self._copy_own(window)
        travel = Travel(window)
        window.group.look_up.replies.reserve(window.group.incoming.num_entries * self.exchange.gradient_bytes)
        travel.sources = self._merge(window)
        travel.slots = window.group.look_up.requests.buffer.address
        self._choose(window, num_parts)
        if not self.exchange.is_tiered:
            self.hold(travel, number, never, finds_final=finds_final)
        return travel

    def hold(self, travel: Travel, number: int, may_wait: Callable[[], bool], *, finds_final: bool) -> None:
        """Brings the merged rows into the arena, and settles what travels when."""
        window, merger, space = travel.window, travel.window.space.merger, travel.window.space
        travel.held = held = self.exchange.pin(merger, may_wait)
        travel.places = travel.slots
        held_places = merger.merged_slots
        if held is not None:
            held_places = held.cache_slots.ctypes.data
            travel.places = space.slots.reserve(4 * window.group.incoming.num_entries)
            ops.spread(held_places, merger.heads, merger.nexts, merger.num_merged, travel.places)
            own = int(window.group.incoming.bounds[self.exchange.rank])
            window.group.pinned = held
            self.exchange.place_own(window.group, merger, own)
        before = space.before.reserve(4 * merger.num_merged)
        if finds_final or self._verifies:
            places, touched = merger.merged_slots if self._verifies else held_places, self._touched.ctypes.data
            ops.note_touched(places, merger.num_merged, touched, number, before)
        if finds_final:
            fetches = space.asked_fetches.buffer.address
            count = int(merger.merged_offsets[self._num_fetched])
            ops.mark_final(before, merger.heads, merger.nexts, count, number, fetches)
        travel.count()
        self._make_room(travel)

    def _copy_own(self, window: WindowGroup) -> None:
        """What a rank asks of itself never leaves it."""
        group, space, rank = window.group, window.space, self.exchange.rank
        begin, end = 4 * group.look_up.bounds[rank], 4 * group.look_up.bounds[rank + 1]
        at, outbox = 4 * int(group.incoming.bounds[rank]), group.look_up.send
        for out, into in (
            (outbox.lists.bytes[outbox.slots_offset :], group.look_up.requests),
            (space.uses.buffer.bytes, space.asked_uses),
        ):
            into.buffer.bytes[at : at + end - begin] = out[begin:end]

    def _merge(self, window: WindowGroup) -> Sources:
        """Merges the requests of all ranks; where their gradients will be is known already."""
        exchange, size, group = self.exchange, self.exchange.gradient_bytes, window.group
        workspace, incoming = group.look_up, group.incoming
        sources = Sources(exchange, window.space.merger)
        for rank in range(exchange.world_size):
            if rank == exchange.rank:
                sources.add_own(group)
            else:
                ahead = int(incoming.bounds[rank]) - int(incoming.offsets[rank, 0])
                slots = workspace.requests.buffer.address + 4 * ahead
                gradients = workspace.replies.buffer.address + size * ahead
                sources.add(slots, incoming.offsets[rank], gradients, incoming.accesses[rank])
            if (rank + 1) % self._ranks_per_node == 0 and self._ranks_per_node < exchange.world_size:
                sources.end_node()
        sources.merge()
        return sources

    def _choose(self, window: WindowGroup, num_parts: int) -> None:
        space, form = window.space, ops.FORMS[self._form]
        for uses, count, fetches, pushes in (
            (space.uses, window.group.num_unique, space.fetches, space.pushes),
            (space.asked_uses, window.group.incoming.num_entries, space.asked_fetches, space.asked_pushes),
        ):
            masks = fetches.reserve(4 * count), pushes.reserve(4 * count)
            ops.choose_phases(uses.buffer.address, count, form, num_parts, *masks)
        if self._replicas is not None:
            self._keep_copies(window)
        if self._form == "naive":
            window.start_afresh()

    def _keep_copies(self, window: WindowGroup) -> None:
        """Rows that every rank has a copy of are in no phase of rows: those segments come last in each list."""
        space, group, asked = window.space, window.group, window.group.incoming
        mine = array_at(space.fetches.buffer.address, np.uint32, group.num_unique)
        theirs = array_at(space.asked_fetches.buffer.address, np.uint32, asked.num_entries)
        offsets = group.look_up.send.segment_offsets
        ahead = asked.bounds[:-1] - asked.offsets[:, 0]
        for member in range(self.exchange.world_size):
            mine[offsets[member, self._num_fetched] : group.look_up.bounds[member + 1]] = 0
            theirs[asked.offsets[member, self._num_fetched] + ahead[member] : asked.bounds[member + 1]] = 0

    def _make_room(self, travel: Travel) -> None:
        """For all that this window will bring, so that nothing moves while threads write there."""
        space, workspace, exchange = travel.window.space, travel.window.group.look_up, self.exchange
        workspace.received.reserve(int(travel.rows_in.sum()) * exchange.row_bytes)
        space.rows.reserve(int(travel.rows_out.sum(1).max()) * exchange.row_bytes)
        space.gradients.reserve(int(travel.gradients_out.sum()) * exchange.gradient_bytes)
        space.arrived.reserve(int(travel.gradients_in.sum(1).max()) * exchange.gradient_bytes)

    def post_final(self, travel: Travel) -> Message:
        """Says which of the rows that were asked for are final."""
        group, space = travel.window.group, travel.window.space
        asked, mine = group.incoming.bounds, np.array(group.look_up.bounds)
        out, into = (bounds_of(-(-np.diff(bounds) // 8)) for bounds in (asked, mine))
        address = space.asked_bits.reserve(int(out[-1]))
        space.bits.reserve(int(into[-1]))
        for member, begin in enumerate(out[:-1].tolist()):
            masks = space.asked_fetches.buffer.address
            ops.pack_bits(masks, int(asked[member]), int(asked[member + 1]), address + begin)
        sent = Parts(space.asked_bits.buffer.bytes, 0, out.tolist(), 1)
        received = Parts(space.bits.buffer.bytes, 0, into.tolist(), 1)
        return post_parts(self._rows, sent, received, self.exchange.counters, self._doing)

    def learn_final(self, travel: Travel, work: Message) -> None:
        """Takes what the stops say of the rows that this rank asked for."""
        work.wait()
        group, space = travel.window.group, travel.window.space
        begin = space.bits.buffer.address
        for member in range(self.exchange.world_size):
            first, end = group.look_up.bounds[member : member + 2]
            if member != self.exchange.rank:
                ops.unpack_bits(begin, first, end, space.fetches.buffer.address)
            begin += -(-(end - first) // 8)
        travel.count()

    def post_rows(self, travel: Travel, phase: int) -> Message:
        """Sends the rows that others need in a phase."""
        exchange, group, space = self.exchange, travel.window.group, travel.window.space
        if self._verifies:
            self._check_versions(travel, phase)
        self._kernels.take_rows(
            exchange.arena.address, travel.places, space.asked_fetches.buffer.address,
            group.incoming.bounds.ctypes.data, exchange.world_size, exchange.rank, phase, space.rows.buffer.address,
        )  # fmt: skip
        out = Parts(space.rows.buffer.bytes, 0, bounds_of(travel.rows_out[phase]).tolist(), exchange.row_bytes)
        begin = travel.num_rows * exchange.row_bytes
        into = bounds_of(travel.rows_in[phase]).tolist()
        received = Parts(group.look_up.received.buffer.bytes, begin, into, exchange.row_bytes)
        return post_parts(self._rows, out, received, exchange.counters, self._doing)

    def place_rows(self, travel: Travel, phase: int, work: Message) -> None:
        """Says where the rows of a phase are, once they are here."""
        work.wait()
        exchange, group, workspace = self.exchange, travel.window.group, travel.window.group.look_up
        bounds = np.array(group.look_up.bounds)
        ops.place_rows(
            travel.window.space.fetches.buffer.address, bounds.ctypes.data, exchange.world_size, exchange.rank, phase,
            workspace.uniques,
            workspace.received.buffer.address + travel.num_rows * exchange.row_bytes, exchange.row_bytes,
            workspace.addresses,
        )  # fmt: skip
        travel.num_rows += int(travel.rows_in[phase].sum())

    def pack_gradients(self, travel: Travel, phase: int) -> None:
        """Copies the gradients that go in a phase, which may change after that."""
        exchange, group, space = self.exchange, travel.window.group, travel.window.space
        bounds = np.array(group.look_up.bounds)
        self._kernels.take_gradients(
            group.look_up.send.gradients.address, space.pushes.buffer.address, bounds.ctypes.data,
            exchange.world_size, exchange.rank, phase, space.gradients.buffer.address + self._sent(travel, phase),
        )  # fmt: skip

    def _sent(self, travel: Travel, phase: int) -> int:
        """Bytes of gradients that go in earlier phases."""
        return int(travel.gradients_out[:phase].sum()) * self.exchange.gradient_bytes

    def post_gradients(self, travel: Travel, phase: int) -> Message:
        """Sends the packed gradients of a phase."""
        size, space = self.exchange.gradient_bytes, travel.window.space
        bounds = bounds_of(travel.gradients_out[phase]).tolist()
        out = Parts(space.gradients.buffer.bytes, self._sent(travel, phase), bounds, size)
        into = Parts(space.arrived.buffer.bytes, 0, bounds_of(travel.gradients_in[phase]).tolist(), size)
        return post_parts(self._gradients, out, into, self.exchange.counters, self._doing)

    def add_gradients(self, travel: Travel, phase: int, work: Message) -> None:
        """Puts the gradients of a phase, once they are here, where the update reads them."""
        work.wait()
        exchange, group, space = self.exchange, travel.window.group, travel.window.space
        self._kernels.add_gradients(
            space.arrived.buffer.address, space.asked_pushes.buffer.address, group.incoming.bounds.ctypes.data,
            exchange.world_size, exchange.rank, phase, group.look_up.replies.buffer.address,
        )  # fmt: skip

    def update(self, travel: Travel, update: Update, number: int) -> None:
        """Updates the merged rows."""
        if travel.held is not None:
            travel.held.apply(travel.window.space.merger, update.lr, update.scaling, update.step)
        else:
            travel.sources.apply(update, self._num_fetched)
        travel.sources.count()
        if self._replicas is not None:
            merger = travel.window.space.merger
            part = (int(merger.merged_offsets[self._num_fetched]), merger.num_merged)
            self._replicas.share(merger, part, self._gradients, update)
        if travel.held is not None:
            travel.held.unpin(changed=True)
        if self._verifies:
            merger = travel.window.space.merger
            self._versions[array_at(merger.merged_slots, np.uint32, merger.num_merged)] = number

    def _check_versions(self, travel: Travel, phase: int) -> None:
        """Raises RowmeshError where a row that is about to be read is not the one that steps in turn would read.

        Rows of this rank's own requests are read in place, from the first micro-batch on.
        """
        if phase == 0 and travel.held is not None:  # when no update can be under way
            travel.held.check()
        space, incoming, rank = travel.window.space, travel.window.group.incoming, self.exchange.rank
        count = incoming.num_entries
        is_read = array_at(space.asked_fetches.buffer.address, np.uint32, count) >> phase & 1 != 0
        is_read[incoming.bounds[rank] : incoming.bounds[rank + 1]] = phase == 0
        expected = space.expected.reserve(4 * count)
        merger = space.merger
        ops.spread(space.before.buffer.address, merger.heads, merger.nexts, merger.num_merged, expected)
        slots = array_at(travel.slots, np.uint32, count)
        expected = array_at(expected, np.uint32, count)
        wrong = np.flatnonzero(is_read & (self._versions[slots] != expected))
        if len(wrong):
            slot = int(slots[wrong[0]])
            raise RowmeshError(
                f"{self._name(slot)} was read as batch {int(self._versions[slot]) - FIRST} left it, and batch "
                f"{int(expected[wrong[0]]) - FIRST} changes it after that ({len(wrong)} such rows of "
                f"{int(is_read.sum())})"
            )

    def _name(self, slot: int) -> str:
        """The row in a slot."""
        for number, table in enumerate(self.exchange.group.tables):
            for piece in self.exchange.address_map.held(number):
                if slot in piece.slots:
                    return f"row {piece.rows[piece.slots.index(slot)]} of table {table.name!r}"
        return f"slot {slot}"
