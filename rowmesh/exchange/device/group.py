"""What the collective transport of a device does for one group: keys, rows and gradients as all-to-alls.

Keys of rows that their homes send go in one lane, those of rows with a copy on every node or every rank in others.
Fetched rows and copies of this rank's own are brought together, so that pooling reads all at one place; copies are
gathered while the others travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from rowmesh.exchange.device.copies import CopiesLane, spread
from rowmesh.exchange.device.lane import Lane, Requests
from rowmesh.exchange.device.nodes import NodeLane
from rowmesh.exchange.device.route import DeviceExchange, DeviceRouteGroup, places_in
from rowmesh.mesh.channel import Channel, Message


class DeviceGroup:
    """One group's messages.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G: gradients are summed node by node.
        column: the ranks with this one's place in their nodes, where rows have one copy a node.

    Attributes:
        lanes: of rows that homes send; then those of rows with copies, where there are any.
    """

    def __init__(
        self, exchange: DeviceExchange, everyone: Channel, ranks_per_node: int,
        column: Channel | None = None,
    ) -> None:  # fmt: skip
        from rowmesh.ops.gather import cuda as gather

        self.exchange, self._everyone = exchange, everyone
        self._gather = gather.gather
        self._doing = f"exchanging group {exchange.group.name}"
        how = (exchange, everyone, ranks_per_node)
        self.lanes = [Lane(*how)]
        if "node" in exchange.lane_kinds:
            assert column is not None
            self.lanes.append(NodeLane(*how, column))
        if "replicated" in exchange.lane_kinds:
            self.lanes.append(CopiesLane(*how))

    def expect(self, group: DeviceRouteGroup, sent: np.ndarray, asked: np.ndarray) -> None:
        """Takes what this rank asks and is asked for, keys and ids by rank and segment: int64 `[W, 2, S′]` each."""
        address_map, num_tables = self.exchange.address_map, len(self.exchange.group.tables)
        cuts = [address_map.segments({kind}).start for kind in self.exchange.lane_kinds[1:]]
        by_lane = [np.split(numbers, cuts, 2) for numbers in (sent, asked)]
        sizes_out, sizes_in = ([part[:, 0].sum(1).tolist() for part in parts] for parts in by_lane)
        ids_out, ids_in = (
            [part[:, 1].reshape(len(part), -1, num_tables).sum(1) for part in parts] for parts in by_lane
        )  # fmt: skip
        group.num_unique = int(sent[:, 0].sum())
        self.exchange.counters.unique_ids += group.num_unique
        keys, group.uniques = self._lane_by_lane(group, sizes_out)
        parts = keys.split([sum(sizes) for sizes in sizes_out])
        group.lanes = [
            Requests(part, to_each, from_each, part[:0], *ids)
            for part, to_each, from_each, *ids in zip(parts, sizes_out, sizes_in, ids_out, ids_in, strict=True)
        ]

    def _lane_by_lane(self, group: DeviceRouteGroup, sizes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Keys lane by lane, which were sorted by rank, and for which unique id each is."""
        keys, uniques = group.routed.keys[: group.num_unique], group.routed.uniques[: group.num_unique]
        if len(sizes) > 1:
            by_rank = [size for of_rank in zip(*sizes, strict=True) for size in of_rank]
            begins = list(accumulate(by_rank, initial=0))[:-1]
            order = spread(_by_lane(begins, len(sizes)), _by_lane(by_rank, len(sizes)), keys.device)
            keys, uniques = keys[order], uniques[order]
        return keys, uniques

    def post_keys(self, group: DeviceRouteGroup) -> Message:
        """Tells the homes which rows are needed."""
        return self.lanes[0].post_keys(group.lanes[0])

    def post_copied_keys(self, group: DeviceRouteGroup) -> list[Message]:
        """Tells those who add gradients up which rows with copies are needed."""
        return [lane.post_keys(each) for lane, each in zip(self.lanes[1:], group.lanes[1:], strict=True)]

    def post_rows(self, group: DeviceRouteGroup, keys: Message) -> Message:
        """Replies, once it is here, to what was asked."""
        self.lanes[0].take_keys(group.lanes[0], keys)
        table = self.exchange.arena.rows
        group.source = table.new_empty(group.num_unique, table.shape[1])
        into, rows = group.source[: sum(group.sent)], self._gather(table, group.requests)
        return self._everyone.post(rows, group.asked, group.sent, self.exchange.counters, self._doing, into)

    def read_copies(self, group: DeviceRouteGroup, keys: Sequence[Message]) -> list[Message]:
        """Brings rows with copies to those that are under way: those of this rank at once, the others by messages."""
        messages, table, counters = [], self.exchange.arena.rows, self.exchange.counters
        _, *places = group.source.split([len(each.keys) for each in group.lanes])
        for lane, each, message, into in zip(self.lanes[1:], group.lanes[1:], keys, places, strict=True):
            lane.take_keys(each, message)
            if lane.replies:
                rows = self._gather(table, each.slots)
                messages.append(self._everyone.post(rows, each.asked, each.sent, counters, self._doing, into))
            else:
                self._gather(table, each.keys, into)
        return messages

    def merge_requests(self, group: DeviceRouteGroup) -> None:
        """Merges what was asked, for the update; may run while rows travel."""
        for lane, each in zip(self.lanes, group.lanes, strict=True):
            lane.merged([each])

    def take_rows(self, group: DeviceRouteGroup, rows: Sequence[Message]) -> None:
        """Makes what came what is pooled."""
        for message in rows:
            message.wait()
        group.slots = None

    def pushed(self, group: DeviceRouteGroup) -> list[tuple[Requests, Tensor]]:
        """What a route asked for, and the gradients of it, lane by lane."""
        gradients = group.summed.split([len(each.keys) for each in group.lanes])
        return list(zip(group.lanes, gradients, strict=True))


def compose(group: DeviceRouteGroup) -> None:
    """Has ids read the rows that were fetched, which stand in the order in which they were asked for: sorted."""
    group.order = group.uniques
    group.recover = places_in(group.order).index_select(0, group.unique.inverse)


def _by_lane(numbers: Sequence[int], num_lanes: int) -> list[int]:
    """What stands rank by rank, of each rank lane by lane, lane by lane.

    >>> _by_lane([1, 2, 3, 4], 2)
    [1, 3, 2, 4]
    """
    return [number for lane in range(num_lanes) for number in numbers[lane::num_lanes]]
