"""One-sided transport of devices: the ranks of a host read each other's arenas and send buffers.

A look-up sends nothing: a kernel reads every row where its owner keeps it, once, and the host waits for nothing. A step
lays its messages out in a send buffer, sorted by owner, which the owners read between two barriers of the devices.
Where all ranks have a row, each reads its own copy. Gradients of such rows stand at the end of the send buffer, where
every rank reads them: all ranks add the same gradients in the same order, so that copies stay equal to the bit.

[Note: who may read what when]
All of a rank's work on its device is on one stream, in the order of the calls; a barrier of the devices separates the
work that all ranks launched before it from the work after it. So, on all ranks::

    fetch     rows of all arenas are read
    push      own send buffer is written
              ── barrier: no rank reads rows any more, all send buffers are complete
              all send buffers are read, own rows are updated
              ── barrier: rows are updated, no rank reads send buffers any more
    flush     own rows are synchronized with those of other replicas
    fetch     ── barrier, only after `flush`: rows are as they are to be
              rows of all arenas are read …

Messages of other replicas change rows between a push and the `flush` that all ranks call before anything else: no rank
reads rows after the second barrier of that push. Where replicas are made equal between two steps, after look-ups
without a push, ranks first pass `DeviceOneSided.barrier`, where hosts wait for all devices. A push after `flush` needs
only its own barriers: it reads send buffers, and changes own rows after earlier changes, on the same stream. That
stream also waits for messages between replicas.

A device's barrier does not name the rank that is missing. Therefore the hosts compare before every fetch and push what
they are about to do, as `rowmesh.exchange.device_collective` does, and launch no barrier before that. The same message
has the layout of the send buffer, which the host knows by then: sizes were copied to it while the batch was
computed.

Source: OPER §5.1 (direct reads of remote rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError, IdRangeError, PeerError
from rowmesh.exchange.device_group import DeviceGroupExchange, DeviceRouteGroup
from rowmesh.exchange.device_lanes import Lanes, Requests, by_rank, node_ends
from rowmesh.exchange.handshake import Handshake, Step, after_hearing
from rowmesh.exchange.route import Routed
from rowmesh.exchange.transport import LateChecks, Meanwhile, Transport, check_peers, count_unique
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.peer_memory import PeerBuffer, PeerMemory
from rowmesh.mesh.waiting import barrier, gather_objects
from rowmesh.ops.memory import round_up
from rowmesh.tables import TableGroup
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.update_rules import Update

_REFUSED, _ROUTES, _GROUPS = 1, 2, 3  # columns of a handshake; then some for each group:
# Where the entries for a rank begin in the send buffer, how many; entries in all, of which the last so many are for all
# ranks; then of how many ids of each table its entries are.
_BEGIN, _COUNT, _TOTAL, _COPIES, _IDS = range(5)
_ALIGNMENT = 256


class DeviceOneSided(Transport[DeviceGroupExchange]):
    """Memory of the devices of one host, which all its ranks read.

    Args:
        mesh: ranks of one host.
        device: of this one.
        memory: of all of them.

    Attributes:
        reason: why it works here.
    """

    name = "one_sided"

    def __init__(self, mesh: Mesh, device: torch.device, memory: PeerMemory, reason: str) -> None:
        super().__init__(reason)
        self._mesh, self._device, self._memory = mesh, device, memory
        self._arenas: list[PeerBuffer] = []
        self._late = LateChecks(mesh.name(mesh.rank), _numbers, self._take_numbers)
        self._num_fetches = self._num_pushes = 0
        self._has_changed = False  # rows, since the last barrier; on all ranks alike
        self._layouts: list[np.ndarray] = []  # of the send buffers of all ranks, in the push under way
        self._most = 0  # routes that a rank pushes

    def rows_for(self, group: TableGroup, num_slots: Sequence[int], rank: int) -> Tensor:
        """Memory for this rank's rows, `[num_slots, D]`, that other ranks can read.

        Args:
            group: whose.
            num_slots: of every rank; all take as much as the one that has most.
            rank: this one.
        """
        buffer = self._memory.allocate(max(num_slots) * group.dim * group.dtype.itemsize)
        self._arenas.append(buffer)
        return _view(buffer.own, group.dtype, num_slots[rank], group.dim)

    def connect(self, exchanges: Sequence[DeviceGroupExchange]) -> None:
        """Maps every rank's arenas. Collective."""
        self._memory.share(self._arenas)
        pairs = zip(exchanges, self._arenas, strict=True)
        self._groups = [_Group(exchange, arena, self._mesh) for exchange, arena in pairs]
        hosts = Channel.between_hosts(self._mesh)
        *self._cuts, width = accumulate(_IDS + len(exchange.group.tables) for exchange in exchanges)
        self._handshake = Handshake(self._mesh, hosts, _GROUPS + width, self.common)
        self.barrier()

    def fetch(self, route: Routed, meanwhile: Meanwhile) -> None:
        """Reads the rows of a batch where they are.

        Raises:
            IdRangeError: an earlier batch of this rank had ids that are no rows, or this one where gradients are off.
            PeerError: one of another rank had.
        """
        self._num_fetches += 1
        trains = torch.is_grad_enabled()
        if not trains:  # perhaps nothing comes that would look later
            self._late.post(route)
        self._open(self._num_fetches, self._look())
        if self._has_changed:
            self._pass_barrier()
        if trains:
            self._late.post(route)
        for reader, group in zip(self._groups, route.groups, strict=True):
            reader.fetch(group)
            meanwhile(group)

    def agree(self, step: Step, refusal: Exception | None) -> Exception | None:
        """Tells the others what is pushed, and whether this rank can; makes room for gradients on all ranks."""
        self._num_pushes += 1
        error = self._look()  # all sizes are known then
        routes = self._pushed[0] if self._pushed is not None and refusal is None else ()
        pushed = [[route.groups[i] for route in routes] for i in range(len(self._groups))]
        counts = [group.where(entries) for group, entries in zip(self._groups, pushed, strict=True)]
        numbers = [np.full((self._mesh.world_size, 1), len(routes)), *counts]
        try:
            theirs = self._open(-self._num_pushes, error, step, numbers, refuses=refusal is not None)
        except PeerError as heard:
            if heard.is_common:
                raise
            return refusal or heard
        except ConfigurationError as found:
            return refusal or found
        except IdRangeError as found:
            return refusal or found
        if (refusal := after_hearing(self._mesh, theirs[:, 0].tolist(), refusal)) is not None:
            return refusal
        self._layouts, self._most = np.split(theirs[:, _GROUPS:], self._cuts, 1), int(theirs[:, _ROUTES].max())
        if self._most == 0:
            return None
        try:
            self._make_room([int(part[:, _TOTAL].max()) for part in self._layouts])
        except MemoryError as lack:  # of any rank, on all alike
            return lack
        return None

    def apply(self) -> None:
        """Lays out gradients, waits, merges those of all ranks for own rows and updates, waits; all on the device."""
        assert self._pushed is not None
        (routes, updates, _), most, found = self._pushed, self._most, self._layouts
        self.withdraw()
        if most == 0:
            return
        pushed = [[route.groups[i] for route in routes] for i in range(len(self._groups))]
        for group, entries in zip(self._groups, pushed, strict=True):
            group.put(entries)
        self._pass_barrier()
        for group, part, update in zip(self._groups, found, updates, strict=True):
            group.update(part, most, update)
        self._pass_barrier()

    def publish(self) -> None:
        """Notes that rows of all ranks changed other than by a push; the next look-up waits for all of them."""
        self._has_changed = True

    def _pass_barrier(self) -> None:
        """Launches a barrier of the devices, once the hosts know that all ranks do."""
        self._memory.barrier()
        self._has_changed = False

    def _look(self) -> IdRangeError | None:
        """Learns the sizes of batches that were looked up; returns the error of one that is refused."""
        try:
            self._late.read()
        except IdRangeError as error:
            return error
        return None

    def _open(
        self,
        operation: int,
        error: IdRangeError | None,
        step: Step | None = None,
        numbers: Sequence[np.ndarray] = (),
        *,
        refuses: bool = False,
    ) -> np.ndarray:
        """Exchanges the handshake of an operation; raises on all ranks where a batch is refused."""
        refused = np.full((self._mesh.world_size, 1), int(error is not None))
        theirs = self._handshake(operation, step, [refused, *numbers], refuses=refuses)
        if error is not None:
            raise error
        check_peers(self._mesh, theirs[:, _REFUSED].tolist())
        return theirs

    def _take_numbers(self, group: DeviceRouteGroup, numbers: list[int]) -> None:
        """Notes how many rows of each owner a batch needed, which were read, and for how many ids of each table."""
        exchange = group.exchange
        destinations, num_tables = exchange.num_destinations, len(exchange.group.tables)
        rows, ids = np.array(numbers).reshape(2, destinations, -1, num_tables).sum(2)
        sizes = rows.sum(1).tolist()
        count_unique(group, sizes)
        keys = group.look_up.found.keys[: sum(sizes)]
        group.keep(Lanes([Requests(keys, sizes, [], keys[:0], ids)]))
        remote = sum(sizes[: self._mesh.world_size]) - sizes[self._mesh.rank]
        exchange.counters.add_received(remote * exchange.arena.rows[:1].nbytes)

    def _make_room(self, entries: Sequence[int]) -> None:
        """Grows send buffers on all ranks where one rank needs it; all know what each needs."""
        growing = [pair for pair in zip(self._groups, entries, strict=True) if pair[1] > pair[0].capacity]
        if not growing:
            return
        doing, obstacle = "making room for gradients", None
        self._wait_for_device()
        barrier(self._mesh, doing)  # until here a rank may have been reading what goes now
        try:
            made = [group.grow(needed, self._memory) for group, needed in growing]
        except MemoryError as error:
            made, obstacle = [], str(error)
        for rank, theirs in enumerate(gather_objects(self._mesh, obstacle, doing)):
            if theirs is not None:
                raise MemoryError(
                    f"rank {self._mesh.name(rank)} has no room for gradients, use smaller batches: {theirs}"
                )
        self._memory.share(made)
        for group, _ in growing:
            group.open()

    def barrier(self) -> None:
        """Waits for all ranks and their devices; raises where a batch that no host has checked yet is refused."""
        error = self._look()
        self._wait_for_device()
        refused = gather_objects(self._mesh, error is not None, "waiting at a barrier")
        self._has_changed = False
        if error is not None:
            raise error
        check_peers(self._mesh, refused)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def num_bytes(self) -> int:
        """Memory of send buffers."""
        return sum(group.num_bytes for group in self._groups)

    def close(self) -> None:
        """Closes other ranks' memory, which is freed when no rank uses it any more."""
        self._late.clear()
        self._arenas.clear()
        self._groups = []


class _Group:
    """The send buffers of one group, written here and read at their owners.

    Args:
        exchange: the group's.
        arena: of all ranks.
        mesh: the ranks.

    Attributes:
        capacity: entries that a send buffer has room for, of every rank alike: gradients `[capacity, D]`, then keys
            int32 `[capacity]`.
    """

    def __init__(self, exchange: DeviceGroupExchange, arena: PeerBuffer, mesh: Mesh) -> None:
        from rowmesh.ops.gather import cuda as gather
        from rowmesh.ops.merge.cuda import merge

        self._gather, self._gather_from, self._merge = gather.gather, gather.gather_from, merge
        self._exchange, self._arena, self._mesh = exchange, arena, mesh
        assert "node" not in exchange.lane_kinds  # one host is one node
        bases = [part.data_ptr() for part in arena.parts]
        bases += [arena.own.data_ptr()] * (exchange.num_destinations - len(bases))  # all have copies
        assert not any(base % 16 for base in bases)  # the kernel relies on it
        self._bases = torch.tensor(bases, device=exchange.device)
        self._dtype = compute_dtype(exchange.group.dtype)
        self._entry_bytes = exchange.group.dim * self._dtype.itemsize + 4
        self.capacity = 0
        self._sent: PeerBuffer | None = None
        self._boxes: list[tuple[Tensor, Tensor]] = []  # of every rank: gradients and keys

    def fetch(self, group: DeviceRouteGroup) -> None:
        """Reads the rows of a batch, those of a unique id into the place of its number."""
        routed, rows = group.look_up.found, self._exchange.arena.rows
        group.look_up.read_from(rows.new_empty(group.num_unique, rows.shape[1]))
        group.look_up.read_at(None)
        self._gather_from(
            self._bases, _by_owner(group).cumsum(0), routed.keys, group.look_up.uniques, group.look_up.source
        )

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's send buffer."""
        return 0 if self._sent is None else self._sent.own.nbytes

    def grow(self, needed: int, memory: PeerMemory) -> PeerBuffer:
        """Makes the send buffer anew, with a quarter more room than is needed; to be shared, then `open`."""
        self._boxes, self._sent, self.capacity = [], None, 0  # first: there may be no room for both
        self._sent = memory.allocate(round_up(needed + needed // 4, _ALIGNMENT) * self._entry_bytes)
        return self._sent

    def open(self) -> None:
        """Finds gradients and keys in the send buffers of all ranks."""
        assert self._sent is not None
        self.capacity = len(self._sent.own) // self._entry_bytes
        self._boxes = [self._box(part) for part in self._sent.parts]

    def put(self, groups: Sequence[DeviceRouteGroup]) -> None:
        """Lays out the keys and gradients of some routes, sorted by owner, and of one owner route after route."""
        asked = [(_requests(group).keys, group.look_up.uniques, group.look_up.summed) for group in groups]
        sizes, count = [_requests(group).sent for group in groups], sum(len(keys) for keys, _, _ in asked)
        if not count:
            return
        own_gradients, own_keys = (box[:count] for box in self._boxes[self._mesh.rank])
        own_keys.copy_(by_rank([keys for keys, _, _ in asked], sizes))
        into = own_gradients if len(groups) == 1 else None
        in_order = [self._gather(sums, uniques[: len(keys)], into) for keys, uniques, sums in asked]
        if into is None:
            own_gradients.copy_(by_rank(in_order, sizes))

    def where(self, groups: Sequence[DeviceRouteGroup]) -> np.ndarray:
        """The layout of the send buffer of some routes, as each rank needs it: int64 `[W, 4 + S]`."""
        sizes = [
            sum(_requests(group).sent[destination] for group in groups)
            for destination in range(self._exchange.num_destinations)
        ]
        ids = np.zeros((len(sizes), len(self._exchange.group.tables)), np.int64)
        for group in groups:
            ids += _requests(group).ids_sent
        ids, of_all = np.split(ids, [self._mesh.world_size])
        ids[0] += of_all.sum(0)  # one rank counts rows that all have
        return np.hstack([_where(sizes, self._mesh.world_size), ids])

    def update(self, found: np.ndarray, most: int, update: Update) -> None:
        """Merges what every rank laid out for this one and for all, in rank order, and updates.

        Args:
            found: int64 `[W, 4 + S]`: the layouts that the ranks sent.
            most: routes that a rank pushed, at most.
            update: how.
        """
        counts = (found[:, _COUNT] + found[:, _COPIES]).tolist()
        if not sum(counts):
            return
        pairs = [
            (box, part)
            for box, (begin, count, total, copies) in zip(self._boxes, found[:, :_IDS].tolist(), strict=True)
            for part in (slice(begin, begin + count), slice(total - copies, total))
        ]
        # Copied here once: the kernels of an update go over keys several times.
        slots = torch.cat([keys[part] for (_, keys), part in pairs])
        gradients = torch.cat([gradients[part] for (gradients, _), part in pairs])
        ends = node_ends(counts, self._mesh.ranks_per_node, slots.device)
        merged = self._merge(slots, most=most * self._mesh.world_size, node_ends=ends)
        self._exchange.apply(merged.with_gradients(gradients), update)
        self._exchange.count(found[:, _IDS:].sum(0), merged, ())
        remote = sum(counts) - counts[self._mesh.rank]
        self._exchange.counters.add_received(remote * (4 + gradients[:1].nbytes))

    def _box(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        dim = self._exchange.group.dim
        gradients = _view(memory, self._dtype, self.capacity, dim)
        return gradients, _view(memory[gradients.nbytes :], torch.int32, self.capacity)


def _by_owner(group: DeviceRouteGroup) -> Tensor:
    """int64, one for each destination: unique ids of each owner, then those of rows that all ranks have."""
    return group.look_up.found.counts.sum(1)


def _numbers(group: DeviceRouteGroup) -> Tensor:
    """int64: unique ids by destination and segment, and ids."""
    return group.look_up.found.sizes.flatten()


def _where(sizes: Sequence[int], world_size: int) -> np.ndarray:
    """The layout of a send buffer, given the number of entries for each rank and for all of them: int64 `[W, 4]`.

    >>> _where([3, 0, 2], 2).tolist()
    [[0, 3, 5, 2], [3, 0, 5, 2]]
    """
    *begins, total = accumulate(sizes, initial=0)
    copies = sum(sizes[world_size:])
    return np.array([(begins[rank], sizes[rank], total, copies) for rank in range(world_size)], np.int64)


def _view(memory: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """The beginning of uint8 memory as something else."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[:num_bytes].view(dtype).view(shape)


def _requests(group: DeviceRouteGroup) -> Requests:
    """The requests of a batch, for rows of all kinds."""
    (requests,) = group.opened_as(Lanes).requests
    return requests
