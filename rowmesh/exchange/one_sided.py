"""One-sided transport: the ranks of a host read each other's rows and send buffers in shared memory.

Forward needs no message at all: a row is read where its owner keeps it. A step has two barriers: one after which all
gradients are in the send buffers (and no rank reads rows any more), one after which all rows are updated. At the first
one ranks agree on the step. Where a send buffer is new to the others, or longer than any before, there is one more:
ranks map it and make room before they agree.

Source: OPER §5.1 (direct reads of remote rows); `mesh.barrier` is what makes it cheap on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.exchange.handshake import Step, after_hearing, check_rates, joined, out_of_step, parted
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.exchange.route import Routed
from rowmesh.exchange.transport import Meanwhile, Transport
from rowmesh.mesh import Mesh, SharedBuffer
from rowmesh.mesh.barrier import Barrier
from rowmesh.mesh.shared_memory import share
from rowmesh.ops.look_up import slots_offset
from rowmesh.ops.merge_update.sources import Sources
from rowmesh.tables import TableGroup
from rowmesh.tables.update_rules import Update

MAX_ROUTES = 1024  # routes that one push may bring for a group
_ENTRY = 6  # int64 values that announce a send buffer
_Requests = tuple[int, np.ndarray, int, np.ndarray]
_Copied = tuple[int, np.ndarray, int]


class OneSidedTransport(Transport[HostGroupExchange]):
    """Shared memory between the ranks of one host."""

    name = "one_sided"

    def __init__(self, mesh: Mesh, num_groups: int) -> None:
        super().__init__()
        self._mesh = mesh
        self._num_fetches = self._num_pushes = 0
        self._num_groups = num_groups
        self._keep: list[SharedBuffer] = []
        # Send buffers of all ranks as they look here, mapped again where a rank makes one anew: its generation, the
        # arguments of `Sources.add` and the first ones of `Sources.add_copied`, and what has a peer's memory.
        self._mapped: dict[tuple[int, int, int], tuple[int, _Requests, _Copied, list[SharedBuffer]]] = {}
        # The line of every rank: its barrier flag; how many fetches it made, whether it refuses the step and the digest
        # of its learning rates, whether it announces anything new, whether it has no room for what is new; for each
        # group how many send buffers it announces, and which; for each group how many entries for each rank it has
        # announced at most, and send buffers.
        self._group_bytes, size = 8 * (1 + _ENTRY * MAX_ROUTES), mesh.world_size
        self._board: SharedBuffer | None = None
        self._shown: list[dict[int, int]] = [{} for _ in range(num_groups)]  # send buffers that all peers know
        self._most = [[0] * (size + 1) for _ in range(num_groups)]  # the limits of this rank
        self._rooms = [0] * num_groups  # entries of all ranks that there is room for
        self._is_new = False

    def make_room(self) -> None:
        """Makes the board."""
        of_groups = (self._group_bytes + 8 * (self._mesh.world_size + 1)) * self._num_groups
        self._board = SharedBuffer.create(128 + of_groups)

    def rows_for(self, group: TableGroup, num_slots: Sequence[int], rank: int) -> Tensor:
        """Shared memory."""
        buffer = SharedBuffer.create(num_slots[rank] * group.dim * group.dtype.itemsize)
        self._keep.append(buffer)
        return buffer.tensor(group.dtype, num_slots[rank], group.dim)

    def allocate(self, num_bytes: int) -> SharedBuffer:
        """Shared memory."""
        buffer = SharedBuffer.create(num_bytes)
        buffer.use_huge_pages()
        return buffer

    def connect(self, exchanges: Sequence[HostGroupExchange]) -> None:
        """Maps every rank's arenas and board; collective."""
        mesh = self._mesh
        self._exchanges = exchanges
        assert self._board is not None
        for buffer, exchange in zip(self._keep, exchanges, strict=True):
            if not _is_lazy(exchange):
                buffer.use_huge_pages()
        boards, mapped = [], []
        addresses: list[dict[int, int]] = [{} for _ in exchanges]
        for rank, (board, *arenas) in enumerate(share(mesh, [self._board, *self._keep])):
            boards.append(board)
            if rank == mesh.rank:
                continue
            for exchange, arena, found in zip(exchanges, arenas, addresses, strict=True):
                if not _is_lazy(exchange):
                    arena.use_huge_pages()
                found[rank] = arena.address
            mapped.extend(arenas)
        for exchange, found in zip(exchanges, addresses, strict=True):
            exchange.read_in_place(found)
        self._boards = boards
        self._flags = np.array([board.address for board in boards], np.int64)
        self._announced = [
            board.array(np.int64, self._num_groups, 1 + _ENTRY * MAX_ROUTES, offset=128) for board in boards
        ]
        self._own = list(self._announced[mesh.rank])
        self._words = [board.array(np.int64, 3, offset=64) for board in boards]
        shape, behind = (self._num_groups, mesh.world_size + 1), 128 + self._group_bytes * self._num_groups
        self._limits = [board.array(np.int64, *shape, offset=behind) for board in boards]
        self._barrier = Barrier(mesh, self._flags.ctypes.data)
        self._keep.extend(mapped)

    def fetch(self, route: Routed, meanwhile: Meanwhile) -> None:
        """Counts rows that are read in place; routing has their addresses."""
        self._num_fetches += 1
        for group in route.groups:
            replies, rank = group.look_up.reply_bounds, self._mesh.rank
            remote = replies[-1] - (replies[rank + 1] - replies[rank])
            group.exchange.counters.add_received(remote * group.exchange.row_bytes)

    def prepare(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Announces the send buffers, and makes room for what peers have announced so far."""
        if len(routes) > MAX_ROUTES:
            raise RowmeshError(
                f"rank {self._mesh.name(self._mesh.rank)}: {len(routes)} forward passes were accumulated for one step; "
                f"at most {MAX_ROUTES} can be"
            )
        size = self._mesh.world_size
        for index, exchange in enumerate(self._exchanges):
            if exchange.replicated is not None:
                exchange.replicated.make_room(self._rooms[index])
            announced, most, shown = self._own[index], self._most[index], self._shown[index]
            counts, is_new, begin = [0] * size, len(routes) > most[size], 1
            for route in routes:
                look_up = route.groups[index].look_up
                send, bounds = look_up.send, look_up.bounds
                lists, gradients = send.lists, send.gradients
                assert isinstance(lists, SharedBuffer)
                assert isinstance(gradients, SharedBuffer)
                memory = lists.descriptor, lists.num_bytes, gradients.descriptor, gradients.num_bytes
                announced[begin : begin + _ENTRY] = (send.number, send.generation, *memory)
                begin += _ENTRY
                is_new |= shown.get(send.number) != send.generation
                for rank in range(size):
                    counts[rank] += bounds[-1] if exchange.copies else bounds[rank + 1] - bounds[rank]
            announced[0] = len(routes)
            for rank, count in enumerate(counts):
                if count > most[rank]:
                    most[rank], is_new = count + count // 4, True
            if is_new:
                most[size] = max(most[size], len(routes))
                self._limits[self._mesh.rank][index] = most
                self._is_new = True  # until all have made room
        self._pushed = routes, updates, step

    def agree(self, step: Step, refusal: Exception | None) -> Exception | None:
        """Waits for all announcements; where one is new, makes room for it and waits once more."""
        self._num_pushes += 1
        mine, words = joined(self._num_fetches, step, refusal is not None), self._words[self._mesh.rank]
        words[0], words[1] = mine, self._is_new
        self._barrier.wait()
        differs, is_new = False, False
        for theirs in self._words:
            differs |= theirs[0] != mine
            is_new |= theirs[1] != 0
        if differs:
            refusal = self._compare(step, refusal)
        if refusal is not None:
            self._barrier.wait()  # all have read
        elif is_new:
            refusal = self._grow()
        if refusal is not None:
            self._num_pushes -= 1
        return refusal

    def _grow(self) -> Exception | None:
        """Makes room for what is announced, and has ranks agree on it."""
        refusal = None
        try:
            reach("one_sided.grow")
            limits = np.array(self._limits)
            num_sources = int(limits[:, 0, -1].sum())
            for index, exchange in enumerate(self._exchanges):
                self._rooms[index] = room = int(limits[:, index, self._mesh.rank].sum())
                exchange.merger.make_room(room, num_sources * (1 + self._mesh.world_size * bool(exchange.copies)))
                if exchange.replicated is not None:
                    exchange.replicated.make_room(room)
                self._map(index)
        except Exception as error:
            refusal = error
        self._words[self._mesh.rank][2] = joined(0, None, refusal is not None)
        self._barrier.wait()
        refusal = after_hearing(self._mesh, [int(theirs[2]) for theirs in self._words], refusal)
        if refusal is None:
            assert self._pushed is not None
            self._is_new = False
            for index, shown in enumerate(self._shown):
                sends = (route.groups[index].look_up.send for route in self._pushed[0])
                shown.update((send.number, send.generation) for send in sends)
        return refusal

    def apply(self) -> None:
        """Merges the gradients of all ranks for this one, updates, waits."""
        assert self._pushed is not None
        _, updates, _ = self._pushed
        reach("one_sided.update")
        for index, (exchange, update) in enumerate(zip(self._exchanges, updates, strict=True)):
            if exchange.is_frozen:
                continue
            sources, num_received = self._sources(index, exchange)
            if sources.num_entries:
                sources.merge()
                exchange.apply(sources.merger, update)
                exchange.counters.count_tables(
                    sources.accesses,
                    sources.merger.merged_offsets,
                    # All ranks update all copies; one of them counts those rows.
                    num_segments=None if self._mesh.rank == 0 else exchange.copies.start,
                    received_bytes=num_received * (4 + exchange.gradient_bytes),
                )
        self._pushed = None
        self._barrier.wait()

    def fail(self, step: int) -> None:
        """Marks the barrier: waiting ranks stop, and say who failed in which step."""
        self._barrier.fail(step)

    def _compare(self, step: Step, refusal: Exception | None) -> Exception | None:
        """Training could go on, but under no other transport, and a loop whose ranks differ is wrong."""
        words = [int(theirs[0]) for theirs in self._words]
        fetches, digests = parted(words)
        if fetches.count(fetches[0]) != len(fetches):
            self._barrier.wait()  # all have read
            names = ", ".join(f"rank {self._mesh.name(rank)} made {count}" for rank, count in enumerate(fetches))
            raise out_of_step(
                f"rank {self._mesh.name(self._mesh.rank)}: ranks are out of step: before step {self._num_pushes} "
                f"{names} forward passes; every rank must call forward and step equally often and in the same order"
            )
        try:
            check_rates(self._mesh, digests, step)
        except ConfigurationError as error:
            refusal = refusal or error
        return after_hearing(self._mesh, words, refusal)

    def _sources(self, index: int, exchange: HostGroupExchange) -> tuple[Sources, int]:
        """The requests of all ranks to this rank in a group, in the order of ranks; and how many of them peers sent."""
        sources, num_received = Sources(exchange.merger, exchange.gradient_bytes, exchange.num_segments), 0
        for rank, groups in enumerate(self._announced):
            announced, before = groups[index], sources.num_entries
            for place in range(int(announced[0])):
                _, requests, copied, _ = self._mapped[rank, index, int(announced[1 + _ENTRY * place])]
                sources.add(*requests)
                if exchange.copies:
                    sources.add_copied(*copied, exchange.copies.start, exchange.rank)
            if rank != exchange.rank:
                num_received += sources.num_entries - before
        return sources, num_received

    def _map(self, index: int) -> None:
        """Maps the send buffers of a group that ranks have announced and made anew; those of this rank are here."""
        assert self._pushed is not None
        num_segments = self._exchanges[index].num_segments
        own = {send.number: send for send in (route.groups[index].look_up.send for route in self._pushed[0])}
        for rank, groups in enumerate(self._announced):
            announced = groups[index]
            for place in range(int(announced[0])):
                begin = 1 + _ENTRY * place
                number, generation, *memory = announced[begin : begin + _ENTRY].tolist()
                mapped = self._mapped.get((rank, index, number))
                if mapped is not None and mapped[0] == generation:
                    continue
                if rank == self._mesh.rank:
                    lists, gradients = own[number].lists, own[number].gradients
                else:
                    lists, gradients = self._attach(rank, memory)
                self._mapped[rank, index, number] = generation, *self._read(num_segments, lists, gradients)

    def _attach(self, rank: int, memory: Sequence[int]) -> tuple[SharedBuffer, SharedBuffer]:
        """A peer's send buffer, given the descriptors and sizes of its lists and of its gradients."""
        pid, name = self._mesh.pids[rank], self._mesh.name(rank)
        lists = SharedBuffer.attach(pid, memory[0], memory[1], name)
        gradients = SharedBuffer.attach(pid, memory[2], memory[3], name)
        gradients.use_huge_pages()
        return lists, gradients

    def _read(
        self, num_segments: int, lists: SharedBuffer, gradients: SharedBuffer
    ) -> tuple[_Requests, _Copied, list[SharedBuffer]]:
        """Where a send buffer has what it asks of this rank, and of all."""
        size, own = self._mesh.world_size, self._mesh.rank
        slots = lists.address + slots_offset(size, num_segments)
        offsets = lists.array(np.int64, size, num_segments + 1)
        accesses = lists.array(np.int64, size, num_segments, offset=offsets.nbytes)
        requests = slots, offsets[own], gradients.address, accesses[own]
        return requests, (slots, offsets, gradients.address), [lists, gradients]

    @property
    def num_bytes(self) -> int:
        """Memory of the board; send buffers belong to batches."""
        return 0 if self._board is None else self._board.num_bytes

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._barrier.wait()

    def publish(self) -> None:
        """Own rows changed otherwise than by a push, and those of all ranks: waits until all have."""
        self._barrier.wait()

    def close(self) -> None:
        """Closes the shared memory, which is freed with the last rank's last view."""
        self._mapped.clear()
        for buffer in (*self._keep, self._board):
            if buffer is not None:
                buffer.close()


def _is_lazy(exchange: HostGroupExchange) -> bool:
    """Whether memory is committed where it is used: most frames of a dynamic table never are."""
    return exchange.group.takes_any_id
