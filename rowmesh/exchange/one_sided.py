"""One-sided transport: the ranks of a host read each other's rows and send buffers in shared memory.

Forward needs no message at all: a row is read where its owner keeps it. A step has two barriers: one after which all
gradients are in the send buffers (and no rank reads rows any more), one after which all rows are updated.

Source: OPER §5.1 (direct reads of remote rows); `mesh.barrier` is what makes it cheap on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rowmesh.errors import PeerError, RowmeshError
from rowmesh.exchange.handshake import Step, check_rates, joined, parted
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.exchange.route import Routed
from rowmesh.exchange.transport import Meanwhile, Transport
from rowmesh.faults import reach
from rowmesh.mesh import Mesh, SharedBuffer
from rowmesh.mesh.barrier import Barrier
from rowmesh.mesh.shared_memory import share
from rowmesh.ops.look_up import slots_offset
from rowmesh.ops.merge_update.sources import Sources
from rowmesh.optim.rules import Update
from rowmesh.tables import TableGroup

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
        # Peers' send buffers as they look here, mapped again where a peer makes one anew: its generation, the arguments
        # of `Sources.add` and the first ones of `Sources.add_copied`, and what has the memory.
        self._mapped: dict[tuple[int, int, int], tuple[int, _Requests, _Copied, list[SharedBuffer]]] = {}
        # Of every rank: its barrier flag, how many fetches it made and the digest of its learning rates, then for each
        # group how many send buffers it announces, and which.
        self._group_bytes = 8 * (1 + _ENTRY * MAX_ROUTES)
        self._board = SharedBuffer.create(128 + self._group_bytes * num_groups)

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
        for buffer, exchange in zip(self._keep, exchanges, strict=True):
            if not _is_lazy(exchange):
                buffer.use_huge_pages()
        boards, mapped = [], []
        for rank, (board, *arenas) in enumerate(share(mesh, [self._board, *self._keep])):
            boards.append(board)
            if rank == mesh.rank:
                continue
            for exchange, arena in zip(exchanges, arenas, strict=True):
                if not _is_lazy(exchange):
                    arena.use_huge_pages()
                exchange.arenas[rank] = arena.address
            mapped.extend(arenas)
        for exchange in exchanges:
            exchange.look_ups.has_remote = False
        self._boards = boards
        self._flags = np.array([board.address for board in boards], np.int64)
        self._announced = [
            board.array(np.int64, self._num_groups, 1 + _ENTRY * MAX_ROUTES, offset=128) for board in boards
        ]
        self._fetches = [board.array(np.int64, 1, offset=64) for board in boards]
        self._barrier = Barrier(mesh, self._flags.ctypes.data)
        self._keep.extend(mapped)

    def fetch(self, route: Routed, meanwhile: Meanwhile) -> None:
        """Nothing to do: routing has put the addresses of the rows in place."""
        self._num_fetches += 1
        for group in route.groups:
            replies, rank = group.look_up.reply_bounds, self._mesh.rank
            remote = replies[-1] - (replies[rank + 1] - replies[rank])
            group.exchange.counters.bytes_received += remote * group.exchange.row_bytes

    def push(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Announces the send buffers, waits, merges the gradients of all ranks for this one, updates, waits."""
        self._num_pushes += 1
        self._announce(routes, step)
        self._barrier.wait()
        self._check(step)
        reach("one_sided.update")
        for index, (exchange, update) in enumerate(zip(self._exchanges, updates, strict=True)):
            if exchange.is_frozen:
                continue
            sources = Sources(exchange.merger, exchange.gradient_bytes, exchange.num_segments)
            for rank in range(self._mesh.world_size):
                if rank == self._mesh.rank:
                    for route in routes:
                        exchange.add_own(sources, route.groups[index], with_copies=bool(exchange.copies))
                else:
                    self._add_peer(sources, rank, index)
            if sources.num_entries:
                sources.merge()
                exchange.update(sources, update)
                # All ranks update all copies; one of them counts those rows.
                exchange.count_merged(sources, None if self._mesh.rank == 0 else exchange.copies.start)
        self._barrier.wait()

    def _announce(self, routes: Sequence[Routed], step: Step) -> None:
        if len(routes) > MAX_ROUTES:
            raise RowmeshError(
                f"rank {self._mesh.name(self._mesh.rank)}: {len(routes)} forward passes were accumulated for one step; "
                f"at most {MAX_ROUTES} can be"
            )
        self._fetches[self._mesh.rank][0] = joined(self._num_fetches, step)
        for index, announced in enumerate(self._announced[self._mesh.rank]):
            announced[0] = len(routes)
            for place, route in enumerate(routes):
                send = route.groups[index].look_up.send
                lists, gradients = send.lists, send.gradients
                assert isinstance(lists, SharedBuffer)
                assert isinstance(gradients, SharedBuffer)
                memory = lists.descriptor, lists.num_bytes, gradients.descriptor, gradients.num_bytes
                begin = 1 + _ENTRY * place
                announced[begin : begin + _ENTRY] = (send.number, send.generation, *memory)

    def _check(self, step: Step) -> None:
        """Training could go on, but under no other transport, and a loop whose ranks differ is wrong."""
        joined_numbers = [int(value[0]) for value in self._fetches]
        if joined_numbers.count(joined_numbers[0]) == len(joined_numbers):
            return
        fetches, digests = parted(joined_numbers)
        self._barrier.wait()  # all have read
        check_rates(self._mesh, digests, step)
        if fetches.count(fetches[0]) != len(fetches):
            names = ", ".join(f"rank {self._mesh.name(rank)} made {count}" for rank, count in enumerate(fetches))
            raise PeerError(
                f"rank {self._mesh.name(self._mesh.rank)}: ranks are out of step: before step {self._num_pushes} "
                f"{names} forward passes; every rank must call forward and step equally often and in the same order"
            )

    def _add_peer(self, sources: Sources, rank: int, index: int) -> None:
        announced = self._announced[rank][index]
        exchange = self._exchanges[index]
        for place in range(int(announced[0])):
            begin = 1 + _ENTRY * place
            number, generation, *memory = announced[begin : begin + _ENTRY].tolist()
            mapped = self._mapped.get((rank, index, number))
            if mapped is None or mapped[0] != generation:
                mapped = generation, *self._map(rank, exchange.num_segments, memory)
                self._mapped[rank, index, number] = mapped
            _, requests, copied, _ = mapped
            before = sources.num_entries
            sources.add(*requests)
            if exchange.copies:
                sources.add_copied(*copied, exchange.copies.start, exchange.rank)
            num_requests = sources.num_entries - before
            exchange.counters.bytes_received += num_requests * (4 + exchange.gradient_bytes)

    def _map(
        self, rank: int, num_segments: int, memory: Sequence[int]
    ) -> tuple[_Requests, _Copied, list[SharedBuffer]]:
        """A peer's send buffer, given the descriptors and sizes of its lists and of its gradients."""
        pid, name, size, own = self._mesh.pids[rank], self._mesh.name(rank), self._mesh.world_size, self._mesh.rank
        lists = SharedBuffer.attach(pid, memory[0], memory[1], name)
        gradients = SharedBuffer.attach(pid, memory[2], memory[3], name)
        gradients.use_huge_pages()
        slots = lists.address + slots_offset(size, num_segments)
        offsets = lists.array(np.int64, size, num_segments + 1)
        accesses = lists.array(np.int64, size, num_segments, offset=offsets.nbytes)
        requests = slots, offsets[own], gradients.address, accesses[own]
        return requests, (slots, offsets, gradients.address), [lists, gradients]

    @property
    def num_bytes(self) -> int:
        """Of the board; send buffers belong to batches."""
        return self._board.num_bytes

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
            buffer.close()


def _is_lazy(exchange: HostGroupExchange) -> bool:
    """Whether memory is committed where it is used: most frames of a dynamic table never are."""
    return exchange.group.storage == "dynamic"
