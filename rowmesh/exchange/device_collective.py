"""Collective transport of devices: what `rowmesh.exchange.collective` does, over tensors on devices.

A batch has one round for the counts of all groups, after which one copy brings them to the host, for each group one
round for the keys, one for the rows and one for the gradients, and as many for rows with copies. Beside that the hosts
compare over gloo what they are about to do: if a rank does something else, all raise and name it, and no device waits
for it. Fetched rows and this rank's own copies are written into one buffer, which pooling reads; copies are gathered
while the other rows travel. Rows planned for two hops go in one.

Source: FusedRec §3, Algorithm 1, lines 4–6.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.device_group import DeviceGroupExchange, DeviceRouteGroup
from rowmesh.exchange.device_lanes import CopiesLane, Lane, Lanes, Merging, NodeLane, Requests, spread
from rowmesh.exchange.device_micro_batch import DeviceMicroBatchWindows, OnDevice
from rowmesh.exchange.handshake import Handshake, Step, after_hearing
from rowmesh.exchange.route import Routed
from rowmesh.exchange.transport import Meanwhile, Transport, check_everywhere
from rowmesh.exchange.windows import StoredTables, WindowOptions, Windows
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel, Message
from rowmesh.mesh.waiting import barrier
from rowmesh.tables.update_rules import Update

_COUNTING = "exchanging counts"


class DeviceCollective(Transport[DeviceGroupExchange]):
    """torch.distributed over NCCL, or over gloo where ranks share a device. Making one is collective.

    Attributes:
        reason: which, and why.
        channel: between the devices.
    """

    name = "collective"

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.channel = Channel.between_devices(mesh, device)
        super().__init__(self.channel.reason)
        self._mesh, self._device = mesh, device
        self._num_fetches = self._num_pushes = 0
        self._by_lanes: tuple[list[list[Requests]], list[list[Tensor]]] = [], []  # of the push under way
        self._most, self._is_equal = 0, False

    def connect(self, exchanges: Sequence[DeviceGroupExchange]) -> None:
        """Prepares the message that opens every fetch and push."""
        per_node, between = self._mesh.ranks_per_node, None
        if any("node" in exchange.lane_kinds for exchange in exchanges):
            places = [range(place, self._mesh.world_size, per_node) for place in range(per_node)]
            between = Channel.between_devices(self._mesh.part(places), self._device)
        self._groups = [DeviceGroup(exchange, self.channel, per_node, between) for exchange in exchanges]
        self._lanes = [lane for group in self._groups for lane in group.lanes]
        self._copies = [lane for lane in self._lanes if isinstance(lane, CopiesLane)]
        self._hosts = Channel.between_hosts(self._mesh)
        # Which fetch or push this is; then how many routes are pushed, which, and of how many rows there are sums.
        self._handshake = Handshake(self._mesh, self._hosts, 3 + len(self._copies), self.common)
        self.barrier()

    def windows(self, tables: StoredTables, options: WindowOptions) -> Windows:
        """See `Transport.windows`."""
        if any(group.exchange.is_tiered for group in self._groups):
            return Windows(tables, options, "owners prefetch tiered rows when they are asked for them")
        if any("node" in group.exchange.lane_kinds for group in self._groups):
            return Windows(tables, options, "the plan relays rows, from host to host")
        groups = [OnDevice(group.exchange, group.lanes, self.channel, options.form) for group in self._groups]
        return DeviceMicroBatchWindows(
            tables,
            options,
            groups,
            self._hosts,
            self.common,
            expect=self._exchange_counts,
            count_copies=self._learn_copies,
        )

    def fetch(self, route: Routed, meanwhile: Meanwhile) -> None:
        """Sends requests to the owners and receives their rows.

        Raises:
            IdRangeError: a batch of this rank has ids that are no rows.
            PeerError: one of another rank has.
        """
        self._num_fetches += 1
        self._handshake(self._num_fetches)
        self._exchange_counts(route)
        for group in route.groups:
            group.look_up.compose()
        pairs = list(zip(self._groups, route.groups, strict=True))
        keys = [messages.post_keys(group) for messages, group in pairs]
        copied = [messages.post_copied_keys(group) for messages, group in pairs]
        rows = [[messages.post_rows(group, work)] for (messages, group), work in zip(pairs, keys, strict=True)]
        for (messages, group), works, coming in zip(pairs, copied, rows, strict=True):
            coming += messages.read_copies(group, works)
            meanwhile(group)
            if torch.is_grad_enabled():
                messages.merge_requests(group)
        for (messages, group), coming in zip(pairs, rows, strict=True):
            messages.take_rows(group, coming)

    def _exchange_counts(self, route: Routed) -> None:
        """Learns the sizes of all messages: the only time that the host waits for the device."""
        size = self._mesh.world_size
        assert route.late is not None
        refused = route.late.refused.expand(size, 1)
        counts = [part for group in route.groups for part in (group.look_up.found.counts, group.look_up.found.accesses)]
        mine = torch.cat([refused, *counts], 1)
        theirs = self.channel.exchange_equal(mine, self.common, _COUNTING)
        numbers = torch.cat([mine.flatten(), theirs.flatten(), route.late.outside]).cpu().numpy()
        sent, asked = numbers[: 2 * mine.numel()].reshape(2, size, -1)
        check_everywhere(route, self._mesh, numbers[2 * mine.numel() :].tolist(), asked[:, 0].tolist())
        between = 1
        for messages, group in zip(self._groups, route.groups, strict=True):
            part = slice(between, between + 2 * group.exchange.num_segments)
            messages.expect(group, *(numbers[:, part].reshape(size, 2, -1) for numbers in (sent, asked)))
            between = part.stop

    def prepare(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Sorts what is pushed by lanes."""
        self._by_lanes = self._by_lane(routes)
        self._pushed = routes, updates, step

    def agree(self, step: Step, refusal: Exception | None) -> Exception | None:
        """Compares what ranks push, and whether they can."""
        routes, requests = (), []
        if refusal is None:
            assert self._pushed is not None
            routes, requests = self._pushed[0], self._by_lanes[0]
        try:
            self._most, self._is_equal, heard = self._compare(routes, requests, step, refusal)
        except ConfigurationError as error:
            heard = refusal or error
        return heard

    def apply(self) -> None:
        """Sends gradients to the owners, which merge them in the order of the ranks and update."""
        assert self._pushed is not None
        (requests, gradients), (_, updates, _), most = self._by_lanes, self._pushed, self._most
        is_equal = self._is_equal
        self.withdraw()
        if not is_equal:
            self._ask_again(requests, gradients, most)
        if not most:
            return
        works = [
            lane.post_gradients(each, sums) for lane, each, sums in zip(self._lanes, requests, gradients, strict=True)
        ]
        merged = self._merged(requests)
        if self._copies and not (is_equal and most == 1):
            self._count_copies(merged)
        of_lanes = (update for group, update in zip(self._groups, updates, strict=True) for _ in group.lanes)
        for lane, each, merging, work, update in zip(self._lanes, requests, merged, works, of_lanes, strict=True):
            lane.push(each, merging, work, update)

    def withdraw(self) -> None:
        """Forgets what was prepared."""
        super().withdraw()
        self._by_lanes = [], []

    def _by_lane(self, routes: Sequence[Routed]) -> tuple[list[list[Requests]], list[list[Tensor]]]:
        """Requests and gradients of routes; for each lane a list, one item a route."""
        requests: list[list[Requests]] = [[] for _ in self._lanes]
        gradients: list[list[Tensor]] = [[] for _ in self._lanes]
        for route in routes:
            groups = zip(self._groups, route.groups, strict=True)
            pairs = [pair for messages, group in groups for pair in messages.pushed(group)]
            for lane, (each, sums) in enumerate(pairs):
                requests[lane].append(each)
                gradients[lane].append(sums)
        return requests, gradients

    def _compare(
        self,
        routes: Sequence[Routed],
        requests: Sequence[list[Requests]],
        step: Step,
        refusal: Exception | None,
    ) -> tuple[int, bool, Exception | None]:
        """The most routes that a rank pushes, whether all ranks push the same ones, and why none may.

        If all push one and the same route, the counts of copied rows in this message are right.
        """
        self._num_pushes += 1
        mine = [len(routes), hash(tuple(route.number for route in routes))]
        copies = self._num_copies(self._merged(requests)) if len(routes) == 1 else []
        rows = self._handshake(-self._num_pushes, step, [np.array([[*mine, *copies]])], refuses=refusal is not None)
        if (refusal := after_hearing(self._mesh, rows[:, 0].tolist(), refusal)) is not None:
            return 0, False, refusal
        self._take_counts(rows[:, 3:])
        pushed = rows[:, 1:3].tolist()
        return max(count for count, _ in pushed), pushed.count(mine) == len(pushed), None

    def _merged(self, requests: Sequence[list[Requests]]) -> list[Merging]:
        return [lane.merged(each) for lane, each in zip(self._lanes, requests, strict=True)]

    def _num_copies(self, merged: Sequence[Merging]) -> list[int]:
        """Copied rows that this rank, their owner, will have sums of."""
        return [each.count for lane, each in zip(self._lanes, merged, strict=True) if lane in self._copies]

    def _learn_copies(self, requests: Sequence[Requests]) -> None:
        """Learns how many sums each rank will send, given the merged requests lane by lane."""
        self._count_copies(self._merged([[each] for each in requests]))

    def _count_copies(self, merged: Sequence[Merging]) -> None:
        """Learns how many sums each rank will send, where that was not known when they compared what they push."""
        nums = torch.tensor([self._num_copies(merged)] * self._mesh.world_size, dtype=torch.int64, device="cpu")
        self._take_counts(self._hosts.exchange_equal(nums, self.common, _COUNTING).numpy())

    def _take_counts(self, counts: np.ndarray) -> None:
        for lane, of_ranks in zip(self._copies, counts.T.tolist(), strict=True):
            lane.expect(of_ranks)

    def _ask_again(self, requests: Sequence[list[Requests]], gradients: Sequence[list[Tensor]], most: int) -> None:
        """Makes all ranks push equally many routes: they send their requests once more, or none where they have none.

        Owners know the requests of the look-ups, but not which of them each rank pushes. It happens seldom.
        """
        for lane, each, sums in zip(self._lanes, requests, gradients, strict=True):
            missing = most - len(each)
            each += [lane.nothing() for _ in range(missing)]
            sums += [lane.no_gradients() for _ in range(missing)]
        numbered = [(lane, each) for lane, of_lane in zip(self._lanes, requests, strict=True) for each in of_lane]
        sent = [np.column_stack([each.sent, each.ids_sent]) for _, each in numbered]
        ends = list(accumulate(part.shape[1] for part in sent))
        asked = self._hosts.exchange_equal(torch.from_numpy(np.hstack(sent)), self.common, _COUNTING).numpy()
        for (lane, each), part in zip(numbered, np.split(asked, ends[:-1], 1), strict=True):
            each.ask_again(part[:, 0].tolist(), part[:, 1:])
            lane.take_keys(each, lane.post_keys(each))

    def barrier(self) -> None:
        """Waits for all ranks, and for what their devices do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        barrier(self._mesh, "waiting at a barrier")


class DeviceGroup:
    """The messages of one group.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G: gradients are summed node by node.
        between: the ranks with this one's place in their nodes, where rows have one copy a node.

    Attributes:
        lanes: of rows that owners send; then those of rows with copies, where there are any.
    """

    def __init__(
        self,
        exchange: DeviceGroupExchange,
        everyone: Channel,
        ranks_per_node: int,
        between: Channel | None = None,
    ) -> None:
        from rowmesh.ops.gather import cuda as gather

        self.exchange, self._everyone = exchange, everyone
        self._gather = gather.gather
        self._doing = f"exchanging group {exchange.group.name}"
        how = (exchange, everyone, ranks_per_node)
        self.lanes = [Lane(*how)]
        if "node" in exchange.lane_kinds:
            assert between is not None
            self.lanes.append(NodeLane(*how, between))
        if "replicated" in exchange.lane_kinds:
            self.lanes.append(CopiesLane(*how))

    def expect(self, group: DeviceRouteGroup, sent: np.ndarray, asked: np.ndarray) -> None:
        """Takes the sizes of the requests to and from each rank, keys and ids by segment: int64 `[W, 2, S′]` each."""
        address_map, num_tables = self.exchange.address_map, len(self.exchange.group.tables)
        cuts = [address_map.segments({kind}).start for kind in self.exchange.lane_kinds[1:]]
        by_lane = [np.split(numbers, cuts, 2) for numbers in (sent, asked)]
        sizes_out, sizes_in = ([part[:, 0].sum(1).tolist() for part in parts] for parts in by_lane)
        ids_out, ids_in = (
            [part[:, 1].reshape(len(part), -1, num_tables).sum(1) for part in parts] for parts in by_lane
        )
        num_unique = int(sent[:, 0].sum())
        self.exchange.counters.add_unique(num_unique)
        keys, uniques = self._lane_by_lane(group, num_unique, sizes_out)
        group.look_up.ask(num_unique, uniques)
        parts = keys.split([sum(sizes) for sizes in sizes_out])
        requests = [
            Requests(part, to_each, from_each, part[:0], *ids)
            for part, to_each, from_each, *ids in zip(parts, sizes_out, sizes_in, ids_out, ids_in, strict=True)
        ]
        group.keep(Lanes(requests))

    def _lane_by_lane(
        self, group: DeviceRouteGroup, num_unique: int, sizes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Keys, sorted by rank before, lane by lane; and the unique id of each."""
        keys, uniques = group.look_up.found.keys[:num_unique], group.look_up.found.uniques[:num_unique]
        if len(sizes) > 1:
            by_rank = [size for of_rank in zip(*sizes, strict=True) for size in of_rank]
            begins = list(accumulate(by_rank, initial=0))[:-1]
            order = spread(_by_lane(begins, len(sizes)), _by_lane(by_rank, len(sizes)), keys.device)
            keys, uniques = keys[order], uniques[order]
        return keys, uniques

    def post_keys(self, group: DeviceRouteGroup) -> Message:
        """Sends requests to the owners."""
        return self.lanes[0].post_keys(_requests(group)[0])

    def post_copied_keys(self, group: DeviceRouteGroup) -> list[Message]:
        """Sends requests for rows with copies to the ranks that will add up their gradients."""
        return [lane.post_keys(each) for lane, each in zip(self.lanes[1:], _requests(group)[1:], strict=True)]

    def post_rows(self, group: DeviceRouteGroup, keys: Message) -> Message:
        """Replies to the requests, once they are here."""
        direct, table = _requests(group)[0], self.exchange.arena.rows
        self.lanes[0].take_keys(direct, keys)
        group.look_up.read_from(table.new_empty(group.num_unique, table.shape[1]))
        into, rows = group.look_up.source[: sum(direct.sent)], self._gather(table, direct.slots)
        return self._post_rows(rows, direct, into)

    def _post_rows(self, rows: Tensor, requests: Requests, into: Tensor) -> Message:
        counters, wire = self.exchange.counters, self.exchange.row_wire
        return self._everyone.post(rows, requests.asked, requests.sent, counters, self._doing, into, wire=wire)

    def read_copies(self, group: DeviceRouteGroup, keys: Sequence[Message]) -> list[Message]:
        """Puts rows with copies beside the other fetched rows: own copies at once, those of other ranks by messages."""
        messages, table, requests = [], self.exchange.arena.rows, _requests(group)
        _, *places = group.look_up.source.split([len(each.keys) for each in requests])
        for lane, each, message, into in zip(self.lanes[1:], requests[1:], keys, places, strict=True):
            lane.take_keys(each, message)
            if lane.replies:
                messages.append(self._post_rows(self._gather(table, each.slots), each, into))
            else:
                self._gather(table, each.keys, into)
        return messages

    def merge_requests(self, group: DeviceRouteGroup) -> None:
        """Merges the requests, for the update; may run while rows travel."""
        for lane, each in zip(self.lanes, _requests(group), strict=True):
            lane.merged([each])

    def take_rows(self, group: DeviceRouteGroup, rows: Sequence[Message]) -> None:
        """Waits for rows, which pooling then reads."""
        for message in rows:
            message.wait()
        group.look_up.read_at(None)

    def pushed(self, group: DeviceRouteGroup) -> list[tuple[Requests, Tensor]]:
        """Requests and gradients of a route, lane by lane."""
        requests = _requests(group)
        gradients = group.look_up.summed.split([len(each.keys) for each in requests])
        return list(zip(requests, gradients, strict=True))


def _requests(group: DeviceRouteGroup) -> list[Requests]:
    """The requests of a group of a route, lane by lane."""
    return group.opened_as(Lanes).requests


def _by_lane(numbers: Sequence[int], num_lanes: int) -> list[int]:
    """Numbers that stand rank by rank, and for each rank lane by lane, in the order of the lanes.

    >>> _by_lane([1, 2, 3, 4], 2)
    [1, 3, 2, 4]
    """
    return [number for lane in range(num_lanes) for number in numbers[lane::num_lanes]]
